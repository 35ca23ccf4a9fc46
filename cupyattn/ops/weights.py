"""Weights to INT8 codes, one scale for 128 x 128 of them or an output channel, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import detached
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.records import Work
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.plans.weights import plan_weight_blocks
from cupyattn.problem.problem import Problem, Result
from cupyattn.quant.blocks import (
    BLOCK_SIZE,
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
        NumPy, CuPy, or anything with DLPack, including torch parameters. A convolution's weight is
        treated as (out, in * height * width).
    block_size : int
        Blocks at the ends of rows and columns may be smaller. Only with ``strategy="block"``.
    strategy : {"block", "channel"}
        The group that shares a scale.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernels, one launch, support rows and blocks of up to 128.
        On a device, larger blocks run CuPy's functions, which flush float32 numbers below 2^-126 to
        zero.

    Returns
    -------
    codes : array, as w, int8
        -127 to 127. Both of the kind of w.
    scales : array, (out blocks, in blocks) or (out, 1), float32
        NaN for a block or channel that contains a NaN or an infinity; its codes are 0.

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
    The error is that of `act_quant`; `weight_error` bounds quantising and dequantising. Besides `w`
    and the results it needs at most a few megabytes. A `w` whose last axis is not contiguous is
    copied for the kernel.

    Examples
    --------
    >>> codes, scales = weight_quant(np.float32([[127.0, 1.0], [0.4, 0.6]]))
    >>> codes.tolist(), scales.tolist()
    ([[127, 1], [0, 1]], [[1.0]])
    """
    settings = WeightSettings(block_size, backend, strategy=strategy)
    own = detached(w) if hasattr(w, "requires_grad") else w
    codes, scales = run(WEIGHT_QUANT, settings, {"w": own}, (type(block_size),)).values()
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
    """Return the weight of codes and scales: every code times the scale of its block.

    With ``strategy="channel"`` the scale of its row.

    Parameters
    ----------
    codes : array, (out, in) or (out, in, ...), int8
        NumPy, CuPy, or anything with DLPack.
    scales : array, (out blocks, in blocks) or (out, 1), float32
    block_size : int
    out_dtype : {"float32", "bfloat16", "float16"}
        The product is rounded to float32, then to this type.
    strategy : {"block", "channel"}
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `weight_quant`; on a device, channels run CuPy's functions, as larger blocks do.

    Returns
    -------
    array, as codes, out_dtype
        An array of the codes' kind.

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
    return run(WEIGHT_DEQUANT, settings, arrays, (type(block_size),))["w"]


class WeightSettings(NamedTuple):
    """Arguments of quantising a weight, or of dequantising it to `out_dtype`, except arrays."""

    block_size: int
    backend: str | None
    out_dtype: str = ""
    strategy: str = "block"


class _WeightQuant(Operation):
    """A weight to codes as an operation."""

    name = "weight_quant"

    def resolve(self, settings: WeightSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check the weight; blocks that the kernel does not take go to the mirror."""
        w, size = arrays["w"], settings.block_size
        backend = choose(settings.backend, w.device >= 0)
        check_values("w", w, least_axes=2)
        check_blocks(settings.strategy, size)
        if not _takes_kernel(backend, size):
            return Problem(
                what=self.name, backend="mirror", operands={"w": w}, results={}, settled=settings
            )
        results = {
            "codes": Result(w.shape, np.dtype(np.int8)),
            "scales": Result(scale_shape(w.shape, size, settings.strategy), STORAGE["float32"]),
        }
        return Problem(
            what=self.name, backend=backend, operands={"w": w.columns().with_whole_rows()},
            results=results, settled=settings,
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        w, size = problem.operands["w"], problem.settled.block_size
        if problem.settled.strategy == "channel":
            return Work.of(plan_row_quant(w.place, w.dtype.name, "w"))
        codes = Operand.contiguous(w.shape, 1)
        return _work(self.name, w.place, codes, w.dtype.name, size, problem)

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Compute codes and scales with the functions of the array's library."""
        size, strategy = problem.settled.block_size, problem.settled.strategy
        codes, scales = quantize_blocks(arrays["w"], size, strategy)
        return {"codes": codes, "scales": scales}


class _WeightDequant(Operation):
    """Dequantising of codes and scales to a weight, as an operation."""

    name = "weight_dequant"

    def resolve(self, settings: WeightSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check codes and scales; blocks that the kernel does not take go to the mirror."""
        check_together(**arrays)
        codes, scales, size = arrays["codes"], arrays["scales"], settings.block_size
        backend = choose(settings.backend, codes.device >= 0)
        check_out_dtype(settings.out_dtype)
        check_blocks(settings.strategy, size)
        if settings.strategy == "channel" and backend == "interpret":
            raise UnsupportedError(
                "the kernel takes blocks, got strategy='channel': use backend='mirror'"
            )
        if settings.strategy == "channel" or not _takes_kernel(backend, size):
            return Problem(
                what=self.name, backend="mirror", operands=arrays, results={}, settled=settings
            )
        check_codes(codes, scales, size)
        operands = {
            "codes": codes.columns().with_whole_rows(), "scales": scales.with_whole_rows(),
        }  # fmt: skip
        results = {"w": Result(codes.shape, STORAGE[settings.out_dtype])}
        return Problem(
            what=self.name, backend=backend, operands=operands, results=results, settled=settings
        )

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        codes, (size, _, dtype, _) = problem.operands["codes"], problem.settled
        w = Operand.contiguous(codes.shape, STORAGE[dtype].itemsize)
        return _work(self.name, w, codes.place, dtype, size, problem)

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Compute the weight with the functions of the arrays' library."""
        size, _, dtype, strategy = problem.settled
        codes, scales = (arrays[name] for name in ("codes", "scales"))
        return {"w": dequantize_blocks(codes, scales, size, dtype, strategy)}


WEIGHT_QUANT, WEIGHT_DEQUANT = _WeightQuant(), _WeightDequant()


def _takes_kernel(backend: str, block_size: int) -> bool:
    """Whether the kernel supports blocks of this size; raise if only the kernel may run."""
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
        scales = problem.operands["scales"].place
    else:
        scales = Operand.contiguous(problem.results["scales"].shape, 4)
    return Work.of(plan_weight_blocks(entry, w, codes, scales, dtype, block_size))
