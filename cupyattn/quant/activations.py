"""Activations to INT8 codes, one scale for 128 channels of a row: one launch on a device."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupyattn.arrays import contiguous_last_axis, operand
from cupyattn.backends import as_input, choose, on_device_of, run
from cupyattn.checks import INT32_MAX
from cupyattn.compile import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.plans import Launch, Operand
from cupyattn.quant.blocks import BLOCK_SIZE, check_values, quantize_rows
from cupyattn.quant.gemm_plan import GemmFeatures, OneLaunch
from cupyattn.quant.repeated import call_key, recall, remember
from cupyattn.rounding import STORAGE, array_namespace
from cupyattn.tiles import GemmTiles

Array = Any

#: ``struct ActQuantParams`` of kernels_cu/act_quant.cu, field by field.
ACT_QUANT_PARAMS = np.dtype(
    [
        ("X", "u8"), ("codes", "u8"), ("scales", "u8"), ("kept", "u8"), ("place", "u8"),
        ("X_stride", "i8"), ("rows", "i4"), ("channels", "i4"), ("outliers", "i4"),
        ("kept_stride", "i4"),
    ],
    align=True,
)  # fmt: skip
#: Warps of a block, and bytes that a lane holds.
_NUM_WARPS, _LANE_BYTES = 4, 64
#: Columns that are kept are padded with zeros to a multiple of this: 16 bytes.
KEPT_PAD = 8


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


def padded(outliers: int) -> int:
    """Return how many columns hold so many outliers.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-outliers // KEPT_PAD) * KEPT_PAD


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


@functools.lru_cache(maxsize=1024)
def plan_act_quant(x: Operand, dtype: str, outliers: int = 0, kept: str = "") -> OneLaunch:
    """Plan the quantisation of rows.

    Parameters
    ----------
    x : Operand
        (rows, channels), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    outliers : int
        Channels that are kept, in the buffer ``"kept"``, by the buffer ``"place"``.
    kept : {"", "float16", "bfloat16"}
        Type that they are kept in; "": none is.

    Returns
    -------
    OneLaunch
        Without launches where x is empty. It names the buffers ``"codes"`` and ``"scales"``, too.

    Raises
    ------
    UnsupportedError
        For more blocks of channels than 32 bits count.
    """
    rows, channels = x.shape
    vec = max(width for width in (1, 2, 4, 8) if x.allows(width))
    features = GemmFeatures(dtype, 1, vec, outliers=kept)
    if rows * channels == 0:
        return OneLaunch(features=features)
    groups = rows * -(-channels // BLOCK_SIZE)
    if groups > INT32_MAX:
        raise UnsupportedError(f"{groups} blocks of activations exceed {INT32_MAX}: split the rows")
    lanes = min(32, BLOCK_SIZE // vec)
    passes = max(1, _LANE_BYTES * lanes // (BLOCK_SIZE * x.itemsize))
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scales": "scales", "kept": "kept" if kept else None,
        "place": "place" if kept else None, "X_stride": x.row_strides[0], "rows": rows,
        "channels": channels, "outliers": outliers, "kept_stride": padded(outliers),
    }  # fmt: skip
    tiles = GemmTiles(block_m=1, block_n=BLOCK_SIZE, num_warps=_NUM_WARPS, num_stages=1)
    defines = {**tiles.defines(), **features.defines()}
    spec = ModuleSpec("act_quant.cu", tuple(sorted(defines.items())))
    grid = -(-groups // (passes * _NUM_WARPS * 32 // lanes))
    structs = ((ACT_QUANT_PARAMS, params),)
    launch = Launch(spec, "act_quant", grid, _NUM_WARPS * 32, False, structs)
    return OneLaunch(features=features, launches=(launch,))
