"""Perturbation of a kernel's scores: R2, R3 and R4 as one bound d_j for each score.

Proofs are in docs/MATH_REFERENCE.md, under the tags [L10] to [L32]. `cupyattn.bounds` turns d into
a bound of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import NEG_INF, Array, array_namespace, as_float64
from cupyattn.bounds.perturbation import gamma
from cupyattn.kernels.numerics import (
    EX2_APPROX_ERROR,
    HALF_SUBNORMAL,
    LARGEST_SCORE,
    TANHF_ERROR,
    TENSOR_CORE_ROUNDOFF,
    UNIT_ROUNDOFF,
    Numerics,
)
from cupyattn.kernels.softcap import SOFTCAP_ERROR
from cupyattn.kernels.splits import Splits
from cupyattn.kernels.tiles import Tiles
from cupyattn.reference.exact import ScoreBlock

U = UNIT_ROUNDOFF["float32"]
U64 = UNIT_ROUNDOFF["float64"]
LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
#: |log(1 + η)| of one ex2.approx.ftz, |η| <= 2^-22.
EX2_LOG_ERROR = -math.log1p(-EX2_APPROX_ERROR)
#: Largest score with a bound, in log2 units, if M is a whole number. An addition rounds M
#: (exp2.cuh), as long as numbers this large have halves. Otherwise the limit is LARGEST_SCORE (R4).
MAX_WHOLE_SCORE = 2.0**22
#: Largest distance of M + code_bits above the largest score, in log2 units, with `Shifts`.
ABOVE_BY_SHIFTS = 32
#: Error of lse by the logarithm of the largest code, its rounding and 1/code, in natural units.
CODE_UNIT_ERROR = 2.0**-20
MAX_FLOAT = 2.0**126
#: Scaled products up to this can be added to any float32 bias without overflow, in natural units.
#: Hopper forms add bias times log2(e) or 1/scale, which may overflow to -inf. If the row has a
#: bound, this is far below its largest score, and the key weighs 0 (docs/MATH_REFERENCE.md, §18).
MAX_BIASED = 2.0**102
#: Replaces a probability that underflows float64. e^300 times it is still negligible.
LEAST_P = 1e-300
#: A score that stays so far below the largest has a probability below LEAST_P.
FAR_BELOW = 700.0
#: [L4] Float64's share of everything, in the exact result and in the bound itself.
REFERENCE = 1.0 + 2.0**-20


@dataclass(frozen=True)
class Scaling:
    """R3, how a kernel turns its dot products into scores, as relative errors.

    A computed score is ((exact + R2) (1 + own) + bias) (1 + added) (1 + common) + tiny. `common` is
    one number for a row. `own` includes a softcap.
    """

    common: float
    own: float
    added: float
    tiny: float  #: natural units
    largest: float  #: magnitude that intermediate products may reach beside Σ|q||k| and scores


def scaling_errors(n: Numerics, sigma: float, quantized: Any, softcap: float = 0.0) -> Scaling:
    """Return the relative errors of R3 [L22], with the exact roundings of constants."""

    def constant(x: float) -> float:
        with np.errstate(over="ignore"):
            return abs(float(np.float32(x)) / x - 1.0) + 2.0**-50

    tiny, largest = 2.0**-148, sigma
    if n.scored and n.scaling == "folded":
        # [L25]
        # ((fl(u tanh(dot / u)) + bias f) (1 + U)) with f = fl(1 / sigma). The ratio f / (1 / sigma)
        # belongs to the sum, and its inverse to the product alone.
        factor = constant(1 / sigma) if n.bias else 0.0
        own = (1 + (SOFTCAP_ERROR if softcap else 0.0)) / (1 - factor) - 1
        added = (1 + factor) * (1 + U) - 1 if n.bias else 0.0
        tiny += sigma * 2.0**-146
        return Scaling(constant(sigma * LOG2E), own, added, tiny, max(sigma, softcap))
    if n.scaling == "folded":
        return Scaling(constant(sigma * LOG2E), 0.0, 0.0, tiny, largest)
    if n.scaling == "natural":
        row, own = 1 + constant(sigma), U
    else:
        # dequantised: fl(fl(dot * k_scale) * fl(factor * q_scale)). The factor of a row may be
        # subnormal, where it is off by up to 2^-150.
        factor = sigma if n.subtracts_first else sigma * LOG2E
        least, largest_q = _range(quantized.q_scale)
        _, largest_k = _range(quantized.k_scale)
        subnormal = HALF_SUBNORMAL["float32"] / (factor * least)
        row, own = (1 + constant(factor)) * (1 + U + subnormal), (1 + U) ** 2 - 1
        largest_dot = 2.0**16 * quantized.q_codes.shape[-1]  # of codes less zero points
        largest = max(largest_dot * largest_k, factor * largest_q, sigma)
        # Both scales may be one factor, which is subnormal where S is.
        largest, tiny = max(largest, factor * largest_q * largest_k), 2.0**-124
    if n.scored:
        # (fl(u tanh(S / u)) + bias f) (1 + U), f = fl(log2 e): as above. With a bias, errors that a
        # row shares belong to its products.
        factor = constant(LOG2E) if n.bias else 0.0
        own = row * (1 + own) * (1 + (SOFTCAP_ERROR if softcap else 0.0)) / (1 - factor) - 1
        added = (1 + factor) * (1 + U) - 1 if n.bias else 0.0
        return Scaling(0.0, own, added, tiny + 2.0**-146, max(largest, softcap * LOG2E))
    if not n.subtracts_first:
        row *= 1 + constant(LOG2E) if n.scaling == "natural" else 1
        return Scaling(row - 1, own, 0.0, tiny, largest)
    own = row * (1 + own) - 1
    if softcap:
        # [L23] fl(cap * tanhf(fl(x * fl(1 / cap))))
        constants = (1 + constant(1 / softcap)) * (1 + constant(softcap))
        own = (1 + own) * constants * (1 + U) ** 2 * (1 + TANHF_ERROR) - 1
        tiny += softcap * 2.0**-146
    return Scaling(constant(LOG2E), own, U if n.bias else 0.0, tiny, largest)


def _range(scale: Array) -> tuple[float, float]:
    """Return the least and the largest usable scale.

    A NaN makes its rows NaN and nothing else. For packed sequences without rows both are 0.
    """
    xp = array_namespace(scale)
    usable = as_float64(scale)[xp.isfinite(scale) & (scale > 0)]
    return (float(usable.min()), float(usable.max())) if usable.size else (1.0, 1.0)


def products(n: str, terms: Any, steps: Any = None) -> Any:
    """Return γ of an inner product of so many nonzero terms (R2 [L21], R6).

    [L3] A tensor core adds 16 products and its accumulator. It truncates all but the largest, and
    then the sum: n + ceil(n/16) roundings of 2^-23. `steps` bounds the instructions that see a
    nonzero term.
    """
    if n == "fma":
        return gamma(terms, U)
    if n == "tensor_core":
        steps = -(-terms // 16) if steps is None else steps
        return gamma(terms + steps, TENSOR_CORE_ROUNDOFF)
    return 0.0  # int32 [L16]


@dataclass(frozen=True)
class Perturbed:
    """Errors of the scores of a block by R2, R3 and R4; (..., rows, keys) or (..., rows)."""

    r2: Array
    r3: Array
    r4: Array
    shift: Array  # natural units: common to a row, changes lse alone
    rises: Array  # steps at which M may rise, after the first
    exponent: Array  # log2 units: the exact score minus the running maximum of its step
    drift: Array  # natural units: change by R2 and R3 of the running maximum of a key's step
    top: Array  # s_max, natural units
    reach: Array  # its upper bound with R2 and R3
    top_drift: Array  # its change by R2 and R3, up or down
    slack: Array  # log2 units: error of rounding M, u |M|, or 2 u |M| if rounded up
    usable: Array  # the row keeps to the kernel's range

    @property
    def d(self) -> Array:
        """The bound of each score's perturbation."""
        return self.r2 + self.r3 + self.r4


def perturb(
    block: ScoreBlock,
    n: Numerics,
    tiles: Tiles,
    sigma: float,
    scaling: Scaling,
    cut: Splits | None = None,
) -> Perturbed:
    """R2, R3, R4: bound the perturbation of every score of a block."""
    xp = array_namespace(block.S)
    admitted = block.admitted
    head_dim = block.q.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):  # infinities
        magnitudes = xp.abs(block.q) @ xp.abs(block.k).swapaxes(-1, -2)  # Σ|q||k|
    finite = xp.isfinite(block.S) & xp.isfinite(magnitudes)
    top = xp.where(finite, block.S, NEG_INF).max(axis=-1)
    top = xp.where(xp.isfinite(top), top, 0.0)
    S = xp.where(finite, block.S, top[..., None])
    unbiased = xp.abs(xp.where(finite, block.unbiased, 0.0))
    magnitudes = xp.where(admitted & finite, magnitudes, 0.0)
    largest = magnitudes.max(axis=-1)

    # R2: the inner product [L21], then the roundings of float64, which int32 does not have.
    dot = products(n.scores, head_dim) * magnitudes
    if n.scores != "int32":
        dot = dot + 2 * head_dim * 2.0**-149  # underflow
    dot = dot + gamma(head_dim + 4, U64) * magnitudes
    own, added = scaling.own, (1 + scaling.added) * (1 + scaling.common)
    r2 = sigma * (1 + own) * added * dot * REFERENCE

    # R3: a relative error that a row shares is a shift, and the same error of s - s_max [L10].
    r3 = scaling.common * (top[..., None] - S) + (
        own * added * unbiased + scaling.added * (1 + scaling.common) * xp.abs(S) + scaling.tiny
    )
    r3 = r3 * REFERENCE
    shift = scaling.common * xp.abs(top) * REFERENCE

    # R4: arguments of exp2 and of alpha, and exp2 itself [L27]. M's own rounding cancels [L26].
    known = xp.where(admitted, r2 + r3, 0.0)
    attends = admitted.any(axis=-1)
    reach = xp.where(attends, xp.where(admitted, S + known, NEG_INF).max(axis=-1), 0.0)
    least = xp.where(attends, xp.where(admitted, S - known, NEG_INF).max(axis=-1), 0.0)
    top_drift = xp.maximum(reach - top, top - least)
    if cut is None:
        rises_after, rises, running, drift = count_rises(
            S, known, admitted, tiles.block_kv if n.online else None
        )
    else:
        rises_after, rises, running, drift = count_rises_of_slices(
            S, known, admitted, tiles.block_kv, cut
        )
    below = xp.maximum(reach[..., None] - S + known, 0.0)
    if n.subtracts_first:  # [L30]
        shift, slack = xp.zeros_like(shift), xp.zeros_like(shift)
        square = (1 + U) ** 2 - 1
        arguments = square * (1 + scaling.common) * below
        arguments = arguments + scaling.common * (below - (top[..., None] - S))
        if n.code_log2:
            arguments = arguments + LN2 * U * n.code_log2
            shift = shift + CODE_UNIT_ERROR
    else:
        started = running > NEG_INF
        if n.scored:  # alpha = 0 multiplies sums under a lower M before they count
            started &= running + drift >= top[..., None] - FAR_BELOW
        largest_M = xp.where(started, xp.abs(xp.where(started, running, 0.0)) + drift, 0.0)
        slack = U * ((largest_M.max(axis=-1) + shift) / LN2) * (1 + 2 * U)
        if n.code_log2:  # M is lower by code_log2, and rounded up [L54]
            slack = 2 * slack + 2 * U * n.code_log2
        above = ABOVE_BY_SHIFTS if n.shifts else 3 * n.headroom + n.code_log2
        arguments = LN2 * U * (below / LN2 + 4 * slack[..., None] + above)
        if n.headroom:
            rises_after, rises = every_step(S, tiles.block_kv)
        elif n.shifts:  # exact: powers of two [L59]
            rises_after, rises = xp.zeros_like(rises_after), xp.zeros_like(rises)
        if n.pieces > 1:  # the factor from a piece's M to the largest of all [L32]
            rises_after, rises = rises_after + 1, rises + 1
    # Roundings of the key, of beta and of every alpha.
    exponentials = (2 if n.by_tile and not n.shifts else 1) + rises_after
    r4 = (arguments + EX2_LOG_ERROR * exponentials + 2.0**-125) * REFERENCE

    largest_score = MAX_WHOLE_SCORE if n.shifts else LARGEST_SCORE
    usable = (finite | ~admitted).all(axis=-1) & (slack <= U * largest_score)
    usable &= xp.maximum(largest * max(1.0, sigma), scaling.largest) <= MAX_FLOAT
    if n.bias:
        usable &= largest * sigma <= MAX_BIASED
    counts = admitted & ~far_below(S, top, xp.where(admitted, r2 + r3 + r4, 0.0))
    r2, r3, r4 = (xp.where(counts, r, 0.0) for r in (r2, r3, r4))
    exponent = xp.where(admitted & (running > NEG_INF), S - running, 0.0) / LN2
    return Perturbed(
        r2, r3, r4, shift, rises, exponent, drift, top, reach, top_drift, slack, usable
    )


def every_step(S: Array, block_kv: int) -> tuple[Array, Array]:
    """Count steps as `count_rises` does, if M may rise at any of them [L31]."""
    xp = array_namespace(S)
    len_kv = S.shape[-1]
    last = (len_kv - 1) // block_kv
    after = (last - xp.arange(len_kv) // block_kv).astype(np.float64)
    return xp.broadcast_to(after, S.shape), xp.full(S.shape[:-1], float(last))


def far_below(S: Array, top: Array, d: Array) -> Array:
    """Whether a score is so far below the largest that its probability is below LEAST_P [L11].

    A caller that sets d to 0 for these keys must add `far_keys` to the bound of the output.
    """
    xp = array_namespace(S)
    at_top = xp.where(top[..., None] == S, d, 0.0).max(axis=-1, keepdims=True)
    return S - top[..., None] + d + at_top <= -FAR_BELOW


def far_keys(far: Array, values: Array) -> Array:
    """[L11] Bound the effect on an output of keys that are `far_below`, if their d is 0.

    Parameters
    ----------
    far : (..., rows, keys) array of bool
    values : (..., keys, head_dim) array
        Finite.

    Returns
    -------
    (..., rows, head_dim) array

    Notes
    -----
    Each has a probability of at most LEAST_P before and after, and moves a mean of values by that
    times their span at most.
    """
    if far.shape[-1] == 0:
        return 0.0 * (far @ values)
    span = values.max(axis=-2, keepdims=True) - values.min(axis=-2, keepdims=True)
    return LEAST_P * far.sum(axis=-1)[..., None] * span


def count_rises(
    S: Array, known: Array, admitted: Array, block_kv: int | None
) -> tuple[Array, Array, Array, Array]:
    """Count the steps at which the running maximum may rise [L27].

    Returns the count after each key's step and the count after the first step (..., rows). Also
    returns the running maximum of the exact scores at each key's step, and the bound of its change
    if scores are perturbed by `known`.
    """
    xp = array_namespace(S)
    len_kv = S.shape[-1]
    step = len_kv if block_kv is None else block_kv
    steps = -(-len_kv // step)
    pad = [(0, 0)] * (S.ndim - 1) + [(0, steps * step - len_kv)]

    def block_max(x: Array) -> Array:
        x = xp.pad(xp.where(admitted, x, NEG_INF), pad, constant_values=NEG_INF)
        return x.reshape(*x.shape[:-1], steps, step).max(axis=-1)

    def by_key(x: Array) -> Array:
        return x.repeat(step, axis=-1)[..., :len_kv]

    above, least = block_max(S + known), running_max(block_max(S - known))
    before = least[..., :-1]
    rise = (above[..., 1:] > before) & (before > NEG_INF)
    rises = rise.sum(axis=-1).astype(np.float64)
    until = xp.concatenate([xp.zeros((*rise.shape[:-1], 1)), rise.cumsum(axis=-1)], axis=-1)
    running = running_max(block_max(S))
    with np.errstate(invalid="ignore"):  # -inf before the first key
        drift = xp.maximum(running_max(above) - running, running - least)
    drift = xp.where(running > NEG_INF, drift, 0.0)
    return by_key(rises[..., None] - until), rises, by_key(running), by_key(drift)


def running_max(x: Array) -> Array:
    """Return the running maximum along the last axis."""
    xp = array_namespace(x)
    shift = 1
    while shift < x.shape[-1]:  # by doubling
        after = xp.maximum(x[..., shift:], x[..., :-shift])
        x = xp.concatenate([x[..., :shift], after], axis=-1)
        shift *= 2
    return x


def count_rises_of_slices(
    S: Array, known: Array, admitted: Array, block_kv: int, cut: Splits
) -> tuple[Array, Array, Array, Array]:
    """`count_rises` for split keys [L28]: each slice has a separate running maximum.

    The factor from a slice's maximum to a larger maximum, of its block or of all, counts as one
    more rise.
    """
    xp = array_namespace(S)
    rises_after, running, drift = xp.zeros_like(S), xp.full_like(S, NEG_INF), xp.zeros_like(S)
    most = xp.zeros(S.shape[:-1])
    for begin, end in cut.ranges():
        if begin == end:
            continue
        keys = (..., slice(begin, end))
        rises_after[keys], rises, running[keys], drift[keys] = count_rises(
            S[keys], known[keys], admitted[keys], block_kv
        )
        most = xp.maximum(most, rises)
    return rises_after + cut.meetings, most + cut.meetings, running, drift
