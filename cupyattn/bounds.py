"""How far a kernel may be from exact attention: element-wise a-priori bounds, in float64.

`attention` bounds what the kernel itself may do to the operands that it received (judgement J2,
rounding points R2 to R7); `quantisation` bounds what INT8 operands may do to the caller's arrays
(J3, R1). Both are computed from the actual inputs and scales, never from an output, on whichever
kind of array they are given.

Every formula is proved in docs/MATH_REFERENCE.md under the tag that stands beside it here. In
short: all that happens to the scores is collected into one number d_j per score, a bound of the
perturbation of the score that the kernel in effect used (R2, R3, R4). `softmax_perturbation` turns
d into a bound on the output. The roundings of P, of the two sums and of the result (R5, R6, R7)
follow as factors 1 + theta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.checks import check_dtype, check_scale, check_shapes
from cupyattn.numerics import (
    EX2_APPROX_ERROR,
    EX2_FLUSH,
    HALF_SUBNORMAL,
    TENSOR_CORE_ROUNDOFF,
    UNIT_ROUNDOFF,
    Numerics,
)
from cupyattn.numerics import numerics as compose_numerics
from cupyattn.perturbation import gamma, half_ulp, softmax_perturbation
from cupyattn.reference import ScoreBlock, score_blocks, softmax_exact
from cupyattn.registry import lookup
from cupyattn.rounding import (
    NEG_INF,
    Array,
    array_namespace,
    as_float64,
    merge_heads,
    split_heads,
)
from cupyattn.tiles import Tiles

__all__ = [
    "TERMS",
    "Bound",
    "attention",
    "gamma",
    "half_ulp",
    "quantisation",
    "softmax_perturbation",
]

#: The terms of `attention`, in the order in which a kernel rounds.
TERMS = ("R2", "R3", "R4", "R5", "R6", "R7")

U = UNIT_ROUNDOFF["float32"]
U64 = UNIT_ROUNDOFF["float64"]
LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
#: |log(1 + η)| of one ex2.approx.ftz, |η| <= 2^-22.
EX2_LOG_ERROR = -math.log1p(-EX2_APPROX_ERROR)
#: What flushing and underflow may take from the weight of one key: the flush of ex2, once for p and
#: once for alpha, times a p of at most 2^8.
FLUSHED_WEIGHT = 2.0**9 * EX2_FLUSH
#: Relative error of log2f: 1 ulp from the correctly rounded result (CUDA C++ Programming Guide,
#: mathematical functions), hence 3/2 ulp.
LOG2F_ERROR = 1.5 * 2.0**-23
#: The kernels' range: 2^8 for p and for sums that stay below 2^127, see R4 in the docs.
MAX_LOG2_SCORE = 2.0**27
MAX_FLOAT = 2.0**126
#: Stands for a probability that underflows float64; e^300 times it is still nothing.
LEAST_P = 1e-300
#: Largest finite number of each storage type.
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "float32": 2.0**128 - 2.0**104}
#: Float64's share of everything, in the exact result and in the bound itself.
REFERENCE = 1.0 + 2.0**-20


@dataclass(frozen=True)
class Bound:
    """What an output may differ by, element by element.

    Parameters
    ----------
    terms : dict of str to (batch, heads, rows, head_dim) array
        One array for each rounding point; they sum to `total`.
    lse : (batch, heads, rows) array
        The same for the log-sum-exp.

    Notes
    -----
    +inf means that nothing is promised: a non-finite score or value, or a number that leaves the
    range of its type. A row without keys has bound 0, for O = 0 and lse = -inf are exact.
    """

    terms: dict[str, Array]
    lse: Array

    @property
    def total(self) -> Array:
        """The bound: (batch, heads, rows, head_dim), float64."""
        return sum(self.terms.values())

    def dominant(self, index: tuple[int, ...]) -> str:
        """Return the tag with the largest share of one element of `total`."""
        return max(self.terms, key=lambda tag: float(self.terms[tag][index]))


@dataclass(frozen=True)
class _Scaling:
    """R3, how a kernel scales its dot products, as relative errors.

    A computed score is (exact + R2) (1 + common) (1 + own), `common` one number for a row.
    """

    common: float
    own: float
    largest: float  #: magnitude that intermediate products may reach beside Σ|q||k| and scores


def _scaling(n: Numerics, sigma: float, quantized: Any) -> _Scaling:
    """Return the relative errors of R3; the constants' own roundings are known, so taken as is."""

    def constant(x: float) -> float:
        with np.errstate(over="ignore"):
            return abs(float(np.float32(x)) / x - 1.0) + 2.0**-50

    if n.scaling == "folded":
        return _Scaling(constant(sigma * LOG2E), 0.0, sigma)
    if n.scaling == "natural":
        common = (1 + constant(sigma)) * (1 + constant(LOG2E)) - 1
        return _Scaling(common, U, sigma)
    # dequantised: fl(fl(dot * k_scale) * fl(scale_log2 * q_scale)). The factor of a row may be
    # subnormal, where it is off by up to 2^-150.
    least, largest_q = _range(quantized.q_scale)
    _, largest_k = _range(quantized.k_scale)
    subnormal = HALF_SUBNORMAL["float32"] / (sigma * LOG2E * least)
    common = (1 + constant(sigma * LOG2E)) * (1 + U + subnormal) - 1
    largest_dot = 127.0**2 * quantized.q_codes.shape[-1]
    largest = max(largest_dot * largest_k, sigma * LOG2E * largest_q, sigma)
    return _Scaling(common, (1 + U) ** 2 - 1, largest)


def _range(scale: Array) -> tuple[float, float]:
    """Return the least and the largest usable scale; a NaN makes its rows NaN and nothing else."""
    xp = array_namespace(scale)
    usable = as_float64(scale)[xp.isfinite(scale)]
    return (float(usable.min()), float(usable.max())) if usable.size else (1.0, 1.0)


def _products(n: str, terms: Any, steps: Any = None) -> Any:
    """Return γ of an inner product of so many nonzero terms (R2, R6).

    A tensor core adds 16 products and its accumulator with one truncation each but the largest, and
    truncates the sum: n + ceil(n/16) roundings of 2^-23. `steps` bounds the instructions that
    see a nonzero term.
    """
    if n == "fma":
        return gamma(terms, U)
    if n == "tensor_core":
        steps = -(-terms // 16) if steps is None else steps
        return gamma(terms + steps, TENSOR_CORE_ROUNDOFF)
    return 0.0  # int32


@dataclass(frozen=True)
class _Perturbed:
    """What R2, R3 and R4 may do to the scores of a block; (..., rows, keys) or (..., rows)."""

    r2: Array
    r3: Array
    r4: Array
    shift: Array  # natural units: common to a row, felt by lse alone
    rises: Array  # steps at which the maximum may rise, after the first
    exponent: Array  # log2 units: the exact score minus the running maximum of its step
    top: Array  # s_max, natural units
    slack: Array  # log2 units: what the rounding of M may do, u |M|
    usable: Array  # the row keeps to the kernel's range

    @property
    def d(self) -> Array:
        """The bound of each score's perturbation."""
        return self.r2 + self.r3 + self.r4


def _perturb(
    block: ScoreBlock, n: Numerics, tiles: Tiles, sigma: float, scaling: _Scaling
) -> _Perturbed:
    """R2, R3, R4: bound the perturbation of every score of a block."""
    xp = array_namespace(block.S)
    admitted = block.admitted
    head_dim = block.q.shape[-1]
    finite = xp.isfinite(block.S)
    top = xp.where(finite, block.S, NEG_INF).max(axis=-1)
    top = xp.where(xp.isfinite(top), top, 0.0)
    S = xp.where(finite, block.S, top[..., None])
    magnitudes = xp.abs(block.q) @ xp.abs(block.k).swapaxes(-1, -2)  # Σ|q||k|
    magnitudes = xp.where(admitted & xp.isfinite(magnitudes), magnitudes, 0.0)
    largest = magnitudes.max(axis=-1)

    # R2: the inner product; then float64's own, which int32 would do without.
    dot = _products(n.scores, head_dim) * magnitudes
    if n.scores != "int32":
        dot = dot + 2 * head_dim * 2.0**-149  # underflow
    dot = dot + gamma(head_dim + 4, U64) * magnitudes
    r2 = sigma * (1 + scaling.common) * (1 + scaling.own) * dot * REFERENCE

    # R3: a relative error that a row shares is a shift, and that error of s - s_max.
    r3 = scaling.common * (top[..., None] - S) + (
        scaling.own * (1 + scaling.common) * xp.abs(S) + 2.0**-148
    )
    r3 = r3 * REFERENCE
    shift = scaling.common * xp.abs(top) * REFERENCE

    # R4: arguments of exp2 and of alpha, and exp2 itself.
    known = xp.where(admitted, r2 + r3, 0.0)
    worst = known.max(axis=-1)
    rises_after, rises, running = _rises(S, known, admitted, tiles.block_kv if n.online else None)
    largest_M = xp.abs(xp.where(running > NEG_INF, running, 0.0)).max(axis=-1)
    slack = U * ((largest_M + worst + shift) / LN2) * (1 + 2 * U)
    below = (top[..., None] - S + 2 * worst[..., None]) / LN2 + 4 * slack[..., None]
    r4 = (LN2 * U * below + EX2_LOG_ERROR * (1 + rises_after) + 2.0**-125) * REFERENCE

    usable = (finite | ~admitted).all(axis=-1) & (slack <= U * MAX_LOG2_SCORE)
    usable &= xp.maximum(largest * max(1.0, sigma), scaling.largest) <= MAX_FLOAT
    zero = xp.zeros_like(r2)
    r2, r3, r4 = (xp.where(admitted, r, zero) for r in (r2, r3, r4))
    exponent = xp.where(admitted & (running > NEG_INF), S - running, 0.0) / LN2
    return _Perturbed(r2, r3, r4, shift, rises, exponent, top, slack, usable)


def _rises(
    S: Array, known: Array, admitted: Array, block_kv: int | None
) -> tuple[Array, Array, Array]:
    """Count the steps at which the running maximum may rise.

    Returns the count after each key's own step, the count after the first step (..., rows), and the
    running maximum of the exact scores at each key's own step.
    """
    xp = array_namespace(S)
    len_kv = S.shape[-1]
    step = len_kv if block_kv is None else block_kv
    steps = -(-len_kv // step)
    pad = [(0, 0)] * (S.ndim - 1) + [(0, steps * step - len_kv)]

    def block_max(x: Array) -> Array:
        x = xp.pad(xp.where(admitted, x, NEG_INF), pad, constant_values=NEG_INF)
        return x.reshape(*x.shape[:-1], steps, step).max(axis=-1)

    def running_max(x: Array) -> Array:
        shift = 1
        while shift < steps:  # by doubling
            after = xp.maximum(x[..., shift:], x[..., :-shift])
            x = xp.concatenate([x[..., :shift], after], axis=-1)
            shift *= 2
        return x

    def by_key(x: Array) -> Array:
        return x.repeat(step, axis=-1)[..., :len_kv]

    above, before = block_max(S + known), running_max(block_max(S - known))[..., :-1]
    rise = (above[..., 1:] > before) & (before > NEG_INF)
    rises = rise.sum(axis=-1).astype(np.float64)
    until = xp.concatenate([xp.zeros((*rise.shape[:-1], 1)), rise.cumsum(axis=-1)], axis=-1)
    return by_key(rises[..., None] - until), rises, by_key(running_max(block_max(S)))


def attention(
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str = "fa",
    numerics: Numerics | None = None,
    tiles: Tiles | None = None,
    form: str = "portable",
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    rows: Array | None = None,
    quantized: Any = None,
) -> Bound:
    r"""Bound |kernel - exact attention| of the operands that the kernel received (J2).

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array or None
        float16, bfloat16 or float32. Not looked at where `quantized` is given.
    k, v : (batch, heads_kv, len_kv, head_dim) array or None
        Of the same type.
    variant : str
        The rung; it gives `numerics` and `tiles` where they are not given.
    numerics : Numerics, optional
        Where the kernel rounds, and to what: all that the bound knows of a kernel.
    tiles : Tiles, optional
        Block sizes; only ``block_kv`` counts, the keys between two rescalings.
    form : {"portable", "sm90"}
        Form of the kernel.
    scale, causal, causal_align, rows
        As for `cupyattn.reference.attention_exact`.
    quantized : QuantizedQKV, optional
        INT8 operands: the bound is then about attention of ``quantized.dequantize()``.

    Returns
    -------
    Bound
        Terms R2 to R7, each (batch, heads, len(rows), head_dim), float64.

    Raises
    ------
    TypeError, ValueError
        For operands or options that do not fit together.

    Notes
    -----
    With W_j the weight that the kernel in effect gives key j and p'_j = W_j / Σ W, the output is

    .. math:: fl\left(\frac{(1+ε_1)(1+ε_2)}{1+θ_l} \sum_j p'_j (1+ρ_j)(1+θ_j) v_j\right)

    p' is a softmax of scores perturbed by R2, R3 and R4 (`softmax_perturbation`; its bound is
    split among them in proportion to Σ p_j d_j); ρ is R5; θ and θ_l are R6; ε and the final
    rounding are R7. Each bound is multiplied out, never cut at first order.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> bound = attention(x, x, x, variant="fa_tc")
    >>> bound.total.shape, bool((bound.total < 2e-3).all())
    ((1, 1, 8, 16), True)
    """
    if quantized is None:
        if q is None or k is None or v is None:
            raise TypeError("q, k and v may only be None where quantized is given")
        dtype = check_dtype(q, k, v)
    else:
        dtype = quantized.out_dtype
        q, k, v = kernel_operands(quantized)
    n = numerics or compose_numerics(lookup(variant).family, form, dtype)
    if (quantized is None) != (n.scaling != "dequantised"):
        have = "arrays" if quantized is None else "quantised operands"
        raise ValueError(f"scaling {n.scaling!r} does not go with {have}")
    tiles = tiles or lookup(variant).default_tiles(q.shape[-1])
    sigma = check_scale(scale, q.shape[-1])
    scaling = _scaling(n, sigma, quantized)
    mean = None if quantized is None else quantized.k_mean
    terms, lse = _empty(q, k, v, rows, TERMS)
    for block in score_blocks(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, rows=rows
    ):
        found, lse[block.index] = _kernel_bound(block, n, tiles, sigma, scaling, mean)
        for tag, term in found.items():
            terms[tag][block.index] = term
    return _assemble(terms, lse)


def kernel_operands(quantized: Any) -> tuple[Array, Array, Array]:
    """Return the operands that an INT8 kernel multiplies: dequantised, in float64, without mean.

    The mean that smoothing took from the keys shifts all scores of a row by sigma q.mean; the
    kernel gives it back to lse alone.
    """
    q, k, v = replace(quantized, k_mean=None).dequantize("float64")
    return q, k, v


def _empty(
    q: Array, k: Array, v: Array, rows: Array | None, tags: tuple[str, ...]
) -> tuple[dict[str, Array], Array]:
    """Allocate terms and lse, query heads split by key head."""
    xp = array_namespace(q, k, v)
    batch, heads, heads_kv, len_q, _, head_dim = check_shapes(q.shape, k.shape, v.shape)
    num_rows = len_q if rows is None else len(rows)
    split = split_heads(xp.zeros((batch, heads, num_rows, head_dim)), heads_kv)
    return {tag: xp.zeros(split.shape) for tag in tags}, xp.zeros(split.shape[:-1])


def _assemble(terms: dict[str, Array], lse: Array) -> Bound:
    """Merge the split heads; the bound's own float64 roundings are covered here."""
    return Bound({tag: merge_heads(t) * REFERENCE for tag, t in terms.items()}, merge_heads(lse))


def _exact(block: ScoreBlock) -> tuple[Array, Array, Array, Array, Array]:
    """Return P, lse, finite values, the output and which channels hold a non-finite value."""
    xp = array_namespace(block.S)
    finite = xp.isfinite(block.v)
    v = xp.where(finite, block.v, 0.0)
    P, lse = softmax_exact(block.S)
    # NOTE: a probability that underflows is still positive: a perturbation may make it the largest.
    P = xp.where(xp.isfinite(P), xp.where(block.admitted, xp.maximum(P, LEAST_P), 0.0), 0.0)
    return P, lse, v, P @ v, ~finite.all(axis=-2, keepdims=True)


def _kernel_bound(
    block: ScoreBlock, n: Numerics, tiles: Tiles, sigma: float, scaling: _Scaling, mean: Any
) -> tuple[dict[str, Array], Array]:
    """R2 to R7 of one block of rows: the terms of O, and the bound of lse."""
    xp = array_namespace(block.S)
    if block.S.shape[-1] == 0:
        zero = xp.zeros((*block.S.shape[:-1], block.q.shape[-1]))
        return dict.fromkeys(TERMS, zero), xp.zeros(block.S.shape[:-1])
    P, lse, v, o, spoilt = _exact(block)
    score = _perturb(block, n, tiles, sigma, scaling)
    count = block.admitted.sum(axis=-1).astype(np.float64)
    magnitude = xp.abs(v)
    total_v = magnitude.sum(axis=-2, keepdims=True)
    delta_o, P_plus, delta_lse, Z_minus = softmax_perturbation(P, score.d, v, o)

    # What l is at least, in units of its final maximum: the largest key has weight 2^-slack, and
    # the sum cannot be less than e^(lse - s_max) but for the perturbations.
    worst = (score.r2 + score.r3).max(axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        drop = xp.where(count > 0, lse - score.top, 0.0) - worst - LN2 * score.slack
    by_sum = Z_minus * xp.exp(xp.where(xp.isfinite(drop), xp.minimum(drop, 60.0), -60.0))
    by_max = 0.999 * xp.exp2(-2.0 * xp.minimum(score.slack, 99.0))
    l_least = xp.maximum(by_sum, by_max) * xp.exp(-EX2_LOG_ERROR * score.rises) / REFERENCE
    inverse_l = (1.0 / l_least)[..., None]

    # R5: P as an operand: half a unit in its last place, or half a subnormal but no more than P.
    rho = xp.zeros_like(P)
    if n.p_type != "float32":
        subnormal = HALF_SUBNORMAL[n.p_type] * inverse_l
        relative = UNIT_ROUNDOFF[n.p_type] * _mantissa_share(score, worst, n.online)
        rho = xp.maximum(relative * P_plus, xp.minimum(subnormal, P_plus))
    weighted = P_plus @ magnitude
    r5 = rho @ magnitude

    # R4: weights flushed to zero; then R6: the sums, in any order.
    flushed = FLUSHED_WEIGHT * total_v * inverse_l
    theta_o = _products(n.values, count, xp.minimum(count, -(-block.S.shape[-1] // 16)))
    theta_o = (1 + theta_o) * (1 + gamma(score.rises + (0 if n.online else 1), U)) - 1
    theta_l = gamma(xp.maximum(count - 1, 0.0) + score.rises, U)
    theta_l = theta_l + (1 + theta_l) * count * FLUSHED_WEIGHT / l_least
    theta_l = xp.minimum(theta_l, 1.0)
    with np.errstate(divide="ignore"):
        by_l = (1.0 if n.online else 1.0 + U) / (1.0 - theta_l) - 1.0
    underflow = (count + score.rises + 2)[..., None] * 2.0**-148
    underflow = underflow * inverse_l if n.online else underflow + 2.0**-149 * total_v
    r6 = theta_o[..., None] * (weighted + r5 + flushed) + underflow
    size = xp.abs(o) + delta_o + flushed + r5 + r6
    r6 = r6 + by_l[..., None] * size
    size = size + by_l[..., None] * size

    # R7: 1/l, times 1/l, and the store.
    r7 = xp.zeros_like(o)
    if n.online:
        r7 = ((1 + U) ** 2 - 1) * size + 2.0**-149
    r7 = r7 + half_ulp(size + r7, n.out_type)
    size = size + r7

    shares = _shares(P, score)
    terms = {tag: share * delta_o for tag, share in zip(TERMS, shares, strict=False)}
    terms["R4"] = terms["R4"] + flushed
    terms |= {"R5": r5, "R6": r6, "R7": r7}

    delta_lse = delta_lse + score.shift - xp.log1p(-xp.minimum(theta_l, 1 - U64))
    delta_lse = _lse_bound(block, lse, delta_lse, score, sigma, mean, scaling)
    overflows = xp.isinf(delta_lse)

    # Non-finite and out of range: no promise, under the tag of what breaks first.
    attends = count > 0
    usable = score.usable & (l_least > 0)
    largest = LARGEST[n.out_type]
    fits = size <= min(largest, MAX_FLOAT)
    fits &= total_v * xp.exp2(xp.minimum(score.slack, 99.0) + 1)[..., None] <= MAX_FLOAT
    for tag, term in terms.items():
        terms[tag] = xp.where((attends & usable)[..., None], term, 0.0)
    terms["R4"] = xp.where((attends & ~usable)[..., None], xp.inf, terms["R4"])
    terms["R6"] = xp.where(spoilt, xp.inf, terms["R6"])
    terms["R7"] = xp.where(attends[..., None] & ~fits, xp.inf, terms["R7"])
    delta_lse = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
    return terms, xp.where(overflows, xp.inf, delta_lse)


def _mantissa_share(score: _Perturbed, worst: Array, online: bool) -> Array | float:
    """R5: bound half_ulp(p) / (u p), between 1/2 and 1, where the binade of p is known.

    p lies within a factor 2^±uncertain of 2^exponent, in the units of its own step.
    """
    if not online:
        return 1.0
    xp = array_namespace(worst)
    uncertain = (score.d + worst[..., None]) / LN2 + score.slack[..., None]
    upper = score.exponent + uncertain
    share = xp.exp2(xp.minimum(2 * uncertain - (upper - xp.floor(upper)), 0.0))
    return share * REFERENCE


def _shares(P: Array, score: _Perturbed) -> list[Array]:
    """Split the effect of the scores' perturbation among R2, R3 and R4, by Σ p_j d_j."""
    xp = array_namespace(P)
    parts = [(P * r).sum(axis=-1, keepdims=True) for r in (score.r2, score.r3, score.r4)]
    whole = sum(parts)
    return [xp.where(whole > 0, part / xp.where(whole > 0, whole, 1.0), 1 / 3) for part in parts]


def _lse_bound(
    block: ScoreBlock,
    lse: Array,
    delta: Array,
    score: _Perturbed,
    sigma: float,
    mean: Any,
    scaling: _Scaling,
) -> Array:
    """R7 of the log-sum-exp: fl(fl(M + log2 l) LN2), and what smoothing gives back to it.

    `delta` is what perturbed scores and the rounding of l do to it.
    """
    xp = array_namespace(lse)
    lse = xp.where(xp.isfinite(lse), lse, 0.0)
    worst = (score.r2 + score.r3).max(axis=-1)
    log_l = xp.abs(lse - score.top) + delta + score.shift + worst + LN2 * score.slack  # |log l|
    size, roundings = xp.abs(lse), 3
    if mean is not None:
        batch, head, group, _ = block.index
        mu = as_float64(mean)[batch, head][:, :, None, None, :]
        dot = sigma * xp.abs((block.q * mu).sum(axis=-1))
        back = sigma * (xp.abs(block.q) * xp.abs(mu)).sum(axis=-1)
        # NOTE: the kernel adds to M, others to lse: both orders are covered.
        delta = delta + (gamma(block.q.shape[-1] + 8, U) + scaling.common) * back
        delta = xp.where(back * LOG2E <= MAX_FLOAT, delta, xp.inf)
        size, roundings = size + log_l + dot + back * U, 5
    delta = delta + LOG2F_ERROR * log_l
    return (delta + ((1 + U) ** roundings - 1) * (size + delta)) * REFERENCE


def quantisation(
    q: Array,
    k: Array,
    v: Array,
    quantized: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    rows: Array | None = None,
) -> Bound:
    r"""Bound |exact attention of INT8 operands - exact attention of the caller's arrays| (J3).

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array
        The caller's arrays, before quantisation.
    k, v : (batch, heads_kv, len_kv, head_dim) array
    quantized : QuantizedQKV
        What was made of them; its scales and its mean are used, its codes are not.
    scale, causal, causal_align, rows
        As for `cupyattn.reference.attention_exact`.

    Returns
    -------
    Bound
        One term, R1.

    Notes
    -----
    Codes of scale s leave |x - s code| <= max(s/2 (1 + 2^-15), |x| - 127 s) =: Δ, where
    the second number counts only if a static scale clips. Hence, with centred keys,

    .. math:: |δS_{ij}| \le σ \sum_d Δq_{id} |k_{jd}| + (|q_{id}| + Δq_{id}) Δk_{jd}

    and V's own rounding to 16 bits adds Σ p'_j |δv_j|.
    """
    xp = array_namespace(q, k, v)
    head_dim = q.shape[-1]
    sigma = check_scale(scale, head_dim)
    chosen = xp.arange(q.shape[2]) if rows is None else xp.asarray(rows)
    q_scale = _scale_of_row(quantized.q_scale, quantized.group_q, q.shape[:3])[:, :, chosen]
    q_scale = split_heads(q_scale, k.shape[1])[..., None]
    k_scale = _scale_of_row(quantized.k_scale, quantized.group_kv, k.shape[:3])
    k_scale = k_scale[:, :, None, :, None]
    v_type = quantized.v.dtype.name
    terms, lse = _empty(q, k, v, rows, ("R1",))
    for block in score_blocks(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, rows=rows
    ):
        if block.S.shape[-1] == 0:
            continue
        batch, head, _, _ = block.index
        P, exact_lse, values, o, spoilt = _exact(block)
        mean, subtraction = xp.zeros_like(block.k[..., :1, :]), 0.0
        if quantized.k_mean is not None:
            mean = as_float64(quantized.k_mean)[batch, head][:, :, None, None, :]
            subtraction = U  # R0
        q_abs, k_abs = xp.abs(block.q), xp.abs(block.k - mean)
        dq = _rounding_to_codes(q_abs, q_scale[block.index])
        dk = _rounding_to_codes(k_abs * (1 + subtraction), k_scale[batch, head])
        dk = dk + subtraction * k_abs
        d = sigma * (dq @ k_abs.swapaxes(-1, -2) + (q_abs + dq) @ dk.swapaxes(-1, -2))  # R1
        float64 = (q_abs + dq) @ (xp.abs(block.k) + k_abs + dk).swapaxes(-1, -2)
        d = (d + 2 * gamma(head_dim + 8, U64) * sigma * float64) * REFERENCE + 2.0**-45
        fine = xp.isfinite(block.S) & xp.isfinite(d)
        usable = (fine | ~block.admitted).all(axis=-1)
        delta_o, P_plus, delta_lse, _ = softmax_perturbation(
            P, xp.where(block.admitted & fine, d, 0.0), values, o
        )
        total = delta_o + gamma(2 * block.S.shape[-1] + 8, U64) * (P_plus @ xp.abs(values))
        if v_type != v.dtype.name:
            total = total + P_plus @ half_ulp(xp.abs(values), v_type)
            too_large = xp.abs(values) > LARGEST[v_type]
            spoilt = spoilt | too_large.any(axis=-2, keepdims=True)
        attends = block.admitted.any(axis=-1)
        total = xp.where(usable[..., None] & ~spoilt, total, xp.inf)
        terms["R1"][block.index] = xp.where(attends[..., None], total, 0.0)
        delta_lse = delta_lse + REFERENCE * sigma * (dq * xp.abs(mean)).sum(axis=-1)
        delta_lse = delta_lse + 2.0**-45 * (1 + xp.abs(xp.where(usable, exact_lse, 0.0)))
        lse[block.index] = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
    return _assemble(terms, lse)


def _scale_of_row(scale: Array, group: int, shape: tuple[int, ...]) -> Array:
    """Return the scale of every row in float64, as (batch, heads, length)."""
    xp = array_namespace(scale)
    return xp.broadcast_to(as_float64(scale)[..., xp.arange(shape[2]) // group], shape)


def _rounding_to_codes(x: Array, scale: Array) -> Array:
    """R1: the error of codes of magnitudes `x`: of code 0, of any other, of one that clips."""
    xp = array_namespace(x)
    rounded = xp.maximum(scale / 2 * (1 + 2.0**-15), x - 127 * scale)
    return xp.where(x < scale / 2 * (1 - 2.0**-15), x, rounded)
