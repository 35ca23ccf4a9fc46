"""The sixteen barriers of a block (``bar``, ``barrier``): arrivals and waiting lanes.

PTX ISA, "bar, barrier": a barrier is named by a number from 0 to 15. A count of threads is a
multiple of 32, and all threads that meet at a barrier give the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.lanes import Lanes
from cupyattn.interpret.ordering import WARP, Bools, Ints

if TYPE_CHECKING:
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.semantics import Write

#: Barriers of a block.
BARRIERS = 16


class Vote(NamedTuple):
    """A reduction of one bit of each thread at a barrier, ``bar.red``.

    Parameters
    ----------
    kind : {"popc", "and", "or"}
    write : callable
        Stores the result.
    """

    kind: str
    write: Write


class Barrier:
    """One of the barriers, in every block of a batch."""

    def __init__(self, size: int, blocks: int) -> None:
        self.arrived = np.zeros(size, np.bool_)
        self.twice = np.zeros(size, np.bool_)  # waits after it had arrived without waiting
        self.counts = np.zeros(blocks, np.intp)  # expected threads, by block; 0: unknown
        self.resume = np.full(size, -1, np.int64)  # place at which a waiting lane continues
        self.views: dict[int, Any] = {}  # by block: joined views of the arrivals


class Barriers:
    """The barriers of a batch of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._barriers: dict[int, Barrier] = {}
        self._votes: dict[int, Vote] = {}  # by the place where lanes continue
        self._voted = np.zeros((2, machine.size), np.bool_)  # of each lane: voted, and its vote

    def vote(self, vote: Vote, values: Bools, lanes: Lanes) -> None:
        """Record the votes of lanes at the barrier that they are about to reach."""
        self._votes[self._machine.place + 1] = vote
        self._voted[0, lanes.index] = True
        self._voted[1, lanes.index] = values[lanes.index]

    def meet(
        self,
        numbers: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32] | None,
        lanes: Lanes,
        *,
        wait: bool,
        aligned: bool,
    ) -> None:
        """Let lanes arrive at barriers of their blocks.

        Parameters
        ----------
        numbers : array of uint32
            The barrier of each lane of the batch.
        counts : array of uint32 or None
            The number of threads that it waits for; None for all of the block.
        lanes : Lanes
        wait : bool
            Whether lanes wait until the barrier completes. Otherwise they only arrive.
        aligned : bool
            Whether all lanes of a warp must name the same barrier and count.
        """
        machine, index = self._machine, lanes.index
        number = numbers[index].astype(np.intp)
        if (bad := number >= BARRIERS).any():
            message = f"there is no barrier {number[bad][0]}: a block has barriers 0 to 15"
            machine.report("invalid operand", message, index, bad)
        if counts is None and not wait:
            message = f"no count of threads is given for barrier {number[0]}: an arrival needs one"
            machine.report("invalid operand", message, index, number == number[0])
        if counts is None:
            count = np.full(len(index), machine.threads)
        else:
            count = counts[index].astype(np.intp)
            self._check_counts(number, count, index)
        kinds, which = np.unique(number * (machine.threads + 1) + count, return_inverse=True)
        if aligned and len(kinds) > 1:
            warp = index // WARP
            mixed = (which[1:] != which[:-1]) & (warp[1:] == warp[:-1])
            if mixed.any():
                message = "the lanes of a warp name different barriers or counts of threads"
                machine.report("divergence", message, index[1:], mixed)
        for kind in range(len(kinds)):
            some = np.zeros(machine.size, np.bool_)
            some[index[which == kind]] = True
            row = int(np.argmax(which == kind))
            self._arrive(int(number[row]), int(count[row]), lanes.where(some), wait=wait)

    def _check_counts(self, number: Ints, count: Ints, index: Ints) -> None:
        machine = self._machine
        bad = (count % WARP != 0) | (count == 0) | (count > machine.threads)
        if bad.any():
            row = int(np.argmax(bad))
            message = (
                f"barrier {number[row]} is to wait for {count[row]} threads: the count must be a "
                f"multiple of 32 from 32 to {machine.threads}, the threads of the block"
            )
            machine.report("invalid operand", message, index, bad)

    def _arrive(self, number: int, count: int, lanes: Lanes, *, wait: bool) -> None:
        """Let lanes of one or several blocks arrive at a barrier that waits for `count` threads."""
        machine = self._machine
        blocks = distinct(lanes.index // machine.threads)
        barrier = self._barriers.setdefault(number, Barrier(machine.size, machine.blocks))
        self._check_state(barrier, number, count, lanes, wait=wait)
        barrier.counts[blocks] = count
        here = lanes.mask | self._absent(lanes)
        barrier.twice |= barrier.arrived & here
        barrier.arrived |= here
        following = machine.place + 1
        if wait:
            barrier.resume[lanes.index] = following
        by_lane = barrier.arrived.astype(np.intp) + barrier.twice
        arrived = by_lane.reshape(machine.blocks, -1).sum(axis=1)[blocks]
        if (arrived > count).any():
            message = f"more threads arrive at barrier {number} than the {count} it waits for"
            machine.report("divergence", message, machine.lane, lanes.mask)
        everybody = count == machine.threads
        if not everybody:  # their earlier accesses become ordered before the waiting lanes
            for block in blocks:
                some = lanes.index[lanes.index // machine.threads == block]
                view = machine.clocks.joint_view(some)
                barrier.views[int(block)] = np.maximum(barrier.views.get(int(block), 0), view)
        if not wait:
            machine.go(following, lanes)
        complete = blocks[arrived == count]
        if len(complete):
            self._complete(barrier, complete, everybody=everybody)

    def _check_state(
        self, barrier: Barrier, number: int, count: int, lanes: Lanes, *, wait: bool
    ) -> None:
        machine = self._machine
        known = np.repeat(barrier.counts, machine.threads)
        other = (known > 0) & (known != count) & lanes.mask
        if other.any():
            message = (
                f"barrier {number} is to wait for {count} threads, and earlier arrivals said "
                f"{known[other][0]}"
            )
            machine.report("invalid operand", message, machine.lane, other)
        again = barrier.arrived & lanes.mask
        if wait:  # a warp may give itself the first turn: it arrives, and waits later
            again &= barrier.twice
        if again.any():
            message = f"threads arrive at barrier {number} a second time before it completes"
            machine.report("divergence", message, machine.lane, again)

    def _absent(self, lanes: Lanes) -> Bools:
        """Return the lanes past the end of the block in the warps that are here.

        A barrier counts whole warps.
        """
        machine = self._machine
        if machine.block == machine.threads:
            return np.zeros(machine.size, np.bool_)
        here = np.repeat(lanes.bits != 0, WARP)
        absent: Bools = here & (machine.thread >= machine.block)
        return absent

    def _complete(self, barrier: Barrier, complete: Ints, *, everybody: bool) -> None:
        """Let all waiting lanes in the blocks that are `complete` continue."""
        machine = self._machine
        if everybody:
            machine.clocks.meet_blocks(complete)
        freed = np.zeros(machine.size, np.bool_)
        freed.reshape(machine.blocks, -1)[complete] = True
        freed &= barrier.arrived
        barrier.arrived &= ~freed
        barrier.twice &= ~freed
        barrier.counts[complete] = 0
        freed &= barrier.resume >= 0
        if not everybody:
            for block in complete:
                some = np.flatnonzero(freed & (machine.lane // machine.threads == block))
                machine.clocks.acquire(some, barrier.views.pop(int(block)))
        for place in distinct(barrier.resume[freed]):
            if int(place) in self._votes:
                self._count(self._votes[int(place)], freed & (barrier.resume == place))
            machine.go(int(place), freed & (barrier.resume == place))
        barrier.resume[freed] = -1

    def _count(self, vote: Vote, freed: Bools) -> None:
        """Store the result of a reduction for the lanes that leave a barrier."""
        machine = self._machine
        taken = (self._voted[0] & freed).reshape(machine.blocks, -1)
        count = (taken & self._voted[1].reshape(taken.shape)).sum(axis=1)
        result = {"popc": count, "or": count > 0, "and": count == taken.sum(axis=1)}[vote.kind]
        values = np.repeat(result, machine.threads)
        lanes = Lanes(freed & machine.alive, machine.alive)
        vote.write(machine, values.astype(np.uint32) if vote.kind == "popc" else values, lanes)

    def sleepers(self) -> list[tuple[int, Bools, str]]:
        """Return for each barrier the first place of waiting lanes, these lanes, and its name.
        """
        found = []
        for number, barrier in self._barriers.items():
            at = barrier.resume >= 0
            if at.any():
                first = int(barrier.resume[at].min())
                found.append((first - 1, barrier.resume == first, f"barrier {number}"))
        return found
