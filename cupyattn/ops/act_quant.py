"""Activations to INT8 codes, one scale for 128 channels of a row: one launch on a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import contiguous_last_axis, operand
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.arrays.memory import as_input, on_device_of
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.target import choose
from cupyattn.errors import UnsupportedError
from cupyattn.ops.run import run
from cupyattn.plans.act_quant import padded, plan_act_quant
from cupyattn.quant.blocks import BLOCK_SIZE, check_values, quantize_rows
from cupyattn.runtime.repeated import call_key, recall, remember

Array = Any


def act_quant(
    x: Array, block_size: int = BLOCK_SIZE, *, backend: str | None = None
) -> tuple[Array, Array]:
    """Quantise activations with a scale for each `block_size` adjacent channels of a row.

    Parameters
    ----------
    x : array, (..., channels), float16, bfloat16 or float32
        NumPy or CuPy.
    block_size : int
        The last block of a row may be smaller.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `cupyattn.attention`. The kernel, one launch, takes blocks of 128; others take CuPy's
        own functions on a device, which flush float32 numbers below 2^-126 to zero.

    Returns
    -------
    codes : array, (..., channels), int8
        -127 to 127.
    scales : array, (..., blocks), float32
        NaN for a block that holds a NaN or an infinity, whose codes are 0.

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
    ``|x - scale code| <= scale/2 (1 + 2^-15)``: docs/MATH_REFERENCE.md, Q1.

    Examples
    --------
    >>> codes, scales = act_quant(np.float32([[0.0, -254.0, 1.0]]), block_size=2)
    >>> codes.tolist(), scales.tolist()
    ([[0, -127, 127]], [[2.0, 0.007874015718698502]])
    """
    key, addresses = call_key(("act_quant", block_size, backend), {"x": x})
    again = recall(key)
    if again is not None:
        codes, scales = again(addresses)
        return codes, scales
    if (taken := operand("x", x)) is not x:
        x, key = taken, None  # a call whose operand is copied is not remembered
    backend = choose(backend, x)
    if backend == "interpret" and block_size != BLOCK_SIZE:
        raise UnsupportedError(
            f"the kernel takes blocks of {BLOCK_SIZE}, got block_size={block_size!r}: use "
            "backend='mirror'"
        )
    if backend == "mirror" or block_size != BLOCK_SIZE:
        return quantize_rows(x, block_size)
    codes, scales, _ = _run(x, None, backend, key)
    return codes, scales


def act_quant_but(
    x: Array, columns: Array, place: Array, dtype: str, *, backend: str | None = None
) -> tuple[Array, Array, Array]:
    """Quantise activations but for some columns, which are kept in 16 bits.

    Parameters
    ----------
    x : array, (..., channels)
        As for `act_quant`.
    columns : array, (outliers,), int32
        Channels that are kept, each once.
    place : array, (channels,), int32
        What `places` makes of them.
    dtype : {"float16", "bfloat16"}
        Type that they are kept in.
    backend : {"cuda", "mirror", "interpret"}, optional

    Returns
    -------
    codes, scales : array
        Of x with 0 in these columns.
    kept : array, (..., outliers rounded up to `KEPT_PAD`), dtype
        The columns, and zeros.
    """
    given = {"x": x, "place": place}
    key, addresses = call_key(("act_quant_but", columns.shape[0], dtype, backend), given)
    again = recall(key)
    if again is not None:
        codes, scales, kept = again(addresses)
        return codes, scales, kept
    if (taken := operand("x", x)) is not x:
        x, key = taken, None
    backend = choose(backend, x)
    if backend != "mirror":
        return _run(x, (columns.shape[0], place, dtype), backend, key)
    kept = np.zeros((*x.shape[:-1], padded(columns.shape[0])), STORAGE[dtype])
    with np.errstate(over="ignore"):
        kept[..., : columns.shape[0]] = x[..., columns].astype(STORAGE[dtype])
    rest = x.copy()
    rest[..., columns] = 0
    return (*quantize_rows(rest), kept)


def places(columns: Array, channels: int) -> Array:
    """Return for every channel its number among `columns`, -1 where it is none of them.

    Examples
    --------
    >>> places(np.int32([4, 1]), 5).tolist()
    [-1, 1, -1, -1, 0]
    """
    place = np.full(channels, -1, np.int32)
    place[columns] = np.arange(len(columns))
    return place


def _run(x: Array, but: tuple[int, Array, str] | None, backend: str, key: Any) -> tuple[Array, ...]:
    """Run the kernel, and remember the call under its key."""
    xp = array_namespace(x)
    check_values("x", x, least_axes=1)
    outliers, place, dtype = but or (0, None, "")
    channels, width = x.shape[-1], padded(outliers)
    with on_device_of(x):
        rows = contiguous_last_axis(x).reshape(math.prod(x.shape[:-1]), channels)
        blocks = -(-channels // BLOCK_SIZE)
        given, buffers = {"x": x}, {"x": as_input(rows)}
        shapes = {"codes": x.shape, "scales": (*x.shape[:-1], blocks)}
        buffers["codes"] = xp.empty(rows.shape, np.int8)
        buffers["scales"] = xp.empty((rows.shape[0], blocks), np.float32)
        if but is not None:
            given["place"], buffers["place"] = place, as_input(place)
            buffers["kept"] = xp.empty((rows.shape[0], width), STORAGE[dtype])
            shapes["kept"] = (*x.shape[:-1], width)
        plan = plan_act_quant(Operand.of(rows), x.dtype.name, outliers, dtype)
        run(backend, plan, buffers)
        remember(key, plan, None, given, buffers, shapes)
    codes, scales = (buffers[name].reshape(shapes[name]) for name in ("codes", "scales"))
    return codes, scales, None if but is None else buffers["kept"].reshape(shapes["kept"])
