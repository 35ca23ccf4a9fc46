"""Where packed sequences begin and end, and how long padded entries are: a caller's offsets and
lengths, taken to a device and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays import interchange, memory
from cupyattn.arrays.kinds import array_namespace
from cupyattn.kernels import limits


@dataclass(frozen=True)
class Sequences:
    """Sequences of Q and of K and V, packed one behind the other.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : array, int32, (batch + 1,)
        Sequence i is the rows from element i up to element i + 1; beside the operands.
    max_len_q, max_len_k : int
        No sequence is longer.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_len_q: int
    max_len_k: int

    @property
    def batch(self) -> int:
        """How many there are."""
        return int(self.cu_seqlens_q.shape[0]) - 1

    def packed(self, name: str) -> tuple[int, int]:
        """Return how many there are in operand q, k or v, and the longest, as plans take them."""
        return self.batch, self.max_len_q if name == "q" else self.max_len_k


def one_entry(name: str, array: Any) -> Any:
    """Return a packed array (total, heads, head_dim) as the one entry of a batch of layout BSHD."""
    if array.ndim != 3:
        raise ValueError(
            f"{name} must have three axes (total, heads, head_dim), got {name}.shape={array.shape}"
        )
    return array[None]


def take_sequences(
    q: Any, totals: tuple[int, int], given: Mapping[str, Any], *, look: bool = False
) -> Sequences:
    """Return a caller's offsets beside an operand, with the longest lengths.

    Parameters
    ----------
    q : array
        Operand, NumPy or CuPy.
    totals : (int, int)
        Rows of q, and of k and v.
    given : mapping
        ``cu_seqlens_q`` and ``cu_seqlens_k``, arrays of int32 or int64; ``max_len_q`` and
        ``max_len_k``, upper limits of the lengths or None.
    look : bool
        Check offsets that lie on a device though there are limits, which waits for it. Those on
        the host always are, and without a limit all must be looked at.

    Raises
    ------
    ValueError, TypeError
        For offsets that are none, or not those of so many rows; and for limits that are too low.
    """
    offsets: dict[str, Any] = {}
    longest: dict[str, int] = {}
    for name, total in zip("qk", totals, strict=True):
        cu_seqlens, max_len = f"cu_seqlens_{name}", f"max_len_{name}"
        limit = given[max_len]
        limit = None if limit is None else limits.check_length(max_len, limit)
        found = _take_offsets(cu_seqlens, given[cu_seqlens])
        on_host = isinstance(found, np.ndarray)
        if not on_host:
            array_namespace(q, found)
        with memory.on_device_of(q):
            offsets[cu_seqlens] = array_namespace(q).asarray(found, np.int32)
        if on_host or limit is None or look:
            found = found if on_host else found.get()
            limit = int(np.diff(found).max(initial=0)) if limit is None else limit
            limits.check_cu_seqlens(name, found, total, limit)
        longest[max_len] = limit
    counts = {n: a.shape[0] - 1 for n, a in offsets.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one length, got {counts}")
    return Sequences(**offsets, **longest)


def take_lengths(q: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many rows of each padded batch entry count, int32 beside an operand.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        Operand, NumPy or CuPy.
    given : mapping
        The caller's arrays; of them those of ``lengths_q`` and ``lengths_kv`` that there are.

    Raises
    ------
    ValueError
        For arrays that are not int32 or int64 of shape (batch,). Their values are not looked at:
        kernels cut them to 0 and to the length of the arrays.
    """
    found = {}
    for name in ("lengths_q", "lengths_kv"):
        if name not in given:
            continue
        lengths, _ = interchange.take(name, given[name])
        wanted = tuple(q.shape[:1])
        if tuple(lengths.shape) != wanted or str(lengths.dtype) not in ("int32", "int64"):
            raise ValueError(
                f"{name} must be int32 or int64 of shape (batch,) = {wanted}, "
                f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
            )
        if not isinstance(lengths, np.ndarray):
            array_namespace(q, lengths)
        with memory.on_device_of(q):
            xp = array_namespace(q)
            lengths = xp.asarray(interchange.contiguous_last_axis(lengths))
            if lengths.dtype == np.int64:  # as large as 32 bits hold: more than any length
                lengths = xp.clip(lengths, 0, limits.MAX_LENGTH)
            found[name] = lengths.astype(np.int32, copy=False)
    return found


def _take_offsets(name: str, given: Any) -> Any:
    """Return the caller's array of offsets, contiguous."""
    offsets, _ = interchange.take(name, given)
    if offsets.ndim != 1 or offsets.shape[0] < 1 or str(offsets.dtype) not in ("int32", "int64"):
        raise ValueError(
            f"{name} must be int32 or int64 of shape (batch + 1,), "
            f"got {offsets.dtype} of shape {offsets.shape}"
        )
    return interchange.contiguous_last_axis(offsets)
