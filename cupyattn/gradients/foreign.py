"""Bound the errors of another library's gradients, by its stated roundings.

Nothing here knows its tiles or the order of its operations. P may be kept from the forward pass, or
made again from the log-sum-exp. docs/MATH_REFERENCE.md proves the formulas: [L83] to [L85].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import FINITE_MAX, Array, array_namespace
from cupyattn.bounds.foreign import (
    ACCUMULATORS,
    FLUSH,
    MOST_SLICES,
    OPERANDS,
    ROUNDINGS,
    Received,
    Sizes,
    block_bound,
    received_operands,
    sizes_of,
)
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.scores import MAX_FLOAT, REFERENCE, U64, U
from cupyattn.errors import UnsupportedError
from cupyattn.gradients.block_sums import (
    BlockErrors,
    BlockSums,
    GradientBounds,
    OperandErrors,
    finite_heads,
)
from cupyattn.gradients.bounds import FLUSHED, MAX_EXPONENT
from cupyattn.gradients.exact import GradientBlock, gradient_blocks
from cupyattn.gradients.problem import BackwardProblem
from cupyattn.kernels.numerics import (
    HALF_SUBNORMAL,
    TENSOR_CORE_ROUNDOFF,
    UNIT_ROUNDOFF,
    Foreign,
    Numerics,
)
from cupyattn.problem.checks import check_dtype, check_scale
from cupyattn.reference.exact import ScoreBlock

#: Stores of dS in the type of the scores: before and after the scale, the softcap and a bias [L84].
STORES_OF_SCORE = 4
#: Terms of one sum that tensor cores add in one instruction.
STEP = 16


@dataclass(frozen=True)
class _Shared:
    """Data for the bounds of all blocks, and the roundings of numbers in other types [L84]."""

    n: Numerics
    f: Foreign
    sigma: float
    softcap: float
    sizes: Sizes
    d_lse: bool
    usable: Array  # (batch, heads_kv): all operands of a key head are finite

    def stored(self, x: Array, times: int = 1) -> Array:
        """Return the error of `times` stores of numbers up to x, if scores have 16 bits."""
        if self.f.score_type == "float32":
            return array_namespace(x).zeros_like(x)
        unit, least = UNIT_ROUNDOFF[self.f.score_type], HALF_SUBNORMAL[self.f.score_type]
        return times * ((1 + 2 * times * unit) * unit * x + least)

    @property
    def least_scaled(self) -> float:
        """Contribution of underflow of dS if it is rounded after multiplication by the scale."""
        types = {self.n.p_type, self.f.score_type} - {"float32"}
        return STORES_OF_SCORE * sum(HALF_SUBNORMAL[t] for t in types) / min(self.sigma, 1.0)

    def operand(self, x: Array) -> Array:
        """Return the error of rounding numbers up to x to the type of P, as operands."""
        unit, least = OPERANDS[self.n.p_type]
        found: Array = array_namespace(x).minimum(unit * x + least, x)
        return found


def backward_bound_foreign(
    d_out: Array,
    q: Array,
    k: Array,
    v: Array,
    n: Numerics,
    *,
    d_lse: Array | None = None,
    grad_bias: bool = False,
    **options: Any,
) -> GradientBounds:
    """Bound the errors of another library's gradients of attention [L83] to [L85].

    Parameters
    ----------
    d_out, q, k, v, d_lse, grad_bias, **options
        As for `cupyattn.gradients.backward_bound`.
    n : Numerics
        With `Foreign`.

    Returns
    -------
    GradientBounds
        Terms R8 to R12 of each gradient, float64; errors of the forward pass are in R8 and R9.

    Raises
    ------
    UnsupportedError
        For P and dS in 8 bits.
    ValueError
        For numerics of this library.
    """
    f = n.foreign
    if f is None:
        raise ValueError("numerics must be a result of cupyattn.testing.numerics")
    (d_lse,) = operands(d_lse=d_lse)
    problem = BackwardProblem.of(
        "backward_bound", (d_out, None, None, d_lse), q, k, v, options, True, grad_bias
    )
    if n.p_type == "e4m3":
        raise UnsupportedError(
            f"dS in 8 bits has no bound, got numerics of {f.name}: state the type of P in the "
            "backward kernel, as in numerics('bf16 P', qk='e4m3'), or judge the output alone"
        )
    dtype, heads_kv = check_dtype(q, k, v), k.shape[1]
    out_type = f.out_type or dtype
    n = replace(n, q_type=dtype, out_type=out_type)
    sigma = check_scale(problem.scale, q.shape[-1])
    shared = _Shared(
        n, f, sigma, problem.options["softcap"], sizes_of(q, k, v, f), problem.d_lse is not None,
        finite_heads(problem),
    )  # fmt: skip
    group = q.shape[1] // heads_kv if heads_kv else 0

    def summed(name: str, size: Array, count: Array, bad: Array) -> Array:
        heads = group if name in ("dk", "dv") and group > 1 else 0
        store = str(problem.options["bias"].dtype) if name == "dbias" else out_type
        return _summed(size, count, shared, store, bad, heads)

    sums = BlockSums(problem, sigma, shared.usable, summed)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in gradient_blocks(problem):
            sums.add(block, _errors(block, shared))
        return sums.bounds()


def _summed(
    size: Array, count: Array, shared: _Shared, dtype: str, bad: Array, heads: int
) -> Array:
    """R12 [L85]: bound the sum of `count` terms, its scaling and stores.

    `size` is the sum of their magnitudes, errors included. `heads` are added up after their stores.
    """
    xp, f = array_namespace(size), shared.f
    steps = xp.ceil(count / STEP)
    theta = (1 + gamma(count + steps, ACCUMULATORS[f.accumulate])) * (
        1 + gamma(steps + MOST_SLICES + ROUNDINGS, TENSOR_CORE_ROUNDOFF)
    ) - 1
    underflow = HALF_SUBNORMAL["float16"] if f.accumulate == "float16" else FLUSH
    error = theta * size + (count + steps) * underflow
    if heads:
        unit, least = (UNIT_ROUNDOFF[dtype], HALF_SUBNORMAL[dtype]) if dtype != "float32" else (
            U, FLUSH
        )  # fmt: skip
        error = error + gamma(2 * heads, unit) * (size + error) + 2 * heads * least
    error = error + shared.stored(size + error)
    if f.scaled_q is not None:
        error = error + half_ulp(size + error, f.scaled_q)
    error = error + half_ulp(size + error, dtype) + FLUSH
    return xp.where(bad | ~(size + error <= FINITE_MAX[dtype]), xp.inf, error)


def _errors(block: GradientBlock, shared: _Shared) -> BlockErrors:
    """R8 to R11 of one block: bounds of the errors of P and dS as they are multiplied."""
    xp, f = array_namespace(block.P), shared.f
    scores, admitted, head_dim = block.scores, block.scores.admitted, block.scores.q.shape[-1]
    forward, lse_error, of_weight = block_bound(
        scores, shared.n, f, shared.sigma, shared.softcap, shared.sizes
    )
    out_error = sum(forward.values(), xp.zeros_like(block.out))
    usable = xp.isfinite(lse_error) & xp.isfinite(out_error).all(axis=-1)
    out_error = xp.where(usable[..., None], out_error, 0.0)

    # P [L83]: kept from the forward pass, or made of lse.
    P = block.P
    d = of_weight + xp.where(usable, lse_error, 0.0)[..., None] + ROUNDINGS * U
    d = d * REFERENCE
    flushed = xp.where(P > 0, xp.log(xp.where(P > 0, P, 1.0)), -np.inf) + d < FLUSHED
    bad = admitted & ((d > MAX_EXPONENT) & ~flushed | ~usable[..., None])
    d = xp.where(flushed, 0.0, xp.minimum(d, MAX_EXPONENT))
    error_P = P * xp.expm1(d) + xp.where(admitted, FLUSH, 0.0)
    error_P = error_P + xp.where(admitted, shared.operand(P + error_P), 0.0)
    error_P = error_P + xp.where(admitted, xp.minimum(shared.stored(P + error_P), 1.0), 0.0)
    largest = P + error_P

    # dP, and Delta as dO.O or as the sum of P dP [L84].
    roundoff = ACCUMULATORS[f.accumulate]
    received = received_operands(scores, scores.v, shared.n, f, shared.sigma, shared.sizes)
    of_codes = xp.abs(block.d_out) @ received.off_v.swapaxes(-1, -2)
    magnitude = xp.abs(block.d_out) @ xp.abs(scores.v).swapaxes(-1, -2) + of_codes
    channels = (1 + gamma(head_dim + -(-head_dim // STEP), roundoff)) * (1 + gamma(ROUNDINGS, U))
    underflow = HALF_SUBNORMAL["float16"] if f.accumulate == "float16" else FLUSH
    error_dP = (channels - 1 + gamma(head_dim + 4, U64)) * magnitude + 2 * head_dim * underflow
    error_dP = error_dP + of_codes
    size_dP = xp.abs(block.dP)
    error_dP = error_dP + shared.stored(size_dP + error_dP)
    of_row = (xp.abs(block.d_out) * (xp.abs(block.out) + out_error)).sum(axis=-1)
    of_out = (xp.abs(block.d_out) * out_error).sum(axis=-1)
    of_out = of_out + gamma(head_dim + ROUNDINGS, TENSOR_CORE_ROUNDOFF) * of_row
    keys = admitted.sum(axis=-1).astype(np.float64)
    summed = (largest * (size_dP + error_dP)).sum(axis=-1)
    of_keys = (error_P * size_dP + largest * error_dP).sum(axis=-1)
    chain = gamma(keys + xp.ceil(keys / STEP) + ROUNDINGS, TENSOR_CORE_ROUNDOFF)
    error_delta = xp.maximum(of_out, of_keys + chain * summed) + 2 * (head_dim + keys) * FLUSH
    size_delta = xp.abs(block.delta)
    if shared.d_lse:
        error_delta = error_delta + U * (size_delta + error_delta)
    error_delta = error_delta + shared.stored(size_delta + error_delta)
    error_delta = (error_delta * REFERENCE)[..., None]

    # dS = P (dP - Delta) times the slope of the softcap [L84].
    distance = xp.abs(block.dP - block.delta[..., None])
    t = distance + error_dP + error_delta
    slope, of_slope = block.slope, _slope_error(block, shared, of_weight)
    of_bias = {
        "R8": largest * error_delta,
        "R9": error_P * distance,
        "R10": largest * error_dP,
    }
    terms = {tag: term * slope for tag, term in of_bias.items()}
    roundings = gamma(ROUNDINGS, U)
    of_bias["R11"] = roundings * largest * t + FLUSH * (1 + t)
    terms["R11"] = roundings * largest * t * (slope + of_slope) + largest * t * of_slope
    terms["R11"] = terms["R11"] + FLUSH * (1 + t)
    found = []
    for error, size in ((of_bias, P * distance), (terms, P * distance * slope)):
        reach = size + sum(error.values())
        rounded = shared.stored(reach, STORES_OF_SCORE)
        rounded = rounded + shared.operand(reach + rounded) + shared.least_scaled
        error["R11"] = error["R11"] + rounded
        found.append(reach + rounded)
    largest_of_bias, largest_dS = found
    most = MAX_FLOAT if shared.n.p_type == "float32" else FINITE_MAX[shared.n.p_type]
    if f.score_type != "float32":
        most = min(most, FINITE_MAX[f.score_type])
    bad |= admitted & ~((t <= most) & (largest_dS * max(1.0, shared.sigma) <= most))
    # NOTE: an overflow in a row may become NaN, and reach masked keys through its sums.
    bad |= ~shared.usable[scores.index[:2]][..., None, None, None]
    bad = xp.broadcast_to(bad.any(axis=-1, keepdims=True), bad.shape)
    counts = admitted & ~bad
    terms, of_bias = (
        {tag: xp.where(counts, term, 0.0) for tag, term in x.items()} for x in (terms, of_bias)
    )
    error_P, largest, largest_dS, largest_of_bias = (
        xp.where(counts, x, 0.0) for x in (error_P, largest, largest_dS, largest_of_bias)
    )
    return BlockErrors(
        error_P, largest, terms, largest_dS, of_bias, largest_of_bias, bad,
        _operands(scores, received, shared),
    )  # fmt: skip


def _operands(scores: ScoreBlock, received: Received, shared: _Shared) -> OperandErrors:
    """Bound the errors of Q and K where dS multiplies them [L85].

    A kernel may multiply their codes or the numbers that it received, and scale either of them.
    """
    xp, off_k, scaled = array_namespace(scores.q), received.off_k, shared.f.scaled_q
    if scaled is not None:
        off_k = off_k + UNIT_ROUNDOFF[scaled] * (received.k + off_k)
        off_k = off_k + HALF_SUBNORMAL[scaled] / shared.sigma
    off_q = received.off_scaled + received.off_q
    return OperandErrors(xp.abs(scores.q), received.k, off_q, off_k)


def _slope_error(block: GradientBlock, shared: _Shared, of_weight: Array) -> Array | float:
    """Bound the error of the slope of a softcap [L84].

    `of_weight` bounds the error of the capped score. It is 0 for keys far below, whose slope may be
    anything.
    """
    if not shared.softcap:
        return 0.0
    xp = array_namespace(of_weight)
    t = xp.abs(block.scores.unbiased) / shared.softcap
    off = xp.where(of_weight > 0, xp.minimum(of_weight / shared.softcap, 1.0), 1.0)
    error = (2 * t + off) * off + gamma(ROUNDINGS, U) * (1 + (2 * t + off) * off)
    return error + shared.stored(1.0 + error, STORES_OF_SCORE)
