"""Bounds of merged partial results against exact attention.

Every partial result satisfies the bound of its call. docs/MATH_REFERENCE.md [L50] proves the error
that merging adds (R13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyattn.arrays.kinds import FINITE_MAX, Array
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.rows import LOG2F_ERROR
from cupyattn.bounds.scores import EX2_LOG_ERROR, REFERENCE, U

#: Distance of two log-sum-exps past which the lesser one's weight is below `FLUSHED`.
FARTHEST = 90.0
#: Upper bound of weights that are flushed to zero, with room for every merge of a row.
FLUSHED = 2.0**-110
#: Number of roundings of each term in a merge: sum of the weights, its inverse, weight, product (or
#: the other summand), and sum.
ROUNDINGS = 5


@dataclass(frozen=True)
class Expected:
    """Exact attention of some rows, and the bound of a result's error.

    Parameters
    ----------
    o, bound : (batch, heads, rows, head_dim) array, float64
    lse, lse_bound : (batch, heads, rows) array, float64
        -inf and 0 for a row without unmasked keys.
    """

    o: Array
    lse: Array
    bound: Array
    lse_bound: Array


def merged(partials: Sequence[Expected], dtype: str, wide: bool = True) -> Expected:
    r"""Return exact attention to the keys of all parts, and the bound of their merge [L50].

    Parameters
    ----------
    partials : sequence of Expected
        Attention of the same rows to the keys of each part, with the bounds of the computed
        results.
    dtype : {"float16", "bfloat16", "float32"}
        Type of the result.
    wide : bool
        Whether partial results are float32; otherwise each merge rounds to `dtype`.

    Notes
    -----
    With w_j the share of part j, a softmax of the lse,

    .. math:: \frac{\sum_j w_j (e^{d_j} - 1) |o_j - o|}{\sum_j w_j e^{-d_j}}
              + \sum_j w_j^+ b_j + \theta \sum_j w_j^+ (|o_j| + b_j) + \tfrac12 ulp

    where d_j bounds the error of part j's lse. It is the initial error plus, at each of n merges,
    :math:`3 u |a - b| + 2^{-22}` in the exponents and the error of the stored lse.

    Examples
    --------
    >>> one = Expected(np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1)), np.zeros((1, 1, 1, 2)),
    ...                np.zeros((1, 1, 1)))
    >>> both = merged([one, one], "float16")
    >>> float(both.o[0, 0, 0, 0]), round(float(both.lse[0, 0, 0]), 3), bool(both.bound.max() < 1e-3)
    (1.0, 0.693, True)
    """
    o, lse, bound, lse_bound = (
        np.stack([getattr(part, name) for part in partials])
        for name in ("o", "lse", "bound", "lse_bound")
    )
    there = np.isfinite(lse)
    top = np.where(there, lse, -np.inf).max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        weights = np.where(there, np.exp(lse - np.where(np.isfinite(top), top, 0.0)), 0.0)
        total = weights.sum(axis=0)
        whole_lse = np.where(total > 0, top + np.log(total), -np.inf)
        weights = weights / np.where(total > 0, total, 1.0)
    merges = np.maximum(there.sum(axis=0) - 1, 0)
    whole = (weights[..., None] * o).sum(axis=0)

    lowest = np.where(there, lse, np.inf).min(axis=0)
    some = total > 0
    apart = np.where(some, np.where(some, whole_lse, 0.0) - np.where(some, lowest, 0.0), 0.0)
    largest = np.where(there, np.abs(np.where(there, lse, 0.0)), 0.0).max(axis=0) + 1.0
    largest = largest + np.abs(np.where(some, whole_lse, 0.0))
    kept = LOG2F_ERROR + U * (3 + largest)
    step = 3 * U * np.minimum(apart, FARTHEST) + EX2_LOG_ERROR + kept
    d = np.where(there, lse_bound + merges * step, 0.0) * REFERENCE
    with np.errstate(over="ignore", invalid="ignore"):
        raised = weights * np.exp(d)
        least = (weights * np.exp(-d)).sum(axis=0)
        least = np.where(least > 0, least, 1.0)
        moved = (weights * np.expm1(d))[..., None] * np.abs(o - whole)
        moved = moved.sum(axis=0) / least[..., None]
        share = np.minimum(raised / least, 1.0)[..., None]
        size = np.where(share > 0, share * (np.abs(o) + bound), 0.0).sum(axis=0)
        own = np.where(share > 0, share * bound, 0.0).sum(axis=0)
        lost = np.where(there[..., None], np.abs(o) + bound, 0.0).sum(axis=0) * FLUSHED
    error = moved + own + gamma(ROUNDINGS * merges, U)[..., None] * size + lost
    if not wide:
        # Each rounding but the last concerns a partial result whose share of O is at most `size`.
        # Half an ulp of twice that is at least as large as the same part of it.
        error = error + np.maximum(merges - 1, 0)[..., None] * half_ulp(2 * size, dtype)
    reach = np.abs(whole) + error
    error = error * REFERENCE + half_ulp(reach, dtype)
    error = np.where(reach > FINITE_MAX[dtype], np.inf, error)
    alone = merges == 0
    only = np.where(there[..., None], bound, 0.0).sum(axis=0)
    of_lse = np.where(alone, np.where(there, lse_bound, 0.0).sum(axis=0), np.log(
        np.maximum(raised.sum(axis=0), 1.0)
    ))  # fmt: skip
    return Expected(whole, whole_lse, np.where(alone[..., None], only, error), of_lse)


def summed(errors: Array, sizes: Array, terms: Array, roundings: Array, dtype: str) -> Array:
    """Return the bound of the error of a sum of gradients [L51].

    Parameters
    ----------
    errors, sizes : array
        Sums of the bounds of the terms, and of their magnitudes with these.
    terms : array
        Number of terms; a single term is not added.
    roundings : array
        How often sums are rounded to `dtype` while they travel.
    dtype : {"float16", "bfloat16"}
    """
    several = np.maximum(terms - 1, 0)
    size = sizes * (1 + gamma(several + 2, U))
    error = errors + gamma(several + 2, U) * size * (terms > 1)
    reach = size
    for number in range(int(roundings.max(initial=0))):
        half = np.where(roundings > number, half_ulp(reach, dtype), 0.0)
        error, reach = error + half, reach + half
    error = error * REFERENCE
    return np.where(reach > FINITE_MAX[dtype], np.inf, error)
