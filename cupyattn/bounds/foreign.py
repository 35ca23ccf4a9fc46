"""Bound of the error of another library's kernel, from the roundings that its documents name.

Its tiles and its order of operations are unknown, so the bound covers every usual one.
docs/MATH_REFERENCE.md, §14, proves the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cupyattn.arrays.groups import split_heads
from cupyattn.arrays.kinds import FINITE_MAX, NEG_INF, Array, array_namespace, as_float64
from cupyattn.bounds import values
from cupyattn.bounds.bound import Bound, assemble, empty, exact, promised, shares
from cupyattn.bounds.perturbation import gamma, softmax_perturbation
from cupyattn.bounds.scores import (
    FAR_BELOW,
    MAX_FLOAT,
    REFERENCE,
    U64,
    U,
    count_rises,
    far_below,
    far_keys,
)
from cupyattn.kernels.numerics import (
    EX2_FLUSH,
    FP8_ROUNDOFF,
    HALF_SUBNORMAL,
    TENSOR_CORE_ROUNDOFF,
    UNIT_ROUNDOFF,
    Foreign,
    Numerics,
)
from cupyattn.problem.attention import KernelCall
from cupyattn.reference.exact import ScoreBlock, blocks_of

#: The terms of `bound_foreign`, in the order in which a kernel rounds.
TERMS = ("R1", "R2", "R3", "R4", "R5", "R6", "R7")
#: Roundoff [L71] [L73] of one step of a sum, truncated or not. "fp22" is the tensor cores'
#: accumulator of 8-bit floats.
ACCUMULATORS = {"float32": TENSOR_CORE_ROUNDOFF, "float16": 2.0**-10, "fp22": FP8_ROUNDOFF}
#: Error of a code [L70], relative to its number and to the largest number that shares its scale.
CODES = {"int8": (0.0, 1 / 254), "e4m3": (2.0**-4, 2.0**-10 / 448)}
#: Factor by which a scale of codes may exceed the scale that the largest number needs [L70].
SCALE_SLACK = 1.0 + 2.0**-6
#: Roundoff of P [L73] and half its smallest number, if its largest weight is 1. The largest code of
#: P is at least 256.
OPERANDS = {
    "float32": (0.0, 0.0),
    "float16": (UNIT_ROUNDOFF["float16"], HALF_SUBNORMAL["float16"]),
    "bfloat16": (UNIT_ROUNDOFF["bfloat16"], HALF_SUBNORMAL["bfloat16"]),
    "e4m3": (2.0**-4, 2.0**-10 / 256),
}
#: Least number of keys of a step, if the order of keys is unknown.
LEAST_STEP = 16
#: Largest number of slices of the keys whose results are merged, if keys may be split.
MOST_SLICES = 128
#: Numbers, weights and products below this may be flushed to zero [L73].
FLUSH = 2.0 * EX2_FLUSH
#: Roundings [L71] [L74] of scales, biases and divisions that a kernel may add anywhere.
ROUNDINGS = 8
#: Roundings of the argument of an exponential [L72], each of the largest score.
ARGUMENT_ROUNDINGS = 10
#: Stores of a score before the bias [L71]: the product, scaled; with a softcap also divided by it,
#: its tanh, and that multiplied.
STORES, CAPPED_STORES = 2, 5
#: Error of a tanh that is made of exponentials, relative to 1 [L71].
TANH_ERROR = 2.0**-20
#: Error of a logarithm in lse and in the weights of slices [L74], natural units.
LOG_ERROR = 2.0**-20


def bound_foreign(received: KernelCall, n: Numerics, *, rows: Array | None = None) -> Bound:
    """Bound the error of another library's kernel for the caller's operands.

    Parameters
    ----------
    received : KernelCall
        A call with arrays. Its rung is ignored.
    n : Numerics
        Must have `Foreign`.
    rows : 1-D integer array, optional
        Query rows to look at.

    Returns
    -------
    Bound
        Terms R1 to R7.

    Raises
    ------
    ValueError
        If the operands are already quantised.
    """
    f = n.foreign
    if f is None:
        raise ValueError("numerics must be a result of cupyattn.testing.numerics")
    call, options = received.kernel.call, received.scores
    if received.quantized is not None:
        raise ValueError(
            f"{f.name} is judged by the caller's q, k and v: leave quantized out, and name its "
            "codes by cupyattn.testing.numerics(..., qk='int8')"
        )
    q, k, v = received.prepared
    sizes = sizes_of(q, k, v, f)
    n = replace(n, q_type=call.dtype, out_type=f.out_type or call.dtype)
    terms, lse = empty(q, k, v, rows, TERMS)
    for block in blocks_of(q, k, v, call.scale, options, rows):
        found, lse[block.index], _ = block_bound(block, n, f, call.scale, call.softcap, sizes)
        for tag, term in found.items():
            terms[tag][block.index] = term
    return assemble(terms, lse)


@dataclass(frozen=True)
class Sizes:
    """Largest magnitudes that share a scale, and the mean of the keys, of split heads.

    Shapes (batch, heads_kv, group, 1, 1), and (batch, heads_kv, 1, 1, head_dim) of the mean.
    """

    q: Array
    k: Array
    v: Array
    k_mean: Array


def sizes_of(q: Array, k: Array, v: Array, f: Foreign) -> Sizes:
    """Return the largest magnitudes of a head of Q, K and V, or of all for 8-bit floats [L70].

    K may lose its mean before it is quantised, so its entry is the larger of both cases.
    """

    def largest(x: Array, codes: str | None) -> Array:
        xp = array_namespace(x)
        over = xp.zeros((*x.shape[:2], 1, 1))
        if codes is None or x.size == 0:
            return over
        # NOTE: one number that is not finite spoils the scale of all numbers that share it.
        over = xp.where(xp.isfinite(x), xp.abs(x), xp.inf).max(axis=(-2, -1), keepdims=True)
        return xp.zeros_like(over) + over.max() if codes == "e4m3" else over

    heads_kv = k.shape[1]
    k = k[:, :, :-1] if f.sinks else k
    q, k, v = map(as_float64, (q, k, v))
    xp = array_namespace(k)
    mean = xp.zeros((*k.shape[:2], 1, k.shape[3]))
    of_k = largest(k, f.qk_codes)
    if f.qk_codes and k.shape[2]:
        with np.errstate(invalid="ignore", over="ignore"):
            mean = k.mean(axis=2, keepdims=True)
            of_k = xp.maximum(of_k, largest(k - mean, f.qk_codes) * (1 + 2.0**-7))
        mean = xp.where(xp.isfinite(mean), xp.abs(mean), 0.0)
    return Sizes(
        split_heads(largest(q, f.qk_codes), heads_kv), split_heads(of_k, heads_kv),
        split_heads(largest(v, f.v_codes), heads_kv), split_heads(mean, heads_kv),
    )  # fmt: skip


def _code_error(magnitude: Array, largest: Array, codes: str | None) -> Array:
    """Bound the error of a code [L70]."""
    if codes is None:
        return array_namespace(magnitude).zeros_like(magnitude)
    relative, absolute = CODES[codes]
    with np.errstate(invalid="ignore"):
        return (relative * magnitude + absolute * largest) * SCALE_SLACK


def _scaling_error(size_q: Array, f: Foreign, sigma: float) -> Array:
    """Bound the error of storing Q times the scale [L71]; 0 if the scores are scaled."""
    if f.scaled_q is None:
        return array_namespace(size_q).zeros_like(size_q)
    return UNIT_ROUNDOFF[f.scaled_q] * size_q + HALF_SUBNORMAL[f.scaled_q] / sigma


@dataclass(frozen=True)
class Received:
    """Magnitudes of operands of a block as a kernel multiplies them, and bounds of their errors.

    q, k : array
        Magnitudes of Q, with the error of its scaling, and of K, with its mean if it may lose it.
    off_q, off_k, off_v : array
        Errors of their codes [L70].
    off_scaled : array
        Error of storing Q times the scale [L71].
    mean : array
        Magnitudes of the mean of K, 0 if it stays.
    """

    q: Array
    k: Array
    off_q: Array
    off_k: Array
    off_v: Array
    off_scaled: Array
    mean: Array


def received_operands(
    block: ScoreBlock, v: Array, n: Numerics, f: Foreign, sigma: float, sizes: Sizes
) -> Received:
    """Return the operands of a block, V among them, as a kernel may multiply them [L70]."""
    at_q, at_kv = block.index[:3], block.index[:2]
    size_q, size_k = array_namespace(block.q).abs(block.q), array_namespace(block.k).abs(block.k)
    mean = sizes.k_mean[at_kv]
    off_scaled = _scaling_error(size_q, f, sigma)
    size_q, size_k = size_q + off_scaled, size_k + mean
    off_q = _code_error(size_q, sizes.q[at_q], f.qk_codes)
    off_k = _code_error(size_k, sizes.k[at_kv], f.qk_codes)
    off_v = _code_error(array_namespace(v).abs(v), sizes.v[at_kv], f.v_codes)
    if f.qk_codes:  # K without its mean is rounded once more, before its codes
        off_k = off_k + UNIT_ROUNDOFF[n.q_type] * sizes.k[at_kv]
    if f.sinks:  # the last key is no operand
        size_k[..., -1, :], off_k[..., -1, :] = 0.0, 0.0
    return Received(size_q, size_k, off_q, off_k, off_v, off_scaled, mean)


def block_bound(
    block: ScoreBlock, n: Numerics, f: Foreign, sigma: float, softcap: float, sizes: Sizes
) -> tuple[dict[str, Array], Array, Array]:
    """R1 to R7 of one block of rows: the terms of O, the bound of lse, and one number for each key.

    The number bounds the error of the logarithm of its weight, 0 if the key lies far below.
    """
    xp = array_namespace(block.S)
    keys, head_dim = block.S.shape[-1], block.q.shape[-1]
    if keys == 0:
        zero = xp.zeros((*block.S.shape[:-1], head_dim))
        return dict.fromkeys(TERMS, zero), xp.zeros(block.S.shape[:-1]), xp.zeros_like(block.S)
    P, lse, v, o, spoilt = exact(block)
    admitted = block.admitted
    count = admitted.sum(axis=-1).astype(np.float64)
    attends = count > 0
    roundoff = ACCUMULATORS[f.accumulate]

    # Codes [L70]. The inner product, operands scaled before or after it [L71].
    received = received_operands(block, v, n, f, sigma, sizes)
    size_q, size_k, size_v = received.q, received.k, xp.abs(v)
    off_q, off_k, off_v = received.off_q, received.off_k, received.off_v
    shift = sigma * (size_q * received.mean).sum(axis=-1)  # of a row's scores, if K loses its mean

    def transposed(x: Array) -> Array:
        return x.swapaxes(-1, -2)

    coded = (size_q + off_q) @ transposed(size_k + off_k)  # at least Σ|q||k| of codes
    magnitudes = size_q @ transposed(size_k)
    r1 = xp.zeros_like(coded)
    if f.qk_codes:
        with np.errstate(invalid="ignore"):
            r1 = sigma * (coded - magnitudes) * REFERENCE
    of_sum = 0.0 if f.qk_codes == "int8" else gamma(head_dim + -(-head_dim // 16), roundoff)
    of_sum = (1 + of_sum) * (1 + gamma(ROUNDINGS, U)) - 1
    with np.errstate(invalid="ignore"):
        of_scaling = sigma * (received.off_scaled @ transposed(size_k + off_k))
    underflow = HALF_SUBNORMAL["float16"] if f.accumulate == "float16" else FLUSH
    r2 = (sigma * (of_sum * coded + 2 * head_dim * underflow) + FLUSH) * REFERENCE

    # Scaling, bias, and the type that holds the scores [L71].
    finite = xp.isfinite(block.S) & xp.isfinite(coded)
    top = xp.where(finite, block.S, NEG_INF).max(axis=-1)
    top = xp.where(xp.isfinite(top), top, 0.0)
    S = xp.where(finite, block.S, top[..., None])
    unbiased = xp.abs(xp.where(finite, block.unbiased, 0.0))
    r1, r2, r3 = (xp.where(finite & admitted, r, 0.0) for r in (r1, r2, of_scaling))
    stores = CAPPED_STORES if softcap else STORES
    reach = xp.abs(S) + stores * unbiased + r1 + r2 + r3 + shift[..., None]
    r3 = r3 + ROUNDINGS * U * reach + FLUSH
    largest_score = MAX_FLOAT
    if f.score_type != "float32":
        unit, least = UNIT_ROUNDOFF[f.score_type], HALF_SUBNORMAL[f.score_type]
        r3 = r3 + (1 + 2 * stores * unit) * unit * reach
        r3 = r3 + least * (3 * max(1.0, sigma) + (2 * softcap + 1 if softcap else 0))
        largest_score = FINITE_MAX[f.score_type] / 2
    if softcap:
        r3 = r3 + f.tanh * (unbiased + r1 + r2 + r3) + TANH_ERROR * softcap
    r3 = r3 * REFERENCE

    # All exponentials that multiply a weight [L72], at each step at which the maximum may rise.
    known = xp.where(admitted, r1 + r2 + r3, 0.0)
    rises_after, rises = _rises(S, known, admitted, f)
    counts = admitted & (S + known >= top[..., None] - FAR_BELOW)
    largest = xp.where(counts, xp.abs(S) + known, 0.0).max(axis=-1)
    largest = largest + shift + xp.log(xp.maximum(count, 1.0))
    each = ARGUMENT_ROUNDINGS * U * largest - math.log1p(-f.exponential)
    r4 = ((2.0 + rises_after) * each[..., None] + LOG_ERROR * (not f.sequential)) * REFERENCE
    far = admitted & far_below(S, top, known + r4)
    r1, r2, r3, r4 = (xp.where(admitted & ~far, r, 0.0) for r in (r1, r2, r3, r4))
    d = r1 + r2 + r3 + r4
    delta_o, P_plus, delta_lse, _ = softmax_perturbation(P, d, v, o)
    inverse_l = xp.exp(xp.minimum(d.max(axis=-1), 60.0))[..., None]

    # P as an operand, both sums [L73], the division and the store [L74].
    relative, subnormal = OPERANDS[n.p_type]
    rho = xp.maximum(relative * P_plus, xp.minimum(subnormal * inverse_l, P_plus))
    size_v = size_v + off_v
    of_codes = P_plus @ off_v
    r5 = rho @ size_v
    total_v = size_v.sum(axis=-2, keepdims=True)
    flushed = 2.0 * FLUSH * total_v * inverse_l
    steps = xp.minimum(count, float(-(-keys // LEAST_STEP)))
    slices = 0 if f.sequential else MOST_SLICES
    if f.promote is None:
        theta_o = gamma(count + steps, roundoff)
    else:
        within = gamma(f.promote + -(-f.promote // 16), roundoff)
        theta_o = (1 + within) * (1 + gamma(xp.minimum(count, -(-keys // f.promote)) + 1, U)) - 1
    theta_o = (1 + theta_o) * (1 + gamma(rises + 2 + slices, TENSOR_CORE_ROUNDOFF)) - 1
    theta_l = gamma(count + steps + rises + 2 + slices, TENSOR_CORE_ROUNDOFF)
    theta_l = xp.minimum(theta_l + 2 * count * FLUSH * inverse_l[..., 0], 1.0)
    r6 = theta_o[..., None] * (P_plus @ size_v + r5)
    r6 = r6 + (count + steps + rises + 2 + slices)[..., None] * underflow * inverse_l
    size = xp.abs(o) + delta_o + of_codes + flushed + r5 + r6
    with np.errstate(divide="ignore", invalid="ignore"):
        by_l = (1.0 / (1.0 - theta_l) - 1.0)[..., None]
        r6 = r6 + by_l * size
        size = size * (1 + by_l)
    r7 = gamma(ROUNDINGS, U) * size + FLUSH
    cost, fits = values.store(o, size + r7, n)
    r7 = r7 + cost

    of_scores = shares(P, (r1, r2, r3, r4), delta_o)
    terms = dict(zip(TERMS, (*of_scores, r5, r6, r7), strict=True))
    terms["R1"] = terms["R1"] + of_codes
    terms["R4"] = terms["R4"] + flushed + far_keys(far, v)

    usable = (finite | ~admitted).all(axis=-1)
    most = xp.where(admitted & finite, coded, 0.0).max(axis=-1)
    usable &= most * max(1.0, sigma) <= largest_score
    if f.scaled_q is not None:  # in natural or in log2 units
        usable &= size_q.max(axis=-1) * sigma * 2 <= FINITE_MAX[f.scaled_q]
    usable &= xp.where(admitted, xp.abs(S), 0.0).max(axis=-1) <= MAX_FLOAT
    fits &= total_v <= (FINITE_MAX["float16"] / 2 if f.accumulate == "float16" else MAX_FLOAT)
    terms = {tag: xp.where(xp.isnan(term), xp.inf, term) for tag, term in terms.items()}
    terms = promised(terms, attends, usable, fits, spoilt)

    lse = xp.where(xp.isfinite(lse), lse, 0.0)
    delta_lse = delta_lse - xp.log1p(-xp.minimum(theta_l, 1 - U64)) + LOG_ERROR
    delta_lse = delta_lse + ROUNDINGS * U * (xp.abs(lse) + largest + delta_lse)
    return terms, xp.where(attends, xp.where(usable, delta_lse * REFERENCE, xp.inf), 0.0), d


def _rises(S: Array, known: Array, admitted: Array, f: Foreign) -> tuple[Array, Array]:
    """Count the steps at which the maximum may rise [L72]: after each key's own, and in a row.

    Keys in order, from either end, in steps of any size: no more than there are keys above all
    before them. In any order: one in each step but the first. A sink may come before or after the
    keys, whichever way they are taken: one rise more.
    """
    xp = array_namespace(S)
    if f.sinks:
        S, known, admitted = (x[..., :-1] for x in (S, known, admitted))
        after, rises = _rises(S, known, admitted, replace(f, sinks=False))
        return xp.concatenate([after, rises[..., None]], axis=-1) + 1.0, rises + 1.0
    if not f.sequential:
        most = float(-(-S.shape[-1] // LEAST_STEP))
        return xp.full(S.shape, most), xp.full(S.shape[:-1], most)
    after, rises, *_ = count_rises(S, known, admitted, 1)
    S, known, admitted = (x[..., ::-1] for x in (S, known, admitted))
    after_back, rises_back, *_ = count_rises(S, known, admitted, 1)
    return xp.maximum(after, after_back[..., ::-1]), xp.maximum(rises, rises_back)
