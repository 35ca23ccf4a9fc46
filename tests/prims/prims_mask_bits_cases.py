"""The kernels of ``prims/score/mask_bits.cuh``: packed masks, and the steps that they leave."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import SCORE_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, eighths, rng

#: Lane 4 g + t of a warp.
LANES_G, LANES_T = np.divmod(np.arange(32), 4)

MASK_HEADS, MASK_TILES, KEY_TILES, BLOCK_Q = 2, 2, 2, 32


def packed_keys(mask: np.ndarray, block_kv: int) -> np.ndarray:
    """Return [..., step, t]: bit 2 i + j of a lane's word belongs to key 8 i + 2 t + j."""
    steps = mask.reshape(*mask.shape[:-1], -1, block_kv)
    words = np.zeros((*steps.shape[:-1], 4), np.uint32)
    for key in range(block_kv):
        i, t, j = key // 8, key % 8 // 2, key % 2
        words[..., t] |= steps[..., key].astype(np.uint32) << np.uint32(2 * i + j)
    return words


def packed_rows(mask: np.ndarray, block_kv: int) -> np.ndarray:
    """Return [..., tile of rows, step, 16 rows, lane, 2]: the words of rows g and g + 8."""
    rows = packed_keys(mask, block_kv)  # [..., row, step, t]
    tiles = rows.reshape(*mask.shape[:-2], -1, BLOCK_Q // 16, 16, *rows.shape[-2:])
    both = np.stack([tiles[..., LANES_G + h * 8, :, LANES_T] for h in (0, 1)])  # rows' axes first
    return np.ascontiguousarray(np.moveaxis(both, [0, 1], [-1, -2]).swapaxes(-4, -3))


def mask_arguments(kind: str, block_kv: int) -> Arguments:
    mask = some_mask(kind, block_kv)
    rows = kind == "rows"
    values = {  # a mask of rows is the same for both batch entries, one of keys for all heads
        "mask_batch": 0 if rows else 1, "mask_head": MASK_TILES if rows else 0,
        "mask_q": int(rows), "key_tiles": KEY_TILES,
    }  # fmt: skip
    blocks = 2 * MASK_HEADS * MASK_TILES * KEY_TILES
    return {
        "s": pack(SCORE_PARAMS, values, {}),
        "bits": packed_rows(mask, block_kv) if rows else packed_keys(mask, block_kv),
        "x": eighths(BLOCK_Q, block_kv),
        "S": np.zeros((blocks, BLOCK_Q, block_kv), np.float32),
    }


def some_mask(kind: str, block_kv: int) -> np.ndarray:
    """Return a mask of [head, row, key] or of [batch, key]."""
    length = KEY_TILES * block_kv
    shape = (MASK_HEADS, MASK_TILES * BLOCK_Q, length) if kind == "rows" else (2, length)
    return rng().random(shape) < 0.5


def mask_expected(kind: str, block_kv: int, /, x: np.ndarray, S: np.ndarray, **_: Any) -> Results:
    mask = some_mask(kind, block_kv)
    mask = mask[None] if kind == "rows" else mask[:, None, None]
    mask = np.broadcast_to(mask, (2, MASK_HEADS, MASK_TILES * BLOCK_Q, KEY_TILES * block_kv))
    tiles = mask.reshape(2, MASK_HEADS, MASK_TILES, BLOCK_Q, KEY_TILES, block_kv)
    by_block = tiles.swapaxes(3, 4).reshape(S.shape)
    return {"S": np.where(by_block, x, np.float32(-np.inf))}


def parts_arguments() -> Arguments:
    step = np.array([0, 1, 48, 49, 126, 127, 2**30, 2**30 + 1], np.int32)
    return {"step": step, "first": np.full(8, -7, np.int32), "mixed": np.full(8, -7, np.int32)}


def parts_expected(masked: bool, /, step: np.ndarray, **_: Any) -> Results:
    mixed = step % 2 * masked
    return {"first": step - mixed, "mixed": mixed}


#: Tiles of keys that each of the lists has, by batch entry, head and tile of query rows; 7 in all.
LISTED = (
    ((0, 1, 2, 3, 4, 5, 6), (1, 3, 4)), ((6,), ()), ((0, 2, 6), (5, 6)), ((0,), (2, 3, 5)),
)  # fmt: skip
#: Keys that a range leaves of a list, in steps of 48: all; from and to the middle and the edge of a
#: step; none.
RANGES = ((0, 336), (100, 250), (144, 240), (143, 241), (95, 97), (250, 250), (330, 400))


def steps_arguments(placed: bool) -> Arguments:
    lists = [tiles for head in LISTED for tiles in head]
    listed = np.full((len(lists), 9), 999, np.int32)
    for row, tiles in zip(listed, lists, strict=True):
        row[:2] = len(tiles), 0  # none is whole
        row[2 : 2 + len(tiles)] = [2 * tile + is_mixed_tile(tile) for tile in tiles]
    values = {"list_batch": 4, "list_head": 2, "list_q": 1, "key_tiles": 7}
    place = [
        (batch, head, q0, *keys)
        for batch in (0, 1)
        for head in (0, 1)
        for q0 in (0, BLOCK_Q)
        for keys in (RANGES if placed else RANGES[:1])
    ]
    return {
        "given": pack(SCORE_PARAMS, values, {}), "listed": listed,
        "place": np.array(place, np.int32), "count": np.zeros(len(place), np.int32),
        "taken": np.zeros((len(place), 8), np.int32),
    }  # fmt: skip


def is_mixed_tile(tile: int) -> bool:
    return tile % 3 != 1


def steps_expected(place: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    count, taken = [], []
    for batch, head, q0, begin, end in place.tolist():
        tiles = LISTED[2 * batch + head][q0 // BLOCK_Q]
        # A step is taken where one of its keys is in the range, and where it begins before its end.
        held = [48 * t + is_mixed_tile(t) for t in tiles if 48 * t < end and 48 * (t + 1) > begin]
        count.append(max(1, len(held)))
        taken.append(held + [7 * 48] * (8 - len(held)))
    return {"count": np.array(count, np.int32), "taken": np.array(taken, np.int32)}


def macros(block_kv: int, kind: str, placed: bool = False) -> tuple[tuple[str, int], ...]:
    features = Features(
        "float16", 64, causal=placed, window=placed, scored=True, mask=bool(kind), mask_kind=kind
    )
    return defines(Tiles(BLOCK_Q, block_kv, 2), features)


MASK_BITS_PRIMS = [
    *(
        Prim(
            f"mask_bits-{kind}", "mask_bits", "masked", 64, partial(mask_arguments, kind, block_kv),
            partial(mask_expected, kind, block_kv), grid=16, defines=macros(block_kv, kind, placed),
        )
        for kind, block_kv, placed in (("rows", 128, False), ("keys", 48, True))
    ),
    *(
        Prim(
            f"mask_bits-parts-{kind or 'none'}", "mask_bits", "parts", 8, parts_arguments,
            partial(parts_expected, bool(kind)), defines=macros(48, kind, bool(kind)),
        )
        for kind in ("", "keys")
    ),
    *(
        Prim(
            f"mask_bits-steps-{'placed' if placed else 'all'}", "mask_bits", "steps",
            len(steps_arguments(placed)["count"]), partial(steps_arguments, placed), steps_expected,
            defines=macros(48, "keys" if placed else "", placed),
        )
        for placed in (False, True)
    ),
]  # fmt: skip
