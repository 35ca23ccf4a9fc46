"""Layout of the quantised operands of packed sequences: the place of each one's codes and scales.

Groups of rows start again with each sequence. Arrays with one element for each group, such as
scales, have one axis for all sequences. The elements of sequence i start at ``first // group +
i``, where `first` is its first row. This leaves room for the groups of all earlier sequences, for
any lengths. Codes of V, whose channels are padded, are laid out in the same way, in groups of
VALUES_PAD keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.kernels import limits
from cupyattn.quant.quantizers import VALUES_PAD, group_count, in_padded_rows


def packed_groups(total: int, batch: int, group: int) -> int:
    """Return the number of scales of a head of packed sequences, enough for any lengths.

    Examples
    --------
    >>> packed_groups(33, 2, 16)  # 1 and 32 rows take 1 + 2, 17 and 16 take 2 + 1
    4
    """
    return total // group + batch


def packed_values(total: int, batch: int) -> int:
    """Return the number of codes in a channel of V, including padding.

    Examples
    --------
    >>> packed_values(300, 2)  # 1 and 299 keys take 128 + 384, 150 and 150 take 256 + 256
    512
    """
    return packed_groups(total, batch, VALUES_PAD) * VALUES_PAD


def rows_of_sequences(rows: Array, cu_seqlens: Array) -> Array:
    """Return one number for each row of Q or K, in the layout of scales of single rows.

    Parameters
    ----------
    rows : array, (1, heads, total)
    cu_seqlens : array, int32, (sequences + 1,)

    Examples
    --------
    >>> rows_of_sequences(np.array([[[1, 2, 3]]]), np.array([0, 2, 2, 3])).tolist()
    [[[1, 2, 0, 0, 3, 0]]]
    """
    xp = array_namespace(rows, cu_seqlens)
    total = rows.shape[2]
    number = xp.arange(total)
    laid = xp.zeros((*rows.shape[:2], packed_groups(total, cu_seqlens.shape[0] - 1, 1)), rows.dtype)
    laid[:, :, number + xp.searchsorted(cu_seqlens, number, side="right") - 1] = rows
    return laid


def check_sequences(z: Any) -> None:
    """Raise ValueError unless a record has valid offsets for both Q and K, or for neither."""
    longest = z.max_len_q, z.max_len_k
    if z.cu_seqlens_q is None or z.cu_seqlens_k is None:
        if z.cu_seqlens_q is not z.cu_seqlens_k or longest != (0, 0):
            raise ValueError(
                "cu_seqlens_q, cu_seqlens_k, max_len_q and max_len_k go together, got "
                f"max_len_q={z.max_len_q!r}, max_len_k={z.max_len_k!r} and not both offsets"
            )
        return
    shapes = tuple(z.cu_seqlens_q.shape), tuple(z.cu_seqlens_k.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 1 or z.q_codes.shape[0] != 1:
        raise ValueError(
            "packed operands must have batch 1, and cu_seqlens_q and cu_seqlens_k one shape "
            f"(batch + 1,), got {z.q_codes.shape[0]}, {shapes[0]} and {shapes[1]}"
        )
    for name, limit, codes in zip("qk", longest, (z.q_codes, z.k_codes), strict=True):
        limit = limits.check_length(f"max_len_{name}", limit)
        ends = getattr(z, f"cu_seqlens_{name}")
        if isinstance(ends, np.ndarray):
            limits.check_cu_seqlens(name, ends, codes.shape[2], limit)


class _Lot(NamedTuple):
    """The part of an array for every sequence: the axis, the lengths and the starts."""

    axis: int
    size: int
    slices: list[slice]


def _lots(groups: dict[str, int], ends_q: Sequence[int], ends_k: Sequence[int]) -> dict[str, _Lot]:
    """Return the lots of the arrays of a record, by name; `groups` are rows per scale."""
    count = len(ends_q) - 1

    def by_row(ends: Sequence[int]) -> _Lot:
        return _Lot(2, ends[-1], [slice(*pair) for pair in pairwise(ends)])

    def by_group(ends: Sequence[int], group: int, axis: int = 2, unit: int = 1) -> _Lot:
        found = []
        for number, (first, end) in enumerate(pairwise(ends)):
            start = first // group + number
            found.append(slice(start * unit, (start + group_count(end - first, group)) * unit))
        return _Lot(axis, packed_groups(ends[-1], count, group) * unit, found)

    by_entry = _Lot(0, count, [slice(number, number + 1) for number in range(count)])
    q, k, v = (
        by_group(ends, groups[name] or 1)
        for name, ends in (("group_q", ends_q), ("group_kv", ends_k), ("group_v", ends_k))
    )
    return {
        "q_codes": by_row(ends_q), "k_codes": by_row(ends_k), "v": by_row(ends_k),
        "q_scale": q, "q_zero": q, "k_scale": k, "k_zero": k, "v_scale": v, "v_zero": v,
        "q_code_sum": by_group(ends_q, 1), "k_code_sum": by_group(ends_k, 1),
        "k_mean": by_entry, "v_mean": by_entry,
        "v_codes": by_group(ends_k, VALUES_PAD, 3, VALUES_PAD),
    }  # fmt: skip


def _of_record(z: Any, ends_q: Sequence[int], ends_k: Sequence[int]) -> dict[str, _Lot]:
    """Return the lots of a record's arrays."""
    groups = {name: getattr(z, name) for name in ("group_q", "group_kv", "group_v")}
    lots = _lots(groups, ends_q, ends_k)
    return {name: lot for name, lot in lots.items() if getattr(z, name) is not None}


def cut_entry(z: Any, number: int, len_q: int, len_kv: int) -> Any:
    """Return the record of the first rows of one entry of a padded batch: views of its arrays.

    Scales stay the scales of whole groups, which may include rows that are cut off.
    """
    sizes = {
        "q_codes": len_q, "k_codes": len_kv, "v": len_kv, "q_code_sum": len_q,
        "k_code_sum": len_kv,
        **dict.fromkeys(("q_scale", "q_zero"), group_count(len_q, z.group_q)),
        **dict.fromkeys(("k_scale", "k_zero"), group_count(len_kv, z.group_kv)),
        **dict.fromkeys(("v_scale", "v_zero"), group_count(len_kv, z.group_v or 1)),
    }  # fmt: skip
    found = {}
    for name in (*sizes, "v_codes", "k_mean", "v_mean"):
        if (array := getattr(z, name)) is not None:
            one = array[min(number, array.shape[0] - 1)][None]  # or the only entry, which all share
            if name == "v_codes":
                one = one[..., : group_count(len_kv, VALUES_PAD) * VALUES_PAD]
            found[name] = one[:, :, : sizes[name]] if name in sizes else one
    return replace(z, **found, config=z.config.of_entry(number))


def split(z: Any) -> Iterator[Any]:
    """Yield the record of every sequence of a packed `QuantizedQKV`: views of its arrays.

    Offsets on a device cause a synchronisation.
    """
    ends = (z.cu_seqlens_q, z.cu_seqlens_k)
    ends_q, ends_k = ((a if isinstance(a, np.ndarray) else a.get()).tolist() for a in ends)
    lots = _of_record(z, ends_q, ends_k)
    alone: dict[str, Any] = {
        "cu_seqlens_q": None, "cu_seqlens_k": None, "max_len_q": 0, "max_len_k": 0,
    }  # fmt: skip
    for number in range(len(ends_q) - 1):
        own = {
            name: getattr(z, name)[(*(slice(None),) * lot.axis, lot.slices[number])]
            for name, lot in lots.items()
        }
        yield replace(z, **alone, **own, config=z.config.of_entry(number))


def join(records: Sequence[Any], template: Any, sequences: Any) -> Any:
    """Return the record of packed sequences from a record of each, for NumPy arrays.

    Parameters
    ----------
    records : sequence of QuantizedQKV
    template : QuantizedQKV
        A similar record, because `records` may be empty.
    sequences : cupyattn.problem.sequences.Sequences
    """
    ends = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    found = {}
    for name, lot in _of_record(template, *(a.tolist() for a in ends)).items():
        like = getattr(template, name)
        shape = (*like.shape[: lot.axis], lot.size, *like.shape[lot.axis + 1 :])
        found[name] = np.zeros(shape, like.dtype)
        for part, place in zip(records, lot.slices, strict=True):
            found[name][(*(slice(None),) * lot.axis, place)] = getattr(part, name)
        if name in ("q_codes", "k_codes"):
            found[name] = in_padded_rows(found[name])
    return replace(template, **found, **vars(sequences))
