"""Barriers in shared memory that count arrivals and bytes (``mbarrier``, sm_90).

A barrier has phases. A phase ends when all expected arrivals have come and all announced bytes have
arrived. Lanes that wait for it sleep until then. Copies that report to a barrier arrive when a
thread waits for that barrier, and not before. Threads of other blocks of the cluster may arrive.
They order what the copy engine writes, and not loads from another block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cupyattn.interpret.access import address_reader
from cupyattn.interpret.memory import WITHIN
from cupyattn.interpret.ordering import WARP, Bools, Ints, Times
from cupyattn.interpret.ptx import Instruction, Operand, Sink
from cupyattn.interpret.semantics import (
    ACCESSES,
    Execute,
    Step,
    instruction,
    not_known,
    reader,
    writer,
)

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

#: Modifiers for scope, address window and memory order of an operation.
_SCOPES = {
    "shared", "shared::cta", "shared::cluster", "cta", "cluster", "release", "acquire", "relaxed",
    "b64",
}  # fmt: skip


@dataclass
class Mbarrier:
    """One barrier.

    Parameters
    ----------
    expected : int
        Number of arrivals of a phase.
    pending : int
        Arrivals still missing in this phase.
    bytes : int
        Bytes announced and not yet delivered.
    phase : int
        Number of completed phases.
    arrivals : array
        Joined views of all threads that arrived (`cupyattn.interpret.ordering.Clocks.views`).
    released : array
        The same at the end of the last phase: threads that wait for it acquire this view.
    visible : bool
        Whether a fence has shown its initialisation to the copy engine.
    deliveries : list of callable
        Copies in flight that report to it.
    number : int
        Number among the barriers of the launch.
    far : bool
        Whether threads of other blocks have arrived.
    """

    expected: int
    pending: int
    arrivals: Times
    released: Times
    bytes: int = 0
    phase: int = 0
    visible: bool = False
    initialised_by: int = 0
    deliveries: list[Callable[[], None]] = field(default_factory=list)
    number: int = 0
    far: bool = False

    def key(self, phase: int) -> int:
        """Return the number, no address, at which other blocks publish in a phase."""
        return -1 - (self.number << 20 | phase)

    def advance(self) -> bool:
        """End the phase if it is complete; return whether it ended."""
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.expected
        self.released = self.arrivals.copy()
        return True


class Mbarriers:
    """The barriers of a batch of blocks, by address, and the lanes that wait for them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._barriers: dict[int, Mbarrier] = {}
        self._asleep: dict[tuple[int, int], list[int]] = {}  # barrier and place, lanes
        self.fence_time = np.zeros(machine.size, np.int32)  # of each lane's last memory fence

    def at(self, address: Ints, lanes: Ints) -> list[Mbarrier]:
        """Return the barriers at the addresses of `lanes`, each access checked."""
        shared, clusters = self._machine.shared, self._machine.clusters
        offset = clusters.offset(address, 8, lanes)
        places = offset.tolist()
        if not self._barriers.keys() >= set(places):
            missing = np.array([x not in self._barriers for x in places])
            message = "there is no initialised mbarrier"
            self._machine.report(
                "never written", message, lanes, missing, offset % max(shared.stride, 1)
            )
        own = np.flatnonzero(clusters.owners(address, lanes) == lanes // self._machine.threads)
        if len(own):
            shared.exchange(address[own] & WITHIN, 8, lanes[own])
        return [self._barriers[x] for x in places]

    def create(self, address: Ints, counts: Ints, lanes: Ints) -> None:
        """Initialise barriers."""
        shared, clocks = self._machine.shared, self._machine.clocks
        shared.store(address, np.zeros((1, len(lanes)), np.uint64), lanes)
        for offset, count, lane in zip(
            shared.offset(address, 8, lanes).tolist(), counts.tolist(), lanes.tolist(), strict=True
        ):
            seen = np.zeros(clocks.threads + 1, np.int32)
            number = clocks.first // clocks.threads * shared.stride + offset
            barrier = Mbarrier(count, count, seen, seen, initialised_by=lane, number=number)
            self._barriers[offset] = barrier

    def remove(self, address: Ints, lanes: Ints) -> None:
        """Invalidate barriers: to use one again is a finding until it is initialised again."""
        self.at(address, lanes)
        shared = self._machine.shared
        for offset in shared.offset(address, 8, lanes).tolist():
            self._barriers.pop(offset, None)

    def show(self, lanes: Lanes) -> None:
        """Show the copy engine the barriers that `lanes` initialised."""
        for barrier in self._barriers.values():
            barrier.visible |= bool(lanes.mask[barrier.initialised_by])

    def arrive(self, address: Ints, counts: Ints, tx: Ints, lanes: Ints) -> Ints:
        """Announce bytes and count arrivals; return the phases of these arrivals.

        Lanes of a warp arrive in no defined order. If some end a phase and others arrive in the
        next phase, chance decides which lanes do so. Such a kernel has a fault.
        """
        machine = self._machine
        phases = np.empty(len(lanes), np.int64)
        views = machine.clocks.views(lanes)
        first: dict[tuple[int, int], int] = {}
        for row, barrier in enumerate(self.at(address, lanes)):
            phases[row] = barrier.phase
            warp = int(lanes[row]) // WARP
            if first.setdefault((id(barrier), warp), barrier.phase) != barrier.phase:
                message = "lanes of a warp arrive at an mbarrier in two of its phases"
                machine.report("divergence", message, lanes, np.arange(len(lanes)) == row, address)
            barrier.bytes += int(tx[row])
            lane = int(lanes[row])
            if lane // machine.threads == barrier.initialised_by // machine.threads:
                barrier.arrivals = np.maximum(barrier.arrivals, views[row])
            else:
                self._publish(barrier, lane, views[row])
            if counts[row] > barrier.pending:
                message = f"{counts[row]} arrive at an mbarrier that waits for {barrier.pending}"
                machine.report("divergence", message, lanes, np.arange(len(lanes)) == row, address)
            barrier.pending -= int(counts[row])
            if barrier.advance():
                self.wake(barrier)
        return phases

    def _publish(self, barrier: Mbarrier, lane: int, view: Times) -> None:
        """Order the threads that will wait for this phase after a lane of another block."""
        clocks, barrier.far = self._machine.clocks, True
        barrier.arrivals = barrier.arrivals.copy()
        barrier.arrivals[-1] = max(barrier.arrivals[-1], view[-1])
        clocks.between.release(clocks, np.array([lane]), np.array([barrier.key(barrier.phase)]))

    def complete(self, address: Ints, tx: Ints, lanes: Ints) -> None:
        """Count delivered bytes on behalf of threads; only their last fence orders this."""
        machine = self._machine
        if (machine.clusters.owners(address, lanes) != lanes // machine.threads).any():
            raise not_known(machine.program.steps[machine.place].instruction)
        views = machine.clocks.views(lanes)
        views[np.arange(len(lanes)), lanes % machine.threads] = self.fence_time[lanes]
        for row, barrier in enumerate(self.at(address, lanes)):
            barrier.bytes -= int(tx[row])
            barrier.arrivals = np.maximum(barrier.arrivals, views[row])
            if barrier.advance():
                self.wake(barrier)

    def deliver(self, barrier: Mbarrier, count: int) -> None:
        """Count off bytes that the copy engine has just written."""
        barrier.bytes -= count
        barrier.arrivals = barrier.arrivals.copy()
        barrier.arrivals[-1] = self._machine.clocks.now

    def done(self, address: Ints, phases: Ints, lanes: Ints, *, parity: bool) -> Bools:
        """Return whether phases have ended; copies for which the lanes must wait arrive now."""
        clocks = self._machine.clocks
        found = np.zeros(len(lanes), np.bool_)
        for barrier, rows in _each(self.at(address, lanes)):
            ended = _ended(barrier, phases[rows], parity)
            if not ended.all() and barrier.deliveries:
                for delivery in barrier.deliveries:
                    delivery()
                barrier.deliveries.clear()
                if barrier.advance():
                    self.wake(barrier)
                ended = _ended(barrier, phases[rows], parity)
            found[rows] = ended
            if ended.any():
                through = lanes[rows][ended]
                clocks.acquire(through, barrier.released)
                if barrier.far:
                    keys = np.full(len(through), barrier.key(barrier.phase - 1))
                    clocks.between.acquire(clocks, through, keys)
        return found

    def sleep(self, barriers: list[Mbarrier], lanes: Ints) -> None:
        """Let lanes wait; they repeat the instruction when a phase of their barrier ends."""
        for barrier, rows in _each(barriers):
            key = id(barrier), self._machine.place
            self._asleep.setdefault(key, []).extend(lanes[rows].tolist())

    def wake(self, barrier: Mbarrier) -> None:
        """Let the lanes that wait for a barrier test it again."""
        machine = self._machine
        for key in [key for key in self._asleep if key[0] == id(barrier)]:
            mask = np.zeros(machine.size, np.bool_)
            mask[self._asleep.pop(key)] = True
            machine.go(key[1], mask)

    def sleepers(self) -> list[tuple[int, list[int]]]:
        """Return the places where lanes wait, with the lanes."""
        return [(place, lanes) for (_, place), lanes in self._asleep.items()]


def _each(barriers: list[Mbarrier]) -> Iterator[tuple[Mbarrier, Ints]]:
    """Yield each barrier once, and its rows in the list."""
    numbers = np.array([barrier.number for barrier in barriers])
    for number, barrier in {barrier.number: barrier for barrier in barriers}.items():
        yield barrier, np.flatnonzero(numbers == number)


def _ended(barrier: Mbarrier, phases: Ints, parity: bool) -> Bools:
    """Return whether a barrier has completed phases, given by parity or by number."""
    now = np.full(len(phases), barrier.phase)
    ended: Bools = now % 2 != phases % 2 if parity else now > phases
    return ended


def _plain(inst: Instruction) -> tuple[str, ...]:
    return tuple(m for m in inst.modifiers if m not in _SCOPES)


def _count(operand: Operand | None, default: int) -> Callable[[Machine], Ints]:
    if operand is None:
        return lambda machine: np.full(machine.size, default)
    read = reader(operand, "u32")
    return lambda machine: machine.each(read(machine)).astype(np.intp)


ACCESSES["mbarrier"] = lambda inst: ("shared", 8)


@instruction("mbarrier")
def mbarrier(inst: Instruction) -> Execute | Step | None:
    """Build an operation on a barrier."""
    kind = _plain(inst)
    operands = list(inst.operands)
    if kind == ("init",):
        return _init(operands)
    if kind == ("inval",):
        barrier = address_reader(operands[0])
        return lambda machine, lanes: machine.mbarriers.remove(
            barrier(machine)[lanes.index], lanes.index
        )
    if kind in (("try_wait", "parity"), ("test_wait", "parity"), ("try_wait",), ("test_wait",)):
        return _wait(inst, operands, parity="parity" in kind, blocks=kind[0] == "try_wait")
    if kind == ("complete_tx",):
        address, tx = address_reader(operands[0]), _count(operands[1], 0)

        def complete(machine: Machine, lanes: Lanes) -> None:
            index = lanes.index
            machine.mbarriers.complete(address(machine)[index], tx(machine)[index], index)

        return complete
    if kind == ("expect_tx",):
        return _arrive([Sink(), operands[0]], None, _count(operands[1], 0), 0)
    if kind == ("arrive", "expect_tx"):
        return _arrive(operands[:2], None, _count(operands[2], 0), 1)
    if kind == ("arrive",):
        count = operands[2] if len(operands) > 2 else None
        return _arrive(operands[:2], count, _count(None, 0), 1)
    return None


def _init(operands: list[Operand]) -> Execute:
    address, count = address_reader(operands[0]), _count(operands[1], 0)

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        machine.mbarriers.create(address(machine)[index], count(machine)[index], index)

    return execute


def _arrive(
    operands: list[Operand], count: Operand | None, tx: Callable[[Machine], Ints], default: int
) -> Execute:
    write = writer(operands[0])
    address, counts = address_reader(operands[1]), _count(count, default)

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        phases = machine.mbarriers.arrive(
            address(machine)[index], counts(machine)[index], tx(machine)[index], index
        )
        write(machine, phases.astype(np.uint64), lanes)

    return execute


def _wait(inst: Instruction, operands: list[Operand], *, parity: bool, blocks: bool) -> Step:
    """Wait for a phase: sleep if the instruction may suspend the lane, otherwise only test it."""
    write = writer(operands[0])
    address = address_reader(operands[1])
    phase = reader(operands[2], "u32" if parity else "u64")

    def execute(machine: Machine, lanes: Lanes) -> None:
        index, barriers = lanes.index, machine.mbarriers
        at = address(machine)[index]
        wanted = machine.each(phase(machine))[index].astype(np.intp)
        ended = barriers.done(at, wanted, index, parity=parity)
        result = np.zeros(machine.size, np.bool_)
        result[index] = ended
        if not blocks or ended.all():
            write(machine, result, lanes)
            machine.go(machine.place + 1, lanes)
            return
        if ended.any():
            through = lanes.where(result)
            write(machine, result, through)
            machine.go(machine.place + 1, through)
        late = ~ended
        barriers.sleep(barriers.at(at[late], index[late]), index[late])

    return Step(inst, execute, leaves=True, again=True)
