"""What is ordered before what: threads' views of each other's accesses.

Time is the number of the instruction under way, the same for everyone. An access of thread u at
time c is ordered before what thread t of its block does now if something made t wait for u at or
after c:

    u is t,  or  c <= floor[t],  or  u is in t's warp and c <= warp_floor[t],  or  c <= seen[t, u]

`floor` rises when the whole block meets, `warp_floor` when the whole warp does, and `seen`, a
vector clock (Fidge 1988, Mattern 1989), carries everything else: barriers of some warps and
instructions of some lanes. Blocks are ordered by counters, see `BetweenBlocks`, and at what belongs
to a block by the barrier of its cluster (`cluster.py`).

The copy engine is an actor of its own, `ENGINE`: what it wrote comes only after those who waited
for it, and after those who met them since. No floor counts for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.between_blocks import BetweenBlocks

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
        Of the launch.
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
        self._ragged = np.zeros(lanes // WARP, np.bool_)  # warps whose lanes saw different things
        self._running = np.ones(blocks, np.bool_)
        #: The smallest `floor` of a block that has not ended.
        self.oldest = now

    def ordered(self, lanes: Ints, others: Ints, times: Times) -> Bools:
        """Return whether accesses of `others` at `times` come before what `lanes` do now."""
        before: Bools = times <= self.floor[lanes]
        if not before.all():
            before |= lanes == others
            before |= (lanes // WARP == others // WARP) & (times <= self.warp_floor[lanes])
            before |= times <= self._seen[lanes, others % self.threads]
        foreign = lanes // self.threads != others // self.threads
        engine = others < ENGINE // 2
        if foreign.any():
            before[foreign] = False
            foreign &= ~engine
            before[foreign] = self.between.ordered(
                self, lanes[foreign], others[foreign], times[foreign]
            )
        if engine.any():
            before[engine] = times[engine] <= self._seen[lanes[engine], self.threads]
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

    def meet_blocks(self, blocks: Ints) -> None:
        """All threads of each of `blocks` (numbered through the batch) have met."""
        self.floor.reshape(-1, self.threads)[blocks] = self.now
        self._find_oldest()
        engine = self._seen[:, self.threads].reshape(-1, self.threads)
        engine[blocks] = engine[blocks].max(axis=1, keepdims=True)

    def end_blocks(self, blocks: Bools) -> None:
        """Those `blocks` of the batch have no thread left that could do anything."""
        self._running &= ~blocks
        self._find_oldest()

    def _find_oldest(self) -> None:
        floors = self.floor[:: self.threads][self._running]
        self.oldest = int(floors.min(initial=self.now))

    def meet_warps(self, warps: Ints) -> None:
        """All lanes of each of `warps` (numbered through the batch) have met."""
        for warp in warps[self._ragged[warps]]:
            self.meet(np.arange(warp * WARP, warp * WARP + WARP))
            self._ragged[warp] = False
        self.warp_floor.reshape(-1, WARP)[warps] = self.now

    def meet(self, lanes: Ints) -> None:
        """`lanes`, all of one block, have met: each comes after all that any of them came after."""
        self.acquire(lanes, self.views(lanes).max(axis=0))

    def acquire(self, lanes: Ints, view: Times) -> None:
        """`lanes` come after what somebody's `views` held when they were handed on."""
        self._seen[lanes] = np.maximum(self._seen[lanes], view)
        self._ragged[lanes // WARP] = True
