"""A certain bound for outputs whose P is codes: most codes are predicted, few are in doubt.

The score of every key is known up to d_j, which gives an interval of its weight. Rounding is
monotone, so the code lies between the roundings of both ends. Only codes whose ends differ add to
the bound. Proofs are in docs/MATH_REFERENCE.md, §13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace
from cupyattn.bounds import values
from cupyattn.bounds.perturbation import gamma
from cupyattn.bounds.scores import (
    EX2_LOG_ERROR,
    FAR_BELOW,
    LN2,
    LOG2E,
    REFERENCE,
    U64,
    Perturbed,
    U,
    running_max,
)
from cupyattn.kernels.numerics import (
    EX2_FLUSH,
    FP8_LEAST_NORMAL,
    FP8_ROUNDOFF,
    LANES,
    P_CODE_ONE,
    Numerics,
    Shifts,
)
from cupyattn.kernels.tiles import Tiles
from cupyattn.reference.exact import ScoreBlock

#: Products that one instruction over 8-bit floats adds to its accumulator.
FP8_PRODUCTS = 32
#: Limits between which factors of codes are normal numbers and sums in units of codes are finite.
#: J2 alone judges channels whose largest value is less or whose sum of magnitudes may be more.
LEAST_VALUES, LARGEST_SUM = 2.0**-80, 2.0**100
#: Only the other bound judges rows whose denominators may lose more than this share.
LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class Prediction:
    """The predicted output of a kernel with codes of P, and the bound of the distance to it.

    Parameters
    ----------
    o : (..., rows, head_dim) array
        The output of the predicted codes, with the mean of V.
    bound : (..., rows, head_dim) array
        Bound of |kernel - o|; +inf in rows that only the other bound judges.
    in_doubt : (..., rows) array
        Number of codes whose two ends differ.
    """

    o: Array
    bound: Array
    in_doubt: Array


@dataclass(frozen=True)
class _Weights:
    """Weights that the codes stand for, relative to e^top, between least and most.

    Shapes: least, most (..., rows, steps, keys of a step), unit, unit_error (..., rows, steps),
    dropped (..., rows). The weight of code 1 is `unit`, and `unit_error` bounds the error of a
    step's factor, in natural units. Shifts may drop `dropped` units of O.
    """

    least: Array
    most: Array
    unit: Array
    unit_error: Array
    dropped: Array


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # J2 judges such rows
def predict(
    block: ScoreBlock,
    score: Perturbed,
    n: Numerics,
    tiles: Tiles,
    common: float,
    mean: Array | None,
    v_scale: Array | None,
) -> Prediction:
    """Predict the output of a kernel with codes of P [L67] [L68] [L69].

    Parameters
    ----------
    block : ScoreBlock
        Has the values that the kernel sums, without their mean.
    score : Perturbed
        Perturbations of the block's scores.
    n : Numerics
    tiles : Tiles
        Tiles of the call: another ``block_kv`` predicts other codes.
    common : float
        `Scaling.common`.
    mean : (..., 1, head_dim) array or None
        Mean of V, as the kernel adds it.
    v_scale : (..., 1, head_dim) or (..., keys, head_dim) array or None
        Scales of V: by channel if there are `Shifts`, by key for 8-bit floats.
    """
    xp = array_namespace(block.S)
    cut = _Cut(block, score, tiles.block_kv)
    weights = (
        _shifted(cut, score, n.shifts, common, n.pieces > 1)
        if n.shifts
        else _by_tile(cut, score, n)
    )
    v = xp.where(xp.isfinite(block.v), block.v, 0.0)
    magnitude = xp.abs(v)
    e = xp.expm1(weights.unit_error)
    middle, radius = (weights.least + weights.most) / 2, (weights.most - weights.least) / 2
    in_doubt = (radius > 0).sum(axis=(-2, -1))
    radius = radius * (1 + e)[..., None]
    if n.sums_operand:
        total = middle.sum(axis=(-2, -1))
    else:
        total = xp.exp(cut.S - cut.top).sum(axis=(-2, -1))
    total = xp.where(total > 0, total, 1.0)
    middle, radius = middle / total[..., None, None], radius / total[..., None, None]

    of_tiles = cut.products(middle, v)  # (..., steps, rows, head_dim)
    o = of_tiles.sum(axis=-3)
    doubt = cut.flat(radius) @ magnitude
    doubts = radius.sum(axis=(-2, -1))
    by_step = xp.swapaxes(e, -1, -2)[..., None]  # (..., steps, rows, 1)
    count = block.admitted.sum(axis=-1).astype(np.float64)
    steps = middle.shape[-2]
    further = max(0, n.pieces - 1)
    theta_l = gamma(xp.minimum(count, steps) + score.rises + further + LANES, U)
    if n.sums_operand:
        share = xp.swapaxes(middle.sum(axis=-1), -1, -2)[..., None]
        off = (by_step * xp.abs(of_tiles - share * o[..., None, :, :])).sum(axis=-3)
        off = off + doubt + doubts[..., None] * xp.abs(o)
        lost = (by_step * share).sum(axis=(-3, -1)) + doubts
    else:
        theta_l = gamma(count + score.rises + 2, U)
        off = (by_step * xp.abs(of_tiles)).sum(axis=-3) + doubt
        moved = xp.expm1(cut.tiled(score.d, 0.0)) * xp.exp(cut.S - cut.top)
        lost = moved.sum(axis=(-2, -1)) / total
    if n.shifts:
        if n.shifts.l_bits is not None:
            of_l = LANES * 2.0**-n.shifts.l_bits * weights.dropped / total
            off, lost = off + of_l[..., None] * xp.abs(o), lost + of_l
        theta_o = gamma(further, U) * xp.ones_like(theta_l)
        if n.pieces > 1:  # a factor for each piece, wherever it ends
            factor = math.expm1(EX2_LOG_ERROR * REFERENCE)
            of_all = cut.flat(middle) @ magnitude + doubt
            off = off + factor * (of_all + (1 + doubts)[..., None] * xp.abs(o))
            lost = lost + factor * (1 + doubts)
        half = 0.5 * (weights.dropped / total)[..., None] * v_scale
        o, off = o - half, off + half * (1 + lost)[..., None]
    else:
        theta_o = gamma(xp.minimum(count, steps) + 2 + score.rises, U)
    of_sums = ((1 + by_step) * xp.abs(of_tiles)).sum(axis=-3) + doubt
    off = off + theta_o[..., None] * of_sums
    if n.values == "fp8":
        unit = weights.unit / total[..., None]
        shift, truncation = cut.truncated(middle, radius, unit, v, v_scale, by_step)
        o, off = o + shift, off + truncation
    usable = score.usable & (lost <= LARGEST_SHARE) & xp.isfinite(cut.top[..., 0, 0])
    lost = xp.where(usable, lost, 0.0)
    off = off / (1 - lost)[..., None]
    if not n.sums_operand:
        off = off + (lost / (1 - lost))[..., None] * xp.abs(o)
    off = off + (theta_l / (1 - theta_l))[..., None] * (xp.abs(o) + off)
    keys = block.S.shape[-1]
    largest = magnitude.max(axis=-2, keepdims=True)
    off = off + (2.0**12 * EX2_FLUSH + 2.0**-140 + (keys + 16) * U64) * keys * largest

    size = xp.abs(o) + off
    cost, stored = values.with_mean(size, mean, n.pieces)
    o = o if mean is None else o + mean
    at_store, fits = values.store(o, stored, n)
    width = (off + cost + at_store) * REFERENCE
    spoilt = ~xp.isfinite(block.v).all(axis=-2, keepdims=True)
    of_values = (largest == 0) | ((largest >= LEAST_VALUES) & (largest * keys <= LARGEST_SUM))
    known = usable[..., None] & fits & ~spoilt & of_values & xp.isfinite(o) & xp.isfinite(width)
    attends = (count > 0)[..., None]
    if mean is not None:
        spoilt = spoilt | ~xp.isfinite(mean)
    without_keys = xp.where(spoilt, xp.inf, 0.0)  # 0 times a NaN, or a mean that is one
    bound = xp.where(attends, xp.where(known, width, xp.inf), without_keys)
    return Prediction(xp.where(attends & known, o, 0.0), bound, in_doubt)


class _Cut:
    """Scores of a block, cut into steps of `block_kv` keys: (..., rows, steps, keys of a step)."""

    def __init__(self, block: ScoreBlock, score: Perturbed, block_kv: int) -> None:
        xp = self.xp = array_namespace(block.S)
        self.keys, self.block_kv = block.S.shape[-1], block_kv
        self.steps = -(-self.keys // block_kv)
        self.top = score.top[..., None, None]
        near = block.admitted & (score.top[..., None] - FAR_BELOW < block.S)
        self.attended = self.tiled(block.admitted, False).any(axis=-1)
        self.S = self.tiled(xp.where(near, block.S, NEG_INF), NEG_INF)
        known = self.tiled(score.r2 + score.r3, 0.0)
        #: Largest score of a step, -inf without keys, and the bound of its change by R2 and R3.
        self.m = self.S.max(axis=-1)
        self.has_keys = self.m > NEG_INF
        self.m_finite = xp.where(self.has_keys, self.m, self.top[..., 0])
        above, below = (self.S + known).max(axis=-1), (self.S - known).max(axis=-1)
        with np.errstate(invalid="ignore"):
            drift = xp.maximum(above - self.m, self.m - below)
        self.drift = xp.where(self.has_keys, drift, 0.0)

    def tiled(self, x: Array, fill: float) -> Array:
        """Cut the last axis into steps, the last one filled up."""
        pad = [(0, 0)] * (x.ndim - 1) + [(0, self.steps * self.block_kv - self.keys)]
        x = self.xp.pad(x, pad, constant_values=fill)
        return x.reshape(*x.shape[:-1], self.steps, self.block_kv)

    def flat(self, x: Array) -> Array:
        """Undo `tiled`."""
        return x.reshape(*x.shape[:-2], -1)[..., : self.keys]

    def groups(self, v: Array, size: int) -> Array:
        """Cut keys of V into groups: (..., groups, size, head_dim)."""
        length = self.steps * self.block_kv
        pad = [(0, 0)] * (v.ndim - 2) + [(0, length - self.keys), (0, 0)]
        v = self.xp.pad(v, pad)
        return v.reshape(*v.shape[:-2], length // size, size, v.shape[-1])

    def products(self, weights: Array, v: Array, size: int = 0) -> Array:
        """Sum weights times v, group by group of `size` keys: (..., groups, rows, head_dim)."""
        size = size or self.block_kv
        by_group = weights.reshape(*weights.shape[:-2], -1, size).swapaxes(-2, -3)
        return by_group @ self.groups(v, size)

    def truncated(
        self, middle: Array, radius: Array, unit: Array, v: Array, v_scale: Array, by_step: Array
    ) -> tuple[Array, Array]:
        """Return centre and radius of the loss of tensor cores in sums of 8-bit floats [L66].

        Each addend of an instruction, the accumulator included, loses less than one unit, toward
        zero. So the loss of a product has the sign of its value. The unit is 2^-13 of 2 to the
        largest exponent. A product's exponent is the sum of its codes' exponents. The sum's unit
        is 2^-13 of 2 to its own exponent. `unit` (..., rows, steps) and `v_scale` are the
        weights of code 1; a step has one scale of V. `by_step` (..., steps, rows, 1) bounds the
        errors of steps' factors. Returns two (..., rows, head_dim) arrays.
        """
        xp, each = self.xp, self.block_kv // FP8_PRODUCTS
        if self.block_kv % FP8_PRODUCTS:
            raise ValueError(
                f"block_kv of e4m3 must be a multiple of {FP8_PRODUCTS}, got {self.block_kv}"
            )

        def by_step_of(x: Array) -> Array:
            return x.reshape(*x.shape[:-3], self.steps, each, *x.shape[-2:])

        most, size = middle + radius, xp.abs(v)
        counts = (most > 0).astype(np.float64)
        weights = power_below(most, unit[..., None], FP8_LEAST_NORMAL)
        weights = weights.reshape(*middle.shape[:-2], -1, FP8_PRODUCTS)
        aligned = self.groups(power_below(size, v_scale, FP8_LEAST_NORMAL), FP8_PRODUCTS)
        product = xp.zeros((*weights.shape[:-3], *weights.shape[-3:-1][::-1], v.shape[-1]))
        for i in range(FP8_PRODUCTS):
            of_rows = xp.swapaxes(weights[..., i], -1, -2)[..., None]
            product = xp.maximum(product, of_rows * aligned[..., i, :][..., None, :])
        positive, negative = (
            by_step_of(self.products(counts, (signed > 0).astype(np.float64), FP8_PRODUCTS))
            for signed in (v, -v)
        )

        reached = by_step_of(self.products(middle, v, FP8_PRODUCTS)).cumsum(axis=-3)
        in_doubt = self.products(radius, size, FP8_PRODUCTS)
        reached = xp.abs(reached) + by_step_of(in_doubt).cumsum(axis=-3)
        before = xp.concatenate(
            [xp.zeros_like(reached[..., :1, :, :]), reached[..., :-1, :, :]], -3
        )
        product, of_sums = by_step_of(product), FP8_ROUNDOFF * reached
        growth = (1 + (FP8_PRODUCTS + 3) * FP8_ROUNDOFF) ** (each + 1)
        lost = (FP8_PRODUCTS + 1) * FP8_ROUNDOFF * xp.maximum(product, before) + of_sums
        at_most = growth * lost.sum(axis=-3)
        # Weight of code 1 in a sum: the product of both operands' weights, (..., steps, 1, rows,
        # head_dim).
        of_v = self.groups(v_scale, self.block_kv)[..., :1, :]
        of_both = (xp.swapaxes(unit, -1, -2)[..., None] * of_v)[..., None, :, :]
        before = power_below(before + at_most[..., None, :, :], of_both)
        bits = FP8_ROUNDOFF * xp.maximum(product, before)
        shift = -0.5 * (bits * (positive - negative)).sum(axis=-3)
        width = (bits * (0.5 * (positive + negative) + 1) + of_sums).sum(axis=-3)
        width = width + each * (FP8_PRODUCTS + 4) * FP8_ROUNDOFF * at_most
        width = (1 + by_step) * width + by_step * xp.abs(shift)
        return shift.sum(axis=-3), width.sum(axis=-3)


def power_below(x: Array, unit: Array, least: float = 0.0) -> Array:
    """Return the power of two below x in a unit, at least `least`, in the same units; 0 of 0.

    Numbers next to a power of two count as that power.

    Examples
    --------
    >>> power_below(np.array([0.0, 0.3, 5.0, 7.0]), np.array(1.25), 2.0**-1).tolist()
    [0.0, 0.625, 5.0, 5.0]
    """
    xp = array_namespace(x)
    known = (x > 0) & (unit > 0)
    _, exponent = xp.frexp(xp.where(known, x / xp.where(known, unit, 1.0) * (1 + 2.0**-40), 1.0))
    power = xp.maximum(xp.ldexp(xp.ones_like(x), exponent - 1), least)
    return xp.where(known, power * unit, 0.0)


def rounded(w: Array, p_type: str) -> Array:
    """Return codes of weights in units of code 1 [L62], as `reference.rounding.codes_of_p` has.

    Examples
    --------
    >>> rounded(np.array([0.6, 260.0]), "u8").tolist(), float(rounded(np.array(17.1), "e4m3"))
    ([1.0, 255.0], 18.0)
    """
    xp = array_namespace(w)
    w = xp.minimum(w, P_CODE_ONE[p_type])
    if p_type != "e4m3":
        return xp.rint(w)
    _, exponent = xp.frexp(w)
    quantum = xp.ldexp(xp.ones_like(w), xp.maximum(exponent - 4, -9))
    return xp.rint(w / quantum) * quantum


def _by_tile(cut: _Cut, score: Perturbed, n: Numerics) -> _Weights:
    """Predict codes in units of the largest weight of their tile [L63] [L64]."""
    xp, one = cut.xp, P_CODE_ONE[n.p_type]
    M = (xp.abs(cut.m_finite) + cut.drift + score.shift[..., None]) / LN2 + n.code_log2
    up = 0.0 * M if n.subtracts_first else 2 * U * (M + 1)
    of_M = (cut.drift + LN2 * up + LN2 * 2 * U * (n.code_log2 + 1)) * REFERENCE
    doubt = cut.tiled(score.d, 0.0) + of_M[..., None]
    w = one * xp.exp(cut.S - cut.m_finite[..., None])
    scale = (xp.exp(cut.m_finite - cut.top[..., 0]) / one)[..., None]
    least = scale * rounded(w * xp.exp(-doubt), n.p_type)
    most = scale * rounded(w * xp.exp(doubt), n.p_type)
    below = xp.maximum(cut.top[..., 0] - cut.m_finite, 0.0) + cut.drift
    below = below + score.top_drift[..., None] + LN2 * (2 * up + n.code_log2)
    factors = (3 if n.subtracts_first else 1) * U * below
    unit_error = of_M + factors + EX2_LOG_ERROR * (2 + score.rises[..., None])
    unit_error = xp.where(cut.has_keys, unit_error * REFERENCE, 0.0)
    unit = xp.where(cut.has_keys, scale[..., 0], 0.0)
    return _Weights(least, most, unit, unit_error, 0.0 * score.top)


def _shifted(cut: _Cut, score: Perturbed, by: Shifts, common: float, pieces: bool) -> _Weights:
    """Predict codes in units of 2^M, M a whole number of one or more candidates [L65]."""
    xp = cut.xp
    top = cut.top[..., 0] * LOG2E
    doubt = cut.tiled(score.d, 0.0) + score.shift[..., None, None]
    low, high = _exponents(cut, by, common, doubt.max(axis=(-2, -1)), pieces)
    y = cut.S * LOG2E

    def ends(M: Array) -> tuple[Array, Array]:
        unit = xp.exp2(M - top)[..., None]
        w = xp.exp2(y - M[..., None])
        return (
            unit * rounded(w * xp.exp(-doubt), "u8"),
            unit * rounded(w * xp.exp(doubt), "u8"),
        )

    least, most = ends(low)
    apart = xp.where(cut.has_keys, high - low, 0.0)
    if bool((apart > 0).any()):
        other = ends(low + 1)
        two = (apart > 0)[..., None]
        least = xp.where(two, xp.minimum(least, other[0]), least)
        most = xp.where(two, xp.maximum(most, other[1]), most)
        # Any of more than two candidates may be M: no code errs by more than the largest unit.
        many = (apart > 1)[..., None]
        unit, W = xp.exp2(high - top)[..., None], xp.exp(cut.S - cut.top)
        least = xp.where(many, xp.maximum(W * xp.exp(-doubt) - unit, 0.0), least)
        most = xp.where(many, W * xp.exp(doubt) + xp.minimum(0.5 * unit, W * xp.exp(doubt)), most)
    # NOTE: keys far below count here: the floor of a tiny negative O is -1.
    begun = cut.attended.cumsum(axis=-1) > 0  # before that O is 0
    rises = (high[..., 1:] > low[..., :-1]) & begun[..., :-1]
    units = xp.where(rises, xp.exp2(high[..., 1:] - top), 0.0)
    return _Weights(least, most, xp.exp2(high - top), 0.0 * cut.m_finite, units.sum(axis=-1))


def _exponents(
    cut: _Cut, by: Shifts, common: float, doubt: Array, pieces: bool
) -> tuple[Array, Array]:
    """Return the least and the largest M of each step [L65]: (..., rows, steps).

    `doubt` (..., rows) bounds the error of the logarithm of any weight. With pieces, the recurrence
    may begin at any step.
    """
    xp = cut.xp
    y = cut.m_finite * LOG2E
    off = (cut.drift + common * xp.abs(cut.m_finite)) / LN2 + 4 * U * xp.abs(y)
    off = off * REFERENCE + 2.0**-40
    ends = []
    for end in (-off, off):
        a = xp.where(cut.has_keys, xp.floor(y + end) + (1 - by.code_bits), -(2.0**127))
        ends.append((a, xp.maximum(a, running_max(a) - by.lower_bits)))
    (least, followed), (_, high) = ends
    low = least if pieces else followed
    if by.guards(cut.keys):
        # l is a sum of codes, none of which is more than twice its weight.
        sums = xp.exp(cut.S - cut.top).sum(axis=-1).cumsum(axis=-1)
        before = xp.concatenate([xp.zeros_like(sums[..., :1]), sums[..., :-1]], axis=-1)
        reached = xp.log2(xp.where(before > 0, 2.0 * before, 1.0))
        reached = reached + (cut.top[..., 0] + doubt[..., None]) * LOG2E
        reached = xp.where(before > 0, reached + 2.0**-30 * xp.abs(reached), -(2.0**127))
        high = xp.maximum(high, xp.floor(reached) + 3 - by.sum_bits)
    return low, high
