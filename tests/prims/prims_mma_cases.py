"""The kernels of ``swizzle.cuh`` and ``mma.cuh``: tiles of tensor cores, products."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests.prims.prim import Arguments, Prim, Results, normal, rng

LANES = np.arange(32)
CHUNKS = range(2, 33, 2)


def swizzle(chunks: int, row: int, chunk: int) -> int:
    """Index of a 16-byte chunk in a tile of rows of `chunks` chunks."""
    g = math.gcd(chunks, 8)
    return row * chunks + (chunk ^ (row // (8 // g) % g))


def swizzle_expected(**_: Any) -> dict[str, np.ndarray]:
    index = [swizzle(n, row, chunk) for n in CHUNKS for row in range(16) for chunk in range(n)]
    return {
        "index": np.array(index, np.int32),
        "from": np.array(index, np.int32),
        "bytes": np.array([16 * swizzle(2, 3, 1), 16 * swizzle(2, 3, 0)], np.int32),
    }


def pairs_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit patterns in one 32-bit register."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


TILE = np.arange(256, dtype=np.uint16).reshape(16, 16)


def ldmatrix_expected(tile: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    r, c = LANES // 4, LANES % 4
    quarters = [tile[i % 2 * 8 :, i // 2 * 8 :] for i in range(4)]
    return {
        "plain": np.stack([pairs_of(q[r, 2 * c], q[r, 2 * c + 1]) for q in quarters]),
        "transposed": np.stack([pairs_of(q[2 * c, r], q[2 * c + 1, r]) for q in quarters]),
    }


def mma_arguments(dtype: Any, depth: int, largest: int, out: Any) -> Arguments:
    """Whole numbers, so that every product and sum is exact in any order."""
    A, B = (rng().integers(-largest, largest + 1, (n, depth)) for n in (16, 8))
    stored = (x.astype(dtype).view(f"u{np.dtype(dtype).itemsize}") for x in (A, B))
    return {"A": next(stored), "B": next(stored), "C": np.zeros((16, 8), out)}


def mma_expected(dtype: Any, /, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> Results:
    a, b = (x.view(dtype).astype(np.float64) for x in (A, B))
    return {"C": (1 + a @ b.T).astype(C.dtype)}


def pack_arguments() -> Arguments:
    x = normal(2, 32) * 100
    x[:, 0], x[:, 1] = 2049.0, 257.0  # ties of float16 and bfloat16
    x[:, 2], x[:, 3] = 1e6, 1e-7  # past the largest float16, below the smallest normal one
    return {"x": x, "f16": np.zeros(32, np.uint32), "bf16": np.zeros(32, np.uint32)}


def pack_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    with np.errstate(over="ignore"):
        stored = {"f16": x.astype(np.float16), "bf16": x.astype(ml_dtypes.bfloat16)}
    return {name: pairs_of(*value.view(np.uint16)) for name, value in stored.items()}


MMA_PRIMS = [
    Prim(
        "swizzle", "swizzle", "swizzle", 16,
        lambda: {
            "index": np.zeros(16 * sum(CHUNKS), np.int32),
            "from": np.zeros(16 * sum(CHUNKS), np.int32), "bytes": np.zeros(2, np.int32),
        },
        swizzle_expected,
    ),
    Prim(
        "ldmatrix", "mma", "ldmatrix", 32,
        lambda: {
            "tile": TILE,
            "plain": np.zeros((4, 32), np.uint32), "transposed": np.zeros((4, 32), np.uint32),
        },
        ldmatrix_expected,
    ),
    Prim(
        "mma_f16", "mma", "mma_f16", 32,
        lambda: mma_arguments(np.float16, 16, 15, np.float32), partial(mma_expected, np.float16),
    ),
    Prim(
        "mma_bf16", "mma", "mma_bf16", 32,
        lambda: mma_arguments(ml_dtypes.bfloat16, 16, 15, np.float32),
        partial(mma_expected, ml_dtypes.bfloat16),
    ),
    Prim(
        "mma_s8", "mma", "mma_s8", 32,
        lambda: mma_arguments(np.int8, 32, 127, np.int32), partial(mma_expected, np.int8),
    ),
    Prim("pack", "mma", "pack", 32, pack_arguments, pack_expected),
]  # fmt: skip
