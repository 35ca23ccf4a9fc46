"""Round correctly: sums and products of floats as if computed exactly and rounded once.

The tool is round to odd: if the float64 result is not exact, its last bit is set. Such a number is
on the same side as the exact value of every number of a narrower format, and of every midpoint
between two. So it rounds to that format, in any direction, as the exact value does (S. Boldo and G.
Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
IEEE Trans. Computers 57, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.interpret.operation import DTYPES, Evaluate

if TYPE_CHECKING:
    from fractions import Fraction


class Format(NamedTuple):
    """A floating-point type: its smallest normal number, and the only NaN that it computes.

    Numbers are 0-d arrays, which NumPy combines with arrays faster than its scalars.
    """

    dtype: np.dtype[Any]
    tiny: Array
    nan: Array


def _format(name: str, smallest: float, nan: int) -> Format:
    dtype = DTYPES[name]
    bits = np.array(nan, f"u{dtype.itemsize}")
    return Format(dtype, np.array(smallest, dtype), bits.view(dtype))


FORMATS = {
    "f16": _format("f16", 2.0**-14, 0x7FFF),
    "bf16": _format("bf16", 2.0**-126, 0x7FFF),
    "f32": _format("f32", 2.0**-126, 0x7FFFFFFF),
    "f64": _format("f64", 2.0**-1022, 0x7FF8000000000000),
}

#: The bits of a float64 below float32's last, and their value midway between two float32.
_BELOW, _MIDWAY = np.array(0x1FFFFFFF, np.uint64), np.array(0x10000000, np.uint64)


def canonical(x: Array, fmt: Format) -> Array:
    """Replace every NaN by the hardware's NaN; float64 keeps the payload of a NaN."""
    if fmt.dtype == np.float64:
        return x
    nan = np.not_equal(x, x)
    return np.where(nan, fmt.nan, x) if np.count_nonzero(nan) else x


def flush(x: Array, fmt: Format) -> Array:
    """Replace subnormal numbers by zeros of the same sign (``.ftz``)."""
    return np.multiply(x, np.abs(x) >= fmt.tiny)


def flush_result(result: Array, doubled: Evaluate, fmt: Format) -> Array:
    """Flush results that would be subnormal if exponents had no lower end.

    Hardware rounds the result with one bit more than subnormal numbers have. If that is the
    smallest normal number, the result stays, otherwise it is flushed. `doubled` is called for such
    results. It returns twice their values, rounded once, which have that bit.
    """
    edge = np.equal(np.abs(result), fmt.tiny)
    if np.count_nonzero(edge):
        below = np.less(np.abs(doubled()), fmt.tiny * 2)
        result = np.where(np.logical_and(edge, below), result * fmt.dtype.type(0), result)
    return flush(result, fmt)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the float64 sum and its rounding error: together exactly a + b, without overflow."""
    total = np.add(a, b)
    from_b = np.subtract(total, a)
    return total, np.add(np.subtract(a, np.subtract(total, from_b)), np.subtract(b, from_b))


def round_to_odd(nearest: Array, lost: Array) -> Array:
    """Return `nearest` + `lost` rounded to odd, where the first is that sum rounded to nearest.

    For an overflow, an infinity that lost its opposite, the odd neighbour is the largest number.
    """
    bits = np.asarray(nearest).view(f"u{nearest.dtype.itemsize}")
    one = bits.dtype.type(1)
    away = np.equal(np.greater(lost, 0), np.logical_not(np.signbit(nearest)))
    neighbour = np.where(away, np.add(bits, one), np.subtract(bits, one))
    moves = np.logical_or(np.less(lost, 0), np.greater(lost, 0))  # false for a lost NaN
    moves = np.logical_and(moves, np.equal(np.bitwise_and(bits, one), 0))
    return np.where(moves, neighbour, bits).view(nearest.dtype)


def adjust(rounded: Array, side: Array, rounding: str) -> Array:
    """Turn numbers rounded to nearest into numbers rounded in a direction.

    Parameters
    ----------
    rounded : array
        Nearest numbers.
    side : array
        Sign of the exact value minus `rounded`; 0 or NaN if they agree.
    rounding : {"rn", "rz", "rm", "rp"}
        To nearest, toward zero, down, up.
    """
    if rounding == "rn":
        return rounded
    infinity = rounded.dtype.type(np.inf)
    if rounding == "rm":
        return np.where(np.less(side, 0), np.nextafter(rounded, -infinity), rounded)
    if rounding == "rp":
        return np.where(np.greater(side, 0), np.nextafter(rounded, infinity), rounded)
    beyond = np.where(np.signbit(rounded), np.greater(side, 0), np.less(side, 0))
    toward_zero = np.nextafter(rounded, rounded.dtype.type(0))
    return np.where(np.logical_and(beyond, np.not_equal(rounded, 0)), toward_zero, rounded)


def narrow(x: Array, fmt: Format, rounding: str = "rn") -> Array:
    """Round float64 to a narrower format, in PTX's directions ``rn rz rm rp``, once.

    float64 to bfloat16 goes through float32 in the library, and would round twice.
    """
    if fmt.dtype == np.float64:
        return x
    if fmt.dtype == DTYPES["bf16"]:
        near = x.astype(np.float32)
        rounded = round_to_odd(near, np.subtract(x, near)).astype(fmt.dtype)
    else:
        rounded = x.astype(fmt.dtype)
    if rounding == "rn":
        return rounded
    return adjust(rounded, np.subtract(x, rounded.astype(np.float64)), rounding)


def signed_zero(total: Array, a: Array, b: Array) -> Array:
    """Return sums with the zeros of rounding down: x - x is -0, unless both terms are +0."""
    negative = np.logical_or(np.signbit(a), np.signbit(b))
    return np.where(np.logical_and(np.equal(total, 0), negative), -0.0, total)


def add(a: Array, b: Array, fmt: Format, rounding: str) -> Array:
    """Return the float64 sum a + b, rounded once to a narrower format."""
    total = round_to_odd(*two_sum(a, b))
    return narrow(signed_zero(total, a, b) if rounding == "rm" else total, fmt, rounding)


def fma(a: Array, b: Array, c: Array, fmt: Format, rounding: str = "rn") -> Array:
    """Return a * b + c of a format narrower than float64, rounded once."""
    product = np.multiply(a.astype(np.float64), b.astype(np.float64))  # exact
    addend = c.astype(np.float64)
    if rounding == "rn" and fmt.dtype == np.float32:
        total = np.add(product, addend)
        result = total.astype(np.float32)
        # A second rounding is wrong only midway between two float32, if the sum is not exact. The
        # 29 lowest bits of a normal number show that; subnormal numbers are always checked.
        below = np.bitwise_and(np.asarray(total).view(np.uint64), _BELOW)
        suspect = np.equal(below, _MIDWAY)
        small = np.less(np.abs(result), fmt.tiny)
        if np.count_nonzero(small) > result.size - np.count_nonzero(total):  # not only zeros
            suspect = np.logical_or(suspect, small)
        if not np.count_nonzero(suspect):
            return result
        if result.ndim == 0:
            return add(product, addend, fmt, rounding)
        where = np.flatnonzero(suspect)
        a, b = (x[where] if x.ndim else x for x in (product, addend))
        if np.count_nonzero(two_sum(a, b)[1]):
            result[where] = add(a, b, fmt, rounding)
        return result
    return add(product, addend, fmt, rounding)


# ---- float64 -------------------------------------------------------------------------------------


def _split(x: Array) -> tuple[Array, Array]:
    """Return two float64 of 26 bits whose sum is x (Veltkamp)."""
    scaled = np.multiply(x, 134217729.0)
    high = np.subtract(scaled, np.subtract(scaled, x))
    return high, np.subtract(x, high)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the float64 product and its rounding error (Dekker), without over- or underflow."""
    product = np.multiply(a, b)
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    lost = np.subtract(np.multiply(a_high, b_high), product)
    lost = np.add(np.add(lost, np.multiply(a_high, b_low)), np.multiply(a_low, b_high))
    return product, np.add(lost, np.multiply(a_low, b_low))


def _fraction(x: float) -> Fraction:
    from fractions import Fraction  # here, because few kernels compute in float64

    return Fraction(x)


def _as_float(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma64(a: Array, b: Array, c: Array, rounding: str = "rn") -> Array:
    """Return a * b + c of float64, rounded once."""
    product, low = two_product(a, b)
    small, smallest = two_sum(low, c)
    large, middle = two_sum(product, small)
    fused = np.add(large, round_to_odd(*two_sum(middle, smallest)))
    # The rounding error of a product is a float64 only in the middle of the range.
    safe = np.less(np.abs(c), 2.0**900)
    for factor in (a, b, product):
        safe = safe & (np.abs(factor) > 2.0**-900) & (np.abs(factor) < 2.0**900)
    # Zeros, infinities and NaN: a product that overflows must not meet the other infinity.
    finite = np.isfinite(a) & np.isfinite(b)
    plain = np.where(finite & np.isinf(c), c, np.add(product, c))
    if rounding == "rm":
        plain = signed_zero(plain, product, c)
    nearest: Array = np.where(safe & np.not_equal(fused, 0), fused, plain)
    rare = finite & np.isfinite(c) & ~safe & np.not_equal(a, 0) & np.not_equal(b, 0)
    for index in zip(*np.nonzero(np.atleast_1d(rare)), strict=True):
        lanes = (np.broadcast_to(lane, rare.shape or (1,))[index] for lane in (a, b, c))
        x, y, z = (_fraction(float(lane)) for lane in lanes)
        if x * y + z:  # else the plain sum has the sign of zero right
            np.atleast_1d(nearest)[index] = _as_float(x * y + z)
    return directed64(nearest, lambda r, x, y, z: x * y + z - r, rounding, a, b, c)


def directed64(
    nearest: Array, excess: Callable[..., Fraction], rounding: str, *sources: Array
) -> Array:
    """Round float64 results in a direction, by exact comparison, lane by lane.

    Parameters
    ----------
    nearest : array
        Results rounded to nearest.
    excess : callable
        Takes `nearest` and the sources of a lane as fractions, returns a number of the sign that
        the exact result less `nearest` has.
    rounding : {"rn", "rz", "rm", "rp"}
        Direction.
    *sources : array
        Lanes with a source that is not finite keep the nearest result.
    """
    if rounding == "rn":
        return nearest
    lanes = np.broadcast_arrays(nearest, *sources)
    side = np.zeros(lanes[0].shape, np.int8)
    for index in np.ndindex(side.shape):
        result, *values = (float(lane[index]) for lane in lanes)
        if all(map(math.isfinite, values)) and not math.isnan(result):
            if math.isinf(result):  # an overflow: the exact result is finite
                side[index] = -1 if result > 0 else 1
            else:
                exactly = excess(_fraction(result), *map(_fraction, values))
                side[index] = (exactly > 0) - (exactly < 0)
    return adjust(nearest, side, rounding)
