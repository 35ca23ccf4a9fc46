"""Bounds of the error of preparing Q and K, element by element (R0): norms, rotations."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import FINITE_MAX, Array, array_namespace, as_float64
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.scores import MAX_FLOAT, REFERENCE, U
from cupyattn.problem.row_preparation import Norm, Preparation, Rope
from cupyattn.quant.rotation import rotated


def rotation(x: Array, rope: Rope, position: int) -> Array:
    r"""Bound the error of an operand as the kernels rotate it, element by element (R0).

    Parameters
    ----------
    x : (batch, heads, length, head_dim) array
        Q or K in float16, bfloat16 or float32, before it is turned.
    rope : Rope
        Its tables count as exact.
    position : int
        Position of row 0.

    Returns
    -------
    array, float64, shaped as x
        +inf if the turned operand may leave the range of its type.

    Notes
    -----
    x c - y s meets two roundings of each product, :math:`((1 + u)^2 - 1)(|x c| + |y s|)`,
    underflow, and the rounding to the storage type. Times σ and the other operand it perturbs the
    scores as INT8 codes do (docs/MATH_REFERENCE.md [L12], [L18]).
    """
    (x,) = operands(x=x)
    exact = as_float64(x)
    return _rounded(
        *turned_errors(exact, array_namespace(x).zeros(x.shape), rope, position), x.dtype.name
    )


def preparation(
    how: Preparation, q: Array, k: Array, *, stored: bool = False
) -> tuple[Array, Array]:
    r"""Bound ``|prepared operands - Preparation.exact|``, element by element (R0).

    Parameters
    ----------
    how : Preparation
        Weights and tables count as exact.
    q, k : array
        The caller's operands.
    stored : bool
        Whether the operands are rounded to their storage type at the end, as for all rungs except
        ``fa_int8``.

    Returns
    -------
    q, k : array, float64, shaped as the operands
        +inf if a number may leave its range.

    Notes
    -----
    A mean square of D numbers meets ``n = 6 + ceil(log2(D / 2))`` roundings, underflow included,
    its root's inverse :math:`(1 - γ_n)^{-1/2}(1 + u)/(1 - u)`, and the two products
    :math:`(1 + u)^2`. That of all heads of a token meets one more for each head. The resulting
    error is turned with the numbers. docs/MATH_REFERENCE.md [L13].
    A Hadamard matrix of D adds D numbers in :math:`\log_2 D` levels of butterflies and multiplies
    by a rounded unit: with e the error before and :math:`n = 2 + \log_2 D`,
    :math:`(γ_n ‖x‖_1 + (1 + γ_n) ‖e‖_1) / \sqrt D`.
    """
    found = []
    for i, x in enumerate(operands(q=q, k=k)):
        xp = array_namespace(x)
        exact, error = as_float64(x), xp.zeros(x.shape)
        if how.norm is not None:
            weight = as_float64((how.norm.q_weight, how.norm.k_weight)[i])
            exact, error = _normalised(exact, how.norm.by_row(weight, x.shape[2]), how.norm)
        if how.rope is not None:
            exact, error = turned_errors(exact, error, how.rope, how.rope.offset_q if i == 0 else 0)
        if how.rotate:
            exact, error = _rotated_errors(exact, error)
        found.append(_rounded(exact, error, x.dtype.name if stored else "float32"))
    return found[0], found[1]


def mean_roundings(head_dim: int, heads: int = 0) -> int:
    """Return how many roundings the mean square of a row meets, underflow included.

    With `heads`, of the rows of so many heads together.
    """
    return 6 + math.ceil(math.log2(head_dim / 2)) + heads


def factor_error(head_dim: int, heads: int = 0) -> float:
    """Return the relative error of a row's factor, the inverse of its root mean square."""
    roundings = gamma(mean_roundings(head_dim, heads), U)
    relative: float = (1 - roundings) ** -0.5 * (1 + U) / (1 - U) - 1
    return relative


def _normalised(x: Array, weight: Array, norm: Norm) -> tuple[Array, Array]:
    """Return rows normalised exactly, and the error of the same in float32."""
    xp, head_dim, heads = array_namespace(x), x.shape[-1], x.shape[1] if norm.by_token else 0
    with np.errstate(invalid="ignore"):
        mean = norm.mean_square(x)
        exact = x / np.sqrt(mean + norm.eps) * weight
    roundings = gamma(mean_roundings(head_dim, heads), U)
    relative = (1 + factor_error(head_dim, heads)) * (1 + U) ** 2 - 1
    error = relative * xp.abs(exact) + 2.0**-149 * (1 + xp.abs(weight))
    squares = mean * (head_dim * max(heads, 1))
    fits = squares * (1 + roundings) * REFERENCE <= MAX_FLOAT
    return exact, xp.where(fits, error, xp.inf)


def turned_errors(x: Array, error: Array, rope: Rope, position: int) -> tuple[Array, Array]:
    """Return rows turned exactly, and the error of the same in float32, given a previous error."""
    xp = array_namespace(x)
    size, turned, carried = (xp.empty(x.shape, np.float64) for _ in range(3))
    numbers = (as_float64(table) for table in rope.angles(x.shape[2], position))
    cos, other_cos, sin, other_sin = numbers
    (first, second), (of_first, of_second) = rope.split(x), rope.split(error)
    with np.errstate(invalid="ignore"):
        for sizes, values, errors, one, other, e, f in zip(
            rope.split(size), rope.split(turned), rope.split(carried),
            (first * cos, second * other_cos), (-second * sin, first * other_sin),
            (of_first * xp.abs(cos), of_second * xp.abs(other_cos)),
            (of_second * xp.abs(sin), of_first * xp.abs(other_sin)), strict=True,
        ):  # fmt: skip
            sizes[...], values[...] = xp.abs(one) + xp.abs(other), one + other
            errors[...] = e + f
        carried = xp.where(xp.isnan(carried), xp.inf, carried)  # an infinite error times 0
        rounded = ((1 + U) ** 2 - 1) * (size + carried) + 2.0**-148
    return turned, carried + rounded


def _rotated_errors(x: Array, error: Array) -> tuple[Array, Array]:
    """Return rows rotated exactly, and the error of the same in float32, given a previous error."""
    xp, head_dim = array_namespace(x), x.shape[-1]
    roundings = gamma(2 + math.log2(head_dim), U)
    with np.errstate(invalid="ignore", over="ignore"):
        size, carried = (xp.abs(a).sum(axis=-1, keepdims=True) for a in (x, error))
        found = (roundings * size + (1 + roundings) * carried) / math.sqrt(head_dim) + 2.0**-148
        fits = (size + carried) * (1 + roundings) * REFERENCE <= MAX_FLOAT
        return rotated(x), xp.where(fits, found, xp.inf) + xp.zeros_like(x)


def _rounded(x: Array, error: Array, dtype: str) -> Array:
    """Return the error after rounding to a type, given a previous error; +inf past its range."""
    xp = array_namespace(x)
    size = xp.abs(x)
    with np.errstate(invalid="ignore"):
        error = (error + half_ulp(size + error, dtype)) * REFERENCE
        return xp.where(size + error <= FINITE_MAX[dtype], error, xp.inf)
