"""The structs that attention kernels take by value, and how one is packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: ``struct AttnParams`` of kernels_cu/prims/params.cuh, field by field.
ATTN_PARAMS = np.dtype(
    [
        ("Q", "u8"), ("K", "u8"), ("V", "u8"), ("O", "u8"), ("lse", "u8"), ("S", "u8"),
        ("Q_stride", "i8", 3), ("K_stride", "i8", 3), ("V_stride", "i8", 3), ("O_stride", "i8", 3),
        ("batch", "i4"), ("heads", "i4"), ("heads_kv", "i4"), ("len_q", "i4"), ("len_kv", "i4"),
        ("causal_shift", "i4"), ("scale", "f4"), ("scale_log2", "f4"),
        ("mask", "u8"), ("bias", "u8"), ("mask_stride", "i8", 4), ("bias_stride", "i8", 4),
        ("window_shift", "i4"), ("softcap", "f4"), ("softcap_inverse", "f4"),
        ("kept_blocks", "u8"), ("kept_stride", "i8", 3),
        ("rope_cos", "u8"), ("rope_sin", "u8"), ("rope_offset_q", "i4"),
        ("cu_seqlens_q", "u8"), ("cu_seqlens_k", "u8"), ("total_q", "i4"), ("bottom_right", "i4"),
        ("stack", "i4"),
    ],
    align=True,
)  # fmt: skip

#: ``struct QuantParams`` of kernels_cu/prims/params.cuh, field by field.
QUANT_PARAMS = np.dtype(
    [
        ("Q_scale", "u8"), ("K_scale", "u8"), ("K_mean", "u8"),
        ("Q_scale_stride_batch", "i8"), ("Q_scale_stride_head", "i8"),
        ("K_scale_stride_batch", "i8"), ("K_scale_stride_head", "i8"),
        ("Q_zero", "u8"), ("K_zero", "u8"), ("Q_code_sum", "u8"), ("K_code_sum", "u8"),
        ("Q_sum_stride_batch", "i8"), ("Q_sum_stride_head", "i8"),
        ("K_sum_stride_batch", "i8"), ("K_sum_stride_head", "i8"),
    ],
    align=True,
)  # fmt: skip

#: ``struct SplitParams`` of kernels_cu/prims/params.cuh, field by field.
SPLIT_PARAMS = np.dtype(
    [
        ("O", "u8"), ("M", "u8"), ("l", "u8"),
        ("first_key", "i4"), ("end_key", "i4"), ("slice_keys", "i4"), ("parts", "i4"),
        ("rows", "i4"), ("row_warps", "i4"),
    ],
    align=True,
)  # fmt: skip

#: ``struct PieceParams`` of kernels_cu/prims/params.cuh.
PIECE_PARAMS = np.dtype(
    [("O", "u8"), ("rows", "u8"), ("whole", "i4"), ("cut", "i4"), ("steps", "i4"), ("share", "i4")],
    align=True,
)

#: ``struct ScheduleParams`` of kernels_cu/prims/params.cuh.
SCHEDULE_PARAMS = np.dtype([("next_tile", "u8")], align=True)


def pack(
    struct: np.dtype[Any], values: Mapping[str, Any], addresses: Mapping[str, int]
) -> np.ndarray:
    """Return a kernel parameter: one `struct`, names of buffers replaced by their addresses."""
    packed = np.zeros(1, struct)
    for name, value in values.items():
        packed[name] = addresses[value] if isinstance(value, str) else 0 if value is None else value
    return packed


def pointers(struct: np.dtype[Any], values: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield which word of a packed struct is the address of which buffer."""
    offsets: Mapping[str, Any] = struct.fields or {}
    for name, value in values.items():
        if isinstance(value, str):
            yield offsets[name][1] // 8, value
