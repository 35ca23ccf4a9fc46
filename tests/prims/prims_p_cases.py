"""The kernels of ``prims/codes/p_codes.cuh``, for every type of the codes of P, and of
``widen.cuh``, for every type of P in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.numerics import P_CODE_ONE
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import GROUP_ALL
from tests.prims.prim import Arguments, Prim, defines, rng

#: NumPy's types of the codes of P, and of V that go with them.
TYPES: dict[str, tuple[Any, Any]] = {
    "u8": (np.uint8, np.int8),
    "s8": (np.int8, np.int8),
    "e4m3": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
}
#: Whole numbers that each of them holds, and whose sums tensor cores keep.
LARGEST = {"u8": (255, 127), "s8": (127, 127), "e4m3": (15, 8)}


def arguments(p_type: str) -> Callable[[], Arguments]:
    one, (of_p, of_v), (of_a, of_b) = P_CODE_ONE[p_type], TYPES[p_type], LARGEST[p_type]

    def made() -> Arguments:
        x = rng().uniform(0, one, (4, 32)).astype(np.float32)
        # 0, the largest as exp2 may give it, the edges of code 0 and ties, which go to even codes
        x[0, :6] = [0, one, one * (1 + 2.0**-20), 0.5, 1.5, 2.5]
        A = rng().integers(0, of_a + 1, (16, 32)).astype(of_p).view(np.uint8)
        B = rng().integers(-of_b, of_b + 1, (8, 32)).astype(of_v).view(np.uint8)
        codes = np.zeros(32, np.uint32)
        return {"x": x, "A": A, "B": B, "codes": codes, "C": np.zeros((16, 8), np.float32)}

    return made


def expected(p_type: str) -> Callable[..., dict[str, np.ndarray]]:
    one, (of_p, of_v) = P_CODE_ONE[p_type], TYPES[p_type]

    def written(x: np.ndarray, A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        weights = np.minimum(x, np.float32(one))
        rounded = weights if p_type == "e4m3" else np.rint(weights)
        codes = rounded.astype(of_p).view(np.uint8).T.copy().view(np.uint32)[:, 0]
        a, b = A.view(of_p).astype(np.float32), B.view(of_v).astype(np.float32)
        return {"codes": codes, "C": 1 + a @ b.T}

    return written


def mma_u8_arguments() -> Arguments:
    A = rng().integers(0, 256, (16, 32)).astype(np.uint8)
    B = rng().integers(-127, 128, (8, 32)).astype(np.int8)
    return {"A": A, "B": B, "C": np.zeros((16, 8), np.int32)}


def mma_u8_expected(A: np.ndarray, B: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    return {"C": 1 + A.astype(np.int32) @ B.astype(np.int32).T}


def weights_arguments() -> Arguments:
    x = np.exp2(rng().uniform(-20, 12, (3, 32, 2)))
    x[0, :3] = [255.9, 0.0], [256.0, 1.0], [3.0, 256.0]  # what the limit splits, in either half
    x[0, 3:5] = [np.inf, 1.0], [1.0, np.nan]
    types = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
    pairs = {name: x.astype(dtype).view(np.uint32)[..., 0] for name, dtype in types.items()}
    return {**pairs, "largest": np.zeros(32, np.uint32), "below": np.zeros((2, 32), np.uint32)}


def weights_expected(f16: np.ndarray, bf16: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    found = f16[0].view(np.float16), bf16[0].view(ml_dtypes.bfloat16)
    below = [(x.astype(np.float32).reshape(32, 2) < 256).all(axis=1) for x in found]
    return {
        "largest": f16.view(np.uint16).max(axis=0).view(np.uint32),
        "below": np.stack(below).astype(np.uint32),
    }


def widen_arguments() -> Arguments:
    codes = np.arange(256, dtype=np.uint8).view(np.uint32)
    return {"codes": codes, "pairs": np.zeros((64, 2), np.uint32)}


def widen_expected(dtype: str) -> Callable[..., dict[str, np.ndarray]]:
    def written(codes: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
        numbers = codes.view(np.int8).astype(STORAGE[dtype])
        return {"pairs": numbers.view(np.uint32).reshape(64, 2)}

    return written


P_PRIMS = [
    Prim("weights", "mma", "weights", 32, weights_arguments, weights_expected),
    Prim("mma_u8", "mma", "mma_u8", 32, mma_u8_arguments, mma_u8_expected),
] + [
    Prim(
        f"p_codes-{p_type}", "p_codes", "p_codes", 32, arguments(p_type), expected(p_type),
        since=89 if p_type == "e4m3" else 80,
        defines=defines(
            Tiles(16, 32, 1), Features("float16", 64, vec=8, group_v=GROUP_ALL, p_type=p_type)
        ),
    )
    for p_type in TYPES
] + [
    Prim(
        f"widen-{dtype}", "widen", "widen", 64, widen_arguments, widen_expected(dtype),
        defines=defines(Tiles(16, 32, 1), Features(dtype, 64, vec=8)),
    )
    for dtype in ("float16", "bfloat16")
]  # fmt: skip
