"""Decide the order between accesses, by each thread's knowledge of the others.

Time is the number of the current instruction, the same for all threads. An access of thread u at
time c precedes the current instruction of thread t of its block if t waited for u since::

    u is t,  or  c <= floor[t],  or  u is in t's warp and c <= warp_floor[t],  or  c <= seen[t, u]

`floor` rises when the whole block meets, `warp_floor` when the whole warp meets. `seen` is a
vector clock (Fidge 1988, Mattern 1989) for everything else: barriers of some warps and
instructions of some lanes. Counters order blocks (`BetweenBlocks`). For the shared memory of a
block, the barrier of its cluster orders them (`cluster.py`).

The copy engine is a separate actor, `ENGINE`. Its writes are ordered only before threads that
waited for it, and before threads that later synchronised with these. No floor applies to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.distinct import distinct

Ints = npt.NDArray[np.intp]
Times = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

WARP = 32
#: The copy engine as the writer of a word; far below the number of any lane.
ENGINE = -(2**30)


class Clocks:
    """The order between the threads of a batch of blocks.

    Lanes are numbered through the batch: ``block * threads + thread``.

    Parameters
    ----------
    blocks : int
        Blocks in the batch.
    threads : int
        Lanes of one block, a multiple of 32.
    first : int
        Lanes of the launch before this batch. Lanes of other batches are numbered from here too,
        and so are negative.
    now : int
        Time at which the batch begins.
    between : BetweenBlocks, optional
        Counters of the launch.
    """

    def __init__(
        self,
        blocks: int,
        threads: int,
        first: int = 0,
        now: int = 0,
        between: BetweenBlocks | None = None,
    ) -> None:
        lanes = blocks * threads
        self.threads = threads
        self.first = first
        self.now = now
        self.between = between or BetweenBlocks()
        self.floor = np.full(lanes, now, np.int32)
        self.warp_floor = np.full(lanes, now, np.int32)
        self._seen = np.zeros((lanes, threads + 1), np.int32)  # last: the copy engine
        self._ragged = np.zeros(lanes // WARP, np.bool_)  # warps with lanes of different knowledge
        self._running = np.ones(blocks, np.bool_)
        #: The smallest `floor` of a block that has not ended.
        self.oldest = now

    def ordered(self, lanes: Ints, others: Ints, times: Times) -> Bools:
        """Return whether accesses of `others` at `times` are ordered before `lanes` now."""
        engine = others < ENGINE // 2
        before: Bools
        if engine.all():  # tiles were copied
            before = times <= self.saw_engine(lanes)
            return before
        before = times <= self.floor[lanes]
        if not before.all():
            before |= lanes == others
            before |= (lanes // WARP == others // WARP) & (times <= self.warp_floor[lanes])
            before |= times <= self._seen[lanes, others % self.threads]
        foreign = lanes // self.threads != others // self.threads
        if foreign.any():
            before[foreign] = False
            foreign &= ~engine
            before[foreign] = self.between.ordered(
                self, lanes[foreign], others[foreign], times[foreign]
            )
        if engine.any():
            before[engine] = times[engine] <= self.saw_engine(lanes[engine])
        return before

    def views(self, lanes: Ints) -> Times:
        """Return, for each of `lanes`, the time up to which it comes after each thread.

        The last column is the copy engine's.
        """
        view: Times = np.maximum(self._seen[lanes], self.floor[lanes, None])
        row, thread = np.arange(len(lanes)), lanes % self.threads
        warp = (thread // WARP * WARP)[:, None] + np.arange(WARP)
        own = view[row[:, None], warp]
        view[row[:, None], warp] = np.maximum(own, self.warp_floor[lanes, None])
        view[row, thread] = self.now
        return view

    def joint_view(self, lanes: Ints) -> Times:
        """Return the maximum of the `views` of `lanes` of one block."""
        thread, floor = lanes % self.threads, self.floor[lanes].max()
        by_warp = np.full(self.threads // WARP, floor)
        by_warp[thread // WARP] = np.maximum(floor, self.warp_floor[lanes])
        view: Times = self._seen[lanes].max(axis=0)
        np.maximum(view, np.append(by_warp.repeat(WARP), floor), out=view)
        view[thread] = self.now
        return view

    def saw_engine(self, lanes: Ints) -> Times:
        """Return the time up to which each of `lanes` comes after the copy engine."""
        seen: Times = self._seen[lanes, self.threads]
        return seen

    def meet_blocks(self, blocks: Ints) -> None:
        """Record that all threads of each of `blocks` (numbered through the batch) have met."""
        self.floor.reshape(-1, self.threads)[blocks] = self.now
        self._find_oldest()
        engine = self._seen[:, self.threads].reshape(-1, self.threads)
        engine[blocks] = engine[blocks].max(axis=1, keepdims=True)

    def end_blocks(self, blocks: Bools) -> None:
        """Record that all threads of these `blocks` of the batch have ended."""
        self._running &= ~blocks
        self._find_oldest()

    def _find_oldest(self) -> None:
        floors = self.floor[:: self.threads][self._running]
        self.oldest = int(floors.min(initial=self.now))

    def meet_warps(self, warps: Ints) -> None:
        """Record that all lanes of each of `warps` (numbered through the batch) have met."""
        for warp in warps[self._ragged[warps]]:
            self.meet(np.arange(warp * WARP, warp * WARP + WARP))
            self._ragged[warp] = False
        self.warp_floor.reshape(-1, WARP)[warps] = self.now

    def meet(self, lanes: Ints) -> None:
        """Record that `lanes` of one block have met: each now knows what any of them knew."""
        self.acquire(lanes, self.joint_view(lanes))

    def acquire(self, lanes: Ints, view: Times) -> None:
        """Order `lanes` after the accesses in the published `views`."""
        self._seen[lanes] = np.maximum(self._seen[lanes], view)
        self._ragged[lanes // WARP] = True


#: The times up to which threads of a block are ordered before, by the block's number in the launch.
Known = Mapping[int, npt.NDArray[np.int32]]
_NOTHING: Known = {}


@dataclass
class _Heard:
    """The growing knowledge of one thread about other blocks, each entry with its time."""

    times: list[int] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)

    def by(self, time: int) -> Known:
        """Return the thread's knowledge at a time."""
        number = bisect_right(self.times, time)
        return self.known[number - 1] if number else _NOTHING


class BetweenBlocks:
    """The counters of a launch, and the knowledge that threads acquired from them."""

    def __init__(self) -> None:
        self._at: dict[int, Known] = {}  # by address, or by a negative number that is none
        self._counters = False  # whether any is an address
        self._heard: dict[int, dict[int, _Heard]] = {}  # by block, by thread of it
        # By block and thread: the knowledge at its last fence, and that of values read since.
        self._fenced: dict[tuple[int, int], Known] = {}
        self._read: dict[tuple[int, int], Known] = {}

    @property
    def in_use(self) -> bool:
        """Whether there has been a fence or a release, so that relaxed accesses may order."""
        return bool(self._fenced) or self._counters

    def fence(self, clocks: Clocks, lanes: Ints) -> None:
        """Order `lanes` after the values that they read, and later writes after their knowledge."""
        read = {lane: self._read.pop(self._thread(clocks, lane), None) for lane in lanes.tolist()}
        self._learn(clocks, read)
        for lane, known in zip(lanes.tolist(), self._known(clocks, lanes), strict=True):
            self._fenced[self._thread(clocks, lane)] = known

    def relaxed(
        self, clocks: Clocks, lanes: Ints, addresses: Ints, *, reads: bool, writes: bool
    ) -> None:
        """Record relaxed accesses, which order two threads if fences precede and follow them."""
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            thread = self._thread(clocks, lane)
            if reads and address in self._at:
                self._read[thread] = _joined(self._read.get(thread, {}), self._at[address])
            if writes and thread in self._fenced:
                self._at[address] = _joined(self._at.get(address, {}), self._fenced[thread])

    def release(self, clocks: Clocks, lanes: Ints, addresses: Ints) -> None:
        """Publish at `addresses` the accesses ordered before `lanes`."""
        self._counters |= bool((addresses >= 0).any())
        for known, address in zip(self._known(clocks, lanes), addresses.tolist(), strict=True):
            self._at[address] = _joined(self._at.get(address, {}), known)

    def tell(self, clocks: Clocks, lanes: Ints, known: Known) -> None:
        """Order `lanes` after accesses of other blocks, by the barrier of their cluster."""
        if known:
            self._learn(clocks, dict.fromkeys(lanes.tolist(), known))

    def acquire(self, clocks: Clocks, lanes: Ints, addresses: Ints) -> None:
        """Order `lanes` after the accesses published at `addresses`."""
        pairs = zip(lanes.tolist(), addresses.tolist(), strict=True)
        self._learn(clocks, {lane: self._at.get(address) for lane, address in pairs})

    def _known(self, clocks: Clocks, lanes: Ints) -> Iterator[Known]:
        """Yield the knowledge of each lane, including its block's earlier accesses."""
        views = clocks.views(lanes)[:, : clocks.threads]
        for view, lane in zip(views, lanes.tolist(), strict=True):
            block = self._block(clocks, lane)
            yield _joined(self._come_to(block, view), {block: view})

    def _learn(self, clocks: Clocks, news: Mapping[int, Known | None]) -> None:
        """Merge new knowledge into each lane's.

        Lanes with the same earlier knowledge share the result, which `_come_to` joins once.
        """
        joined: dict[tuple[int, int], Known] = {}
        for lane, found in news.items():
            if found is None:
                continue
            block = self._block(clocks, lane)
            if block in found:  # from threads of its block, here or through others
                clocks.acquire(np.array([lane]), np.append(found[block], np.int32(0)))
            heard = self._heard.setdefault(block, {})
            own = heard.setdefault(lane % clocks.threads, _Heard())
            before = own.known[-1] if own.known else _NOTHING
            key = id(before), id(found)
            if key not in joined:
                joined[key] = _joined(before, found)
            own.known.append(joined[key])
            own.times.append(clocks.now)

    def overwrite(self, addresses: Ints) -> None:
        """Record a write at `addresses` that is no step of a counter."""
        for address in self._at.keys() & set(addresses.tolist()):
            del self._at[address]

    def ordered(self, clocks: Clocks, lanes: Ints, others: Ints, times: Times) -> Bools:
        """Return whether accesses by threads of other blocks are ordered before `lanes` now."""
        before = np.zeros(len(lanes), np.bool_)
        blocks, threads = others // clocks.threads, others % clocks.threads
        blocks = blocks + clocks.first // clocks.threads
        for lane in distinct(lanes).tolist():
            block = self._block(clocks, lane)
            if block not in self._heard:
                continue
            rows = np.flatnonzero(lanes == lane)
            known = self._known_by(clocks, lane)
            for other in distinct(blocks[rows]).tolist():
                if (seen := known.get(other)) is not None:
                    some = rows[blocks[rows] == other]
                    before[some] = times[some] <= seen[threads[some]]
        return before

    def view(self, clocks: Clocks, lane: int, block: int) -> Times:
        """Return the times up to which a lane comes after the threads of another block of its
        batch."""
        known = self._known_by(clocks, lane)
        nothing = np.zeros(clocks.threads, np.int32)
        return known.get(block + clocks.first // clocks.threads, nothing)

    def _known_by(self, clocks: Clocks, lane: int) -> Known:
        views = clocks.views(np.array([lane]))
        return self._come_to(self._block(clocks, lane), views[0, : clocks.threads])

    def _thread(self, clocks: Clocks, lane: int) -> tuple[int, int]:
        return self._block(clocks, lane), lane % clocks.threads

    def _block(self, clocks: Clocks, lane: int) -> int:
        return (clocks.first + lane) // clocks.threads

    def _come_to(self, block: int, view: Times) -> Known:
        """Return a thread's knowledge, with that of threads ordered before it in its block."""
        until = view.tolist()
        found = [heard.by(until[thread]) for thread, heard in self._heard.get(block, {}).items()]
        known = _NOTHING
        for one in {id(x): x for x in found}.values():
            known = _joined(known, one)
        return known


def _joined(some: Known, others: Known) -> Known:
    if not some or some is others:
        return others
    found = dict(some)
    for block, times in others.items():
        found[block] = np.maximum(found[block], times) if block in found else times
    return found
