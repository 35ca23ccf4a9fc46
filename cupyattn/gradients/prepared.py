"""Gradients through the preparation of Q and K: rows normalised, weighted and rotated (R14).

`back_exact` is the definition in float64, `back_mirror` follows ``backward_normalise.cu``, and
`back_bound` bounds the distance between them. docs/MATH_REFERENCE.md proves it under [L48].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.kinds import FINITE_MAX, Array, array_namespace, as_float64
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.prepared import factor_error, turned_errors
from cupyattn.bounds.scores import REFERENCE, U
from cupyattn.problem.row_preparation import Norm, Preparation, by_head

#: Roundings of a sum of rows beside one for each row: sums of lanes, of warps and of blocks.
_SUMS = 64


class Back(NamedTuple):
    """Gradients of q and k as given, and of the weights, (heads or 1, head_dim).

    The latter are None for rows that are not normalised."""

    dq: Array
    dk: Array
    dq_weight: Array | None
    dk_weight: Array | None


def back_exact(how: Preparation, q: Array, k: Array, dq: Array, dk: Array) -> Back:
    r"""Gradients through `how`, in float64.

    Parameters
    ----------
    how : Preparation
    q, k : array
        Rows as given: (batch, heads, len_q, head_dim) and (batch, heads_kv, len_kv, head_dim).
    dq, dk : array
        Gradients with respect to the prepared rows, shaped as q and k.

    Notes
    -----
    .. math:: \hat x = x r, \quad r = (\overline{x^2} + \epsilon)^{-1/2}, \quad a = w \, dy, \quad
              dx = r (a - \hat x \, \overline{a \hat x}), \quad dw = \sum dy \, \hat x

    Examples
    --------
    >>> x = np.array([[[[3.0, 4.0]]]])
    >>> weight = np.ones((1, 2))
    >>> how = Preparation(norm=Norm(weight, weight, 1e-6))
    >>> found = back_exact(how, x, x, x, x)  # along a row its length has no effect
    >>> bool(abs(found.dq).max() < 1e-6), found.dq_weight.round(3).tolist()
    (True, [[2.546, 4.525]])
    """
    if how.rope is not None:
        dq, dk = how.rope.back.exact(dq, dk)
    dq, dk = as_float64(dq), as_float64(dk)
    norm = how.norm
    if norm is None:
        return Back(dq, dk, None, None)
    found, of_weights = [], []
    for x, dy, weight in ((q, dq, norm.q_weight), (k, dk, norm.k_weight)):
        x, w = as_float64(x), by_head(as_float64(weight))
        r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + norm.eps)
        unit, a = x * r, w * dy
        found.append(r * (a - unit * (a * unit).mean(axis=-1, keepdims=True)))
        of_weights.append(_over_rows(dy * unit, weight))
    return Back(*found, *of_weights)


def back_mirror(how: Preparation, q: Array, k: Array, dq: Array, dk: Array) -> Back:
    """Gradients through `how` as the kernels compute them, of the type of q.

    Gradients of weights are float32.

    Parameters
    ----------
    how, q, k, dq, dk
        As for `back_exact`; the arrays have one 16-bit type.
    """
    norm, dtype = how.norm, q.dtype
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if norm is not None:
            dq, dk = dq.astype(np.float32), dk.astype(np.float32)
        if how.rope is not None:
            dq, dk = how.rope.back.turned(dq, dk)
        if norm is None:
            return Back(dq, dk, None, None)
        found, of_weights = [], []
        for x, dy, weight in ((q, dq, norm.q_weight), (k, dk, norm.k_weight)):
            x = x.astype(np.float32)
            factor = how.norm_factor(x, norm)  # R14
            unit, a = x * factor, dy * by_head(weight)  # R14
            along = unit * how.mean_of_products(a, unit)  # R14
            found.append((factor * (a - along)).astype(dtype))  # R14
            of_weights.append(_over_rows(dy * unit, weight))  # R14
    return Back(*found, *of_weights)


def back_bound(
    how: Preparation, q: Array, k: Array, dq: Array, dk: Array, errors: tuple[Array, Array],
    weight_dtypes: tuple[str, str],
) -> tuple[dict[str, Any], ...]:  # fmt: skip
    """Bound the errors of gradients through a norm, element by element.

    Parameters
    ----------
    how : Preparation
        With a norm. Weights and tables count as exact.
    q, k, dq, dk : array
        As for `back_exact`: the exact gradients of the prepared rows.
    errors : (array, array)
        Bounds of the errors of dq and dk as they are stored.
    weight_dtypes : (str, str)
        Types of the weights, which their gradients have.

    Returns
    -------
    tuple of dict of str to array
        Of dq, dk, dq_weight and dk_weight: what the errors become, under ``"R12"``, and what the
        kernel adds, under ``"R14"``.
    """
    norm: Any = how.norm
    found = []
    positions = (0, 0) if how.rope is None else (how.rope.offset_q, 0)
    for number, (x, dy, weight) in enumerate(((q, dq, norm.q_weight), (k, dk, norm.k_weight))):
        dtype, dy, error = x.dtype.name, as_float64(dy), errors[number]
        xp = array_namespace(dy)
        if how.rope is not None:
            dy, error = turned_errors(dy, error, how.rope.back, positions[number])
        types = dtype, weight_dtypes[number]
        found.append(_of_rows(xp, as_float64(x), dy, error, weight, norm, types))
    (dq_terms, q_weight), (dk_terms, k_weight) = found
    return dq_terms, dk_terms, q_weight, k_weight


def _of_rows(
    xp: Any, x: Array, dy: Array, error: Array, weight: Array, norm: Norm,
    dtypes: tuple[str, str],
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Bound dx and dw of the rows of one operand; `error` bounds the error of dy, turned back."""
    tiny, head_dim = 2.0**-148, x.shape[-1]
    of_factor = factor_error(head_dim)
    w = xp.abs(by_head(as_float64(weight)))

    def mean(a: Array) -> Array:
        return a.mean(axis=-1, keepdims=True)

    with np.errstate(over="ignore", invalid="ignore"):
        r = 1 / np.sqrt(mean(x * x) + norm.eps)
        unit, size = xp.abs(x * r), xp.abs(dy)
        a = w * size
        d = r * xp.abs(w * dy - x * r * mean(w * dy * x * r))
        carried = r * (w * error + unit * mean(w * error * unit))
        # R14 [L48]: x^, a, their products, the mean, the difference, the product, the store.
        of_unit = ((1 + of_factor) * (1 + U) - 1) * unit + tiny
        of_a = w * error * (1 + U) + U * a + tiny
        terms = (a + of_a) * (unit + of_unit) * (1 + U) + tiny
        roundings = gamma(3 + math.ceil(math.log2(head_dim / 2)), U)
        of_mean = mean(terms) * (1 + roundings) - mean(a * unit) + tiny
        of_along = (unit + of_unit) * (mean(a * unit) + of_mean) * (1 + U) - unit * mean(a * unit)
        of_difference = (of_a + of_along + tiny) * (1 + U) + U * (d / r)
        total = r * of_difference * (1 + of_factor) * (1 + U)
        total = total + ((1 + of_factor) * (1 + U) - 1) * d + tiny
        total = (total + half_ulp(d + total, dtypes[0])) * REFERENCE
        bad = ~(d + total <= FINITE_MAX[dtypes[0]])
        rows = {
            "R12": xp.where(bad, 0.0, carried),
            "R14": xp.where(bad, xp.inf, xp.maximum(total - carried, 0.0)),
        }
        terms = _over_rows(size * unit, weight)
        carried = _over_rows(error * unit, weight)
        total = _over_rows((size + error) * (unit + of_unit), weight)
        count = x.size // head_dim // weight.shape[0] + _SUMS
        total = total * (1 + gamma(count, U)) - terms + tiny * count
        total = (total + half_ulp(terms + total, dtypes[1])) * REFERENCE
        bad = ~(terms + total <= FINITE_MAX[dtypes[1]])
    weights = {
        "R12": xp.where(bad, 0.0, carried),
        "R14": xp.where(bad, xp.inf, xp.maximum(total - carried, 0.0)),
    }
    return rows, weights


def _over_rows(x: Array, weight: Array) -> Array:
    """Return sums over the rows that share a vector of weights, (heads or 1, head_dim)."""
    every = x.sum(axis=(0, 2), dtype=x.dtype)
    return every.sum(axis=0, keepdims=True) if weight.shape[0] == 1 else every
