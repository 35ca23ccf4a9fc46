"""Kernels state requirements on tiles and features; each ``static_assert`` fails by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cupyattn.compiler import modules as kc
from cupyattn.compiler.contracts import check_tiles
from cupyattn.compiler.modules import KERNELS, ModuleSpec
from cupyattn.errors import KernelCompileError
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import GemmTiles, Tiles
from cupyattn.plans.gemm import GemmFeatures
from cupyattn.plans.quantize import STEPS
from tests.support.marks import slow_unless

#: A kernel's defines that hold every contract, by source.
GOOD: dict[str, Tiles | GemmTiles] = {
    "attn_fa.cu": Tiles(32, 32, 4),
    "attn_fa_warps.cu": Tiles(32, 32, 4),
    "attn_fa_tc.cu": Tiles(64, 64, 4, 2),
    "attn_fa_int8.cu": Tiles(64, 64, 4, 2),
    "forms/attn_fa_int8_pv8.cu": Tiles(64, 64, 4, 2),
    "forms/attn_fa_int8_pv8_whole.cu": Tiles(64, 64, 4, 2),
    "forms/attn_fa_int8_fused.cu": Tiles(64, 64, 4, 1),
    "prepare/quantize.cu": Tiles(64, 64, 4),
    "prepare/quantize_reduce.cu": Tiles(64, 64, 4),
    "prepare/rope.cu": Tiles(64, 1, 4),
    "prepare/unpack.cu": Tiles(64, 1, 4),
    "prepare/normalise.cu": Tiles(64, 1, 4),
    "prepare/token_factors.cu": Tiles(16, 1, 4),
    "backward/backward_normalise.cu": Tiles(64, 1, 4),
    "backward/backward_delta.cu": Tiles(64, 1, 4),
    "backward/backward_coarse.cu": Tiles(64, 1, 4),
    "backward/backward_keys.cu": Tiles(64, 128, 8, 2),
    "backward/backward_queries.cu": Tiles(128, 32, 4, 2),
    "sm90/attn_fa_tc.cu": Tiles(192, 128, 16, 2),
    "backward/sm90/backward_keys.cu": Tiles(128, 128, 12, 2),
    "backward/sm90/backward_sums.cu": Tiles(64, 1, 4),
    "backward/sm90/backward_keys_wide.cu": Tiles(64, 64, 12, 2),
    "backward/sm90/backward_keys_pair.cu": Tiles(64, 128, 12, 2),
    "backward/sm90/backward_queries_wide.cu": Tiles(64, 64, 12, 2),
    "sm90/attn_fa_int8.cu": Tiles(192, 128, 16, 3),
    "sm90/attn_fa_int8_pv8.cu": Tiles(192, 128, 16, 5),
    "sm90/attn_fa_int8_pv8_by_tile.cu": Tiles(192, 128, 16, 3),
    "sm90/attn_fa_int8_fp8.cu": Tiles(128, 192, 12, 3),
    "forms/split/attn_fa_tc.cu": Tiles(64, 32, 4, 4),
    "merge/merge_splits.cu": Tiles(16, 32, 4, 3),
    "linear/gemm_int8.cu": GemmTiles(64, 128, 4, 2),
    "linear/sm90/gemm_int8.cu": GemmTiles(128, 256, 12, 2),
    "linear/gemm_int8_channel.cu": GemmTiles(64, 128, 4, 2),
    "linear/sm90/gemm_int8_channel.cu": GemmTiles(128, 256, 12, 2),
    "linear/row_quant.cu": GemmTiles(2, 2048, 4, 1),
    "linear/norm_quant.cu": GemmTiles(1, 1024, 4, 1),
    "merge/merge_partials.cu": Tiles(64, 1, 4),
    "linear/weight_blocks.cu": GemmTiles(128, 128, 8, 1),
    "pruning/key_importance.cu": Tiles(32, 128, 4, 2),
    "pruning/sm90/key_importance.cu": Tiles(32, 512, 8, 3),
    "pruning/largest_keys.cu": Tiles(1, 1, 16),
    "pruning/gather_rows.cu": Tiles(32, 1, 4),
}
#: Source, the change, and the expected sentence. A kernel with softcap, bias or mask before its
#: softmax.
SCORED = {"SCORED": 1, "MASK_KIND": 0, "BIAS_KIND": 0}
#: The pass in front of a product.
NORMED = {
    "NORM": 1, "WEIGHT": 0, "MODULATION": 0, "CHANNELS": 1024, "ROTATE": 0, "BY_ROW": 1,
    "BY_EIGHT": 1, "FACTORS_OF_ROW": 0, "BLOCKS_PER_SM": 1, "NEXT_IN_SHARED": 0,
}  # fmt: skip
#: Rows of two heads in a block.
HEADS_TOGETHER = {
    "STEP_Q": STEPS.index("rows"), "HEADS_Q": 2, "HEADS_K": 1, "QK_NORM": 1, "ROPE": 4,
}  # fmt: skip
BROKEN = [
    ("attn_fa.cu", {"BLOCK_Q": 64, "NUM_WARPS": 1}, "BLOCK_Q must be at most NUM_THREADS"),
    ("attn_fa.cu", {"HEAD_DIM": 0}, "HEAD_DIM must be 1 to 256"),
    ("attn_fa.cu", {"HEAD_DIM": 264}, "HEAD_DIM must be 1 to 256"),
    ("attn_fa.cu", {"NUM_WARPS": 33, "BLOCK_Q": 33}, "NUM_WARPS must be 1 to 32"),
    ("attn_fa.cu", {"HEAD_DIM": 36}, "HEAD_DIM must be a multiple of VEC"),
    ("attn_fa.cu", {"DTYPE": 2}, "VEC elements must fit in one 16-byte access"),
    (
        "attn_fa.cu",
        {"BLOCK_MASK_Q": 64, "BLOCK_MASK_KV": 48},
        "BLOCK_Q and BLOCK_KV must divide the blocks of the block mask",
    ),
    ("attn_fa_warps.cu", {"BLOCK_Q": 30}, "BLOCK_Q must be a multiple of NUM_WARPS"),
    ("attn_fa_warps.cu", {"BLOCK_KV": 48}, "BLOCK_KV must be a multiple of 32"),
    ("attn_fa_tc.cu", {"DTYPE": 2, "VEC": 4}, "fa_tc multiplies float16 or bfloat16"),
    ("attn_fa_tc.cu", {"BLOCK_Q": 32}, "BLOCK_Q / NUM_WARPS must be a multiple of 16"),
    ("attn_fa_tc.cu", {"BLOCK_KV": 24}, "BLOCK_KV must be a multiple of 16, the depth of an mma"),
    ("attn_fa_tc.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2"),
    ("attn_fa_int8.cu", {"GROUP_Q": 0}, "fa_int8 needs GROUP_Q and GROUP_KV"),
    ("attn_fa_int8.cu", {"BLOCK_Q": 32}, "BLOCK_Q / NUM_WARPS must be a multiple of 16"),
    ("attn_fa_int8.cu", {"BLOCK_KV": 24}, "BLOCK_KV must be a multiple of 16"),
    ("attn_fa_int8.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2"),
    ("sm90/attn_fa_int8.cu", {"QUANTIZE_Q": 1, "GROUP_Q": 4}, "QUANTIZE_Q needs 16-bit Q"),
    ("sm90/attn_fa_int8.cu", {"QUANTIZE_Q": 1, "LSE": 1}, "QUANTIZE_Q needs 16-bit Q"),
    (
        "forms/attn_fa_int8_fused.cu",
        {"BLOCK_KV": 24, "GROUP_KV": 8},
        "BLOCK_KV must be a multiple of 16",
    ),
    (
        "forms/attn_fa_int8_fused.cu",
        {"BLOCK_Q": 32},
        "BLOCK_Q / NUM_WARPS must be a multiple of 16",
    ),
    ("forms/attn_fa_int8_fused.cu", {"NUM_STAGES": 2}, "NUM_STAGES must be 1"),
    (
        "forms/attn_fa_int8_fused.cu",
        {"GROUP_KV": 128},
        "must hold whole groups of GROUP_Q and GROUP_KV",
    ),
    (
        "forms/attn_fa_int8_pv8.cu",
        {"BLOCK_KV": 96, "GROUP_V": 96},
        "BLOCK_KV must be 32, 64 or 128",
    ),
    ("forms/attn_fa_int8_pv8.cu", {"BLOCK_KV": 64, "GROUP_V": 32}, "GROUP_V must be whole tiles"),
    ("forms/attn_fa_int8_pv8.cu", {"P_TYPE": 0}, "codes of P need P_TYPE"),
    (
        "forms/attn_fa_int8_pv8_whole.cu",
        {"GROUP_V": 64},
        "this form takes one scale for a channel of V",
    ),
    ("forms/attn_fa_int8_pv8_whole.cu", {"P_TYPE": 2}, "this form takes P in u8"),
    (
        "forms/attn_fa_int8_pv8_whole.cu",
        {"SOFTCAP": 1},
        "softcap, bias and zero points are left to",
    ),
    (
        "forms/attn_fa_int8_pv8_whole.cu",
        {"BLOCK_KV": 256},
        "BLOCK_KV must leave what WATCH_STEPS steps",
    ),
    (
        "forms/attn_fa_int8_pv8.cu",
        {"BLOCK_KV": 1024, "GROUP_V": 1024},
        "BLOCK_KV must leave the sum of a tile below 2^24",
    ),
    (
        "prepare/quantize.cu",
        {"STEP_Q": STEPS.index("rows"), "GROUP_Q": 0},
        "quantize needs GROUP_Q and GROUP_KV, the rows",
    ),
    (
        "prepare/quantize.cu",
        {"STEP_K": STEPS.index("codes"), "BLOCK_KV": 48, "GROUP_KV": 64},
        "a block must hold whole groups of GROUP_Q or GROUP_KV rows",
    ),
    (
        "prepare/quantize.cu",
        {"QK_NORM": 1, "HEAD_DIM": 24},
        "rows that are prepared need VEC to divide",
    ),
    ("prepare/quantize.cu", {"QK_ROTATE": 1, "HEAD_DIM": 32}, "QK_ROTATE takes HEAD_DIM 64, 128"),
    (
        "prepare/quantize.cu",
        {"STEP_Q": STEPS.index("rows"), "HEADS_Q": 2, "HEADS_K": 1},
        "heads share a block if each is normalised and turned by column",
    ),
    ("prepare/quantize.cu", HEADS_TOGETHER | {"HEAD_DIM": 32}, "64, 128 or 256, in 16 bits"),
    (
        "prepare/quantize.cu",
        HEADS_TOGETHER | {"BLOCK_Q": 96, "GROUP_Q": 96},
        "a block of several heads must hold an even number of them, and whole groups of each",
    ),
    (
        "prepare/quantize.cu",
        HEADS_TOGETHER | {"BLOCK_Q": 96, "HEADS_Q": 3},
        "a block of several heads must hold an even number of them",
    ),
    ("prepare/rope.cu", {"ROPE": 0}, "rope turns pairs of columns: HEAD_DIM must be even"),
    (
        "prepare/rope.cu",
        {"HEAD_DIM": 63, "VEC": 1},
        "rope turns pairs of columns: HEAD_DIM must be even",
    ),
    ("prepare/normalise.cu", {"HEAD_DIM": 63, "VEC": 1}, "normalise takes rows of pairs"),
    ("prepare/token_factors.cu", {"HEAD_DIM": 63, "VEC": 1}, "token_factors takes rows of pairs"),
    ("prepare/token_factors.cu", {"QK_NORM": 1}, "token_factors takes rows of pairs"),
    ("backward/backward_normalise.cu", {"HEAD_DIM": 63, "VEC": 1}, "rows of pairs"),
    ("backward/backward_normalise.cu", {"QK_NORM": 2}, "rows of pairs, each with a norm"),
    (
        "backward/backward_delta.cu",
        {"BLOCK_Q": 24},
        "BLOCK_Q must be a multiple of the rows of a pass",
    ),
    (
        "backward/backward_delta.cu",
        {"BLOCK_Q": 48},
        "BLOCK_Q must divide ROW_PAD: a block pads whole",
    ),
    ("backward/backward_coarse.cu", {"BLOCK_Q": 32}, "BLOCK_Q must be 16 rows for each warp"),
    (
        "backward/backward_coarse.cu",
        {"BLOCK_Q": 48},
        "BLOCK_Q must divide ROW_PAD: a block writes flags",
    ),
    ("backward/backward_keys.cu", {"DTYPE": 2, "VEC": 4}, "gradients are of float16 or bfloat16"),
    ("backward/backward_keys.cu", {"BLOCK_KV": 64}, "each warp has 16 keys, or multiples"),
    (
        "backward/backward_keys.cu",
        {"BLOCK_Q": 24},
        "BLOCK_Q must be a multiple of 16, the depth of an mma",
    ),
    (
        "backward/backward_keys.cu",
        {"BLOCK_Q": 48},
        "BLOCK_Q must divide ROW_PAD, to which rows are padded",
    ),
    (
        "backward/backward_keys.cu",
        {"BLOCK_Q": 48},
        "the warps must share tiles of 16 rows of dQ evenly",
    ),
    ("backward/backward_keys.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2"),
    (
        "backward/backward_queries.cu",
        {"DTYPE": 2, "VEC": 4},
        "gradients are of float16 or bfloat16",
    ),
    (
        "backward/backward_queries.cu",
        {"BLOCK_Q": 32},
        "BLOCK_Q / NUM_WARPS must be a multiple of 16",
    ),
    (
        "backward/backward_queries.cu",
        {"BLOCK_Q": 192},
        "BLOCK_Q must divide ROW_PAD, to which rows",
    ),
    (
        "backward/backward_queries.cu",
        {"BLOCK_KV": 24},
        "BLOCK_KV must be a multiple of 16, the depth",
    ),
    ("backward/backward_queries.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2"),
    (
        "backward/sm90/backward_keys.cu",
        {"DTYPE": 2, "VEC": 4},
        "gradients are of float16 or bfloat16",
    ),
    (
        "backward/sm90/backward_keys.cu",
        {"BIAS": 1, "BIAS_KIND": 3},
        "a bias has a number for every key",
    ),
    ("backward/sm90/backward_keys.cu", {"DQ": 3, "SOFTCAP": 1}, "a persistent block is for plain"),
    (
        "backward/sm90/backward_keys.cu",
        {"BLOCK_KV": 64},
        "BLOCK_KV must be 128: two warpgroups keep",
    ),
    (
        "backward/sm90/backward_keys.cu",
        {"BLOCK_Q": 64},
        "BLOCK_Q must be 64, and up to HEAD_DIM 64 128",
    ),
    (
        "backward/sm90/backward_keys.cu",
        {"HEAD_DIM": 136, "BLOCK_Q": 64},
        "HEAD_DIM must be at most 128: dK",
    ),
    (
        "backward/sm90/backward_keys.cu",
        {"NUM_WARPS": 8},
        "NUM_WARPS must be 8 that compute and 4 that copy",
    ),
    (
        "backward/sm90/backward_keys_wide.cu",
        {"BLOCK_Q": 128},
        "BLOCK_KV and BLOCK_Q must be 64: a row of P",
    ),
    (
        "backward/sm90/backward_keys_wide.cu",
        {"HEAD_DIM": 128},
        "HEAD_DIM must be more than 128: sm90/backw",
    ),
    (
        "backward/sm90/backward_keys_pair.cu",
        {"BLOCK_KV": 64},
        "BLOCK_KV must be 128, of both blocks, and BLOCK_Q 64",
    ),
    ("backward/sm90/backward_keys_pair.cu", {"NUM_STAGES": 3}, "NUM_STAGES must be 2, of Q"),
    (
        "backward/sm90/backward_keys_pair.cu",
        {"HEAD_DIM": 128},
        "HEAD_DIM must be more than 128: sm90/backw",
    ),
    (
        "backward/sm90/backward_keys_pair.cu",
        {"SOFTCAP": 1},
        "the pair takes no mask, softcap, bias, block mask or packed sequences",
    ),
    (
        "backward/sm90/backward_keys_pair.cu",
        {"BIAS": 1, "BIAS_KIND": 2},
        "the pair takes no mask, softcap, bias, block mask or packed sequences",
    ),
    ("backward/sm90/backward_keys_pair.cu", {"DQ": 0}, "CFG_DQ must be 1 or 2: the blocks add"),
    (
        "backward/sm90/backward_queries_wide.cu",
        {"BLOCK_KV": 32},
        "BLOCK_Q and BLOCK_KV must be 64: dQ, S",
    ),
    (
        "backward/sm90/backward_queries_wide.cu",
        {"HEAD_DIM": 72},
        "HEAD_DIM must be more than 128: sm90/b",
    ),
    (
        "backward/sm90/backward_sums.cu",
        {"BLOCK_Q": 128},
        "BLOCK_Q must be 64, the rows of a tile of sums",
    ),
    (
        "backward/sm90/backward_sums.cu",
        {"HEAD_DIM": 72},
        "NUM_WARPS must be 4 for every 64 columns",
    ),
    ("sm90/attn_fa_tc.cu", {"DTYPE": 2, "VEC": 4}, "fa_tc multiplies float16 or bfloat16"),
    ("sm90/attn_fa_tc.cu", {"HEAD_DIM": 256}, "BLOCK_Q must be 128 past HEAD_DIM 128"),
    ("sm90/attn_fa_tc.cu", {"STACKED": 1, "WINDOW": 1}, "stacked heads take no window, packed"),
    (
        "sm90/attn_fa_tc.cu",
        {**SCORED, "STACKED": 1, "MASK": 1, "MASK_KIND": 1},
        "stacked heads take a mask or bias that is the same for all of them and their rows",
    ),
    ("sm90/attn_fa_tc.cu", {**SCORED, "BLOCK_KV": 144}, "BLOCK_KV must be at most 128 with"),
    ("sm90/attn_fa_tc.cu", {"BLOCK_Q": 64, "NUM_WARPS": 8}, "BLOCK_Q must be 128 or 192"),
    ("sm90/attn_fa_tc.cu", {"NUM_WARPS": 12}, "NUM_WARPS must be 4 for every 64 rows"),
    ("sm90/attn_fa_tc.cu", {"BLOCK_KV": 72}, "BLOCK_KV must be a multiple of 16 from 64 to 256"),
    ("sm90/attn_fa_int8.cu", {"GROUP_KV": 8}, "rows per scale, the latter a multiple of 16"),
    ("sm90/attn_fa_int8_pv8.cu", {"P_TYPE": 2}, "this form takes P in u8"),
    ("sm90/attn_fa_int8_pv8_by_tile.cu", {"P_TYPE": 2}, "this form takes P in u8"),
    ("sm90/attn_fa_int8_pv8_by_tile.cu", {"GROUP_V": 64}, "GROUP_V must be whole tiles"),
    ("sm90/attn_fa_int8_pv8_by_tile.cu", {"HEAD_DIM": 30, "VEC": 2}, "a multiple of 4: scales"),
    ("sm90/attn_fa_int8_fp8.cu", {"P_TYPE": 1}, "this form takes P in e4m3"),
    ("sm90/attn_fa_int8_fp8.cu", {"HEAD_DIM": 136}, "HEAD_DIM must be 128 at most"),
    ("sm90/attn_fa_int8_pv8.cu", {"BLOCK_KV": 80}, "BLOCK_KV must be a multiple of 32 from 64 to"),
    ("forms/split/attn_fa_tc.cu", {"DTYPE": 2, "VEC": 4}, "fa_tc multiplies float16 or bfloat16"),
    (
        "forms/split/attn_fa_tc.cu",
        {"MASK": 1},
        "the split form takes no softcap, mask, bias, block",
    ),
    (
        "forms/split/attn_fa_tc.cu",
        {"BLOCK_Q": 24},
        "BLOCK_Q must be a multiple of 16, the rows of an",
    ),
    ("forms/split/attn_fa_tc.cu", {"BLOCK_Q": 48}, "BLOCK_Q past the rows of a warp (32, beyond"),
    (
        "forms/split/attn_fa_tc.cu",
        {"NUM_WARPS": 3},
        "NUM_WARPS must be a multiple of the warps that",
    ),
    (
        "forms/split/attn_fa_tc.cu",
        {"NUM_WARPS": 32},
        "slices of several warps take one of 15 barriers",
    ),
    ("forms/split/attn_fa_tc.cu", {"BLOCK_KV": 24}, "BLOCK_KV must be a multiple of 16, the depth"),
    ("forms/split/attn_fa_tc.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2"),
    ("linear/gemm_int8.cu", {"BLOCK_M": 96}, "BLOCK_M must be a multiple of 16, past 64 of 64"),
    (
        "linear/gemm_int8.cu",
        {"BLOCK_M": 256, "NUM_WARPS": 2},
        "NUM_WARPS must be one for every 64 rows",
    ),
    ("linear/gemm_int8.cu", {"BLOCK_N": 32}, "a warp must have a multiple of 16 columns"),
    ("linear/gemm_int8.cu", {"BLOCK_N": 192}, "BLOCK_N must divide 128, or be a multiple of it"),
    (
        "linear/gemm_int8.cu",
        {"BLOCK_N": 256, "NUM_WARPS": 1},
        "columns of a warp must share a scale",
    ),
    (
        "linear/gemm_int8.cu",
        {"GLU": 1, "BLOCK_N": 512},
        "BLOCK_N must be at most 256 with a gated linear unit",
    ),
    ("linear/gemm_int8.cu", {"NUM_STAGES": 1}, "NUM_STAGES must be at least 2: the next slice"),
    (
        "linear/sm90/gemm_int8.cu",
        {"SPLITS": 3, "NUM_STAGES": 3},
        "SPLITS and TAIL_SPLITS must divide the",
    ),
    (
        "linear/sm90/gemm_int8.cu",
        {"TAIL_SPLITS": 2},
        "NUM_STAGES of slices must have room for a tile",
    ),
    ("linear/sm90/gemm_int8.cu", {"BLOCK_M": 96}, "BLOCK_M must be 64, 128 or 192"),
    (
        "linear/sm90/gemm_int8.cu",
        {"BLOCK_N": 384},
        "BLOCK_N must be 64, 128 or, up to BLOCK_M 128, 256",
    ),
    (
        "linear/sm90/gemm_int8.cu",
        {"BLOCK_M": 192, "NUM_WARPS": 16},
        "BLOCK_N must be 64, 128 or, up to",
    ),
    (
        "linear/sm90/gemm_int8.cu",
        {"NUM_WARPS": 8},
        "NUM_WARPS must be 4 for every 64 rows of BLOCK_M",
    ),
    ("linear/gemm_int8_channel.cu", {"OUTLIERS": 1}, "columns in 16 bits go with scales of blocks"),
    ("linear/gemm_int8_channel.cu", {"BLOCK_N": 32}, "a warp must have a multiple of 16 columns"),
    ("linear/sm90/gemm_int8_channel.cu", {"BLOCK_M": 192}, "BLOCK_M must be 64 or 128: one or two"),
    ("linear/sm90/gemm_int8_channel.cu", {"BLOCK_N": 192}, "BLOCK_N must be 64, 128 or 256"),
    ("linear/sm90/gemm_int8_channel.cu", {"NUM_WARPS": 8}, "NUM_WARPS must be 4 for every 64 rows"),
    (
        "linear/sm90/gemm_int8_channel.cu", {"NEIGHBOURS": 1, "VEC": 4},
        "NEIGHBOURS are stored 16 bytes at a time",
    ),
    ("linear/sm90/gemm_int8_channel.cu", {"LAYERS": 1, "GLU": 1}, "LAYERS of a launch have nei"),
    (
        "linear/sm90/gemm_int8_channel.cu", {"LAYERS": 1, "RESIDUAL": 1},
        "LAYERS of a launch have neither a gated linear unit nor a sum",
    ),
    (
        "linear/sm90/gemm_int8_channel.cu",
        {"TAIL_SPLITS": 2},
        "NUM_STAGES of slices must have room for a tile in int32",
    ),
    ("linear/row_quant.cu", {"NUM_WARPS": 3}, "NUM_WARPS must be a multiple of BLOCK_M"),
    ("linear/row_quant.cu", {"BLOCK_N": 2000}, "BLOCK_N must be a multiple of VEC numbers"),
    ("linear/norm_quant.cu", {"NUM_WARPS": 3, "BLOCK_M": 2}, "the lanes of a row must be whole wa"),
    ("linear/norm_quant.cu", {"BLOCK_N": 2000}, "BLOCK_N must be a multiple of 8 channels"),
    ("linear/norm_quant.cu", {"BLOCK_N": 8192}, "BLOCK_N must be at most 32 channels for every"),
    ("linear/norm_quant.cu", {**NORMED, "ROTATE": 48}, "ROTATE must divide CHANNELS"),
    ("linear/norm_quant.cu", {**NORMED, "ROTATE": 64, "BY_ROW": 0}, "a rotated row has one scale"),
    ("linear/norm_quant.cu", {**NORMED, "ROTATE": 64, "BLOCK_N": 2048}, "a lane must have 32 numb"),
    ("linear/norm_quant.cu", {**NORMED, "NEXT_IN_SHARED": 1, "BLOCK_N": 1 << 16}, "next row is in"),
    (
        "linear/weight_blocks.cu",
        {"BLOCK_N": 100},
        "VEC must divide BLOCK_N, or an access would meet two",
    ),
    (
        "linear/weight_blocks.cu",
        {"VEC": 1, "NUM_WARPS": 2},
        "every access to a row of a block takes a",
    ),
    (
        "linear/weight_blocks.cu",
        {"NUM_WARPS": 7},
        "a thread keeps at most 64 numbers: NUM_WARPS must be",
    ),
    (
        "pruning/gather_rows.cu",
        {"BLOCK_Q": 24},
        "BLOCK_Q must be whole passes of all threads over rows",
    ),
    (
        "pruning/key_importance.cu",
        {"DTYPE": 2, "VEC": 4},
        "key_importance multiplies float16 or bfloat16",
    ),
    (
        "pruning/key_importance.cu",
        {"BLOCK_Q": 24},
        "BLOCK_Q must be a multiple of 16: all warps have all",
    ),
    (
        "pruning/key_importance.cu",
        {"BLOCK_KV": 96},
        "BLOCK_KV / NUM_WARPS must be a multiple of 16, the k",
    ),
    (
        "pruning/key_importance.cu",
        {"NUM_STAGES": 1},
        "NUM_STAGES must be at least 2: the next keys arrive",
    ),
    (
        "pruning/sm90/key_importance.cu",
        {"DTYPE": 2, "VEC": 4},
        "key_importance multiplies float16 or bf",
    ),
    (
        "pruning/sm90/key_importance.cu",
        {"BLOCK_Q": 16},
        "BLOCK_Q must be 32: a lane to each row merges",
    ),
    (
        "pruning/sm90/key_importance.cu",
        {"BLOCK_KV": 256},
        "BLOCK_KV / NUM_WARPS must be 64: a key tile",
    ),
    (
        "pruning/sm90/key_importance.cu",
        {"NUM_STAGES": 5},
        "NUM_STAGES must be 2 to 4, at most the tiles",
    ),
]
#: Contracts of templates, tripped by a few lines of their own.
TEMPLATES = [
    ("int row_of() { return swizzle<3>(0, 0); }", "must hold an even number of 16-byte chunks"),
    (
        "void store(float* a) { st_global(a, Vec<float, 8>{}); }",
        "st_global stores 2, 4, 8 or 16 bytes",
    ),
    ("void copy(int* a) { cp_async<2>(a, a, true); }", "cp.async copies 4, 8 or 16 bytes"),
    (
        "void copy(float* a) { load_rows_async<6>(a, a, 0); }",
        "rows come 16 bytes to a thread",
    ),
]


#: What kernels that normalise rows take.
_NORMS = {
    "prepare/normalise.cu": "head", "backward/backward_normalise.cu": "head",
    "prepare/token_factors.cu": "token",
}  # fmt: skip


def spec_of(source: str, changes: dict[str, int]) -> ModuleSpec:
    rope = "half_split" if source == "prepare/rope.cu" else ""
    p_type = {"_pv8.cu": "u8", "_fp8.cu": "e4m3"}.get(source[-7:])
    values = {} if p_type is None else {"group_v": 64, "p_type": p_type}
    if source.endswith(("_whole.cu", "_by_tile.cu")):
        values = {"group_v": GROUP_ALL if "_whole" in source else 128, "p_type": "u8"}
    features: Features | GemmFeatures
    features = Features(
        "float16", 64, vec=8, group_q=16, group_kv=16, rope=rope,
        qk_norm=_NORMS.get(source, ""), **values,
    )  # fmt: skip
    if isinstance(GOOD[source], GemmTiles):
        features = GemmFeatures("float16", 16, 8)
    defines = {**GOOD[source].defines(), **features.defines()}
    if source.startswith("prepare/quantize"):  # for an operand only what `changes` say is done
        defines |= {"CFG_STEP_Q": 0, "CFG_STEP_K": 0, "CFG_STEP_V": 0, "CFG_BLOCK_COLS": 64}
    if source.endswith(("_wide.cu", "_pair.cu")):
        defines |= {"CFG_HEAD_DIM": 256}
    if source.endswith(("/backward_keys.cu", "_pair.cu")):
        defines |= {"CFG_DQ": 1}
    defines |= {f"CFG_{name}": value for name, value in changes.items()}
    return ModuleSpec(source, tuple(sorted(defines.items())))


def arch_of(source: str) -> str:
    return "sm_90a" if "sm90/" in source else "sm_80"


@pytest.mark.parametrize(
    "source", slow_unless(lambda _, x: x in ("attn_fa.cu", "attn_fa_tc.cu"), GOOD)
)
def test_without_a_change_it_compiles(source: str) -> None:
    assert kc.translate(spec_of(source, {}), arch_of(source)).ptx


@pytest.mark.parametrize(("source", "changes", "sentence"), BROKEN)
def test_a_broken_contract_comes_back_as_its_sentence(
    source: str, changes: dict[str, int], sentence: str
) -> None:
    with pytest.raises(KernelCompileError, match=re.escape(sentence)):
        kc.translate(spec_of(source, changes), arch_of(source))


@pytest.mark.parametrize(("line", "sentence"), TEMPLATES)
def test_a_template_says_what_it_needs(line: str, sentence: str, tmp_path: Path) -> None:
    source = tmp_path / "use.cu"
    includes = '#include "prims/io/rope.cuh"\n#include "prims/score/gradient.cuh"\n'
    source.write_text(f"{includes}__device__ {line}\n")
    with pytest.raises(KernelCompileError, match=re.escape(sentence)):
        kc.build(ModuleSpec(source, spec_of("backward/backward_keys.cu", {}).defines), "sm_80")


def test_every_contract_is_tripped() -> None:
    """A new ``static_assert`` needs a line above."""
    tested = [sentence for *_, sentence in BROKEN] + [sentence for _, sentence in TEMPLATES]
    for path in sorted(KERNELS.rglob("*.cu*")):
        for found in re.findall(r'static_assert\([^;]*?"([^"]+)"\s*\);', path.read_text()):
            assert any(sentence in found for sentence in tested), f"{path.name}: {found}"


# ---- the same sentences without a compiler -------------------------------------------------------

TILE_SIZES = {"BLOCK_Q", "BLOCK_KV", "NUM_WARPS", "NUM_STAGES", "BLOCK_M", "BLOCK_N", "HEAD_DIM"}
OF_TILES = [
    (source, changes, sentence)
    for source, changes, sentence in BROKEN
    if changes.keys() <= TILE_SIZES and ("attn_" in source or "gemm_" in source)
]


@pytest.mark.parametrize("source", GOOD)
def test_tiles_that_compile_are_not_refused_beforehand(source: str) -> None:
    check_tiles(spec_of(source, {}), GOOD[source], source)


@pytest.mark.parametrize(("source", "changes", "sentence"), OF_TILES)
def test_tiles_are_refused_beforehand_with_the_sentence_of_the_compiler(
    source: str, changes: dict[str, int], sentence: str
) -> None:
    """The mirror compiles nothing: it evaluates what `translate` above reports."""
    spec, tiles = spec_of(source, changes), GOOD[source]
    with pytest.raises(ValueError) as caught:
        check_tiles(spec, tiles, "the kernel")
    said = str(caught.value)
    assert said.startswith(f"the kernel does not take {tiles}: ")
    assert sentence.lower() in said.lower() and said.endswith("(tiles=None takes its own)")


def test_contracts_of_tiles_are_many() -> None:
    assert len(OF_TILES) > 30


@pytest.mark.parametrize("variant", [pytest.param("fa_warps", marks=pytest.mark.slow), "fa_tc"])
def test_the_evaluation_agrees_with_the_compiler(variant: str) -> None:
    """On tiles that were drawn, most of which break a contract."""
    rng, source, refused = np.random.default_rng(1), f"attn_{variant}.cu", 0
    for _ in range(12):
        block_q, block_kv = (int(rng.choice([16, 32, 33, 64])) for _ in "qk")
        tiles = Tiles(block_q, block_kv, int(rng.integers(1, 3)), int(rng.integers(1, 4)))
        spec = ModuleSpec(
            source, tuple(sorted({**dict(spec_of(source, {}).defines), **tiles.defines()}.items()))
        )
        try:
            check_tiles(spec, tiles, variant)
        except ValueError:
            refused += 1
            with pytest.raises(KernelCompileError, match="static assertion failed"):
                kc.translate(spec, "sm_80")
        else:
            kc.translate(spec, "sm_80")
    assert 0 < refused < 12
