"""How far a kernel may be from exact attention: element-wise a-priori bounds, in float64.

`attention` bounds what the kernel itself may do to the operands that it received (judgement J2,
rounding points R2 to R7); `quantisation` bounds what INT8 operands may do to the caller's arrays
(J3, R1). Both are computed from the actual inputs and scales, never from an output, on whichever
kind of array they are given.

Every formula is proved in docs/MATH_REFERENCE.md: [L33] and the like are its lemmas. In
short: all that happens to the scores is collected into one number d_j per score, a bound of the
perturbation of the score that the kernel in effect used (R2, R3, R4). `softmax_perturbation` turns
d into a bound on the output. The roundings of P, of the two sums and of the result (R5, R6, R7)
follow as factors 1 + theta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.groups import merge_heads, value_scale_of_key
from cupyattn.arrays.interchange import as_it_is, operands
from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace, as_float64, check_values
from cupyattn.bounds import codes, tensor_core, values
from cupyattn.bounds.bound import Bound, assemble, empty, exact, of_block, widest
from cupyattn.bounds.foreign import bound_foreign
from cupyattn.bounds.perturbation import (
    gamma,
    rounding_of_mean,
    softmax_perturbation,
    sum_of_operand,
    weight_shift,
)
from cupyattn.bounds.scores import (
    ABOVE_BY_SHIFTS,
    EX2_LOG_ERROR,
    LN2,
    LOG2E,
    MAX_FLOAT,
    REFERENCE,
    U64,
    Perturbed,
    Scaling,
    U,
    perturb,
    products,
    scaling_errors,
)
from cupyattn.kernels.numerics import (
    EX2_FLUSH,
    HALF_SUBNORMAL,
    LEAST_NORMAL,
    MOST_PIECES,
    UNIT_ROUNDOFF,
    Numerics,
    check_features,
)
from cupyattn.kernels.splits import Splits
from cupyattn.kernels.tile_pieces import share_out
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import points_to_our_names
from cupyattn.problem.form import Kernel
from cupyattn.problem.received import Received, receive_arguments, receive_in_every_form
from cupyattn.problem.scoring import check_smoothing
from cupyattn.quant.operand_protocol import check_one_sequence
from cupyattn.reference.exact import ScoreBlock, blocks_of

#: The terms of `attention`, in the order in which a kernel rounds.
TERMS = ("R2", "R3", "R4", "R5", "R6", "R7")

#: [L29] What flushing and underflow may take from the weight of one key: the flush of ex2, once for
#: p and once for alpha, times a p of at most 2^8.
FLUSHED_WEIGHT = 2.0**9 * EX2_FLUSH
#: Relative error of log2f: 1 ulp from the correctly rounded result (CUDA C++ Programming Guide,
#: mathematical functions), hence 3/2 ulp.
LOG2F_ERROR = 1.5 * 2.0**-23


@points_to_our_names
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
        Form of the kernel. When omitted, and `numerics` with it, the bound is the widest of the
        forms that this version runs for such operands on any architecture.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, rows
        As for `cupyattn.reference.attention_exact`.
    rope, rope_interleaved, rope_offset_q
        As for `cupyattn.attention`: the bound is about attention of the operands as the kernel
        turns them, `cupyattn.problem.rope.Rope.turned`. `rotation` bounds what that rounds (R0).
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
    q, k, v = operands(q=q, k=k, v=v)
    check_values("rows", rows)
    if quantized is None and (q is None or k is None or v is None):
        raise TypeError("q, k and v may only be None where quantized is given")
    given = locals()
    if form is not None or numerics is not None:
        return bound_kernel(receive_arguments(given), rows=rows, numerics=numerics)
    return widest([bound_kernel(one, rows=rows) for one in receive_in_every_form(given)])


def bound_kernel(
    received: Received, *, rows: Array | None = None, numerics: Numerics | None = None
) -> Bound:
    """Bound what a kernel does to the operands that it received.

    Parameters
    ----------
    received : Received
    rows, numerics
        As for `attention`.
    """
    if numerics is not None and numerics.foreign is not None:
        return bound_foreign(received, numerics, rows=rows)
    (q, k, v), shared = taken_by(received, numerics)
    terms, lse = empty(q, k, v, rows, TERMS)
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        found, lse[block.index] = _block_bound(block, shared)
        for tag, term in found.items():
            terms[tag][block.index] = term
    return assemble(terms, lse)


def predict_kernel(received: Received, *, rows: Array | None = None) -> codes.Prediction:
    """Predict the codes of P, and with them the output, of a kernel that has codes of P.

    Parameters
    ----------
    received : Received
        With the tiles of the call.
    rows
        As for `attention`.

    Returns
    -------
    Prediction
        Of shapes (batch, heads, len(rows), head_dim) and (batch, heads, len(rows)).
    """
    (q, k, v), shared = taken_by(received)
    n, tiles = shared.n, shared.tiles
    if not n.by_tile:
        raise ValueError(f"codes of P are predicted, and P of this kernel is {n.p_type}")
    if not _may_cut(received.kernel):
        n = replace(n, pieces=0)
    found, in_doubt = empty(q, k, v, rows, ("o", "bound"))
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        if not block.S.shape[-1]:
            continue
        score = perturb(block, n, tiles, shared.sigma, shared.scaling)
        mean, v_scale = of_block(shared.v_mean, block), of_block(shared.v_scale, block)
        if n.values == "fp8":
            v_scale = _scales_by_key(received.quantized, block)
        one = codes.predict(block, score, n, tiles, shared.scaling.common, mean, v_scale)
        found["o"][block.index], found["bound"][block.index] = one.o, one.bound
        in_doubt[block.index] = one.in_doubt
    return codes.Prediction(*map(merge_heads, (found["o"], found["bound"], in_doubt)))


def _may_cut(kernel: Kernel) -> bool:
    """Whether the lengths of a call let its tiles be cut into pieces along the keys."""
    call, tiles = kernel.launched, kernel.tiles
    # A record of form and tiles alone does not say whether heads that share keys were stacked.
    whole = call.causal and not call.stack and call.heads == call.heads_kv
    if not kernel.row.pieces or call.window or whole:
        return False
    steps = -(-call.len_kv // tiles.block_kv)
    return share_out(1, steps, MOST_PIECES + 1, tiles.block_kv).cut > 0


def taken_by(
    received: Received, numerics: Numerics | None = None
) -> tuple[tuple[Array, Array, Array], Shared]:
    """Return q, k and v as a kernel multiplies and sums them, and what its bounds share.

    Parameters
    ----------
    received, numerics
        As for `bound_kernel`.
    """
    kernel, options, quantized = received.kernel, received.scores, received.quantized
    call = kernel.call
    n = numerics or kernel.numerics(quantized and quantized.config)
    check_features(n, options.softcap, options.bias)
    if (quantized is None) != (n.scaling != "dequantised"):
        way_out = (
            "works on quantised operands: give quantized=cupyattn.quantize(q, k, v), with the "
            "quant of the call"
            if quantized is None
            else "works on q, k and v as they are: leave quantized out, or name fa_int8"
        )
        raise ValueError(f"{kernel.variant.name} {way_out}")
    if quantized is None:
        q, k, v = received.prepared
    else:
        quantized = quantized.unpacked()
        q, k, v = kernel_operands(quantized)
        if quantized.v_codes is not None:  # the kernel sums V without its mean
            v = quantized.centred_values()
        check_smoothing(options.softcap, quantized.k_mean)
    shared = Shared(
        n, kernel.tiles, call.scale, scaling_errors(n, call.scale, quantized, call.softcap),
        None if quantized is None else quantized.k_mean,
        quantized.v_mean if n.by_tile else None,
        _largest_scales(quantized.v_scale) if n.shifts or n.values == "fp8" else None,
        kernel.cut if n.splits else None,
    )  # fmt: skip
    return (q, k, v), shared


def _largest_scales(v_scale: Array) -> Array:
    """Return the largest scale of each channel of V, 0 where there are no keys."""
    return v_scale.max(axis=2) if v_scale.shape[2] else v_scale.sum(axis=2)


def _scales_by_key(quantized: Any, block: ScoreBlock) -> Array:
    """Return the scales of codes of V as the values of a block, (..., keys, head_dim)."""
    batch, head, _, _ = block.index
    scale, keys = quantized.v_scale[batch, head], block.v.shape[-2]
    return as_float64(value_scale_of_key(scale, quantized.group_v, keys))[:, :, None]


@dataclass(frozen=True)
class Shared:
    """What the bounds of all blocks of a call share.

    Parameters
    ----------
    n : Numerics
    tiles : Tiles
    sigma : float
        Softmax scale.
    scaling : Scaling
        R3.
    mean : (batch, heads_kv, head_dim) array or None
        What smoothing took from the keys.
    v_mean : (batch, heads_kv, head_dim) array or None
        The same of V, where the kernel sums codes of V.
    v_scale : (batch, heads_kv, head_dim) array or None
        The largest scale of each channel of V, where the kernel drops bits of its sums.
    cut : Splits or None
    """

    n: Numerics
    tiles: Tiles
    sigma: float
    scaling: Scaling
    mean: Any
    v_mean: Any
    v_scale: Any
    cut: Splits | None


def kernel_operands(quantized: Any) -> tuple[Array, Array, Array]:
    """Return the operands that an INT8 kernel multiplies: dequantised, in float64, without mean.

    Any mean will do [L17], so one that pruning hands on, too [L53].

    The mean that smoothing took from the keys shifts all scores of a row by sigma q.mean; the
    kernel gives it back to lse alone.
    """
    check_one_sequence(quantized)
    q, k, v = replace(quantized, k_mean=None, as_given=as_it_is).dequantize("float64")
    return q, k, v


def _block_bound(block: ScoreBlock, shared: Shared) -> tuple[dict[str, Array], Array]:
    """R2 to R7 of one block of rows: the terms of O, and the bound of lse."""
    n, tiles, sigma, cut = shared.n, shared.tiles, shared.sigma, shared.cut
    xp = array_namespace(block.S)
    if block.S.shape[-1] == 0:
        zero = xp.zeros((*block.S.shape[:-1], block.q.shape[-1]))
        return dict.fromkeys(TERMS, zero), xp.zeros(block.S.shape[:-1])
    P, lse, v, o, spoilt = exact(block)
    score = perturb(block, n, tiles, sigma, shared.scaling, cut)
    count = block.admitted.sum(axis=-1).astype(np.float64)
    magnitude = xp.abs(v)
    total_v = magnitude.sum(axis=-2, keepdims=True)
    delta_o, P_plus, delta_lse, Z_minus = softmax_perturbation(P, score.d, v, o)

    l_least = least_sum(score, lse, Z_minus)
    inverse_l = (1.0 / l_least)[..., None]

    # R5: P as an operand: half a unit in its last place, or half a subnormal, at most P [L34].
    rho = xp.zeros_like(P)
    if n.shifts:
        unit = values.units(P_plus, n.shifts, tiles)
        rho = values.shifted_rounding(P_plus, unit, tiles)
    elif n.by_tile:
        rho = values.code_rounding(P_plus, n, tiles, score.slack)
    elif n.p_type != "float32":
        rho = operand_rounding(P_plus, n, score, inverse_l)
    weighted = P_plus @ magnitude
    r5 = rho @ magnitude

    # R4: weights flushed to zero; then R6: the sums, in any order [L35].
    flushed = FLUSHED_WEIGHT * total_v * inverse_l
    if n.shifts:
        theta_o = xp.zeros_like(count)  # whole numbers
    elif n.by_tile:
        theta_o = values.accumulation(count, block.S.shape[-1], n, tiles)
    else:
        theta_o = products(n.values, count, xp.minimum(count, -(-block.S.shape[-1] // 16)))
    further = (not n.online) + max(0, (n.pieces if cut is None else cut.slices) - 1)  # sums
    of_products, of_rises = theta_o, gamma(score.rises + further, U)
    theta_o = (1 + of_products) * (1 + of_rises) - 1
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
            lost = lost + values.dropped_of_l(unit, n.shifts)
        theta = theta_l if n.shifts else theta_o + (1 + theta_o) * U  # the factor is divided out
        theta_n = sum_of_operand(P_plus, rho, theta, lost)
    share = share[..., None]
    with np.errstate(divide="ignore"):
        by_l = (1.0 if n.online else 1.0 + U) / (1.0 - theta_n) - 1.0
    underflow = underflow * inverse_l if n.online else underflow + 2.0**-149 * total_v
    flushed = flushed / share
    multiplied = weighted + rounded
    if n.values == "fp8":
        step = values.code_step(P_plus, n, tiles, score.slack)
        scale = of_block(shared.v_scale, block)
        multiplied = values.aligned_products(P_plus + rho, step, magnitude, scale)
    multiplied = multiplied / share + flushed
    r6 = theta_o[..., None] * multiplied
    if n.values == "tensor_core" and n.p_type in LEAST_NORMAL:
        moved = weight_shift(P, P_plus, score.d, delta_lse) @ magnitude + r5 + flushed
        lost_bits = tensor_core.cut_off(
            P, v, moved, multiplied, score.rises, from_first=cut is None and not n.pieces
        )
        rescaled = ((1 + of_products) * of_rises)[..., None] * multiplied
        r6 = xp.fmin(r6, (1 + of_rises)[..., None] * lost_bits + rescaled)
        r6 = r6 + tensor_core.cut_off_beside_small(count, v, inverse_l, n)
    r6 = r6 + underflow / share
    if n.shifts:
        r6 = r6 + values.dropped_by_shifts(unit, of_block(shared.v_scale, block))
    size = xp.abs(o) + delta_o + flushed + r5 + r6
    r6 = r6 + by_l[..., None] * size
    size = size + by_l[..., None] * size

    # R7: 1/l, times 1/l, and the store.
    r7, stored = xp.zeros_like(o), size
    block_mean = of_block(shared.v_mean, block)
    if n.by_tile:
        r7, stored = values.with_mean(size, block_mean, n.pieces)
    elif n.online:
        r7 = ((1 + U) ** 2 - 1) * size + 2.0**-149
        stored = size + r7
    # NOTE: the number that is stored has the mean of V, o has not.
    exact_o = o if block_mean is None else o + block_mean
    cost, fits = values.store(exact_o, stored, n)
    r7 = r7 + cost
    if n.pieces > 1 and n.shifts and block_mean is not None:  # a piece leaves l times the mean
        fits &= xp.abs(block_mean) * 2.0**n.shifts.sum_bits <= MAX_FLOAT

    of_score_errors = _shares(P, score)
    terms = {tag: share * delta_o for tag, share in zip(TERMS, of_score_errors, strict=False)}
    terms["R4"] = terms["R4"] + flushed
    terms |= {"R5": r5, "R6": r6, "R7": r7}

    delta_lse = delta_lse + score.shift - xp.log1p(-xp.minimum(theta_l, 1 - U64))
    delta_lse = _lse_bound(block, lse, delta_lse, score, shared)
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


def least_sum(score: Perturbed, lse: Array, Z_minus: Array) -> Array:
    """Bound l from below, in units of its final maximum [L33].

    The largest key has weight 2^-slack, and the sum cannot be less than e^(lse - s_max) but for the
    perturbations.
    """
    xp = array_namespace(lse)
    with np.errstate(invalid="ignore", over="ignore"):
        drop = xp.where(lse > NEG_INF, lse - score.reach, 0.0) - LN2 * score.slack
    by_sum = Z_minus * xp.exp(xp.where(xp.isfinite(drop), xp.minimum(drop, 60.0), -60.0))
    by_max = 0.999 * xp.exp2(-2.0 * xp.minimum(score.slack, 99.0))
    return xp.maximum(by_sum, by_max) * xp.exp(-EX2_LOG_ERROR * score.rises) / REFERENCE


def operand_rounding(P_plus: Array, n: Numerics, score: Perturbed, inverse_l: Array) -> Array:
    """R5: bound what rounding P to 16 bits does to each probability [L34]."""
    xp = array_namespace(P_plus)
    subnormal = HALF_SUBNORMAL[n.p_type] * inverse_l
    # NOTE: with headroom M is not known from the scores, nor then where p lies in its binade.
    known = n.online and not n.headroom
    relative = UNIT_ROUNDOFF[n.p_type] * (_mantissa_share(score) if known else 1.0)
    return xp.maximum(relative * P_plus, xp.minimum(subnormal, P_plus))


def _mantissa_share(score: Perturbed) -> Array:
    """R5: bound half_ulp(p) / (u p), between 1/2 and 1, where the binade of p is known [L34].

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
    errors = [(P * r).sum(axis=-1, keepdims=True) for r in (score.r2, score.r3, score.r4)]
    whole = sum(errors)
    return [xp.where(whole > 0, part / xp.where(whole > 0, whole, 1.0), 1 / 3) for part in errors]


def _lse_bound(
    block: ScoreBlock,
    lse: Array,
    delta: Array,
    score: Perturbed,
    shared: Shared,
) -> Array:
    """R7 of the log-sum-exp [L38]: fl(fl(M + log2 l) LN2), and what smoothing gives back [L17].

    Where M is in natural units: fl(fma(log2 l, LN2, M)). `delta` is what perturbed scores and the
    rounding of l do to it.
    """
    xp = array_namespace(lse)
    n, sigma, mean, scaling = shared.n, shared.sigma, shared.mean, shared.scaling
    lse = xp.where(xp.isfinite(lse), lse, 0.0)
    log_l = xp.abs(lse - score.top) + delta + score.shift + score.top_drift  # |log l|
    lower_M = n.headroom + (0 if n.subtracts_first else n.code_log2)
    if n.shifts:  # M is whole, below the largest score or above it [L59]
        lower_M = ABOVE_BY_SHIFTS
    log_l = log_l + LN2 * (score.slack + lower_M * REFERENCE)
    size, roundings = xp.abs(lse) + (log_l if n.subtracts_first else 0.0), 3
    if mean is not None:
        mu = of_block(mean, block)
        dot = sigma * xp.abs((block.q * mu).sum(axis=-1))
        back = sigma * (xp.abs(block.q) * xp.abs(mu)).sum(axis=-1)
        # NOTE: the kernel adds to M, others to lse: both orders are covered.
        delta = delta + (gamma(block.q.shape[-1] + 8, U) + scaling.common) * back
        delta = xp.where(back * LOG2E <= MAX_FLOAT, delta, xp.inf)
        size, roundings = size + log_l + dot + back * U, 5
    delta = delta + LOG2F_ERROR * log_l
    return (delta + ((1 + U) ** roundings - 1) * (size + delta)) * REFERENCE
