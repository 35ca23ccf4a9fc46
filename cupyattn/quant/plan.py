"""Which kernels quantise an operand (kernels_cu/quantize*.cu), with which blocks: pure data."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupyattn.compile import ModuleSpec
from cupyattn.features import Features
from cupyattn.launch import Launch, Operand, Plan, Workspace, check_grid
from cupyattn.quant.packed import packed_groups, packed_values
from cupyattn.quant.quantizers import VALUES_PAD, padded_length
from cupyattn.tiles import Tiles

#: ``struct QuantizeParams`` of kernels_cu/prims/quant.cuh, field by field.
QUANTIZE_PARAMS = np.dtype(
    [
        ("X", "u8"), ("codes", "u8"), ("scale", "u8"), ("static_scale", "u8"), ("absmax", "u8"),
        ("partial_sum", "u8"), ("mean", "u8"), ("X_stride", "i8", 3),
        ("scale_stride_batch", "i8"), ("scale_stride_head", "i8"),
        ("heads", "i4"), ("length", "i4"), ("splits", "i4"), ("split_rows", "i4"),
        ("cu_seqlens", "u8"), ("total", "i4"), ("padded", "i4"), ("zero", "u8"),
        ("code_sum", "u8"), ("sum_stride_batch", "i8"), ("sum_stride_head", "i8"),
    ],
    align=True,
)  # fmt: skip

#: Warps of a block in the order in which they are tried: the first that holds a whole group in so
#: many registers per thread reads the operand once. More registers were seen to spill.
_NUM_WARPS, _REGISTERS = (4, 8, 16), 32
_MAX_PASSES = 8

#: Slices of the keys that are summed side by side, and how short one may be.
_MAX_SPLITS, _MIN_SPLIT_ROWS = 64, 256


def block_shape(group: int, head_dim: int, itemsize: int, vec: int) -> tuple[int, int, bool]:
    """Choose the blocks of the quantising kernels.

    Parameters
    ----------
    group : int
        Rows per scale.
    head_dim, itemsize : int
        Elements of a row, bytes of an element.
    vec : int
        Elements per global access.

    Returns
    -------
    rows, num_warps : int
        Rows and warps of a thread block.
    whole_groups : bool
        Whether a block holds whole groups in its registers. Otherwise every block lies within one
        group, whose maximum has to be found beforehand.

    Examples
    --------
    >>> block_shape(16, 128, 2, 8), block_shape(128, 128, 2, 8), block_shape(2**30, 128, 2, 8)
    ((64, 4, True), (128, 8, True), (64, 4, False))
    """
    for num_warps in _NUM_WARPS:
        rows = _rows_held(num_warps, head_dim, itemsize, vec)
        rows -= rows % group
        if rows and rows % num_warps == 0:
            return rows, num_warps, True
    rows = math.gcd(_rows_held(_NUM_WARPS[0], head_dim, itemsize, vec), group)
    return rows, min(_NUM_WARPS[0], rows), False


def _rows_held(num_warps: int, head_dim: int, itemsize: int, vec: int) -> int:
    """Return how many rows a block holds in its registers: a power of two."""
    accesses = head_dim // vec
    lanes = min(32, 1 << (accesses - 1).bit_length())
    registers_per_row = -(-accesses // lanes) * max(1, vec * itemsize // 4)
    passes = min(_MAX_PASSES, 1 << (_REGISTERS // registers_per_row).bit_length() - 1)
    return passes * num_warps * 32 // lanes


@functools.lru_cache(maxsize=1024)
def plan_operand(
    x: Operand,
    dtype: str,
    group: int,
    *,
    per_tensor: bool = False,
    smooth: bool = False,
    static: bool = False,
    packed: tuple[int, int] | None = None,
    zero_points: bool = False,
) -> Plan:
    """Plan the quantisation of one operand.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, head_dim), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    group : int
        Rows per scale.
    per_tensor : bool
        One scale for all heads and batch entries.
    smooth : bool
        Compute the mean over the length into the buffer ``"mean"`` and subtract it.
    static : bool
        Take the scales from the buffer ``"static_scale"``, of which ``"scale"`` is a copy.
    packed : (int, int), optional
        x is one batch entry of so many packed sequences, of at most so many rows, which begin and
        end where the buffer ``"cu_seqlens"`` says. Means, scales and groups of rows are those of a
        sequence; `cupyattn.quant.packed` says where.
    zero_points : bool
        Codes have zero points, which go with dynamic scales.

    Returns
    -------
    Plan
        Without launches where x is empty. It names the buffers ``"codes"`` (contiguous) and
        ``"scale"``, and ``"absmax"``, zero beforehand, where a group spans several blocks. With
        zero points also ``"zero"``, shaped as the scales, and ``"code_sum"``, shaped as scales of
        groups of one row; ``"absmax"`` then has a last axis of 2.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    vec = max(width for width in (1, 2, 4, 8) if x.allows(width))
    rows, num_warps, whole_groups = block_shape(group, head_dim, x.itemsize, vec)
    tiles = Tiles(block_q=rows, block_kv=1, num_warps=num_warps)
    features = Features(
        dtype, head_dim, vec=vec, group_q=group, varlen=packed is not None, zero_points=zero_points
    )
    if math.prod(x.shape) == 0:
        return Plan("quantize", "portable", tiles, features, ())
    groups = -(-length // group) if packed is None else packed_groups(total, batch, group)
    sums = length if packed is None else packed_groups(total, batch, 1)
    splits, split_rows = _slices(length)
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scale": "scale",
        "static_scale": "static_scale" if static else None,
        "absmax": None if static or whole_groups else "absmax",
        "partial_sum": "partial_sum" if smooth else None, "mean": "mean" if smooth else None,
        "X_stride": x.row_strides,
        "scale_stride_batch": 0 if per_tensor or packed else heads * groups,
        "scale_stride_head": 0 if per_tensor else groups,
        "heads": heads, "length": length, "splits": splits, "split_rows": split_rows,
        "cu_seqlens": "cu_seqlens" if packed else None, "total": total, "padded": 0,
        "zero": "zero" if zero_points else None, "code_sum": "code_sum" if zero_points else None,
        "sum_stride_batch": 0 if packed else heads * sums, "sum_stride_head": sums,
    }  # fmt: skip
    tiles_of_rows = batch * heads * -(-length // rows)
    if static:
        steps = {"encode_int8": tiles_of_rows}
    elif whole_groups:
        steps = {"quantize_int8": tiles_of_rows}
    else:
        steps = {"group_absmax": tiles_of_rows, "encode_int8": tiles_of_rows}
    launches = _mean_launches(x, batch, features, tiles, params) if smooth else ()
    source = "quantize.cu" if "quantize_int8" in steps else "quantize_groups.cu"
    for entry, grid in steps.items():
        launches += (_launch(source, features, x, entry, grid, tiles, params),)
    partial = Workspace("partial_sum", (batch, heads, splits, head_dim), "float32")
    return Plan("quantize", "portable", tiles, features, launches, (partial,) if smooth else ())


def _slices(length: int) -> tuple[int, int]:
    """Return into how many slices the rows are cut that are summed side by side, and their rows."""
    splits = min(_MAX_SPLITS, -(-length // _MIN_SPLIT_ROWS))
    return splits, -(-length // splits)


def _mean_launches(
    x: Operand, batch: int, features: Features, tiles: Tiles, params: dict[str, Any]
) -> tuple[Launch, ...]:
    """Return what computes the mean of an operand: the same modules for all groups of rows."""
    source, heads = "channel_mean.cu", batch * x.shape[1]
    plain = Features(
        features.dtype, features.head_dim, vec=features.vec, group_q=1, varlen=features.varlen
    )
    alike = Tiles(block_q=tiles.num_warps, block_kv=1, num_warps=tiles.num_warps)
    return (
        _launch(source, plain, x, "channel_sum", heads * params["splits"], alike, params),
        _launch(source, plain, x, "channel_mean", heads, alike, params),
    )


def _launch(
    source: str,
    features: Features,
    x: Operand,
    entry: str,
    grid: int,
    tiles: Tiles,
    params: dict[str, Any],
) -> Launch:
    check_grid(f"quantising {x.shape}", grid)
    spec = ModuleSpec(source, tuple(sorted({**tiles.defines(), **features.defines()}.items())))
    return Launch(spec, entry, grid, tiles.num_threads, False, ((QUANTIZE_PARAMS, params),))


@functools.lru_cache(maxsize=1024)
def plan_values(
    x: Operand,
    dtype: str,
    group: int,
    p_type: str = "u8",
    *,
    smooth: bool = False,
    packed: tuple[int, int] | None = None,
    zero_points: bool = False,
) -> Plan:
    """Plan the quantisation of V.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads_kv, len_kv, head_dim), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    group : int
        Keys that share the scale of a channel: 32, 64, 128 or GROUP_ALL.
    p_type : {"u8", "s8", "e4m3"}
        Codes of P: V's are INT8, or e4m3 as well.
    smooth : bool
        Compute the mean over the length into the buffer ``"mean"`` and subtract it.
    packed : (int, int), optional
        As for `plan_operand`.
    zero_points : bool
        Codes, INT8 then, have zero points.

    Returns
    -------
    Plan
        Without launches where x is empty. It names the buffers ``"codes"`` and ``"scale"``, shaped
        as `cupyattn.quant.quantizers.quantize_values` says, and ``"absmax"``, shaped as ``"scale"``
        and zero beforehand; with zero points also ``"zero"``, and ``"absmax"`` has a last axis of
        2.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    vec = max(width for width in (1, 2, 4, 8) if x.allows(width))
    tiles = Tiles(block_q=min(group, VALUES_PAD), block_kv=1, num_warps=_NUM_WARPS[1])
    features = Features(
        dtype, head_dim, vec=vec, group_q=group, p_type=p_type, varlen=packed is not None,
        zero_points=zero_points,
    )  # fmt: skip
    if math.prod(x.shape) == 0:
        return Plan("quantize", "portable", tiles, features, ())
    groups = -(-length // group)
    splits, split_rows = _slices(length)
    slices = {"splits": splits, "split_rows": split_rows}
    # The maxima of a group, too, are found by slices, unless a slice would hold several groups.
    of_groups = {"splits": groups, "split_rows": group} if groups > 1 else slices
    chunks, padded = -(-length // VALUES_PAD), padded_length(length)
    scales = groups
    if packed is not None:
        padded, scales = packed_values(total, batch), packed_groups(total, batch, group)
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scale": "scale", "static_scale": None, "absmax": "absmax",
        "partial_sum": "partial_sum" if smooth else None, "mean": "mean" if smooth else None,
        "X_stride": x.row_strides, "scale_stride_batch": 0 if packed else heads * scales,
        "scale_stride_head": scales, "heads": heads, "length": length,
        "cu_seqlens": "cu_seqlens" if packed else None, "total": total, "padded": padded,
        "zero": "zero" if zero_points else None, **slices,
    }  # fmt: skip
    launches = _mean_launches(x, batch, features, tiles, params) if smooth else ()
    for entry, blocks, given in (
        ("channel_absmax", of_groups["splits"], {**params, **of_groups}),
        ("encode_values", chunks, params),
    ):
        grid = batch * heads * blocks
        launches += (_launch("quantize_values.cu", features, x, entry, grid, tiles, given),)
    sums = Workspace("partial_sum", (batch, heads, splits, head_dim), "float32")
    return Plan("quantize", "portable", tiles, features, launches, (sums,) if smooth else ())
