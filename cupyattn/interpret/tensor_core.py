"""Tensor-core instructions on arrays of registers: fragments, products, and moves of 8 x 8 tiles.

Arrays of registers are shaped (warps, 32, registers) and hold uint32 bit patterns. PTX's fragment
layout says which register of a lane holds an element of a matrix (PTX ISA, "Matrix fragments for
mma.m16n8k*"). With g = lane / 4, t = lane % 4 and E elements to a register, register r holds::

    A [16, K]               row g + 8 (r % 2), columns 4E (r / 2) + E t + 0 .. E - 1
    B [K, 8]                rows 4E r + E t + 0 .. E - 1 of column g
    C, D [16, N], 32 bits   row g + 8 (r / 2 % 2), column 8 (r / 4) + 2 t + r % 2
    C, D [16, N], float16   row g + 8 (r % 2), columns 8 (r / 2) + 2 t + 0, 1

For ``mma`` N is 8. For ``wgmma`` each of four warps holds 16 of the 64 rows of A, C and D in this
way. A descriptor names operands in shared memory: see `operand_addresses`.

Integer products are exact, and so are floating-point products. Their sum, with C, is computed in
float64 and rounded once, toward zero, to float32; float16 results are rounded again, to nearest.
Tensor cores align the addends to the largest and truncate lower bits: `accumulation_error` bounds
the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import Array
from cupyattn.interpret import exact
from cupyattn.interpret.exact import FORMATS
from cupyattn.interpret.operation import match
from cupyattn.kernels.numerics import TENSOR_CORE_ROUNDOFF

Index = npt.NDArray[np.intp]

# ---- elements ------------------------------------------------------------------------------------

#: Bits of an element of each operand type.
ELEMENT_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4,
}  # fmt: skip
_NUMBERS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "tf32": np.dtype(np.float32),
}
#: Bits of a float32 that tf32 lacks, which tensor cores ignore.
_TF32_MASK = np.uint32(0xFFFFE000)


def elements(registers: Array, kind: str) -> Array:
    """Return the values of the elements in registers, in float64, lowest bits first.

    Parameters
    ----------
    registers : array, (..., count)
        uint32 patterns.
    kind : str
        Element type, a key of `ELEMENT_BITS`.

    Returns
    -------
    array, (..., count * elements to a register)
    """
    registers = np.ascontiguousarray(registers)
    if kind in ("s4", "u4"):
        octets = registers.view(np.uint8)
        nibbles = np.stack((octets & 15, octets >> 4), -1).reshape(*octets.shape[:-1], -1)
        values = nibbles.astype(np.float64)
        return np.where(values > 7, values - 16, values) if kind == "s4" else values
    if kind == "tf32":
        registers = registers & _TF32_MASK
    return registers.view(_NUMBERS[kind]).astype(np.float64)


# ---- fragments -----------------------------------------------------------------------------------


class Fragment(NamedTuple):
    """Layout of the elements of a matrix in the registers of a warp.

    Parameters
    ----------
    registers : int
        Registers of a lane.
    place : array of int, (rows, columns)
        Index of each element among the elements of all lanes, lane by lane.
    """

    registers: int
    place: Index

    def gather(self, values: Array) -> Array:
        """Turn the elements of lanes (warps, 32, elements) into matrices (warps, rows, columns)."""
        return values.reshape(len(values), -1)[:, self.place]

    def scatter(self, matrices: Array) -> Array:
        """Turn matrices (warps, rows, columns) into the elements of lanes (warps, 32, elements)."""
        flat = matrices.reshape(len(matrices), -1)
        lanes = np.empty_like(flat)
        lanes[:, self.place.ravel()] = flat
        return lanes.reshape(len(flat), 32, -1)


def _fragment(
    rows: int, columns: int, count: int, per_register: int, at: Callable[..., tuple[Index, Index]]
) -> Fragment:
    """Build a fragment from the row and column of element i of register r of a lane."""
    lane, register, i = np.indices((32, count, per_register))
    row, column = at(lane // 4, lane % 4, register, i)
    place = np.empty((rows, columns), np.intp)
    place[row, column] = (lane * count + register) * per_register + i
    return Fragment(count, place)


@cache
def fragment_a(depth: int, bits: int) -> Fragment:
    """Return the fragment of A [16, depth]."""
    E = 32 // bits
    return _fragment(
        16, depth, depth // (2 * E), E,
        lambda g, t, r, i: (g + 8 * (r % 2), 4 * E * (r // 2) + E * t + i),
    )  # fmt: skip


@cache
def fragment_b(depth: int, bits: int) -> Fragment:
    """Return the fragment of B [depth, 8]."""
    E = 32 // bits
    return _fragment(depth, 8, depth // (4 * E), E, lambda g, t, r, i: (4 * E * r + E * t + i, g))


@cache
def fragment_c(bits: int, columns: int = 8) -> Fragment:
    """Return the fragment of C and D [16, columns], of 32 or 16 bits."""
    if bits == 32:
        return _fragment(
            16, columns, columns // 2, 1,
            lambda g, t, r, i: (g + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * t + r % 2),
        )  # fmt: skip
    return _fragment(
        16, columns, columns // 4, 2,
        lambda g, t, r, i: (g + 8 * (r % 2), 8 * (r // 2) + 2 * t + i),
    )  # fmt: skip


# ---- products ------------------------------------------------------------------------------------


def accumulation_error(
    products: int, magnitude: Array, roundoff: float = TENSOR_CORE_ROUNDOFF, d_type: str = "f32"
) -> Array:
    """Bound the difference between a tensor core's sum and the sum of the model.

    Parameters
    ----------
    products : int
        Products in a sum.
    magnitude : array
        |c| + sum |a b|.
    roundoff : float
        Roundoff of the addition: `cupyattn.kernels.numerics.FP8_ROUNDOFF` for ``wgmma`` over 8-bit
        floats.
    d_type : {"f32", "f16"}
        Type of the result.

    Notes
    -----
    By [L3] of docs/MATH_REFERENCE.md, aligning loses less than `roundoff` of the largest addend for
    each addend, including c, and truncating loses as much of the sum: `products` + 2 losses. The
    rounding of the model is one more, and that of float64 is far smaller. Each loss may be one
    subnormal number instead. If two sums differ by this much, their float16 roundings differ by at
    most one place of float16 more. Operands are normal numbers.
    """
    error = (products + 3) * (roundoff * magnitude + 2.0**-149)
    if d_type == "f32":
        return error
    return error + 2.0**-10 * (magnitude + error) + 2.0**-24


_CUT = np.uint64(0xFFFFFFFFE0000000)


def _cut(total: Array) -> Array:
    """Round float64 toward zero to float32; from 2^128 on to infinities, as tensor cores do."""
    cut = np.bitwise_and(total.view(np.uint64), _CUT).view(np.float64)
    result = cut.astype(np.float32)
    subnormal = np.less(np.abs(cut), FORMATS["f32"].tiny)
    if np.count_nonzero(subnormal) > np.count_nonzero(np.equal(total, 0)):
        return np.where(subnormal, exact.narrow(total, FORMATS["f32"], "rz"), result)
    return result


class Accumulator(NamedTuple):
    """Adds sums of products to C, and stores the result as D, in warps' registers.

    Parameters
    ----------
    c_type, d_type : str
        Types of C and D.
    saturates : bool
        ``.satfinite``: clamp int32 sums; they wrap without it.
    c, d : Fragment
    """

    c_type: str
    d_type: str
    saturates: bool
    c: Fragment
    d: Fragment

    def __call__(self, products: Array, registers: Array) -> Array:
        """Return D from matrices of sums of products and the registers of C."""
        registers = np.ascontiguousarray(registers)
        if self.c_type == "s32":
            total = products.astype(np.int64) + self.c.gather(registers.view(np.int32))
            if self.saturates:
                total = np.clip(total, -(2**31), 2**31 - 1)
            return self.d.scatter(total.astype(np.int32).view(np.uint32))
        c = self.c.gather(registers.view(FORMATS[self.c_type].dtype)).astype(np.float64)
        total = _cut(np.add(products, c))
        if self.d_type == "f16":
            total = total.astype(np.float16)
        total = np.add(total, total.dtype.type(0))  # every zero is +0
        return self.d.scatter(exact.canonical(total, FORMATS[self.d_type])).view(np.uint32)


@cache
def accumulator(c_type: str, d_type: str, saturates: bool, columns: int = 8) -> Accumulator:
    """Return the accumulator of given types, `columns` wide."""
    c, d = (fragment_c(16 if kind == "f16" else 32, columns) for kind in (c_type, d_type))
    return Accumulator(c_type, d_type, saturates, c, d)


class Mma(NamedTuple):
    """A form of ``mma.sync``: its types, and the fragments of its operands."""

    a_type: str
    b_type: str
    a: Fragment
    b: Fragment
    accumulator: Accumulator

    def __call__(self, a: Array, b: Array, c: Array) -> Array:
        """Return D = A B + C in registers (warps, 32, registers)."""
        left = self.a.gather(elements(a, self.a_type))
        right = self.b.gather(elements(b, self.b_type))
        return self.accumulator(np.matmul(left, right), c)


#: Depths of m16n8 products by the type of A.
_DEPTHS = {
    "f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32),
    "s8": (16, 32), "u8": (16, 32), "s4": (32, 64), "u4": (32, 64),
}  # fmt: skip
#: Types that may be mixed, and the types of their accumulators.
_FAMILIES = (
    (("f16",), ("f16", "f32")),
    (("bf16",), ("f32",)),
    (("tf32",), ("f32",)),
    (("e4m3", "e5m2"), ("f16", "f32")),
    (("s8", "u8"), ("s32",)),
    (("s4", "u4"), ("s32",)),
)


def accumulates(a_type: str, b_type: str, sum_type: str) -> bool:
    """Whether products of two types can be summed in a third."""
    return any({a_type, b_type} <= {*types} and sum_type in sums for types, sums in _FAMILIES)


@cache
def find_mma(modifiers: tuple[str, ...]) -> Mma | None:
    """Return the product that ``mma`` with these modifiers computes, or None if it is unknown.

    Parameters
    ----------
    modifiers : tuple of str
        E.g. ``("sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32")``.
    """
    shapes = "|".join(f"m16n8k{k}" for k in (4, 8, 16, 32, 64))
    operands, accumulators = "|".join(ELEMENT_BITS), "f16|f32|s32"
    found = match(
        modifiers, "sync", "aligned", shapes, "row", "col", "satfinite?", accumulators, operands,
        operands, accumulators,
    )  # fmt: skip
    if not found:
        return None
    shape, saturates = found[2], bool(found[5])
    d_type, a_type, b_type, c_type = found[6:]
    depth, bits = int(shape.rpartition("k")[2]), ELEMENT_BITS[a_type]
    if not accumulates(a_type, b_type, c_type) or not accumulates(a_type, b_type, d_type):
        return None
    if depth not in _DEPTHS[a_type] or (saturates and c_type != "s32"):
        return None
    sums = accumulator(c_type, d_type, saturates)
    return Mma(a_type, b_type, fragment_a(depth, bits), fragment_b(depth, bits), sums)


def mma(modifiers: tuple[str, ...], a: Array, b: Array, c: Array) -> Array:
    """Return D = A B + C of whole warps.

    Parameters
    ----------
    modifiers : tuple of str
        Modifiers of a product that `find_mma` knows.
    a, b, c : array of uint32, (warps, 32, registers)

    Returns
    -------
    array of uint32, (warps, 32, registers)

    Raises
    ------
    ValueError
        If `find_mma` does not know the modifiers.
    """
    product = find_mma(modifiers)
    if product is None:
        raise ValueError(f"mma.{'.'.join(modifiers)} is not known")
    return product(a, b, c)


# ---- 8 x 8 tiles ---------------------------------------------------------------------------------


def ldmatrix(rows: Array, transposed: bool) -> Array:
    """Distribute 8 x 8 tiles of 16-bit elements over the lanes of warps.

    Parameters
    ----------
    rows : array of uint32, (warps, 8 * tiles, 4)
        The 16 bytes at the address of each lane in use; lane i gives row i % 8 of tile i / 8.
    transposed : bool
        ``.trans``.

    Returns
    -------
    array of uint32, (warps, 32, tiles)
        Lane 4 r + c holds elements 2 c and 2 c + 1 of row r of each tile, or of its column r.
    """
    tiles = rows.reshape(len(rows), -1, 8, 4)
    if transposed:
        tiles = _transpose(tiles)
    return np.ascontiguousarray(tiles.reshape(*tiles.shape[:2], 32).swapaxes(1, 2))


def stmatrix(registers: Array, transposed: bool) -> Array:
    """Collect 8 x 8 tiles from the lanes of warps: the reverse of `ldmatrix`.

    Parameters
    ----------
    registers : array of uint32, (warps, 32, tiles)
    transposed : bool
        ``.trans``.

    Returns
    -------
    array of uint32, (warps, 8 * tiles, 4)
        The 16 bytes to be stored at the address of each lane in use.
    """
    tiles = np.ascontiguousarray(registers.swapaxes(1, 2)).reshape(len(registers), -1, 8, 4)
    if transposed:
        tiles = _transpose(tiles)
    return tiles.reshape(len(tiles), -1, 4)


def _transpose(tiles: Array) -> Array:
    """Transpose 8 x 8 tiles of 16-bit elements, given by the words (..., 8, 4) of their rows."""
    flipped = np.ascontiguousarray(tiles).view(np.uint16).swapaxes(-1, -2)
    return np.ascontiguousarray(flipped).view(np.uint32)
