"""Registers that a lane may read before it writes them: found in the text, then watched.

A register is *unsure* if some path through the kernel reads it and has not written it before. The
result of a guarded instruction counts as not written. Few kernels have an unsure register, so only
steps that name one are watched: they record, lane by lane, whether it has a value.

Copies of a register that has no value are no fault, because compilers move values that no later
instruction needs. The copy has no value then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from cupyattn.interpret.module import Instruction
from cupyattn.interpret.registers import Indices, executing, read, registers_in
from cupyattn.interpret.semantics import Step

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

_ENDS = ("ret", "exit")
_COPIES = ("mov", "selp")


def registers_of(
    instructions: Sequence[Instruction], named: Sequence[Indices], starts: Sequence[int]
) -> dict[int, int]:
    """Return the registers to watch, by index, and number them.

    Parameters
    ----------
    instructions : sequence of Instruction
        Of a kernel.
    named : sequence of Indices
        The registers of each.
    starts : sequence of int
        Rising indices of instructions, among them 0, all targets, and what follows a branch.

    Returns
    -------
    dict of int to int
        The unsure registers, and all registers that receive copies of them.
    """
    blocks = list(pairwise((*starts, len(instructions))))
    found = [_of_block(instructions[slice(*x)], named[slice(*x)]) for x in blocks]
    number = {index: bit for bit, index in enumerate(set().union(*(first for first, _ in found)))}

    def bits(indices: set[int]) -> int:
        return sum(1 << number[index] for index in indices & number.keys())

    # Registers that all paths to a block have written, as the bits of an int; -1: no path so far.
    arrived = [-1 if start else 0 for start, _ in blocks]
    place = {start: block for block, (start, _) in enumerate(blocks)}
    gained = [bits(result) for _, result in found]
    following = [
        [place[start] for start in _successors(instructions[stop - 1], stop) if start in place]
        for _, stop in blocks
    ]
    changed = True
    while changed:
        changed = False
        for block, successors in enumerate(following):
            for successor in successors:
                before = arrived[successor]
                arrived[successor] &= arrived[block] | gained[block]
                changed = changed or arrived[successor] != before
    unsure = 0
    for known, (first, _) in zip(arrived, found, strict=True):
        unsure |= bits(first) & ~known
    watch = {index for index, bit in number.items() if unsure >> bit & 1}
    copies = [names for x, names in zip(instructions, named, strict=True) if x.opcode in _COPIES]
    while watch and (receivers := {x for to, of in copies if watch & {*of} for x in to} - watch):
        watch |= receivers
    return {index: row for row, index in enumerate(sorted(watch))}


def _of_block(
    instructions: Sequence[Instruction], named: Sequence[Indices]
) -> tuple[set[int], set[int]]:
    """Return the registers that a block reads before it writes them, and all that it writes."""
    first: set[int] = set()
    result: set[int] = set()
    for one, (results, sources) in zip(instructions, named, strict=True):
        first.update(index for index in sources if index not in result)
        if one.predicate is None:
            result.update(results)
    return first, result


def _successors(last: Instruction, stop: int) -> Iterator[int]:
    if last.target is not None:
        yield last.target
    if last.predicate is not None or (last.target is None and last.opcode not in _ENDS):
        yield stop


def watched(step: Step, names: Indices, rows: Mapping[int, int]) -> Step:
    """Return a step that first checks whether its registers have values, and then records them."""
    inst, (results, read_here) = step.instruction, names
    if not step.modelled or rows.keys().isdisjoint((*results, *read_here)):
        return step
    copied = inst.operands[1 : 2 if inst.opcode == "mov" else 3] if inst.opcode in _COPIES else ()
    parts = [registers_in(x) for x in copied]
    sources = [x for part in parts for x in part]
    needed = [(x, rows[x.index]) for x in read(inst) if x.index in rows and x not in sources]
    changed = [rows[index] for index in results if index in rows]
    moved = [rows[x.index] for x in sources if x.index in rows]
    has_value = not moved or len(moved) < len(sources) or not all(parts)

    def execute(machine: Machine, lanes: Lanes) -> None:
        known, here = machine.known, executing(machine, inst, lanes)
        for register, row in needed:
            missing = (lanes if register == inst.predicate else here).mask & ~known[row]
            if missing.any():
                message = f"register {register.name} is read, and this lane has not written it"
                machine.report("never written", message, machine.lane, missing)
        step.execute(machine, lanes)
        values = here.mask if has_value else here.mask & known[moved].any(axis=0)
        for row in changed:
            known[row] = (known[row] & ~here.mask) | values

    return step._replace(execute=execute)
