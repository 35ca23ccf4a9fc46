"""Weights to INT8 codes, one scale for 128 x 128 of them or an output channel, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.interchange import check_one_device, contiguous_last_axis, take
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.arrays.memory import on_device_of
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError
from cupyattn.ops.operation import Known, run
from cupyattn.plans.records import Work
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.plans.weights import plan_weight_blocks
from cupyattn.problem.problem import Problem, Result
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
    as_matrix,
    check_block_size,
    check_blocks,
    check_codes,
    check_out_dtype,
    check_values,
    scale_shape,
)
from cupyattn.reference.weights import dequantize_blocks, quantize_blocks

Array = Any

#: Rows and columns of the largest block that fits into the registers of a thread block.
MOST_BLOCK = 128


def weight_quant(
    w: Array,
    block_size: int = BLOCK_SIZE,
    *,
    strategy: str = "block",
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Quantise a weight with a scale for each block of `block_size` x `block_size`.

    With ``strategy="channel"`` every output channel, a row, has one scale.

    Parameters
    ----------
    w : array, (out, in) or (out, in, ...), float16, bfloat16 or float32
        NumPy, CuPy, or anything with DLPack, parameters of torch as well. A convolution's weight is
        taken as (out, in * height * width).
    block_size : int
        Blocks at the ends of rows and columns may be smaller. Only with ``strategy="block"``.
    strategy : {"block", "channel"}
        What shares a scale.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernels, one launch, take rows and blocks of up to 128;
        larger blocks take CuPy's own functions on a device, which flush float32 numbers below
        2^-126 to zero.

    Returns
    -------
    codes : array, as w, int8
        -127 to 127. Both of the kind of w.
    scales : array, (out blocks, in blocks) or (out, 1), float32
        NaN for a block or channel that holds a NaN or an infinity, whose codes are 0.

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
    arrays = {"w": w}
    settings = WeightSettings(block_size, backend, strategy=strategy)
    codes, scales = run(WEIGHT_QUANT, settings, arrays, Known(arrays, (type(block_size),)))
    return codes, scales


def weight_dequant(
    codes: Array,
    scales: Array,
    block_size: int = BLOCK_SIZE,
    out_dtype: str = "float32",
    *,
    strategy: str = "block",
    backend: str | None = None,
) -> Array:
    """Return the weight that codes and scales stand for: every code times the scale of its block.

    With ``strategy="channel"`` the scale of its row.

    Parameters
    ----------
    codes : array, (out, in) or (out, in, ...), int8
        NumPy, CuPy, or anything with DLPack.
    scales : array, (out blocks, in blocks) or (out, 1), float32
    block_size : int
    out_dtype : {"float32", "bfloat16", "float16"}
        The product is rounded to float32, and that to this type.
    strategy : {"block", "channel"}
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `weight_quant`; channels take CuPy's own functions on a device, as larger blocks do.

    Returns
    -------
    array, as codes, out_dtype
        Of the kind of codes.

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
    arrays = {"codes": codes, "scales": scales}
    settings = WeightSettings(block_size, backend, out_dtype, strategy)
    return run(WEIGHT_DEQUANT, settings, arrays, Known(arrays, (type(block_size),)))


class WeightSettings(NamedTuple):
    """What quantising a weight, or the way back to `out_dtype`, asks for beside arrays."""

    block_size: int
    backend: str | None
    out_dtype: str = ""
    strategy: str = "block"


class _WeightQuant:
    """A weight to codes as an operation."""

    name = "weight_quant"

    def resolve(self, settings: WeightSettings, arrays: Mapping[str, Any]) -> Problem:
        """Check the weight; blocks that the kernel does not take go to the mirror."""
        (w, as_given), size = take("w", arrays["w"], of_parameter=True), settings.block_size
        backend = choose(settings.backend, w)
        check_values("w", w, least_axes=2)
        check_blocks(settings.strategy, size)
        if not _takes_kernel(backend, size):
            return Problem(
                what=self.name, backend="mirror", operands={"w": w}, results={},
                as_given=as_given, settled=settings,
            )  # fmt: skip
        with on_device_of(w):
            matrix = contiguous_last_axis(as_matrix(w))
        results = {
            "codes": Result(tuple(w.shape), np.dtype(np.int8)),
            "scales": Result(scale_shape(w.shape, size, settings.strategy), STORAGE["float32"]),
        }
        return Problem(
            what=self.name, backend=backend, operands={"w": matrix}, results=results,
            as_given=as_given, settled=settings,
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        w, size = problem.operands["w"], problem.settled.block_size
        if problem.settled.strategy == "channel":
            return Work.of(plan_row_quant(Operand.of(w), w.dtype.name, "w"))
        codes = Operand.contiguous(w.shape, 1)
        return _work(self.name, Operand.of(w), codes, w.dtype.name, size, problem)

    def mirror(self, problem: Problem) -> dict[str, Any]:
        """Return codes and scales by the functions of the array's own library."""
        size, strategy = problem.settled.block_size, problem.settled.strategy
        codes, scales = quantize_blocks(problem.operands["w"], size, strategy)
        return {"codes": codes, "scales": scales}

    def restore(
        self, facts: None, arrays: Mapping[str, Any], results: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return codes and scales."""
        return results["codes"], results["scales"]


class _WeightDequant:
    """The weight that codes and scales stand for, as an operation."""

    name = "weight_dequant"

    def resolve(self, settings: WeightSettings, arrays: Mapping[str, Any]) -> Problem:
        """Check codes and scales; blocks that the kernel does not take go to the mirror."""
        (codes, as_given), (scales, _) = (take(name, arrays[name]) for name in ("codes", "scales"))
        array_namespace(codes, scales)
        check_one_device(codes=codes, scales=scales)
        backend = choose(settings.backend, codes)
        check_out_dtype(settings.out_dtype)
        operands, size = {"codes": codes, "scales": scales}, settings.block_size
        check_blocks(settings.strategy, size)
        if settings.strategy == "channel" and backend == "interpret":
            raise UnsupportedError(
                "the kernel takes blocks, got strategy='channel': use backend='mirror'"
            )
        if settings.strategy == "channel" or not _takes_kernel(backend, size):
            return Problem(
                what=self.name, backend="mirror", operands=operands, results={}, as_given=as_given,
                settled=settings,
            )  # fmt: skip
        check_codes(codes, scales, size)
        with on_device_of(codes):
            operands = {
                "codes": contiguous_last_axis(as_matrix(codes)),
                "scales": contiguous_last_axis(scales),
            }
        results = {"w": Result(tuple(codes.shape), STORAGE[settings.out_dtype])}
        return Problem(
            what=self.name, backend=backend, operands=operands, results=results, as_given=as_given,
            settled=settings,
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        codes, (size, _, dtype, _) = problem.operands["codes"], problem.settled
        w = Operand.contiguous(codes.shape, STORAGE[dtype].itemsize)
        return _work(self.name, w, Operand.of(codes), dtype, size, problem)

    def mirror(self, problem: Problem) -> dict[str, Any]:
        """Return the weight by the functions of the arrays' own library."""
        size, _, dtype, strategy = problem.settled
        codes, scales = (problem.operands[name] for name in ("codes", "scales"))
        return {"w": dequantize_blocks(codes, scales, size, dtype, strategy)}

    def restore(self, facts: None, arrays: Mapping[str, Any], results: dict[str, Any]) -> Any:
        """Return the weight."""
        return results["w"]


WEIGHT_QUANT, WEIGHT_DEQUANT = _WeightQuant(), _WeightDequant()


def _takes_kernel(backend: str, block_size: int) -> bool:
    """Whether blocks of this size go to the kernel; raise where they have to and cannot."""
    check_block_size(block_size)
    if backend == "interpret" and block_size > MOST_BLOCK:
        raise UnsupportedError(
            f"the kernel takes blocks of up to {MOST_BLOCK}, got block_size={block_size!r}: use "
            "backend='mirror'"
        )
    return backend != "mirror" and block_size <= MOST_BLOCK


def _work(
    entry: str, w: Operand, codes: Operand, dtype: str, block_size: int, problem: Problem
) -> Work:
    """Return the launch of one way; scales are the problem's operand, or its result."""
    if "scales" in problem.operands:
        scales = Operand.of(problem.operands["scales"])
    else:
        scales = Operand.contiguous(problem.results["scales"].shape, 4)
    return Work.of(plan_weight_blocks(entry, w, codes, scales, dtype, block_size))
