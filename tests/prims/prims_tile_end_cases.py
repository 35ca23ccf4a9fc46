"""The kernels of ``prims/schedule/tile_order.cuh``, ``work_tile.cuh``, ``output.cuh``,
``channel_scales.cuh`` and ``key_parts.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import TensorMap
from cupyattn.plans.structs import ATTN_PARAMS, VALUE_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, normal, rng

BLOCK_Q, HEAD_DIM, COLS, ROWS, KEYS = 16, 72, 96, 13, 48


def places_arguments(len_q: int, heads: int, head_bytes: int) -> Arguments:
    tiles = -(-len_q // BLOCK_Q) * heads
    return {
        "given": np.array([len_q, heads, head_bytes], np.int64),
        "uneven": np.full((tiles, 2), -1, np.int32),
        "even": np.full((tiles, 2), -1, np.int32),
    }


def places_expected(sizes: Sequence[int], /, given: np.ndarray, **_: Any) -> Results:
    """Return what comes of groups of so many heads, and of one head after the other."""
    starts = range(0, int(given[0]), BLOCK_Q)
    found = {}
    for name, groups in (("uneven", sizes), ("even", [1] * given[1])):
        ends = np.cumsum(groups)
        found[name] = [
            (q0, head)
            for end, size in zip(ends, groups, strict=True)
            for q0 in reversed(starts)
            for head in range(end - size, end)
        ]
    return {name: np.array(places, np.int32) for name, places in found.items()}


def parts_expected(group: int, /, scale: np.ndarray, **_: Any) -> Results:
    """Return what comes of a step of `KEYS` keys, `group` of which share a scale."""
    together = math.gcd(group, KEYS)
    by_key = together % 8 != 0
    parts = 1 if by_key else KEYS // together
    part = np.zeros(KEYS) if by_key else np.arange(KEYS) // together
    scales = KEYS if by_key else parts
    spared = np.where(np.isnan(scale) & (np.arange(scale.size) < parts), 1, scale)
    return {
        "part": part.astype(np.int32), "counts": np.array([parts, scales, by_key], np.int32),
        "scale": spared.astype(np.float32),
    }  # fmt: skip


def tiles_arguments() -> Arguments:
    sizes = {"batch": 2, "heads": 6, "heads_kv": 2, "len_q": 40, "len_kv": 9}
    return {"p": pack(ATTN_PARAMS, sizes, {}), "found": np.zeros((36, 8, 32), np.int32)}


def tiles_expected(**_: Any) -> dict[str, np.ndarray]:
    """Three tiles of each of six heads, of which three share one of K and V, in two entries."""
    places = [(q0, head, batch) for batch in (0, 1) for head in range(6) for q0 in (32, 16, 0)]
    found = [
        (q0, head, head // 3, batch, 10 + i, 20 + i, i, batch)
        for i, (q0, head, batch) in enumerate(places)
    ]
    return {"found": np.repeat(np.array(found, np.int32)[..., None], 32, axis=-1)}


def fragment() -> np.ndarray:
    return normal(32, COLS // 2)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the rows of a warp's fragment, (16, COLS): lane 4 g + t has rows g and g + 8."""
    rows = x.reshape(8, 4, COLS // 8, 2, 2).transpose(3, 0, 2, 1, 4)
    return rows.reshape(16, COLS).astype(np.float16)


def copied_arguments() -> Arguments:
    """Two heads with columns of somebody else's behind theirs."""
    to = np.full((1, 2, ROWS, HEAD_DIM + 8), 7, np.float16)
    shape, strides = (1, 2, ROWS, HEAD_DIM), (to.strides[0], to.strides[1], to.strides[2])
    return {
        "to": to,
        "to_map": TensorMap("to", "float16", shape, strides, (1, 1, 16, 64)),
        "x": fragment(),
    }


def copied_expected(to: np.ndarray, x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    to = to.copy()
    to[0, 1, :, :HEAD_DIM] = rounded(x)[:ROWS, :HEAD_DIM]
    to[0, 0] = -to[0, 1]
    to[..., HEAD_DIM:] = 7
    return {"to": to}


def stored_arguments() -> Arguments:
    return {"to": np.full((16, HEAD_DIM), 7, np.float16), "x": fragment()}


def stored_expected(to: np.ndarray, x: np.ndarray) -> dict[str, np.ndarray]:
    to = to.copy()
    to[:ROWS] = rounded(x)[:ROWS, :HEAD_DIM]
    return {"to": to}


def scales_arguments() -> Arguments:
    none = dict.fromkeys(VALUE_PARAMS.names, 0)
    weights = np.abs(normal(32, 2))
    weights[5] = 0  # two rows without keys
    return {
        "p": pack(ATTN_PARAMS, {"heads": 2, "heads_kv": 2, "len_kv": 9}, {}),
        "given": pack(VALUE_PARAMS, none | {"V_scale_stride_head": HEAD_DIM}, {}),
        "V_scale": normal(2, HEAD_DIM),
        "V_mean": normal(2, HEAD_DIM),
        "sums": rng().integers(-(2**23), 2**23, (32, COLS // 2)).astype(np.int32),
        "weights": weights,
        "loaded": np.full((2, COLS), np.nan, np.float32),
        "tile": np.full((32, COLS // 2), np.nan, np.float32),
        "piece": np.full((32, COLS // 2), np.nan, np.float32),
    }


def scales_expected(
    V_scale: np.ndarray, V_mean: np.ndarray, sums: np.ndarray, weights: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    loaded = np.zeros((2, COLS), np.float32)
    loaded[:, :HEAD_DIM] = V_scale[1], V_mean[1]
    lane, i = np.indices(sums.shape)
    columns, of_row = i // 4 * 8 + lane % 4 * 2 + i % 2, i // 2 % 2
    scale, mean = (x[columns].astype(np.float64) for x in loaded)
    weight = weights[lane, of_row].astype(np.float64)
    piece = sums * scale + mean * weight
    with np.errstate(divide="ignore", invalid="ignore"):
        tile = np.where(weight == 0, 0, sums * scale / weight + mean)
    return {
        "loaded": loaded, "tile": tile.astype("f4"),
        "piece": np.where(weight == 0, 0, piece).astype("f4"),
    }  # fmt: skip


OF_O = defines(Tiles(BLOCK_Q, 16, 1), Features("float16", HEAD_DIM, vec=8))

TILE_END_PRIMS = [
    *(
        Prim(
            f"tile_order-{heads}", "tile_order", "places", 32,
            partial(places_arguments, 40, heads, 5 << 20), partial(places_expected, sizes),
            defines=defines(Tiles(BLOCK_Q, 16, 1), Features("float16", 8)),
        )
        for heads, sizes in ((1, [1]), (3, [3]), (6, [3, 3]), (8, [3, 3, 2]), (10, [3, 3, 2, 2]))
    ),
    *(
        Prim(
            f"key_parts-{group}", "key_parts", "key_parts", 32,
            lambda: {
                "part": np.full(KEYS, -1, np.int32), "counts": np.zeros(3, np.int32),
                "scale": np.array([np.nan, 2, np.nan, 0.5, -np.inf, np.nan], np.float32),
            },
            partial(parts_expected, group),
            defines=defines(
                Tiles(BLOCK_Q, KEYS, 1), Features("float16", 8, group_q=1, group_kv=group)
            ),
        )
        for group in (1, 4, 16, 48, 1 << 30)
    ),
    Prim(
        "work_tile", "work_tile", "tiles", 32, tiles_arguments, tiles_expected,
        defines=defines(Tiles(BLOCK_Q, 16, 1), Features("float16", HEAD_DIM, vec=8)),
    ),
    Prim(
        "output", "output", "copy_engine", 32, copied_arguments, copied_expected, defines=OF_O,
        hopper=True,
    ),
    Prim(
        "output_rows", "output", "own_warp", 32, stored_arguments, stored_expected, defines=OF_O,
        hopper=True,
    ),
    Prim(
        "output_registers", "output", "registers", 32, stored_arguments, stored_expected,
        defines=OF_O, hopper=True,
    ),
    Prim(
        "channel_scales", "channel_scales", "channel_scales", 64, scales_arguments,
        scales_expected, relative=2.0**-20, absolute=2.0**-20,
        defines=defines(
            Tiles(16, 16, 2),
            Features("float16", HEAD_DIM, vec=8, group_v=2**30, p_type="u8"),
        ),
    ),
]  # fmt: skip
