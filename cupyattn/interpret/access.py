"""Loads, stores, atomic operations, and copies in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.lanes import Values
from cupyattn.interpret.memory import WINDOWS, scatter
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ordering import Ints
from cupyattn.interpret.ptx import Address, Immediate, Instruction, Operand, Register, Vector
from cupyattn.interpret.semantics import (
    ACCESSES,
    Execute,
    Read,
    instruction,
    reader,
    register_type,
    writer,
)
from cupyattn.interpret.shadow import spread

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.memory import GlobalMemory

#: Modifiers that are hints, or set the order of an access relative to others. They change no value
#: here, because every access happens in order.
_HINTS = {
    "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "cluster",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_last", "L1::evict_first",
    "L1::no_allocate", "L1::evict_normal", "L1::evict_unchanged", "L2::evict_last",
    "L2::evict_first", "L2::evict_normal", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint",
}  # fmt: skip
_STRONG = {"volatile", "relaxed", "acquire", "release"}
_ACROSS_BLOCKS = {"gpu", "sys", "cluster"}
_SPACES = ("global", "shared", "local", "param", "const")


def plain(modifiers: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the space that modifiers name (``"generic"`` for none), and the other modifiers.

    Shared memory of a cluster is the space ``"cluster"``.
    """
    space, others = "generic", []
    for modifier in modifiers:
        name = modifier.partition("::")[0]
        if modifier == "shared::cluster":
            space = "cluster"
        elif name in _SPACES and modifier in (name, f"{name}::cta", "param::entry"):
            space = "global" if name == "const" else name
        elif modifier not in _HINTS:
            others.append(modifier)
    return space, others


def _shape(inst: Instruction) -> tuple[str, int, str] | None:
    """Return space, length of the vector, and type of an element of a load or store."""
    space, others = plain(inst.modifiers)
    count = 1
    if others and others[0] in ("v2", "v4", "v8"):
        count = int(others.pop(0)[1])
    if len(others) != 1 or others[0] not in DTYPES:
        return None
    return space, count, others[0]


def _atomic_shape(inst: Instruction) -> tuple[str, str, int, str] | None:
    """Return space, operation, length of the vector, and type of an element."""
    space, others = plain(inst.modifiers)
    if not others or others[0] not in _ATOMIC:
        return None
    operation, count = others.pop(0), 1
    if others[:1] == ["noftz"]:  # float atomics of 16 bits never flush
        others.pop(0)
    if others and others[0] in ("v2", "v4"):
        count = int(others.pop(0)[1])
    if len(others) != 1 or others[0] not in DTYPES:
        return None
    return space, operation, count, others[0]


def _is_strong(inst: Instruction) -> bool:
    """Return whether an access specifies its order; such accesses do not race with each other."""
    return not _STRONG.isdisjoint(inst.modifiers)


def _orders_blocks(inst: Instruction, how: str) -> bool:
    """Return whether an access orders threads of several blocks, ``"acquire"`` or ``"release"``."""
    named = set(inst.modifiers)
    return bool(named & {how, "acq_rel"}) and bool(named & _ACROSS_BLOCKS)


def _load_store_width(inst: Instruction) -> tuple[str, int] | None:
    shape = _shape(inst)
    if shape is None:
        return None
    return "shared" if shape[0] == "cluster" else shape[0], shape[1] * DTYPES[shape[2]].itemsize


ACCESSES["ld"] = ACCESSES["st"] = _load_store_width
ACCESSES["atom"] = ACCESSES["red"] = lambda inst: (
    None if (shape := _atomic_shape(inst)) is None
    else (shape[0], shape[2] * DTYPES[shape[3]].itemsize)
)  # fmt: skip
ACCESSES["cp"] = lambda inst: ("shared", _copy_bytes(inst)) if len(inst.operands) > 1 else None


@instruction("createpolicy")
def createpolicy(inst: Instruction) -> Execute:
    """Choose how long caches keep the data of an access: a hint, which changes no value."""
    write = writer(inst.operands[0])
    return lambda machine, lanes: write(machine, np.zeros((), np.uint64), lanes)


def address_reader(operand: Operand) -> Callable[[Machine], Ints]:
    """Return a function that computes the addresses of an operand, one for each lane."""
    if isinstance(operand, Register):
        operand = Address(operand, 0)
    if not isinstance(operand, Address):
        raise TypeError(f"{operand} is no address")
    offset = operand.offset
    if isinstance(operand.base, Register):
        read = reader(operand.base, f"b{8 * register_type(operand.base).itemsize}")
        return lambda machine: read(machine).astype(np.int64) + offset
    if isinstance(operand.base, Immediate):
        place = operand.base.bits + offset
        return lambda machine: np.full(machine.size, place)
    name = operand.base.name
    return lambda machine: np.full(machine.size, machine.symbol(name) + offset)


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return the items of a vector in braces, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def _may_order(inst: Instruction, space: str) -> bool:
    """Return whether a relaxed access may order threads of several blocks, with fences."""
    return space in ("global", "generic") and "cta" not in inst.modifiers


def _relaxed(machine: Machine, index: Ints, address: Ints, *, reads: bool, writes: bool) -> None:
    """Let relaxed accesses to global memory order blocks where there are fences."""
    between = machine.clocks.between
    if between.in_use:
        some = address < min(WINDOWS.values())
        between.relaxed(machine.clocks, index[some], address[some], reads=reads, writes=writes)


@instruction("ld")
def load(inst: Instruction) -> Execute | None:
    """Load a scalar or a vector."""
    shape = _shape(inst)
    if shape is None:
        return None
    space, count, type_name = shape
    dtype = DTYPES[type_name]
    writes = [writer(x) for x in items_of(inst.operands[0])]
    addresses = address_reader(inst.operands[1])
    unit = dtype.itemsize
    strong, acquires = _is_strong(inst), _orders_blocks(inst, "acquire")
    relaxed = strong and not acquires and _may_order(inst, space)
    if len(writes) != count:
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        address = addresses(machine)[index]
        if acquires:
            machine.clocks.between.acquire(machine.clocks, index, address)
        elif relaxed:
            _relaxed(machine, index, address, reads=True, writes=False)
        values = np.empty((count, len(index)), f"u{unit}")
        for memory, within, some in machine.space(space, address, "load", unit * count):
            if some is None:
                values = memory.load(within, unit, count, index, strong)
            else:
                values[:, some] = memory.load(within, unit, count, index[some], strong)
        for value, write in zip(values.view(dtype), writes, strict=True):
            write(machine, value, lanes)

    return execute


@instruction("st")
def store(inst: Instruction) -> Execute | None:
    """Store a scalar or a vector."""
    shape = _shape(inst)
    if shape is None:
        return None
    space, count, type_name = shape
    unit = DTYPES[type_name].itemsize
    reads = [reader(x, f"b{8 * unit}") for x in items_of(inst.operands[1])]
    addresses = address_reader(inst.operands[0])
    strong, releases = _is_strong(inst), _orders_blocks(inst, "release")
    relaxed = strong and not releases and _may_order(inst, space)
    if len(reads) != count or space in ("cluster", "param"):  # "param": an argument of a call
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        address = addresses(machine)[index]
        values = np.stack([machine.each(r(machine))[index] for r in reads])
        for memory, within, some in machine.space(space, address, "store", unit * count):
            if some is None:
                memory.store(within, values, index, strong)
            else:
                memory.store(within, values[:, some], index[some], strong)
        if releases:
            machine.clocks.between.release(machine.clocks, index, address)
        elif relaxed:
            _relaxed(machine, index, address, reads=False, writes=True)

    return execute


# ---- atomic operations ---------------------------------------------------------------------------

_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "inc": lambda old, b: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - old.dtype.type(1),
    "cas": lambda old, b, c: c if old == b else old,
}


#: Types of two numbers in 32 bits. The operation is atomic for each number, not for the pair.
_PACKED = {"f16x2": DTYPES["f16"], "bf16x2": DTYPES["bf16"]}


def _of_halves(combine: Callable[..., Any], dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return an operation on both halves of packed numbers."""

    def both(*packed: np.uint32) -> np.uint32:
        found: np.uint32 = combine(*(np.array([x]).view(dtype) for x in packed)).view(np.uint32)[0]
        return found

    return both


@instruction("atom", "red")
def atomic(inst: Instruction) -> Execute | None:
    """Read, combine and write back, one lane after the other in the order of their numbers.

    Each element of a vector is a separate operation.
    """
    shape = _atomic_shape(inst)
    if shape is None:
        return None
    space, operation, count, type_name = shape
    if space == "cluster":
        return None
    combine, dtype = _ATOMIC[operation], DTYPES[type_name]
    if type_name in _PACKED:
        combine = _of_halves(combine, _PACKED[type_name])
    operands = list(inst.operands)
    writes = [writer(x) for x in items_of(operands.pop(0))] if inst.opcode == "atom" else []
    addresses = address_reader(operands.pop(0))
    reads = [[reader(x, type_name) for x in items_of(operand)] for operand in operands]
    acquires, releases = (_orders_blocks(inst, how) for how in ("acquire", "release"))
    across = _may_order(inst, space)  # the scope is .gpu if none is given
    if any(len(read) != count for read in reads):
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        address = addresses(machine)[index]
        values = [[machine.each(r(machine))[index] for r in read] for read in reads]
        between = machine.clocks.between
        orders = acquires or releases or (across and between.in_use)
        for at in range(len(index)) if orders else ():  # each after those before it
            one = index[at : at + 1], address[at : at + 1]
            if acquires:
                between.acquire(machine.clocks, *one)
            if across:
                _relaxed(machine, *one, reads=not acquires, writes=not releases)
            if releases:
                between.release(machine.clocks, *one)
        old = np.empty((count, len(index)), dtype)
        for memory, within, some in machine.space(space, address, "atomic", dtype.itemsize * count):
            rows = np.arange(len(index)) if some is None else some
            data, offset = memory.exchange(within, dtype.itemsize * count, index[rows])
            elements = data.view(dtype)
            for row, place in zip(rows.tolist(), (offset // dtype.itemsize).tolist(), strict=True):
                for i in range(count):
                    old[i, row] = elements[place + i]
                    elements[place + i] = combine(old[i, row], *(v[i][row] for v in values))
        for one, write in zip(old, writes, strict=False):
            write(machine, one, lanes)

    return execute


# ---- copies in the background --------------------------------------------------------------------


class Copy(NamedTuple):
    """A ``cp.async`` in flight: source and destination of each lane."""

    lanes: Ints
    groups: Ints  # number of the group in which each lane put it
    offset: Ints  # into shared memory
    data: npt.NDArray[np.uint8]  # [lanes, bytes]


class Copies:
    """The ``cp.async`` copies of a batch that are still in flight.

    A copy arrives when its lane waits for it, and not before. So a kernel without the wait always
    reads the old contents; a device would show them only sometimes.
    """

    def __init__(self, size: int) -> None:
        self.committed = np.zeros(size, np.int64)  # groups closed by each lane
        self._under_way: list[Copy] = []

    def start(self, machine: Machine, copy: Copy) -> None:
        """Begin a copy."""
        shared = machine.shared
        granules, lanes = shared.granules(copy.offset, copy.data.shape[1], copy.lanes)
        shared.shadow.before_write(granules, lanes, machine.clocks, machine.report)
        shared.shadow.take_off(granules)
        self._under_way.append(copy)

    def finish(self, machine: Machine, lanes: Lanes, pending: int | None) -> None:
        """Complete all but the last `pending` groups of each lane; None: all groups."""
        left = []
        for copy in self._under_way:
            here = lanes.mask[copy.lanes]
            if pending is not None:
                here &= copy.groups < self.committed[copy.lanes] - pending
            if here.any():
                self._arrive(machine, copy, here)
            if not here.all():
                rest = ~here
                left.append(
                    Copy(copy.lanes[rest], copy.groups[rest], copy.offset[rest], copy.data[rest])
                )
        self._under_way = left

    @staticmethod
    def _arrive(machine: Machine, copy: Copy, here: npt.NDArray[np.bool_]) -> None:
        shared = machine.shared
        offset, owners, data = copy.offset[here], copy.lanes[here], copy.data[here]
        granules, lanes = shared.granules(offset, data.shape[1], owners)
        shared.shadow.land(granules)
        shared.shadow.wrote(granules, lanes, machine.clocks, machine.report)
        place, _ = spread(offset, owners, data.shape[1])
        shared.data[place] = data.ravel()


def _copy_bytes(inst: Instruction) -> int:
    """Return the bytes of one lane's copy; widths of the copy engine are multiples of 16 bytes."""
    size = inst.operands[2] if len(inst.operands) > 2 else None
    return size.bits if isinstance(size, Immediate) else 16


def copy_async(inst: Instruction) -> Execute | None:
    """``cp.async`` of single lanes, and its waits."""
    kind = inst.modifiers[1:]
    if kind == ("commit_group",):

        def commit(machine: Machine, lanes: Lanes) -> None:
            machine.copies.committed[lanes.index] += 1

        return commit
    if kind == ("wait_all",):
        return lambda machine, lanes: machine.copies.finish(machine, lanes, None)
    if kind == ("wait_group",) and isinstance(inst.operands[0], Immediate):
        pending = inst.operands[0].bits
        return lambda machine, lanes: machine.copies.finish(machine, lanes, pending)
    spaces = [m.partition("::")[0] for m in kind if m not in _HINTS]
    if spaces != ["shared", "global"]:
        return None
    return _copy(inst)


def _copy(inst: Instruction) -> Execute | None:
    width = _copy_bytes(inst)
    targets = address_reader(inst.operands[0])
    sources = address_reader(inst.operands[1])
    size: Read | None = None
    if len(inst.operands) == 4:
        last = inst.operands[3]
        if isinstance(last, Register) and last.type == "pred":
            return None
        size = reader(last, "u32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index
        data = np.zeros((len(index), width), np.uint8)
        wanted: Values = np.full(machine.size, width) if size is None else size(machine)
        wanted = machine.each(wanted)[index]
        address = sources(machine)[index]
        for count in distinct(wanted[wanted > 0]):
            rows = np.flatnonzero(wanted == count)
            for memory, within, some in machine.space("global", address[rows], "load", int(count)):
                part = rows if some is None else rows[some]
                # NOTE: the source must be aligned to the whole copy, even if fewer bytes are read.
                unit = min(int(count) & -int(count), width, 8)
                values = cast("GlobalMemory", memory).load(
                    within, unit, int(count) // unit, index[part], alignment=width
                )
                data[part, :count] = np.ascontiguousarray(values.T).view(np.uint8)
        target = targets(machine)[index]
        machine.traffic["shared", "copy"] += width * len(index)
        offset = machine.shared.offset(target, width, index)
        copy = Copy(index, machine.copies.committed[index], offset, data)
        machine.copies.start(machine, copy)

    return execute


# ---- rows of tiles -------------------------------------------------------------------------------


def load_rows(machine: Machine, address: Ints, lanes: Ints) -> npt.NDArray[np.uint32]:
    """Load a row of 16 bytes of shared memory for each lane: (lanes, 4)."""
    shared = machine.shared
    machine.traffic["shared", "load"] += 16 * len(lanes)
    return np.ascontiguousarray(shared.load(address, 4, 4, lanes).T)


def store_rows(machine: Machine, address: Ints, rows: npt.NDArray[np.uint32], lanes: Ints) -> None:
    """Store a row of 16 bytes, (lanes, 4), to shared memory for each lane."""
    shared = machine.shared
    machine.traffic["shared", "store"] += 16 * len(lanes)
    offset = shared.offset(address, 16, lanes)
    granules = shared.granules(offset, 16, lanes)
    shared.shadow.before_write(*granules, machine.clocks, machine.report)
    shared.shadow.wrote(*granules, machine.clocks, machine.report)
    scatter(shared.data, offset, rows.T)
