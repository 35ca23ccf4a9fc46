"""Check a caller's offsets of packed sequences and lengths of padded entries, for the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.interchange import on_host
from cupyattn.kernels import limits
from cupyattn.problem.problem import ValueCheck

#: Operands with the offsets of packed sequences.
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k")
#: Operands that say how many rows of padded batch entries count.
LENGTHS = ("lengths_q", "lengths_kv")
#: Operands with the offsets of q, k and v.
LENGTHS_OF = dict(zip("qkv", (*LENGTHS, LENGTHS[1]), strict=True))


@dataclass(frozen=True)
class Sequences:
    """Sequences of Q and of K and V, packed one behind the other.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k : Described or array, int32, (batch + 1,)
        Sequence i has the rows from element i up to element i + 1. On the device of the operands.
    max_len_q, max_len_k : int
        Largest length of a sequence.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_len_q: int
    max_len_k: int

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return int(self.cu_seqlens_q.shape[0]) - 1

    @property
    def offsets(self) -> dict[str, Any]:
        """Offsets at which sequences begin and end, by buffer."""
        return {name: getattr(self, name) for name in SEQUENCES}

    def packed(self, name: str) -> tuple[int, int]:
        """Return how many there are in operand q, k or v, and the longest, as plans take them."""
        return self.batch, self.max_len_q if name == "q" else self.max_len_k


def one_entry(name: str, x: Any) -> Any:
    """Return packed rows (total, heads, head_dim) as the one entry of a batch of layout BSHD."""
    if x.ndim != 3:
        raise ValueError(
            f"{name} must have three axes (total, heads, head_dim), got {name}.shape={x.shape}"
        )
    return x.front() if isinstance(x, Described) else x[None]


def longest(name: str, offsets: Any, total: int | None) -> int:
    """Look at offsets: return the longest length.

    Parameters
    ----------
    name : {"q", "k"}
        Whose rows they are.
    offsets : array
        NumPy or CuPy; a CuPy array causes a synchronisation.
    total : int, optional
        Rows of all sequences, to check the offsets against.
    """
    check_offsets(f"cu_seqlens_{name}", offsets)
    found = on_host(offsets)
    most = int(np.diff(found).max(initial=0))
    if total is not None:
        limits.check_cu_seqlens(name, found, total, most)
    return most


def check_offsets(name: str, offsets: Any) -> None:
    """Raise ValueError unless an array is a valid array of offsets."""
    if offsets.ndim != 1 or offsets.shape[0] < 1 or str(offsets.dtype) not in ("int32", "int64"):
        raise ValueError(
            f"{name} must be int32 or int64 of shape (batch + 1,), "
            f"got {offsets.dtype} of shape {offsets.shape}"
        )


def _check_values(offsets: Any, name: str, total: int, limit: int) -> None:
    limits.check_cu_seqlens(name, on_host(offsets), total, limit)


def describe_sequences(
    q: Described,
    totals: tuple[int, int],
    arrays: Mapping[str, Described],
    most: tuple[Any, Any],
    *,
    look: bool = False,
) -> tuple[Sequences, tuple[ValueCheck, ...]]:
    """Return a caller's sequences on the device of an operand, and checks to run before a launch.

    Parameters
    ----------
    q : Described
    totals : (int, int)
        Rows of q, and of k and v.
    arrays : mapping
        Only ``cu_seqlens_q`` and ``cu_seqlens_k`` are read, of int32 or int64.
    most : (int, int)
        Upper limits of the lengths (`longest`, if the caller gave none).
    look : bool
        Check offsets on a device, which synchronises. Offsets on the host are always checked.

    Raises
    ------
    ValueError, TypeError
        For invalid offsets, and for limits that are too low.
    """
    offsets: dict[str, Any] = {}
    limit: dict[str, Any] = {}
    looks = []
    for name, total, longest_of in zip("qk", totals, most, strict=True):
        cu_seqlens, max_len = f"cu_seqlens_{name}", f"max_len_{name}"
        given = arrays.get(cu_seqlens)
        if given is None:
            raise TypeError(
                f"{cu_seqlens} must be a NumPy or CuPy array, or have __dlpack__, got NoneType"
            )
        limit[max_len] = limits.check_length(max_len, longest_of)
        check_offsets(cu_seqlens, given)
        offsets[cu_seqlens] = given.whole().cast(np.int32).beside(q)
        if look or given.device < 0:
            looks.append(ValueCheck(_check_values, (given,), (name, total, limit[max_len])))
    counts = {n: x.shape[0] - 1 for n, x in offsets.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one length, got {counts}")
    return Sequences(**offsets, **limit), tuple(looks)


def describe_lengths(q: Described, arrays: Mapping[str, Described]) -> dict[str, Described]:
    """Return the number of valid rows of each padded batch entry, int32, on an operand's device.

    Parameters
    ----------
    q : Described
        Queries (batch, heads, len_q, head_dim).
    arrays : mapping
        The caller's arrays. Only ``lengths_q`` and ``lengths_kv`` are read, if given.

    Raises
    ------
    ValueError
        For arrays that are not int32 or int64 of shape (batch,). Their values are not checked:
        kernels clip them to 0 and to the length of the arrays.
    """
    found = {}
    for name in LENGTHS:
        if name not in arrays:
            continue
        lengths, wanted = arrays[name], q.shape[:1]
        if lengths.shape != wanted or str(lengths.dtype) not in ("int32", "int64"):
            raise ValueError(
                f"{name} must be int32 or int64 of shape (batch,) = {wanted}, "
                f"got {lengths.dtype} of shape {lengths.shape}"
            )
        lengths = lengths.whole()
        if lengths.dtype == np.int64:  # as large as 32 bits hold: more than any length
            lengths = lengths.clipped(0, limits.MAX_LENGTH)
        found[name] = lengths.beside(q)
    return found
