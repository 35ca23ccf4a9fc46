"""Kernels of bare instructions of whole warps: exchanges, votes, barriers, atomics, products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.interpret.tensor_core import accumulation_error
from tests.prims.prim import Arguments, Prim, rng
from tests.prims.prims_mma_cases import LANES, pairs_of

COUNT = 64
WORD = 2**32

# ---- exchanges and votes -------------------------------------------------------------------------


def shuffle_arguments() -> Arguments:
    x = np.stack([rng().permutation(1000)[:COUNT], rng().integers(0, 32, COUNT)]).astype(np.uint32)
    return {"x": x, "y": np.full((24, COUNT), 0xDEADBEEF, np.uint32)}


def shuffle_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    rows: list[list[int]] = []
    for width in (32, 16, 8):

        def source(kind: str, i: int, width: int = width) -> int:
            first = i // width * width
            return {
                "up": i - 3, "down": i + 5, "bfly": i ^ (width // 2),
                "idx": first + int(x[1, i]) % width,
            }[kind]  # fmt: skip

        for kind in ("up", "down", "bfly", "idx"):
            sources = [source(kind, i) for i in range(COUNT)]
            valid = [j // width == i // width for i, j in enumerate(sources)]
            read = [j if ok else i for i, (j, ok) in enumerate(zip(sources, valid, strict=True))]
            rows.append([int(x[0, j]) for j in read])
            rows.append(list(map(int, valid)))
    return {"y": np.array(rows, np.uint32)}


def vote_arguments() -> Arguments:
    x = rng().integers(0, 100, COUNT).astype(np.uint32)
    x[40] = 2  # the second warp differs from the first in any and all
    x[:32] = np.clip(x[:32], 4, 90)
    return {"x": x, "y": np.full((16, COUNT), 0xDEADBEEF, np.uint32)}


def bits_of(flags: np.ndarray) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(flags))


def vote_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    y = np.zeros((16, COUNT), np.uint32)
    for warp in range(2):
        lanes = slice(32 * warp, 32 * warp + 32)
        a = x[lanes].astype(np.int64)
        half = LANES // 16
        rows = [
            bits_of(a % 2 == 1), int((a > 90).any()), int((a > 3).all()),
            [bits_of(a & 7 == v & 7) for v in a],
            WORD - 1 if warp == 0 or len(set(a)) == 1 else 0, int(warp == 0 or len(set(a)) == 1),
            a.sum(), a.min(), (a.max() - 50) % WORD,
            np.bitwise_and.reduce(a | 0x100), np.bitwise_or.reduce(a), np.bitwise_xor.reduce(a),
            [a[half == h].sum() for h in half], a[LANES ^ 8],
            [a[a & 3 == v & 3].sum() for v in a],
            np.where(LANES % 2, bits_of((a > 50) & (LANES % 2 == 1)), 0),
        ]  # fmt: skip
        for row, value in zip(y, rows, strict=True):
            row[lanes] = value
    return {"y": y}


# ---- atomic operations, barriers -----------------------------------------------------------------

WORDS = np.array([5, 9, 30, 30, 10, 10, 0xFFFF, 1, 0, 3, 4, 7], np.uint32)


def atomic_arguments() -> Arguments:
    return {
        "x": rng().integers(0, 100, COUNT).astype(np.uint32),
        "y": WORDS.copy(),
        "shared_y": np.zeros(12, np.uint32),
        "ticket": np.zeros(COUNT, np.uint32),
        "counter": np.zeros(1, np.uint32),
        "sum": np.full(1, 2**33 + 1, np.uint64),
        "total": np.full(1, 0.5, np.float32),
    }


def atomic_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    a = x.astype(np.int64)
    w = [*WORDS.astype(np.int64)]
    inc, dec = 3, 4
    for _lane in a:
        inc = 0 if inc >= 10 else inc + 1
        dec = 10 if dec == 0 or dec > 10 else dec - 1
    words = np.array([
        w[0] + a.sum(), w[1] - a.sum(), min(w[2], *a), max(w[3], *a), min(w[4], *(a - 50)),
        max(w[5], *(a - 50)), np.bitwise_and.reduce(a | 0xFF0) & w[6],
        np.bitwise_or.reduce(a) | w[7], np.bitwise_xor.reduce(a) ^ w[8], inc, dec, 9,
    ])  # fmt: skip
    words = (words % WORD).astype(np.uint32)
    return {
        "y": words,
        "shared_y": words,
        "ticket": np.full(COUNT, 7, np.uint32),
        "counter": np.array([COUNT], np.uint32),
        "sum": np.array([2**33 + 1 + (int(a.sum()) << 30)], np.uint64),
        "total": np.array([0.5 + a.sum()], np.float32),
    }


def ring_arguments() -> Arguments:
    x = rng().integers(0, WORD, (5, COUNT), np.uint32)
    return {"x": x, "y": np.zeros_like(x)}


# ---- tiles ---------------------------------------------------------------------------------------

ROW, PAIR = LANES // 4, LANES % 4


def ldmatrix_expected(tile: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    tiles = tile[:8], tile[8:]
    plain = [pairs_of(t[ROW, 2 * PAIR], t[ROW, 2 * PAIR + 1]) for t in tiles]
    transposed = [pairs_of(t[2 * PAIR, ROW], t[2 * PAIR + 1, ROW]) for t in tiles]
    return {"y": np.stack([plain[0], transposed[0], *plain, *transposed])}


def stmatrix_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    tiles = np.zeros((4, 8, 8), np.uint16)
    tiles[:, ROW, 2 * PAIR], tiles[:, ROW, 2 * PAIR + 1] = x & 0xFFFF, x >> 16
    y = np.ones((6, 4, 8, 8), np.uint16)
    for part, count in enumerate((1, 2, 4)):
        y[2 * part, :count] = tiles[:count]
        y[2 * part + 1, :count] = tiles[:count].swapaxes(1, 2)
    return {"y": y.reshape(6, 32, 8)}


# ---- products ------------------------------------------------------------------------------------


def product(
    name: str, bytes_: int, a_type: Any, b_type: Any, *, since: int = 80, saturates: bool = False
) -> Prim:
    """A product of random operands, whose rows have `bytes_` bytes."""
    whole = np.dtype(a_type).kind in "iu"
    code = np.dtype(f"u{np.dtype(a_type).itemsize}")

    def operand(draw: np.random.Generator, rows: int, dtype: Any) -> np.ndarray:
        shape = rows, bytes_ // code.itemsize
        if whole:
            limits = np.iinfo(dtype)
            return draw.integers(limits.min, limits.max + 1, shape).astype(dtype).view(code)
        x = (draw.standard_normal(shape) * 2.0 ** draw.integers(-4, 5, shape)).astype(dtype)
        bits = x.view(code)
        # tf32 has not got the 13 lowest bits of a float32
        return bits & np.uint32(0xFFFFE000) if code.itemsize == 4 else bits

    def arguments() -> Arguments:
        draw = rng()
        A, B = operand(draw, 16, a_type), operand(draw, 8, b_type)
        if whole:
            C = draw.integers(-(2**20), 2**20, (16, 8)).astype(np.int32)
            if saturates:
                C[::2], C[1::2] = 2**31 - 1, -(2**31)
        else:
            C = (8 * draw.standard_normal((16, 8))).astype(np.float32)
        return {"A": A, "B": B, "C": C}

    def expected(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> dict[str, np.ndarray]:
        a, b = A.view(a_type).astype(np.float64), B.view(b_type).astype(np.float64)
        D = a @ b.T + C
        return {"C": np.clip(D, -(2**31), 2**31 - 1).astype(np.int32) if whole else D}

    def tolerance(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> dict[str, np.ndarray]:
        a, b = A.view(a_type).astype(np.float64), B.view(b_type).astype(np.float64)
        return {"C": accumulation_error(A.shape[1], np.abs(C) + np.abs(a) @ np.abs(b).T)}

    return Prim(
        f"ptx-mma-{name}", "ptx_matrix", f"mma_{name}", 32, arguments, expected, since=since,
        tolerance=None if whole else tolerance,
    )  # fmt: skip


def products() -> Iterator[Prim]:
    f16, bf16, f32 = np.float16, ml_dtypes.bfloat16, np.float32
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    yield product("k16_f16", 32, f16, f16)
    yield product("k16_bf16", 32, bf16, bf16)
    yield product("k8_f16", 16, f16, f16)
    yield product("k8_bf16", 16, bf16, bf16)
    yield product("k8_tf32", 32, f32, f32)
    yield product("k4_tf32", 16, f32, f32)
    yield product("k16_s8", 16, np.int8, np.int8)
    yield product("k32_u8", 32, np.uint8, np.uint8)
    yield product("k32_s8_u8", 32, np.int8, np.uint8)
    yield product("k32_u8_s8", 32, np.uint8, np.int8, saturates=True)
    yield product("k32_e4m3", 32, e4m3, e4m3, since=89)
    yield product("k32_e5m2_e4m3", 32, e5m2, e4m3, since=89)


# ---- all of them ---------------------------------------------------------------------------------

WARP_PTX = [
    Prim("ptx-shuffles", "ptx_warp", "shuffles", COUNT, shuffle_arguments, shuffle_expected),
    Prim("ptx-votes", "ptx_warp", "votes", COUNT, vote_arguments, vote_expected),
    Prim("ptx-atomics", "ptx_warp", "atomics", COUNT, atomic_arguments, atomic_expected),
    Prim(
        "ptx-ring", "ptx_warp", "ring", 2 * COUNT, ring_arguments,
        lambda x, **_: {"y": x[:, ::-1]},
    ),
    Prim(
        "ptx-ldmatrix", "ptx_matrix", "ldmatrix_parts", 32,
        lambda: {
            "tile": np.arange(128, dtype=np.uint16).reshape(16, 8),
            "y": np.zeros((6, 32), np.uint32),
        },
        ldmatrix_expected,
    ),
    Prim(
        "ptx-stmatrix", "ptx_matrix", "stmatrix", 32,
        lambda: {
            "x": rng().integers(0, WORD, (4, 32), np.uint32),
            "y": np.zeros((6, 32, 8), np.uint16),
        },
        stmatrix_expected, since=90,
    ),
    *products(),
]  # fmt: skip
