"""Clusters of blocks (sm_90): their barrier, and loads from the shared memory of one another.

An address in a cluster's shared memory is an address in a block's shared memory, with the block's
rank in higher bits. Ranks count from 1 there, and 0 means the lane's block. In a cluster, addresses
of variables have the rank of the lane's block, as on a device. The barrier orders
blocks for these loads. Arrivals at another block's mbarrier (`mbarrier.py`) order what the copy
engine writes there. If a lane releases when it arrives at the barrier, all accesses ordered before
the arrival come before accesses after a wait for that phase. These include accesses of other
threads, ordered by barriers of their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from cupyattn.interpret.access import address_reader
from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.memory import RANK_BITS, WITHIN, Bytes, Units, gather
from cupyattn.interpret.ordering import ENGINE, WARP, Bools, Ints, Times
from cupyattn.interpret.ptx import Instruction
from cupyattn.interpret.semantics import Execute, Step, instruction, reader, whole_warp, writer
from cupyattn.interpret.shadow import spread

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine


class FarRead(NamedTuple):
    """Reads of other blocks' shared memory at one time, by granule."""

    time: int
    granules: Ints
    lanes: Ints


class Clusters:
    """The clusters of a batch: a `Space` of their shared memory, and their barriers.

    Parameters
    ----------
    machine : Machine
        The machine; its number of blocks is a multiple of the cluster size.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.blocks = machine.program.kernel.cluster
        self._lanes = self.blocks * machine.threads  # blocks of a cluster
        size = machine.size
        self._phase = np.zeros(-(-size // self._lanes), np.int64)  # completed phases
        self._arrivals = np.zeros(size, np.int64)  # phases that a lane has arrived in,
        self._waits = np.zeros(size, np.int64)  # and phases for which it has waited
        self._time = np.zeros(size, np.int32)  # time of the last release in its block
        # The same times at the end of the last two phases that its cluster completed.
        self._released = np.zeros((2, size), np.int32)
        self._views: dict[int, Times] = {}  # by block: joined views of this phase
        self._seen: dict[int, Times] = {}  # the same of the last phase
        self._heard: dict[int, dict[int, Times]] = {}  # by block: views of the other blocks
        self._waiting: dict[int, Bools] = {}  # by place
        self._reads: list[FarRead] = []
        steps = machine.program.steps if self.blocks > 1 else ()
        machine.shared.shadow.others_write = any(map(_copies_to_others, steps))

    # ---- the barrier

    def arrive(self, lanes: Lanes, *, release: bool) -> None:
        """Count lanes at the barrier of their cluster, and publish their accesses if they release.

        A lane must have waited for its previous phase.
        """
        machine, index = self._machine, lanes.index
        if (early := self._arrivals[index] > self._waits[index]).any():
            message = "a lane arrives again at the barrier of its cluster and has not waited there"
            machine.report("divergence", message, index, early)
        self._arrivals[index] += 1
        if release:
            for block in distinct(index // machine.threads).tolist():
                some = index[index // machine.threads == block]
                view = machine.clocks.joint_view(some)
                self._views[block] = np.maximum(self._views.get(block, 0), view)
                of_block = self._time[block * machine.threads : (block + 1) * machine.threads]
                np.maximum(of_block, view[:-1], out=of_block)
        self.advance()

    def wait(self, lanes: Lanes) -> None:
        """Let lanes continue whose clusters have all arrived; the others sleep."""
        machine, index = self._machine, lanes.index
        if (never := self._arrivals[index] == self._waits[index]).any():
            message = "a lane waits at the barrier of its cluster and has not arrived there"
            machine.report("divergence", message, index, never)
        done = self._phase[index // self._lanes] > self._waits[index]
        through, late = index[done], index[~done]
        self._waits[through] += 1
        for block in distinct(through // machine.threads).tolist():
            some = through[through // machine.threads == block]
            if block in self._seen:
                machine.clocks.acquire(some, self._seen[block])
            if block in self._heard:
                machine.clocks.between.tell(machine.clocks, some, self._heard[block])
        if len(through):
            machine.go(machine.place + 1, self._mask(through))
        if len(late):
            asleep = self._waiting.get(machine.place, False)
            self._waiting[machine.place] = self._mask(late) | asleep

    def advance(self) -> None:
        """Complete the phase of clusters whose running lanes have all arrived; wake the waiters."""
        machine = self._machine
        alive = machine.alive.reshape(-1, self._lanes)
        there = self._arrivals.reshape(-1, self._lanes) > self._phase[:, None]
        complete = np.flatnonzero((there | ~alive).all(axis=1) & alive.any(axis=1))
        if not len(complete):
            return
        for cluster in complete.tolist():
            some = slice(cluster * self._lanes, (cluster + 1) * self._lanes)
            self._released[1, some] = self._released[0, some]
            self._released[0, some] = self._time[some]
            blocks = range(cluster * self.blocks, (cluster + 1) * self.blocks)
            views = {block: self._views.pop(block) for block in blocks if block in self._views}
            engine = max((view[-1] for view in views.values()), default=0)
            first = machine.clocks.first // machine.threads
            for block, view in views.items():
                self._seen[block] = view.copy()
                self._seen[block][-1] = engine
            for block in blocks:
                others = {first + n: view[:-1] for n, view in views.items() if n != block}
                self._heard[block] = others
        self._phase[complete] += 1
        self._reads = [kept for read in self._reads for kept in self._recent(read)]
        freed = np.isin(machine.lane // self._lanes, complete)
        for place in list(self._waiting):
            mask = self._waiting.pop(place)
            if (mask & freed).any():
                machine.go(place, mask & freed)
            if (mask & ~freed).any():
                self._waiting[place] = mask & ~freed

    def sleepers(self) -> list[tuple[int, Bools, str]]:
        """Return the places where lanes wait, with the lanes and the name of the barrier."""
        return [(*one, "the barrier of their cluster") for one in self._waiting.items()]

    def _mask(self, index: Ints) -> Bools:
        mask = np.zeros(self._machine.size, np.bool_)
        mask[index] = True
        return mask

    def _recent(self, read: FarRead) -> Iterator[FarRead]:
        """Yield the reads that are not yet ordered before every thread."""
        kept = read.time > self._released[1, read.lanes]
        if kept.any():
            yield FarRead(read.time, read.granules[kept], read.lanes[kept])

    def _ordered_until(self, lanes: Ints, others: Ints) -> Times:
        """Return the time up to which `lanes` are ordered after `others`, of other blocks."""
        same = (others > ENGINE // 2) & (others // self._lanes == lanes // self._lanes)
        others = np.where(same, others, 0)
        behind = self._phase[lanes // self._lanes] > self._waits[lanes]
        until: Times = np.where(same, self._released[behind.astype(np.intp), others], 0)
        return until

    # ---- shared memory of the cluster

    def load(
        self, address: Ints, unit: int, count: int, lanes: Ints, strong: bool = False
    ) -> Units:
        """Return `count` units of `unit` bytes for each lane: (count, lanes)."""
        machine, shared = self._machine, self._machine.shared
        block, owner = lanes // machine.threads, self.owners(address, lanes)
        within = address & WITHIN
        if (owner == block).all():
            return shared.load(within, unit, count, lanes, strong)
        values = np.empty((count, len(lanes)), f"u{unit}")
        own, far = np.flatnonzero(owner == block), np.flatnonzero(owner != block)
        if len(own):
            values[:, own] = shared.load(within[own], unit, count, lanes[own], strong)
        some, width = lanes[far], unit * count
        offset = self.offset(address[far], width, some)
        size = shared.granule_bytes
        granules, who = spread(offset // size, some, max(width // size, 1))
        shared.shadow.before_far_read(
            granules, who, self._ordered_until, machine.clocks, machine.report
        )
        self._reads.append(FarRead(machine.clocks.now, granules, who))
        shared.shadow.before_any_write = self._before_write
        values[:, far] = gather(shared.data, offset, unit, count)
        return values

    def owners(self, address: Ints, lanes: Ints) -> Ints:
        """Return the blocks of the batch whose shared memory the addresses of `lanes` name."""
        block, rank = lanes // self._machine.threads, address >> RANK_BITS
        named: Ints = np.where(rank == 0, block, block // self.blocks * self.blocks + rank - 1)
        return named

    def offset(self, address: Ints, width: int, lanes: Ints) -> Ints:
        """Return offsets into the memory of all blocks, whose block must not have ended."""
        machine, shared = self._machine, self._machine.shared
        own, owner = lanes // machine.threads, self.owners(address, lanes)
        within = address & WITHIN
        offset = shared.offset(within, width, lanes) + (owner - own) * shared.stride
        if (owner != own).any():
            ended = np.logical_not(machine.alive.reshape(machine.blocks, -1).any(axis=1))
            if (gone := ended[owner]).any():
                message = "shared memory of another block is accessed, and that block has ended"
                machine.report("race", message, lanes, gone, within)
        return offset

    def store(self, address: Ints, values: Units, lanes: Ints, strong: bool = False) -> None:
        """Refuse stores, which no kernel does there."""
        raise NotImplementedError

    def exchange(self, address: Ints, unit: int, lanes: Ints) -> tuple[Bytes, Ints]:
        """Refuse atomic operations, which no kernel does there."""
        raise NotImplementedError

    def _before_write(self, granules: Ints, lanes: Ints) -> None:
        """Report a write if another block's read may come after it."""
        order = np.argsort(granules, kind="stable")
        for read in self._reads:
            found = np.searchsorted(granules, read.granules, sorter=order)
            place = order[found.clip(max=len(order) - 1)]
            met = granules[place] == read.granules
            rows, readers = place[met], read.lanes[met]
            late = read.time > self._ordered_until(lanes[rows], readers)
            if late.any():
                what = "shared memory is written"
                self._unordered(what, lanes[rows], readers, late)

    def end(self, lanes: Ints) -> None:
        """Report that the last `lanes` of a block end, and another may still read its memory."""
        machine, shared = self._machine, self._machine.shared
        if not self._reads:
            return
        blocks = lanes // machine.threads
        ended = np.logical_not(machine.alive.reshape(machine.blocks, -1).any(axis=1))
        latest = np.full(machine.blocks, -1)  # the lane of each block with the most waits
        order = np.argsort(self._waits[lanes], kind="stable")
        latest[blocks[order]] = lanes[order]
        for read in self._reads:
            owner = read.granules * shared.granule_bytes // shared.stride
            there = ended[owner] & (latest[owner] >= 0)
            last, readers = latest[owner][there], read.lanes[there]
            late = read.time > self._ordered_until(last, readers)
            if late.any():
                self._unordered("a block ends", last, readers, late)

    def _unordered(self, what: str, lanes: Ints, readers: Ints, late: Bools) -> NoReturn:
        machine = self._machine
        block, thread = divmod(int(readers[int(np.argmax(late))]), machine.threads)
        message = (
            f"{what}, and nothing orders that after the read of its shared memory by block "
            f"{machine.first_block + block} warp {thread // WARP} lane {thread % WARP}"
        )
        machine.report("race", message, lanes, late)


def _copies_to_others(step: Step) -> bool:
    """Return whether an instruction lets the copy engine write to another block."""
    kind = step.instruction.modifiers
    return "multicast::cluster" in kind or kind[2:4] == ("shared::cluster", "shared::cta")


# ---- instructions --------------------------------------------------------------------------------


def cluster_barrier(inst: Instruction) -> Step | None:
    """Arrive at the barrier of the cluster, or wait there."""
    kind = [m for m in inst.modifiers if m not in ("cluster", "aligned")]
    together = whole_warp if "aligned" in inst.modifiers else None
    if kind in (["arrive"], ["arrive", "release"], ["arrive", "relaxed"]):
        release = "relaxed" not in kind

        def arrive(machine: Machine, lanes: Lanes) -> None:
            machine.clusters.arrive(lanes, release=release)

        return Step(inst, arrive, together=together)
    if kind in (["wait"], ["wait", "acquire"]):

        def wait(machine: Machine, lanes: Lanes) -> None:
            machine.clusters.wait(lanes)

        return Step(inst, wait, together=together, leaves=True, again=True)
    return None


@instruction("mapa")
def map_address(inst: Instruction) -> Execute | None:
    """Turn an address in a block's shared memory into the same one in another block's."""
    if inst.modifiers != ("shared::cluster", "u32"):
        return None
    write = writer(inst.operands[0])
    address, rank = address_reader(inst.operands[1]), reader(inst.operands[2], "u32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        ranks = machine.each(rank(machine)).astype(np.int64)
        outside = ranks[lanes.index] >= machine.clusters.blocks
        if outside.any():
            message = f"a rank outside the cluster, which has {machine.clusters.blocks} blocks"
            machine.report("out of bounds", message, lanes.index, outside)
        within = address(machine) & WITHIN
        write(machine, (within | (ranks + 1) << RANK_BITS).astype(np.uint32), lanes)

    return execute
