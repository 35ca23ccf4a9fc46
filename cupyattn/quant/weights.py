"""Weights to INT8 codes, one scale for 128 x 128 of them, and back: one launch on a device."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupyattn.arrays import check_one_device, contiguous_last_axis, operand
from cupyattn.backends import as_input, choose, on_device_of, run
from cupyattn.checks import INT32_MAX, MAX_LENGTH
from cupyattn.compile import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.plans import Launch, Operand
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    as_matrix,
    check_block_size,
    check_codes,
    check_out_dtype,
    check_values,
    dequantize_blocks,
    quantize_blocks,
    scale_shape,
)
from cupyattn.quant.gemm_plan import GemmFeatures, OneLaunch
from cupyattn.quant.repeated import call_key, recall, remember
from cupyattn.rounding import STORAGE, array_namespace
from cupyattn.tiles import GemmTiles

Array = Any

#: ``struct WeightParams`` of kernels_cu/weight_blocks.cu, field by field.
WEIGHT_PARAMS = np.dtype(
    [
        ("W", "u8"), ("codes", "u8"), ("scales", "u8"), ("W_stride", "i8"), ("codes_stride", "i8"),
        ("scales_stride", "i8"), ("rows", "i4"), ("columns", "i4"),
    ],
    align=True,
)  # fmt: skip
#: Rows and columns of the largest block that fits into the registers of a thread block.
MOST_BLOCK = 128
#: Numbers that a thread holds at most, and accesses that it takes to them.
_NUMBERS, _ACCESSES = 64, 16


def weight_quant(
    w: Array, block_size: int = BLOCK_SIZE, *, backend: str | None = None
) -> tuple[Array, Array]:
    """Quantise a weight with a scale for each block of `block_size` x `block_size`.

    Parameters
    ----------
    w : array, (out, in) or (out, in, ...), float16, bfloat16 or float32
        NumPy or CuPy. A convolution's weight is taken as (out, in * height * width).
    block_size : int
        Blocks at the ends of rows and columns may be smaller.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernel, one launch, takes blocks of up to 128; larger ones
        take CuPy's own functions on a device, which flush float32 numbers below 2^-126 to zero.

    Returns
    -------
    codes : array, as w, int8
        -127 to 127.
    scales : array, (out blocks, in blocks), float32
        NaN for a block that holds a NaN or an infinity, whose codes are 0.

    Raises
    ------
    TypeError
        For an array of another kind or type.
    ValueError
        For fewer than two axes, or an unusable `block_size`.
    UnsupportedError
        For larger blocks on the interpreter, and for more than 2^30 rows or columns.

    Notes
    -----
    Error as of `act_quant`; `weight_error` bounds the way there and back. Beside `w` and what is
    returned it takes a few megabytes at most; a `w` whose last axis is not contiguous is copied for
    the kernel.

    Examples
    --------
    >>> codes, scales = weight_quant(np.float32([[127.0, 1.0], [0.4, 0.6]]))
    >>> codes.tolist(), scales.tolist()
    ([[127, 1], [0, 1]], [[1.0]])
    """
    key, addresses = call_key(("weight_quant", block_size, backend), {"w": w})
    again = recall(key)
    if again is not None:
        codes, scales = again(addresses)
        return codes, scales
    given, w = {"w": w}, operand("w", w)
    backend = choose(backend, w)
    check_values("w", w, least_axes=2)
    if not _takes_kernel(backend, block_size):
        return quantize_blocks(w, block_size)
    xp = array_namespace(w)
    with on_device_of(w):
        matrix = contiguous_last_axis(as_matrix(w))
        buffers = {
            "w": as_input(matrix),
            "codes": xp.empty(matrix.shape, np.int8),
            "scales": xp.empty(scale_shape(w.shape, block_size), np.float32),
        }
        shapes = {"codes": tuple(w.shape), "scales": buffers["scales"].shape}
        plan = _plan_of("weight_quant", buffers, block_size)
        run(backend, plan, buffers)
        remember(key, plan, None, given, buffers, shapes)
    return buffers["codes"].reshape(w.shape), buffers["scales"]


def weight_dequant(
    codes: Array,
    scales: Array,
    block_size: int = BLOCK_SIZE,
    out_dtype: str = "float32",
    *,
    backend: str | None = None,
) -> Array:
    """Return the weight that codes and scales stand for: every code times the scale of its block.

    Parameters
    ----------
    codes : array, (out, in) or (out, in, ...), int8
        NumPy or CuPy.
    scales : array, (out blocks, in blocks), float32
    block_size : int
    out_dtype : {"float32", "bfloat16", "float16"}
        The product is rounded to float32, and that to this type.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `weight_quant`.

    Returns
    -------
    array, as codes

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit together.
    UnsupportedError
        As `weight_quant`.

    Examples
    --------
    >>> weight_dequant(np.int8([[127, 1]]), np.float32([[0.5]])).tolist()
    [[63.5, 0.5]]
    """
    given = {"codes": codes, "scales": scales}
    key, addresses = call_key(("weight_dequant", block_size, out_dtype, backend), given)
    again = recall(key)
    if again is not None:
        return again(addresses)[0]
    codes, scales = operand("codes", codes), operand("scales", scales)
    xp = array_namespace(codes, scales)
    check_one_device(**given)
    backend = choose(backend, codes)
    check_out_dtype(out_dtype)
    if not _takes_kernel(backend, block_size):
        return dequantize_blocks(codes, scales, block_size, out_dtype)
    check_codes(codes, scales, block_size)
    with on_device_of(codes):
        buffers = {
            "codes": as_input(contiguous_last_axis(as_matrix(codes))),
            "scales": as_input(contiguous_last_axis(scales)),
        }
        buffers["w"] = xp.empty(buffers["codes"].shape, STORAGE[out_dtype])
        plan = _plan_of("weight_dequant", buffers, block_size)
        run(backend, plan, buffers)
        remember(key, plan, None, given, buffers, {"w": tuple(codes.shape)})
    return buffers["w"].reshape(codes.shape)


def _takes_kernel(backend: str, block_size: int) -> bool:
    """Whether blocks of this size go to the kernel; raise where they have to and cannot."""
    check_block_size(block_size)
    if backend == "interpret" and block_size > MOST_BLOCK:
        raise UnsupportedError(
            f"the kernel takes blocks of up to {MOST_BLOCK}, got block_size={block_size!r}: use "
            "backend='mirror'"
        )
    return backend != "mirror" and block_size <= MOST_BLOCK


def _plan_of(entry: str, buffers: dict[str, Array], block_size: int) -> OneLaunch:
    of = {name: Operand.of(array) for name, array in buffers.items()}
    dtype = buffers["w"].dtype.name
    return plan_weight_blocks(entry, of["w"], of["codes"], of["scales"], dtype, block_size)


@functools.lru_cache(maxsize=1024)
def plan_weight_blocks(
    entry: str, w: Operand, codes: Operand, scales: Operand, dtype: str, block_size: int
) -> OneLaunch:
    """Plan the way from a weight to codes and scales, or back.

    Parameters
    ----------
    entry : {"weight_quant", "weight_dequant"}
        The kernel.
    w, codes, scales : Operand
        The buffers of these names, with two axes and contiguous last ones.
    dtype : {"float16", "bfloat16", "float32"}
        Storage type of w.
    block_size : int
        At most `MOST_BLOCK`.

    Returns
    -------
    OneLaunch
        Without launches where w is empty.

    Raises
    ------
    UnsupportedError
        For more rows, columns or blocks than the kernel counts.
    """
    rows, columns = w.shape
    vec = max(
        width
        for width in (1, 2, 4, 8)
        if w.allows(width) and codes.allows(width) and block_size % width == 0
    )
    features = GemmFeatures(dtype, 1, vec)
    grid = math.prod(scales.shape)
    if grid == 0:
        return OneLaunch(features=features)
    if max(rows, columns) > MAX_LENGTH or grid > INT32_MAX:
        raise UnsupportedError(
            f"a weight of {rows} x {columns} in blocks of {block_size} exceeds 2^30 rows or "
            f"columns, or {INT32_MAX} blocks: split it"
        )
    params: dict[str, Any] = {
        "W": "w", "codes": "codes", "scales": "scales", "W_stride": w.row_strides[0],
        "codes_stride": codes.row_strides[0], "scales_stride": scales.row_strides[0],
        "rows": rows, "columns": columns,
    }  # fmt: skip
    rows_at_a_time = -(-block_size // min(_ACCESSES, _NUMBERS // vec))
    num_warps = -(-rows_at_a_time * (block_size // vec) // 32)
    tiles = GemmTiles(block_m=block_size, block_n=block_size, num_warps=num_warps, num_stages=1)
    spec = ModuleSpec(
        "weight_blocks.cu", tuple(sorted({**tiles.defines(), **features.defines()}.items()))
    )
    structs = ((WEIGHT_PARAMS, params),)
    launch = Launch(spec, entry, grid, tiles.num_threads, False, structs)
    return OneLaunch(features=features, launches=(launch,))
