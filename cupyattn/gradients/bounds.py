"""Element-wise a-priori bounds of the errors of the backward kernels, in float64.

Every formula is proved in docs/MATH_REFERENCE.md, under the tags [L43] to [L49].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import FINITE_MAX, NEG_INF, Array, array_namespace, as_float64
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.scores import (
    EX2_LOG_ERROR,
    LOG2E,
    MAX_FLOAT,
    REFERENCE,
    U64,
    Scaling,
    U,
    products,
    scaling_errors,
)
from cupyattn.gradients.block_sums import BlockErrors, BlockSums, GradientBounds, finite_heads
from cupyattn.gradients.exact import GradientBlock, coarse_rows, gradient_blocks
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.kernels.numerics import EX2_FLUSH, LARGEST_SCORE, Numerics, numerics
from cupyattn.problem.backward_form import BackwardKernel, check_backward
from cupyattn.problem.checks import check_scale
from cupyattn.problem.settings import MaskedOptions, Unpack, takes_options

#: Largest perturbation of a score of which an exponential is computed.
MAX_EXPONENT = 300.0
#: Exponents certainly below this, in natural units, are flushed: 2^-126 is e^-87.3.
FLUSHED = -200.0
#: Roundings of Delta beside one for each channel: lanes of a warp add up.
LANE_SUMS = 5


@dataclass(frozen=True)
class _Constants:
    """Values that the bounds of all blocks share."""

    n: Numerics
    sigma: float
    scaling: Scaling
    softcap: float
    dtype: str
    all_keys: bool
    d_lse: bool


@takes_options
def backward_bound(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    d_lse: Array | None = None,
    grad_bias: bool = False,
    out_error: Array | None = None,
    lse_error: Array | None = None,
    summed_errors: Array | None = None,
    all_keys: bool = True,
    **options: Unpack[MaskedOptions],
) -> GradientBounds:
    r"""Bound \|kernel - `backward_exact`\| of the operands that the kernels received (J2).

    `backward_exact` is then given `out` but no `lse`: P is the softmax of the scores. With the
    bounds of a forward pass, the bound refers to gradients of exact attention [L49].

    Parameters
    ----------
    d_out, q, k, v, out, lse
        As for `cupyattn.attention_backward`: O and the log-sum-exp as the forward left them.
    d_lse : array, optional
    grad_bias : bool
        As for `cupyattn.attention_backward`.
    out_error, lse_error : array, optional
        Bounds of the errors of `out` and `lse` themselves, such as `cupyattn.bounds.attention`
        returns. With them the bound is about the gradients of exact attention, which
        `backward_exact` returns without out and lse. R8 and R9 then include these errors. Without
        `lse_error` the error of lse is measured, in float64.
    summed_errors : array, optional
        Not with `all_keys`: coarse rows take M and their sum from parts of their keys in a ring,
        whose errors `summed_rows` bounds. The bound is about the lse that it returns.
    all_keys : bool
        Whether the rows attend to no keys but these. If not, the bound is about `backward_exact`
        with the same lse and ``all_keys=False``.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As for `cupyattn.reference.attention_exact`.

    Returns
    -------
    GradientBounds
        Terms R8 to R12 of each gradient, float64.

    Examples
    --------
    >>> x = np.ones((1, 1, 8, 16), np.float16)
    >>> lse = np.full((1, 1, 8), 4 + np.log(8), np.float32)
    >>> bound = backward_bound(x, x, x, x, x, lse)
    >>> bound.total("dv").shape, bool((bound.total("dv") < 2e-3).all())
    ((1, 1, 8, 16), True)
    """
    d_out, q, k, v, out, lse = operands(d_out=d_out, q=q, k=k, v=v, out=out, lse=lse)
    out_error, lse_error, d_lse = operands(out_error=out_error, lse_error=lse_error, d_lse=d_lse)
    problem = BackwardProblem.of(
        "backward_bound", (d_out, out, lse, d_lse), q, k, v, options, all_keys, grad_bias
    )
    kernel = problem.portable_kernel(deterministic=False)
    return gradient_bounds(problem, kernel, out_error, lse_error, summed_errors)


def gradient_bounds(
    problem: BackwardProblem,
    kernel: BackwardKernel,
    out_error: Array | None,
    lse_error: Array | None,
    summed_errors: Array | None = None,
) -> GradientBounds:
    """Return the bounds that `backward_bound` returns, for a given kernel.

    Parameters
    ----------
    problem : BackwardProblem
        Its other arguments.
    kernel : BackwardKernel
        Its tiles say how many blocks of keys dQ is summed over.
    out_error, lse_error, summed_errors : array, optional
        As for `backward_bound`.
    """
    xp = array_namespace(*problem.arrays)
    sizes, dtype = check_backward(*problem.arrays, d_lse=problem.d_lse)
    _, heads, heads_kv, len_q, len_kv, _ = sizes
    shared = _constants(problem, dtype)
    key_blocks = -(-len_kv // kernel.keys_tiles.block_kv)
    row_tiles = heads // heads_kv * -(-len_q // 16) if heads_kv else 0

    def summed(name: str, size: Array, count: Array, bad: Array) -> Array:
        """R12 [L48]: the sum over keys is a chain for each block of keys at the most."""
        if name == "dbias":
            error = (gamma(count, U) + gamma(count, U64)) * size
            return _stored(error, size, None, str(problem.options["bias"].dtype), bad)
        steps = -(-len_kv // 16) if name == "dq" else row_tiles
        theta = products("tensor_core", count, xp.minimum(count, steps))
        if name == "dq":
            theta = (1 + theta) * (1 + gamma(xp.minimum(count, key_blocks), U)) - 1
        return _stored(theta * size, size, None if name == "dv" else shared.sigma, dtype, bad)

    sums = BlockSums(problem, shared.sigma, _finite(problem), summed)
    given = (out_error, lse_error, summed_errors)
    by_head = [None if x is None else split_heads(x, heads_kv) for x in given]
    for block in gradient_blocks(problem):
        if problem.all_keys:
            block = replace(block, P=block.softmax)
        index = block.scores.index
        of_out, *others = (None if x is None else as_float64(x[index]) for x in by_head)
        sums.add(block, _errors(block, shared, 0.0 if of_out is None else of_out, *others))
    return sums.bounds()


def _finite(problem: BackwardProblem) -> Array:
    """Return whether all operands of a key head are finite, (batch, heads_kv); -inf is an lse."""
    lse, xp = as_float64(problem.lse), array_namespace(problem.lse)
    good = xp.isfinite(lse)
    if problem.d_lse is not None:
        good &= xp.isfinite(as_float64(problem.d_lse))
    good |= lse == NEG_INF
    return finite_heads(problem) & split_heads(good, problem.k.shape[1]).all(axis=(2, 3))


def _stored(error: Array, size: Array, sigma: float | None, dtype: str, bad: Array) -> Array:
    """R12: add the errors of scaling and storing a sum to the error of the sum itself.

    `size` bounds the magnitudes of the terms, errors included.
    """
    xp = array_namespace(size)
    total = size + error
    if sigma is not None:
        factor = abs(float(np.float32(sigma)) / sigma - 1.0) + 2.0**-50
        error = error + ((1 + U) * (1 + factor) - 1) * total + 2.0**-148 * max(1.0, sigma)
        total = size + error
    error = error + half_ulp(total, dtype) + 2.0**-148
    return xp.where(bad | (total > FINITE_MAX[dtype]), xp.inf, error)


def summed_rows(
    d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    **options: Unpack[MaskedOptions],
) -> tuple[Array, Array]:  # fmt: skip
    """Return lse of all rows, exact where it is coarse, and the errors of sums of coarse rows.

    Parameters
    ----------
    d_out, q, k, v, out, lse
        As for `backward_bound`, with all keys of the rows.

    Returns
    -------
    lse, errors : (batch, heads, len_q) array, float64
        Errors of the logarithm of M and the sum that the parts of a ring have together; 0 for
        other rows.
    """
    d_out, q, k, v, out, lse = operands(d_out=d_out, q=q, k=k, v=v, out=out, lse=lse)
    problem = BackwardProblem.of(
        "summed_rows", (d_out, out, lse, None), q, k, v, options, True, False
    )
    _, dtype = check_backward(*problem.arrays)
    shared, heads_kv = _constants(problem, dtype), k.shape[1]
    xp = array_namespace(q)
    found = as_float64(split_heads(lse, heads_kv)).copy()
    errors = xp.zeros(found.shape)
    for block in gradient_blocks(problem):
        index, coarse = block.scores.index, coarse_rows(block.lse)
        found[index] = xp.where(coarse, block.softmax_lse, block.lse)
        own = _own_errors(block, shared, block.softmax_lse)
        with np.errstate(over="ignore", divide="ignore"):  # rows without keys are not coarse
            sums = xp.log((block.softmax * xp.exp(xp.minimum(own, MAX_EXPONENT))).sum(axis=-1))
        count = block.scores.admitted.sum(axis=-1).astype(np.float64)
        # Each part adds a difference of two M, a power, a product and a sum to its own roundings.
        sums = sums + EX2_LOG_ERROR + 2 * gamma(6 * count + 8, U) + count * 2.0**-110
        errors[index] = xp.where(coarse, sums * REFERENCE, 0.0)
    return merge_heads(found), merge_heads(errors)


def _constants(problem: BackwardProblem, dtype: str) -> _Constants:
    options = problem.options
    sigma, softcap = check_scale(problem.scale, problem.q.shape[-1]), options["softcap"]
    features = {"softcap": bool(softcap), "bias": options["bias"] is not None}
    n = numerics("tensor_core", "portable", dtype, **features)
    scaling = scaling_errors(n, sigma, None, softcap)
    given_d_lse = problem.d_lse is not None
    return _Constants(n, sigma, scaling, softcap, dtype, problem.all_keys, given_d_lse)


def _errors(
    block: GradientBlock,
    shared: _Constants,
    out_error: Array | float,
    lse_error: Array | None,
    summed_errors: Array | None,
) -> BlockErrors:
    """R8 to R11 of one block: bounds of the errors of P and dS as the tensor cores take them."""
    xp = array_namespace(block.P)
    scores, dtype, head_dim = block.scores, shared.dtype, block.scores.q.shape[-1]
    weighs = block.P > 0
    # NOTE: numbers that underflow float64 are flushed by the kernel, too: EX2_FLUSH covers them.
    slope = block.slope
    d, cap_error = _score_errors(block, shared, lse_error, summed_errors)
    usable = d <= MAX_EXPONENT
    d = xp.where(weighs, xp.minimum(d, MAX_EXPONENT), 0.0)
    admitted = scores.admitted
    flush = xp.where(admitted, EX2_FLUSH, 0.0)

    # R9 [L45]: P, before and after it is rounded to 16 bits.
    error_P = block.P * xp.expm1(d) + flush
    largest = block.P + error_P
    rounded = xp.where(admitted, xp.minimum(half_ulp(largest, dtype), largest), 0.0)

    # R8: Delta; R10: dP, on the tensor core over the channels, which may begin at Delta [L44].
    of_row = (xp.abs(block.d_out) * xp.abs(block.out)).sum(axis=-1)
    of_out_error = (xp.abs(block.d_out) * out_error).sum(axis=-1)
    chain = gamma(head_dim + LANE_SUMS, U) + gamma(head_dim + 4, U64)
    error_delta = chain * (of_row + of_out_error) + of_out_error + 2 * head_dim * 2.0**-149
    if shared.d_lse:  # one rounding more, of the difference
        error_delta = error_delta + (U + U64) * (xp.abs(block.delta) + error_delta)
    error_delta = error_delta[..., None]
    magnitude = xp.abs(block.d_out) @ xp.abs(scores.v).swapaxes(-1, -2)
    magnitude = magnitude + xp.abs(block.delta)[..., None] + error_delta
    channels = products("tensor_core", head_dim) + gamma(head_dim + 4, U64)
    error_dP = channels * magnitude + 2 * head_dim * 2.0**-149

    # R11 [L47]: dS = fl(fl(P fl(dP - Delta)) slope), rounded to 16 bits.
    distance = xp.abs(block.dP - block.delta[..., None])
    t = distance + error_dP + error_delta
    roundings = (1 + U) ** (3 if shared.softcap else 2) - 1
    steeper = slope + cap_error
    of_slope = cap_error * largest * t
    r11 = roundings * (largest * t * steeper) + of_slope + 2.0**-147 * (1 + t)
    r11 = xp.where(admitted, r11, 0.0)
    of_bias = {
        "R8": largest * error_delta,
        "R9": error_P * distance,
        "R10": largest * error_dP,
    }
    terms = {tag: term * slope for tag, term in of_bias.items()}
    of_bias["R11"] = ((1 + U) ** 2 - 1) * (largest * t) + 2.0**-147 * (1 + t)
    largest_of_bias = block.P * distance + sum(of_bias.values())
    largest_dS = block.P * distance * slope + sum(terms.values()) + r11
    half = xp.minimum(half_ulp(largest_dS, dtype), largest_dS)
    terms["R11"] = r11 + xp.where(admitted, half, 0.0)
    largest_dS = largest_dS + xp.where(admitted, half, 0.0)
    largest = largest + rounded
    most = FINITE_MAX[dtype]
    bad = ~(usable & (t <= MAX_FLOAT) & (largest <= most) & (largest_dS <= most)) & admitted
    found = (error_P + rounded, largest, *terms.values(), largest_dS)
    P, largest, r8, r9, r10, r11, largest_dS = (xp.where(bad, 0.0, x) for x in found)
    counts = admitted & ~bad
    of_bias = {tag: xp.where(counts, term, 0.0) for tag, term in of_bias.items()}
    return BlockErrors(
        P, largest, {"R8": r8, "R9": r9, "R10": r10, "R11": r11}, largest_dS, of_bias,
        xp.where(counts, largest_of_bias, 0.0), bad,
    )  # fmt: skip


def _capped_errors(block: GradientBlock, shared: _Constants) -> tuple[Array, Array]:
    """Bound the error of a score before its bias is added, and return the size of its product."""
    xp = array_namespace(block.P)
    scores, scaling, sigma = block.scores, shared.scaling, shared.sigma
    head_dim, admitted = scores.q.shape[-1], scores.admitted
    magnitude = xp.abs(scores.q) @ xp.abs(scores.k).swapaxes(-1, -2)
    dot = (products("tensor_core", head_dim) + gamma(head_dim + 4, U64)) * magnitude
    dot = dot + 2 * head_dim * 2.0**-149
    unbiased = xp.where(admitted, xp.abs(scores.unbiased), 0.0)
    return (1 + scaling.own) * sigma * dot + scaling.own * unbiased + scaling.tiny, magnitude


def _own_errors(block: GradientBlock, shared: _Constants, row_lse: Array) -> Array:
    """Bound the error of the exponent of a score less M, whatever M is; `row_lse` of all keys."""
    xp = array_namespace(block.P)
    scores, admitted = block.scores, block.scores.admitted
    capped, _ = _capped_errors(block, shared)
    S = xp.where(admitted, scores.S, 0.0)
    error = (1 + shared.scaling.added) * capped + shared.scaling.added * xp.abs(S)
    lse = xp.where(row_lse == NEG_INF, 0.0, row_lse)[..., None]
    # M is the largest of the computed scores: no more than lse and the error of that score.
    distance = xp.where(admitted, xp.abs(S - lse), 0.0) + 2 * error
    rounded = 2 if shared.n.subtracts_first else 1
    relative = (1 + U) ** rounded * (1 + shared.scaling.common) - 1
    natural = 0.0 if shared.n.subtracts_first else 4 * U * U * xp.abs(lse)
    d = error + relative * distance + natural + EX2_LOG_ERROR + 2.0**-125
    return xp.where(admitted, d * REFERENCE, 0.0)


def _score_errors(
    block: GradientBlock,
    shared: _Constants,
    lse_error: Array | None,
    summed_errors: Array | None,
) -> tuple[Array, Array | float]:
    """R9: bound the error of log P [L45], and of a softcap's slope [L47]."""
    xp = array_namespace(block.P)
    scores, scaling, sigma = block.scores, shared.scaling, shared.sigma
    natural, admitted = shared.n.subtracts_first, scores.admitted
    capped, magnitude = _capped_errors(block, shared)
    S = xp.where(admitted, scores.S, 0.0)
    unbiased = xp.where(admitted, xp.abs(scores.unbiased), 0.0)
    lse = xp.where(admitted & (block.lse != NEG_INF)[..., None], block.lse[..., None], 0.0)
    error = (1 + scaling.added) * capped + scaling.added * xp.abs(S)
    distance = xp.abs(S - lse)
    if natural:
        square = (1 + U) ** 2 * (1 + scaling.common) - 1
        error = error + square * (distance + error)
    else:
        of_lse = (1 + U) * (1 + abs(float(np.float32(LOG2E)) / LOG2E - 1.0) + 2.0**-50) - 1
        error = error + scaling.common * (xp.abs(S) + error) + of_lse * xp.abs(lse)
        error = error + U * (distance + error)
    d = (error + EX2_LOG_ERROR + 2.0**-125) * REFERENCE
    if lse_error is None and shared.all_keys:
        with np.errstate(invalid="ignore"):
            lse_error = xp.abs(block.lse - block.softmax_lse)
        lse_error = xp.where(block.lse == block.softmax_lse, 0.0, lse_error)
    if lse_error is not None:
        d = d + lse_error[..., None]
    d = xp.where((lse > S) & (error - distance < FLUSHED), 0.0, d)
    coarse = coarse_rows(block.lse)
    if shared.all_keys and coarse.any():
        d = xp.where(coarse[..., None], _normalised_errors(block, shared, capped), d)
    if summed_errors is not None and coarse.any():
        own = _own_errors(block, shared, block.lse) + summed_errors[..., None]
        d = xp.where(coarse[..., None], own, d)
    d = xp.where(magnitude * max(1.0, sigma) <= MAX_FLOAT, d, xp.inf)
    if not shared.softcap:
        return d, 0.0
    t = unbiased / shared.softcap
    off = capped / shared.softcap
    off = off + 2 * U * (t + off)  # the Hopper form divides the capped score
    return d, (2 * t + off) * off + U * (1 + (2 * t + off) * off)


def _normalised_errors(block: GradientBlock, shared: _Constants, capped: Array) -> Array:
    """R9 of coarse rows [L46]: bound the error of log P, with M and the sum taken from the scores.

    `capped` bounds the error of a score before its bias is added.
    """
    xp = array_namespace(block.P)
    scores, scaling, P = block.scores, shared.scaling, block.softmax
    admitted, natural = scores.admitted, shared.n.subtracts_first
    S = xp.where(admitted, scores.S, 0.0)
    low, high = -capped, capped + xp.zeros_like(S)
    if shared.n.bias:  # rounding is monotone: its errors at the ends bound it
        wide = capped + 2.0**-50 * xp.abs(S)
        with np.errstate(over="ignore"):
            low, high = (as_float64((S + x).astype(np.float32)) - S for x in (-wide, wide))
    top = xp.where(admitted, S + high, NEG_INF).max(axis=-1, keepdims=True)
    least_top = xp.where(admitted, S + low, NEG_INF).max(axis=-1, keepdims=True)
    top, least_top = (xp.where(xp.isfinite(x), x, 0.0) for x in (top, least_top))
    distance = xp.maximum(top - (S + low), 0.0)
    if natural:
        relative = (1 + U) ** 2 * (1 + scaling.common) - 1
    else:
        relative = (1 + U) * (1 + scaling.common) - 1
    error = relative * distance + (0.0 if natural else 4 * U * U * xp.abs(top))
    flushed = ~admitted | (S + high + error - least_top < FLUSHED)
    low = xp.where(flushed, 0.0, xp.maximum(low - error, -2 * MAX_EXPONENT))
    high = xp.where(flushed, 0.0, xp.minimum(high + error, 2 * MAX_EXPONENT))
    sums = [(P * xp.exp(x)).sum(axis=-1, keepdims=True) for x in (low, high)]
    least, most = (xp.log(xp.where(x > 0, x, 1.0)) for x in sums)
    count = admitted.sum(axis=-1, keepdims=True).astype(np.float64)
    d = xp.maximum(high - least, most - low) + 2 * EX2_LOG_ERROR
    d = (d + 2 * gamma(count + 8, U) + count * 2.0**-110) * REFERENCE
    # NOTE: from LARGEST_SCORE on exponents are capped, which may make weights equal.
    large = 0.0 if natural else xp.abs(top) * LOG2E
    return xp.where(flushed, 0.0, xp.where(large < LARGEST_SCORE, d, xp.inf))
