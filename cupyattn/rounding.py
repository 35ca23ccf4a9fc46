"""What reference, mirror and bounds share: array kinds, groups of heads, and single roundings."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.numerics import EX2_FLUSH, P_CODE_ONE

#: An array of NumPy or of CuPy; neither is imported for its type.
Array = Any

#: Classes of NumPy whose arrays are taken.
_PLAIN = (np.ndarray, np.memmap)

#: The score of a masked key.
NEG_INF = float("-inf")

#: Storage types by the names that `cupyattn.numerics.Numerics` uses.
STORAGE = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

#: Largest number of each storage type.
FINITE_MAX = {
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float32": 2.0**127 * (2 - 2.0**-23),
}


def array_namespace(*arrays: Array) -> Any:
    """Return the module, NumPy or CuPy, that all of `arrays` belong to.

    Raises
    ------
    TypeError
        If they are of different kinds, or of neither kind, or what `check_kind` refuses.

    Examples
    --------
    >>> array_namespace(np.zeros(3)).__name__
    'numpy'
    """
    modules = {
        "numpy" if isinstance(array, np.ndarray) else type(array).__module__.partition(".")[0]
        for array in arrays
    }
    if modules == {"cupy"}:
        return sys.modules["cupy"]
    if modules == {"numpy"}:
        for array in arrays:
            check_kind("arrays", array)
        return np
    kinds = ", ".join(f"{type(a).__module__}.{type(a).__qualname__}" for a in arrays)
    raise TypeError(f"expected NumPy arrays only or CuPy arrays only, got {kinds}")


def check_kind(name: str, array: Array) -> None:
    """Raise TypeError unless an array of NumPy means to kernels what it means to NumPy.

    `numpy.ndarray` and `numpy.memmap` do, in this machine's byte order. Other subclasses may have a
    mask, a unit or operators of their own, which a kernel would ignore.
    """
    kind = type(array)
    if kind not in _PLAIN and not isinstance(array, np.generic):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} must hold no masked array, whose mask would be ignored: pass x.filled(0) "
                "or x.data, and give attention the keys that count as mask= (True: attend)"
            )
        said = f"{kind.__module__}.{kind.__qualname__}"
        way_out = ": pass np.asarray(x)" if isinstance(array, np.ndarray) else ""
        raise TypeError(f"{name} must be of numpy.ndarray or numpy.memmap, got {said}{way_out}")
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} must be in this machine's byte order, got dtype {array.dtype.str}: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )


def as_float64(x: Array) -> Array:
    """Return `x` as float64, exactly; bfloat16 goes through float32, which holds all of it."""
    if x.dtype.name == "bfloat16":
        x = x.astype(np.float32)
    return x.astype(np.float64, copy=False)


def scale_of_row(scale: Array, group: int, length: int) -> Array:
    """Return the scale of every row.

    Parameters
    ----------
    scale : array, (batch or 1, heads or 1, groups)
        NumPy or CuPy.
    group : int
        Rows per scale.
    length : int
        Rows.

    Returns
    -------
    array, (batch or 1, heads or 1, length)
    """
    return scale.repeat(max(1, min(group, length)), axis=-1)[..., :length]


def value_scale_of_key(scale: Array, group: int, length: int) -> Array:
    """Return the scales of V by key, (..., length, head_dim), from those of groups of keys."""
    return scale_of_row(scale.swapaxes(-1, -2), group, length).swapaxes(-1, -2)


def split_heads(x: Array, heads_kv: int) -> Array:
    """View (batch, heads, ...) as (batch, heads_kv, group, ...), by the key head that they use."""
    group = x.shape[1] // heads_kv if heads_kv else 0
    return x.reshape(x.shape[0], heads_kv, group, *x.shape[2:])


def merge_heads(x: Array) -> Array:
    """Undo `split_heads`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


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
    What ``ex2.approx.ftz.f32`` aims at; the instruction itself is only within
    `cupyattn.numerics.EX2_APPROX_ERROR` of it.

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
    What the device's ``tanhf`` aims at; that is only within `cupyattn.numerics.TANHF_ERROR` of it.

    Examples
    --------
    >>> tanh([0.0, 1.0, -np.inf]).tolist()
    [0.0, 0.7615941762924194, -1.0]
    """
    return np.tanh(np.asarray(x, np.float32).astype(np.float64)).astype(np.float32)


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
