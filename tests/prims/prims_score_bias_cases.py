"""The kernels of ``prims/score/score_bias.cuh``: a bias of each kind added to scores, or a mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, eighths, rng
from tests.prims.prims_mask_bits_cases import BLOCK_Q, packed_rows
from tests.prims.prims_mma_cases import swizzle

FACTOR, BIAS_KV = 0.75, 96


def some_bias(dtype: str, *shape: int) -> np.ndarray:
    """Numbers that every storage type has, with some that are -inf."""
    bias = rng().integers(-127, 128, shape) / 4
    bias[rng().random(shape) < 0.1] = -np.inf
    return bias.astype(STORAGE[dtype])


def boxed(bias: np.ndarray) -> np.ndarray:
    """Lay [rows, keys] out in boxes of 128 bytes a row, swizzled, each a multiple of 1024 bytes."""
    rows, keys = bias.shape
    rest = -bias.itemsize * keys % 128
    chunks = np.pad(bias.view(np.uint8), ((0, 0), (0, rest)), constant_values=0xFF)
    boxes = np.full((chunks.shape[1] // 128, -(-rows // 8) * 64, 16), 0xFF, np.uint8)
    for row, octet in np.ndindex(rows, chunks.shape[1] // 16):
        place = swizzle(8, row, octet % 8)
        boxes[octet // 8, place] = chunks[row, 16 * octet : 16 * octet + 16]
    return boxes


def boxes_arguments(kind: str, dtype: str) -> Arguments:
    return {
        "factor": np.array([FACTOR], np.float32),
        "boxes": boxed(some_bias(dtype, BLOCK_Q if kind == "dense" else 1, BIAS_KV)),
        "x": eighths(BLOCK_Q, BIAS_KV), "S": np.zeros((BLOCK_Q, BIAS_KV), np.float32),
    }  # fmt: skip


def boxes_expected(kind: str, dtype: str, /, x: np.ndarray, **_: Any) -> Results:
    bias = some_bias(dtype, BLOCK_Q if kind == "dense" else 1, BIAS_KV)
    return {"S": x + np.float32(FACTOR) * bias.astype(np.float32)}


def rows_arguments() -> Arguments:
    arguments = {**boxes_arguments("dense", "float16")}
    del arguments["boxes"]
    factor = arguments.pop("factor")
    return {"factor": factor, "bias": some_bias("float32", BLOCK_Q), **arguments}


def rows_expected(x: np.ndarray, bias: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    return {"S": x + np.float32(FACTOR) * bias[:, None]}


def memory_arguments(dtype: str, kv0: int) -> Arguments:
    bias = some_bias(dtype, 2, 3, 100, 29)  # of a key and a row
    values = {"len_q": 29, "len_kv": 100, "bias_stride": (8700, 2900, 1, 29)}
    return {
        "given": pack(ATTN_PARAMS, values, {}), "bias": bias.view(np.uint16),
        "kv0": np.array([kv0], np.int32), "bits": np.full((2, 32, 2), 7, np.uint32),
    }  # fmt: skip


def memory_expected(dtype: str, /, bias: np.ndarray, kv0: np.ndarray, **_: Any) -> Results:
    """Rows and keys past the end are as the last."""
    own = bias.view(STORAGE[dtype])[1, 2].astype(np.float32)
    keys = np.minimum(kv0[0] + np.arange(BIAS_KV), 99)
    admitted = ~np.isneginf(own[keys][:, np.minimum(np.arange(BLOCK_Q), 28)].T)
    return {"bits": packed_rows(admitted, BIAS_KV).reshape(2, 32, 2)}


def macros(kind: str, dtype: str) -> tuple[tuple[str, int], ...]:
    features = Features("float16", 64, scored=True, bias=dtype, bias_kind=kind)
    return defines(Tiles(BLOCK_Q, BIAS_KV, 2), features)


SCORE_BIAS_PRIMS = [
    *(
        Prim(
            f"score_bias-{kind}-{dtype}", "score_bias", "from_boxes", 64,
            partial(boxes_arguments, kind, dtype), partial(boxes_expected, kind, dtype),
            defines=macros(kind, dtype),
        )
        for kind, dtype in (
            ("dense", "float16"), ("dense", "bfloat16"), ("keys", "bfloat16"),
            ("dense", "float32"), ("keys", "float32"),
        )
    ),
    Prim(
        "score_bias-rows", "score_bias", "by_rows", 64, rows_arguments, rows_expected,
        defines=macros("dense", "float16"),
    ),
    *(
        Prim(
            f"score_bias-admitted-{dtype}-{kv0}", "score_bias", "in_memory", 64,
            partial(memory_arguments, dtype, kv0), partial(memory_expected, dtype),
            defines=macros("dense", dtype),
        )
        for dtype, kv0 in (("float16", 0), ("bfloat16", 40))
    ),
]  # fmt: skip
