"""The products of ``wgmma.cuh``, ``wgmma_8bit.cuh``, of every shape and type kernels ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from tests.prims.prim import Arguments, Prim, defines, rng

WGMMA_DEPTH, WGMMA_KEYS = 80, 48
#: Every N that prims/instructions/wgmma.cuh has.
WGMMA_COLUMNS = (32, 64, 72, 80, 96, 112, 128, 136, 144, 160, 176, 192, 224, 256)


def wgmma_arguments(dtype: str, columns: int) -> dict[str, Callable[[], Arguments]]:
    """Whole numbers, so that every product and sum is exact in any order."""

    def operands(*shapes: tuple[int, int]) -> Iterator[np.ndarray]:
        draw = rng()
        for shape in shapes:
            yield draw.integers(-15, 16, shape).astype(STORAGE[dtype]).view(np.uint16)

    def ss() -> Arguments:
        A, B = operands((128, WGMMA_DEPTH), (columns, WGMMA_DEPTH))
        outputs = {name: np.zeros((128, columns), np.float32) for name in ("D", "sum")}
        return {"A": A, "B": B, **outputs}

    def ss_minus() -> Arguments:
        return {name: x for name, x in ss().items() if name != "sum"}

    def rs() -> Arguments:
        A, B = operands((64, WGMMA_KEYS), (WGMMA_KEYS, columns))
        return {"A": A, "B": B, "D": np.zeros((64, columns), np.float32)}

    def with_columns(*A_shape: int) -> Arguments:
        A, B = operands(A_shape, (WGMMA_KEYS, columns))
        outputs = {name: np.zeros((64, columns), np.float32) for name in ("D", "sum")}
        return {"A": A, "B": B, **outputs}

    return {
        "ss": ss, "ss_minus": ss_minus, "rs": rs,
        "ss_columns": lambda: with_columns(64, WGMMA_KEYS),
        "ss_across": lambda: with_columns(WGMMA_KEYS, 64),
    }  # fmt: skip


def wgmma_expected(dtype: str) -> dict[str, Callable[..., dict[str, np.ndarray]]]:
    def wide(x: np.ndarray) -> np.ndarray:
        return x.view(STORAGE[dtype]).astype(np.float32)

    def ss(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        product = wide(A) @ wide(B).T
        return {"D": product, "sum": 1 + product}

    def ss_minus(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        return {"D": 1 - wide(A) @ wide(B).T}

    def rs(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        return {"D": 1 + wide(A) @ wide(B)}

    def ss_columns(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        product = wide(A) @ wide(B)
        return {"D": product, "sum": 1 + product}

    def ss_across(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        return ss_columns(np.ascontiguousarray(A.T), B)

    return {
        "ss": ss, "ss_minus": ss_minus, "rs": rs, "ss_columns": ss_columns, "ss_across": ss_across,
    }  # fmt: skip


def wgmma_e4m3_arguments() -> Arguments:
    """Whole numbers up to 4, whose sums, below 2^11, even the bits of an 8-bit product hold."""
    A, B = (
        rng().integers(-4, 5, (rows, 96)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        for rows in (64, 128)
    )
    outputs = {
        f"{name}{columns}": np.zeros((64, columns), np.float32)
        for columns in (64, 96, 128)
        for name in ("D", "sum")
    }
    return {"A": A, "B": B, **outputs}


def wgmma_e4m3_expected(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    a, b = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (A, B))
    products = {columns: a @ b[:columns].T for columns in (64, 96, 128)}
    found = {f"D{columns}": product for columns, product in products.items()}
    return found | {f"sum{columns}": 1 + product for columns, product in products.items()}


def wgmma_prims() -> Iterator[Prim]:
    cells = itertools.product(enumerate(("float16", "bfloat16")), enumerate(WGMMA_COLUMNS))
    for (of_dtype, dtype), (number, columns) in cells:
        for entry, arguments in wgmma_arguments(dtype, columns).items():
            if entry not in ("ss", "rs") and columns not in (64, 128):
                continue  # no kernel asks for it
            threads = 256 if entry in ("ss", "ss_minus") else 128
            yield Prim(
                f"wgmma_{entry}-{dtype}-{columns}", "wgmma", entry, threads,
                arguments, wgmma_expected(dtype)[entry], hopper=True,
                late=number % 4 != 2 * of_dtype,
                defines=defines(Tiles(128, columns, 8), Features(dtype, WGMMA_DEPTH, vec=8)),
            )  # fmt: skip
    yield Prim(
        "wgmma_rs-e4m3", "wgmma_8bit", "rs_e4m3", 128, wgmma_e4m3_arguments, wgmma_e4m3_expected,
        hopper=True,
    )  # fmt: skip
