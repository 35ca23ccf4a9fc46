"""Weights to INT8 codes, one scale for 128 x 128 of them, and back: one launch on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.interchange import check_one_device, contiguous_last_axis, operand
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.arrays.memory import as_input, on_device_of
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError
from cupyattn.ops.run import run
from cupyattn.plans.gemm import OneLaunch
from cupyattn.plans.weight_blocks import plan_weight_blocks
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
from cupyattn.runtime.repeated import call_key, recall, remember

Array = Any

#: Rows and columns of the largest block that fits into the registers of a thread block.
MOST_BLOCK = 128


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
