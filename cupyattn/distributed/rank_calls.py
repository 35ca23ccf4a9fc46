"""The calls of `cupyattn.attention` that a rank makes: on whole sequences, or on blocks of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.blocks import Block
from cupyattn.distributed.mesh import Heads
from cupyattn.distributed.partition import Range
from cupyattn.distributed.ring import Part
from cupyattn.distributed.scales import scales_of_heads
from cupyattn.ops.attention import described, run_attention
from cupyattn.ops.backward import BackwardSettings, run_backward
from cupyattn.ops.part_sums import run_part_sums
from cupyattn.ops.quantize import check_described, quantize
from cupyattn.plans.backward import GIVEN_SUMS
from cupyattn.problem.sequences import SEQUENCES
from cupyattn.problem.settings import Settings
from cupyattn.quant.quantized import QuantizedQKV


@dataclass(frozen=True)
class Scores:
    """A mask, or a bias of the scores, for all heads alike.

    Parameters
    ----------
    arrays : dict
        ``mask`` or ``bias`` of `cupyattn.attention`, (batch or 1, 1, rows or 1, keys); empty for
        neither.
    """

    arrays: dict[str, Any] = field(default_factory=dict)

    def cut(self, rows: Sequence[Range], keys: Sequence[Range]) -> Scores:
        """Return the scores of some rows and keys, in this order."""
        return Scores({
            name: _cut(x if x.shape[2] == 1 else _cut(x, 2, rows), 3, keys)
            for name, x in self.arrays.items()
        })  # fmt: skip


NO_SCORES = Scores()
#: Arrays of a backward pass, (heads, rows) for packed sequences.
_OF_ROWS = ("lse", "d_lse", *GIVEN_SUMS)


@dataclass(frozen=True)
class Calls:
    """Options and arrays that all calls of a rank share.

    Parameters
    ----------
    settings : Settings
        Settings for the whole sequence, with ``return_lse``; layout BHSD.
    offsets : dict
        Of packed sequences ``cu_seqlens_q`` and ``cu_seqlens_k``, of all rows; arrays are then one
        entry (1, heads, total, head_dim).
    """

    settings: Settings
    offsets: dict[str, Any] = field(default_factory=dict)
    _of_heads: dict[Heads, Calls] = field(default_factory=dict, repr=False, compare=False)
    _codes_of_nothing: list[QuantizedQKV] = field(default_factory=list, repr=False, compare=False)

    def of_heads(self, heads: Heads) -> Calls:
        """Return the calls of some heads: of given scales they take theirs."""
        if heads not in self._of_heads:
            quant = scales_of_heads(self.settings.quant, heads)
            if quant is self.settings.quant:
                return self
            # NOTE: stored, because later calls are recognised by the identity of these arrays.
            self._of_heads[heads] = Calls(self.settings._replace(quant=quant), self.offsets)
        return self._of_heads[heads]

    def whole(self, q: Any, k: Any, v: Any, scores: Scores = NO_SCORES) -> tuple[Any, Any]:
        """Return O and lse of all rows and keys of some heads."""
        return _forward(self.settings, q, k, v, self.offsets, scores)

    def of_blocks(
        self, q: Any, k: Any, v: Any, blocks: Iterable[Block], scores: Scores = NO_SCORES
    ) -> Iterator[Part]:
        """Yield rows, O and lse of blocks."""
        for rows, keys, settings, offsets in self._runs(blocks):
            some = q[:, :, slice(*rows)], k[:, :, slice(*keys)], v[:, :, slice(*keys)]
            yield rows, *_forward(settings, *some, offsets, scores.cut([rows], [keys]))

    def empty_codes(self, q: Any, k: Any, v: Any) -> QuantizedQKV:
        """Return the codes of no rows and no keys, made once: only their shapes are read."""
        if not self._codes_of_nothing:
            none = (x[:, :, :0] for x in (q, k, v))
            self._codes_of_nothing.append(quantized(self.settings, *none))
        return self._codes_of_nothing[0]

    def check_codes(self, q: Described, k: Described, v: Described) -> None:
        """Raise for rows and keys that are not quantised, as `cupyattn.quantize`."""
        asked = self.settings
        check_described(
            q, k, v, quant=asked.quant, tiles=asked.tiles, arch=asked.arch, backend=asked.backend
        )

    def check(
        self, blocks: Iterable[Block] | None, q: Described, k: Described, v: Described
    ) -> None:
        """Raise for a call of blocks, or of all rows and keys, that the kernel refuses.

        Parameters
        ----------
        blocks : iterable of Block or None
        q, k, v : Described

        Raises
        ------
        ValueError, TypeError, UnsupportedError
            As `cupyattn.attention`.
        """
        whole = (0, q.shape[2]), (0, k.shape[2]), self.settings, self.offsets
        for rows, keys, settings, offsets in [whole] if blocks is None else self._runs(blocks):
            some = {"q": q.cut(2, *rows), "k": k.cut(2, *keys), "v": v.cut(2, *keys)}
            if offsets:
                some = {name: x.first().swapaxes(0, 1) for name, x in some.items()}
                some |= {name: Described.of(name, x) for name, x in offsets.items()}
                longest = (int(np.diff(x).max(initial=0)) for x in offsets.values())
                if settings.max_len_q is None:
                    of_q, of_k = longest
                    settings = settings._replace(max_len_q=of_q, max_len_k=of_k)
            described(settings, some).kernel  # noqa: B018

    def whole_backward(
        self, arrays: Mapping[str, Any], deterministic: bool, scores: Scores = NO_SCORES
    ) -> Any:
        """Return the gradients of all rows and keys of some heads.

        `arrays` are d_out, q, k, v, out and lse, and d_lse if lse has a gradient.
        """
        settings = BackwardSettings(self.settings.without_rung, deterministic or None)
        return _backward(settings, arrays, self.offsets, scores)

    def of_blocks_sums(
        self, q: Any, k: Any, lse: Any, blocks: Iterable[Block], scores: Scores = NO_SCORES
    ) -> Iterator[tuple[Range, tuple[Any, Any]]]:
        """Yield rows of blocks, and M and the sums of coarse ones over the keys of the block."""
        for rows, keys, of_call, offsets in self._runs(blocks):
            some = {"q": q[:, :, slice(*rows)], "k": k[:, :, slice(*keys)]}
            of_lse, cut = lse[:, :, slice(*rows)], scores.cut([rows], [keys])
            if offsets:
                some = {name: _rows_first(x) for name, x in some.items()} | offsets
            arrays = {**some, "lse": of_lse[0] if offsets else of_lse, **cut.arrays}
            M, sums = run_part_sums(of_call.without_rung, arrays)
            yield rows, (M[None], sums[None]) if offsets else (M, sums)

    def of_blocks_backward(
        self, arrays: Mapping[str, Any], blocks: Iterable[Block], deterministic: bool,
        scores: Scores = NO_SCORES,
    ) -> Iterator[tuple[Block, Any]]:
        """Yield rows and keys of blocks, and the gradients that these owe to one another.

        `arrays` as for `whole_backward`, with `GIVEN_SUMS` if rows are coarse.
        """
        for rows, keys, of_call, offsets in self._runs(blocks):
            where = {name: keys if name in ("k", "v") else rows for name in arrays}
            some = {name: x[:, :, slice(*where[name])] for name, x in arrays.items()}
            settings = BackwardSettings(of_call.without_rung, deterministic or None, all_keys=False)
            cut = scores.cut([rows], [keys])
            yield Block(rows, keys), _backward(settings, some, offsets, cut)

    def _runs(
        self, blocks: Iterable[Block]
    ) -> Iterator[tuple[Range, Range, Settings, dict[str, Any]]]:
        """Yield rows, keys, settings and offsets of calls: one for each block, or where sequences
        are packed one for all blocks with a window."""
        if not self.offsets:
            for block in blocks:
                yield block.q, block.kv, of_window(self.settings, block.window), {}
            return
        by_window = sorted(blocks, key=lambda block: (block.window, block.q, block.kv))
        for window, some in groupby(by_window, key=lambda block: block.window):
            settings = of_window(self.settings, window)
            for one in _rising_runs(list(some)):
                rows, keys = (one[0].q[0], one[-1].q[1]), (one[0].kv[0], one[-1].kv[1])
                if len(one) > 1:
                    offsets, (of_q, of_k) = _packed(one)
                    limited = settings._replace(max_len_q=of_q, max_len_k=of_k)
                    yield rows, keys, limited, offsets
                else:
                    yield rows, keys, settings._replace(max_len_q=None, max_len_k=None), {}


def of_window(settings: Settings, window: tuple[int, int]) -> Settings:
    """Return settings of a block, with a window that selects the keys of each row."""
    return settings._replace(causal=False, causal_align="top-left", window=window)


def _cut(x: Any, axis: int, ranges: Sequence[Range]) -> Any:
    """Return the elements of several ranges of an axis, concatenated."""
    before = (slice(None),) * axis
    found = [x[(*before, slice(*one))] for one in ranges or [(0, 0)]]
    return found[0] if len(found) == 1 else array_namespace(x).concatenate(found, axis=axis)


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


def _packed(run: list[Block]) -> tuple[dict[str, Any], list[int]]:
    """Return blocks as packed sequences, and the longest lengths.

    The rows between two blocks become sequences without keys, and the keys between them sequences
    without rows."""
    ends = [(run[0].q[0], run[0].kv[0])]
    for block in run:
        ends += [(block.q[0], ends[-1][1]), (block.q[0], block.kv[0]), (block.q[1], block.kv[1])]
    offsets = np.array(list(dict.fromkeys(ends))) - np.array(ends[0])
    named = {name: offsets[:, n].astype(np.int32) for n, name in enumerate(SEQUENCES)}
    return named, np.diff(offsets, axis=0).max(axis=0).tolist()


def quantized(settings: Settings, q: Any, k: Any, v: Any) -> QuantizedQKV:
    """Return the codes of some rows and keys, made as a call's settings say."""
    return quantize(
        q, k, v, quant=settings.quant, tiles=settings.tiles, arch=settings.arch,
        backend=settings.backend,
    )  # fmt: skip


def _forward(
    settings: Settings, q: Any, k: Any, v: Any, offsets: dict[str, Any], scores: Scores
) -> tuple[Any, Any]:
    o, lse = run_attention(settings, {**_named(q, k, v, offsets), **scores.arrays})
    return (_heads_first(o), lse[None]) if offsets else (o, lse)


def _named(q: Any, k: Any, v: Any, offsets: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a call by name, packed if there are offsets."""
    named = {"q": q, "k": k, "v": v}
    return {**{n: _rows_first(x) for n, x in named.items()}, **offsets} if offsets else named


def _backward(
    settings: BackwardSettings, arrays: Mapping[str, Any], offsets: dict[str, Any], scores: Scores
) -> Any:
    if not offsets:
        return run_backward(settings, {**arrays, **scores.arrays})
    rows = {name: x[0] if name in _OF_ROWS else _rows_first(x) for name, x in arrays.items()}
    return tuple(_heads_first(x) for x in run_backward(settings, {**rows, **offsets}))


def _rows_first(x: Any) -> Any:
    """View the one entry (1, heads, total, head_dim) as packed sequences have it."""
    return x[0].swapaxes(0, 1)


def _heads_first(x: Any) -> Any:
    """Undo `_rows_first`."""
    return x.swapaxes(0, 1)[None]
