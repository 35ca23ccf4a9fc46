"""Instructions that the lanes of a warp execute together: exchanges, votes, tensor cores.

None of them orders accesses to memory. Exchanges and votes "do not imply a memory barrier" (CUDA
C++ Programming Guide), and the PTX ISA promises an order for ``bar.warp.sync`` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cupyattn.interpret import access, tensor_core
from cupyattn.interpret.lanes import Values
from cupyattn.interpret.operation import DTYPES
from cupyattn.interpret.ordering import WARP, Bools, Ints
from cupyattn.interpret.ptx import Instruction, Operand, Pair, Sink
from cupyattn.interpret.semantics import (
    ACCESSES,
    Read,
    Step,
    Write,
    instruction,
    reader,
    whole_warp,
    writer,
)

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine

Bits = npt.NDArray[np.uint32]


def _by_warp(machine: Machine, values: Values) -> Values:
    return machine.each(values).reshape(-1, WARP)


# ---- exchanges and votes -------------------------------------------------------------------------


def _sources(kind: str, lane: Ints, b: Ints, c: Ints) -> tuple[Ints, Bools]:
    """Return each lane's source lane, and whether it is in range; if not, it is the lane itself."""
    segment, clamp = c >> 8 & 31, c & 31
    top = (lane & segment) | (clamp & ~segment)
    bottom = lane & segment
    b = b & 31
    if kind == "up":
        source, valid = lane - b, lane - b >= top
    elif kind == "down":
        source, valid = lane + b, lane + b <= top
    elif kind == "bfly":
        source, valid = lane ^ b, (lane ^ b) <= top
    else:
        source = bottom | (b & ~segment)
        valid = source <= top
    return np.where(valid, source, lane), valid


@instruction("shfl")
def shuffle(inst: Instruction) -> Step | None:
    """Read a register of another lane."""
    if len(inst.modifiers) != 3 or inst.modifiers[::2] != ("sync", "b32"):
        return None
    kind = inst.modifiers[1]
    if kind not in ("up", "down", "bfly", "idx"):
        return None
    target, a, b, c, members = inst.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    write, write_valid = writer(first), writer(second)
    read, read_b, read_c = reader(a, "b32"), reader(b, "b32"), reader(c, "b32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        lane = machine.thread % WARP
        offset = machine.each(read_b(machine)).astype(np.intp)
        limits = machine.each(read_c(machine)).astype(np.intp)
        source, valid = _sources(kind, lane, offset, limits)
        place = machine.lane - lane + source
        if not lanes.full and (away := lanes.mask & ~lanes.mask[place]).any():
            message = "a lane reads the register of another that does not take part"
            machine.report("divergence", message, machine.lane, away)
        write(machine, machine.each(read(machine))[place], lanes)
        write_valid(machine, valid, lanes)

    return Step(inst, execute, together=reader(members, "u32"))


@instruction("vote")
def vote(inst: Instruction) -> Step | None:
    """Combine a predicate over the lanes that take part."""
    if len(inst.modifiers) != 3 or inst.modifiers[0] != "sync":
        return None
    kind = inst.modifiers[1]
    if kind not in ("all", "any", "uni", "ballot"):
        return None
    target, source, members = inst.operands
    read, write = reader(source, "pred"), writer(target)

    def execute(machine: Machine, lanes: Lanes) -> None:
        true = lanes.where(read(machine)).bits
        result: Values = true
        if kind == "any":
            result = true != 0
        elif kind == "all":
            result = true == lanes.bits
        elif kind == "uni":
            result = (true == 0) | (true == lanes.bits)
        write(machine, np.repeat(result, WARP), lanes)

    return Step(inst, execute, together=reader(members, "u32"))


@instruction("match")
def match(inst: Instruction) -> Step | None:
    """Find the lanes that hold the same value."""
    if len(inst.modifiers) != 3 or inst.modifiers[1] != "sync":
        return None
    kind, _, type_name = inst.modifiers
    if kind not in ("any", "all") or type_name not in ("b32", "b64"):
        return None
    target, source, members = inst.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    read, write, write_same = reader(source, type_name), writer(first), writer(second)

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = _by_warp(machine, read(machine))
        here = lanes.mask.reshape(-1, WARP)
        same = (values[:, :, None] == values[:, None, :]) & here[:, None, :]
        found = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[..., 0]
        if kind == "all":
            everybody = found == lanes.bits[:, None]
            write_same(machine, everybody.ravel(), lanes)
            found = np.where(everybody, found, np.uint32(0))
        write(machine, found.ravel(), lanes)

    return Step(inst, execute, together=reader(members, "u32"))


_REDUCTIONS: dict[str, Callable[..., Values]] = {
    "add": np.add.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
}  # fmt: skip


@instruction("redux")
def reduce(inst: Instruction) -> Step | None:
    """Combine an integer over the lanes that take part."""
    if len(inst.modifiers) != 3 or inst.modifiers[0] != "sync":
        return None
    _, kind, type_name = inst.modifiers
    if kind not in _REDUCTIONS or type_name not in ("u32", "s32", "b32"):
        return None
    target, source, members = inst.operands
    read, write = reader(source, type_name), writer(target)
    dtype = DTYPES[type_name]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values, result = read(machine), np.zeros(machine.size, dtype)
        for warp in lanes.warps:
            some = lanes.index[lanes.index // WARP == warp]
            of_warp = machine.each(values)[some]
            result[some] = (
                _REDUCTIONS[kind](of_warp, dtype=dtype)
                if kind == "add"
                else (_REDUCTIONS[kind](of_warp))
            )
        write(machine, result, lanes)

    return Step(inst, execute, together=reader(members, "u32"))


@instruction("elect")
def elect(inst: Instruction) -> Step | None:
    """Choose the first of the lanes that take part."""
    if inst.modifiers != ("sync",):
        return None
    target, members = inst.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    write, write_elected = writer(first), writer(second)

    def execute(machine: Machine, lanes: Lanes) -> None:
        leader = np.repeat(lanes.mask.reshape(-1, WARP).argmax(axis=1), WARP)
        write(machine, leader.astype(np.uint32), lanes)
        write_elected(machine, machine.thread % WARP == leader, lanes)

    return Step(inst, execute, together=reader(members, "u32"))


# ---- tensor cores --------------------------------------------------------------------------------


def fragment_reader(operand: Operand) -> Callable[[Machine, Ints], Bits]:
    """Return a function that reads a fragment of some warps: (warps, 32, registers)."""
    reads: list[Read] = [reader(x, "b32") for x in access.items_of(operand)]

    def read(machine: Machine, warps: Ints) -> Bits:
        registers = [_by_warp(machine, r(machine)) for r in reads]
        if len(warps) < len(registers[0]):
            registers = [part[warps] for part in registers]
        return np.stack(registers, axis=-1)

    return read


def fragment_writer(operand: Operand) -> Callable[[Machine, Bits, Lanes], None]:
    """Return a function that stores a fragment (warps, 32, registers) of the current warps."""
    writes: list[Write] = [writer(x) for x in access.items_of(operand)]

    def write(machine: Machine, fragment: Bits, lanes: Lanes) -> None:
        registers = np.ascontiguousarray(fragment.reshape(-1, len(writes)).T)
        for one, values in zip(writes, registers, strict=True):
            one(machine, values, lanes)

    return write


@instruction("mma")
def matrix_multiply(inst: Instruction) -> Step | None:
    """Multiply and add on tensor cores."""
    if inst.modifiers[:2] != ("sync", "aligned"):
        return None
    multiply = tensor_core.find_mma(inst.modifiers)
    if multiply is None:
        return None
    write = fragment_writer(inst.operands[0])
    reads = [fragment_reader(x) for x in inst.operands[1:4]]

    def execute(machine: Machine, lanes: Lanes) -> None:
        write(machine, multiply(*(read(machine, lanes.warps) for read in reads)), lanes)

    return Step(inst, execute, together=whole_warp)


def matrix_tiles(inst: Instruction) -> tuple[int, bool] | None:
    """Return the number of 8 x 8 tiles of an ``ldmatrix`` or ``stmatrix``, and if it transposes."""
    modifiers = [m for m in inst.modifiers if not m.startswith("shared")]
    transposed = "trans" in modifiers
    if transposed:
        modifiers.remove("trans")
    if modifiers[:2] != ["sync", "aligned"] or modifiers[4:] != ["b16"]:
        return None
    shape, times = sorted(modifiers[2:4])  # ptxas takes either of them first
    count = {"x1": 1, "x2": 2, "x4": 4}.get(times)
    return None if count is None or shape != "m8n8" else (count, transposed)


ACCESSES["ldmatrix"] = ACCESSES["stmatrix"] = lambda inst: ("shared", 16)


@instruction("ldmatrix")
def load_matrix(inst: Instruction) -> Step | None:
    """Load tiles; the first lanes give the addresses of their rows."""
    tiles = matrix_tiles(inst)
    if tiles is None:
        return None
    count, transposed = tiles
    write = fragment_writer(inst.operands[0])
    addresses = access.address_reader(inst.operands[1])

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index.reshape(-1, WARP)[:, : 8 * count].ravel()
        rows = access.load_rows(machine, addresses(machine)[index], index)
        write(machine, tensor_core.ldmatrix(rows.reshape(-1, 8 * count, 4), transposed), lanes)

    return Step(inst, execute, together=whole_warp)


@instruction("movmatrix")
def move_matrix(inst: Instruction) -> Step | None:
    """Transpose a tile of 8 x 8 elements, in which every lane holds two elements of a row."""
    if inst.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        return None
    read, write = reader(inst.operands[1], "b32"), writer(inst.operands[0])

    def execute(machine: Machine, lanes: Lanes) -> None:
        tiles = np.ascontiguousarray(machine.each(read(machine))).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
        write(machine, turned, lanes)

    return Step(inst, execute, together=whole_warp)


@instruction("stmatrix")
def store_matrix(inst: Instruction) -> Step | None:
    """Store tiles to rows that the first lanes name."""
    tiles = matrix_tiles(inst)
    if tiles is None:
        return None
    count, transposed = tiles
    read = fragment_reader(inst.operands[1])
    addresses = access.address_reader(inst.operands[0])

    def execute(machine: Machine, lanes: Lanes) -> None:
        index = lanes.index.reshape(-1, WARP)[:, : 8 * count].ravel()
        rows = tensor_core.stmatrix(read(machine, lanes.warps), transposed)
        access.store_rows(machine, addresses(machine)[index], rows.reshape(-1, 4), index)

    return Step(inst, execute, together=whole_warp)
