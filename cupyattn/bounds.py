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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn import splits, value_bounds
from cupyattn.block_mask import BlockMask
from cupyattn.checks import check_dtype, check_limits, check_scale, check_shapes
from cupyattn.codes import check_one_sequence, portable_form
from cupyattn.numerics import (
    EX2_FLUSH,
    HALF_SUBNORMAL,
    UNIT_ROUNDOFF,
    Numerics,
    check_features,
)
from cupyattn.numerics import numerics as compose_numerics
from cupyattn.operand_bounds import preparation, rotation
from cupyattn.perturbation import (
    gamma,
    half_ulp,
    rounding_of_mean,
    softmax_perturbation,
    sum_of_operand,
)
from cupyattn.reference import ScoreBlock, score_blocks, softmax_exact
from cupyattn.registry import lookup
from cupyattn.rope import Rope, check_turned_before
from cupyattn.rounding import (
    FINITE_MAX,
    NEG_INF,
    Array,
    array_namespace,
    as_float64,
    merge_heads,
    scale_of_row,
    split_heads,
    value_scale_of_key,
)
from cupyattn.score_bounds import (
    EX2_LOG_ERROR,
    LEAST_P,
    LN2,
    LOG2E,
    MAX_FLOAT,
    REFERENCE,
    U64,
    Perturbed,
    Scaling,
    U,
    far_below,
    perturb,
    products,
    scaling_errors,
)
from cupyattn.scoring import check_smoothing
from cupyattn.splits import Splits
from cupyattn.tiles import Tiles

__all__ = [
    "TERMS",
    "Bound",
    "attention",
    "gamma",
    "half_ulp",
    "preparation",
    "quantisation",
    "rotation",
    "softmax_perturbation",
]

#: The terms of `attention`, in the order in which a kernel rounds.
TERMS = ("R2", "R3", "R4", "R5", "R6", "R7")

#: What flushing and underflow may take from the weight of one key: the flush of ex2, once for p and
#: once for alpha, times a p of at most 2^8.
FLUSHED_WEIGHT = 2.0**9 * EX2_FLUSH
#: Relative error of log2f: 1 ulp from the correctly rounded result (CUDA C++ Programming Guide,
#: mathematical functions), hence 3/2 ulp.
LOG2F_ERROR = 1.5 * 2.0**-23


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


def attention(
    q: Array | None,
    k: Array | None,
    v: Array | None,
    *,
    variant: str = "fa",
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
    form : {"portable", "sm90", "split"}, optional
        Form of the kernel; the one that takes calls of these lengths and tiles when omitted, the
        Hopper form aside, which needs its tiles alone.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `cupyattn.reference.attention_exact`.
    rope, rope_interleaved, rope_offset_q
        As for `cupyattn.attention`: the bound is about attention of the operands as the kernel
        turns them, `cupyattn.rope.Rope.turned`. `rotation` bounds what that rounds (R0).
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
        dtype, quantized = quantized.out_dtype, quantized.unpacked()
        q, k, v = kernel_operands(quantized)
        form = form or portable_form(quantized, softcap, bias)
        if quantized.v_codes is not None:  # the kernel sums V without its mean
            v = quantized.centred_values()
    sizes = check_shapes(q.shape, k.shape, v.shape)
    changed = any((softcap, mask is not None, bias is not None, block_mask is not None))
    form = form or lookup(variant).form_for(*sizes[3:5], tiles, changed=changed)
    turn = Rope.of(rope, rope_interleaved, rope_offset_q, *sizes[3:])
    if turn is not None:
        check_turned_before(quantized)
        q, k = turn.turned(q, k)
    n = numerics or compose_numerics(
        lookup(variant).family, form, dtype, quantized and quantized.config,
        softcap=bool(softcap), bias=bias is not None,
    )  # fmt: skip
    check_features(n, softcap, bias)
    if (quantized is None) != (n.scaling != "dequantised"):
        way_out = (
            "works on quantised operands: give quantized=cupyattn.quantize(q, k, v), with the "
            "quant of the call"
            if quantized is None
            else "works on q, k and v as they are: leave quantized out, or name fa_int8"
        )
        raise ValueError(f"{variant} {way_out}")
    blocks = (0, 0) if block_mask is None else block_mask.blocks
    limits = check_limits(causal, causal_align, window, *sizes[3:5])
    tiles = tiles or lookup(variant).tiles_for(
        q.shape[-1], form=form, lengths=sizes[3:5], causal=limits[1] is not None,
        block_mask=blocks, rows=splits.wanted_rows(*sizes[:4]),
    )  # fmt: skip
    sigma = check_scale(scale, q.shape[-1])
    scaling = scaling_errors(n, sigma, quantized, softcap)
    mean = None if quantized is None else quantized.k_mean
    v_mean = quantized.v_mean if n.by_tile else None
    v_scale = quantized.v_scale[:, :, 0] if n.shifts else None
    check_smoothing(softcap, mean)
    cut = None
    if n.splits:
        cut = splits.split(sizes, limits, tiles)
    terms, lse = _empty(q, k, v, rows, TERMS)
    for block in score_blocks(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, window=window,
        softcap=softcap, mask=mask, bias=bias, block_mask=block_mask, rows=rows,
    ):  # fmt: skip
        found, lse[block.index] = _kernel_bound(
            block, n, tiles, sigma, scaling, mean, v_mean, v_scale, cut
        )
        for tag, term in found.items():
            terms[tag][block.index] = term
    return _assemble(terms, lse)


def kernel_operands(quantized: Any) -> tuple[Array, Array, Array]:
    """Return the operands that an INT8 kernel multiplies: dequantised, in float64, without mean.

    The mean that smoothing took from the keys shifts all scores of a row by sigma q.mean; the
    kernel gives it back to lse alone.
    """
    check_one_sequence(quantized)
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
    block: ScoreBlock,
    n: Numerics,
    tiles: Tiles,
    sigma: float,
    scaling: Scaling,
    mean: Any,
    v_mean: Any,
    v_scale: Any,
    cut: Splits | None,
) -> tuple[dict[str, Array], Array]:
    """R2 to R7 of one block of rows: the terms of O, and the bound of lse."""
    xp = array_namespace(block.S)
    if block.S.shape[-1] == 0:
        zero = xp.zeros((*block.S.shape[:-1], block.q.shape[-1]))
        return dict.fromkeys(TERMS, zero), xp.zeros(block.S.shape[:-1])
    P, lse, v, o, spoilt = _exact(block)
    score = perturb(block, n, tiles, sigma, scaling, cut)
    count = block.admitted.sum(axis=-1).astype(np.float64)
    magnitude = xp.abs(v)
    total_v = magnitude.sum(axis=-2, keepdims=True)
    delta_o, P_plus, delta_lse, Z_minus = softmax_perturbation(P, score.d, v, o)

    # What l is at least, in units of its final maximum: the largest key has weight 2^-slack, and
    # the sum cannot be less than e^(lse - s_max) but for the perturbations.
    with np.errstate(invalid="ignore", over="ignore"):
        drop = xp.where(count > 0, lse - score.reach, 0.0) - LN2 * score.slack
    by_sum = Z_minus * xp.exp(xp.where(xp.isfinite(drop), xp.minimum(drop, 60.0), -60.0))
    by_max = 0.999 * xp.exp2(-2.0 * xp.minimum(score.slack, 99.0))
    l_least = xp.maximum(by_sum, by_max) * xp.exp(-EX2_LOG_ERROR * score.rises) / REFERENCE
    inverse_l = (1.0 / l_least)[..., None]

    # R5: P as an operand: half a unit in its last place, or half a subnormal but no more than P.
    rho = xp.zeros_like(P)
    if n.shifts:
        unit = value_bounds.units(P_plus, n.shifts, tiles)
        rho = value_bounds.shifted_rounding(P_plus, unit, tiles)
    elif n.by_tile:
        rho = value_bounds.code_rounding(P_plus, n, tiles, score.slack)
    elif n.p_type != "float32":
        subnormal = HALF_SUBNORMAL[n.p_type] * inverse_l
        # NOTE: with headroom M is not known from the scores, nor then where p lies in its binade.
        known = n.online and not n.headroom
        relative = UNIT_ROUNDOFF[n.p_type] * (_mantissa_share(score) if known else 1.0)
        rho = xp.maximum(relative * P_plus, xp.minimum(subnormal, P_plus))
    weighted = P_plus @ magnitude
    r5 = rho @ magnitude

    # R4: weights flushed to zero; then R6: the sums, in any order.
    flushed = FLUSHED_WEIGHT * total_v * inverse_l
    if n.shifts:
        theta_o = xp.zeros_like(count)  # whole numbers
    elif n.by_tile:
        theta_o = value_bounds.accumulation(count, block.S.shape[-1], n, tiles)
    else:
        theta_o = products(n.values, count, xp.minimum(count, -(-block.S.shape[-1] // 16)))
    further = (not n.online) + max(0, (n.pieces if cut is None else cut.slices) - 1)  # sums
    theta_o = (1 + theta_o) * (1 + gamma(score.rises + further, U)) - 1
    theta_l = gamma(xp.maximum(count - 1, 0.0) + score.rises + n.by_tile, U)
    theta_l = xp.minimum(theta_l + (1 + theta_l) * count * FLUSHED_WEIGHT / l_least, 1.0)
    least = 2.0**-142 if n.by_tile else 2.0**-148
    underflow = (count + score.rises + further + 2)[..., None] * least
    lost = (count * FLUSHED_WEIGHT + underflow[..., 0]) / l_least
    theta_n, rounded, share = theta_l, r5, xp.ones_like(count)
    if n.sums_operand and n.by_tile and not n.shifts:  # of codes, by the roundings of O
        r5, share = rounding_of_mean(rho, v, o, delta_o)
        theta_n = theta_o + (1 + theta_o) * lost / share
        theta_n = xp.where(rho.sum(axis=-1) < 1, xp.minimum(theta_n, 1.0), 1.0)
    elif n.sums_operand:  # in P.V itself, or of codes, step by step
        if n.shifts:
            lost = lost + value_bounds.dropped_of_l(unit, n.shifts)
        theta = theta_l if n.shifts else theta_o + (1 + theta_o) * U  # the factor is divided out
        theta_n = sum_of_operand(P_plus, rho, theta, lost)
    share = share[..., None]
    with np.errstate(divide="ignore"):
        by_l = (1.0 if n.online else 1.0 + U) / (1.0 - theta_n) - 1.0
    underflow = underflow * inverse_l if n.online else underflow + 2.0**-149 * total_v
    flushed = flushed / share
    r6 = theta_o[..., None] * ((weighted + rounded) / share + flushed) + underflow / share
    if n.shifts:
        r6 = r6 + value_bounds.dropped_by_shifts(unit, _of_block(v_scale, block))
    size = xp.abs(o) + delta_o + flushed + r5 + r6
    r6 = r6 + by_l[..., None] * size
    size = size + by_l[..., None] * size

    # R7: 1/l, times 1/l, and the store.
    r7, stored = xp.zeros_like(o), size
    if n.by_tile:
        r7, stored = value_bounds.with_mean(size, _of_block(v_mean, block), n.pieces)
    elif n.online:
        r7 = ((1 + U) ** 2 - 1) * size + 2.0**-149
        stored = size + r7
    cost, fits = value_bounds.store(o, stored, n)
    r7 = r7 + cost

    shares = _shares(P, score)
    terms = {tag: share * delta_o for tag, share in zip(TERMS, shares, strict=False)}
    terms["R4"] = terms["R4"] + flushed
    terms |= {"R5": r5, "R6": r6, "R7": r7}

    delta_lse = delta_lse + score.shift - xp.log1p(-xp.minimum(theta_l, 1 - U64))
    delta_lse = _lse_bound(block, lse, delta_lse, score, sigma, mean, scaling, n)
    overflows = xp.isinf(delta_lse)

    # Non-finite and out of range: no promise, under the tag of what breaks first.
    attends = count > 0
    usable = score.usable & (l_least > 0)
    largest_weight = xp.maximum(xp.minimum(score.slack, 99.0), n.headroom)
    codes = 256.0 if n.by_tile else 1.0  # sums of codes are that much larger than of P
    fits &= total_v * codes * xp.exp2(largest_weight + 1)[..., None] <= MAX_FLOAT
    for tag, term in terms.items():
        terms[tag] = xp.where((attends & usable)[..., None], term, 0.0)
    terms["R4"] = xp.where((attends & ~usable)[..., None], xp.inf, terms["R4"])
    terms["R6"] = xp.where(spoilt, xp.inf, terms["R6"])
    terms["R7"] = xp.where(attends[..., None] & ~fits, xp.inf, terms["R7"])
    delta_lse = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
    return terms, xp.where(overflows, xp.inf, delta_lse)


def _of_block(mean: Any, block: ScoreBlock) -> Array | None:
    """Return the mean of the keys or values of a block, (..., 1, head_dim)."""
    if mean is None:
        return None
    batch, head, _, _ = block.index
    return as_float64(mean)[batch, head][:, :, None, None, :]


def _mantissa_share(score: Perturbed) -> Array:
    """R5: bound half_ulp(p) / (u p), between 1/2 and 1, where the binade of p is known.

    p lies within a factor 2^±uncertain of 2^exponent, in the units of its own step.
    """
    xp = array_namespace(score.drift)
    uncertain = (score.d + score.drift) / LN2 + score.slack[..., None]
    upper = score.exponent + uncertain
    share = xp.exp2(xp.minimum(2 * uncertain - (upper - xp.floor(upper)), 0.0))
    return share * REFERENCE


def _shares(P: Array, score: Perturbed) -> list[Array]:
    """Split the effect of the scores' perturbation among R2, R3 and R4, by Σ p_j d_j."""
    xp = array_namespace(P)
    parts = [(P * r).sum(axis=-1, keepdims=True) for r in (score.r2, score.r3, score.r4)]
    whole = sum(parts)
    return [xp.where(whole > 0, part / xp.where(whole > 0, whole, 1.0), 1 / 3) for part in parts]


def _lse_bound(
    block: ScoreBlock,
    lse: Array,
    delta: Array,
    score: Perturbed,
    sigma: float,
    mean: Any,
    scaling: Scaling,
    n: Numerics,
) -> Array:
    """R7 of the log-sum-exp: fl(fl(M + log2 l) LN2), and what smoothing gives back to it.

    Where M is in natural units: fl(fma(log2 l, LN2, M)). `delta` is what perturbed scores and the
    rounding of l do to it.
    """
    xp = array_namespace(lse)
    lse = xp.where(xp.isfinite(lse), lse, 0.0)
    log_l = xp.abs(lse - score.top) + delta + score.shift + score.top_drift  # |log l|
    lower_M = n.headroom + (0 if n.subtracts_first else n.code_log2)
    log_l = log_l + LN2 * (score.slack + lower_M * REFERENCE)
    size, roundings = xp.abs(lse) + (log_l if n.subtracts_first else 0.0), 3
    if mean is not None:
        mu = _of_block(mean, block)
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
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Array | None = None,
    bias: Array | None = None,
    block_mask: BlockMask | None = None,
    rows: Array | None = None,
    prepared: tuple[Array, Array] | None = None,
) -> Bound:
    r"""Bound |exact attention of INT8 operands - exact attention of the caller's arrays| (J3).

    Parameters
    ----------
    q : (batch, heads, len_q, head_dim) array
        The caller's arrays, before quantisation.
    k, v : (batch, heads_kv, len_kv, head_dim) array
    quantized : QuantizedQKV
        What was made of them; its scales, zero points and mean are used, its codes are not.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `cupyattn.reference.attention_exact`.
    prepared : (array, array), optional
        Where q and k are those that `cupyattn.preparation.Preparation.exact` returns, how far what
        was quantised may be from them: `preparation`.

    Returns
    -------
    Bound
        One term, R1.

    Notes
    -----
    Codes of scale s leave |x - s code| <= max(s/2 (1 + 2^-15), |x| - 127 s) =: Δ, where
    the second number counts only if a static scale clips; with zero points the first is
    s/2 (1 + 2^-12). Hence, with centred keys,

    .. math:: |δS_{ij}| \le σ \sum_d Δq_{id} |k_{jd}| + (|q_{id}| + Δq_{id}) Δk_{jd}

    where operands that were prepared add their error to Δ (Q7),
    and V's own rounding to 16 bits adds Σ p'_j |δv_j|. A softcap is 1-Lipschitz and a bias the same
    on both sides: neither adds anything.
    """
    xp = array_namespace(q, k, v)
    head_dim = q.shape[-1]
    sigma = check_scale(scale, head_dim)
    chosen = xp.arange(q.shape[2]) if rows is None else xp.asarray(rows)
    largest = quantized.config.largest_code
    of_q, of_k = (
        [
            None if a is None else _row_scales(a, group, shape)
            for a in (getattr(quantized, f"{name}_scale"), getattr(quantized, f"{name}_zero"))
        ]
        for name, group, shape in (
            ("q", quantized.group_q, q.shape[:3]),
            ("k", quantized.group_kv, k.shape[:3]),
        )
    )
    q_scale, q_zero = (
        None if a is None else split_heads(a[:, :, chosen], k.shape[1])[..., None] for a in of_q
    )
    k_scale, k_zero = (None if a is None else a[:, :, None, :, None] for a in of_k)
    errors = None
    if prepared is not None:
        errors = split_heads(prepared[0][:, :, chosen], k.shape[1]), prepared[1][:, :, None]
    terms, lse = _empty(q, k, v, rows, ("R1",))
    check_smoothing(softcap, quantized.k_mean)
    for block in score_blocks(
        q, k, v, scale=scale, causal=causal, causal_align=causal_align, window=window,
        softcap=softcap, mask=mask, bias=bias, block_mask=block_mask, rows=rows,
    ):  # fmt: skip
        if block.S.shape[-1] == 0:
            continue
        batch, head, _, _ = block.index
        P, exact_lse, values, o, spoilt = _exact(block)
        mean, subtraction = xp.zeros_like(block.k[..., :1, :]), 0.0
        if quantized.k_mean is not None:
            mean, subtraction = _of_block(quantized.k_mean, block), U  # R0
        centred = block.k - mean
        q_abs, k_abs = xp.abs(block.q), xp.abs(centred)
        dq, dk = (0.0, 0.0) if errors is None else (errors[0][block.index], errors[1][batch, head])
        dq = _code_rounding(block.q, dq, q_scale, q_zero, block.index, largest)
        dk = dk + subtraction * (k_abs + dk)
        dk = _code_rounding(centred, dk, k_scale, k_zero, (batch, head), largest)
        d = sigma * (dq @ k_abs.swapaxes(-1, -2) + (q_abs + dq) @ dk.swapaxes(-1, -2))  # R1
        float64 = (q_abs + dq) @ (xp.abs(block.k) + k_abs + dk).swapaxes(-1, -2)
        d = (d + 2 * gamma(head_dim + 8, U64) * sigma * float64) * REFERENCE + 2.0**-45
        fine = xp.isfinite(block.S) & xp.isfinite(d)
        usable = (fine | ~block.admitted).all(axis=-1)
        counts = block.admitted & fine
        S = xp.where(counts, block.S, NEG_INF)
        top = xp.where(counts.any(axis=-1), S.max(axis=-1), 0.0)
        S = xp.where(counts, S, top[..., None])
        d = xp.where(counts, d + 4 * U64 * xp.abs(S), 0.0)  # the softcap and the bias of float64
        d = xp.where(far_below(S, top, d), 0.0, d)
        delta_o, P_plus, delta_lse, _ = softmax_perturbation(P, d, values, o)
        total = delta_o + gamma(2 * block.S.shape[-1] + 8, U64) * (P_plus @ xp.abs(values))
        dv = _value_rounding(values, v.dtype.name, quantized, block)
        total = total + P_plus @ xp.where(xp.isfinite(dv), dv, 0.0)
        spoilt = spoilt | (~xp.isfinite(dv)).any(axis=-2, keepdims=True)
        attends = block.admitted.any(axis=-1)
        total = xp.where(usable[..., None] & ~spoilt, total, xp.inf)
        terms["R1"][block.index] = xp.where(attends[..., None], total, 0.0)
        delta_lse = delta_lse + REFERENCE * sigma * (dq * xp.abs(mean)).sum(axis=-1)
        delta_lse = delta_lse + 2.0**-45 * (1 + xp.abs(xp.where(usable, exact_lse, 0.0)))
        lse[block.index] = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
    return _assemble(terms, lse)


def _code_rounding(
    x: Array, error: Any, scale: Array, zero: Array, index: Any, largest: int
) -> Array:
    """R1: what codes do to each number of a block of Q or K that had an error before."""
    xp = array_namespace(x)
    if zero is None:
        size = xp.abs(x) + error
        return error + value_bounds.rounding_to_codes(size, scale[index], largest)
    ends = (
        value_bounds.rounding_with_zero_points(x + e, scale[index], zero[index])
        for e in (error, -error)
    )
    return error + xp.maximum(*ends)


def _value_rounding(values: Array, dtype: str, quantized: Any, block: ScoreBlock) -> Array:
    """R1 of V: what 16 bits or codes do to each value, infinite where they do not reach it."""
    xp = array_namespace(values)
    if quantized.form == "portable":
        v_type = quantized.v.dtype.name
        if v_type == dtype:
            return xp.zeros_like(values)
        error = half_ulp(xp.abs(values), v_type)
        return xp.where(xp.abs(values) > FINITE_MAX[v_type], xp.inf, error)
    batch, head, _, _ = block.index
    by_key = value_scale_of_key(quantized.v_scale[batch, head], quantized.group_v, values.shape[-2])
    mean, subtraction = _of_block(quantized.v_mean, block), 0.0
    centred, scale = values, as_float64(by_key)[:, :, None]
    if mean is not None:
        centred, subtraction = values - mean, U  # R0
    n = compose_numerics("int8", "pv8", dtype, quantized.config)
    size, widened = xp.abs(centred), centred * (1 + subtraction)
    if quantized.v_zero is None:
        error = value_bounds.rounding_of_values(xp.abs(widened), scale, n)
    else:
        zero = quantized.v_zero[batch, head]
        zero = value_scale_of_key(zero, quantized.group_v, values.shape[-2])[:, :, None]
        error = value_bounds.rounding_with_zero_points(widened, scale, zero)
    return error + subtraction * size


def _row_scales(scale: Array, group: int, shape: tuple[int, ...]) -> Array:
    """Return the scale of every row in float64, as (batch, heads, length)."""
    xp = array_namespace(scale)
    return xp.broadcast_to(scale_of_row(as_float64(scale), group, shape[2]), shape)
