"""The kernels of ``prims/score/gradient_bias.cuh``: a bias added to scores whose rows are keys, or
query rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import BIAS_KINDS, Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, eighths
from tests.prims.prims_score_bias_cases import boxed, some_bias

SCALE, LEN_KV = 0.75, 100


def products(rows: int, keys: int) -> np.ndarray:
    """Products, transposed, of which the first is NaN."""
    x = eighths(keys, rows)
    x[0, 0] = np.nan
    return x


def dense_bias(dtype: str, rows: int, keys: int) -> np.ndarray:
    """A bias that masks the first product."""
    bias = some_bias(dtype, rows, keys)
    bias[0, 0] = -np.inf
    return bias


def with_bias(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Scores, transposed, of products and of a bias (rows or 1, keys)."""
    of_score = bias.astype(np.float32).T
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(of_score), of_score, x * np.float32(SCALE) + of_score)


def boxes_arguments(dtype: str, tiles: Tiles) -> Arguments:
    x = products(tiles.block_q, tiles.block_kv)
    return {
        "p": pack(ATTN_PARAMS, {"scale": SCALE}, {}),
        "boxes": boxed(dense_bias(dtype, tiles.block_q, tiles.block_kv)),
        "x": x, "S": np.zeros_like(x),
    }  # fmt: skip


def boxes_expected(dtype: str, tiles: Tiles, /, x: np.ndarray, **_: Any) -> Results:
    return {"S": with_bias(x, dense_bias(dtype, tiles.block_q, tiles.block_kv))}


def memory_arguments(dtype: str, tiles: Tiles) -> Arguments:
    bias = some_bias(dtype, 2, 3, LEN_KV)
    bias[..., 0] = -np.inf
    values = {"scale": SCALE, "len_q": 1, "len_kv": LEN_KV, "bias_stride": (300, 100, 0, 1)}
    x = products(tiles.block_q, tiles.block_kv)
    return {
        "given": pack(ATTN_PARAMS, values, {}), "bias": bias.view(f"u{bias.itemsize}"),
        "x": x, "S": np.zeros_like(x),
    }  # fmt: skip


def memory_expected(
    dtype: str, tiles: Tiles, /, x: np.ndarray, bias: np.ndarray, **_: Any
) -> Results:
    """Keys past the end are as the last."""
    own = bias.view(STORAGE[dtype])[1, 2, np.minimum(np.arange(tiles.block_kv), LEN_KV - 1)]
    return {"S": with_bias(x, own[None])}


def key_boxes_arguments(dtype: str, tiles: Tiles) -> Arguments:
    """Boxes of one row, of a bias that all query rows share."""
    arguments = boxes_arguments(dtype, tiles)
    return arguments | {"boxes": boxed(dense_bias(dtype, tiles.block_q, tiles.block_kv)[:1])}


def key_boxes_expected(dtype: str, tiles: Tiles, /, x: np.ndarray, **_: Any) -> Results:
    return {"S": with_bias(x, dense_bias(dtype, tiles.block_q, tiles.block_kv)[:1])}


def turned(arguments: Arguments) -> Arguments:
    """The same products, with query rows as rows."""
    return arguments | {name: np.ascontiguousarray(arguments[name].T) for name in ("x", "S")}


def rows_arguments(of_keys: Callable[..., Arguments], dtype: str, tiles: Tiles) -> Arguments:
    return turned(of_keys(dtype, tiles))


def rows_expected(
    of_keys: Callable[..., Results], dtype: str, tiles: Tiles, /, x: np.ndarray, **_: Any
) -> Results:
    return {"S": of_keys(dtype, tiles, x=x.T)["S"].T}


def macros(tiles: Tiles, kind: str, dtype: str, head_dim: int = 64) -> tuple[tuple[str, int], ...]:
    of_kind = ("CFG_BIAS_KIND", BIAS_KINDS.index(kind))
    return (*defines(tiles, Features("float16", head_dim, bias=dtype)), of_kind)


#: By kind of the bias: boxes of all rows, or of one.
OF_BOXES = {
    "dense": (boxes_arguments, boxes_expected), "keys": (key_boxes_arguments, key_boxes_expected)
}  # fmt: skip

GRADIENT_BIAS_PRIMS = [
    *(
        Prim(
            f"gradient_bias-dense-{dtype}-{block_q}", "gradient_bias", "from_boxes", 256,
            partial(boxes_arguments, dtype, tiles), partial(boxes_expected, dtype, tiles),
            defines=macros(tiles, "dense", dtype),
        )
        for dtype, block_q in (("float16", 128), ("bfloat16", 64))
        for tiles in (Tiles(block_q, 128, 8),)
    ),
    *(
        Prim(
            f"gradient_bias-keys-{dtype}", "gradient_bias", "from_memory", 256,
            partial(memory_arguments, dtype, tiles), partial(memory_expected, dtype, tiles),
            defines=macros(tiles, "keys", dtype),
        )
        for dtype in ("float16", "float32")
        for tiles in (Tiles(64, 128, 8),)
    ),
    *(
        Prim(
            f"gradient_bias-{kind}-rows-{dtype}", "gradient_bias", "rows_from_boxes", 128,
            partial(rows_arguments, OF_BOXES[kind][0], dtype, tiles),
            partial(rows_expected, OF_BOXES[kind][1], dtype, tiles),
            defines=macros(tiles, kind, dtype, 256),
        )
        for kind, dtype in (
            ("dense", "float16"), ("dense", "bfloat16"), ("dense", "float32"),
            ("keys", "float16"), ("keys", "float32"),
        )
        for tiles in (Tiles(64, 64, 4),)
    ),
    *(
        Prim(
            f"gradient_bias-keys-boxes-{dtype}", "gradient_bias", "keys_from_boxes", 128,
            partial(key_boxes_arguments, dtype, tiles), partial(key_boxes_expected, dtype, tiles),
            defines=macros(tiles, "keys", dtype, 256),
        )
        for dtype in ("bfloat16", "float32")
        for tiles in (Tiles(64, 64, 4),)
    ),
]  # fmt: skip
