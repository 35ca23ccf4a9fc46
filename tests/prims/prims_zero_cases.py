"""The kernels of ``prims/codes/zero_points.cuh``, ``zero_points_sm90.cuh``, ``value_zeros.cuh``,
``mean_dot.cuh``, ``quantize_tile.cuh`` and ``quantize_q.cuh``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, pack
from cupyattn.quant.quantizers import quantize_affine, quantize_symmetric
from cupyattn.reference.rounding import fma32
from tests.prims.prim import Arguments, Prim, Results, butterfly, defines, normal, rng

HEAD_DIM = 24


def zero_points_arguments() -> Arguments:
    numbers = rng()
    given = {"Q_sum_stride_head": 16, "K_sum_stride_head": 20}
    return {
        "given": pack(QUANT_PARAMS, given, {}),
        "Q_zero": numbers.integers(-128, 128, (2, 8)).astype(np.int32),
        "K_zero": numbers.integers(-128, 128, (2, 5)).astype(np.int32),
        "Q_code_sum": numbers.integers(-3072, 3072, (2, 16)).astype(np.int32),
        "K_code_sum": numbers.integers(-3072, 3072, (2, 20)).astype(np.int32),
        "dots": np.zeros((16, 32), np.int32),
        "of_rows": np.full((2, 16), -999, np.int32),
    }


def zero_points_expected(
    Q_zero: np.ndarray, K_zero: np.ndarray, Q_code_sum: np.ndarray, K_code_sum: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    rows, keys = np.minimum(np.arange(16), 12), np.minimum(4 + np.arange(32), 18)
    z_q, z_k = Q_zero[1, rows // 2, None], K_zero[1, keys // 4]
    taken = z_q * K_code_sum[1, keys] + z_k * (Q_code_sum[1, rows, None] - HEAD_DIM * z_q)
    return {"dots": 1000 - taken, "of_rows": np.stack([z_q[:, 0], 0 * z_q[:, 0]])}


#: Rows and keys of a head, not all of which tiles of 16 rows and 2 x 80 keys have.
LEN_Q, LEN_KV = 29, 150


def zero_points_sm90_arguments() -> Arguments:
    numbers = rng()
    strides = {
        "Q_scale_stride_head": 15, "K_scale_stride_head": 10,
        "Q_sum_stride_head": LEN_Q, "K_sum_stride_head": LEN_KV,
    }  # fmt: skip
    return {
        "call": pack(ATTN_PARAMS, {"heads": 2, "len_q": LEN_Q, "len_kv": LEN_KV}, {}),
        "given": pack(QUANT_PARAMS, strides, {}),
        "Q_zero": numbers.integers(-128, 128, (2, 15)).astype(np.int32),
        "K_zero": numbers.integers(-128, 128, (2, 10)).astype(np.int32),
        "Q_code_sum": numbers.integers(-3072, 3072, (2, LEN_Q)).astype(np.int32),
        "K_code_sum": numbers.integers(-3072, 3072, (2, LEN_KV)).astype(np.int32),
        "dots": np.full((32, 160), 1 << 30, np.int32),
        "of_rows": np.full(32, -999, np.int32),
    }


def zero_points_sm90_expected(
    Q_zero: np.ndarray, K_zero: np.ndarray, Q_code_sum: np.ndarray, K_code_sum: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    rows, keys = np.minimum(np.arange(32), LEN_Q - 1), np.minimum(np.arange(160), LEN_KV - 1)
    there = np.arange(32) < LEN_Q
    z_q, z_k = Q_zero[1, rows // 2, None], K_zero[1, keys // 16]
    taken = z_q * K_code_sum[1, keys] + z_k * (Q_code_sum[1, rows, None] - HEAD_DIM * z_q)
    return {"dots": -taken * there[:, None], "of_rows": z_q[:, 0] * there}


def value_zeros_arguments() -> Arguments:
    return {
        "V_zero": rng().integers(-128, 128, (3, HEAD_DIM)).astype(np.int32),
        "A": rng().integers(0, 256, (16, 32)).astype(np.uint8),
        "pairs": np.full(32, -999, np.int32),
        "sums": np.zeros((32, 4), np.int32),
    }


def value_zeros_expected(V_zero: np.ndarray, A: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    of_rows = 1 + A.sum(axis=1, dtype=np.int32)
    of_lanes = 1 + A.reshape(16, 2, 4, 4).sum(axis=(1, 3), dtype=np.int32)  # of every fourth four
    g, t = np.arange(32) // 4, np.arange(32) % 4
    sums = np.stack([of_rows[g], of_lanes[g, t], of_rows[g + 8], of_lanes[g + 8, t]], axis=1)
    return {"pairs": V_zero[2, np.minimum(np.arange(32), HEAD_DIM - 1)], "sums": sums}


def mean_dot_arguments() -> Arguments:
    return {
        "Q": rng().integers(-128, 128, (9, HEAD_DIM)).astype(np.int8),
        "K_mean": normal(HEAD_DIM),
        "zeros": rng().integers(-128, 128, 8).astype(np.int32),
        "of_quads": np.zeros(32, np.float32),
        "of_warp": np.zeros(32, np.float32),
    }


def mean_dot_expected(
    Q: np.ndarray, K_mean: np.ndarray, zeros: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    def dots(rows: np.ndarray, lanes: int) -> np.ndarray:
        """Of each lane, whose columns are `lanes` apart; `rows` [32 / lanes, HEAD_DIM]."""
        parts = np.zeros((len(rows), lanes), np.float32)
        for d in range(HEAD_DIM):
            parts[:, d % lanes] = fma32(rows[:, d], K_mean[d], parts[:, d % lanes])
        return butterfly(parts.ravel(), lanes, np.add)

    less_zeros = (Q[:8] - zeros[:, None]).astype(np.float32)
    return {"of_quads": dots(less_zeros, 4), "of_warp": dots(Q[8:].astype(np.float32), 32)}


def quant_arguments() -> Arguments:
    x = normal(16, 4) + np.float32(0.5)
    x[1], x[2], x[3] = np.abs(x[1]), -np.abs(x[2]), 0
    x[4, 2], x[5, 1], x[6, 3] = np.nan, np.inf, -np.inf
    x[7] = [0, 100.5, -154.5, 3]  # both ends halfway between two codes
    x[8], x[9] = x[8] * np.float32(1e38), x[9] * np.float32(1e-41)
    zeros, codes, sums = np.zeros(64, np.int32), np.full((2, 64), 999, np.int32), np.zeros(64, "i4")
    return {
        "x": x.ravel(), "scales": np.zeros(64, "f4"), "zeros": zeros, "codes": codes, "sums": sums,
    }  # fmt: skip


def quant_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    codes, scale, zero = quantize_affine(x.reshape(1, 1, 16, 4), 1)
    codes = codes.ravel().astype(np.int32)
    return {
        "scales": scale.repeat(4), "zeros": zero.repeat(4), "codes": np.stack([codes, codes]),
        "sums": codes.reshape(16, 4).sum(axis=1).astype(np.int32).repeat(4),
    }  # fmt: skip


def tile_arguments() -> Arguments:
    X = normal(40, HEAD_DIM) + np.float32(0.5)
    X[17, 3] = np.nan
    codes, zeros = np.full((48, 32), 99, np.int8), np.zeros((48, 2), np.int32)
    return {"X": X.astype(np.float16), "codes": codes, "scale": np.zeros(48, "f4"), "zeros": zeros}


def tile_expected(zero_points: bool, /, X: np.ndarray, **_: Any) -> Results:
    rows = X[None, None]
    found = quantize_affine(rows, 16) if zero_points else quantize_symmetric(rows, 16)
    codes = np.zeros((48, 32), np.int8)
    codes[:40, :HEAD_DIM] = found[0][0, 0]
    result = {"codes": codes, "scale": found[1][0, 0].repeat(16)}
    if zero_points:
        zero = found[2][0, 0].repeat(16)
        result["zeros"] = np.stack([zero, codes.sum(axis=1)], axis=1).astype(np.int32)
    return result


def q_arguments(head_dim: int, dtype: str) -> Arguments:
    Q = normal(64, head_dim) * np.float32(3)
    Q[6] = 0
    Q[7], Q[17, 3], Q[40, 5] = 0, np.nan, np.inf
    codes = np.full((64, head_dim), 99, np.int8)
    return {
        "Q": Q.astype(STORAGE[dtype]), "codes": codes, "scale": np.zeros(64, "f4"),
        "arrived": np.zeros(1, "i4"),
    }  # fmt: skip


def q_expected(Q: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    codes, scale = quantize_symmetric(Q[None, None], 2)
    return {
        "codes": codes[0, 0], "scale": scale[0, 0].repeat(2), "arrived": np.ones(1, np.int32),
    }  # fmt: skip


ZERO_PRIMS = [
    *(
        Prim(
            f"quantize_q-{head_dim}", "quantize_q", "quantize_q_64", 128,
            partial(q_arguments, head_dim, dtype), q_expected, hopper=True,
            defines=defines(
                Tiles(64, 64, 4, 2),
                Features(dtype, head_dim, vec=8, group_q=2, group_kv=64, quantize_q=True),
            ),
        )
        for head_dim, dtype in ((40, "float16"), (128, "bfloat16"), (192, "float16"))
    ),
    *(
        Prim(
            f"quantize_tile-{zero_points}", "quantize_tile", "quantize_tile_48", 64,
            tile_arguments, partial(tile_expected, zero_points),
            defines=defines(
                Tiles(16, 32, 2, 1), Features("float16", HEAD_DIM, vec=8, zero_points=zero_points)
            ),
        )
        for zero_points in (False, True)
    ),
    Prim(
        "zero_points", "zero_points", "zero_points", 32, zero_points_arguments,
        zero_points_expected,
        defines=defines(
            Tiles(16, 32, 1, 2),
            Features("float16", HEAD_DIM, vec=8, group_q=2, group_kv=4, zero_points=True),
        ),
    ),
    Prim(
        "zero_points_sm90", "zero_points_sm90", "zero_points_sm90", 64, zero_points_sm90_arguments,
        zero_points_sm90_expected, hopper=True,
        defines=defines(
            Tiles(16, 80, 2, 2),
            Features("float16", HEAD_DIM, vec=8, group_q=2, group_kv=16, zero_points=True),
        ),
    ),
    Prim(
        "value_zeros", "value_zeros", "value_zeros", 32, value_zeros_arguments,
        value_zeros_expected,
        defines=defines(
            Tiles(16, 32, 1, 2),
            Features("float16", HEAD_DIM, vec=8, group_v=32, p_type="u8", zero_points=True),
        ),
    ),
    Prim(
        "mean_dot", "mean_dot", "mean_dots", 32, mean_dot_arguments, mean_dot_expected,
        defines=defines(Tiles(16, 32, 1, 2), Features("float16", HEAD_DIM, vec=8)),
    ),
    Prim(
        "quant_zero", "quant", "quant_zero", 64, quant_arguments, quant_expected,
        defines=defines(
            Tiles(16, 32, 2, 2), Features("float16", HEAD_DIM, vec=8, zero_points=True)
        ),
    ),
]  # fmt: skip
