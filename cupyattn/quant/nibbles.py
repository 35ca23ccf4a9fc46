"""Pack and unpack 4-bit codes of Q and K, two to a byte."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.quant.quantizers import padded_columns


def packed_bytes(head_dim: int) -> int:
    """Return the number of bytes of a row of 4-bit codes.

    Examples
    --------
    >>> packed_bytes(64), packed_bytes(7)
    (32, 4)
    """
    return -(-head_dim // 2)


def packed(codes: Array) -> Array:
    """Return codes of 4 bits, two to a byte: the even column in the low half.

    Parameters
    ----------
    codes : array, int8, (..., head_dim)
        NumPy or CuPy: -8 to 7.

    Returns
    -------
    array, uint8, (..., packed_bytes(head_dim))
        For an odd head_dim the last half-byte is 0.

    Examples
    --------
    >>> [hex(x) for x in packed(np.array([1, -1, 7], np.int8)).tolist()]
    ['0xf1', '0x7']
    """
    xp = array_namespace(codes)
    halves = codes.view(np.uint8) & np.uint8(15)
    found = xp.ascontiguousarray(halves[..., 0::2])
    odd = halves[..., 1::2]
    found[..., : odd.shape[-1]] |= odd << np.uint8(4)
    return found


def unpacked(nibbles: Array, head_dim: int) -> Array:
    """Undo `packed`, with rows padded as the kernels store them.

    Parameters
    ----------
    nibbles : array, uint8, (..., packed_bytes(head_dim))
        NumPy or CuPy.
    head_dim : int

    Returns
    -------
    array, int8, (..., head_dim)
        A view of rows that are padded to a multiple of 16 bytes.

    Examples
    --------
    >>> unpacked(packed(np.array([1, -1, 7], np.int8)), 3).tolist()
    [1, -1, 7]
    """
    xp = array_namespace(nibbles)
    rows = xp.zeros((*nibbles.shape[:-1], padded_columns(head_dim)), np.int8)
    signed = nibbles.view(np.int8)
    count = nibbles.shape[-1]
    rows[..., 0 : 2 * count : 2] = (signed << np.int8(4)) >> np.int8(4)
    rows[..., 1 : 2 * count : 2] = signed >> np.int8(4)
    return rows[..., :head_dim]
