"""Quantise weights to INT8, with scales of 128 x 128 blocks or of output channels, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, Array, array_namespace
from cupyattn.arrays.threads import in_threads, thread_count
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    as_matrix,
    block_max,
    by_column,
    by_line,
    check_block_size,
    check_codes,
    check_out_dtype,
    check_values,
    panels,
    rounded_codes,
    row_strips,
    scale_shape,
)
from cupyattn.quant.quantizers import code_of, coding_of_range, scale_of_absmax
from cupyattn.reference.act_quant import quantize_rows


def quantize_blocks(
    w: Array, block_size: int = BLOCK_SIZE, strategy: str = "block"
) -> tuple[Array, Array]:
    """Compute `cupyattn.weight_quant` with the functions of the array's library."""
    check_values("w", w, least_axes=2)
    check_block_size(block_size)
    xp = array_namespace(w)
    matrix = as_matrix(w)
    codes = xp.empty(matrix.shape, np.int8)
    scales = xp.empty(scale_shape(w.shape, block_size, strategy), np.float32)

    def by_channel(strips_of_rows: Sequence[slice]) -> None:
        for rows in strips_of_rows:
            codes[rows], scales[rows] = quantize_rows(matrix[rows], strategy=strategy)

    def by_block(cut: Sequence[tuple[Any, Any]]) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for part, blocks in cut:
                values = by_line(matrix[part].astype(np.float32), block_size)
                largest = block_max(xp.abs(values).max(axis=1), block_size)
                scales[blocks], inverse = scale_of_absmax(largest)
                inverse = by_column(inverse, block_size, values.shape[2])
                made = rounded_codes(values, inverse[:, None, :])
                codes[part] = made.reshape(-1, values.shape[2])

    threads = thread_count(w.size) if xp is np else 1
    if strategy == "channel":
        in_threads(by_channel, [*row_strips(matrix.shape)], threads)
    else:
        in_threads(by_block, [*panels(matrix.shape, block_size)], threads)
    return codes.reshape(w.shape), scales


def quantize_channels_affine(w: Array) -> tuple[Array, Array, Array]:
    """Quantise a matrix with a scale and a zero point for each row.

    Parameters
    ----------
    w : array, (out, in), float16, bfloat16 or float32
        NumPy or CuPy.

    Returns
    -------
    codes : array, (out, in), int8
        -128 to 127.
    scales : array, (out, 1), float32
    zeros : array, (out, 1), int32

    Notes
    -----
    As `cupyattn.quant.quantizers.quantize_affine` with one row in a group.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = w.astype(np.float32)
        sides = [(x.max(axis=1, keepdims=True)).clip(0, None) for x in (values, -values)]
        scales, inverse, zeros = coding_of_range(*sides)
        return code_of(values * inverse, zeros), scales, zeros


def dequantize_blocks(
    codes: Array,
    scales: Array,
    block_size: int = BLOCK_SIZE,
    out_dtype: str = "float32",
    strategy: str = "block",
) -> Array:
    """Compute `cupyattn.weight_dequant` with the functions of the arrays' library."""
    check_block_size(block_size)
    check_out_dtype(out_dtype)
    check_codes(codes, scales, block_size, strategy)
    xp = array_namespace(codes, scales)
    matrix = as_matrix(codes)
    w = xp.empty(matrix.shape, STORAGE[out_dtype])
    if strategy == "channel":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for rows in row_strips(matrix.shape):
                values = matrix[rows].astype(np.float32)
                values *= scales[rows]
                w[rows] = values.astype(STORAGE[out_dtype], copy=False)
        return w.reshape(codes.shape)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for part, blocks in panels(matrix.shape, block_size):
            values = by_line(matrix[part].astype(np.float32), block_size)
            values *= by_column(scales[blocks], block_size, values.shape[2])[:, None, :]
            w[part] = values.astype(STORAGE[out_dtype], copy=False).reshape(-1, values.shape[2])
    return w.reshape(codes.shape)
