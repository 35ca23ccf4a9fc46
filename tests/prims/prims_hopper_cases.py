"""Kernels of Hopper's features: barriers, the copy engine, registers of warpgroups, ``wgmma``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.plans.records import TensorMap
from tests.prims.prim import Arguments, Prim, normal, rng
from tests.prims.prims_mma_cases import TILE, ldmatrix_expected, swizzle
from tests.prims.prims_wgmma_cases import wgmma_prims

BOX_ROWS = 16
#: (column, row, head, batch) of boxes of 64 columns: inside, over each end, before the first row,
#: and wholly outside.
BOXES = (
    (0, 0, 0, 0), (0, 2, 1, 1), (64, 0, 2, 0), (0, 16, 0, 1), (64, 16, 1, 0), (0, -3, 2, 1),
    (0, 0, 3, 0),
)  # fmt: skip


def ring_arguments() -> Arguments:
    x = rng().integers(-1000, 1000, (9, 32)).astype(np.int32)
    return {"x": x, "y": np.zeros_like(x)}


def turns_arguments() -> Arguments:
    return {"start": np.full(1, 5, np.int32), "seen": np.zeros((6, 96), np.int32)}


def turns_expected(start: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Warp w is the (3 round + w)-th to have its turn, and sees the number of those before it."""
    turn = 3 * np.arange(6)[:, None] + np.arange(96) // 32
    return {"seen": (start + turn).astype(np.int32)}


def boxes_arguments(dtype: str) -> Callable[[], Arguments]:
    """An array in a larger buffer that is all ones, by bits, where no box may look."""
    shape, parent = (2, 3, 21, 72), (2, 4, 25, 80)
    code = np.dtype("u1" if dtype == "int8" else "u2")
    columns = 128 // code.itemsize

    def arguments() -> Arguments:
        X = np.full(parent, np.iinfo(code).max, code)
        X[tuple(map(slice, shape))] = rng().integers(0, np.iinfo(code).max, shape)
        box = (1, 1, BOX_ROWS, columns)
        at = np.array([(column * columns // 64, *rest) for column, *rest in BOXES], np.int32)
        return {
            "X": X,
            "X_map": TensorMap("X", dtype, shape, X.strides[:-1], box),
            "at": at,
            "tile": np.zeros((len(BOXES), BOX_ROWS * 128), np.uint8),
            "elected": np.zeros(1, np.int32),
        }

    return arguments


def boxes_expected(
    X: np.ndarray, X_map: TensorMap, at: np.ndarray, tile: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    array = X[tuple(map(slice, X_map.shape))]
    _, _, rows, columns = X_map.box
    chunks = np.zeros((len(at), rows * 8, 16), np.uint8)
    for box, (column, row, head, batch) in zip(chunks, at, strict=True):
        plain = np.zeros((rows, columns), X.dtype)
        for i, j in np.ndindex(plain.shape):
            index = (batch, head, row + i, column + j)
            if all(0 <= k < n for k, n in zip(index, array.shape, strict=True)):
                plain[i, j] = array[index]
        for i, j in np.ndindex(rows, 8):
            box[swizzle(8, i, j)] = plain.view(np.uint8)[i, 16 * j : 16 * j + 16]
    return {"tile": chunks.reshape(tile.shape), "elected": np.ones(1, np.int32)}


def to_both_arguments() -> Arguments:
    given = boxes_arguments("float16")()
    given.pop("elected")
    return given | {"tile": np.zeros((2, *given["tile"].shape), np.uint8)}


def to_both_expected(tile: np.ndarray, **given: Any) -> dict[str, np.ndarray]:
    once = boxes_expected(tile=tile[0], **given)["tile"]
    return {"tile": np.stack([once, once])}


def stores_arguments() -> Arguments:
    loaded = boxes_arguments("float16")()
    Y = loaded["X"]
    tile = rng().integers(0, 256, loaded["tile"].shape).astype(np.uint8)
    at = np.abs(loaded["at"])  # no box may be stored from before the array
    return {"Y": Y, "Y_map": replace(loaded["X_map"], buffer="Y"), "at": at, "tile": tile}


def stores_expected(
    Y: np.ndarray, Y_map: TensorMap, at: np.ndarray, tile: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    Y = Y.copy()
    array = Y[tuple(map(slice, Y_map.shape))]
    _, _, rows, columns = Y_map.box
    for box, (column, row, head, batch) in zip(tile.reshape(len(at), -1, 16), at, strict=True):
        places = [[swizzle(8, i, j) for j in range(8)] for i in range(rows)]
        plain = box[places].view(Y.dtype).reshape(rows, columns)
        for i, j in np.ndindex(plain.shape):
            index = (batch, head, row + i, column + j)
            if all(0 <= k < n for k, n in zip(index, array.shape, strict=True)):
                array[index] = plain[i, j]
    return {"Y": Y}


def counter_arguments() -> Arguments:
    return {name: np.zeros(count, np.int32) for name, count in
            (("counter", 1), ("written", 1), ("order", 8))}  # fmt: skip


def counter_expected(**_: Any) -> dict[str, np.ndarray]:
    eight = np.array([8], np.int32)
    return {"counter": eight, "written": eight, "order": np.arange(8, dtype=np.int32)}


def published_sums(**_: Any) -> dict[str, np.ndarray]:
    """Return the words of published numbers, each of which has a bit above its float32."""
    sums = np.arange(8, dtype=np.float32).cumsum(dtype=np.float32)
    return {"published": sums.view(np.uint32) + (np.uint64(1) << np.uint64(32))}


def hopper_prims() -> Iterator[Prim]:
    yield Prim("counter", "counter", "turns", 256, counter_arguments, counter_expected)
    yield Prim(
        "published", "counter", "sums", 256, lambda: {"published": np.zeros(8, np.uint64)},
        published_sums,
    )  # fmt: skip
    yield Prim(
        "mbarrier", "mbarrier", "ring", 64, ring_arguments, lambda x, y: {"y": x[:, ::-1]},
        hopper=True,
    )  # fmt: skip
    yield Prim(
        "named_barrier", "named_barrier", "turns", 96, turns_arguments, turns_expected
    )  # fmt: skip
    for dtype in ("float16", "bfloat16", "int8"):
        yield Prim(
            f"tma-{dtype}", "tma", "boxes", 32, boxes_arguments(dtype), boxes_expected,
            hopper=True,
        )  # fmt: skip
    yield Prim(
        "tma_to_both", "tma", "boxes_to_both", 32, to_both_arguments, to_both_expected, grid=2,
        defines=(("CFG_SPLITS", 2),), hopper=True,
    )  # fmt: skip
    yield Prim(
        "tma_store", "tma", "stores", 32, stores_arguments, stores_expected, hopper=True
    )  # fmt: skip
    yield Prim(
        "tma_bytes", "tma", "bytes", 32,
        lambda: {
            "from": rng().normal(size=64).astype(np.float32), "to": np.full(64, -7, np.float32)
        },
        lambda **given: {
            "to": np.r_[np.full(4, -1), given["from"][8:48], np.full(20, -1)].astype(np.float32)
        },
        hopper=True,
    )  # fmt: skip
    yield Prim(
        "stmatrix", "wgmma", "stmatrix", 32,
        lambda: {
            "fragment": ldmatrix_expected(TILE)["plain"], "tile": np.zeros((16, 16), np.uint16),
        },
        lambda **_: {"tile": TILE}, hopper=True,
    )  # fmt: skip
    yield from wgmma_prims()
    yield Prim(
        "registers", "wgmma", "registers", 384,
        lambda: {"x": normal(200, 256), "y": np.zeros((200, 256), np.float32)},
        lambda x, y: {"y": x[::-1]}, hopper=True,
    )  # fmt: skip
