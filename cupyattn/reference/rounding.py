"""Shared by reference, mirror and bounds: array kinds, groups of heads, and single roundings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import FINITE_MAX, STORAGE
from cupyattn.kernels.numerics import EX2_FLUSH, P_CODE_ONE
from cupyattn.kernels.softcap import LARGEST_Y, tanh_factors


def round_to(x: npt.ArrayLike, fmt: str) -> npt.NDArray[np.float32]:
    """Round to a storage type, to nearest, ties to even, and return the value in float32.

    Parameters
    ----------
    x : array_like
        Values. float64 is rounded to float32 first: accumulators are float32 on the device, so
        a 16-bit store always starts there.
    fmt : {"float16", "bfloat16", "float32"}
        Storage type. Past its largest number the result is an infinity, as on the device.

    Examples
    --------
    >>> float(round_to(2049.0, "float16")), float(round_to(257.0, "bfloat16"))
    (2048.0, 256.0)
    """
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.float32, copy=False)
        return x.astype(STORAGE[fmt], copy=False).astype(np.float32, copy=False)


def from_sum(x: npt.NDArray[np.float32], fmt: str) -> npt.NDArray[np.float32]:
    """Round a mean of values to a storage type, as R7 of the fused rungs does, to float32.

    Parameters
    ----------
    x : float32 array
    fmt : {"float16", "bfloat16", "float32"}
        Storage type. A finite number past the largest float16, which rounding of weights or codes
        led to, becomes that; infinities and NaN stay.

    Examples
    --------
    >>> from_sum(np.float32([65530, -7e4, np.inf]), "float16").tolist()
    [65504.0, -65504.0, inf]
    """
    if fmt == "float16":
        x = np.where(np.isfinite(x), np.clip(x, -FINITE_MAX[fmt], FINITE_MAX[fmt]), x)
    return round_to(x, fmt)


def fma32(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return fl32(a * b + c) for float32 operands.

    Notes
    -----
    The product of two float32 is exact in float64. Their sum with `c` is rounded there once before
    it is rounded to float32, so the result differs from a true FMA by at most one part in 2^-53:
    that is, only where it lies that close to the middle of two float32 numbers.

    Examples
    --------
    >>> float(fma32(np.float32(1 + 2**-13), np.float32(1 - 2**-13), np.float32(-1))) == -(2.0**-26)
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        return (product + np.asarray(c, np.float64)).astype(np.float32)


def sub_up32(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return a - b for float32 operands, rounded up to float32.

    Examples
    --------
    >>> float(sub_up32(np.float32(1), np.float32(2**-30)))
    1.0
    >>> float(sub_up32(np.float32(1), np.float32(-(2**-30)))) == 1 + 2**-23
    True
    """
    exact = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    nearest = exact.astype(np.float32)
    return np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)


def mul_down32(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return a * b for float32 operands, rounded down to float32.

    Examples
    --------
    >>> float(mul_down32(np.float32(1 + 2**-23), np.float32(1 + 2**-23))) == 1 + 2**-22
    True
    >>> float(mul_down32(np.float32(-1 - 2**-23), np.float32(1 + 2**-23))) == -1 - 3 * 2**-23
    True
    """
    exact = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def ex2(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return 2**x rounded to float32, results below 2^-126 flushed to zero.

    Notes
    -----
    The exact value for ``ex2.approx.ftz.f32``; the instruction itself is only within
    `cupyattn.kernels.numerics.EX2_APPROX_ERROR` of it.

    Examples
    --------
    >>> ex2([0.0, -1.0, -127.0, -np.inf]).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """
    with np.errstate(over="ignore", under="ignore"):
        y = np.exp2(np.asarray(x, np.float32).astype(np.float64)).astype(np.float32)
    return np.where(y < EX2_FLUSH, np.float32(0), y)


def tanh(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return tanh(x) rounded to float32.

    Notes
    -----
    The exact value for the device's ``tanhf``, which is only within
    `cupyattn.kernels.numerics.TANHF_ERROR` of it.

    Examples
    --------
    >>> tanh([0.0, 1.0, -np.inf]).tolist()
    [0.0, 0.7615941762924194, -1.0]
    """
    return np.tanh(np.asarray(x, np.float32).astype(np.float64)).astype(np.float32)


def small_and_large_softcap(S: npt.NDArray[np.float32], cap: float) -> npt.NDArray[np.float32]:
    """Return cap * tanh(S / cap) as ``prims/score/softcap.cuh`` computes it.

    Parameters
    ----------
    S : array, float32
    cap : float
        In the units of S.

    Examples
    --------
    >>> small_and_large_softcap(np.float32([0.0, 10.0, 1000.0]), 50.0).round(3)
    array([ 0.   ,  9.869, 50.   ], dtype=float32)
    """
    unit, exponent = np.float32(cap), np.float32(2 / np.log(2) / cap)
    factors = [np.float32(factor) for factor in tanh_factors(cap)]
    with np.errstate(over="ignore", invalid="ignore"):
        square = S * S
        total = np.full_like(S, factors[-1])
        for factor in factors[-2::-1]:
            total = fma32(total, square, factor)
        power = ex2(np.abs(S) * exponent)
        large = fma32(np.float32(-2) * unit, np.float32(1) / (power + np.float32(1)), unit)
        small = square <= np.float32((LARGEST_Y * cap) ** 2)
        return np.where(small, S * total, np.copysign(large, S))


def codes_of_p(p: npt.NDArray[np.float32], p_type: str) -> npt.NDArray[np.float32]:
    """R5: return codes of weights in units of code 1, as numbers.

    Parameters
    ----------
    p : array, float32
    p_type : {"u8", "s8", "e4m3"}

    Examples
    --------
    >>> codes_of_p(np.float32([0.0, 127.5, 255.0]), "u8").tolist()
    [0.0, 128.0, 255.0]
    """
    if p_type == "e4m3":
        largest = np.fmin(p, np.float32(P_CODE_ONE[p_type]))
        return np.asarray(largest.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    return np.rint(p)
