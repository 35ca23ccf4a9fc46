"""Rows of numbers in order, and which are the largest: sorts of flat integers.

CuPy sorts flat integers by their digits, but the rows of an array, and the order of one, by
comparing tuples. So a number, 0 or more, goes into the low bits of an integer, and its row above
them. The bits of such float32 rise with their values, and a NaN lies above all.
"""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays.kinds import Array, array_namespace

_FLOAT_BITS = np.uint64(32)


def sorted_rows(values: Array) -> Array:
    """Return every row of the last axis in rising order.

    Parameters
    ----------
    values : array, float32, (..., n)
        0 or more.

    Examples
    --------
    >>> sorted_rows(np.float32([[3, 1], [0, 2]]))
    array([[1., 3.],
           [0., 2.]], dtype=float32)
    """
    keys = _keys(values)
    bits = array_namespace(values).sort(keys.reshape(-1)).astype(np.uint32)  # drops the row
    found: Array = bits.view(np.float32).reshape(values.shape)
    return found


def largest_of_rows(values: Array, count: int) -> Array:
    """Return where the largest numbers of every row are, in the flat array.

    Parameters
    ----------
    values : array, float32, (..., n)
        0 or more.
    count : int
        How many of each row; of equal ones the last.

    Returns
    -------
    array, int64, (rows * count,)
        Rising.

    Examples
    --------
    >>> largest_of_rows(np.float32([[3, 1, 3], [0, 2, 1]]), 2)
    array([0, 2, 4, 5])
    """
    xp = array_namespace(values)
    keys, length = _keys(values), values.shape[-1]
    place_bits = max(length - 1, 0).bit_length()
    keys = (keys << np.uint64(place_bits)) | xp.arange(length, dtype=np.uint64)
    ranked = xp.sort(keys.reshape(-1)).reshape(keys.shape)[:, length - count :]
    place = ranked & np.uint64((1 << place_bits) - 1)
    row = xp.arange(keys.shape[0], dtype=np.uint64)[:, None]
    return xp.sort((row * np.uint64(length) + place).reshape(-1)).astype(np.int64)


def _keys(values: Array) -> Array:
    """Return a number's row and bits in one integer: uint64, (rows, n)."""
    xp, length = array_namespace(values), values.shape[-1]
    rows = math.prod(values.shape[:-1])
    bits = xp.ascontiguousarray(values).view(np.uint32).astype(np.uint64).reshape(rows, length)
    return (xp.arange(rows, dtype=np.uint64)[:, None] << _FLOAT_BITS) | bits
