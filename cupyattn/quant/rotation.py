"""Rotate channels by Hadamard matrices, which spreads outlier channels over their group.

The rows of x and of its weight are rotated alike, so ``x W^T`` is unchanged. The largest magnitude
of a row of x becomes as small as for normally distributed numbers. A group of n channels consists
of n / 8 runs of eight neighbours, evenly spread over the row. One large head or half of a row then
reaches every group.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import Array, array_namespace, as_float64
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.row_teams import RUN

#: Values of ``rotate`` before a product: none, or by Hadamard matrices.
ROTATIONS = (None, "hadamard")
#: Rotation in groups of neighbouring channels, as in other libraries' files. A layer then moves
#: the channels of its input (`spread`) before it is rotated.
CONTIGUOUS = "hadamard_contiguous"
#: Values of ``rotate`` for a layer's weight.
LAYER_ROTATIONS = (*ROTATIONS, CONTIGUOUS)
#: Sizes of groups, the largest first. The matrices of 64 and 256 are regular: all their rows have
#: the same sum, except for the sign.
GROUPS = (256, 128, 64)


def group_of(channels: int) -> int:
    """Return the number of channels of a group: the largest of `GROUPS` that divides the row.

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


def check_rotation(rotate: str | None, channels: int, strategy: str) -> None:
    """Raise unless a layer's weight may be rotated in this way.

    Raises
    ------
    ValueError
        For a name that is not in `LAYER_ROTATIONS`.
    UnsupportedError
        For a rotation beside scales of blocks, or of channels that no group divides.
    """
    if rotate not in LAYER_ROTATIONS:
        names = " or ".join(map(repr, LAYER_ROTATIONS))
        raise ValueError(f"rotate must be {names}, got {shown(rotate)}")
    if rotate is not None:
        check_by_row(rotate, strategy)
        group_of(channels)


def check_by_row(rotate: str, strategy: str) -> None:
    """Raise UnsupportedError for a rotation beside scales of blocks."""
    if strategy == "block":
        raise UnsupportedError(
            f"rotate={rotate!r} goes with strategy='channel', got strategy={strategy!r}: rotated "
            "rows have no outliers that blocks could separate"
        )


def rotation_of(rotate: str | None, channels: int) -> str | None:
    """Return the rotation of a weight if one is requested; None if no group divides the row."""
    return rotate if channels and channels % GROUPS[-1] == 0 else None


def unit_of(group: int) -> np.float32:
    """Return the float32 factor that keeps the length of a rotated row.

    Examples
    --------
    >>> float(unit_of(256)), float(unit_of(64))
    (0.0625, 0.125)
    """
    return np.float32(1 / math.sqrt(group))


def turned(x: Array, group: int) -> Array:
    """Return rows times the matrix of signs, √group times the rotation, in the type of x.

    Parameters
    ----------
    x : array, (rows, channels), float32 or float64
    group : int
        One of `GROUPS`, which divides the channels.

    Notes
    -----
    Numbers get their signs. Then butterflies ``x + y``, ``x - y`` combine pairs whose
    places in the group differ in one bit, from the lowest bit on. Channel c has the place ``8 (c
    // s) + c % 8`` in its group, where ``s = 8 channels / group``.
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


def rotated(x: Array, rotate: str = "hadamard") -> Array:
    """Rotate the last axis of an array as ``norm_quant(..., rotate="hadamard")`` does, exactly.

    Rotate a weight like this before it is quantised, if its activations are rotated.

    Parameters
    ----------
    x : array, (..., channels), float16, bfloat16, float32 or float64
        A multiple of 64 channels. NumPy, CuPy, or anything with DLPack.
    rotate : {"hadamard", "hadamard_contiguous"}
        Groups are spread over the row. Or they consist of neighbouring channels, whose rotated
        numbers are then spread.

    Returns
    -------
    array, float64, shaped as x
        NumPy's, or CuPy's where x lies on a device.

    Raises
    ------
    ValueError
        For another name.
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
    check_rotation(rotate, values.shape[-1], "channel")
    group = group_of(values.shape[-1])
    flat = arranged(values.reshape(-1, values.shape[-1]), rotate)
    return (turned(flat, group) / math.sqrt(group)).reshape(values.shape)


def arranged(x: Array, rotate: str | None) -> Array:
    """Return rows with channels in the order that a rotation of spread groups expects."""
    return spread(x) if rotate == CONTIGUOUS else x


def spread(x: Array) -> Array:
    """Move neighbours of a group so that ``rotate="hadamard"`` finds them in one group.

    Parameters
    ----------
    x : array or Tensor, (..., channels)

    Returns
    -------
    array or Tensor
        Same shape; a copy if there are several groups.

    Examples
    --------
    >>> spread(np.arange(512)[None] // 256)[0, ::8][:4].tolist()  # the groups of 256 in turns
    [0, 1, 0, 1]
    """
    return _exchanged(x, group_of(x.shape[-1]) // RUN, back=False)


def gathered(x: Array) -> Array:
    """Undo `spread`."""
    return _exchanged(x, group_of(x.shape[-1]) // RUN, back=True)


def matrix(places: Array) -> Array:
    """Return the matrix that rotates the rows of a group, except for its unit.

    Parameters
    ----------
    places : array or Tensor, (group,), integers
        0 to group - 1, in this order, of the library and device of the result.

    Returns
    -------
    array or Tensor, (group, group)
        Of 1 and -1.

    Examples
    --------
    >>> m = matrix(np.arange(64))
    >>> bool((m @ m.T == 64 * np.eye(64)).all())
    True
    """
    odd, both = places[:, None] * 0, places[:, None] & places
    threes = places & places >> 1
    for bit in range(0, 8, 2):
        odd = odd ^ both >> bit ^ both >> bit + 1 ^ threes[:, None] >> bit
    return 1 - 2 * (odd & 1)


def marker(rotate: str, channels: int) -> tuple[int, int]:
    """Return the record of a rotation in files: channels of a group, and how many are adjacent.

    Examples
    --------
    >>> marker("hadamard", 3072), marker("hadamard_contiguous", 3072)
    ((256, 8), (256, 256))
    """
    group = group_of(channels)
    return group, group if rotate == CONTIGUOUS else RUN


def unrotated(w: Array, rotate: str, signs: Array) -> Array:
    """Rotate the rows of a weight back.

    Parameters
    ----------
    w : array or Tensor, (rows, channels), floating point
    rotate : {"hadamard", "hadamard_contiguous"}
    signs : array or Tensor, (group, group)
        `matrix`, of the library and type of w.

    Returns
    -------
    array or Tensor, (rows, channels)
    """
    group = signs.shape[0]
    groups = gathered(w).reshape(-1, group) @ (signs.T / math.sqrt(group))
    whole = groups.reshape(w.shape)
    return whole if rotate == CONTIGUOUS else spread(whole)


def _signs(channels: int, group: int) -> npt.NDArray[np.float32]:
    """Return the signs of channels: minus if the number has an odd count of digits 3 in base 4."""
    span = RUN * channels // group
    channel = np.arange(channels)
    place = channel // span * RUN + channel % RUN
    threes, odd = place & place >> 1 & 0x55555555, np.zeros(channels, np.int64)
    while threes.any():
        odd ^= threes & 1
        threes >>= 1
    return np.where(odd, np.float32(-1), np.float32(1))


def _exchanged(x: Array, runs: int, *, back: bool) -> Array:
    """Swap the order of groups and of runs within groups, along the last axis."""
    groups = x.shape[-1] // (runs * RUN)
    axes = (runs, groups) if back else (groups, runs)
    parts = x.reshape(*x.shape[:-1], *axes, RUN)
    return parts.swapaxes(-3, -2).reshape(x.shape)


def _butterflies(x: Array, axis: int, bit: int) -> Array:
    """Return sums and differences of pairs whose places along an axis differ in one bit."""
    shape, xp = x.shape, array_namespace(x)
    pairs = x.reshape(*shape[:axis], shape[axis] // (2 * bit), 2, bit, *shape[axis + 1 :])
    first, second = xp.moveaxis(pairs, axis + 1, 0)
    return xp.stack((first + second, first - second), axis=axis + 1).reshape(shape)
