"""Write the instructions of one warp to a text file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

import ml_dtypes
import numpy as np

from cupyattn.interpret.findings import Finding, describe
from cupyattn.interpret.observer import Observer
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ordering import WARP
from cupyattn.interpret.ptx import Instruction, Register
from cupyattn.interpret.registers import executing, read, result_type, value, written

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.observer import Started
    from cupyattn.interpret.program import Program

#: Types of two numbers packed into a register, and the type of one of them.
_PAIRS = {"f16x2": np.dtype(np.float16), "bf16x2": np.dtype(ml_dtypes.bfloat16)}


class Trace(Observer):
    """Writes the instructions of one warp: an observer for `cupyattn.interpret.observer`.

    Parameters
    ----------
    path : str or path
        Text file, written line by line as the kernel runs.
    block, warp, lane : int
        The file has the instructions of any lane of the warp, and the values of the lane.
    limit : int
        Number of lines after which the file ends, except for a finding.

    Notes
    -----
    A line has the source line (with the lines into which it was inlined), the PTX text, and the
    result in hexadecimal and as its type. If an instruction writes no register, the line has its
    sources.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int = 0,
        warp: int = 0,
        lane: int = 0,
        limit: int = 100_000,
    ) -> None:
        for name, number in (("block", block), ("warp", warp), ("lane", lane), ("limit", limit)):
            if number < 0:
                raise ValueError(f"{name} must not be negative, got {number}")
        if lane >= WARP:
            raise ValueError(f"lane must be below {WARP}, got {lane}")
        self.path = Path(path)
        self.block, self.warp, self.lane = block, warp, lane
        self.limit = limit
        self.lines = 0
        self._file: IO[str] | None = None
        self._sizes: list[tuple[int, int]] = []
        self._under_way: tuple[Instruction, str | None] | None = None

    def start(self) -> None:
        """Open the file."""
        # NOTE: buffered by lines, so that the file is there when a kernel does not end.
        self._file = self.path.open("w", encoding="utf-8", buffering=1)

    def launch(self, one: Started, program: Program, arch: str) -> None:
        """Write a heading for the launch."""
        self._sizes.append((one.grid, one.block))
        self._write(
            f"# {one.entry}<<<{one.grid}, {one.block}>>> for {arch}: "
            + (
                f"block {self.block}, warp {self.warp}, lane {self.lane}"
                if self._present(*self._sizes[-1])
                else f"has no block {self.block} with a lane {self.lane} of warp {self.warp}"
            )
        )

    def before(self, machine: Machine, lanes: Lanes) -> None:
        """Record whether the lane executes the instruction, which may overwrite its guard."""
        first = (self.block - machine.first_block) * machine.threads + self.warp * WARP
        self._under_way = None
        if (
            self.lines > self.limit
            or not machine.first_block <= self.block < machine.first_block + machine.blocks
            or not lanes.mask[first : first + WARP].any()
        ):
            return
        instruction = machine.program.steps[machine.place].instruction
        idle = None
        if not lanes.mask[first + self.lane]:
            idle = f"lane {self.lane} is not here"
        elif not executing(machine, instruction, lanes).mask[first + self.lane]:
            idle = "not executed"
        self._under_way = instruction, idle

    def after(self, machine: Machine, lanes: Lanes) -> None:
        """Write the line of an instruction."""
        if self._under_way is None:
            return
        instruction, idle = self._under_way
        self._under_way = None
        place = (self.block - machine.first_block) * machine.threads
        place += self.warp * WARP + self.lane
        self._write_line(instruction, idle or _values(machine, instruction, place))

    def finding(self, finding: Finding) -> None:
        """Write the finding, behind the instruction that it stopped."""
        if self._under_way is not None:
            self._write_line(self._under_way[0], "stopped by the finding")
        if self._file is not None:
            self._file.write(f"# finding: {finding}\n")

    def finish(self) -> None:
        """Raise if no launch had this lane."""
        if self._sizes and not any(self._present(*size) for size in self._sizes):
            raise ValueError(
                f"no launch has block {self.block}, warp {self.warp}, lane {self.lane}: the "
                f"largest has {max(g for g, _ in self._sizes)} blocks, or "
                f"{max(b for _, b in self._sizes)} threads"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _present(self, grid: int, block: int) -> bool:
        return self.block < grid and self.warp * WARP + self.lane < block

    def _write_line(self, instruction: Instruction, values: str) -> None:
        where = instruction.location
        line = "" if where is None else describe(where)
        self._write(f"{line:<46} {instruction.text:<60} {values}".rstrip())

    def _write(self, line: str) -> None:
        if self._file is None or self.lines > self.limit:
            return
        self.lines += 1
        if self.lines > self.limit:
            line = f"# cut here, after {self.limit} lines: the kernel went on"
        self._file.write(f"{line}\n")


def _values(machine: Machine, instruction: Instruction, place: int) -> str:
    """Return the values that an instruction wrote, or else read, in one lane."""
    results = written(instruction)
    found = [_show(machine, r, result_type(instruction, r), place) for r in results]
    return ", ".join(found or [_show(machine, r, r.type, place) for r in read(instruction)])


def _show(machine: Machine, register: Register, type_name: str, place: int) -> str:
    held = value(machine, register)[place : place + 1]
    if register.type == "pred":
        return f"{register.name} = {'true' if held[0] else 'false'}"
    bits = held.view(f"u{held.dtype.itemsize}")[0]
    shown = f"{register.name} = {int(bits):#0{2 + 2 * held.dtype.itemsize}x}"
    if type_name in _PAIRS:
        low, high = held.view(_PAIRS[type_name]).astype(np.float32)
        return f"{shown} ({low:.6g}, {high:.6g})"
    if type_name.startswith("b") and type_name != "bf16":
        return shown
    number = held.view(DTYPES[type_name])[0]
    text = f"{int(number)}" if number.dtype.kind in "iu" else f"{float(number):.9g}"
    return f"{shown} ({text})"
