"""Bound of the error of codes of normalised rows in front of a product."""

from __future__ import annotations

import math

import numpy as np

from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.bounds.perturbation import gamma
from cupyattn.bounds.products import TINY, activated
from cupyattn.bounds.scores import MAX_FLOAT, REFERENCE, U
from cupyattn.bounds.values import rounding_to_codes
from cupyattn.kernels.row_teams import RUN, held_of, lanes_of
from cupyattn.quant.blocks import BLOCK_SIZE, by_column
from cupyattn.quant.rotation import group_of, rotated
from cupyattn.quant.row_steps import RowSteps
from cupyattn.reference.gemm import Float64
from cupyattn.reference.norm_quant import Vectors, exact_affine


def norm_quant_error(x: Array, scales: Array, steps: RowSteps, vectors: Vectors) -> Float64:
    r"""Bound ``|scale code - norm_quant_exact|``, element by element [L82].

    Parameters
    ----------
    x : array, (rows, channels)
        Shape (rows, 2 channels) for a gated linear unit.
    scales : array, (rows, 1) or (rows, blocks), float32
        Scales of the computed codes.
    steps : RowSteps
    vectors : Vectors

    Returns
    -------
    array, (rows, channels), float64
        +inf if a number may leave the range of float32.

    Notes
    -----
    :math:`E_y` bounds the error of the quantised number, and a code adds :math:`\tfrac\lambda2 (1 +
    2^{-15})`.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        y, error = as_float64(x), np.zeros(x.shape)
        if steps.norm is not None:
            y, error = _normalised(y, steps)
        if vectors.any:
            y, error = _affine(y, error, vectors.by_row(len(y)))
        y, error = activated(y, error, steps.activation)
        made = as_float64(scales)
        if steps.rotate is not None:
            group = group_of(y.shape[-1])
            roundings = gamma(int(math.log2(group)), U)
            error = _spread(error + roundings * (np.abs(y) + error), group) * REFERENCE
            y = rotated(y)
            error = error + 127 * (3 * U * made + 2 * TINY)  # the scale's own product
        if steps.strategy == "block":
            made = by_column(made, BLOCK_SIZE, y.shape[-1])
        fits = np.abs(y) + error <= MAX_FLOAT / RUN**4
        whole = error + rounding_to_codes(np.abs(y) + error, made)
        return np.where(fits & np.isfinite(whole), whole * REFERENCE, np.inf)


def _normalised(x: Float64, steps: RowSteps) -> tuple[Float64, Float64]:
    """Return rows normalised exactly, and the error of the same in float32 (N1, N2)."""
    channels = x.shape[-1]
    every = lanes_of(channels) * RUN
    adds = held_of(channels) // every + int(math.log2(every))
    size, of_mean = np.abs(x).sum(axis=-1, keepdims=True), np.zeros((len(x), 1))
    if steps.norm == "layer":
        of_mean = gamma(adds + 2, U) * size / channels + TINY
        x = x - x.mean(axis=-1, keepdims=True)
    of_x = of_mean + U * (np.abs(x) + of_mean) if steps.norm == "layer" else of_mean
    square = (x * x).mean(axis=-1, keepdims=True) + steps.eps
    roundings = gamma(adds + 8, U)
    least, most = square * (1 - roundings), (square + of_mean**2) * (1 + roundings)
    factor = square**-0.5
    high, low = least**-0.5 * (1 + U) / (1 - U), most**-0.5 * (1 - U) / (1 + U)
    of_factor = np.maximum(high - factor, factor - low)
    z = x * factor
    error = np.abs(x) * of_factor + of_x * (factor + of_factor)
    error = (error + U * (np.abs(z) + error) + TINY) * REFERENCE
    fits = np.maximum(most * channels, size) <= MAX_FLOAT
    return z, np.where(fits, error, np.inf)


def _affine(z: Float64, error: Float64, vectors: Vectors) -> tuple[Float64, Float64]:
    """Return modulated rows, and their error (N2)."""
    g, h = exact_affine(vectors)
    bare = vectors._replace(shift=None)
    of_g = gamma(2, U) * np.abs(g) + TINY
    of_h = U * np.abs(exact_affine(bare)[1])
    of_h = of_h + U * (np.abs(h) + of_h) + TINY
    y = g * z + h
    error = np.abs(z) * of_g + error * (np.abs(g) + of_g) + of_h
    return y, (error + U * (np.abs(y) + error) + TINY) * REFERENCE


def _spread(error: Float64, group: int) -> Float64:
    """Return the sum of a group's errors in each of its rotated channels."""
    rows, channels = error.shape
    parts = error.reshape(rows, group // RUN, channels // group, RUN)
    sums = parts.sum(axis=(1, 3), keepdims=True) / math.sqrt(group)
    return np.broadcast_to(sums, parts.shape).reshape(rows, channels)
