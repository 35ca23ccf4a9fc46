"""Stop at a source line, and show everything that is visible to the lanes there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.findings import short
from cupyattn.interpret.members import Member, members_of
from cupyattn.interpret.observer import Observer
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Instruction, Register
from cupyattn.interpret.registers import read, value, written

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.observer import Started
    from cupyattn.interpret.program import Program


class Stop:
    """Some lanes have just run the instructions of a line.

    Attributes
    ----------
    kernel : str
        Entry point.
    line : str
        ``"attn_fa.cu:83"``.
    instructions : tuple of str
        PTX text of the adjacent instructions of that line that the lanes ran last.
    block, warp, lane : numpy.ndarray of int
        Position of each stopped lane; warps are numbered within their block.
    blocks : numpy.ndarray of int
        The different numbers in `block`, rising.
    registers : dict of str to numpy.ndarray
        Registers that those instructions read or wrote, by their PTX name, with one value for each
        of the lanes: in their declared type, ``.b32`` as uint32; ``view`` reinterprets the bits.
    shared : dict of str to numpy.ndarray
        Members of the kernel's ``SharedStorage``, with one more leading axis: `blocks`. Empty for a
        kernel without such a struct. Unwritten memory is 0. Data of an asynchronous copy appear
        only after the wait, and mbarriers do not show their state.
    arrays : dict of str to numpy.ndarray
        Current contents of global arrays.

    All arrays are read-only copies. `shared` and `arrays` are made at first use, so read them in
    the callback.
    """

    def __init__(
        self,
        machine: Machine,
        lanes: Lanes,
        line: str,
        instructions: tuple[Instruction, ...],
        members: Callable[[], tuple[Member, ...]],
    ) -> None:
        self.kernel = machine.program.kernel.name
        self.line = line
        self.instructions = tuple(one.text for one in instructions)
        here = lanes.index
        self.block: Ints = machine.first_block + here // machine.threads
        self.warp: Ints = here % machine.threads // WARP
        self.lane: Ints = here % WARP
        self.blocks: Ints = distinct(self.block)
        named: dict[str, Register] = {}
        for one in instructions:
            named |= {r.name: r for r in (*written(one), *read(one))}
        self.registers = {name: _fixed(value(machine, r)[here]) for name, r in named.items()}
        self._machine: Machine | None = machine
        self._members = members

    @cached_property
    def shared(self) -> dict[str, npt.NDArray[Any]]:
        """Members of the shared memory of every block in `blocks`."""
        machine = self._alive("shared")
        # Dynamic shared memory, with SharedStorage, follows the variables of fixed size.
        first = machine.program.shared_bytes
        data = machine.shared.data.reshape(machine.blocks, -1)[self.blocks - machine.first_block]
        found = {}
        for m in self._members():
            member = data[:, first + m.offset :][:, : m.nbytes].copy().view(m.dtype)
            found[m.name] = _fixed(member.reshape(-1, *m.shape))
        return found

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Global arrays."""
        machine = self._alive("arrays")
        variables = machine.program.variables
        return {
            array.name: _fixed(array.elements.copy())
            for array in machine.memory.arrays
            if array.name not in variables
        }

    def __str__(self) -> str:
        return f"{self.kernel} at {self.line}: {self._who()}"

    def _who(self) -> str:
        warps = len(distinct(self.block * 2**16 + self.warp))
        return (
            f"block {_ranges(self.blocks)}, warp {_ranges(distinct(self.warp))}, "
            f"lane {_ranges(distinct(self.lane))} ({len(self.lane)} lanes of {warps} warps)"
        )

    def _alive(self, what: str) -> Machine:
        if self._machine is None:
            raise RuntimeError(f"the kernel has gone on: read .{what} within the callback")
        return self._machine


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _ranges(numbers: Ints) -> str:
    """Return rising numbers as text: ``0-3, 5``."""
    runs = _neighbours(numbers)
    return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _neighbours(numbers: Ints) -> list[Ints]:
    """Split rising numbers into runs of consecutive numbers."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)


class Break(Observer):
    """Calls back at a source line: an observer for `cupyattn.interpret.observer`.

    Parameters
    ----------
    file : str
        ``"attn_fa.cu"``, ``"prims/score/score.cuh"`` or ``"score.cuh"``.
    line : int
    callback : callable
        Called with a `Stop` each time a group of lanes has run adjacent instructions of that line,
        or of code inlined into it. An exception ends the run.

    Notes
    -----
    The compiler spreads a line over the code, so one line may mean several stops.
    Branches and barriers end a stop; a stop at a barrier is the arrival there.
    """

    def __init__(self, file: str, line: int, callback: Callable[[Stop], object]) -> None:
        self.file, self.line, self.callback = file, line, callback
        self.stops = 0
        self._found = False
        self._kernels: set[str] = set()
        self._known: set[tuple[str, int]] = set()
        self._runs: dict[int, tuple[int, int]] = {}

    def launch(self, one: Started, program: Program, arch: str) -> None:
        """Find the line in a kernel."""
        here = []
        self._kernels.add(program.kernel.name)
        for index, step in enumerate(program.steps):
            location = step.instruction.location
            places = set() if location is None else _places(location.chain())
            self._known |= places
            if any(self._is_file(file) and line == self.line for file, line in places):
                here.append(index)
        self._found |= bool(here)
        self._runs = {
            int(index): (int(run[0]), int(run[-1]))
            for run in _neighbours(np.array(here, np.intp))
            for index in run
        }
        self._members = lambda: members_of(one, program, arch)

    def after(self, machine: Machine, lanes: Lanes) -> None:
        """Call back at the last of neighbouring instructions."""
        found = self._runs.get(machine.place)
        if found is None:
            return
        start, last = found
        steps = machine.program.steps
        if machine.place != last and not steps[machine.place].leaves:
            return
        instructions = tuple(s.instruction for s in steps[start : machine.place + 1])
        stop = Stop(machine, lanes, f"{self.file}:{self.line}", instructions, self._members)
        self.stops += 1
        try:
            self.callback(stop)
        finally:
            stop._machine = None

    def finish(self) -> None:
        """Raise if no kernel has such a line."""
        if self._found or not self._kernels:
            return
        if not self._known:
            raise ValueError(
                f"the PTX of {', '.join(sorted(self._kernels))} has no line information, so that "
                f"nothing can stop at {self.file}:{self.line}: compile with -lineinfo"
            )
        lines = sorted(line for file, line in self._known if self._is_file(file))
        if not lines:
            files = ", ".join(sorted({file for file, _ in self._known}))
            raise ValueError(f"no kernel has instructions of {self.file!r}, only of {files}")
        near = sorted(sorted(set(lines), key=lambda line: abs(line - self.line))[:4])
        raise ValueError(
            f"no instruction comes from {self.file}:{self.line}: the nearest lines with some are "
            f"{', '.join(map(str, near))}"
        )

    def _is_file(self, file: str) -> bool:
        return file == self.file or file.endswith(f"/{self.file}")


def _places(chain: Any) -> set[tuple[str, int]]:
    return {(short(place.file), place.line) for place in chain if place.line}
