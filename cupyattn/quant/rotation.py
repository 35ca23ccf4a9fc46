"""Rotation of channels by Hadamard matrices, which spreads outlier channels over their group.

The rows of x and of its weight are rotated alike, so ``x W^T`` is unchanged. The largest magnitude
of a row of x becomes as small as in normal numbers. A group of n channels consists of n / 8 runs of
eight neighbours, evenly spread over the row. One large head or half of a row then reaches every
group.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.row_teams import RUN

#: What may be said of a rotation: none, or by Hadamard matrices.
ROTATIONS = (None, "hadamard")
#: Sizes of groups, the largest first. Of 64 and 256 the matrix is regular: signs aside, all of its
#: rows have one sum.
GROUPS = (256, 128, 64)


def group_of(channels: int) -> int:
    """Return how many channels a group has: the largest of `GROUPS` that divides the row.

    Examples
    --------
    >>> group_of(3072), group_of(1152), group_of(1600)
    (256, 128, 64)
    """
    for group in GROUPS:
        if channels and channels % group == 0:
            return group
    raise UnsupportedError(
        f"rotate='hadamard' takes a multiple of {GROUPS[-1]} channels, got {channels}: pad x and "
        "the weight with zeros, or use rotate=None"
    )


def unit_of(group: int) -> np.float32:
    """Return what a rotated row is multiplied by to keep its length, in float32.

    Examples
    --------
    >>> float(unit_of(256)), float(unit_of(64))
    (0.0625, 0.125)
    """
    return np.float32(1 / math.sqrt(group))


def turned(x: Array, group: int) -> Array:
    """Return rows times the matrix of signs: √group times the rotation, in the type of x.

    Parameters
    ----------
    x : array, (rows, channels), float32 or float64
    group : int
        One of `GROUPS`, which divides the channels.

    Notes
    -----
    Numbers get their signs, then butterflies ``x + y``, ``x - y`` of pairs whose places in the
    group differ in one bit, from the lowest bit on. Channel c has the place
    ``8 (c // s) + c % 8`` in its group, where ``s = 8 channels / group``.
    """
    rows, channels = x.shape
    parts = group // RUN
    signs = array_namespace(x).asarray(_signs(channels, group))
    made = (x * signs).reshape(rows, parts, channels // group, RUN)
    for axis in (3, 1):
        bit = 1
        while bit < made.shape[axis]:
            made = _butterflies(made, axis, bit)
            bit *= 2
    return made.reshape(rows, channels)


def rotated(x: Array) -> Array:
    """Rotate the last axis of an array as ``norm_quant(..., rotate="hadamard")`` does, exactly.

    A weight that is to meet rotated activations is rotated so before it is quantised.

    Parameters
    ----------
    x : array, (..., channels), float16, bfloat16, float32 or float64
        A multiple of 64 channels. NumPy, CuPy, or anything with DLPack.

    Returns
    -------
    array, float64, shaped as x
        NumPy's, or CuPy's where x lies on a device.

    Raises
    ------
    UnsupportedError
        For another number of channels.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((2, 3, 192))
    >>> bool(np.allclose(rotated(x) @ rotated(w).T, x @ w.T))
    True
    >>> one = np.zeros((1, 256)); one[0, 7] = 100.0  # an outlier
    >>> float(abs(rotated(one)).max())
    6.25
    """
    (x,) = operands(x=x)
    values = as_float64(x)
    group = group_of(values.shape[-1])
    flat = turned(values.reshape(-1, values.shape[-1]), group) / math.sqrt(group)
    return flat.reshape(values.shape)


def _signs(channels: int, group: int) -> npt.NDArray[np.float32]:
    """Return the sign of each channel, which an odd number of digits 3, in base 4, makes minus."""
    span = RUN * channels // group
    channel = np.arange(channels)
    place = channel // span * RUN + channel % RUN
    threes, odd = place & place >> 1 & 0x55555555, np.zeros(channels, np.int64)
    while threes.any():
        odd ^= threes & 1
        threes >>= 1
    return np.where(odd, np.float32(-1), np.float32(1))


def _butterflies(x: Array, axis: int, bit: int) -> Array:
    """Return sums and differences of numbers whose places along an axis differ in a bit."""
    shape, xp = x.shape, array_namespace(x)
    pairs = x.reshape(*shape[:axis], -1, 2, bit, *shape[axis + 1 :])
    first, second = xp.moveaxis(pairs, axis + 1, 0)
    return xp.stack((first + second, first - second), axis=axis + 1).reshape(shape)
