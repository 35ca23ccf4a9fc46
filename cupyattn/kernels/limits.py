"""The sizes that the kernels' index types allow, and the checks of shapes against them."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.tiles import Tiles

#: Query head or key head counts, lengths and the grid are 32-bit numbers in the kernels.
INT32_MAX = 2**31 - 1
#: Thread blocks of a persistent Hopper kernel: one for each SM of an H100 or H200 SXM. Blocks take
#: tiles as they become free, so a device with fewer SMs computes the same.
HOPPER_BLOCKS = 132

#: The kernels add a tile to a length in 32 bits.
MAX_LENGTH = 2**30

#: A softmax scale below it, or above its inverse, would leave the range of float32 on the device.
SCALE_MIN = 2.0**-120


def check_shapes(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    given: Sequence[tuple[int, ...]] | None = None,
) -> tuple[int, int, int, int, int, int]:
    """Return (batch, heads, heads_kv, len_q, len_kv, head_dim) of three 4-D shapes.

    Messages show the shapes that were `given`, where the caller has the axes in another order.
    """
    shown = given or (q, k, v)
    got = f"got q.shape={shown[0]} k.shape={shown[1]} v.shape={shown[2]}"
    if not len(q) == len(k) == len(v) == 4:
        missing = 4 - len(q) if len(q) == len(k) == len(v) else 0
        advice = f": give q[{'None, ' * missing}...] and so on" if missing > 0 else ""
        raise ValueError(
            f"q, k and v must have four axes (batch, heads, len, head_dim), {got}{advice}"
        )
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v must agree on batch, {got}")
    if k[1] != v[1]:
        raise ValueError(f"k and v must agree on heads, {got}")
    if k[2] != v[2]:
        raise ValueError(f"k and v must agree on length, {got}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must agree on head_dim, {got}")
    if k[3] != v[3]:
        raise UnsupportedError(
            f"v with another head_dim than k is not supported: pad the narrower of k and v, {got}"
        )
    if not 1 <= q[3] <= 256:
        raise UnsupportedError(f"head_dim must be 1 to 256, {got}")
    if q[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(f"the heads of k and v must divide the heads of q, {got}")
    if max(*q, *k) > MAX_LENGTH:
        raise UnsupportedError(f"every axis must be at most 2**30 long, {got}")
    return q[0], q[1], k[1], q[2], k[2], q[3]

#: Rows that share a scale if all rows share one: ``row // GROUP_ALL`` is 0 for every row.
GROUP_ALL = 2**30


def several_value_scales(group: int, tiles: Tiles) -> str:
    """Return why a tile of keys needs one scale for each channel of V; "" if it has only one.

    Parameters
    ----------
    group : int
        Keys that share the scale of a channel.
    tiles : Tiles
        Tiles of the attention kernel.
    """
    if group == GROUP_ALL or group % tiles.block_kv == 0:
        return ""
    return (
        f"a tile of {tiles.block_kv} keys would meet several scales of V, which change every "
        f"{group} keys: quantise V for these tiles, or per channel"
    )


def as_float(number: Any) -> float:
    """Return a real number in float64; an overflow gives infinity, which checks then refuse.

    Examples
    --------
    >>> as_float(3), as_float(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number > 0 or -1)


def is_real(number: object) -> bool:
    """Return whether a caller's object is a real number, of NumPy's too."""
    return isinstance(number, numbers.Real)


def check_length(name: str, length: Any) -> int:
    """Return a caller's length as a Python number."""
    try:
        value = operator.index(length)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {shown(length)}") from None
    if not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be between 0 and 2**30, got {shown(value)}")
    return value


def check_cu_seqlens(name: str, cu_seqlens: np.ndarray, total: int, longest: int) -> None:
    """Check the offsets of packed sequences where their values are at hand.

    Parameters
    ----------
    name : {"q", "k"}
        Name of the operand with these offsets.
    cu_seqlens : numpy.ndarray, (batch + 1,)
    total : int
        Rows of the packed array.
    longest : int
        The caller's ``max_len_q`` or ``max_len_k``.
    """
    offsets = cu_seqlens.astype(np.int64)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != total or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens_{name} must rise from 0 to {total}, the rows of {name}, "
            f"got {np.array2string(offsets, threshold=8)}"
        )
    if lengths.max(initial=0) > longest:
        raise ValueError(
            f"max_len_{name}={longest} is less than the longest sequence of cu_seqlens_{name}, "
            f"{lengths.max()} rows"
        )


def check_grid(what: str, *counts: int, limit: int = INT32_MAX) -> int:
    """Return the product of `counts`, how many blocks there are; UnsupportedError past a limit."""
    blocks = math.prod(counts)
    if blocks > limit:
        raise UnsupportedError(
            f"{what} takes {blocks} blocks, more than {limit}: split the call over batch or heads"
        )
    return blocks
