"""The machine: lanes of many warps and blocks, executed together at the same program counter.

A register is an array with one value for every lane of the batch. Lanes at the same instruction
form a group. The group that is furthest back runs first, so lanes that diverged at a branch
reconverge. Instructions of a whole warp wait until the lanes that they name have arrived.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.access import Copies
from cupyattn.interpret.barriers import Barriers
from cupyattn.interpret.bulk import Engine, Tensor
from cupyattn.interpret.cluster import Clusters
from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.findings import Finding, KernelFault
from cupyattn.interpret.lanes import Lanes, Values
from cupyattn.interpret.mbarrier import Mbarriers
from cupyattn.interpret.memory import (
    WINDOWS,
    GlobalMemory,
    LocalMemory,
    ParamMemory,
    SharedMemory,
    Space,
)
from cupyattn.interpret.observer import Observer
from cupyattn.interpret.ordering import WARP, Bools, Clocks, Ints
from cupyattn.interpret.program import Program, Segment
from cupyattn.interpret.ptx import Register
from cupyattn.interpret.register_pools import RegisterPools
from cupyattn.interpret.semantics import Read, not_known, register_type
from cupyattn.interpret.special import special_registers
from cupyattn.interpret.turns import Turns
from cupyattn.interpret.variables import Extent
from cupyattn.interpret.wgmma import Warpgroups

FULL_WARP = 0xFFFFFFFF
_WINDOWS = {base >> 56: name for name, base in WINDOWS.items()}
#: Largest number of segments of a batch of blocks: a kernel that runs longer will not end.
MAX_SEGMENTS = 5_000_000
#: Number of times that lanes may wait although no other lane can run.
MAX_RESTS = 100
#: Mean number of segments between changes of priority, under a random schedule.
NEW_RANKS = 500
_dice: ContextVar[random.Random | None] = ContextVar("dice", default=None)


@contextlib.contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Prefer some warps of a block, which are drawn at random from time to time.

    Without a schedule, no warp falls behind. The result of a kernel must not depend on the order of
    warps. Some missing waits show only under schedules in which other warps are late.

    Parameters
    ----------
    seed : int
        The same orders for the same seed.

    Examples
    --------
    >>> from cupyattn import interpret
    >>> with interpret.schedule(seed=1):
    ...     pass  # cupyattn.attention(..., backend="interpret")
    """
    token = _dice.set(random.Random(seed))
    try:
        yield
    finally:
        _dice.reset(token)


class BoundLaunch(NamedTuple):
    """A launch whose buffers and variables have addresses.

    Parameters
    ----------
    program : Program
    grid, block : int
        Blocks of the launch, threads of each.
    params : numpy.ndarray of uint8
        The parameters, packed.
    symbols : mapping of str to int
        Addresses of variables in global memory.
    dynamic_shared : int
        Bytes of dynamic shared memory.
    tensors : sequence of Tensor
        The arrays of tensor maps among the parameters.
    grid_shape, block_shape : tuple of int
        Their extents in x, y and z.
    """

    program: Program
    grid: int
    block: int
    params: npt.NDArray[np.uint8]
    symbols: Mapping[str, int]
    dynamic_shared: int
    tensors: Sequence[Tensor]
    grid_shape: tuple[int, int, int]
    block_shape: tuple[int, int, int]


class Machine:
    """A batch of blocks of one launch.

    Parameters
    ----------
    launch : BoundLaunch
    memory : GlobalMemory
        Shared by the batches of a launch.
    first_block, blocks : int
        The first block of this batch, and their number.
    now : int
        Time at which it starts.
    observers : tuple of Observer
        Called for every instruction.
    """

    def __init__(
        self,
        launch: BoundLaunch,
        memory: GlobalMemory,
        *,
        first_block: int,
        blocks: int,
        now: int = 0,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.program = program = launch.program
        self.grid, self.block = launch.grid, launch.block
        self.shapes = launch.grid_shape, launch.block_shape
        self.dynamic_shared = launch.dynamic_shared
        self.first_block, self.blocks = first_block, blocks
        self.threads = -(-self.block // WARP) * WARP
        self.size = blocks * self.threads
        self.lane = np.arange(self.size)
        self.thread = self.lane % self.threads
        self.alive = self.thread < self.block
        first_lane = first_block * self.threads
        self.clocks = Clocks(blocks, self.threads, first_lane, now, memory.between)
        self.memory = memory
        memory.attach(self.clocks, self.report)
        self._observers = observers
        granule = program.granules["shared"]
        shared = program.shared_bytes + launch.dynamic_shared
        self.shared = SharedMemory(
            blocks, shared, granule, self.clocks, self.report, program.kernel.cluster,
            self._extent if program.extents else None,
        )  # fmt: skip
        self.clusters = Clusters(self)
        self.spaces: dict[str, Space] = {
            "global": memory,
            "shared": self.shared,
            "cluster": self.clusters,
            "local": LocalMemory(self.size, program.local_bytes, self.report),
            "param": ParamMemory(launch.params, self.report),
        }
        self.registers: list[Values | None] = [None] * len(program.kernel.registers)
        #: For each register that may be read before it is written, the lanes that have written it.
        self.known = np.zeros((len(program.unsure), self.size), np.bool_)
        self.copies = Copies(self.size)
        self.mbarriers = Mbarriers(self)
        self.warpgroups = Warpgroups(self)
        self.engine = Engine(self, launch.tensors)
        self.counts: Counter[int] = Counter()  # warps that ran each segment
        self.traffic: Counter[tuple[str, str]] = Counter()  # bytes, by space and direction
        self.place = 0  # index of the instruction under way
        self._parked: dict[int, Bools] = {}  # lanes that wait for others of their warp, by place
        self._groups: dict[int, Lanes] = {}
        self._turns = Turns()
        self._resting: dict[int, Bools] = {}  # lanes that let others run first, by place
        self._rested: dict[int, bytes] = {}  # the same lanes when they last continued
        self._ranks: list[int] = []  # under a schedule, the priority of each warp of a block
        self._in_vain = 0  # number of times that the same lanes have continued and come back since
        self._symbols = {
            **launch.symbols, **program.shared, **program.local,
            **{p.name: p.offset for p in program.kernel.parameters},
        }  # fmt: skip
        self._special: dict[str, Values] = {}
        self.barriers = Barriers(self)
        self.register_pools = RegisterPools(self)
        self.go(0, self.alive)

    # ---- running ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every lane has exited.

        Raises
        ------
        KernelFault
            At the first hazard.
        UnsupportedError
            At an instruction that the interpreter does not know.
        """
        with np.errstate(all="ignore"):
            for _ in range(MAX_SEGMENTS):
                if not self._groups and not self._wake_resting():
                    break
                place, lanes = self._next()
                segment = self.program.segments.get(place)
                if segment is None:  # the end of the body
                    self.exit(lanes)
                else:
                    self._run_segment(segment, lanes)
            else:
                message = f"still running after {MAX_SEGMENTS} segments of instructions"
                self.report("no end", message, self.lane, self.alive)
        if self.alive.any():
            self._report_deadlock()
        self.engine.check_idle()

    def release(self) -> None:
        """Release all parts; the machine cannot be used afterwards.

        The parts and the machine refer to each other. Without this call, their memory, which may
        be gigabytes, would wait for the garbage collector.
        """
        vars(self).clear()

    def _next(self) -> tuple[int, Lanes]:
        """Return the next place and its lanes, drawn by the schedule if there is one."""
        dice = _dice.get()
        if dice is None:
            place = self._turns.choose(self._groups)
            return place, self._groups.pop(place)
        if not self._ranks or dice.random() < 1 / NEW_RANKS:
            self._ranks = dice.sample(range(self.threads // WARP), self.threads // WARP)
        ranks = np.array(self._ranks * self.blocks)
        place, best = max(
            ((place, ranks[lanes.bits != 0].max()) for place, lanes in self._groups.items()),
            key=operator.itemgetter(1),
        )
        lanes = self._groups.pop(place)
        some = np.repeat(ranks == best, WARP) & lanes.mask
        if (others := lanes.mask & ~some).any():
            self.go(place, others)
        return place, Lanes(some, self.alive)

    def _run_segment(self, segment: Segment, lanes: Lanes) -> None:
        first = segment.steps[0][1]
        self.place = segment.start
        if first.together is not None:
            lanes = self._gather(first.together, first.warps, lanes)
            if not lanes:
                return
        self.counts[segment.start] += len(lanes.warps)
        if self._observers:
            self._run_observed(segment, lanes)
        else:
            clocks = self.clocks
            for self.place, step in segment.steps:
                clocks.now += 1
                step.execute(self, lanes)
        if not segment.steps[-1][1].leaves:
            self.go(segment.stop, lanes)

    def _run_observed(self, segment: Segment, lanes: Lanes) -> None:
        for self.place, step in segment.steps:
            self.clocks.now += 1
            for observer in self._observers:
                observer.before(self, lanes)
            step.execute(self, lanes)
            for observer in self._observers:
                observer.after(self, lanes)

    def go(self, place: int, lanes: Lanes | Bools) -> None:
        """Let lanes continue at an instruction."""
        if not isinstance(lanes, Lanes):
            lanes = Lanes(lanes, self.alive)
        present = self._groups.get(place)
        if present is not None:
            lanes = Lanes(present.mask | lanes.mask, self.alive)
        self._groups[place] = lanes

    def rest(self, lanes: Lanes) -> None:
        """Let lanes continue after this instruction when no other lane can run."""
        place = self.place + 1
        resting = self._resting.get(place)
        self._resting[place] = lanes.mask if resting is None else resting | lanes.mask

    def _wake_resting(self) -> bool:
        """Let resting lanes continue; return whether there are any that may progress."""
        state = {place: mask.tobytes() for place, mask in self._resting.items()}
        self._in_vain = self._in_vain + 1 if state == self._rested else 0
        self._rested = state
        if self._in_vain == MAX_RESTS:
            return False
        for place, mask in self._resting.items():
            self.go(place, mask)
        self._resting = {}
        return bool(state)

    def exit(self, lanes: Lanes) -> None:
        """End lanes; lanes that wait for the rest of their warps may now continue."""
        self.alive = self.alive & ~lanes.mask
        self.clocks.end_blocks(np.logical_not(self.alive.reshape(self.blocks, -1).any(axis=1)))
        self._groups = {place: Lanes(x.mask, self.alive) for place, x in self._groups.items()}
        for place in list(self._parked):
            self.go(place, self._parked.pop(place))
        if self.clusters.blocks > 1:
            self.clusters.end(lanes.index)
            self.clusters.advance()

    def _gather(self, together: Read, warps: int, lanes: Lanes) -> Lanes:
        """Return the lanes whose partners have all arrived; let the others wait."""
        if self.place in self._parked:
            lanes = Lanes(lanes.mask | self._parked.pop(self.place), self.alive)
        named = together(self)
        whole = named == FULL_WARP
        if whole.all() or (named.ndim and whole[lanes.mask].all()):
            if lanes.full:
                return lanes
            needed = Lanes(self.alive, self.alive).bits
            missing = (lanes.bits & needed) != needed
            if warps > 1:
                missing = self._of_groups(missing, warps)
            late = np.repeat(missing, WARP) & lanes.mask
        else:
            lanes, late = self._of_one_mask(self.each(named), lanes)
        if not late.any():
            return lanes
        self._parked[self.place] = late
        return Lanes(lanes.mask & ~late, self.alive)

    def _of_groups(self, missing: Bools, warps: int) -> Bools:
        """Return, for every warp, whether it or another one of its group is `missing`.

        The last group of a block may have fewer warps than the others.
        """
        of_block = missing.reshape(self.blocks, -1)
        first = np.arange(0, of_block.shape[1], warps)
        groups = np.logical_or.reduceat(of_block, first, axis=1)
        return np.repeat(groups, warps, axis=1)[:, : of_block.shape[1]].ravel()

    def _of_one_mask(self, named: Values, lanes: Lanes) -> tuple[Lanes, Bools]:
        """Choose lanes that name the same partners: one set in each warp. The others come next.

        Returns
        -------
        Lanes
            The chosen lanes, including late lanes.
        numpy.ndarray of bool
            Lanes that must wait for partners.
        """
        masks = named.reshape(-1, WARP).astype(np.uint32)
        here = lanes.mask.reshape(-1, WARP)
        names = (masks[:, :, None] >> np.arange(WARP, dtype=np.uint32)) & 1 == 1  # warp, lane, lane
        alike = (masks[:, :, None] == masks[:, None, :]) & here[:, None, :]
        own = np.diagonal(names, axis1=1, axis2=2)
        apart = (names & here[:, None, :] & ~alike).any(axis=2)
        for bad, message in (
            (apart, "the lanes of a warp name different partners"),
            (~own, "a lane executes an instruction whose mask leaves it out"),
        ):
            if (bad & here).any():
                self.report("divergence", message, self.lane, (bad & here).ravel())
        alive = self.alive.reshape(-1, WARP)
        late = here & (names & alive[:, None, :] & ~alike).any(axis=2)
        ready = here & ~late
        first = masks[np.arange(len(masks)), ready.argmax(axis=1)]
        later = ready & (masks != first[:, None])
        if later.any():
            self.go(self.place, later.ravel())
        return Lanes((here & ~later).ravel(), self.alive), late.ravel()

    def met(self, lanes: Lanes) -> None:
        """Record that the lanes here of each warp have met, which orders them from now on."""
        bits = lanes.bits
        whole = np.flatnonzero(bits == FULL_WARP)
        if len(whole):
            self.clocks.meet_warps(whole)
        if len(whole) < len(lanes.warps):
            for warp in np.flatnonzero((bits != 0) & (bits != FULL_WARP)):
                some = warp * WARP + np.flatnonzero(lanes.mask[warp * WARP : (warp + 1) * WARP])
                self.clocks.meet(some)

    # ---- registers and names ---------------------------------------------------------------------

    def set(self, index: int, value: Values, lanes: Lanes) -> None:
        """Write a register for some lanes. Arrays are shared, never changed in place.

        `value` has one entry for all, one for each lane of the batch, or one for each of `lanes`.
        """
        if value.ndim == 0:
            value = np.full(self.size, value)
        few = len(value) < self.size
        if few or not lanes.full:
            old = self.registers[index]
            kept = np.zeros(self.size, value.dtype) if old is None else old.view(value.dtype)
            if few:
                whole = kept.copy()
                whole[lanes.index] = value
                value = whole
            else:
                value = np.where(lanes.mask, value, kept)
        self.registers[index] = value

    def undefined(self, register: Register) -> Values:
        """Return the value of an unwritten register: zeros."""
        return np.zeros(self.size, register_type(register))

    def each(self, value: Values) -> Values:
        """Return an operand as an array of one value for every lane of the batch."""
        return value if value.ndim else np.full(self.size, value)

    def value(self, read: Read, lane: int) -> int:
        """Return an operand of one lane."""
        return int(self.each(read(self))[lane])

    def symbol(self, name: str) -> Ints:
        """Return the address of a variable or parameter within its space, one for all lanes.

        In a cluster, a variable in shared memory has an address for each lane, with a rank.
        """
        place = np.array(self._symbols[name])
        ranked = self.shared.ranks is not None and name in self.program.shared
        return place + self.shared.ranks if ranked else place

    def special(self, name: str) -> Values:
        """Return a special register, one value for each lane.

        Raises
        ------
        UnsupportedError
            For one that the interpreter does not know.
        """
        if name in self._special:
            return self._special[name]
        if self._special:
            raise not_known(self.program.steps[self.place].instruction)
        self._special = special_registers(self)
        return self.special(name)

    def space(
        self, name: str, address: Ints, direction: str, width: int
    ) -> Iterator[tuple[Space, Ints, Ints | None]]:
        """Yield the memories of some addresses, and count the bytes that move.

        Each memory comes with its addresses, relative to its window, and their indices (None: all
        addresses).
        """
        if name != "generic":
            self.traffic[name, direction] += width * len(address)
            yield self.spaces[name], address, None
            return
        kinds = address >> 56
        for kind in distinct(kinds):
            which = _WINDOWS.get(int(kind), "global")
            some = np.flatnonzero(kinds == kind)
            self.traffic[which, direction] += width * len(some)
            within = address[some] - WINDOWS.get(which, 0)
            yield self.spaces[which], within, None if len(some) == len(kinds) else some

    def _extent(self) -> Extent | None:
        """Return the variables that the access under way must stay within, if they are known."""
        return self.program.extents.get(self.place)

    # ---- findings --------------------------------------------------------------------------------

    def report(
        self, kind: str, message: str, lanes: Ints, bad: Bools, address: Ints | None = None
    ) -> NoReturn:
        """Raise a finding about the first of the `bad` lanes."""
        first = int(np.argmax(bad))
        lane = int(lanes[first])
        block, thread = divmod(lane, self.threads)
        instruction = self.program.steps[self.place].instruction
        finding = Finding(
            kind,
            message,
            self.program.kernel.name,
            instruction.location,
            self.first_block + block,
            thread // WARP,
            thread % WARP,
            len(distinct(lanes[bad])),
            None if address is None else int(address[first]),
            instruction.text,
        )
        raise KernelFault(finding)

    def _report_deadlock(self) -> None:
        """Report a deadlock: the waiting lanes, and the reason for which they wait."""
        for place, mask in self._parked.items():
            step = self.program.steps[place]
            if step.warps > 1:
                self.place = place
                message = f"not all warps of a warpgroup come to {step.instruction.name}"
                self.report("divergence", message, self.lane, mask)
        waiting = dict(self._parked)
        parts = [
            f"{mask.sum()} at {self.program.steps[place].instruction.name}"
            for place, mask in waiting.items()
        ]
        for place, mask in self._resting.items():
            waiting[place - 1] = mask
            parts.append(f"{mask.sum()} at {self.program.steps[place - 1].instruction.name}")
        for place, lanes in self.mbarriers.sleepers():
            waiting[place] = np.isin(self.lane, lanes)
            parts.append(f"{len(lanes)} at an mbarrier")
        others = (self.barriers, self.clusters, self.register_pools)
        for place, mask, at in (one for part in others for one in part.sleepers()):
            waiting[place] = mask
            parts.append(f"{mask.sum()} at {at}")
        self.place = min(waiting)
        gone = int((~self.alive).sum() - (self.threads - self.block) * self.blocks)
        message = (
            f"{self.alive.sum()} lanes wait for others that never come ({', '.join(parts)}; "
            f"{gone} have exited)"
        )
        self.report("deadlock", message, self.lane, waiting[self.place])
