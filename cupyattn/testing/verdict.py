"""The public door to error-bound testing: draw inputs, judge outputs.

`judge` compares an output with exact attention as a fraction of a derived bound, element by
element; `assert_within_bound` raises where the fraction exceeds 1; `attention_inputs` draws the
arrays, with Hypothesis. All but the last work on NumPy and on CuPy arrays alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.interchange import operand, operands
from cupyattn.arrays.kinds import Array, array_namespace, as_float64, check_values
from cupyattn.bounds import kernel, parts, quantised
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.numerics import Numerics
from cupyattn.kernels.splits import wanted_rows
from cupyattn.kernels.tiles import Tiles, check_kind
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.checks import check_limits, check_scale
from cupyattn.problem.row_preparation import EPS, Preparation
from cupyattn.quant.operand_protocol import portable_form
from cupyattn.reference.exact import attention_exact

#: Scores (batch heads len_q len_kv) up to which every row is judged.
SMALL_CELL = 2**22
#: Query rows that are drawn at random in larger cells, and at most as many at the tiles' edges.
SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Report:
    """What `judge` found.

    Parameters
    ----------
    variant : str
        The rung judged.
    rows : int
        Query rows looked at, of each (batch, head).
    ratio : float
        Largest error of O as a fraction of its bound (J2); it must not exceed 1.
    index : tuple of int
        Where: (batch, head, row, channel).
    value, expected, bound : float
        There: the output, exact attention, and what they may differ by.
    tag : str
        There: the rounding point with the largest share of the bound.
    lse_ratio : float or None
        Largest error of lse as a fraction of its bound; None where lse was not given.
    lse_index : tuple of int or None
        Where: (batch, head, row).
    relative_l2 : float
        ``norm(o - exact) / norm(exact)`` over the rows looked at. It decides nothing.
    tightness : float
        Median over rows of ``rms(bound) / rms(exact)``: below 1, zeros would fail.
    quantisation : float or None
        J3: largest difference between exact attention of the INT8 operands and of the caller's
        arrays, as a fraction of its bound; it must not exceed 1.
    """

    variant: str
    rows: int
    ratio: float
    index: tuple[int, ...]
    value: float
    expected: float
    bound: float
    tag: str
    lse_ratio: float | None
    lse_index: tuple[int, ...] | None
    relative_l2: float
    tightness: float
    quantisation: float | None

    @property
    def passed(self) -> bool:
        """Whether no ratio exceeds 1."""
        ratios = (self.ratio, self.lse_ratio, self.quantisation)
        return all(ratio is None or ratio <= 1.0 for ratio in ratios)

    def __str__(self) -> str:
        lines = [
            f"{self.variant}: O is {'within' if self.ratio <= 1 else 'OUTSIDE'} its bound, "
            f"error / bound = {self.ratio:.3g} at {self.index}",
            f"  value {self.value:.9g}, expected {self.expected:.9g}, bound {self.bound:.3g} "
            f"(mostly {self.tag}), {self.rows} rows of every head judged",
            f"  relative L2 error {self.relative_l2:.3g}, bound / rms of a row "
            f"{self.tightness:.3g} (median)",
        ]
        if self.lse_ratio is not None:
            lines.append(f"  lse: error / bound = {self.lse_ratio:.3g} at {self.lse_index}")
        if self.quantisation is not None:
            lines.append(f"  quantisation (J3): difference / bound = {self.quantisation:.3g}")
        return "\n".join(lines)


def sample_rows(
    len_q: int, block_q: int, seed: int = 0, count: int = SAMPLED_ROWS
) -> npt.NDArray[np.int64]:
    """Choose query rows: drawn ones, the first and the last, and those at the edges of tiles.

    Parameters
    ----------
    len_q : int
        Query rows.
    block_q : int
        Rows of a tile.
    seed : int
        Of the draw.
    count : int
        Rows to draw; of the rows at tile edges as many are taken, if there are more.

    Returns
    -------
    1-D array, int64
        Sorted, without repeats; all rows where there are no more than `count`.

    Examples
    --------
    >>> rows = sample_rows(1000, 128)
    >>> bool({0, 127, 128, 895, 896, 999} <= set(rows.tolist())), len(rows) >= 64
    (True, True)
    """
    if len_q <= count:
        return np.arange(len_q)
    rng = np.random.default_rng(seed)
    starts = np.arange(0, len_q, block_q)
    edges = np.concatenate([starts, starts[1:] - 1])
    if edges.size > count:
        edges = rng.choice(edges, size=count, replace=False)
    drawn = rng.choice(len_q, size=count, replace=False)
    return np.unique(np.concatenate([[0, len_q - 1], edges, drawn]))


def judge(
    o: Array,
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str,
    lse: Array | None = None,
    quantized: Any = None,
    numerics: Numerics | None = None,
    tiles: Tiles | None = None,
    form: str | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: BlockMask | None = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    rows: Array | None = None,
    seed: int = 0,
    exact: Callable[..., Any] = attention_exact,
) -> Report:
    """Compare an output with exact attention, as a fraction of the derived bound.

    Parameters
    ----------
    o : (batch, heads, len_q, head_dim) array
        The output, all of it.
    q, k, v : array
        The caller's arrays. With `quantized` they may be None; J3 is then left out.
    variant : str
        The rung that made `o`.
    lse : (batch, heads, len_q) array, optional
        Log-sum-exp, natural logarithm, to be judged too.
    quantized : QuantizedQKV, optional
        The INT8 operands that the rung worked on. J2 is then against exact attention of these.
    numerics, tiles, form
        As for `cupyattn.bounds.attention`.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for the call that made `o`.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps
        As for the call that made `o`: q and k are prepared as the kernels prepare them, and
        everything else is about those. `quantized` has prepared operands already; J3 is then
        against attention of q and k prepared in float64.
    rows : 1-D integer array, optional
        Query rows to look at; by default all of a small cell, else those of `sample_rows`.
    seed : int
        Of that sample.
    exact : callable
        What computes exact attention: `cupyattn.reference.attention_exact`, or a cache before it.

    Returns
    -------
    Report

    Raises
    ------
    ValueError
        If `o` or `lse` does not have the shape that the inputs ask for, or the rung has no such
        `form`.

    Examples
    --------
    >>> from cupyattn.reference import attention_mirror
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> report = judge(attention_mirror(x, x, x, variant="fa"), x, x, x, variant="fa")
    >>> report.passed, report.rows
    (True, 8)
    """
    check_kind(tiles)
    lookup(variant).check_form(form)
    o, q, k, v, lse = operands(o=o, q=q, k=k, v=v, lse=lse)
    check_values("rows", rows)
    if quantized is None and (q is None or k is None or v is None):
        raise TypeError("q, k and v may only be None where quantized is given")
    multiplied: tuple[Any, Any, Any] = (q, k, v)
    if quantized is not None:
        multiplied = kernel.kernel_operands(quantized)
    xp = array_namespace(o, *multiplied)
    batch, heads, len_q, head_dim = multiplied[0].shape
    len_kv = multiplied[1].shape[2]
    prepare = Preparation.of(
        {
            "rope": rope, "rope_interleaved": rope_interleaved, "rope_offset_q": rope_offset_q,
            "qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps,
        },
        (heads, multiplied[1].shape[1], len_q, len_kv, head_dim),
    )  # fmt: skip
    prepared = None
    if prepare is not None and q is not None and quantized is None:
        q, k = prepare.stored(q, k)
        multiplied = q, k, v
    elif prepare is not None and q is not None:
        prepared = bounds_prepared.preparation(prepare, q, k, stored=quantized.config.fused)
        q, k = prepare.exact(q, k)
    if o.shape != (batch, heads, len_q, head_dim):
        raise ValueError(f"o must have q's shape {multiplied[0].shape}, got {o.shape}")
    if lse is not None and lse.shape != (batch, heads, len_q):
        raise ValueError(f"lse must have shape {(batch, heads, len_q)}, got {lse.shape}")
    if quantized is not None:
        form = form or portable_form(quantized, softcap, bias)
    blocks = (0, 0) if block_mask is None else block_mask.blocks
    changed = any((softcap, mask is not None, bias is not None, block_mask is not None))
    form = form or lookup(variant).form_for(len_q, len_kv, tiles, changed=changed)
    limits = check_limits(causal, causal_align, window, len_q, len_kv)
    tiles = tiles or lookup(variant).tiles_for(
        head_dim, form=form, lengths=(len_q, len_kv), causal=limits[1] is not None,
        block_mask=blocks, rows=wanted_rows(batch, heads, multiplied[1].shape[1], len_q),
    )  # fmt: skip
    if rows is None:
        small = batch * heads * len_q * len_kv <= SMALL_CELL
        rows = np.arange(len_q) if small else sample_rows(len_q, tiles.block_q, seed)
    rows = operand("rows", xp.asarray(rows))
    options: dict[str, Any] = {
        "scale": scale, "causal": causal, "causal_align": causal_align, "window": window,
        "softcap": softcap, "mask": mask, "bias": bias, "block_mask": block_mask, "rows": rows,
    }  # fmt: skip

    expected, expected_lse = exact(*multiplied, return_lse=True, **options)
    bound = kernel.attention(
        q, k, v, variant=variant, numerics=numerics, tiles=tiles, form=form,
        quantized=quantized, **options,
    )  # fmt: skip
    if quantized is not None and quantized.k_mean is not None:
        expected_lse = expected_lse + mean_score(multiplied[0], quantized, rows, scale)
    quantisation = None
    if quantized is not None and q is not None:
        given = exact(q, k, v, return_lse=True, **options)
        cost = quantised.quantisation(q, k, v, quantized, prepared=prepared, **options)
        quantisation = _judge_quantisation((expected, expected_lse), given, cost)

    value = as_float64(o[:, :, rows])
    total = bound.total
    ratio, at = _worst(ratio_to_bound(value, expected, total))
    lse_ratio = lse_at = None
    if lse is not None:
        lse_value = as_float64(lse[:, :, rows])
        lse_ratio, lse_at = _worst(ratio_to_bound(lse_value, expected_lse, bound.lse))
        lse_at = (*lse_at[:2], int(rows[lse_at[2]])) if lse_at else lse_at
    finite = xp.isfinite(value) & xp.isfinite(expected)
    error = xp.where(finite, value - xp.where(finite, expected, 0.0), 0.0)
    size = xp.where(finite, expected, 0.0)
    return Report(
        variant=variant,
        rows=int(rows.size),
        ratio=ratio,
        index=(*at[:2], int(rows[at[2]]), at[3]) if at else at,
        value=float(value[at]) if at else 0.0,
        expected=float(expected[at]) if at else 0.0,
        bound=float(total[at]) if at else 0.0,
        tag=bound.dominant(at) if at else "",
        lse_ratio=lse_ratio,
        lse_index=lse_at,
        relative_l2=_norm(error) / (_norm(size) or 1.0),
        tightness=_tightness(total, size),
        quantisation=quantisation,
    )


def assert_within_bound(
    o: Array, q: Array | None, k: Array | None, v: Array | None, **options: Any
) -> Report:
    """Raise unless an output is within its bound.

    Parameters
    ----------
    o, q, k, v, **options
        As for `judge`.

    Returns
    -------
    Report

    Raises
    ------
    AssertionError
        Naming coordinate, value, expected value, bound, ratio and rounding point.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> try:
    ...     assert_within_bound(0 * x, x, x, x, variant="fa")
    ... except AssertionError as error:
    ...     print(str(error)[:27])
    fa: O is OUTSIDE its bound,
    """
    report = judge(o, q, k, v, **options)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def mean_score(q: Array, quantized: Any, rows: Array, scale: float | None) -> Array:
    """Return sigma q.mean: what the mean of the keys adds to every score of a row."""
    sigma = check_scale(scale, q.shape[-1])
    mean = as_float64(quantized.k_mean).repeat(q.shape[1] // quantized.k_mean.shape[1], axis=1)
    return sigma * (q[:, :, rows] * mean[:, :, None]).sum(axis=-1)


def _judge_quantisation(
    operands: tuple[Array, Array], given: tuple[Array, Array], bound: parts.Bound
) -> float:
    """J3: exact attention (o, lse) of the operands against that of the caller's arrays."""
    return max(
        _worst(ratio_to_bound(operands[0], given[0], bound.total))[0],
        _worst(ratio_to_bound(operands[1], given[1], bound.lse))[0],
    )


def _worst(ratio: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest ratio and where it stands; nothing at all is within any bound."""
    if ratio.size == 0:
        return 0.0, ()
    index = np.unravel_index(int(ratio.argmax()), ratio.shape)
    at = tuple(int(i) for i in index)
    return float(ratio[at]), at


def _norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def _tightness(bound: Array, size: Array) -> float:
    """Return the median over rows of rms(bound) / rms(size), of the rows where that means much."""
    xp = array_namespace(bound)
    rms = xp.sqrt((size * size).mean(axis=-1))
    fraction = xp.sqrt((bound * bound).mean(axis=-1)) / xp.where(rms > 0, rms, xp.nan)
    fraction = fraction[xp.isfinite(fraction)]
    return float(xp.median(fraction)) if fraction.size else math.nan
