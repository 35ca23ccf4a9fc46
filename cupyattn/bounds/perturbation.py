"""The mathematics of the bounds: counted roundings, and a softmax with perturbed scores.

Proofs are in docs/MATH_REFERENCE.md: a tag such as [L1] is the number of a lemma there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.kernels.numerics import HALF_SUBNORMAL, UNIT_ROUNDOFF

#: Largest perturbation of a score of which an exponential is taken: past it, total variation is 1.
MAX_PERTURBATION = 300.0
#: Elements of |v - o| held at a time: 2 MB stay in a cache.
SPREAD_ELEMENTS = 2**18


def gamma(n: Any, u: float) -> Any:
    r"""Return γ_n = n u / (1 - n u), the error of n roundings.

    Parameters
    ----------
    n : int or array
        Roundings, one after the other.
    u : float
        Unit roundoff.

    Returns
    -------
    float or array
        +inf where n u >= 1.

    Notes
    -----
    [L1] ``|Π(1 + δ_i)^±1 - 1| <= γ_n`` for n factors ``|δ_i| <= u`` (Higham 2002, Lemma 3.1). A sum
    in any order, with at most n roundings on the way of any term, errs by at most γ_n Σ|terms|.

    Examples
    --------
    >>> gamma(2, 0.25), gamma(4, 0.25)
    (1.0, inf)
    """
    if isinstance(n, (int, float)):
        return n * u / (1 - n * u) if n * u < 1 else math.inf
    xp = array_namespace(n)
    room = 1.0 - n * u
    return xp.where(room > 0, n * u / xp.where(room > 0, room, 1.0), xp.inf)


def half_ulp(x: Array, fmt: str) -> Array:
    """Return the largest error of rounding a float32 number of at most `x` to a storage type.

    Parameters
    ----------
    x : array
        Upper bounds of magnitudes, at least 0.
    fmt : {"float16", "bfloat16", "float32"}
        float32 has no error: the accumulator has that type.

    Notes
    -----
    [L2] u 2^floor(log2 x), but at least half a subnormal. The spacing of floating-point numbers
    does not decrease with their magnitude, so an upper bound of the magnitude suffices.

    Examples
    --------
    >>> half_ulp(np.array([1.5, 0.0]), "float16").tolist() == [2.0**-11, 2.0**-25]
    True
    """
    (x,) = operands(x=x)
    xp = array_namespace(x)
    if fmt == "float32":
        return xp.zeros_like(x)
    _, exponent = xp.frexp(x)
    known = xp.isfinite(x) & (x > 0)
    power = xp.ldexp(xp.ones_like(x), xp.where(known, exponent, -1000) - 1)
    return xp.maximum(UNIT_ROUNDOFF[fmt] * power, HALF_SUBNORMAL[fmt])


def ratio_to_bound(value: Array, expected: Array, bound: Array) -> Array:
    """Return errors as fractions of their bounds.

    Parameters
    ----------
    value, expected, bound : array
        Arrays of equal shape, float64.

    Returns
    -------
    array
        0 if both agree, NaN included, or the bound is infinite. +inf if a bound of 0 is missed, if
        `value` is NaN or infinite though a bound exists, or if it is finite though `expected` is
        not.

    Examples
    --------
    >>> ratio_to_bound(np.array([1.5, np.nan]), np.array([1.0, 1.0]), np.array([1.0, 1.0])).tolist()
    [0.5, inf]
    """
    value, expected, bound = operands(value=value, expected=expected, bound=bound)
    xp = array_namespace(value, expected, bound)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = xp.abs(value - expected)
        ratio = xp.where(bound > 0, error / xp.where(bound > 0, bound, 1.0), xp.inf)
    promised = xp.isfinite(expected) & xp.isfinite(bound)
    ratio = xp.where(promised, xp.where(xp.isfinite(value), ratio, xp.inf), 0.0)
    garbage = ~xp.isfinite(expected) & xp.isfinite(value)
    ratio = xp.where(garbage | ((bound == 0) & ~promised), xp.inf, ratio)
    return xp.where((value == expected) | (xp.isnan(value) & xp.isnan(expected)), 0.0, ratio)


def worst_of(ratio: Array) -> tuple[float, tuple[int, ...]]:
    """Return the largest ratio and its index, or 0 for an empty array."""
    if ratio.size == 0:
        return 0.0, ()
    index = np.unravel_index(int(ratio.argmax()), ratio.shape)
    at = tuple(int(i) for i in index)
    return float(ratio[at]), at


def softmax_perturbation(
    P: Array, d: Array, v: Array, o: Array
) -> tuple[Array, Array, Array, Array]:
    r"""Bound the effect of perturbed scores on a softmax and on its weighted mean.

    Parameters
    ----------
    P : (..., rows, keys) array
        Probabilities; 0 for masked keys, and only for them.
    d : (..., rows, keys) array
        Bounds of the scores' perturbations, natural units, apart from a shift common to a row.
    v : (..., keys, head_dim) array
        Values, finite.
    o : (..., rows, head_dim) array
        ``P @ v``.

    Returns
    -------
    delta_o : (..., rows, head_dim) array
        Bound of ``|Σ p'_j v_j - o|``.
    P_plus : (..., rows, keys) array
        Bound of p'_j, the perturbed probabilities.
    delta_lse : (..., rows) array
        Bound of the change of log Σ exp(s_j).
    Z_minus : (..., rows) array
        Σ p_j exp(-d_j), a lower bound of the factor by which the sum of exponentials changes.

    Notes
    -----
    With h = max d, per channel, the least of

    - tanh(h/2) (max v - min v) [L6],
    - ``(e^{2h} - 1)/2 Σ p_j |v_j - o|`` [L7],
    - ``Σ p_j (e^{d_j} - 1) |v_j - o| / Σ p_j e^{-d_j}`` [L8];

    ``p'_j <= p_j e^{d_j} / Σ p_j e^{-d_j}`` [L5]; ``|δlse| <= log Σ p_j e^{d_j}`` [L9].

    Examples
    --------
    >>> P, v = np.array([[0.5, 0.5]]), np.array([[1.0], [-1.0]])
    >>> delta_o, *_ = softmax_perturbation(P, np.array([[0.1, 0.1]]), v, P @ v)
    >>> bool(np.isclose(delta_o[0, 0], 2 * np.tanh(0.05)))  # attained by scores +0.1 and -0.1
    True
    """
    P, d, v, o = operands(P=P, d=d, v=v, o=o)
    xp = array_namespace(P, d, v, o)
    if P.shape[-1] == 0:
        return xp.zeros_like(o), P, xp.zeros(P.shape[:-1]), xp.ones(P.shape[:-1])
    d = xp.where(P > 0, d, 0.0)
    h = d.max(axis=-1)
    bounded = h <= MAX_PERTURBATION
    clipped = xp.minimum(d, MAX_PERTURBATION)
    raised, Z_minus = P * xp.exp(clipped), (P * xp.exp(-clipped)).sum(axis=-1)
    Z_minus = xp.where(Z_minus > 0, Z_minus, 1.0)  # a row without keys
    Z_plus = raised.sum(axis=-1)
    weights = xp.stack([P, P * xp.expm1(clipped) / Z_minus[..., None]], axis=-2)
    # NOTE: o is rounded, and exp(d) may amplify the effect on |v - o|. One key is exact.
    keys = (P > 0).sum(axis=-1)
    rounded = gamma(xp.where(keys > 1, keys + 8, 0), UNIT_ROUNDOFF["float64"])
    rounded = rounded[..., None] * (P @ xp.abs(v))
    spread = _spread(weights, v, o)  # (..., rows, 2, head_dim)
    spread = spread + weights.sum(axis=-1)[..., None] * rounded[..., None, :]
    span = v.max(axis=-2, keepdims=True) - v.min(axis=-2, keepdims=True)
    half = xp.minimum(h, MAX_PERTURBATION)[..., None]
    smooth = xp.minimum(0.5 * xp.expm1(2.0 * half) * spread[..., 0, :], spread[..., 1, :])
    sharp = xp.tanh(0.5 * h)[..., None] * span
    delta_o = xp.where(bounded[..., None], xp.minimum(sharp, smooth), sharp)
    P_plus = xp.minimum(raised / Z_minus[..., None], 1.0)
    P_plus = xp.where(bounded[..., None], P_plus, (P > 0).astype(P.dtype))
    delta_lse = xp.where(bounded, xp.log(xp.maximum(Z_plus, 1.0)), h)
    return delta_o, P_plus, delta_lse, xp.where(bounded, Z_minus, 0.0)


def weight_shift(P: Array, P_plus: Array, d: Array, delta_lse: Array) -> Array:
    r"""Bound ``|p'_j - p_j|``, the effect of perturbed scores on each probability [L5].

    Parameters
    ----------
    P, d : (..., rows, keys) array
        As for `softmax_perturbation`.
    P_plus : (..., rows, keys) array
    delta_lse : (..., rows) array
        As it returns them.

    Returns
    -------
    (..., rows, keys) array

    Examples
    --------
    >>> P, d, v = np.array([[0.9, 0.1]]), np.array([[1.0, 1.0]]), np.zeros((2, 1))
    >>> _, P_plus, delta_lse, _ = softmax_perturbation(P, d, v, P @ v)
    >>> weight_shift(P, P_plus, d, delta_lse).round(2).tolist()  # the first may fall, not rise
    [[0.78, 0.64]]
    """
    xp = array_namespace(P)
    P_minus = P * xp.exp(-d - delta_lse[..., None])
    return xp.maximum(P_plus - P, P - P_minus)


def sum_of_operand(P_plus: Array, rho: Array, theta: Array, lost: Array) -> Array:
    """R5, R6: bound the relative error of l as a column of P.V with V = 1 [L36].

    Parameters
    ----------
    P_plus, rho : (..., rows, keys) array
        Bounds of the perturbed probabilities, and of the rounding error of each.
    theta : (..., rows) array
        Relative error of the sum.
    lost : (..., rows) array
        Bound of the sum that is flushed to zero or underflows.

    Returns
    -------
    (..., rows) array
        At most 1.
    """
    rounded = rho.sum(axis=-1) + lost
    bound = theta * (P_plus.sum(axis=-1) + rounded) + rounded
    return array_namespace(bound).minimum(bound, 1.0)


def rounding_of_mean(rho: Array, v: Array, o: Array, delta_o: Array) -> tuple[Array, Array]:
    r"""R5: bound the error by rounded weights of a mean that is divided by their new sum [L56].

    Parameters
    ----------
    rho : (..., rows, keys) array
        Bounds of the rounding error of each perturbed probability.
    v : (..., keys, head_dim) array
        Values, finite.
    o, delta_o : (..., rows, head_dim) array
        The mean by exact probabilities, and a bound of its change by the perturbations.

    Returns
    -------
    r5 : (..., rows, head_dim) array
    share : (..., rows) array
        Lower bound of the sum of rounded weights, if the probabilities sum to 1. It is tiny if the
        sum may be 0.

    Notes
    -----
    :math:`\sum (p_j + ε_j) v_j / (1 + \sum ε_j) - o = \sum ε_j (v_j - o) / (1 + \sum ε_j)`.
    """
    total = rho.sum(axis=-1)
    share = array_namespace(rho).maximum(1.0 - total, 2.0**-60)
    moved = _spread(rho[..., None, :], v, o)[..., 0, :] + total[..., None] * delta_o
    return moved / share[..., None], share


def _spread(weights: Array, v: Array, o: Array) -> Array:
    """Return sum_j weights_j |v_j - o|, in blocks of differences that fit into a cache.

    weights: (..., rows, kinds, keys), v: (..., keys, head_dim), o: (..., rows, head_dim); the
    leading axes of v broadcast. Returns (..., rows, kinds, head_dim).
    """
    xp = array_namespace(weights, v, o)
    lead, (rows, kinds, keys) = o.shape[:-2], weights.shape[-3:]
    head_dim = o.shape[-1]
    out = xp.empty((*lead, rows, kinds, head_dim))
    v = xp.broadcast_to(v, (*lead, keys, head_dim))
    step = min(rows, max(1, SPREAD_ELEMENTS // max(1, keys * head_dim)))
    differences = xp.empty((step, keys, head_dim))
    for index in np.ndindex(*lead):
        for row in range(0, rows, max(1, step)):
            some = slice(row, row + step)
            here = differences[: rows - row]
            xp.subtract(v[index], o[index][some, None], out=here)
            xp.abs(here, out=here)
            out[index][some] = weights[index][some] @ here
    return out
