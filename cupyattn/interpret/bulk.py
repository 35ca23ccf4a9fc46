"""The bulk copy engine (TMA, sm_90): boxes of arrays in and out of shared memory.

The engine acts independently of the threads. Data that it brings appear in shared memory when a
thread waits for the mbarrier that counts their bytes. Data that it takes away may be overwritten
after a thread waited for the group of the copy. Nothing happens before these waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.access import address_reader, copy_async
from cupyattn.interpret.memory import RANK_BITS, WINDOWS, WITHIN, GlobalMemory
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Address, Immediate, Instruction, Operand
from cupyattn.interpret.semantics import Execute, instruction, not_known, reader
from cupyattn.interpret.warpgroup import swizzled_address

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

#: First words of a tensor map of the interpreter; the second one is its number.
TENSOR_MAP_MARK = 0x7465_6E73_6F72_6D61


class Tensor(NamedTuple):
    """The array that a tensor map describes.

    Parameters
    ----------
    name : str
        The array, for findings.
    base : int
        Its address.
    itemsize : int
        Bytes of an element.
    shape, strides, box : tuple of int
        As of `cupyattn.plans.records.TensorMap`: slowest axis first, strides in bytes of all axes
        but the last.
    swizzle : int
        Bytes over which shared memory is swizzled: 32, 64, 128, or 0 for rows that follow each
        other.
    """

    name: str
    base: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128

    def elements(self, corner: Sequence[int]) -> tuple[Ints, npt.NDArray[np.bool_], Ints]:
        """Return address, validity and place in the box of every element of a box.

        Parameters
        ----------
        corner : sequence of int
            First element, slowest axis first.

        Returns
        -------
        address : array of int
            Address in global memory.
        inside : array of bool
            Whether the element is within the array.
        place : array of int
            Offset in bytes from the start of the box, before swizzling.
        """
        index = np.indices(self.box).reshape(len(self.box), -1)
        at = index + np.asarray(corner)[:, None]
        inside = ((at >= 0) & (at < np.asarray(self.shape)[:, None])).all(axis=0)
        address = self.base + np.asarray((*self.strides, self.itemsize)) @ at
        return address, inside, np.arange(index.shape[1]) * self.itemsize

    def in_whole_chunks(self) -> Tensor:
        """Return the array with the extent that the engine stores: whole 16 bytes, also past the
        columns.

        This was observed on an H200; copies the other way end with the last column.
        """
        chunk = 16 // self.itemsize
        return self._replace(shape=(*self.shape[:-1], -(-self.shape[-1] // chunk) * chunk))

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory."""
        return int(np.prod(self.box)) * self.itemsize


class Store(NamedTuple):
    """A copy out of shared memory under way, in the group of the lane that began it."""

    lane: int
    group: int
    granules: Ints
    write: Callable[[], None]


class Engine:
    """The copy engine of a batch of blocks."""

    def __init__(self, machine: Machine, tensors: Sequence[Tensor]) -> None:
        self._machine = machine
        self._tensors = tensors
        self._stores: list[Store] = []
        self.committed = np.zeros(machine.size, np.int64)

    def tensor(self, address: int, lane: int) -> Tensor:
        """Return the array that the tensor map at a generic address describes."""
        machine = self._machine
        lanes = np.array([lane])
        within = np.array([address - WINDOWS["param"]])
        if address < WINDOWS["param"]:
            self._fail("a tensor map that is no parameter of the kernel", lane)
        words = machine.spaces["param"].load(within, 8, 2, lanes).ravel()
        if int(words[0]) != TENSOR_MAP_MARK:
            self._fail("there is no tensor map at this parameter", lane)
        found = self._tensors[int(words[1])]
        if found.base % 16 or any(stride % 16 for stride in found.strides):
            message = (
                f"the tensor map of {found.name} has address {found.base:#x} and strides "
                f"{found.strides}: all of them have to be multiples of 16 bytes"
            )
            self._misaligned(message, lane)
        return found

    def in_blocks(self, address: int, blocks: int, lane: int) -> list[int]:
        """Return an address once for every block of the cluster whose bit in `blocks` is set."""
        machine = self._machine
        if blocks >> machine.clusters.blocks or not blocks:
            message = (
                f"a copy to the blocks {blocks:#b} of a cluster that has "
                f"{machine.clusters.blocks}"
            )
            self._fail(message, lane)
        ranks = [rank for rank in range(machine.clusters.blocks) if blocks >> rank & 1]
        return [address & WITHIN | rank + 1 << RANK_BITS for rank in ranks]

    def check_together(self, target: int, barrier: int, lane: int) -> None:
        """Refuse a copy to one block that reports to a barrier of another one."""
        machine = self._machine
        owners = machine.clusters.owners(np.array([target, barrier]), np.array([lane, lane]))
        if owners[0] != owners[1]:
            raise not_known(machine.program.steps[machine.place].instruction)

    def _fail(self, message: str, lane: int) -> None:
        self._machine.report("out of bounds", message, np.array([lane]), np.ones(1, np.bool_))

    def _check_column(self, tensor: Tensor, column: int, lane: int) -> None:
        """Report a box whose first column is not at a multiple of 16 bytes; an H200 fails, too."""
        if column * tensor.itemsize % 16:
            message = (
                f"a box that begins at column {column}, no multiple of 16 bytes, is an illegal "
                "instruction"
            )
            self._misaligned(message, lane)

    def _misaligned(self, message: str, lane: int) -> None:
        self._machine.report("misaligned", message, np.array([lane]), np.ones(1, np.bool_))

    def bring(
        self, tensor: Tensor, corner: Sequence[int], places: Sequence[tuple[int, int]], lane: int
    ) -> None:
        """Begin a copy of a box to places in shared memory, each with the mbarrier that counts its
        bytes."""
        self._check_column(tensor, corner[-1], lane)
        if (target := places[0][0] & WITHIN) % 128:
            message = f"a box goes to shared address {target}, which is no multiple of 128"
            self._misaligned(message, lane)
        address, inside, place = tensor.elements(corner)
        swizzled = swizzled_address(target + place, tensor.swizzle) - target
        data = self._fetch(address, inside, tensor.itemsize, lane)
        for to, barrier in places:
            self._deliver(lambda: data, swizzled, to, barrier, lane, data.itemsize)

    def bring_bytes(self, source: int, target: int, nbytes: int, barrier: int, lane: int) -> None:
        """Begin a copy of contiguous bytes, which an mbarrier counts."""
        self._check_sixteens(source, target & WITHIN, nbytes, lane, "from")
        place = np.arange(0, nbytes, 8)
        everything = np.ones(len(place), np.bool_)
        data = self._fetch(source + place, everything, 8, lane)
        self._deliver(lambda: data, place, target, barrier, lane, 8)

    def bring_to_block(
        self, source: int, target: int, nbytes: int, barrier: int, lane: int
    ) -> None:
        """Begin a copy of contiguous bytes of the lane's block to another place of the cluster."""
        if source % 16 or target % 16 or nbytes % 16:
            message = (
                f"a bulk copy of {nbytes} bytes from shared address {source} to "
                f"{target & WITHIN} of a block: all three have to be multiples of 16"
            )
            self._misaligned(message, lane)
        machine, shared = self._machine, self._machine.shared
        first, granules = self._lend(source, nbytes, np.array([lane]), noted=False)

        def read() -> npt.NDArray[Any]:
            shared.shadow.taken_by_engine(granules, machine.clocks)
            return shared.data[first : first + nbytes].view("u8").copy()

        self._deliver(read, np.arange(0, nbytes, 8), target, barrier, lane, 8)

    def _fetch(
        self, address: Ints, inside: npt.NDArray[np.bool_], size: int, lane: int
    ) -> npt.NDArray[Any]:
        """Return elements of `size` bytes of global memory, zeros where not `inside`."""
        data = np.zeros(len(address), f"u{size}")
        if inside.any():
            who = np.full(int(inside.sum()), lane)
            data[inside] = self._machine.spaces["global"].load(address[inside], size, 1, who)[0]
        self._machine.traffic["global", "load"] += size * int(inside.sum())
        return data

    def _deliver(
        self,
        read: Callable[[], npt.NDArray[Any]],
        place: Ints,
        target: int,
        barrier: int,
        lane: int,
        size: int,
    ) -> None:
        """Begin to bring elements of `size` bytes to places behind an address of the cluster."""
        machine = self._machine
        self.check_together(target, barrier, lane)
        lanes, nbytes = np.array([lane]), len(place) * size
        (reported,) = machine.mbarriers.at(np.array([barrier]), lanes)
        if not reported.visible:
            message = (
                "the copy engine gets an mbarrier that no fence.mbarrier_init (or "
                "fence.proxy.async) has shown it"
            )
            machine.report("race", message, lanes, np.ones(1, np.bool_))
        shared, clusters = machine.shared, machine.clusters
        machine.traffic["shared", "copy"] += nbytes
        first = clusters.offset(np.array([target]), 16, lanes)
        clusters.offset(np.array([target + nbytes - 16]), 16, lanes)
        granules, owners = shared.granules(first, nbytes, lanes)
        shadow = shared.shadow
        block = int(clusters.owners(np.array([target]), lanes)[0])
        shadow.before_write(
            granules, owners, machine.clocks, machine.report,
            block=None if block == lane // machine.threads else block,
        )  # fmt: skip
        shadow.before_proxy(granules, owners, machine.clocks, machine.report)
        shadow.take_off(granules)
        offset = (place + int(first[0])) // size

        def arrive() -> None:
            shadow.land(granules)
            shadow.wrote_by_engine(granules, machine.clocks)
            shared.data.view(f"u{size}")[offset] = read()
            machine.mbarriers.deliver(reported, nbytes)

        reported.deliveries.append(arrive)
        machine.mbarriers.wake(reported)

    def take(self, tensor: Tensor, corner: Sequence[int], source: int, lane: int) -> None:
        """Begin a copy of a box out of shared memory, in the lane's open group."""
        machine = self._machine
        lanes = np.array([lane])
        self._check_column(tensor, corner[-1], lane)
        if min(corner) < 0:  # seen on an H200; copies the other way may begin there
            self._fail("a box stored from before the array is an illegal instruction", lane)
        shared, size = machine.shared, tensor.itemsize
        first, granules = self._lend(source, tensor.box_bytes, lanes)
        address, inside, place = tensor.in_whole_chunks().elements(corner)
        swizzled = swizzled_address(source + place, tensor.swizzle) - source + first
        who = np.full(len(address), lane)
        machine.traffic["global", "store"] += size * int(inside.sum())

        def write() -> None:
            data = shared.data.view(f"u{size}")[swizzled // size]
            if inside.any():
                memory = machine.spaces["global"]
                memory.store(address[inside], data[inside][None], who[inside])

        self._stores.append(Store(lane, int(self.committed[lane]), granules, write))

    def _lend(
        self, source: int, nbytes: int, lanes: Ints, *, noted: bool = True
    ) -> tuple[int, Ints]:
        """Check bytes of shared memory and lend them to a copy; return their offset and granules.

        `noted`: the copy is in a group of the lane, which therefore counts as their reader.
        """
        machine, shared = self._machine, self._machine.shared
        first = shared.offset(np.array([source]), 16, lanes)
        shared.offset(np.array([source + nbytes - 16]), 16, lanes)
        granules, owners = shared.granules(first, nbytes, lanes)
        check = shared.shadow.before_read if noted else shared.shadow.before_engine_reads
        check(granules, owners, machine.clocks, machine.report)
        shared.shadow.before_proxy(granules, owners, machine.clocks, machine.report)
        shared.shadow.lend(granules)
        machine.traffic["shared", "load"] += nbytes
        return int(first[0]), granules

    def take_bytes(
        self, target: int, source: int, nbytes: int, lane: int, added: np.dtype[Any] | None
    ) -> None:
        """Begin a copy of contiguous bytes out of shared memory, in the lane's open group.

        With a type `added`, its numbers are added to those in global memory, one by one.
        """
        self._check_sixteens(target, source, nbytes, lane, "to")
        machine = self._machine
        first, granules = self._lend(source, nbytes, np.array([lane]))
        machine.traffic["global", "store" if added is None else "atomic"] += nbytes
        size = 8 if added is None else added.itemsize
        address = target + np.arange(0, nbytes, size)
        who = np.full(len(address), lane)

        def write() -> None:
            memory = cast(GlobalMemory, machine.spaces["global"])
            data = machine.shared.data[first : first + nbytes].view(added or "u8")
            if added is None:
                memory.store(address, data[None], who)
                return
            held, offset = memory.exchange(address, size, who)
            held.view(added)[offset // size] += data

        self._stores.append(Store(lane, int(self.committed[lane]), granules, write))

    def _check_sixteens(
        self, array: int, shared: int, nbytes: int, lane: int, direction: str
    ) -> None:
        if array % 16 or shared % 16 or nbytes % 16:
            name = cast(GlobalMemory, self._machine.spaces["global"]).name_at(array)
            ends = [f"{name} at {array:#x}", f"shared address {shared}"]
            first, second = ends if direction == "from" else reversed(ends)
            message = (
                f"a bulk copy of {nbytes} bytes from {first} to {second}: "
                "all three have to be multiples of 16"
            )
            self._misaligned(message, lane)

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Complete all but the last `pending` groups of each lane."""
        machine, left = self._machine, []
        for store in self._stores:
            if lanes.mask[store.lane] and store.group < self.committed[store.lane] - pending:
                store.write()
                machine.shared.shadow.give_back(
                    store.granules, np.array([store.lane]), machine.clocks
                )
            else:
                left.append(store)
        self._stores = left

    def check_idle(self) -> None:
        """Report copies without a wait: another block may get the shared memory before they end."""
        if self._stores:
            lanes = np.array([store.lane for store in self._stores])
            message = "a block ends while the copy engine still reads its shared memory"
            self._machine.report("in flight", message, lanes, np.ones(len(lanes), np.bool_))


def _corner(operand: Operand) -> tuple[Callable[[Machine], Ints], list[Callable[[Machine], Ints]]]:
    """Return functions for the address of a tensor map and for the coordinates, fastest first."""
    if not isinstance(operand, Address):
        raise TypeError(f"{operand} is no tensor operand")
    coordinates = [_coordinate(x) for x in operand.coordinates]
    return address_reader(Address(operand.base, operand.offset)), coordinates


def _coordinate(operand: Operand) -> Callable[[Machine], Ints]:
    read = reader(operand, "s32")
    return lambda machine: machine.each(read(machine)).astype(np.intp)


@instruction("cp")
def copy(inst: Instruction) -> Execute | None:
    """Build asynchronous copies: of single lanes, or by the copy engine."""
    if inst.modifiers[:1] == ("reduce",):
        return _reduce_bulk(inst._replace(modifiers=inst.modifiers[1:]))
    if inst.modifiers[:1] != ("async",):
        return None
    return _bulk(inst) if inst.modifiers[1:2] == ("bulk",) else copy_async(inst)


#: Copies to shared memory: destination, source and completion mechanism.
_BYTES_IN = tuple(
    (space, "global", "mbarrier::complete_tx::bytes")
    for space in ("shared::cluster", "shared::cta")
)


def _bulk(inst: Instruction) -> Execute | None:
    kind = inst.modifiers[2:]  # behind async.bulk
    if kind == ("commit_group",):

        def commit(machine: Machine, lanes: Lanes) -> None:
            machine.engine.committed[lanes.index] += 1

        return commit
    if kind[:1] == ("wait_group",) and isinstance(inst.operands[0], Immediate):
        pending = inst.operands[0].bits
        return lambda machine, lanes: machine.engine.wait(lanes, pending)
    if kind[:1] == ("prefetch",):  # a hint to the caches
        return lambda machine, lanes: None
    if kind[:1] != ("tensor",):
        plain = tuple(m for m in kind if m != "L2::cache_hint")
        if plain == ("global", "shared::cta", "bulk_group"):
            return _take_bytes(inst, None)
        if plain == ("shared::cluster", "shared::cta", "mbarrier::complete_tx::bytes"):
            return _bring_bytes(inst, between=True)
        return _bring_bytes(inst) if plain in _BYTES_IN else None
    names = [m for m in kind[2:] if m not in ("tile", "L2::cache_hint")]
    if tuple(names) in _BYTES_IN:
        return _bring(inst)
    if (tuple(names[:-1]), names[-1]) == (_BYTES_IN[0], "multicast::cluster"):
        return _bring(inst, reader(inst.operands[3], "u16"))
    if names == ["global", "shared::cta", "bulk_group"]:
        return _take(inst)
    return None


def _bring(inst: Instruction, blocks: Callable[[Machine], Any] | None = None) -> Execute:
    target = address_reader(inst.operands[0])
    tensor, coordinates = _corner(inst.operands[1])
    barrier = address_reader(inst.operands[2])

    def execute(machine: Machine, lanes: Lanes) -> None:
        engine = machine.engine
        maps, targets, barriers = (read(machine) for read in (tensor, target, barrier))
        corners = [read(machine) for read in coordinates]
        for lane in lanes.index.tolist():
            corner = [int(x[lane]) for x in reversed(corners)]
            found = engine.tensor(int(maps[lane]), lane)
            ends = [[int(x[lane])] for x in (targets, barriers)]
            if blocks is not None:
                some = int(machine.each(blocks(machine))[lane])
                ends = [engine.in_blocks(x, some, lane) for (x,) in ends]
            engine.bring(found, corner, list(zip(*ends, strict=True)), lane)

    return execute


def _bring_bytes(inst: Instruction, *, between: bool = False) -> Execute:
    """A copy from global memory, or `between` blocks of a cluster."""
    target = address_reader(inst.operands[0])
    source = address_reader(inst.operands[1])
    count = reader(inst.operands[2], "u32")
    barrier = address_reader(inst.operands[3])

    def execute(machine: Machine, lanes: Lanes) -> None:
        numbers = [machine.each(read(machine)) for read in (source, target, count, barrier)]
        for lane in lanes.index.tolist():
            start, to, nbytes, told = (int(x[lane]) for x in numbers)
            bring = machine.engine.bring_to_block if between else machine.engine.bring_bytes
            bring(start, to, nbytes, told, lane)

    return execute


def _take_bytes(inst: Instruction, added: np.dtype[Any] | None) -> Execute:
    target, source = (address_reader(x) for x in inst.operands[:2])
    count = reader(inst.operands[2], "u32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        numbers = [machine.each(read(machine)) for read in (target, source, count)]
        for lane in lanes.index.tolist():
            to, start, nbytes = (int(x[lane]) for x in numbers)
            machine.engine.take_bytes(to, start, nbytes, lane, added)

    return execute


#: Types whose numbers the engine adds to those in global memory. It adds f32 as ``red`` does.
_ADDED = ("f32", "f64", "s32", "u32", "u64")


def _reduce_bulk(inst: Instruction) -> Execute | None:
    kind = tuple(m for m in inst.modifiers if m != "L2::cache_hint")
    if kind[:-1] != ("async", "bulk", "global", "shared::cta", "bulk_group", "add"):
        return None
    return _take_bytes(inst, DTYPES[kind[-1]]) if kind[-1] in _ADDED else None


def _take(inst: Instruction) -> Execute:
    tensor, coordinates = _corner(inst.operands[0])
    source = address_reader(inst.operands[1])

    def execute(machine: Machine, lanes: Lanes) -> None:
        engine = machine.engine
        maps, sources = tensor(machine), source(machine)
        corners = [read(machine) for read in coordinates]
        issued: set[tuple[int, ...]] = set()
        for lane in lanes.index.tolist():
            corner = [int(x[lane]) for x in reversed(corners)]
            # Lanes of a warp that name the same copy write the same bytes, so it is made once.
            one = (lane // WARP, int(maps[lane]), int(sources[lane]), *corner)
            if one not in issued:
                issued.add(one)
                engine.take(engine.tensor(one[1], lane), corner, one[2], lane)

    return execute
