"""Prepare a kernel: steps instead of text, segments instead of labels, and a memory map."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cupyattn.collector import collector_paused
from cupyattn.interpret import (  # noqa: F401  they fill the table
    access,
    bulk,
    control,
    mbarrier,
    registers,
    scalar,
    semantics,
    unwritten,
    warp,
    wgmma,
    wmma,
)
from cupyattn.interpret.memory import SHARED_BASE
from cupyattn.interpret.ptx import (
    Instruction,
    Kernel,
    Module,
    Variable,
    parse,
)
from cupyattn.interpret.semantics import Execute, Step
from cupyattn.interpret.variables import Extent, extents_of


class Segment(NamedTuple):
    """Steps that run one after the other once the first one runs.

    Parameters
    ----------
    start, stop : int
        Indices of instructions.
    steps : tuple of (int, Step)
        With the index of each.
    """

    start: int
    stop: int
    steps: tuple[tuple[int, Step], ...]


@dataclass(frozen=True, eq=False)
class Program:
    """One kernel.

    Parameters
    ----------
    kernel : Kernel
    steps : tuple of Step
        One for each instruction.
    segments : dict of int to Segment
        By the index of their first instruction.
    variables : dict of str to Variable
        Variables in global and constant memory that it names.
    shared : dict of str to int
        Address of each variable in shared memory.
    shared_bytes : int
        Bytes of all variables except the dynamic one, which follows them.
    local : dict of str to int
        Address of each variable in local memory.
    local_bytes : int
        Bytes of all local variables.
    granules : dict of str to int
        Bytes of the narrowest access to ``"shared"`` and to ``"global"`` memory.
    held : dict of int to int
        Number, from 0, of each register that products of warpgroups hold.
    unsure : dict of int to int
        Number, from 0, of each register that may be read before it is written.
    extents : dict of int to Extent
        Of variables in shared memory that accesses must stay within, by index of the instruction.
    """

    kernel: Kernel
    steps: tuple[Step, ...]
    segments: dict[int, Segment]
    variables: dict[str, Variable]
    shared: dict[str, int]
    shared_bytes: int
    local: dict[str, int]
    local_bytes: int
    granules: dict[str, int]
    held: dict[int, int]
    unsure: dict[int, int]
    extents: dict[int, Extent]


@functools.lru_cache(maxsize=64)
def program(ptx: str, entry: str) -> Program:
    """Prepare a kernel.

    Parameters
    ----------
    ptx : str
        PTX text.
    entry : str
        Entry point.

    Returns
    -------
    Program

    Raises
    ------
    PtxError
        If the text cannot be read.
    ValueError
        If it has no such entry point.
    """
    module = _parsed(ptx)
    if entry not in module.kernels:
        known = ", ".join(module.kernels) or "none at all"
        raise ValueError(f"the PTX has no entry point {entry!r}, only {known}")
    return _prepared(module, module.kernels[entry])


@collector_paused()
def _prepared(module: Module, kernel: Kernel) -> Program:
    held = wgmma.registers_of(kernel.instructions)
    named = list(map(registers.indices, kernel.instructions))
    steps = tuple(
        wgmma.watched(_step(x), names, held)
        for x, names in zip(kernel.instructions, named, strict=True)
    )
    starts = sorted(set(_starts(steps)) - {len(steps)})
    unsure = unwritten.registers_of(kernel.instructions, named, starts)
    if unsure:
        steps = tuple(
            unwritten.watched(*one, unsure) for one in zip(steps, named, strict=True)
        )
    numbered = tuple(enumerate(steps))
    segments = {
        start: Segment(start, stop, numbered[start:stop])
        for start, stop in pairwise((*starts, len(steps)))
    }
    variables = {**module.variables, **kernel.variables}
    used = {name: v for name, v in variables.items() if name in kernel.named}
    shared, shared_bytes = _place(used, "shared", SHARED_BASE)
    local, local_bytes = _place(used, "local", 0)
    constant = {name: v for name, v in used.items() if v.space in ("global", "const")}
    granules = {space: _granule(kernel, space) for space in ("shared", "global")}
    extents = extents_of(
        kernel.instructions, {name: (place, used[name].size) for name, place in shared.items()}
    )
    return Program(
        kernel, steps, segments, constant, shared, shared_bytes - SHARED_BASE, local, local_bytes,
        granules, held, unsure, extents,
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
@collector_paused()
def _parsed(ptx: str) -> Module:
    """Parse a text once for all of its kernels, which are mostly launched one after the other."""
    return parse(ptx)


def entry_points(ptx: str) -> tuple[str, ...]:
    """Return the names of the kernels of a PTX text."""
    return tuple(_parsed(ptx).kernels)


def target_of(ptx: str) -> str:
    """Return the architecture that a PTX text names."""
    return _parsed(ptx).target


def _built(instruction: Instruction) -> Step | Execute | None:
    builder = semantics.BUILDERS.get(instruction.opcode)
    return scalar.arithmetic(instruction) if builder is None else builder(instruction)


def is_modelled(instruction: Instruction) -> bool:
    """Return whether the interpreter knows an instruction with all its modifiers."""
    return _built(instruction) is not None


def _step(instruction: Instruction) -> Step:
    built = _built(instruction)
    if built is None:
        return Step(instruction, semantics.unsupported(instruction), modelled=False)
    step = built if isinstance(built, Step) else Step(instruction, built)
    return semantics.guarded(step)


def _starts(steps: tuple[Step, ...]) -> Iterator[int]:
    """Yield the starts of segments: targets, ends of branches, and instructions of whole warps."""
    yield 0
    for index, step in enumerate(steps):
        if step.instruction.target is not None:
            yield step.instruction.target
        if step.leaves:
            yield index + 1
        if step.together is not None or step.again:
            yield index


def _place(variables: dict[str, Variable], space: str, base: int) -> tuple[dict[str, int], int]:
    """Lay variables out one after the other, dynamic shared memory last; return places and end."""
    places: dict[str, int] = {}
    end = base
    for v in sorted(variables.values(), key=lambda v: v.extern):
        if v.space == space:
            places[v.name] = end = -(-end // v.align) * v.align
            end += v.size
    return places, end


def _granule(kernel: Kernel, space: str) -> int:
    """Return the width of the narrowest access to a space, at most 16 bytes."""
    widths = [16]
    for instruction in kernel.instructions:
        touched = semantics.access_width(instruction)
        if touched is not None and touched[0] in (space, "generic"):
            widths.append(touched[1])
    return min(widths)
