"""The cases of ``prims/io/rope.cuh``: rows that are turned as they are loaded, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import BY_COLUMN, ROPE_PAIRS, Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, pack
from cupyattn.problem.row_preparation import Rope
from tests.prims.prim import Arguments, Prim, Results, defines, rng

ROWS, ROWS_VALID, POSITION = 16, 11, 5


def tables(positions: int, head_dim: int, rope: str) -> Arguments:
    """Cosines and sines of angles; of one for each column, if `rope` says so."""
    count = head_dim if rope.endswith(BY_COLUMN) else head_dim // 2
    angles = rng().uniform(0, 7, (positions, count))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def turning(cos: Any, sin: Any, rope: str, position: int) -> Rope:
    """The rotation of rows from a position on that a kernel's feature `rope` means."""
    interleaved = rope.startswith("interleaved")
    return Rope(cos, sin, interleaved, position, by_column=rope.endswith(BY_COLUMN))


def placed_arguments(dtype: str, head_dim: int, rope: str) -> Arguments:
    stride = head_dim + 8
    x = np.full((ROWS, stride), np.nan)
    x[:ROWS_VALID, :head_dim] = rng().normal(size=(ROWS_VALID, head_dim))
    return {
        "p": pack(ATTN_PARAMS, {"rope_offset_q": POSITION}, {}),
        **tables(POSITION + ROWS_VALID, head_dim, rope),
        "X": x.astype(STORAGE[dtype]),
        "stride": np.array([stride], np.int64),
        "tile": np.full((ROWS, head_dim + 1), np.nan, np.float32),
    }


def placed_expected(
    head_dim: int, rope: str, /, cos: Any, sin: Any, X: Any, tile: np.ndarray, **_: Any
) -> Results:
    rows = X[None, None, :ROWS_VALID, :head_dim]
    if rope:
        rows, _ = turning(cos, sin, rope, POSITION).turned(rows, rows[:, :, :0])
    written = np.zeros_like(tile)
    written[:, head_dim] = -1
    written[:ROWS_VALID, :head_dim] = rows[0, 0].astype(np.float32)
    return {"tile": written}


def rope_prims() -> Iterator[Prim]:
    """Every width of access of every storage type, in both ways to pair; and without rope."""
    for dtype, head_dim, vec in (
        ("float16", 32, 8), ("float16", 24, 8), ("float16", 6, 2), ("float16", 10, 1),
        ("bfloat16", 80, 8), ("float32", 24, 4), ("float32", 2, 1),
    ):  # fmt: skip
        for rope in ROPE_PAIRS if (dtype, vec) != ("bfloat16", 8) else ("", *ROPE_PAIRS):
            yield Prim(
                f"placed-{rope or 'plain'}-{dtype}-{head_dim}-{vec}", "rope", "placed", 64,
                partial(placed_arguments, dtype, head_dim, rope),
                partial(placed_expected, head_dim, rope),
                defines=defines(
                    Tiles(16, 16, 2), Features(dtype, head_dim, vec=vec, rope=rope)
                ),
            )  # fmt: skip
