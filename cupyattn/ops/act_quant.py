"""Activations to INT8 codes, one scale for 128 channels of a row or for all of it: one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError, shown
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.act_quant import padded, plan_act_quant
from cupyattn.plans.records import Work
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.problem.problem import Problem, Result
from cupyattn.quant.blocks import BLOCK_SIZE, check_blocks, check_values
from cupyattn.reference.act_quant import quantize_rows

Array = Any


def act_quant(
    x: Array,
    block_size: int = BLOCK_SIZE,
    *,
    strategy: str = "block",
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Quantise activations with a scale for each `block_size` adjacent channels of a row.

    With ``strategy="channel"`` a whole row shares a scale, to go with weights that have a scale for
    each output channel.

    Parameters
    ----------
    x : array, (..., channels), float16, bfloat16 or float32
        NumPy, CuPy, or anything with DLPack.
    block_size : int
        The last block of a row may be smaller. Only with ``strategy="block"``.
    strategy : {"block", "channel"}
        The group that shares a scale: a block of a row, or the row.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernels, one launch, support rows and blocks of 128. On a
        device, other blocks run CuPy's functions, which flush float32 numbers below 2^-126 to zero.

    Returns
    -------
    codes : array, (..., channels), int8
        -127 to 127. Both of the kind of x.
    scales : array, (..., blocks) or (..., 1), float32
        NaN for a block or row that contains a NaN or an infinity; its codes are 0.

    Raises
    ------
    TypeError
        For an array of another kind or type.
    ValueError
        For a number in place of an array of rows, or an unusable `block_size`.
    UnsupportedError
        For other blocks on the interpreter.

    Notes
    -----
    ``|x - scale code| <= scale/2 (1 + 2^-15)``: docs/MATH_REFERENCE.md [L14].

    Examples
    --------
    >>> codes, scales = act_quant(np.float32([[0.0, -254.0, 1.0]]), block_size=2)
    >>> codes.tolist(), scales.tolist()
    ([[0, -127, 127]], [[2.0, 0.007874015718698502]])
    >>> codes, scales = act_quant(np.float32([[0.0, -254.0, 1.0]]), strategy="channel")
    >>> codes.tolist(), scales.tolist()
    ([[0, -127, 0]], [[2.0]])
    """
    arrays = {"x": x}
    settings = ActQuantSettings(block_size, backend, 0, "", strategy)
    codes, scales = run(ACT_QUANT, settings, arrays, (type(block_size),)).values()
    return codes, scales


def act_quant_except(
    x: Array, columns: Array, place: Array, dtype: str, *, backend: str | None = None
) -> tuple[Array, Array, Array]:
    """Quantise activations, except some columns, which are kept in 16 bits.

    Parameters
    ----------
    x : array, (..., channels)
        As for `act_quant`.
    columns : array, (outliers,), int32
        Channels that are kept, each once.
    place : array, (channels,), int32
        The result of `places` for these columns.
    dtype : {"float16", "bfloat16"}
        Type that they are kept in.
    backend : {"cuda", "mirror", "interpret"}, optional

    Returns
    -------
    codes, scales : array
        Codes and scales of x with 0 in these columns.
    kept : array, (..., outliers rounded up to `KEPT_PAD`), dtype
        The columns, and zeros.
    """
    settings = ActQuantSettings(BLOCK_SIZE, backend, columns.shape[0], dtype)
    codes, scales, kept = run(ACT_QUANT, settings, {"x": x, "place": place}).values()
    return codes, scales, kept


def places(columns: Array, channels: int) -> Array:
    """Return for every channel its index in `columns`, or -1 if it is not among them.

    Examples
    --------
    >>> places(np.int32([4, 1]), 5).tolist()
    [-1, 1, -1, -1, 0]
    """
    place = np.full(channels, -1, np.int32)
    place[columns] = np.arange(len(columns))
    return place


class ActQuantSettings(NamedTuple):
    """Arguments of quantising activations, except arrays.

    `outliers` columns are kept in 16 bits, in the type `dtype`.
    """

    block_size: int
    backend: str | None
    outliers: int = 0
    dtype: str = ""
    strategy: str = "block"


#: The arrays of a row's channels. The second is optional: channels after the channels of the first.
SIDES = ("x", "right")


def channels_of(arrays: Mapping[str, Described]) -> int:
    """Return the number of channels of the rows of `SIDES`."""
    return sum(arrays[name].shape[-1] for name in SIDES if name in arrays)


class _ActQuant(Operation):
    """Activations to codes as an operation; `SIDES` are quantised as their concatenation."""

    name = "act_quant"

    def resolve(self, settings: ActQuantSettings, arrays: Mapping[str, Described]) -> Problem:
        """Check the activations; blocks of other sizes than the kernel's go to the mirror."""
        x, size = arrays["x"], settings.block_size
        backend = choose(settings.backend, x.device >= 0)
        check_blocks(settings.strategy, size)
        if backend == "interpret" and size != BLOCK_SIZE:
            raise UnsupportedError(
                f"the kernel takes blocks of {BLOCK_SIZE}, got block_size={shown(size)}: use "
                "backend='mirror'"
            )
        check_values("x", x, least_axes=1)
        right = arrays.get("right")
        if right is not None:
            _check_right(x, right, settings)
        if backend == "mirror" or size != BLOCK_SIZE:
            return Problem(
                what=self.name, backend="mirror", operands=arrays, results={}, settled=settings
            )
        sides = {name: arrays[name] for name in SIDES if name in arrays}
        operands = {name: side.with_whole_rows().rows() for name, side in sides.items()}
        blocks = 1 if settings.strategy == "channel" else -(-x.shape[-1] // BLOCK_SIZE)
        results = {
            "codes": Result((*x.shape[:-1], channels_of(arrays)), np.dtype(np.int8)),
            "scales": Result((*x.shape[:-1], blocks), STORAGE["float32"]),
        }
        if settings.outliers:
            operands["place"] = arrays["place"]
            width = padded(settings.outliers)
            results["kept"] = Result((*x.shape[:-1], width), STORAGE[settings.dtype])
        return Problem(
            what=self.name, backend=backend, operands=operands, results=results, settled=settings
        )

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        x, settings = problem.operands["x"], problem.settled
        if settings.strategy == "channel":
            right = problem.operands.get("right")
            beside = None if right is None else right.place
            return Work.of(plan_row_quant(x.place, x.dtype.name, right=beside))
        how = x.dtype.name, settings.outliers, settings.dtype
        return Work.of(plan_act_quant(x.place, *how))

    def mirror(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Compute codes and scales with the functions of the array's library."""
        x, settings, made = arrays["x"], problem.settled, {}
        if "right" in arrays:
            x = array_namespace(x).concatenate((x, arrays["right"]), axis=-1)
        if settings.outliers:
            place = arrays["place"]
            columns = np.flatnonzero(place >= 0)
            columns = columns[np.argsort(place[columns])]
            made["kept"] = np.zeros(
                (*x.shape[:-1], padded(settings.outliers)), STORAGE[settings.dtype]
            )
            with np.errstate(over="ignore"):
                values = x[..., columns].astype(STORAGE[settings.dtype])
            made["kept"][..., : settings.outliers] = values
            x = x.copy()
            x[..., columns] = 0
        codes, scales = quantize_rows(x, settings.block_size, settings.strategy)
        return {"codes": codes, "scales": scales, **made}


def _check_right(x: Described, right: Described, settings: ActQuantSettings) -> None:
    """Raise unless further channels go with the rows of x, each with one scale."""
    if settings.strategy != "channel":
        raise UnsupportedError(
            f"right goes with strategy='channel', got {settings.strategy!r}: concatenate x and "
            "right"
        )
    check_together(x=x, right=right)
    if right.ndim != x.ndim or right.shape[:-1] != x.shape[:-1] or right.dtype != x.dtype:
        raise ValueError(
            f"right must have the rows and type of x, {x.dtype} of shape {(*x.shape[:-1], '*')}, "
            f"got {right.dtype} of shape {right.shape}"
        )


ACT_QUANT = _ActQuant()
