"""INT8 quantisation in NumPy, bit for bit as in kernels_cu/prepare/quantize*.cu.

A group of rows shares one float32 scale; row r of an operand has ``scale[..., r // group]``, for
every granularity. All arithmetic is float32, each operation rounded once, to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.arrays.groups import scale_of_row, value_scale_of_key
from cupyattn.arrays.kinds import array_namespace
from cupyattn.quant.config import GROUP_ALL, SCALE_MIN

Array = Any
Float32 = npt.NDArray[np.float32]

#: Largest magnitude of a symmetric code; -128 is not used, so that a code and its negative exist.
INT8_MAX = np.float32(127)
#: Half of the steps from code -128 to code 127.
HALF_CODES = np.float32(127.5)
#: Largest number of e4m3, the 8-bit float of 4 exponent and 3 fraction bits.
E4M3_MAX = np.float32(448)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: Keys of V's codes are padded to a multiple of this number, which prims/config.cuh defines, too.
VALUES_PAD = 128
#: The stride of rows of Q's and K's codes is a multiple of this, because the Hopper copy engine
#: requires it. In bytes.
CODES_PAD = 16


def group_count(length: int, group: int) -> int:
    """Return the number of scales for `length` rows.

    Examples
    --------
    >>> group_count(33, 16), group_count(33, GROUP_ALL), group_count(0, 16)
    (3, 1, 0)
    """
    return 1 if group == GROUP_ALL else -(-length // group)


#: Least number of rows of a head for which the mean uses only some rows: the first few of each
#: period. The same numbers are in kernels_cu/prims/codes/quant.cuh.
MANY_ROWS, MEAN_ROWS, MEAN_PERIOD = 1024, 32, 128


def rows_of_mean(length: int) -> int:
    """Return the number of rows of a head in the mean that smoothing subtracts.

    A quarter of the rows if there are many, otherwise all. Any vector that all rows share may be
    subtracted. The mean of some rows is within the range of every channel, like the mean of all
    rows.

    Parameters
    ----------
    length : int
        Rows of the head.

    Examples
    --------
    >>> rows_of_mean(1000), rows_of_mean(4096), rows_of_mean(1060)
    (1000, 1024, 288)
    """
    if length < MANY_ROWS:
        return length
    periods, rest = divmod(length, MEAN_PERIOD)
    return periods * MEAN_ROWS + min(rest, MEAN_ROWS)


def of_mean(x: Array) -> Array:
    """Return the rows of x in the mean that smoothing subtracts.

    Parameters
    ----------
    x : array, (batch, heads, length, head_dim)

    Returns
    -------
    array, (batch, heads, rows_of_mean(length), head_dim)
        x itself if all rows are used.
    """
    length = x.shape[2]
    if length < MANY_ROWS:
        return x
    return x[:, :, array_namespace(x).arange(length) % MEAN_PERIOD < MEAN_ROWS]


def channel_mean(k: Array) -> Float32:
    """Return the vector that smoothing subtracts: the mean of each channel over the rows `of_mean`.

    Parameters
    ----------
    k : array, (batch, heads_kv, len_kv, head_dim)
        Any float type.

    Returns
    -------
    array, (batch, heads_kv, head_dim), float32
        0 for a channel whose sum is not finite, and without keys.

    Notes
    -----
    Subtracting any vector that all keys share does not change the softmax. So the order of the sum
    does not matter, and the kernel has another order. For the same reason 0 may replace a NaN,
    which would otherwise spread to every key of the head.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rows = of_mean(k).astype(np.float32)
        total = rows.sum(axis=2, dtype=np.float32)
        mean = total / np.float32(max(rows.shape[2], 1))
    xp = array_namespace(k)
    found: Float32 = xp.where(xp.isfinite(total), mean, np.float32(0))
    return found.astype(np.float32, copy=False)


def numbers_of(codes: Array, e4m3: bool) -> Array:
    """Return codes as float32 numbers, before their scale.

    Parameters
    ----------
    codes : array, int8
        NumPy or CuPy: integers, or the bits of e4m3.
    e4m3 : bool
    """
    if not e4m3:
        return codes.astype(np.float32)
    xp = array_namespace(codes)
    every_code = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
    return xp.asarray(every_code)[codes.astype(np.uint8)]


def scale_of_absmax(absmax: Float32, largest: np.float32 = INT8_MAX) -> tuple[Float32, Float32]:
    """Return scale and inverse scale of groups, by the largest magnitude in each.

    Parameters
    ----------
    absmax : array, float32
        Largest magnitude, NumPy or CuPy; NaN or infinite if a group contains such a value.
    largest : float32
        The code of that magnitude.

    Returns
    -------
    scale, inverse : array, float32
        ``absmax / 127`` and ``127 / absmax``, each rounded once. A group of zeros has scale 1. A
        scale below 2^-126 is raised to 2^-126. A group that is not finite has scale NaN and
        inverse 0.

    Examples
    --------
    >>> scale_of_absmax(np.float32([0.0, 254.0, 1e-45, np.inf]))[0]
    array([1.0000000e+00, 2.0000000e+00, 1.1754944e-38,           nan],
          dtype=float32)
    """
    xp = array_namespace(absmax)
    finite = xp.isfinite(absmax)
    raised = xp.where(finite, xp.maximum(absmax, largest * SCALE_MIN), largest)
    scale = xp.where(absmax == 0, np.float32(1), raised / largest)
    return xp.where(finite, scale, np.float32(np.nan)), xp.where(finite, largest / raised, 0)


def coding_of_range(
    above: Float32, below: Float32
) -> tuple[Float32, Float32, npt.NDArray[np.int32]]:
    """Return scale, inverse scale and zero point of groups, by their distances from 0.

    Parameters
    ----------
    above, below : array, float32
        Largest positive number and largest magnitude of a negative number, 0 if there is none; NaN
        or infinite if a group contains such a value.

    Returns
    -------
    scale, inverse : array, float32
        Scales of a range of 255 steps, with the exceptions of `scale_of_absmax`.
    zero : array, int32
        -128 to 127: the code of 0. 0 if the group is not finite.

    Examples
    --------
    >>> scale, _, zero = coding_of_range(np.float32([255.0, 0.0, 0.0]), np.float32([0.0, 510.0, 0]))
    >>> scale.tolist(), zero.tolist()
    ([1.0, 2.0, 1.0], [-128, 127, -128])
    """
    xp = array_namespace(above, below)
    half = np.float32(0.5) * above + np.float32(0.5) * below
    scale, inverse = scale_of_absmax(half, HALF_CODES)
    zero = xp.rint(xp.where(inverse == 0, np.float32(0), below * inverse - np.float32(128)))
    return scale, inverse, zero.astype(np.int32)


def code_of(scaled: Float32, zero: Array) -> npt.NDArray[np.int8]:
    """Return the codes of numbers in units of their scale; 0 if the scale is NaN."""
    xp = array_namespace(scaled)
    codes = xp.clip(xp.rint(scaled) + zero, -128, 127)
    found: npt.NDArray[np.int8] = xp.where(xp.isnan(codes), np.float32(0), codes).astype(np.int8)
    return found


def scale_of_static(static: Float32) -> tuple[Float32, Float32]:
    """Return given scales and inverses; NaN and 0 for scales that are not finite and normal."""
    usable = np.isfinite(static) & (static >= SCALE_MIN)
    inverse = np.float32(1) / np.where(usable, static, np.float32(1))
    return np.where(usable, static, np.float32(np.nan)), np.where(usable, inverse, np.float32(0))


def quantize_values(
    v: Array, group: int, mean: Float32 | None = None, *, per_tensor: bool = False,
    e4m3: bool = False,
) -> tuple[npt.NDArray[np.int8], Float32]:
    """Quantise V with a scale for each channel of each group of keys.

    Parameters
    ----------
    v : array, (batch, heads_kv, len_kv, head_dim)
        Any float type; taken to float32, which is exact for the 16-bit types.
    group : int
        Adjacent keys that share the scale of a channel.
    mean : array, (batch, heads_kv, head_dim), float32, optional
        Subtracted from every key's value first.
    per_tensor : bool
        One scale for all of V, repeated for every channel; `group` is then GROUP_ALL.
    e4m3 : bool
        Codes are 8-bit floats up to 448 in place of integers up to 127.

    Returns
    -------
    codes : array, (batch, heads_kv, head_dim, padded), int8
        -127 to 127, or the bits of e4m3; keys along the last axis, which 8-bit matrix products
        need, in the order of `stored_values`. `padded` is len_kv rounded up to `VALUES_PAD`.
    scale : array, (batch, heads_kv, groups, head_dim), float32
        NaN for a channel of a group that holds a NaN or an infinity.

    Notes
    -----
    Scale, code and error as in `quantize_symmetric`. e4m3 has scale fl(A / 448) and an error of at
    most ``max(|x| (2^-4 + 2^-20), s 2^-10 (1 + 2^-9))``: half a unit of its last place.
    """
    length = v.shape[2]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _less_mean(v, mean)
        absmax = _channel_max(np.abs(values), group, per_tensor)
        scale, inverse = scale_of_absmax(absmax, E4M3_MAX if e4m3 else INT8_MAX)
        scaled = values * value_scale_of_key(inverse, group, length)
        scaled = np.where(np.isnan(scaled), np.float32(0), scaled)
        if e4m3:
            codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(_E4M3).view(np.int8)
        else:
            codes = np.rint(scaled).astype(np.int8)
    return stored_values(codes.swapaxes(2, 3)), scale.astype(np.float32, copy=False)


def _less_mean(x: Array, mean: Float32 | None) -> Float32:
    """Return numbers in float32, less the mean of their channel if there is one."""
    values: Float32 = x.astype(np.float32)
    return values if mean is None else values - mean[:, :, None, :]


def _channel_max(values: Float32, group: int, per_tensor: bool) -> Float32:
    """Return the largest number of each channel of each group of keys, or of all, as `_largest`."""
    found = _largest(values, group)
    return np.full_like(found, found.max(initial=np.float32(0))) if per_tensor else found


def _largest(values: Float32, group: int) -> Float32:
    """Return the largest number of each group along axis 2, 0 or more, NaN if a member is."""
    length = values.shape[2]
    if length == 0:
        return np.zeros((*values.shape[:2], group_count(0, group), *values.shape[3:]), np.float32)
    starts = np.arange(0, length, min(group, length))
    return np.asarray(np.maximum(np.maximum.reduceat(values, starts, axis=2), np.float32(0)))


def quantize_values_affine(
    v: Array, group: int, mean: Float32 | None = None, *, per_tensor: bool = False
) -> tuple[npt.NDArray[np.int8], Float32, npt.NDArray[np.int32]]:
    """Quantise V with a scale and a zero point for each channel of each group of keys.

    Parameters
    ----------
    v, group, mean, per_tensor
        As for `quantize_values`.

    Returns
    -------
    codes, scale
        As of `quantize_values`; codes -128 to 127.
    zero : array, (batch, heads_kv, groups, head_dim), int32

    Notes
    -----
    Code and error as in `quantize_affine`.
    """
    length = v.shape[2]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _less_mean(v, mean)
        above, below = (_channel_max(side, group, per_tensor) for side in (values, -values))
        scale, inverse, zero = coding_of_range(above, below)
        scaled = values * value_scale_of_key(inverse, group, length)
        codes = code_of(scaled, value_scale_of_key(zero, group, length))
    return stored_values(codes.swapaxes(2, 3)), scale.astype(np.float32, copy=False), zero


def stored_values(codes: Array) -> Array:
    """Return codes (batch, heads_kv, head_dim, len_kv) in the order in which kernels read them.

    Zeros pad the keys to a multiple of VALUES_PAD. Among every 16 keys, key 8 n + 2 t + j is
    stored at place 4 t + 2 n + j. In a matrix product, lane t has the scores of keys 2t, 2t+1,
    2t+8 and 2t+9, so their values become neighbours.

    Parameters
    ----------
    codes : array, int8
        NumPy or CuPy.

    Examples
    --------
    >>> stored_values(np.arange(16, dtype=np.int8).reshape(1, 1, 1, 16))[0, 0, 0, :16].tolist()
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    xp = array_namespace(codes)
    length = codes.shape[3]
    padded = xp.zeros((*codes.shape[:3], padded_length(length)), np.int8)
    padded[..., :length] = codes
    stored = xp.empty_like(padded)
    of_16 = (*codes.shape[:3], padded.shape[3] // 16)
    stored.reshape(*of_16, 4, 2, 2)[...] = padded.reshape(*of_16, 2, 4, 2).swapaxes(-2, -3)
    return stored


def values_by_key(stored: Array, length: int) -> Array:
    """Undo `stored_values`: return the first `length` codes in the order of keys."""
    of_16 = (*stored.shape[:3], stored.shape[3] // 16)
    by_key = stored.reshape(*of_16, 4, 2, 2).swapaxes(-2, -3)  # t, n, j as n, t, j
    return by_key.reshape(stored.shape)[..., :length]


def padded_columns(head_dim: int) -> int:
    """Return the number of bytes of a row of codes of Q or K.

    Examples
    --------
    >>> padded_columns(64), padded_columns(72)
    (64, 80)
    """
    return -(-head_dim // CODES_PAD) * CODES_PAD


def in_padded_rows(codes: Array) -> Array:
    """Return codes of Q or K as the kernels store them: a view of padded rows.

    Parameters
    ----------
    codes : array, int8, (..., head_dim)
        Contiguous.

    Examples
    --------
    >>> in_padded_rows(np.ones((2, 3, 72), np.int8)).strides
    (240, 80, 1)
    """
    head_dim = codes.shape[-1]
    if head_dim == padded_columns(head_dim):
        return codes
    xp = array_namespace(codes)
    rows = xp.zeros((*codes.shape[:-1], padded_columns(head_dim)), codes.dtype)[..., :head_dim]
    rows[...] = codes
    return rows


def padded_length(length: int) -> int:
    """Return the padded number of codes in a channel of V, for a number of keys.

    Examples
    --------
    >>> padded_length(0), padded_length(1), padded_length(129)
    (0, 128, 256)
    """
    return -(-length // VALUES_PAD) * VALUES_PAD


def quantize_symmetric(
    x: Array,
    group: int,
    *,
    per_tensor: bool = False,
    mean: Float32 | None = None,
    static_scale: Float32 | None = None,
    largest: int = 127,
) -> tuple[npt.NDArray[np.int8], Float32]:
    """Quantise one operand.

    Parameters
    ----------
    x : array, (batch, heads, length, head_dim)
        Any float type; taken to float32, which is exact for the 16-bit types.
    group : int
        Adjacent rows that share a scale; the last group may be smaller.
    per_tensor : bool
        One scale for all of x; `group` is then GROUP_ALL.
    mean : array, (batch, heads, head_dim), float32, optional
        Subtracted from every row first.
    static_scale : array, (batch or 1, heads or 1, groups), float32, optional
        Scales to use in place of those from the data.
    largest : int
        The largest code: 127, or 7 for 4 bits.

    Returns
    -------
    codes : array, (batch, heads, length, head_dim), int8
        -127 to 127, or -7 to 7.
    scale : array, (batch, heads, groups) or (1, 1, 1), float32
        NaN for a group that holds a NaN or an infinity, and where a static scale is unusable.

    Notes
    -----
    With A the largest magnitude of a group (IEEE float32, u = 2^-24)::

        s = fl(A / 127)    code = rint(fl(x * fl(127 / A)))

    *No clipping is needed*: ``|x| <= A``, so the product is at most 127 (1 + u)^2 < 127.5.

    *Error*: ``|x - s code| <= s/2 (1 + 2^-15)``. Let m in [1, 2) be the mantissa of s. The relative
    error of s is at most u/m, and that of 127/A, whose mantissa is 2/m, at most u m/2. Their sum is
    at most 3u/2, of at most 127 s.
    The product, below 128, adds 2^-18 = 64 u in units of s; rint adds 1/2. In units of s:
    1/2 + 254.5 u, and 509 u = 2^-15.008. docs/MATH_REFERENCE.md [L14].

    A static scale may saturate; the error is then ``max(s/2 (1 + 2^-15), |x| - 127 s)``. For codes
    of 4 bits, 7 replaces 127 throughout, and the products are smaller.
    """
    most = np.float32(largest)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _less_mean(x, mean)
        absmax = _group_max(np.abs(values), group, per_tensor)
        if static_scale is None:
            scale, inverse = scale_of_absmax(absmax, most)
        else:
            scale, inverse = scale_of_static(np.broadcast_to(static_scale, absmax.shape))
            scale = np.where(np.isfinite(absmax), scale, np.float32(np.nan))
        scaled = values * scale_of_row(inverse, group, x.shape[2])[..., None]
        codes = np.clip(np.rint(scaled), -most, most)
        codes = np.where(np.isnan(codes), np.float32(0), codes).astype(np.int8)
    return codes, scale.astype(np.float32, copy=False)


def quantize_affine(
    x: Array, group: int, *, per_tensor: bool = False, mean: Float32 | None = None
) -> tuple[npt.NDArray[np.int8], Float32, npt.NDArray[np.int32]]:
    """Quantise one operand with zero points.

    Parameters
    ----------
    x, group, per_tensor, mean
        As for `quantize_symmetric`.

    Returns
    -------
    codes : array, (batch, heads, length, head_dim), int8
        -128 to 127.
    scale : array, (batch, heads, groups) or (1, 1, 1), float32
        NaN for a group that holds a NaN or an infinity.
    zero : array, as scale, int32
        -128 to 127.

    Notes
    -----
    With a the largest number of a group and -b the least one, or 0::

        h = fl(fl(a / 2) + fl(b / 2))    s = fl(h / 127.5)    z = rint(fl(fl(b i) - 128))
        i = fl(127.5 / h)                code = rint(fl(x i)) + z

    clipped to -128 and 127; x is ``s (code - z)``, and 0 is code z exactly.

    *Error*: ``|x - s (code - z)| <= s/2 (1 + 2^-12)``, even if the code was clipped: docs/
    MATH_REFERENCE.md [L15].
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _less_mean(x, mean)
        above, below = (_group_max(side, group, per_tensor) for side in (values, -values))
        scale, inverse, zero = coding_of_range(above, below)
        scaled = values * scale_of_row(inverse, group, x.shape[2])[..., None]
        codes = code_of(scaled, scale_of_row(zero, group, x.shape[2])[..., None])
    return codes, scale.astype(np.float32, copy=False), zero


def _group_max(values: Float32, group: int, per_tensor: bool) -> Float32:
    """Return the largest number of each group, 0 or more, NaN or infinite where a member is."""
    if per_tensor:
        return np.full((1, 1, 1), values.max(initial=np.float32(0)), np.float32)
    return _largest(values.max(axis=-1), group)
