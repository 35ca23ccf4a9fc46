"""Costs of a run: instructions by kind, bytes by memory, bank conflicts by source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.interpret import banks
from cupyattn.interpret.access import address_reader
from cupyattn.interpret.findings import short
from cupyattn.interpret.memory import WINDOWS
from cupyattn.interpret.observer import Observer
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Instruction, Location
from cupyattn.interpret.registers import executing
from cupyattn.interpret.semantics import access_width
from cupyattn.interpret.warp import matrix_tiles

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.observer import Started
    from cupyattn.interpret.program import Program

#: Returns the addresses of an access to shared memory, and their lanes.
_Fetch = Callable[["Machine", "Lanes"], tuple[Ints, Ints]]


@dataclass
class SharedAccess:
    """Accesses of one source line to shared memory by one kind of instruction.

    Parameters
    ----------
    line : str
        The line of the kernel: ``attn_fa.cu:51``.
    inner : str
        The line of the access itself, if it was inlined: ``mma.cuh:24``.
    opcode : str
        ``ld``, ``st``, ``ldmatrix``, ``stmatrix``, or ``cp`` for the destination of ``cp.async``.
    accesses : int
        Warp instructions.
    passes : int
        Passes of shared memory to serve them (`cupyattn.interpret.banks`).
    fewest : int
        Passes without bank conflicts.
    """

    line: str
    inner: str
    opcode: str
    accesses: int = 0
    passes: int = 0
    fewest: int = 0

    @property
    def excess(self) -> int:
        """Additional passes due to bank conflicts."""
        return self.passes - self.fewest


@dataclass
class KernelProfile:
    """The launches of one kernel.

    Parameters
    ----------
    kernel : str
        Entry point.
    launches, blocks : int
        Number of launches and blocks that ran.
    instructions : Counter of str
        Number of warps that executed each instruction, by name (``"fma.rn.f32"``).
    traffic : Counter of (str, str)
        Bytes by memory (``"global"``, ``"shared"``, ``"local"``, ``"param"``) and direction
        (``"load"``, ``"store"``, ``"atomic"``; ``"copy"`` for what ``cp.async`` writes).
    accesses : dict
        Accesses to shared memory, by line, inner line and opcode.
    """

    kernel: str
    launches: int = 0
    blocks: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    accesses: dict[tuple[str, str, str], SharedAccess] = field(default_factory=dict)

    @property
    def kinds(self) -> Counter[str]:
        """Warp instructions by opcode (``"fma"``)."""
        found: Counter[str] = Counter()
        for name, count in self.instructions.items():
            found[name.partition(".")[0]] += count
        return found


class Profile(Observer):
    """Counts instructions and accesses of kernels: an observer for `cupyattn.interpret.observer`.

    Counts are per warp, as in a device's profiler. An instruction counts once for the lanes of a
    warp that execute it together, and once more for lanes that reach it on another path. If a
    finding stops a run, its last segment counts as finished.

    Attributes
    ----------
    kernels : dict of str to KernelProfile
        By entry point, in the order of their first launches.

    Examples
    --------
    >>> import cupyattn.interpret as interpret
    >>> q = np.ones((1, 1, 16, 16), np.float16)
    >>> o, lse, profile = interpret.attention(q, q, q, variant="fa_tc")
    >>> profile.instructions["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] > 0
    True
    >>> profile.excess  # the swizzle leaves no bank conflicts
    0
    """

    def __init__(self) -> None:
        self.kernels: dict[str, KernelProfile] = {}
        self._fetches: dict[int, tuple[int, SharedAccess, _Fetch]] = {}

    # ---- watching --------------------------------------------------------------------------------

    def launch(self, one: Started, program: Program, arch: str) -> None:
        """Prepare to count the accesses of a kernel."""
        self._current = self.kernels.setdefault(one.entry, KernelProfile(one.entry))
        self._current.launches += 1
        self._fetches = {}
        for index, step in enumerate(program.steps):
            found = _shared_access(step.instruction)
            if found is not None:
                key = (*_lines(step.instruction.location), step.instruction.opcode)
                access = self._current.accesses.setdefault(key, SharedAccess(*key))
                self._fetches[index] = found[0], access, found[1]

    def before(self, machine: Machine, lanes: Lanes) -> None:
        """Count the passes of an access to shared memory."""
        found = self._fetches.get(machine.place)
        if found is None:
            return
        width, access, fetch = found
        instruction = machine.program.steps[machine.place].instruction
        address, index = fetch(machine, executing(machine, instruction, lanes))
        if len(index):
            passes, fewest = banks.passes(address, width, index)
            access.accesses += 1 + int(np.count_nonzero(np.diff(index // WARP)))
            access.passes += passes
            access.fewest += fewest

    def batch(self, machine: Machine) -> None:
        """Add the counts of the machine."""
        self._current.blocks += machine.blocks
        self._current.traffic.update(machine.traffic)
        for start, warps in machine.counts.items():
            for _, step in machine.program.segments[start].steps:
                self._current.instructions[step.instruction.name] += warps

    # ---- looking at it ---------------------------------------------------------------------------

    @property
    def instructions(self) -> Counter[str]:
        """Warp instructions of all kernels, by name."""
        return sum((k.instructions for k in self.kernels.values()), Counter())

    @property
    def kinds(self) -> Counter[str]:
        """Warp instructions of all kernels, by opcode."""
        return sum((k.kinds for k in self.kernels.values()), Counter())

    @property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Bytes of all kernels, by memory and direction."""
        return sum((k.traffic for k in self.kernels.values()), Counter())

    def nbytes(self, memory: str) -> int:
        """Return the bytes that moved to and from one memory."""
        return sum(count for (space, _), count in self.traffic.items() if space == memory)

    @property
    def accesses(self) -> list[SharedAccess]:
        """Accesses to shared memory by source line, with most bank conflicts first."""
        found = [a for k in self.kernels.values() for a in k.accesses.values() if a.accesses]
        return sorted(found, key=lambda a: (-a.excess, -a.passes, a.line, a.inner, a.opcode))

    @property
    def excess(self) -> int:
        """Additional passes of shared memory due to bank conflicts."""
        return sum(access.excess for access in self.accesses)

    def __str__(self) -> str:
        lines = [
            f"{k.kernel}: {k.launches} launch{'es' * (k.launches != 1)}, {k.blocks} "
            f"block{'s' * (k.blocks != 1)}, "
            f"{k.instructions.total():,} warp instructions"
            for k in self.kernels.values()
        ]
        moved = ", ".join(f"{s} {d} {n:,}" for (s, d), n in sorted(self.traffic.items()))
        passes = sum(access.passes for access in self.accesses)
        lines += [f"bytes: {moved}"]
        lines += [f"shared memory: {passes:,} passes, {self.excess:,} of them for bank conflicts"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            kernel.kernel: {
                "launches": kernel.launches,
                "blocks": kernel.blocks,
                "instructions": dict(kernel.instructions.most_common()),
                "bytes": {f"{s} {d}": n for (s, d), n in sorted(kernel.traffic.items())},
                "shared_accesses": [
                    {**asdict(a), "excess": a.excess}
                    for a in kernel.accesses.values()
                    if a.accesses
                ],
            }
            for kernel in self.kernels.values()
        }


def _lines(location: Location | None) -> tuple[str, str]:
    """Return the outermost line of an instruction, and the innermost one if it differs."""
    if location is None:
        return "unknown", ""
    places = [f"{short(x.file)}:{x.line}" for x in location.chain()]
    return places[-1], places[0] if len(places) > 1 else ""


def _shared_access(inst: Instruction) -> tuple[int, _Fetch] | None:
    """Return the width of an access to shared memory, and a function that reads its addresses."""
    touched = access_width(inst)
    if touched is None or touched[0] not in ("shared", "generic"):
        return None
    space, width = touched
    if inst.opcode in ("ldmatrix", "stmatrix"):
        tiles = matrix_tiles(inst)
        rows = 8 * tiles[0] if tiles else 0
    elif inst.opcode in ("ld", "st") or (inst.opcode == "cp" and "bulk" not in inst.modifiers):
        rows = WARP
    else:
        return None
    loads = inst.opcode in ("ld", "ldmatrix")
    addresses = address_reader(inst.operands[1 if loads else 0])

    def fetch(machine: Machine, lanes: Lanes) -> tuple[Ints, Ints]:
        index = lanes.index
        index = index[index % WARP < rows]
        address = addresses(machine)[index]
        if space == "generic":
            here = address >> 56 == WINDOWS["shared"] >> 56
            return address[here] - WINDOWS["shared"], index[here]
        return address, index

    return width, fetch
