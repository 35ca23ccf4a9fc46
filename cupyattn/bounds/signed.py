"""Bound of the error of an output whose values have a random sign for each key.

Errors of P do not depend on V. With random signs before the values they are a Rademacher sum, which
Hoeffding's inequality bounds. The proof is docs/MATH_REFERENCE.md, §15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupyattn.arrays.groups import merge_heads
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.bounds.bound import Bound, empty
from cupyattn.bounds.kernel import bound_kernel, taken_by
from cupyattn.bounds.rows import FLUSHED_WEIGHT, Rows, Shared
from cupyattn.bounds.scores import REFERENCE
from cupyattn.kernels.numerics import Numerics
from cupyattn.problem.attention import KernelCall
from cupyattn.reference.exact import ScoreBlock, blocks_of

#: The probability that the draw of signs fails a judgement of correct outputs.
FAILURE = 1e-12


def signed_bound(
    received: KernelCall,
    *,
    rows: Array,
    elements: int,
    failure: float = FAILURE,
    numerics: Numerics | None = None,
) -> Bound:
    """Bound an output whose values had a random sign for each key, independent of all else [L77].

    Parameters
    ----------
    received : KernelCall
        Has the signed values.
    rows : 1-D integer array
    elements : int
        Number of judged elements, over all draws of signs.
    failure : float
        Probability that any of them leaves its bound although the kernel is correct.
    numerics : Numerics, optional
        As for `cupyattn.bounds.attention`.

    Returns
    -------
    Bound
        ``P`` bounds the effect of errors of P: the random sum, or R2 to R5 if their sum is less.
        ``R4`` covers flushed weights. R6 and R7 are certain, and so is the bound of lse.

    Raises
    ------
    ValueError
        For kernels whose P is codes.
    """
    (q, k, v), shared = taken_by(received, numerics)
    if shared.n.by_tile:
        raise ValueError(
            f"signed values need P in 16 or 32 bits, and this form of "
            f"{received.kernel.variant.name} rounds P to {shared.n.p_type}: leave signed out"
        )
    certain = bound_kernel(received, rows=rows, numerics=numerics)
    factor = math.sqrt(2.0 * math.log(2.0 * max(elements, 1) / failure))
    found, _ = empty(q, k, v, rows, ("P", "R4"))
    for block in blocks_of(q, k, v, shared.sigma, received.scores, rows):
        spread, flushed = _of_block(block, shared)
        found["P"][block.index] = factor * spread
        found["R4"][block.index] = flushed
    xp = array_namespace(v)
    random, flushed = (merge_heads(found[tag]) * REFERENCE for tag in ("P", "R4"))
    by_scores = sum(certain.terms[tag] for tag in ("R2", "R3", "R4", "R5"))
    better = random + flushed < by_scores
    terms = {
        "P": xp.where(better, random, by_scores),
        "R4": xp.where(better, flushed, 0.0),
        "R6": certain.terms["R6"],
        "R7": certain.terms["R7"],
    }
    return Bound(terms, certain.lse)


@dataclass(frozen=True)
class WeightErrors:
    """Bounds of the differences of a kernel's weights from probabilities, (..., rows, keys).

    Parameters
    ----------
    P : array
        Probabilities.
    of_scores : array
        Effect of perturbed scores on each weight before normalising, over the lower bound of the
        sum of all; +inf in rows where this bound is 0.
    rounding : array
        R5: the error of rounding P as an operand.
    inverse_l : (..., rows, 1) array
        1 over the lower bound of l.
    """

    P: Array
    of_scores: Array
    rounding: Array
    inverse_l: Array

    @property
    def c(self) -> Array:
        """Bounds of the differences of normalised weights."""
        xp = array_namespace(self.P)
        total = self.of_scores.sum(axis=-1, keepdims=True)
        spread = xp.where(self.P > 0, self.P * total, 0.0)
        return self.of_scores + spread + self.rounding


def weight_errors(block: ScoreBlock, shared: Shared) -> WeightErrors:
    """Bound the error of each weight of a row, for a kernel without codes of P [L75]."""
    rows = Rows.of(block, shared)
    P = rows.P
    xp = array_namespace(P)
    delta = P * xp.expm1(xp.minimum(rows.score.d, 300.0))
    total = delta.sum(axis=-1, keepdims=True)
    of_scores = xp.where(total < 1, delta / xp.where(total < 1, 1.0 - total, 1.0), xp.inf)
    return WeightErrors(P, of_scores, rows.rounding(), rows.inverse_l)


def _of_block(block: ScoreBlock, shared: Shared) -> tuple[Array, Array]:
    """Return the root of the sum of squares of weights' effects, and the bound of flushed
    weights."""
    xp = array_namespace(block.S)
    if block.S.shape[-1] == 0:
        zero = xp.zeros((*block.S.shape[:-1], block.q.shape[-1]))
        return zero, zero
    errors = weight_errors(block, shared)
    c = errors.c
    v = xp.where(xp.isfinite(block.v), block.v, 0.0)
    usable = xp.isfinite(c).all(axis=-1, keepdims=True)
    c = xp.where(usable, c, 0.0)
    spread = root_sum_of_squares(c, v)
    flushed = FLUSHED_WEIGHT * xp.abs(v).sum(axis=-2, keepdims=True) * errors.inverse_l
    return xp.where(usable, spread, xp.inf), flushed + 0.0 * spread


def root_sum_of_squares(c: Array, v: Array) -> Array:
    """Return the square root of the sum over keys of (c v)^2, without underflow of the squares.

    Parameters
    ----------
    c : (..., rows, keys) array
    v : (..., keys, head_dim) array

    Returns
    -------
    (..., rows, head_dim) array
    """
    xp = array_namespace(c, v)
    rows = c.max(axis=-1, keepdims=True)
    columns = xp.abs(v).max(axis=-2, keepdims=True)
    rows, columns = (xp.where(x > 0, x, 1.0) for x in (rows, columns))
    return rows * columns * xp.sqrt((c / rows) ** 2 @ (v / columns) ** 2)
