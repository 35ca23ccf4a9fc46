"""4-bit codes of Q and K, two to a byte: how they are packed, and which launch unpacks them."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupyattn.compile import ModuleSpec
from cupyattn.features import Features
from cupyattn.launch import check_grid
from cupyattn.plans import Launch, Operand, Plan
from cupyattn.quant.quantizers import padded_columns
from cupyattn.rounding import Array, array_namespace
from cupyattn.tiles import Tiles

#: ``struct UnpackParams`` of kernels_cu/prims/nibbles.cuh, field by field.
UNPACK_PARAMS = np.dtype(
    [
        ("X", "u8"), ("Y", "u8"), ("X_stride_batch", "i8"), ("X_stride_head", "i8"),
        ("X_stride_len", "i8"), ("heads", "i4"), ("length", "i4"),
    ],
    align=True,
)  # fmt: skip

#: Rows of a block: a few accesses for each of its threads at any head_dim.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


def packed_bytes(head_dim: int) -> int:
    """Return how many bytes a row of 4-bit codes takes.

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
        Of an odd head_dim the last half is 0.

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
    """Return what `packed` packed, in rows as the kernels lay them: the inverse.

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


@functools.lru_cache(maxsize=1024)
def plan_unpack(x: Operand, head_dim: int) -> Plan:
    """Plan the unpacking of one operand.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, packed_bytes(head_dim)), contiguous last axis; the buffer
        ``"nibbles"``.
    head_dim : int

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"codes"``, INT8
        (batch, heads, length, padded_columns(head_dim)), contiguous.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    batch, heads, length, _ = x.shape
    features = Features("float16", head_dim, vec=8 if x.allows(4) and head_dim % 8 == 0 else 1)
    if math.prod(x.shape) == 0:
        return Plan("unpack", "portable", _TILES, features, ())
    grid = check_grid(f"unpacking {x.shape}", batch, heads, -(-length // _TILES.block_q))
    defines = tuple(sorted({**_TILES.defines(), **features.defines()}.items()))
    by_batch, by_head, by_row = x.row_strides
    params: dict[str, Any] = {
        "X": "nibbles", "Y": "codes", "X_stride_batch": by_batch, "X_stride_head": by_head,
        "X_stride_len": by_row, "heads": heads, "length": length,
    }  # fmt: skip
    launch = Launch(
        ModuleSpec("unpack.cu", defines), "unpack", grid, _TILES.num_threads, False,
        ((UNPACK_PARAMS, params),),
    )  # fmt: skip
    return Plan("unpack", "portable", _TILES, features, (launch,))
