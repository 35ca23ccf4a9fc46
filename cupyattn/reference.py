"""What attention is (`attention_exact`) and how the kernels compute it (`attention_mirror`).

`attention_exact` is the definition, in float64, on whichever kind of array it is given.
`attention_mirror` follows the kernels' steps S0 to S6 on NumPy, in the same blocks of keys, and
rounds at the points R2 to R7 that a `cupyattn.numerics.Numerics` record names. It mirrors rounding
points and block order, not thread order: inside one product or one sum the order is NumPy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.rounding import Array, array_namespace, as_float64

#: Scores that `score_blocks` holds at a time (32 MB of float64; the caller's temporaries are a few
#: times that).
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention problem, checked."""

    batch: int
    heads: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @classmethod
    def of(cls, q: Array, k: Array, v: Array) -> Shape:
        """Check that q, k and v fit together.

        Raises
        ------
        ValueError
            If they do not; the message names the argument and the shapes.
        """
        for name, array in (("q", q), ("k", k), ("v", v)):
            if array.ndim != 4:
                raise ValueError(
                    f"{name} must have shape (batch, heads, len, head_dim), got {name}.shape={array.shape}"
                )
        if k.shape != v.shape:
            raise ValueError(f"k and v must agree in shape, got {k.shape=} {v.shape=}")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(f"q and k must agree on batch and head_dim, got {q.shape=} {k.shape=}")
        if q.shape[3] == 0:
            raise ValueError(f"head_dim must be at least 1, got {q.shape=}")
        heads, heads_kv = q.shape[1], k.shape[1]
        if heads != heads_kv and (heads_kv == 0 or heads % heads_kv):
            raise ValueError(
                f"q's heads must be a multiple of k's heads, got {q.shape=} {k.shape=}"
            )
        return cls(q.shape[0], heads, heads_kv, q.shape[2], k.shape[2], q.shape[3])


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return the softmax scale: ``head_dim ** -0.5`` where none is given.

    Raises
    ------
    ValueError
        If it is not positive and finite.
    """
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale


def causal_shift(len_q: int, len_kv: int, causal_align: str) -> int:
    """Return the shift with which query row i attends key j iff ``j <= i + shift``.

    Examples
    --------
    >>> causal_shift(2, 5, "bottom-right"), causal_shift(2, 5, "top-left")
    (3, 0)
    """
    if causal_align not in ("bottom-right", "top-left"):
        raise ValueError(f"causal_align must be 'bottom-right' or 'top-left', got {causal_align!r}")
    return len_kv - len_q if causal_align == "bottom-right" else 0


@dataclass(frozen=True)
class ScoreBlock:
    """Some of the scores of one attention problem, with the operands that made them.

    Parameters
    ----------
    index : tuple of slice
        Where the block lies in an array of shape (batch, heads_kv, group, rows, ...).
    S : (batch, heads_kv, group, rows, len_kv) array, float64
        ``scale * q.k``; -inf where the row does not attend to the key.
    q : (batch, heads_kv, group, rows, head_dim) array, float64
    k, v : (batch, heads_kv, 1, len_kv, head_dim) array, float64
    """

    index: tuple[slice, slice, slice, slice]
    S: Array
    q: Array
    k: Array
    v: Array

    @property
    def admitted(self) -> Array:
        """Boolean, shaped as S: the row attends to the key. A NaN score is attended to."""
        return self.S != -np.inf


def _chunks(lengths: tuple[int, ...], cost: int) -> list[list[slice]]:
    """Split axes, outermost first, so that one chunk of all of them costs about BLOCK_ELEMENTS."""
    room = max(1, BLOCK_ELEMENTS // max(1, cost))
    chunks: list[list[slice]] = []
    for length in reversed(lengths):
        size = max(1, min(length, room))
        room = max(1, room // size)
        chunks.append([slice(i, min(i + size, length)) for i in range(0, length, size)])
    return chunks[::-1]


def score_blocks(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    rows: Array | None = None,
) -> Iterator[ScoreBlock]:
    """Yield all scores of an attention problem, in float64, a bounded number at a time.

    Parameters
    ----------
    q, k, v, scale, causal, causal_align, rows
        As for `attention_exact`.

    Yields
    ------
    ScoreBlock
        Whole rows: the last axis of S runs over all keys. Every (batch, head, row) comes once.

    Notes
    -----
    Keys are masked by selection, never by adding -inf: a NaN under the mask has no influence.
    """
    xp = array_namespace(q, k, v)
    shape = Shape.of(q, k, v)
    sigma = resolve_scale(scale, shape.head_dim)
    shift = causal_shift(shape.len_q, shape.len_kv, causal_align)
    rows = xp.arange(shape.len_q) if rows is None else xp.asarray(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(f"rows must be a 1-D integer array, got {rows.dtype} {rows.shape=}")
    if rows.size and not (0 <= int(rows.min()) and int(rows.max()) < shape.len_q):
        raise ValueError(f"rows must lie in [0, {shape.len_q}), got {rows}")

    # Query heads that share a key head are one axis: splitting an axis copies nothing.
    q = q.reshape(shape.batch, shape.heads_kv, shape.group, shape.len_q, shape.head_dim)
    keys = xp.arange(shape.len_kv)
    batches, heads, groups, row_chunks = _chunks(
        (shape.batch, shape.heads_kv, shape.group, rows.size), max(shape.len_kv, shape.head_dim)
    )
    for batch in batches:
        for head in heads:
            k_block = as_float64(k[batch, head, None])
            v_block = as_float64(v[batch, head, None])
            for group in groups:
                for chunk in row_chunks:
                    q_block = as_float64(q[batch, head, group][..., rows[chunk], :])
                    with np.errstate(over="ignore", invalid="ignore"):
                        S = q_block @ k_block.swapaxes(-1, -2) * sigma
                    if causal:
                        S = xp.where(keys <= rows[chunk, None] + shift, S, -np.inf)
                    yield ScoreBlock((batch, head, group, chunk), S, q_block, k_block, v_block)


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
    xp = array_namespace(S)
    with np.errstate(divide="ignore", invalid="ignore"):
        if S.shape[-1] == 0:
            return S, xp.full(S.shape[:-1], -np.inf)
        m = S.max(axis=-1, keepdims=True)
        m = xp.where(m == -np.inf, 0.0, m)
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
        for value in (np.inf, -np.inf):
            o = o + xp.where(attends @ (v == value).astype(np.float64) > 0, value, 0.0)
        return o + xp.where(attends @ xp.isnan(v).astype(np.float64) > 0, np.nan, 0.0)


def attention_exact(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    rows: Array | None = None,
    return_lse: bool = False,
) -> Any:
    r"""Attention by its definition, in float64.

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array
        Queries: NumPy or CuPy, any real dtype, any strides.
    k, v : (batch, heads_kv, len_kv, head_dim) array
        Keys and values; heads is a multiple of heads_kv, and query head h uses key head
        ``h // (heads // heads_kv)``.
    scale : float, optional
        Factor of the scores; by default ``head_dim ** -0.5``.
    causal : bool
        Query row i attends key j only where ``j <= i + shift``.
    causal_align : {"bottom-right", "top-left"}
        shift is ``len_kv - len_q`` (the last query sees every key) or 0.
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
        If shapes disagree, or an option is not one of those above.

    Notes
    -----
    .. math:: O_i = \sum_j P_{ij} V_j,\quad P_{ij} = e^{S_{ij} - lse_i},\quad
              S_{ij} = \sigma\, q_i \cdot k_j,\quad lse_i = \log \sum_j e^{S_{ij}}

    over the keys j that row i attends to. A score of -inf is a masked key. What is masked has no
    influence, not even a NaN; a NaN among the keys that a row attends to makes the row NaN.
    Beside the result and K, V of a few heads in float64, about 100 to 200 MB are used at a time.

    Examples
    --------
    >>> q = k = np.zeros((1, 1, 2, 4))
    >>> v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention_exact(q, k, v, causal=True)[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    xp = array_namespace(q, k, v)
    shape = Shape.of(q, k, v)
    num_rows = shape.len_q if rows is None else len(rows)
    lead = (shape.batch, shape.heads_kv, shape.group, num_rows)
    o = xp.zeros((*lead, shape.head_dim))
    lse = xp.full(lead, -np.inf)
    for block in score_blocks(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, rows=rows
    ):
        P, lse[block.index] = softmax_exact(block.S)
        o[block.index] = _weighted_sum(P, block.v, block.admitted)
    o = o.reshape(shape.batch, shape.heads, num_rows, shape.head_dim)
    lse = lse.reshape(shape.batch, shape.heads, num_rows)
    return (o, lse) if return_lse else o
