"""The calls of `cupyattn.attention` that a rank makes: on whole sequences, or on blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from cupyattn.distributed.blocks import Block
from cupyattn.distributed.partition import Range
from cupyattn.distributed.ring import Part
from cupyattn.ops.attention import attention, attention_varlen
from cupyattn.ops.backward import attention_backward, attention_varlen_backward, backward_of_part

#: Options of a forward call that its backward call does not have.
_FORWARD_ONLY = ("variant", "quant", "tiles")


@dataclass(frozen=True)
class Calls:
    """What all calls of a rank have in common.

    Parameters
    ----------
    options : dict
        Keywords of `cupyattn.attention` that say nothing of places in a sequence.
    places : dict
        Those that do: ``causal``, ``causal_align``, ``window``.
    packed : dict
        Of packed sequences ``cu_seqlens_q``, ``cu_seqlens_k``, ``max_len_q`` and ``max_len_k``, of
        all rows; arrays are then one entry (1, heads, total, head_dim).
    """

    options: dict[str, Any]
    places: dict[str, Any]
    packed: dict[str, Any] = field(default_factory=dict)

    def whole(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return O and lse of all rows and keys of some heads."""
        options = {**self.options, **self.places, "return_lse": True}
        return _forward(q, k, v, options, self.packed)

    def parts(self, q: Any, k: Any, v: Any, blocks: Iterable[Block]) -> Iterator[Part]:
        """Yield rows, O and lse of blocks."""
        for rows, keys, how in self._runs(blocks):
            some = q[:, :, slice(*rows)], k[:, :, slice(*keys)], v[:, :, slice(*keys)]
            places, packed = how
            options = {**self.options, **places, "return_lse": True}
            yield rows, *_forward(*some, options, packed)

    def whole_backward(self, given: tuple[Any, ...], deterministic: bool) -> Any:
        """Return the gradients of all rows and keys of some heads.

        `given` are d_out, q, k, v, out and lse.
        """
        options = self._of_backward(self.places, deterministic)
        if not self.packed:
            return attention_backward(*given, **options)
        return _of_packed(attention_varlen_backward, given, {**self.packed, **options})

    def parts_backward(
        self, given: tuple[Any, ...], blocks: Iterable[Block], deterministic: bool
    ) -> Iterator[tuple[Block, Any]]:
        """Yield rows and keys of blocks, and the gradients that these owe to one another."""
        for rows, keys, (places, packed) in self._runs(blocks):
            where = [slice(*(keys if name in "kv" else rows)) for name in "gqkvol"]
            some = tuple(x[:, :, at] for x, at in zip(given, where, strict=True))
            options = self._of_backward(places, deterministic)
            found = (
                _of_packed(backward_of_part, some, {**packed, **options})
                if packed
                else backward_of_part(*some, **options)
            )
            yield Block(rows, keys), found

    def _of_backward(self, places: dict[str, Any], deterministic: bool) -> dict[str, Any]:
        shared = {n: value for n, value in self.options.items() if n not in _FORWARD_ONLY}
        return {**shared, **places, "deterministic": deterministic or None}

    def _runs(
        self, blocks: Iterable[Block]
    ) -> Iterator[tuple[Range, Range, tuple[dict[str, Any], dict[str, Any]]]]:
        """Yield rows, keys and options of calls: one for each block, or where sequences are packed
        one for all blocks with a window."""
        if not self.packed:
            for block in blocks:
                yield block.q, block.kv, (_top_left(block.window), {})
            return
        by_window = sorted(blocks, key=lambda block: (block.window, block.q, block.kv))
        for window, some in groupby(by_window, key=lambda block: block.window):
            for run in _rising_runs(list(some)):
                rows, keys = (run[0].q[0], run[-1].q[1]), (run[0].kv[0], run[-1].kv[1])
                packed = _packed(run) if len(run) > 1 else {}
                yield rows, keys, (_top_left(window), packed)


def _top_left(window: tuple[int, int]) -> dict[str, Any]:
    return {"window": window, "causal_align": "top-left"}


def _rising_runs(blocks: list[Block]) -> Iterator[list[Block]]:
    """Cut blocks into runs in which rows and keys rise from one to the next."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.q[0] < run[-1].q[1] or block.kv[0] < run[-1].kv[1]):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _packed(run: list[Block]) -> dict[str, Any]:
    """Return blocks as packed sequences; what lies between two is rows without keys, and keys
    without rows."""
    ends = [(run[0].q[0], run[0].kv[0])]
    for block in run:
        ends += [(block.q[0], ends[-1][1]), (block.q[0], block.kv[0]), (block.q[1], block.kv[1])]
    offsets = np.array(list(dict.fromkeys(ends))) - np.array(ends[0])
    longest = np.diff(offsets, axis=0).max(axis=0)
    return {
        "cu_seqlens_q": offsets[:, 0].astype(np.int32),
        "cu_seqlens_k": offsets[:, 1].astype(np.int32),
        "max_len_q": int(longest[0]), "max_len_k": int(longest[1]),
    }  # fmt: skip


def _forward(
    q: Any, k: Any, v: Any, options: dict[str, Any], packed: dict[str, Any]
) -> tuple[Any, Any]:
    if not packed:
        o, lse = attention(q, k, v, **options)
        return o, lse
    o, lse = attention_varlen(_rows_first(q), _rows_first(k), _rows_first(v), **packed, **options)
    return _heads_first(o), lse[None]


def _of_packed(
    backward: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    d_out, q, k, v, out = (_rows_first(x) for x in given[:5])
    found = backward(d_out, q, k, v, out, given[5][0], **options)
    return tuple(_heads_first(x) for x in found)


def _rows_first(x: Any) -> Any:
    """View the one entry (1, heads, total, head_dim) as packed sequences have it."""
    return x[0].swapaxes(0, 1)


def _heads_first(x: Any) -> Any:
    """Undo `_rows_first`."""
    return x.swapaxes(0, 1)[None]
