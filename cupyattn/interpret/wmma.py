"""Execute ``wmma``: fragments that a warp loads, multiplies and stores as a whole.

PTX leaves open which register holds which element. Here a lane holds consecutive elements, in rows
or in columns as the matrix lay in memory. So a product that names another layout than the load
gets another matrix, as on a device. Halves of A and B fill 8 registers in every shape: copies
follow the elements, and products read the first.

Nor does PTX say which lane reads or writes an element. The first lane of a warp stands for all, so
a warp's own loads and stores of fragments keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cupyattn.interpret.access import address_reader, items_of, plain
from cupyattn.interpret.ordering import WARP, Ints
from cupyattn.interpret.ptx import Instruction
from cupyattn.interpret.semantics import ACCESSES, Read, Step, instruction, reader, whole_warp
from cupyattn.interpret.tensor_core import (
    ELEMENT_BITS,
    Accumulator,
    Fragment,
    accumulates,
    elements,
)
from cupyattn.interpret.warp import fragment_reader, fragment_writer

if TYPE_CHECKING:
    from cupyattn.interpret.lanes import Lanes
    from cupyattn.interpret.machine import Machine
    from cupyattn.interpret.memory import Space

#: Types of A and B by the shapes that they have.
_SHAPES = {
    **dict.fromkeys(("m16n16k16", "m32n8k16", "m8n32k16"), ("f16", "bf16", "s8", "u8")),
    "m16n16k8": ("tf32",),
}
_BITS = {**ELEMENT_BITS, "f32": 32, "s32": 32}
_MOVES = (("load", "a"), ("load", "b"), ("load", "c"), ("store", "d"))
#: Every row must start at a multiple of this, or of a fragment's bytes if they are fewer.
ROW_ALIGNMENT = 16


class Matrix(NamedTuple):
    """One operand: its sizes, the registers of its fragment, and the elements of each lane.

    Parameters
    ----------
    rows, columns, registers, bits : int
        Of an element; registers of a lane.
    row, column : array of int, (32, elements)
        Place of each element of a lane. Copies are left out.
    by_rows : bool
        Whether consecutive elements lie in a row.
    """

    rows: int
    columns: int
    registers: int
    bits: int
    row: Ints
    column: Ints
    by_rows: bool

    @property
    def fragment(self) -> Fragment:
        """The place of every element among the elements of all lanes."""
        count = self.registers * (32 // self.bits)
        place = np.empty((self.rows, self.columns), np.intp)
        each = np.arange(self.row.shape[1])
        place[self.row, self.column] = np.arange(WARP)[:, None] * count + each
        return Fragment(self.registers, place)

    def offsets(self, stride: Ints, by_rows: bool) -> Ints:
        """Return the bytes from a matrix to each element: (warps, 32, elements).

        `stride` (warps,) counts elements from a row to the next or, unless `by_rows`, from a
        column.
        """
        along, across = (self.column, self.row) if by_rows else (self.row, self.column)
        return (across * stride[:, None, None] + along) * (self.bits // 8)


@cache
def _matrix(name: str, shape: str, kind: str, layout: str) -> Matrix | None:
    """Return operand a, b, c or d of a shape and a type, None if there is no such operand."""
    if shape not in _SHAPES or layout not in ("row", "col"):
        return None
    m, n, k = map(int, re.findall(r"\d+", shape))
    if name in "cd":
        if not any(accumulates(x, x, kind) for x in _SHAPES[shape]):
            return None
        rows, columns, layout = m, n, "row"
    elif kind in _SHAPES[shape]:
        rows, columns = (m, k) if name == "a" else (k, n)
    else:
        return None
    bits, count = _BITS[kind], rows * columns // WARP
    registers = 8 if name in "ab" and kind == "f16" else count * bits // 32
    number = np.arange(rows * columns).reshape(WARP, count)
    row, column = np.divmod(number, columns) if layout == "row" else np.divmod(number, rows)[::-1]
    return Matrix(rows, columns, registers, bits, row, column, layout == "row")


class _Move(NamedTuple):
    """A load or a store: its matrix, the layout in memory, and the space."""

    matrix: Matrix
    by_rows: bool
    space: str


def _move(inst: Instruction) -> _Move | None:
    """Return what ``wmma.load`` or ``wmma.store`` moves; None for other instructions."""
    space, others = plain(inst.modifiers[4:])
    if inst.modifiers[:2] not in _MOVES or inst.modifiers[2:4] != ("sync", "aligned"):
        return None
    if len(others) != 3 or space not in ("generic", "global", "shared"):
        return None
    layout, shape, kind = others
    matrix = _matrix(inst.modifiers[1], shape, kind, layout)
    return None if matrix is None else _Move(matrix, layout == "row", space)


def _access(inst: Instruction) -> tuple[str, int] | None:
    move = _move(inst)
    return None if move is None else (move.space, move.matrix.bits // 8)


ACCESSES["wmma"] = _access


@instruction("wmma")
def fragments(inst: Instruction) -> Step | None:
    """Build the instructions that begin with ``wmma``."""
    if inst.modifiers[:1] == ("mma",):
        return _multiply(inst)
    move = _move(inst)
    if move is None:
        return None
    return (_load if inst.modifiers[0] == "load" else _store)(inst, move)


def _places(inst: Instruction, move: _Move, at: int) -> Callable[[Machine, Lanes], Ints]:
    """Return a function that computes the addresses of all elements: (warps, 32, elements).

    `at` is the number of the operand that is an address; the last one may be the stride.
    """
    matrix = move.matrix
    addresses = address_reader(inst.operands[at])
    strides: Read | None = reader(inst.operands[2], "s32") if len(inst.operands) > 2 else None
    least = matrix.columns if move.by_rows else matrix.rows
    unit = min(ROW_ALIGNMENT, 4 * matrix.registers)

    def places(machine: Machine, lanes: Lanes) -> Ints:
        index = lanes.index
        address = addresses(machine)[index].reshape(-1, WARP)
        stride = np.full(address.shape, least)
        if strides is not None:
            stride = machine.each(strides(machine))[index].astype(np.intp).reshape(-1, WARP)
        differ = (address != address[:, :1]) | (stride != stride[:, :1])
        if differ.any():
            message = "the lanes of a warp name different addresses or strides of one matrix"
            machine.report("invalid operand", message, index, differ.ravel())
        bad = (address % unit != 0) | (stride * (matrix.bits // 8) % unit != 0)
        if bad.any():
            message = f"a row or column of the matrix does not start at a multiple of {unit} bytes"
            machine.report("misaligned", message, index, bad.ravel(), address.ravel())
        found: Ints = address[..., None] + matrix.offsets(stride[:, 0], move.by_rows)
        return found

    return places


def _parts(
    machine: Machine, lanes: Lanes, move: _Move, address: Ints, direction: str
) -> Iterator[tuple[Space, Ints, Ints | slice, Ints]]:
    """Yield the memories of all elements, and where, which elements and for which lanes."""
    who = np.repeat(lanes.warps * WARP, WARP * address.shape[-1])
    unit = move.matrix.bits // 8
    for memory, within, some in machine.space(move.space, address.ravel(), direction, unit):
        part = slice(None) if some is None else some
        yield memory, within, part, who[part]


def _load(inst: Instruction, move: _Move) -> Step | None:
    matrix, unit = move.matrix, move.matrix.bits // 8
    places, write = _places(inst, move, 1), fragment_writer(inst.operands[0])
    if len(items_of(inst.operands[0])) != matrix.registers:
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        address = places(machine, lanes)
        count = address.shape[-1]
        values = np.empty(address.size, f"u{unit}")
        for memory, within, part, who in _parts(machine, lanes, move, address, "load"):
            values[part] = memory.load(within, unit, 1, who)[0]
        copies = matrix.registers * 4 // (count * unit)
        held = np.tile(values.reshape(-1, count), copies).view(np.uint32)
        write(machine, held.reshape(-1, WARP, matrix.registers), lanes)

    return Step(inst, execute, together=whole_warp)


def _store(inst: Instruction, move: _Move) -> Step | None:
    matrix, unit = move.matrix, move.matrix.bits // 8
    places, read = _places(inst, move, 0), fragment_reader(inst.operands[1])
    if len(items_of(inst.operands[1])) != matrix.registers:
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        address = places(machine, lanes)
        held = np.ascontiguousarray(read(machine, lanes.warps))
        values = held.view(f"u{unit}").reshape(1, -1)
        for memory, within, part, who in _parts(machine, lanes, move, address, "store"):
            memory.store(within, values[:, part], who)

    return Step(inst, execute, together=whole_warp)


def _multiply(inst: Instruction) -> Step | None:
    """D = A B + C. Halves name only the types of D and C, other products name all four."""
    if inst.modifiers[1:3] != ("sync", "aligned"):
        return None
    layouts, shape, types = inst.modifiers[3:5], "".join(inst.modifiers[5:6]), inst.modifiers[6:]
    saturates = types[-1:] == ("satfinite",)
    types = types[: len(types) - saturates]
    if len(types) == 2:
        types = (types[0], "f16", "f16", types[1])
    if len(layouts) != 2 or len(types) != 4:
        return None
    d_type, a_type, b_type, c_type = types
    if a_type != b_type or not all(accumulates(a_type, b_type, x) for x in (c_type, d_type)):
        return None
    a, b = (_matrix(x, shape, a_type, y) for x, y in zip("ab", layouts, strict=True))
    c, d = (_matrix(x, shape, y, "row") for x, y in (("c", c_type), ("d", d_type)))
    if a is None or b is None or c is None or d is None or (saturates and c_type != "s32"):
        return None
    sums = Accumulator(c_type, d_type, saturates, c.fragment, d.fragment)
    left, right = a.fragment, b.fragment
    write = fragment_writer(inst.operands[0])
    reads = [fragment_reader(x) for x in inst.operands[1:4]]
    counts = [len(items_of(x)) for x in inst.operands]
    if counts != [x.registers for x in (d, a, b, c)]:
        return None

    def execute(machine: Machine, lanes: Lanes) -> None:
        of_a, of_b, of_c = (read(machine, lanes.warps) for read in reads)
        products = np.matmul(
            left.gather(elements(of_a, a_type)), right.gather(elements(of_b, b_type))
        )
        write(machine, sums(products, of_c), lanes)

    return Step(inst, execute, together=whole_warp)
