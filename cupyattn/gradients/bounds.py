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
from cupyattn.gradients.exact import (
    BiasSums,
    GradientBlock,
    coarse_rows,
    gradient_blocks,
    over_rows,
)
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.kernels.numerics import EX2_FLUSH, LARGEST_SCORE, Numerics, numerics
from cupyattn.problem.backward_form import BackwardKernel, check_backward
from cupyattn.problem.checks import check_scale
from cupyattn.problem.settings import MaskedOptions, Unpack, takes_options

#: The terms, in the order in which the kernels round.
TERMS = ("R8", "R9", "R10", "R11", "R12")
#: Largest perturbation of a score of which an exponential is computed.
MAX_EXPONENT = 300.0
#: Exponents certainly below this, in natural units, are flushed: 2^-126 is e^-87.3.
FLUSHED = -200.0
#: Roundings of Delta beside one for each channel: lanes of a warp add up.
LANE_SUMS = 5


@dataclass(frozen=True)
class GradientBounds:
    """Bounds of the error of each gradient, element by element.

    Parameters
    ----------
    dq, dk, dv : dict of str to array
        For each gradient, one array for each rounding point. Their sum is its bound.
    dbias, dq_weight, dk_weight : dict of str to array, optional
        The same for the bias and for the weights of `qk_norm`. None if it was not requested.

    Notes
    -----
    +inf means that nothing is promised: operands of a key head that are not all finite, or a number
    that leaves the range of its type.
    """

    dq: dict[str, Array]
    dk: dict[str, Array]
    dv: dict[str, Array]
    dbias: dict[str, Array] | None = None
    dq_weight: dict[str, Array] | None = None
    dk_weight: dict[str, Array] | None = None

    def total(self, name: str) -> Array:
        """Return the bound of a gradient by its name, ``"dq"`` for example."""
        return sum(getattr(self, name).values())

    def dominant(self, name: str, index: tuple[int, ...]) -> str:
        """Return the tag with the largest share of one element of `total`."""
        terms: dict[str, Array] = getattr(self, name)
        return max(terms, key=lambda tag: float(terms[tag][index]))


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


@dataclass(frozen=True)
class _Errors:
    """Bounds of the errors and magnitudes of P and dS of a block as operands, by tag."""

    P: Array  # R9
    largest_P: Array
    dS: dict[str, Array]  # R8 to R11
    largest_dS: Array
    of_bias: dict[str, Array]  # R8 to R11 of P (dP - Delta)
    largest_of_bias: Array
    out_of_range: Array  # boolean: nothing is promised, and the others are 0


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
    d_out, q, k, v, out, lse = problem.arrays
    xp = array_namespace(*problem.arrays)
    sizes, dtype = check_backward(*problem.arrays, d_lse=problem.d_lse)
    _, _, heads_kv, len_q, len_kv, head_dim = sizes
    shared = _constants(problem, dtype)
    sigma = shared.sigma
    key_blocks = -(-len_kv // kernel.keys_tiles.block_kv)
    group = q.shape[1] // heads_kv if heads_kv else 0
    row_tiles = group * -(-len_q // 16)

    def zeros(x: Array) -> Array:
        return xp.zeros(split_heads(x, heads_kv).shape)

    dq = {tag: zeros(q) for tag in TERMS}
    dk, dv = ({tag: xp.zeros(k.shape) for tag in TERMS} for _ in range(2))
    size_k, size_v = xp.zeros(k.shape), xp.zeros(k.shape)  # of the terms of dK and dV
    rows_of_key = xp.zeros(k.shape[:3])
    usable = _finite(d_out, q, k, v, out, lse, problem.d_lse)
    out_of_range = xp.zeros(k.shape[:3], bool)  # keys
    of_bias = None if problem.of_bias is None else _BiasBound(problem)
    extra_out = None if out_error is None else split_heads(out_error, heads_kv)
    extra_lse = None if lse_error is None else split_heads(lse_error, heads_kv)
    of_sums = None if summed_errors is None else split_heads(summed_errors, heads_kv)
    for block in gradient_blocks(problem):
        if problem.all_keys:
            block = replace(block, P=block.softmax)
        index, at = block.scores.index, block.scores.index[:2]
        e = _errors(
            block, shared,
            0.0 if extra_out is None else as_float64(extra_out[index]),
            None if extra_lse is None else as_float64(extra_lse[index]),
            None if of_sums is None else as_float64(of_sums[index]),
        )  # fmt: skip
        admitted = block.scores.admitted
        magnitude_k, magnitude_q = xp.abs(block.scores.k), xp.abs(block.scores.q)
        count = admitted.sum(axis=-1).astype(np.float64)
        for tag, error in e.dS.items():
            dq[tag][index] = sigma * (error @ magnitude_k)
            dk[tag][at] += sigma * over_rows(error, magnitude_q)
        dv["R9"][at] += over_rows(e.P, xp.abs(block.d_out))
        size_v[at] += over_rows(e.largest_P, xp.abs(block.d_out))
        size_k[at] += sigma * over_rows(e.largest_dS, magnitude_q)
        rows_of_key[at] += admitted.sum(axis=(2, 3))
        # R12 [L48]: the sum over keys, a chain for each block of keys at the most.
        theta = products("tensor_core", count, xp.minimum(count, -(-len_kv // 16)))
        theta = (1 + theta) * (1 + gamma(xp.minimum(count, key_blocks), U)) - 1
        size = sigma * (e.largest_dS @ magnitude_k)
        bad = e.out_of_range
        if of_bias is not None:
            of_bias.add(block, e, usable[at])
        dq["R12"][index] = _stored(
            theta[..., None] * size, size, sigma, dtype, bad.any(axis=-1)[..., None]
        )
        out_of_range[at] |= bad.any(axis=(2, 3))
    theta = products("tensor_core", rows_of_key, xp.minimum(rows_of_key, row_tiles))[..., None]
    dk["R12"] = _stored(theta * size_k, size_k, sigma, dtype, out_of_range[..., None])
    dv["R12"] = _stored(theta * size_v, size_v, None, dtype, out_of_range[..., None])
    for terms, shown in ((dq, usable[:, :, None, None, None]), (dk, usable[..., None, None]),
                         (dv, usable[..., None, None])):  # fmt: skip
        for tag, term in terms.items():
            terms[tag] = xp.where(shown, term * REFERENCE, xp.inf if tag == "R8" else 0.0)
    own = None if of_bias is None else of_bias.terms()
    return GradientBounds({tag: merge_heads(term) for tag, term in dq.items()}, dk, dv, own)


class _BiasBound:
    """Sums of the bounds of P (dP - Delta) over the axes along which the bias broadcasts."""

    def __init__(self, problem: BackwardProblem) -> None:
        self._errors = {tag: BiasSums(problem) for tag in TERMS[:-1]}  # R8 to R11
        self._size, self._count, self._bad = (BiasSums(problem) for _ in range(3))
        self._dtype = str(problem.options["bias"].dtype)

    def add(self, block: GradientBlock, e: _Errors, usable: Array) -> None:
        """Add the bounds of a block; `usable` (batch, heads_kv): all operands are finite."""
        index, admitted = block.scores.index, block.scores.admitted
        for tag, sums in self._errors.items():
            sums.add(index, e.of_bias[tag])
        self._size.add(index, e.largest_of_bias)
        self._count.add(index, admitted)
        self._bad.add(index, admitted & (e.out_of_range | ~usable[:, :, None, None, None]))

    def terms(self) -> dict[str, Array]:
        """Return the terms of the gradient of the bias."""
        found = {tag: sums.total * REFERENCE for tag, sums in self._errors.items()}
        size, bad = self._size.total, self._bad.total > 0
        error = (gamma(self._count.total, U) + gamma(self._count.total, U64)) * size  # R12
        found["R12"] = _stored(error, size, None, self._dtype, bad) * REFERENCE
        xp = array_namespace(size)
        return {t: x if t == "R12" else xp.where(bad, 0.0, x) for t, x in found.items()}


def _finite(
    d_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, d_lse: Array | None
) -> Array:
    """Return whether all operands of a key head are finite, (batch, heads_kv); -inf is an lse."""
    xp = array_namespace(q)
    good = xp.isfinite(as_float64(lse))
    if d_lse is not None:
        good &= xp.isfinite(as_float64(d_lse))
    good |= as_float64(lse) == NEG_INF
    found = split_heads(good, k.shape[1]).all(axis=(2, 3))
    for x in (d_out, q, out):
        found &= xp.isfinite(split_heads(as_float64(x), k.shape[1])).all(axis=(2, 3, 4))
    for x in (k, v):
        found &= xp.isfinite(as_float64(x)).all(axis=(2, 3))
    return found


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
) -> _Errors:
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

    # R10: dP, on the tensor core over the channels; R8: Delta [L44].
    magnitude = xp.abs(block.d_out) @ xp.abs(scores.v).swapaxes(-1, -2)
    channels = products("tensor_core", head_dim) + gamma(head_dim + 4, U64)
    error_dP = channels * magnitude + 2 * head_dim * 2.0**-149
    of_row = (xp.abs(block.d_out) * xp.abs(block.out)).sum(axis=-1)
    of_out_error = (xp.abs(block.d_out) * out_error).sum(axis=-1)
    chain = gamma(head_dim + LANE_SUMS, U) + gamma(head_dim + 4, U64)
    error_delta = chain * (of_row + of_out_error) + of_out_error + 2 * head_dim * 2.0**-149
    if shared.d_lse:  # one rounding more, of the difference
        error_delta = error_delta + (U + U64) * (xp.abs(block.delta) + error_delta)
    error_delta = error_delta[..., None]

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
    return _Errors(
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
