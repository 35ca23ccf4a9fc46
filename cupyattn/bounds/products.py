"""Bounds of INT8 matrix products: quantised weights, and the kernel's rounding."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.interchange import operands
from cupyattn.arrays.kinds import FINITE_MAX, as_float64
from cupyattn.bounds.perturbation import gamma, half_ulp
from cupyattn.bounds.scores import REFERENCE, U, products
from cupyattn.bounds.values import rounding_to_codes
from cupyattn.quant.activation import ACTIVATION_SLOPE, GLU, MOST_SPLITS, gate_and_other
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    Array,
    as_matrix,
    by_column,
    scale_shape,
    strategy_of,
)
from cupyattn.reference.gemm import (
    Float64,
    activate,
    by_row,
    product_operands,
    scaled_terms,
    sum_operands,
)

#: G4: error of a computed activation, of |x| and absolute.
ACTIVATION_ERROR, ACTIVATION_TINY = 8 * U, 2.0**-118

#: Half the smallest subnormal of float32.
TINY = 2.0**-150


def gemm_error(
    a: Array, a_scales: Array, b: Array, b_scales: Array, out_dtype: str = "float16", *,
    bias: Array | None = None, activation: str = "",
    outliers: tuple[Array, Array] | None = None, residual: Array | None = None,
    gate: Array | None = None,
) -> Float64:  # fmt: skip
    """Bound the error of each element of a computed product against `gemm_exact`.

    Parameters
    ----------
    a, a_scales, b, b_scales, out_dtype, bias, activation, outliers, residual, gate
        As for `gemm_mirror`.

    Returns
    -------
    array, (m, n), float64
        +inf if the result may leave the range of `out_dtype`.

    Notes
    -----
    With f the product of both scales and ``S = Σ |dot| f`` over K = ceil(k / 128) slices: G1 and G2
    give ``γ_{K+1} S`` and what underflows, however many blocks share a tile; with scales of
    channels ``S = |dot| f``, and G1 and G2 give ``γ_3 S``; outliers
    ``γ_{r + ceil(r/16)}(2^-23)`` of everything so far, for r columns, and the sums from block to
    block ``γ_7``; G3 one rounding; G4 passes on its largest slope times all of that and adds ``8 u
    |x| + 2^-118``; G7 is `gated_error` of both halves and one rounding; G6 multiplies by the gate
    and rounds once; G5 half a unit of the last place. docs/MATH_REFERENCE.md [L39], with scales of
    channels [L40].
    """
    a, a_scales, b, b_scales, bias, outliers = product_operands(
        a, a_scales, b, b_scales, bias, outliers
    )
    residual, gate = sum_operands(residual, gate)
    shape = a.shape[0], b.shape[0]
    size, whole, c = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        for dot, of_a, of_b in scaled_terms(a, a_scales, b, b_scales):
            terms = as_float64(dot) * (as_float64(of_a) * as_float64(of_b))
            c += terms
            size += np.abs(terms)
            whole += np.abs(as_float64(dot))
        by_channel = strategy_of(a, a_scales, b, b_scales) == "channel"
        slices = 2 if by_channel else a_scales.shape[1]  # of channels the sum is rounded, too
        error = gamma(slices + 1, U) * size + 2 * TINY * (whole + slices)  # G1, G2
        if outliers is not None:
            x, w = map(as_float64, outliers)
            c += x @ w.T
            size += np.abs(x) @ np.abs(w).T
            error = error + products("tensor_core", x.shape[1]) * (size + error)  # G2
            error = error + 4 * TINY * x.shape[1]
            error = error + gamma(MOST_SPLITS - 1, U) * (size + error)  # G2, from block to block
        if bias is not None:
            c += as_float64(bias)
            error = error + U * (np.abs(c) + error)  # G3
        error = error * REFERENCE
        c, error = activated(c, error, activation)
        if residual is not None:
            factor = 1.0 if gate is None else as_float64(by_row(gate, len(c)))
            # A product past float32 is infinite, whatever its factor.
            error = np.where(np.abs(c) + error <= FINITE_MAX["float32"], error, np.inf)
            c, error = as_float64(residual) + factor * c, np.abs(factor) * error
            error = (error + U * (np.abs(c) + error) + TINY) * REFERENCE  # G6
        error = error + half_ulp(np.abs(c) + error, out_dtype)  # G5
        return np.where(np.abs(c) + error <= FINITE_MAX[out_dtype], error, np.inf)


def activated(x: Float64, error: Float64, activation: str) -> tuple[Float64, Float64]:
    """Return activated numbers, and their error: G4 and G7 of a product, N3 of rows."""
    if activation in GLU:
        # A number past float32 is infinite, and may be multiplied by 0.
        error = np.where(np.abs(x) + error <= FINITE_MAX["float32"], error, np.inf)
        gates, of_gates = (gate_and_other(one, activation)[0] for one in (x, error))
        own = ACTIVATION_ERROR * (np.abs(gates) + of_gates) + ACTIVATION_TINY  # G4
        error, x = gated_error(x, error, activation, own), activate(x, activation)
        return x, (error + U * (np.abs(x) + error) + TINY) * REFERENCE  # G7
    if activation:
        own = ACTIVATION_ERROR * (np.abs(x) + error) + ACTIVATION_TINY  # G4
        error, x = ACTIVATION_SLOPE[activation] * error + own, activate(x, activation)
    return x, error


def affine_error(
    a: Array, a_scales: Array, b: Array, b_scales: Array, b_zeros: Array,
    out_dtype: str = "float16", *, bias: Array | None = None,
) -> Float64:  # fmt: skip
    """Bound the rounding of a product whose weight has zero points, (m, n), float64 [L81].

    Parameters
    ----------
    a, a_scales, b, b_scales, out_dtype, bias
        As for `gemm_error`, with scales of channels.
    b_zeros : array, (n, 1), int32

    Notes
    -----
    The product without zero points errs by `gemm_error` in float32. The multiple of the exact sums
    of codes has four roundings. The subtraction, the bias and the store add one each.
    """
    product = gemm_error(a, a_scales, b, b_scales, "float32")
    dot, of_zeros = (x.astype(np.float64) for x in (a, b_zeros))
    dot, of_zeros = dot @ b.astype(np.float64).T, dot.sum(axis=1, keepdims=True) * of_zeros.T
    scale = as_float64(a_scales) * as_float64(b_scales).T
    taken_off = np.abs(of_zeros) * scale
    c = (dot - of_zeros) * scale
    error = product + gamma(4, U) * taken_off + TINY
    error = error + U * (np.abs(c) + error)
    if bias is not None:
        c = c + as_float64(bias)
        error = error + U * (np.abs(c) + error)
    error = error * REFERENCE
    error = np.where(taken_off + error <= FINITE_MAX["float32"], error, np.inf)
    error = error + half_ulp(np.abs(c) + error, out_dtype)
    return np.asarray(np.where(np.abs(c) + error <= FINITE_MAX[out_dtype], error, np.inf))


def gated_error(x: Float64, error: Float64, activation: str, own: Array = 0.0) -> Float64:
    """Return a bound of the error of a gated linear unit whose sums have errors [L79].

    Parameters
    ----------
    x : array, (m, 2 n), float64
        Sums of both halves.
    error : array, (m, 2 n), float64
        Bound of their error.
    activation : str
        One of `cupyattn.quant.activation.GLU`.
    own : array, (m, n), float64
        Bound of the error of the activation itself.

    Returns
    -------
    array, (m, n), float64
        ``d (|u| + e_u) + |f(g)| e_u``. Here d bounds the error of f(g): its largest slope times
        e_g, plus `own`.

    Examples
    --------
    >>> gated_error(np.float64([[0.0, 2.0]]), np.float64([[0.1, 0.0]]), "swiglu").round(4).tolist()
    [[0.22]]
    """
    kind = GLU[activation]
    gate, up = gate_and_other(x, activation)
    of_gate, of_up = gate_and_other(error, activation)
    off = ACTIVATION_SLOPE[kind] * of_gate + own
    size = np.abs(activate(gate, kind))
    found = off * (np.abs(up) + of_up) + size * of_up
    # An infinite bound stays infinite, also where its factor is 0.
    return np.asarray(np.where(np.isinf(of_gate) | np.isinf(of_up), np.inf, found))


def weight_error(
    w: Array, scales: Array, block_size: int = BLOCK_SIZE, out_dtype: str = "float32"
) -> Array:
    """Bound the error of each element of ``weight_dequant(*weight_quant(w))`` against `w`.

    Parameters
    ----------
    w : array, (out, in) or (out, in, ...)
        The weight, with finite elements below 2^127.
    scales : array, (out blocks, in blocks) or (out, 1), float32
    block_size : int
    out_dtype : {"float32", "bfloat16", "float16"}
        As for `weight_dequant`.

    Returns
    -------
    array, as w, float64

    Notes
    -----
    With the error of the codes Δ [L14], the float32 product, of at most ``|w| + Δ``, is rounded by
    ``u (|w| + Δ) + 2^-150`` at most, and then to `out_dtype`: docs/MATH_REFERENCE.md [L20].
    """
    w, scales = operands(w=w, scales=scales)
    size = abs(as_float64(as_matrix(w)))
    scale = as_float64(scales)
    if scales.shape != (size.shape[0], 1) or scales.shape == scale_shape(size.shape, block_size):
        scale = by_column(scale, block_size, size.shape[1])
        scale = scale.repeat(block_size, axis=0)[: size.shape[0]]
    error = rounding_to_codes(size, scale)
    error = error + 2.0**-24 * (size + error) + 2.0**-150
    return (error + half_ulp(size + error, out_dtype)).reshape(w.shape)
