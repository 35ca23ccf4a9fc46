"""Registers that the warps of a block release and request (``setmaxnreg``, sm_90a).

PTX ISA, "setmaxnreg": every block has a pool. It is empty at launch, ``.dec`` puts registers of a
warp into it, and ``.inc`` waits until it has enough of them. All warps of a warpgroup execute the
same instruction, and synchronise before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.module import Kernel
from cupyattn.interpret.ordering import WARP, Bools, Ints

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

#: 32-bit registers of an SM.
SM_REGISTERS = 65536
#: Unit in which threads release and request registers.
STEP = 8
#: Least and largest number of registers of a thread.
FEWEST, MOST = 24, 256
#: Largest number of a thread at launch: an instruction names 255, and ptxas then launches with
#: this.
MOST_AT_LAUNCH = 248
#: Warps of a warpgroup.
GROUP = 4


def launch_registers(kernel: Kernel) -> int | None:
    """Return the number of registers of a thread at launch; None if no directive gives it.

    For a kernel with ``setmaxnreg`` this is ``.maxnreg``, or the largest number with which
    ``.minnctapersm`` blocks of ``.maxntid`` threads share an SM.
    """
    if kernel.max_registers is not None:
        return -(-kernel.max_registers // STEP) * STEP
    if kernel.max_threads is None:
        return None
    threads = -(-kernel.max_threads // WARP) * WARP * kernel.min_blocks
    return min(MOST_AT_LAUNCH, SM_REGISTERS // threads // STEP * STEP)


@dataclass(eq=False)
class Request:
    """A warpgroup that waits for registers."""

    place: int
    warps: Ints  # numbered through the batch
    count: int  # registers that each thread will have
    missing: int  # registers that the warps request together


class RegisterPools:
    """The pools of a batch of blocks, and the registers that each warp holds."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._warps = machine.threads // WARP  # of a block
        self._held = np.zeros(machine.size // WARP, np.intp)  # of each thread; 0: as launched
        self._changed = np.zeros(machine.size // WARP, np.int64)  # time of the last change
        self._free = np.zeros(machine.blocks, np.intp)
        self._waiting: list[Request] = []

    def change(self, count: int, lanes: Lanes, *, more: bool) -> None:
        """Let warpgroups request or release registers, until each thread has `count`."""
        machine = self._machine
        launched = self._check(count, lanes)
        groups = lanes.warps // self._warps * self._warps + lanes.warps % self._warps // GROUP
        for group in distinct(groups):
            warps = lanes.warps[groups == group]
            self._check_group(warps)
            self._held[warps[self._held[warps] == 0]] = launched
            held = int(self._held[warps[0]])
            if count < held if more else count > held:
                verb, bound = ("inc", "fewer") if more else ("dec", "more")
                self._fail(f"setmaxnreg.{verb} to {count} registers is {bound} than {held}, which "
                           f"each thread holds", warps)  # fmt: skip
            self._changed[warps] = machine.clocks.now
            size = (count - held) * WARP * len(warps)
            self._waiting.append(Request(machine.place, warps, count, size))
        self._serve()

    def _check(self, count: int, lanes: Lanes) -> int:
        """Report an invalid `count`; return the registers at launch."""
        machine = self._machine
        if count % STEP or not FEWEST <= count <= MOST:
            self._fail(
                f"setmaxnreg to {count} registers: the count must be a multiple of {STEP} from "
                f"{FEWEST} to {MOST}", lanes.warps,
            )  # fmt: skip
        launched = launch_registers(machine.program.kernel)
        if launched is None:
            self._fail(
                "setmaxnreg in a kernel that says neither .maxnreg nor .maxntid: the registers of "
                "a thread at launch are not known, give __launch_bounds__", lanes.warps,
            )  # fmt: skip
        if (total := launched * machine.threads) > SM_REGISTERS:
            self._fail(
                f"setmaxnreg in a block of {machine.threads} threads with {launched} registers "
                f"each: {total} registers, an SM has {SM_REGISTERS}", lanes.warps,
            )  # fmt: skip
        return launched

    def _check_group(self, warps: Ints) -> None:
        """Report warps of a warpgroup that are missing, or that have not synchronised."""
        machine = self._machine
        block, first = divmod(int(warps[0]), self._warps)
        start = block * self._warps + first // GROUP * GROUP
        end = min(start + GROUP, (block + 1) * self._warps)
        if len(warps) < end - start:
            message = (
                f"setmaxnreg is executed by {len(warps)} of the {end - start} warps of a warpgroup"
            )
            self._report("divergence", message, warps)
        for one, other in permutations(warps.tolist(), 2):
            last = self._changed[[other]].astype(np.int32)
            lanes = np.array([one * WARP]), np.array([other * WARP])
            if last[0] and not machine.clocks.ordered(*lanes, last)[0]:
                message = (
                    "setmaxnreg, and the warps of the warpgroup have not synchronised since their "
                    "last one"
                )
                self._report("race", message, np.array([one]))

    def _serve(self) -> None:
        """Let waiting warpgroups continue while there are enough registers, in order of arrival."""
        machine, served = self._machine, True
        while served:
            served = False
            for request in list(self._waiting):
                block = int(request.warps[0]) // self._warps
                if request.missing <= self._free[block]:
                    self._free[block] -= request.missing
                    self._held[request.warps] = request.count
                    self._waiting.remove(request)
                    machine.go(request.place + 1, self._mask(request.warps))
                    served = True

    def sleepers(self) -> list[tuple[int, Bools, str]]:
        """Return the places where warpgroups wait for registers, their lanes, and a description."""
        return [
            (
                request.place,
                self._mask(request.warps),
                f"setmaxnreg.inc for {request.missing} registers more, of which the block has "
                f"{self._free[int(request.warps[0]) // self._warps]}",
            )
            for request in self._waiting
        ]

    def _mask(self, warps: Ints) -> Bools:
        mask = np.zeros(self._machine.size, np.bool_)
        mask.reshape(-1, WARP)[warps] = True
        return mask & self._machine.alive

    def _fail(self, message: str, warps: Ints) -> NoReturn:
        self._report("invalid operand", message, warps)

    def _report(self, kind: str, message: str, warps: Ints) -> NoReturn:
        machine = self._machine
        machine.report(kind, message, machine.lane, self._mask(warps))
