"""The kernels of ``gemm*.cuh``: types of C, widths of accesses, activations, scales, edges."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.bounds.products import ACTIVATION_ERROR
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures
from cupyattn.plans.structs import GEMM_PARAMS, pack
from cupyattn.reference.gemm import activate
from tests.prims.prim import Arguments, Prim, Results, rng

TILES = GemmTiles(block_m=64, block_n=128, num_warps=2, num_stages=3)
ROWS = 7  # of 8 that lanes hold
#: Blocks of rows and of columns, and blocks of rows that are gone through together.
M_BLOCKS, N_BLOCKS, TOGETHER = 28, 4, 16


def arguments(features: GemmFeatures, n: int) -> Arguments:
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


def expected(
    features: GemmFeatures, n: int, /, x: np.ndarray, bias: np.ndarray, **_: Any
) -> Results:
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


def prim(features: GemmFeatures, n: int) -> Prim:
    of_type = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": ACTIVATION_ERROR}
    relative = of_type[features.out_dtype] if features.activation else 0.0

    def tolerance(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        """Allowed error of an activation, as a share of its argument; the bias is below 8."""
        return {"C": ACTIVATION_ERROR * (np.abs(x) + 8) + 2.0**-24}

    name = f"gemm-{features.out_dtype}-{features.vec}-{features.activation or 'plain'}"
    return Prim(
        name, "gemm", "gemm", 32, partial(arguments, features, n), partial(expected, features, n),
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


# ---- scales of rows and columns, and slices ------------------------------------------------------


def channel(features: GemmFeatures, n: int, stride: int = 1) -> Prim:
    """Return sums up to 2^31, most of which float32 rounds, times scales of 7 rows, n columns."""

    def arguments() -> Arguments:
        largest = 2 ** np.arange(24, 32).reshape(8, 1) - 1
        sums = np.int64(rng().uniform(-1, 1, (8, 32)) * largest).astype(np.int32)
        row, column = (np.exp(rng().normal(size=s)).astype(np.float32) for s in (ROWS, n * stride))
        params = {
            "m": ROWS, "n": n, "C_stride": 32, "A_scale_stride": 1, "B_scale_stride": stride,
        }  # fmt: skip
        C = np.zeros((8, 32), STORAGE[features.out_dtype])
        given = pack(GEMM_PARAMS, params, {})
        return {"given": given, "sums": sums, "A_scale": row, "B_scale": column, "C": C}

    def expected(
        sums: np.ndarray, A_scale: np.ndarray, B_scale: np.ndarray, **_: Any
    ) -> dict[str, np.ndarray]:
        C = np.zeros((8, 32), STORAGE[features.out_dtype])
        factor = A_scale[:, None] * B_scale[None, ::stride]
        with np.errstate(over="ignore"):
            C[:ROWS, :n] = sums[:ROWS, :n].astype(np.float32) * factor
        return {"C": C.astype(np.float32)}

    name = f"gemm-channel-{features.out_dtype}-{features.vec}-{stride}"
    defines = tuple(sorted({**TILES.defines(), **features.defines()}.items()))
    return Prim(name, "gemm_channel", "channel", 32, arguments, expected, defines=defines)


def slices(tiles: GemmTiles, access_bytes: int, valid: tuple[int, int, int]) -> Prim:
    """Return a slice of which `valid` rows, columns and bytes exist: what lies past them is 0."""
    rows, columns, codes = valid

    def arguments() -> Arguments:
        A, B = (rng().integers(-127, 128, (s, 128)).astype(np.int8) for s in (rows, columns))
        C = np.zeros((tiles.block_m, tiles.block_n), np.int32)
        return {"A": A, "B": B, "valid": np.array(valid, np.int32), "C": C}

    def expected(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        C = np.zeros((tiles.block_m, tiles.block_n), np.int32)
        C[:rows, :columns] = A[:, :codes].astype(np.int32) @ B[:, :codes].astype(np.int32).T
        return {"C": C}

    features = GemmFeatures("float16", access_bytes, 8)
    defines = tuple(sorted({**tiles.defines(), **features.defines()}.items()))
    name = f"gemm-mma-{tiles.block_m}x{tiles.block_n}-{access_bytes}"
    return Prim(
        name, "gemm_mma", "slice", tiles.num_threads, arguments, expected, defines=defines
    )  # fmt: skip


GEMM_PRIMS += [
    channel(GemmFeatures("float32", 16, 4), 32),
    channel(GemmFeatures("bfloat16", 16, 8), 24),
    channel(GemmFeatures("float32", 1, 1), 19, stride=3),
    slices(GemmTiles(32, 64, num_warps=2, num_stages=2), 16, (30, 64, 112)),
    slices(GemmTiles(128, 32, num_warps=2, num_stages=2), 4, (100, 17, 128)),
    slices(GemmTiles(16, 32, num_warps=2, num_stages=2), 1, (16, 30, 77)),
]
