"""The structs that kernels take by value, and how one is packed.

Each table is a struct of kernels_cu, field by field. The line above it names the struct and its
file, and a test finds both there: it compares names, order, types, offsets and size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def _struct(fields: list[Any], base: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """Lay fields out as a C++ compiler does, after the fields of the struct that is derived from.

    Examples
    --------
    >>> first = _struct([("X", "u8"), ("rows", "i4")])
    >>> _struct([("length", "i8")], first).names
    ('X', 'rows', 'length')
    """
    inherited = [] if base is None else [(name, base[name]) for name in base.names or ()]
    return np.dtype([*inherited, *fields], align=True)


# ---- attention -----------------------------------------------------------------------------------

#: ``struct AttnParams`` of kernels_cu/prims/params.cuh.
ATTN_PARAMS = _struct([
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
])  # fmt: skip

#: ``struct QuantParams`` of kernels_cu/prims/params.cuh.
QUANT_PARAMS = _struct([
    ("Q_scale", "u8"), ("K_scale", "u8"), ("K_mean", "u8"),
    ("Q_scale_stride_batch", "i8"), ("Q_scale_stride_head", "i8"),
    ("K_scale_stride_batch", "i8"), ("K_scale_stride_head", "i8"),
    ("Q_zero", "u8"), ("K_zero", "u8"), ("Q_code_sum", "u8"), ("K_code_sum", "u8"),
    ("Q_sum_stride_batch", "i8"), ("Q_sum_stride_head", "i8"),
    ("K_sum_stride_batch", "i8"), ("K_sum_stride_head", "i8"),
])  # fmt: skip

#: ``struct ValueParams`` of kernels_cu/prims/params.cuh.
VALUE_PARAMS = _struct([
    ("V_scale", "u8"), ("V_mean", "u8"),
    ("V_scale_stride_batch", "i8"), ("V_scale_stride_head", "i8"), ("V_zero", "u8"),
])  # fmt: skip

#: ``struct SplitParams`` of kernels_cu/prims/params.cuh.
SPLIT_PARAMS = _struct([
    ("O", "u8"), ("M", "u8"), ("l", "u8"),
    ("first_key", "i4"), ("end_key", "i4"), ("slice_keys", "i4"), ("parts", "i4"),
    ("rows", "i4"), ("row_warps", "i4"),
])  # fmt: skip

#: ``struct ScoreParams`` of kernels_cu/prims/params.cuh.
SCORE_PARAMS = _struct([
    ("mask_bits", "u8"), ("tile_classes", "u8"), ("tile_steps", "u8"),
    ("mask_batch", "i8"), ("mask_head", "i8"), ("list_batch", "i8"), ("list_head", "i8"),
    ("mask_q", "i4"), ("list_q", "i4"), ("mask_heads", "i4"), ("mask_rows", "i4"),
    ("list_heads", "i4"), ("list_rows", "i4"), ("key_tiles", "i4"), ("mask_aligned", "i4"),
    ("bias_batch", "i4"), ("bias_head", "i4"), ("bias_once", "i4"), ("bias_factor", "f4"),
    ("tanh_factor", "f4", 5), ("largest_square", "f4"), ("tanh_exponent", "f4"),
    ("softcap_unit", "f4"),
])  # fmt: skip

#: ``struct PieceParams`` of kernels_cu/prims/params.cuh.
PIECE_PARAMS = _struct([
    ("O", "u8"), ("rows", "u8"), ("whole", "i4"), ("cut", "i4"), ("steps", "i4"), ("share", "i4"),
])  # fmt: skip

#: ``struct ScheduleParams`` of kernels_cu/prims/params.cuh.
SCHEDULE_PARAMS = _struct([("next_tile", "u8")])

#: ``struct BackwardParams`` of kernels_cu/prims/params.cuh.
BACKWARD_PARAMS = _struct([
    ("dO", "u8"), ("dQ", "u8"), ("dK", "u8"), ("dV", "u8"),
    ("dO_stride", "i8", 3), ("dQ_stride", "i8", 3), ("dK_stride", "i8", 3), ("dV_stride", "i8", 3),
    ("row_M", "u8"), ("row_factor", "u8"), ("coarse", "u8"), ("delta", "u8"), ("dQ_sum", "u8"),
    ("rows", "i8"), ("kept_rows", "u8"), ("kept_rows_stride", "i8", 3), ("turns", "u8"),
    ("next_block", "u8"), ("all_keys", "i4"),
])  # fmt: skip

#: ``struct BiasGradientParams`` of kernels_cu/prims/params.cuh.
BIAS_GRADIENT_PARAMS = _struct([
    ("dBias", "u8"), ("batches", "i4"), ("heads", "i4"), ("rows", "i4"), ("keys", "i4"),
])  # fmt: skip

#: ``struct KeysParams<true>`` of kernels_cu/prims/params.cuh.
KEYS_PARAMS = _struct([
    ("mask_bits", "u8"), ("mask_batch", "i8"), ("mask_head", "i8"), ("row_tiles", "i4"),
], BACKWARD_PARAMS)  # fmt: skip

#: ``struct DeltaParams<true>`` of kernels_cu/prims/params.cuh.
DELTA_PARAMS = _struct([("d_lse", "u8")], BACKWARD_PARAMS)

#: ``struct SummedDeltaParams<true>`` of kernels_cu/prims/score/gradient.cuh.
SUMMED_DELTA_PARAMS = _struct([("given_M", "u8"), ("given_factor", "u8")], DELTA_PARAMS)

#: ``struct CoarseParams<true>`` of kernels_cu/prims/params.cuh.
COARSE_PARAMS = _struct([("part_M", "u8"), ("part_l", "u8")], BACKWARD_PARAMS)

# ---- preparation of operands ---------------------------------------------------------------------

#: ``struct RopeParams`` of kernels_cu/prims/io/rope.cuh.
ROPE_PARAMS = _struct([
    ("X", "u8"), ("Y", "u8"), ("cos", "u8"), ("sin", "u8"), ("X_stride", "i8", 3),
    ("heads", "i4"), ("length", "i4"), ("position", "i4"), ("cu_seqlens", "u8"), ("total", "i4"),
])  # fmt: skip

#: ``struct PrepareParams<true>`` of kernels_cu/prims/io/prepare.cuh.
PREPARE_PARAMS = _struct([
    ("cos", "u8"), ("sin", "u8"), ("weight", "u8"), ("token_factor", "u8"),
    ("weight_step", "i8"), ("eps", "f4"), ("position", "i4"),
])  # fmt: skip

#: ``struct TokenFactorParams`` of kernels_cu/prims/io/prepare.cuh.
TOKEN_FACTOR_PARAMS = _struct([
    ("X", "u8"), ("factor", "u8"), ("X_stride", "i8", 3), ("heads", "i4"), ("length", "i4"),
    ("eps", "f4"),
])  # fmt: skip

#: ``struct NormParams`` of kernels_cu/prims/io/prepare.cuh.
NORM_PARAMS = _struct([
    ("X", "u8"), ("Y", "u8"), ("X_stride", "i8", 3), ("heads", "i4"), ("length", "i4"),
    ("cu_seqlens", "u8"), ("total", "i4"),
], PREPARE_PARAMS)  # fmt: skip

#: ``struct NormGradientParams`` of kernels_cu/prims/io/prepare.cuh.
NORM_GRADIENT_PARAMS = _struct([("dY", "u8"), ("partial_dW", "u8")], NORM_PARAMS)

#: ``struct WeightSumParams`` of kernels_cu/backward/backward_weights.cu.
WEIGHT_SUM_PARAMS = _struct([
    ("partial_dW", "u8"), ("dW", "u8"), ("batch", "i4"), ("heads", "i4"), ("chunks", "i4"),
    ("vectors", "i4"),
])  # fmt: skip

_QUANTIZE_FIELDS = [
    ("X", "u8"), ("codes", "u8"), ("scale", "u8"), ("static_scale", "u8"), ("absmax", "u8"),
    ("partial_sum", "u8"), ("extrema", "u8"), ("mean", "u8"), ("X_stride", "i8", 3),
    ("scale_stride_batch", "i8"), ("scale_stride_head", "i8"), ("summed_slices", "u8"),
    ("head_sum", "u8"),
    ("blocks", "i4"), ("first_blocks", "i4"), ("heads", "i4"), ("length", "i4"),
    ("splits", "i4"), ("split_rows", "i4"), ("cu_seqlens", "u8"), ("total", "i4"),
    ("padded", "i4"), ("zero", "u8"), ("code_sum", "u8"), ("sum_stride_batch", "i8"),
    ("sum_stride_head", "i8"), ("places", "u8"), ("summed", "i4"),
]  # fmt: skip

#: ``struct QuantizeParams`` of kernels_cu/prims/codes/quant.cuh.
QUANTIZE_PARAMS = _struct(_QUANTIZE_FIELDS)

#: ``struct QuantizeParams`` of kernels_cu/prims/codes/quant.cuh, with CFG_QK_NORM=1. Its kernels
#: prepare rows of Q and K, by their root mean square or their position, as they quantise them.
PREPARED_QUANTIZE_PARAMS = _struct(_QUANTIZE_FIELDS, PREPARE_PARAMS)

#: ``struct TurnParams`` of kernels_cu/prims/schedule/quantize_turns.cuh.
TURN_PARAMS = _struct([("next", "u8"), ("rounds", "i4"), ("lag", "i4")])

#: ``struct UnpackParams`` of kernels_cu/prims/codes/nibbles.cuh.
UNPACK_PARAMS = _struct([
    ("X", "u8"), ("Y", "u8"), ("X_stride_batch", "i8"), ("X_stride_head", "i8"),
    ("X_stride_len", "i8"), ("heads", "i4"), ("length", "i4"),
])  # fmt: skip

# ---- linear layers -------------------------------------------------------------------------------

#: ``struct JointRowsParams<true>`` of kernels_cu/prims/io/joint_rows.cuh.
JOINT_ROWS_PARAMS = _struct([
    ("below", "u8"), ("batch_stride", "i8"), ("below_batch_stride", "i8"), ("below_stride", "i8"),
    ("split", "i4"), ("joint_rows", "i4"),
])  # fmt: skip

_GEMM_FIELDS = [
    ("A", "u8"), ("B", "u8"), ("A_scale", "u8"), ("B_scale", "u8"), ("C", "u8"),
    ("bias", "u8"), ("A_16", "u8"), ("B_16", "u8"), ("residual", "u8"), ("gate", "u8"),
    ("A_stride", "i8"), ("B_stride", "i8"),
    ("A_scale_stride", "i8"), ("B_scale_stride", "i8"), ("C_stride", "i8"),
    ("A_16_stride", "i8"), ("B_16_stride", "i8"), ("residual_stride", "i8"), ("gate_stride", "i8"),
    ("m", "i4"), ("n", "i4"), ("k", "i4"), ("outliers", "i4"), ("alone", "i4"),
    ("gate_rows", "i4"),
]  # fmt: skip

#: ``struct GemmParams`` of kernels_cu/prims/codes/gemm.cuh.
GEMM_PARAMS = _struct(_GEMM_FIELDS)

#: ``struct GemmParams`` of kernels_cu/prims/codes/gemm.cuh, with CFG_JOINT_ROWS=1. The rows of the
#: residual lie in two tensors.
JOINT_GEMM_PARAMS = _struct(_GEMM_FIELDS, JOINT_ROWS_PARAMS)

#: ``struct LayersParams`` of kernels_cu/linear/sm90/gemm_layers.cuh.
LAYERS_PARAMS = _struct([
    ("B_scale", "u8", 4), ("C", "u8", 4), ("bias", "u8", 4),
    ("B_scale_stride", "i8", 4), ("C_stride", "i8", 4), ("n", "i4", 4), ("first", "i4", 4),
])  # fmt: skip

#: ``struct ActQuantParams`` of kernels_cu/linear/act_quant.cu.
ACT_QUANT_PARAMS = _struct([
    ("X", "u8"), ("codes", "u8"), ("scales", "u8"), ("kept", "u8"), ("place", "u8"),
    ("X_stride", "i8"), ("rows", "i4"), ("channels", "i4"), ("outliers", "i4"),
    ("kept_stride", "i4"),
])  # fmt: skip

#: ``struct RowQuantParams`` of kernels_cu/linear/row_quant.cu.
ROW_QUANT_PARAMS = _struct([
    ("X", "u8"), ("codes", "u8"), ("scales", "u8"), ("X_stride", "i8"), ("rows", "i4"),
    ("channels", "i4"),
])  # fmt: skip

#: ``struct RowPairParams<true>`` of kernels_cu/linear/row_quant.cu.
ROW_PAIR_PARAMS = _struct([
    ("right", "u8"), ("right_stride", "i8"), ("split", "i4"),
], ROW_QUANT_PARAMS)  # fmt: skip

_NORM_QUANT_FIELDS = [
    ("X", "u8"), ("codes", "u8"), ("scales", "u8"), ("weight", "u8"), ("bias", "u8"),
    ("scale", "u8"), ("shift", "u8"), ("X_stride", "i8"), ("scale_stride", "i8"),
    ("shift_stride", "i8"), ("rows", "i4"), ("group_rows", "i4"), ("steps", "i4"), ("eps", "f4"),
]  # fmt: skip

#: ``struct NormQuantParams`` of kernels_cu/linear/norm_quant.cu.
NORM_QUANT_PARAMS = _struct(_NORM_QUANT_FIELDS)

#: ``struct NormQuantParams`` of kernels_cu/linear/norm_quant.cu, with CFG_JOINT_ROWS=1. The rows
#: lie in two tensors.
JOINT_NORM_QUANT_PARAMS = _struct(_NORM_QUANT_FIELDS, JOINT_ROWS_PARAMS)

#: ``struct WeightParams`` of kernels_cu/linear/weight_blocks.cu.
WEIGHT_PARAMS = _struct([
    ("W", "u8"), ("codes", "u8"), ("scales", "u8"), ("W_stride", "i8"), ("codes_stride", "i8"),
    ("scales_stride", "i8"), ("rows", "i4"), ("columns", "i4"),
])  # fmt: skip

# ---- pruned keys ---------------------------------------------------------------------------------

#: ``struct ImportanceParams`` of kernels_cu/pruning/key_importance.cu.
IMPORTANCE_PARAMS = _struct([
    ("Q", "u8"), ("K", "u8"), ("row_M", "u8"), ("row_l", "u8"), ("importance", "u8"),
    ("Q_stride", "i8", 3), ("K_stride", "i8", 3),
    ("heads_kv", "i4"), ("group", "i4"), ("first_row", "i4"), ("row_step", "i4"),
    ("rows", "i4"), ("len_kv", "i4"), ("splits", "i4"), ("split_keys", "i4"),
    ("scale_log2", "f4"), ("share", "f4"),
])  # fmt: skip

#: ``struct ClusterImportanceParams`` of kernels_cu/pruning/sm90/key_importance.cu.
CLUSTER_IMPORTANCE_PARAMS = _struct([
    ("Q", "u8"), ("K", "u8"), ("importance", "u8"), ("partial_sum", "u8"),
    ("Q_stride", "i8", 3), ("K_stride", "i8", 3), ("heads", "i4"), ("turns", "i4"),
    ("heads_kv", "i4"), ("group", "i4"), ("first_row", "i4"), ("row_step", "i4"),
    ("rows", "i4"), ("len_kv", "i4"), ("scale_log2", "f4"), ("share", "f4"),
])  # fmt: skip

#: ``struct LargestParams`` of kernels_cu/pruning/largest_keys.cu.
LARGEST_PARAMS = _struct([
    ("importance", "u8"), ("kept", "u8"), ("places", "u8"), ("len_kv", "i4"), ("count", "i4"),
])  # fmt: skip

#: ``struct GatherParams`` of kernels_cu/pruning/gather_rows.cu.
GATHER_PARAMS = _struct([
    ("K", "u8"), ("V", "u8"), ("kept_K", "u8"), ("kept_V", "u8"), ("places", "u8"),
    ("K_stride", "i8", 3), ("V_stride", "i8", 3), ("heads_kv", "i4"), ("count", "i4"),
])  # fmt: skip

# ---- partial results -----------------------------------------------------------------------------

#: ``struct MergeParams`` of kernels_cu/merge/merge_partials.cu.
MERGE_PARAMS = _struct([
    ("before_O", "u8"), ("O", "u8"), ("lse", "u8"), ("part_O", "u8"), ("part_lse", "u8"),
    ("before_O_stride", "i8", 3), ("O_stride", "i8", 3), ("part_O_stride", "i8", 3),
    ("lse_stride", "i8", 2), ("part_lse_stride", "i8", 2), ("heads", "i4"), ("length", "i4"),
])  # fmt: skip


def pack(
    struct: np.dtype[Any], values: Mapping[str, Any], addresses: Mapping[str, int]
) -> np.ndarray:
    """Return a kernel parameter: one `struct`, names of buffers replaced by their addresses.

    A field with several elements takes a tuple, and None is a null pointer.
    """

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(number, value))
        return addresses[value] if isinstance(value, str) else 0 if value is None else value

    packed = np.zeros(1, struct)
    for name, value in values.items():
        packed[name] = number(value)
    return packed


def pointers(struct: np.dtype[Any], values: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the words of a packed struct that are addresses, each with the name of its buffer."""
    offsets: Mapping[str, Any] = struct.fields or {}
    for name, value in values.items():
        for number, one in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(one, str):
                yield offsets[name][1] // 8 + number, one
