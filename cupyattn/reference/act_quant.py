"""Quantise activations to INT8, with a scale for 128 channels of a row or for the whole row."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.kinds import Array, array_namespace
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    block_max,
    by_column,
    check_block_size,
    check_values,
    rounded_codes,
    row_max,
    row_strips,
)
from cupyattn.quant.quantizers import scale_of_absmax


def quantize_rows(
    x: Array, block_size: int = BLOCK_SIZE, strategy: str = "block"
) -> tuple[Array, Array]:
    """Compute `cupyattn.act_quant` with the functions of the array's library."""
    check_values("x", x, least_axes=1)
    check_block_size(block_size)
    xp = array_namespace(x)
    by_row = strategy == "channel"
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = x.astype(np.float32)
        largest = row_max(xp.abs(values)) if by_row else block_max(xp.abs(values), block_size)
        scales, inverse = scale_of_absmax(largest)
        if not by_row:
            inverse = by_column(inverse, block_size, x.shape[-1])
        codes = rounded_codes(values, inverse)
    return codes, scales.astype(np.float32, copy=False)


def row_scales(x: Array) -> tuple[Array, Array]:
    """Return the scale of each row of a matrix and its inverse, (rows, 1), both float32.

    The factor of codes, and the factor of numbers before they are rounded to codes.
    """
    xp = array_namespace(x)
    scales, inverses = (xp.empty((x.shape[0], 1), np.float32) for _ in range(2))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for rows in row_strips(x.shape):
            largest = row_max(xp.abs(x[rows].astype(np.float32)))
            scales[rows], inverses[rows] = scale_of_absmax(largest)
    return scales, inverses
