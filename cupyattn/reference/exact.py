"""The definition of attention in float64: `attention_exact`.

It runs on whichever kind of array it is given, NumPy's or CuPy's. `attention_mirror`, which follows
the kernels step by step, lives in `cupyattn.reference.attention`, the three steps of the unfused
rung in `cupyattn.reference.unfused`.
"""

# ruff: noqa: E741  (O and l are the paper's letters)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.groups import split_heads
from cupyattn.arrays.interchange import operand, operands
from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace, as_float64, check_values
from cupyattn.kernels.limits import check_shapes
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.checks import check_scale
from cupyattn.problem.row_preparation import Rope
from cupyattn.problem.settings import MaskedOptions, TurnedOptions, Unpack, parse, takes_options
from cupyattn.reference.scoring import Scoring

#: Scores that `score_blocks` holds at a time (32 MB of float64; the caller's temporaries are a few
#: times that).
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class ScoreBlock:
    """Some of the scores of one attention problem, with the operands that made them.

    Parameters
    ----------
    index : tuple of slice
        Place of the block in an array of shape (batch, heads_kv, group, rows, ...), which is what
        `cupyattn.arrays.groups.split_heads` makes of (batch, heads, rows, ...).
    S : (batch, heads_kv, group, rows, len_kv) array, float64
        ``scale * q.k``, softcapped, with the bias; -inf where the row does not attend to the key.
    unbiased : array, shaped as S, float64
        S before the bias; where there is none, S itself.
    q : (batch, heads_kv, group, rows, head_dim) array, float64
    k, v : (batch, heads_kv, 1, len_kv, head_dim) array, float64
    """

    index: tuple[slice, slice, slice, slice]
    S: Array
    unbiased: Array
    q: Array
    k: Array
    v: Array

    @property
    def admitted(self) -> Array:
        """Boolean, shaped as S: the row attends to the key. A NaN score is attended to."""
        return self.S != NEG_INF


def _chunks(lengths: tuple[int, ...], cost: int) -> list[list[slice]]:
    """Split axes, outermost first, so that one chunk of all of them costs about BLOCK_ELEMENTS."""
    room = max(1, BLOCK_ELEMENTS // max(1, cost))
    chunks: list[list[slice]] = []
    for length in reversed(lengths):
        size = max(1, min(length, room))
        room = max(1, room // size)
        chunks.append([slice(i, min(i + size, length)) for i in range(0, length, size)])
    return chunks[::-1]


@takes_options
def score_blocks(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: Array | None = None,
    **options: Unpack[MaskedOptions],
) -> Iterator[ScoreBlock]:
    """Yield all scores of an attention problem, in float64, a bounded number at a time.

    Parameters
    ----------
    q, k, v, scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `attention_exact`.

    Yields
    ------
    ScoreBlock
        Whole rows: the last axis of S runs over all keys. Every (batch, head, row) comes once.

    Notes
    -----
    Keys are masked by selection, never by adding -inf: a NaN under the mask has no influence.
    """
    settings, arrays = parse("score_blocks", q, k, v, options)
    yield from blocks_of(q, k, v, settings.scale, settings.scores(arrays), rows)


def blocks_of(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    options: Mapping[str, Any],
    rows: Array | None,
) -> Iterator[ScoreBlock]:
    """Yield the blocks of `score_blocks`."""
    q, k, v = operands(q=q, k=k, v=v)
    xp = array_namespace(q, k, v)
    _, _, heads_kv, len_q, len_kv, head_dim = check_shapes(q.shape, k.shape, v.shape)
    sigma, scoring = check_scale(scale, head_dim), Scoring.of(q, k, options)
    check_values("rows", rows)
    rows = xp.arange(len_q) if rows is None else operand("rows", xp.asarray(rows))
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be a 1-D integer array, got {rows.dtype} {rows.shape=}")
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len_q):
        raise ValueError(f"rows must lie in [0, {len_q}), got {rows}")

    q = split_heads(q, heads_kv)
    keys = slice(0, len_kv)
    batches, heads, groups, row_chunks = _chunks((*q.shape[:3], rows.size), max(len_kv, head_dim))
    for batch in batches:
        for head in heads:
            k_block = as_float64(k[batch, head, None])
            v_block = as_float64(v[batch, head, None])
            for group in groups:
                for chunk in row_chunks:
                    q_block = as_float64(q[batch, head, group][..., rows[chunk], :])
                    at = (batch, head, group)
                    with np.errstate(over="ignore", invalid="ignore"):
                        S = q_block @ k_block.swapaxes(-1, -2) * sigma
                        if scoring.softcap:
                            S = scoring.softcap * xp.tanh(S / scoring.softcap)
                        unbiased = S
                        if scoring.bias is not None:
                            S = S + as_float64(scoring.bias_at(at, rows[chunk], keys))
                    S = scoring.select(S, at, rows[chunk], keys)
                    if scoring.bias is None:
                        unbiased = S
                    yield ScoreBlock((*at, chunk), S, unbiased, q_block, k_block, v_block)


def softmax_exact(S: Array) -> tuple[Array, Array]:
    """Return the softmax of the last axis and its log-sum-exp, in the precision of `S`.

    Parameters
    ----------
    S : (..., len_kv) array

    Returns
    -------
    P : (..., len_kv) array
        ``exp(S - lse)``; 0 in a row without a score above -inf.
    lse : (...) array
        ``log(sum(exp(S)))``; -inf in such a row.

    Examples
    --------
    >>> P, lse = softmax_exact(np.log([[1.0, 3.0], [0.5, 0.5]]))
    >>> P.round(12).tolist(), lse.round(11).tolist()
    ([[0.25, 0.75], [0.5, 0.5]], [1.38629436112, 0.0])
    """
    (S,) = operands(S=S)
    xp = array_namespace(S)
    with np.errstate(divide="ignore", invalid="ignore"):
        if S.shape[-1] == 0:
            return S, xp.full(S.shape[:-1], NEG_INF)
        m = S.max(axis=-1, keepdims=True)
        m = xp.where(m == NEG_INF, 0.0, m)
        P = xp.exp(S - m)
        l = P.sum(axis=-1, keepdims=True)
        lse = (m + xp.log(l))[..., 0]
        return P / xp.where(l == 0, 1.0, l), lse


def _weighted_sum(P: Array, v: Array, admitted: Array) -> Array:
    """Return P @ v, where a key that a row does not attend to counts for nothing, even NaN."""
    xp = array_namespace(P)
    finite = xp.isfinite(v)
    if bool(finite.all()):
        return P @ v
    with np.errstate(invalid="ignore"):
        o = P @ xp.where(finite, v, 0.0)
        attends = admitted.astype(np.float64)
        # An attended infinity or NaN decides the element, however small its probability.
        for value in (np.inf, NEG_INF):
            o = o + xp.where(attends @ (v == value).astype(np.float64) > 0, value, 0.0)
        return o + xp.where(attends @ xp.isnan(v).astype(np.float64) > 0, np.nan, 0.0)


@explains_foreign_arguments
@takes_options
def attention_exact(
    q: Array,
    k: Array,
    v: Array,
    *,
    rows: Array | None = None,
    return_lse: bool = False,
    **options: Unpack[TurnedOptions],
) -> Any:
    r"""Attention by its definition, in float64.

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array
        Queries: NumPy or CuPy, any real dtype, any strides.
    k, v : (batch, heads_kv, len_kv, head_dim) array
        Keys and values; heads is a multiple of heads_kv, and query head h uses key head
        ``h // (heads // heads_kv)``.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `cupyattn.attention`.
    rope, rope_interleaved, rope_offset_q
        As for `cupyattn.attention`; q and k are turned in float64.
    rows : 1-D integer array, optional
        Query rows to compute, in this order; by default all.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    o : (batch, heads, len(rows), head_dim) array, float64
        0 in a row that attends to nothing.
    lse : (batch, heads, len(rows)) array, float64
        Natural logarithm; -inf in such a row. Only with `return_lse`.

    Raises
    ------
    TypeError
        If the arrays are not all NumPy's or all CuPy's.
    ValueError
        If shapes disagree, or an option is none of the above.
    UnsupportedError
        If v has another head_dim than k, or head_dim is more than 256.

    Notes
    -----
    .. math:: O_i = \sum_j P_{ij} V_j,\quad P_{ij} = e^{S_{ij} - lse_i},\quad
              S_{ij} = c \tanh(\sigma\, q_i \cdot k_j / c) + b_{ij},\quad
              lse_i = \log \sum_j e^{S_{ij}}

    over the keys j that row i attends to; without a softcap c the score is σ q·k + b. A score of
    -inf is a masked key. Masked keys have no influence, even if they are NaN. A NaN among the
    unmasked keys of a row makes the row NaN. Beside the result and K, V of a few heads in float64,
    about 100 to 200 MB are used at a time.

    Examples
    --------
    >>> q = k = np.zeros((1, 1, 2, 4))
    >>> v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention_exact(q, k, v, causal=True)[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    q, k, v = operands(q=q, k=k, v=v)
    settings, arrays = parse("attention_exact", q, k, v, options)
    xp = array_namespace(q, k, v)
    batch, heads, heads_kv, len_q, len_kv, head_dim = check_shapes(q.shape, k.shape, v.shape)
    turned = settings.rope_interleaved, settings.rope_offset_q
    turn = Rope.of_arrays(arrays.get("rope"), *turned, len_q, len_kv, head_dim)
    if turn is not None:
        q, k = turn.exact(q, k)
    num_rows = len_q if rows is None else len(rows)
    o = xp.zeros((batch, heads, num_rows, head_dim))
    lse = xp.full((batch, heads, num_rows), NEG_INF)
    o_blocks, lse_blocks = split_heads(o, heads_kv), split_heads(lse, heads_kv)  # views
    for block in blocks_of(q, k, v, settings.scale, settings.scores(arrays), rows):
        P, lse_blocks[block.index] = softmax_exact(block.S)
        o_blocks[block.index] = _weighted_sum(P, block.v, block.admitted)
    return (o, lse) if return_lse else o
