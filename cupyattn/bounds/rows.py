"""Bounds of the errors of rows of a kernel: R2 to R7 of a block, in this order.

`block_bound` bounds a block of rows as `cupyattn.bounds.kernel.attention` bounds a call.
docs/MATH_REFERENCE.md proves every formula, under the tags [L17] to [L61].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace
from cupyattn.bounds import tensor_core, values
from cupyattn.bounds.bound import exact, of_block, promised, shares
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
)
from cupyattn.kernels.numerics import (
    EX2_FLUSH,
    HALF_SUBNORMAL,
    LEAST_NORMAL,
    UNIT_ROUNDOFF,
    Numerics,
)
from cupyattn.kernels.splits import Splits
from cupyattn.kernels.tiles import Tiles
from cupyattn.reference.exact import ScoreBlock

#: The terms of `attention`, in the order in which a kernel rounds.
TERMS = ("R2", "R3", "R4", "R5", "R6", "R7")

#: [L29] Largest loss of one key's weight by flushing and underflow. The instruction ex2 flushes
#: once for p and once for alpha, times a p of at most 2^8.
FLUSHED_WEIGHT = 2.0**9 * EX2_FLUSH
#: Relative error of log2f: 1 ulp from the correctly rounded result (CUDA C++ Programming Guide,
#: mathematical functions), hence 3/2 ulp.
LOG2F_ERROR = 1.5 * 2.0**-23


@dataclass(frozen=True)
class Shared:
    """Values that the bounds of all blocks of a call share.

    Parameters
    ----------
    n : Numerics
    tiles : Tiles
    sigma : float
        Softmax scale.
    scaling : Scaling
        R3.
    mean : (batch, heads_kv, head_dim) array or None
        Mean that smoothing subtracted from the keys.
    v_mean : (batch, heads_kv, head_dim) array or None
        Mean of V, if the kernel sums codes of V.
    v_scale : (batch, heads_kv, head_dim) array or None
        The largest scale of each channel of V, if the kernel drops bits of its sums.
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


@dataclass(frozen=True)
class Rows:
    """A block of rows in exact attention, and the effect of perturbed scores on it.

    Parameters
    ----------
    block : ScoreBlock
    shared : Shared
    score : Perturbed
        R2 to R4.
    P, lse, v, o, spoilt : array
        Results of `exact`.
    delta_o, P_plus, delta_lse : array
        Results of `softmax_perturbation`.
    l_least : (..., rows) array
        Lower bound of l.
    """

    block: ScoreBlock
    shared: Shared
    score: Perturbed
    P: Array
    lse: Array
    v: Array
    o: Array
    spoilt: Array
    delta_o: Array
    P_plus: Array
    delta_lse: Array
    l_least: Array

    @classmethod
    def of(cls, block: ScoreBlock, shared: Shared) -> Rows:
        """Compute them; the block has keys."""
        P, lse, v, o, spoilt = exact(block)
        score = perturb(block, shared.n, shared.tiles, shared.sigma, shared.scaling, shared.cut)
        delta_o, P_plus, delta_lse, Z_minus = softmax_perturbation(P, score.d, v, o)
        l_least = least_sum(score, lse, Z_minus)
        return cls(
            block, shared, score, P, lse, v, o, spoilt, delta_o, P_plus, delta_lse, l_least
        )  # fmt: skip

    @cached_property
    def count(self) -> Array:
        """Keys of each row."""
        return self.block.admitted.sum(axis=-1).astype(np.float64)

    @cached_property
    def magnitude(self) -> Array:
        """|V|."""
        return array_namespace(self.v).abs(self.v)

    @cached_property
    def total_v(self) -> Array:
        """The sum of |V| over keys."""
        return self.magnitude.sum(axis=-2, keepdims=True)

    @cached_property
    def inverse_l(self) -> Array:
        """1 over the lower bound of l, (..., rows, 1)."""
        return (1.0 / self.l_least)[..., None]

    @cached_property
    def unit(self) -> Any:
        """Weight of 2^M of each step; None without `Shifts`."""
        by = self.shared.n.shifts
        return None if by is None else values.units(self.P_plus, by, self.shared.tiles)

    @property
    def further(self) -> int:
        """Sums of a row beyond one per step: of P without an online softmax, and of its pieces."""
        n, cut = self.shared.n, self.shared.cut
        return (not n.online) + max(0, (n.pieces if cut is None else cut.slices) - 1)

    def rounding(self) -> Array:
        """R5: half a unit in the last place of P as an operand, or half a subnormal [L34]."""
        n, tiles = self.shared.n, self.shared.tiles
        if n.shifts:
            return values.shifted_rounding(self.P_plus, self.unit, tiles)
        if n.by_tile:
            return values.code_rounding(self.P_plus, n, tiles, self.score.slack)
        if n.p_type != "float32":
            return operand_rounding(self.P_plus, n, self.score, self.inverse_l)
        return array_namespace(self.P).zeros_like(self.P)


class _Sums(NamedTuple):
    """Results of the sums: R5 and R6, flushed weights, the size of O, and the roundings of l."""

    r5: Array
    r6: Array
    flushed: Array
    size: Array
    theta_l: Array


class _Normaliser(NamedTuple):
    """Effect of the division by l.

    `theta_l` bounds the roundings of l itself, `theta` their rest in O, and `r5` the roundings of P
    beside l. `share` is a lower bound of the rest of l.
    """

    theta_l: Array
    theta: Array
    r5: Array
    share: Array


def block_bound(block: ScoreBlock, shared: Shared) -> tuple[dict[str, Array], Array]:
    """R2 to R7 of one block of rows: the terms of O, and the bound of lse."""
    xp = array_namespace(block.S)
    if block.S.shape[-1] == 0:
        zero = xp.zeros((*block.S.shape[:-1], block.q.shape[-1]))
        return dict.fromkeys(TERMS, zero), xp.zeros(block.S.shape[:-1])
    rows = Rows.of(block, shared)
    sums = _sums(rows)
    r7, fits = _stored(rows, sums.size)
    score = rows.score
    found = shares(rows.P, (score.r2, score.r3, score.r4), rows.delta_o)
    terms = dict(zip(TERMS, found, strict=False))
    terms["R4"] = terms["R4"] + sums.flushed
    terms |= {"R5": sums.r5, "R6": sums.r6, "R7": r7}
    delta_lse = rows.delta_lse + rows.score.shift - xp.log1p(-xp.minimum(sums.theta_l, 1 - U64))
    delta_lse = _lse_bound(block, rows.lse, delta_lse, rows.score, shared)
    return _promised(rows, terms, delta_lse, fits)


def _sums(rows: Rows) -> _Sums:
    """R4: weights flushed to zero; R5: weights rounded; R6: the sums, in any order [L35]."""
    n, score, count = rows.shared.n, rows.score, rows.count
    xp = array_namespace(rows.P)
    rho = rows.rounding()
    rounded = rho @ rows.magnitude
    of_products = _roundings_of_products(rows)
    of_rises = gamma(score.rises + rows.further, U)
    theta_o = (1 + of_products) * (1 + of_rises) - 1
    least = 2.0**-142 if n.by_tile else 2.0**-148
    underflow = (count + score.rises + rows.further + 2)[..., None] * least
    theta_l, theta, r5, share = _normaliser(rows, rho, rounded, theta_o, underflow[..., 0])
    share = share[..., None]
    with np.errstate(divide="ignore"):
        by_l = (1.0 if n.online else 1.0 + U) / (1.0 - theta) - 1.0
    if n.online:
        underflow = underflow * rows.inverse_l
    else:
        underflow = underflow + 2.0**-149 * rows.total_v
    if n.value_codes and n.values == "tensor_core":  # sums are in units of codes
        underflow = underflow * xp.maximum(of_block(rows.shared.v_scale, rows.block), 1.0)
    flushed = FLUSHED_WEIGHT * rows.total_v * rows.inverse_l / share
    multiplied = _multiplied(rows, rho, rounded) / share + flushed
    r6 = theta_o[..., None] * multiplied
    if n.values == "tensor_core" and n.p_type in LEAST_NORMAL:
        moved = weight_shift(rows.P, rows.P_plus, score.d, rows.delta_lse) @ rows.magnitude
        lost_bits = tensor_core.truncation(
            rows.P, rows.v, moved + r5 + flushed, multiplied, score.rises,
            from_first=rows.shared.cut is None and not n.pieces,
        )  # fmt: skip
        rescaled = ((1 + of_products) * of_rises)[..., None] * multiplied
        r6 = xp.fmin(r6, (1 + of_rises)[..., None] * lost_bits + rescaled)
        r6 = r6 + tensor_core.truncation_by_small_operands(count, rows.v, rows.inverse_l, n)
    r6 = r6 + underflow / share
    if n.shifts:
        v_scale = of_block(rows.shared.v_scale, rows.block)
        r6 = r6 + values.dropped_by_shifts(rows.unit, v_scale)
    size = xp.abs(rows.o) + rows.delta_o + flushed + r5 + r6
    return _Sums(r5, r6 + by_l[..., None] * size, flushed, size + by_l[..., None] * size, theta_l)


def _roundings_of_products(rows: Rows) -> Array:
    """R6: bound the relative error of P.V, (..., rows), rescaling aside."""
    n, count, keys = rows.shared.n, rows.count, rows.block.S.shape[-1]
    xp = array_namespace(count)
    if n.shifts:
        return xp.zeros_like(count)  # whole numbers
    if n.by_tile:
        return values.accumulation(count, keys, n, rows.shared.tiles)
    return products(n.values, count, xp.minimum(count, -(-keys // 16)))


def _multiplied(rows: Rows, rho: Array, rounded: Array) -> Array:
    """Bound the sum of the magnitudes of V by rounded weights."""
    n, P_plus = rows.shared.n, rows.P_plus
    if n.values == "fp8":
        step = values.code_step(P_plus, n, rows.shared.tiles, rows.score.slack)
        scale = of_block(rows.shared.v_scale, rows.block)
        return values.aligned_products(P_plus + rho, step, rows.magnitude, scale)
    return P_plus @ rows.magnitude + rounded


def _normaliser(
    rows: Rows, rho: Array, rounded: Array, theta_o: Array, underflow: Array
) -> _Normaliser:
    """R6 of l, and the roundings of P and of the sums that O and l share [L36]."""
    n, score, count, l_least = rows.shared.n, rows.score, rows.count, rows.l_least
    xp = array_namespace(count)
    theta_l = gamma(xp.maximum(count - 1, 0.0) + score.rises + n.by_tile, U)
    theta_l = xp.minimum(theta_l + (1 + theta_l) * count * FLUSHED_WEIGHT / l_least, 1.0)
    lost = (count * FLUSHED_WEIGHT + underflow) / l_least
    if n.sums_operand and n.by_tile and not n.shifts:  # of codes, by the roundings of O
        r5, share = rounding_of_mean(rho, rows.v, rows.o, rows.delta_o)
        theta = theta_o + (1 + theta_o) * lost / share
        theta = xp.where(rho.sum(axis=-1) < 1, xp.minimum(theta, 1.0), 1.0)
        return _Normaliser(theta_l, theta, r5, share)
    theta = theta_l
    if n.sums_operand:  # in P.V itself, or of codes, step by step
        if n.shifts:
            lost = lost + values.dropped_of_l(rows.unit, n.shifts)
        theta = theta_l if n.shifts else theta_o + (1 + theta_o) * U  # the factor is divided out
        theta = sum_of_operand(rows.P_plus, rho, theta, lost)
    return _Normaliser(theta_l, theta, rounded, xp.ones_like(count))


def _stored(rows: Rows, size: Array) -> tuple[Array, Array]:
    """R7: 1/l, times 1/l, and the store; and whether the stored number is in its type's range."""
    n = rows.shared.n
    xp = array_namespace(size)
    r7, stored = xp.zeros_like(rows.o), size
    block_mean = of_block(rows.shared.v_mean, rows.block)
    if n.value_codes:
        r7, stored = values.with_mean(size, block_mean, n.pieces)
    elif n.online:
        r7 = ((1 + U) ** 2 - 1) * size + 2.0**-149
        stored = size + r7
    # NOTE: the stored number includes the mean of V, o does not.
    exact_o = rows.o if block_mean is None else rows.o + block_mean
    cost, fits = values.store(exact_o, stored, n)
    if n.pieces > 1 and n.shifts and block_mean is not None:  # a piece leaves l times the mean
        fits &= xp.abs(block_mean) * 2.0**n.shifts.sum_bits <= MAX_FLOAT
    return r7 + cost, fits


def _promised(
    rows: Rows, terms: dict[str, Array], delta_lse: Array, fits: Array
) -> tuple[dict[str, Array], Array]:
    """Make bounds of rows that leave the range infinite, under the tag of the first overflow."""
    n, score = rows.shared.n, rows.score
    xp = array_namespace(delta_lse)
    overflows = xp.isinf(delta_lse)
    attends = rows.count > 0
    usable = score.usable & (rows.l_least > 0)
    largest_weight = xp.maximum(xp.minimum(score.slack, 99.0), n.headroom)
    codes = 256.0 if n.by_tile else 1.0  # sums of codes are larger than sums of P by this factor
    fits &= rows.total_v * codes * xp.exp2(largest_weight + 1)[..., None] <= MAX_FLOAT
    terms = promised(terms, attends, usable, fits, rows.spoilt)
    delta_lse = xp.where(attends, xp.where(usable, delta_lse, xp.inf), 0.0)
    return terms, xp.where(overflows, xp.inf, delta_lse)


def least_sum(score: Perturbed, lse: Array, Z_minus: Array) -> Array:
    """Bound l from below, in units of its final maximum [L33].

    The largest key has weight 2^-slack, and without perturbations the sum is at least e^(lse -
    s_max).
    """
    xp = array_namespace(lse)
    with np.errstate(invalid="ignore", over="ignore"):
        drop = xp.where(lse > NEG_INF, lse - score.reach, 0.0) - LN2 * score.slack
    by_sum = Z_minus * xp.exp(xp.where(xp.isfinite(drop), xp.minimum(drop, 60.0), -60.0))
    by_max = 0.999 * xp.exp2(-2.0 * xp.minimum(score.slack, 99.0))
    return xp.maximum(by_sum, by_max) * xp.exp(-EX2_LOG_ERROR * score.rises) / REFERENCE


def operand_rounding(P_plus: Array, n: Numerics, score: Perturbed, inverse_l: Array) -> Array:
    """R5: bound the error of each probability after rounding P to 16 bits [L34]."""
    xp = array_namespace(P_plus)
    subnormal = HALF_SUBNORMAL[n.p_type] * inverse_l
    # NOTE: with headroom the scores do not determine M, so the place of p in its binade is unknown.
    known = n.online and not n.headroom
    relative = UNIT_ROUNDOFF[n.p_type] * (_mantissa_share(score) if known else 1.0)
    return xp.maximum(relative * P_plus, xp.minimum(subnormal, P_plus))


def _mantissa_share(score: Perturbed) -> Array:
    """R5: bound half_ulp(p) / (u p), between 1/2 and 1, if the binade of p is known [L34].

    p lies within a factor 2^±uncertain of 2^exponent, in units of its step.
    """
    xp = array_namespace(score.drift)
    uncertain = (score.d + score.drift) / LN2 + score.slack[..., None]
    upper = score.exponent + uncertain
    share = xp.exp2(xp.minimum(2 * uncertain - (upper - xp.floor(upper)), 0.0))
    return share * REFERENCE


def _lse_bound(
    block: ScoreBlock,
    lse: Array,
    delta: Array,
    score: Perturbed,
    shared: Shared,
) -> Array:
    """R7 of the log-sum-exp [L38]: fl(fl(M + log2 l) LN2), and the term that smoothing adds [L17].

    If M is in natural units: fl(fma(log2 l, LN2, M)). `delta` bounds its change by perturbed scores
    and by the rounding of l.
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
