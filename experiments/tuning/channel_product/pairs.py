"""Teaches the interpreter what `multicast.cuh` adds: copies to both blocks of a pair, and arrivals
at an mbarrier of the other block.

A copy into the other block's memory is checked against what its sender knows of that block: the
barrier of the cluster, and what warps of that block had done when they arrived at the mbarriers
that the sender has waited for. The state lives in module tables while `taught` is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cupyattn.interpret import bulk, mbarrier
from cupyattn.interpret.access import address_reader
from cupyattn.interpret.cluster import RANK_BITS, Clusters, FarRead
from cupyattn.interpret.ordering import Bools, Ints, Times
from cupyattn.interpret.semantics import BUILDERS, Execute, Step, reader

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.ptx import Instruction

Views = dict[int, Times]  # by block of the batch, what somebody knows of its threads


def _join(into: Views, views: Views) -> None:
    for block, view in views.items():
        into[block] = np.maximum(into.get(block, 0), view)


@dataclass
class PairMbarrier(mbarrier.Mbarrier):
    """An mbarrier at which lanes of other blocks arrive too.

    `far` is what they had done by then, and `far_released` the same when the last phase ended.
    """

    far: Views = field(default_factory=dict)
    far_released: Views = field(default_factory=dict)

    def advance(self) -> bool:
        """End the phase if all has come; return whether it did."""
        ended = super().advance()
        if ended:
            self.far_released = dict(self.far)
        return ended


class PairMbarriers(mbarrier.Mbarriers):
    """The barriers of a batch, and what each lane has heard of other blocks at them."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.heard: dict[int, Views] = {}  # by lane

    def done(self, address: Ints, phases: Ints, lanes: Ints, *, parity: bool) -> Bools:
        """Return whether phases have ended; lanes hear of other blocks there."""
        found = super().done(address, phases, lanes, parity=parity)
        for row in np.flatnonzero(found).tolist():
            (one,) = self.at(address[row : row + 1], lanes[row : row + 1])
            if isinstance(one, PairMbarrier):
                _join(self.heard.setdefault(int(lanes[row]), {}), one.far_released)
        return found

    def arrive_far(self, address: int, lane: int, stand_in: int) -> None:
        """Count an arrival of `lane` at a barrier of the block of `stand_in`."""
        machine = self._machine
        lanes = np.array([stand_in])
        offset = int(machine.shared.offset(np.array([address]), 8, lanes)[0])
        one = self._barriers.get(offset)
        if not isinstance(one, PairMbarrier) or not one.pending:
            message = "a lane arrives at an mbarrier of another block that waits for no more"
            machine.report("divergence", message, np.array([lane]), np.ones(1, np.bool_))
        granule = np.array([offset // machine.shared.granule_bytes])
        machine.clusters.arrived.append(FarRead(machine.clocks.now, granule, np.array([lane])))
        (view,) = machine.clocks.views(np.array([lane]))
        _join(one.far, {lane // machine.threads: view})
        one.pending -= 1
        if one.advance():
            self.wake(one)


class PairClusters(Clusters):
    """The clusters of a batch, whose blocks end after what lanes of others did to their memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.arrived: list[FarRead] = []

    def end(self, lanes: Ints) -> None:
        """Report that a block ends, and another one's arrival there may still come."""
        reads = self._reads
        self._reads = reads + self.arrived
        super().end(lanes)
        self._reads = reads


def _stand_in(machine: Machine, lane: int, rank: int) -> int:
    """Return the lane of the same number in block `rank` of a lane's cluster, which must live."""
    blocks = machine.clusters.blocks
    own = lane // machine.threads
    block = own // blocks * blocks + rank
    if not machine.alive.reshape(machine.blocks, -1)[block].any():
        message = "shared memory of another block is written, and that block has ended"
        machine.report("race", message, np.array([lane]), np.ones(1, np.bool_))
    return lane + (block - own) * machine.threads


@contextlib.contextmanager
def _acting_for(machine: Machine, lane: int, stand_in: int) -> Iterator[None]:
    """Let a lane of another block come after what `lane` knows of that block, and no more."""
    clocks, block = machine.clocks, stand_in // machine.threads
    kept = clocks._seen[stand_in].copy()
    barriers = machine.mbarriers
    heard = barriers.heard.get(lane, {}) if isinstance(barriers, PairMbarriers) else {}
    nothing = np.zeros_like(kept)
    known = np.maximum(machine.clusters._seen.get(block, nothing), heard.get(block, nothing))
    clocks._seen[stand_in] = known
    try:
        yield
    finally:
        clocks._seen[stand_in] = kept


def _multicast(inst: Instruction) -> Execute:
    target = address_reader(inst.operands[0])
    tensor, coordinates = bulk._corner(inst.operands[1])
    barrier = address_reader(inst.operands[2])
    mask = reader(inst.operands[3], "u16")

    def execute(machine: Machine, lanes: Lanes) -> None:
        engine = machine.engine
        maps, targets, barriers = (read(machine) for read in (tensor, target, barrier))
        corners = [read(machine) for read in coordinates]
        blocks = machine.each(mask(machine))
        for lane in lanes.index.tolist():
            corner = [int(x[lane]) for x in reversed(corners)]
            found = engine.tensor(int(maps[lane]), lane)
            for rank in range(machine.clusters.blocks):
                if not int(blocks[lane]) >> rank & 1:
                    continue
                other = _stand_in(machine, lane, rank)
                where = int(targets[lane]), int(barriers[lane])
                if other == lane:
                    engine.bring(found, corner, *where, lane)
                else:
                    with _acting_for(machine, lane, other):
                        engine.bring(found, corner, *where, other)

    return execute


def _arrive(inst: Instruction) -> Execute:
    address = address_reader(inst.operands[1])

    def execute(machine: Machine, lanes: Lanes) -> None:
        at = address(machine)
        for lane in lanes.index.tolist():
            rank, within = int(at[lane]) >> RANK_BITS, int(at[lane]) & ((1 << RANK_BITS) - 1)
            other = _stand_in(machine, lane, rank - 1)
            one = np.array([lane])
            if other == lane:
                nothing = np.zeros(1, np.intp)
                machine.mbarriers.arrive(np.array([within]), nothing + 1, nothing, one)
            else:
                machine.mbarriers.arrive_far(within, lane, other)

    return execute


@contextlib.contextmanager
def taught() -> Iterator[None]:
    """Let the interpreter know the instructions of a pair."""
    from cupyattn.interpret import machine

    copy, other = BUILDERS["cp"], BUILDERS["mbarrier"]

    def copies(inst: Instruction) -> Step | Execute | None:
        return _multicast(inst) if "multicast::cluster" in inst.modifiers else copy(inst)

    def barriers(inst: Instruction) -> Step | Execute | None:
        far = {"arrive", "shared::cluster"} <= set(inst.modifiers)
        return _arrive(inst) if far else other(inst)

    BUILDERS.update(cp=copies, mbarrier=barriers)
    mbarrier.Mbarrier = PairMbarrier
    machine.Mbarriers, machine.Clusters = PairMbarriers, PairClusters
    try:
        yield
    finally:
        BUILDERS.update(cp=copy, mbarrier=other)
        mbarrier.Mbarrier = PairMbarrier.__base__
        machine.Mbarriers, machine.Clusters = PairMbarriers.__base__, Clusters
