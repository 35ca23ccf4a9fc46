"""The kernel of ``gemm.cuh``: types of C, widths of its accesses, activations, edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.bounds.products import ACTIVATION_ERROR
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures
from cupyattn.plans.structs import GEMM_PARAMS, pack
from cupyattn.reference.gemm import activate
from tests.prims.prim import Arguments, Prim, rng

TILES = GemmTiles(block_m=64, block_n=128, num_warps=2, num_stages=3)
ROWS = 7  # of 8 that lanes hold
#: Blocks of rows and of columns, and blocks of rows that are gone through together.
M_BLOCKS, N_BLOCKS, TOGETHER = 28, 4, 16


def arguments(features: GemmFeatures, n: int) -> Callable[[], Arguments]:
    def made() -> Arguments:
        x = rng().normal(scale=4, size=(8, 32)).astype(np.float32)
        # both tails of an activation, where the exponential overflows and where nothing is left
        x[0, :8] = [-200, -89, -12, -1e-20, 0, 1e-20, 12, 200]
        bias = rng().normal(size=n).astype(STORAGE[features.bias or "float32"])
        bias[:8] = 0
        params = {"m": ROWS, "n": n, "k": 300, "outliers": 65, "C_stride": 32}
        return {
            "given": pack(GEMM_PARAMS, params, {}), "x": x, "bias": bias,
            "C": np.zeros((8, 32), STORAGE[features.out_dtype]),
            "tiles": np.zeros((M_BLOCKS * N_BLOCKS, 2), np.int32),
            "constants": np.zeros(8, np.int32),
        }  # fmt: skip

    return made


def expected(features: GemmFeatures, n: int) -> Callable[..., dict[str, np.ndarray]]:
    def written(x: np.ndarray, bias: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        c = x[:ROWS, :n]
        if features.bias:
            c = c + bias.astype(np.float32)
        c = activate(as_float64(c), features.activation).astype(np.float32)
        C = np.zeros((8, 32), STORAGE[features.out_dtype])
        C[:ROWS, :n] = c
        tiles = [
            (row * TILES.block_m, column * TILES.block_n)
            for first in range(0, M_BLOCKS, TOGETHER)
            for column in range(N_BLOCKS)
            for row in range(first, min(M_BLOCKS, first + TOGETHER))
        ]
        outliers = 2 if features.outliers else 0
        constants = [64, 128, features.access_bytes, 3, 64, bool(features.outliers), 3, outliers]
        return {
            "C": C.astype(np.float32), "tiles": np.array(tiles, np.int32),
            "constants": np.array(constants, np.int32),
        }  # fmt: skip

    return written


def prim(features: GemmFeatures, n: int) -> Prim:
    of_type = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": ACTIVATION_ERROR}
    relative = of_type[features.out_dtype] if features.activation else 0.0

    def tolerance(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        """What an activation may be off by, a share of its argument; the bias is below 8."""
        return {"C": ACTIVATION_ERROR * (np.abs(x) + 8) + 2.0**-24}

    name = f"gemm-{features.out_dtype}-{features.vec}-{features.activation or 'plain'}"
    return Prim(
        name, "gemm", "gemm", 32, arguments(features, n), expected(features, n),
        relative=relative, tolerance=tolerance if features.activation else None,
        defines=tuple(sorted({**TILES.defines(), **features.defines()}.items())),
    )  # fmt: skip


GEMM_PRIMS = [
    prim(GemmFeatures("float16", 16, 8, "float32", "gelu", "float16"), 24),
    prim(GemmFeatures("bfloat16", 8, 8, "", "silu"), 32),
    prim(GemmFeatures("float32", 4, 2, "bfloat16", "gelu_tanh", "bfloat16"), 22),
    prim(GemmFeatures("float32", 1, 4, "float16"), 32),
    prim(GemmFeatures("float16", 1, 1), 19),
]
