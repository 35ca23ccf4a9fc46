"""What is ordered between blocks of one launch: counters that one releases and another acquires.

A release (``red.release.gpu``) leaves at its address what its thread comes after: times of the
threads of its block, and of those of blocks that it has heard of. An acquire (``ld.acquire.gpu``)
of that address takes it up, and hands it on to whoever comes after that thread in its own block.
Threads of one block may meet so, too: what such an address says of that block goes into the clocks
that its threads have of each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cupyattn.interpret.ordering import Bools, Clocks, Ints, Times

#: By the number of a block in the launch: the times up to which its threads come before.
Known = Mapping[int, npt.NDArray[np.int32]]


@dataclass
class _Heard:
    """What one thread has heard of other blocks: more and more, from these times on."""

    times: list[int] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)

    def by(self, time: int) -> Known:
        """Return what it had heard by a time."""
        number = bisect_right(self.times, time)
        return self.known[number - 1] if number else {}


class BetweenBlocks:
    """The counters of a launch, and what threads have learnt from them."""

    def __init__(self) -> None:
        self._at: dict[int, Known] = {}  # by address
        self._heard: dict[int, dict[int, _Heard]] = {}  # by block, by thread of it

    def release(self, clocks: Clocks, lanes: Ints, addresses: Ints) -> None:
        """`lanes` leave at `addresses` what they come after."""
        views = clocks.views(lanes)[:, : clocks.threads]
        for view, lane, address in zip(views, lanes.tolist(), addresses.tolist(), strict=True):
            block = self._block(clocks, lane)
            known = _joined(self._come_to(block, view), {block: view})
            self._at[address] = _joined(self._at.get(address, {}), known)

    def acquire(self, clocks: Clocks, lanes: Ints, addresses: Ints) -> None:
        """`lanes` take up what was left at `addresses`."""
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            found = self._at.get(address)
            if found is None:
                continue
            block = self._block(clocks, lane)
            if block in found:  # what threads of its own block left, here or by way of others
                clocks.acquire(np.array([lane]), np.append(found[block], np.int32(0)))
            heard = self._heard.setdefault(block, {})
            own = heard.setdefault(lane % clocks.threads, _Heard())
            own.known.append(_joined(own.known[-1] if own.known else {}, found))
            own.times.append(clocks.now)

    def overwrite(self, addresses: Ints) -> None:
        """Something else than a counter's steps was written at `addresses`."""
        for address in self._at.keys() & set(addresses.tolist()):
            del self._at[address]

    def ordered(self, clocks: Clocks, lanes: Ints, others: Ints, times: Times) -> Bools:
        """Return whether accesses by threads of other blocks come before what `lanes` do now."""
        before = np.zeros(len(lanes), np.bool_)
        blocks, threads = others // clocks.threads, others % clocks.threads
        blocks = blocks + clocks.first // clocks.threads
        for lane in np.unique(lanes).tolist():
            block = self._block(clocks, lane)
            if block not in self._heard:
                continue
            rows = np.flatnonzero(lanes == lane)
            known = self._come_to(block, clocks.views(np.array([lane]))[0, : clocks.threads])
            for other in np.unique(blocks[rows]).tolist():
                if (seen := known.get(other)) is not None:
                    some = rows[blocks[rows] == other]
                    before[some] = times[some] <= seen[threads[some]]
        return before

    def _block(self, clocks: Clocks, lane: int) -> int:
        return (clocks.first + lane) // clocks.threads

    def _come_to(self, block: int, view: Times) -> Known:
        """Return what a thread has heard through the threads of its block that it comes after."""
        known: Known = {}
        for thread, heard in self._heard.get(block, {}).items():
            known = _joined(known, heard.by(int(view[thread])))
        return known


def _joined(some: Known, others: Known) -> Known:
    if not some or some is others:
        return others
    found = dict(some)
    for block, times in others.items():
        found[block] = np.maximum(found[block], times) if block in found else times
    return found
