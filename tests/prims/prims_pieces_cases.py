"""The kernel of ``prims/schedule/pieces.cuh``: the tiles and pieces of tiles of each block."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.tile_pieces import Pieces, share_out
from cupyattn.plans.structs import PIECE_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results

BLOCKS, NO_TILE = 32, 2**31 - 1


def arguments(found: Pieces) -> Arguments:
    params = {name: x for name, x in found.params.items() if not isinstance(x, str)}
    return {
        "p": pack(PIECE_PARAMS, params, {}),
        "taken": np.zeros((BLOCKS, found.whole // BLOCKS + 3, 4), np.int32),
    }


def expected(found: Pieces, /, taken: np.ndarray, **_: Any) -> Results:
    """Whole tiles in waves; then the steps of the others in one row, a share to each block."""
    whole, steps = found.whole, found.steps
    rows: list[list[list[int]]] = []
    slot = -1
    for block in range(BLOCKS):
        row = [[tile, 0, steps, -1] for tile in range(block, whole, BLOCKS)]
        mine = range(found.cut * steps)[block * found.share : (block + 1) * found.share]
        for tile in sorted({step // steps for step in mine}):
            of_tile = [step % steps for step in mine if step // steps == tile]
            slot = block + tile
            row.append([whole + tile, of_tile[0], len(of_tile), slot])
        rows.append(row)
    assert slot < max(1, found.slots)
    result = np.full_like(taken, NO_TILE)
    for block, row in enumerate(rows):
        if row:
            result[block, : len(row)] = row
    result[:, :, 1:][result[:, :, 0] == NO_TILE] = (0, steps, -1)
    return {"taken": result}


PIECES_PRIMS = [
    Prim(
        f"pieces-{tiles}-{steps}", "pieces", "pieces", BLOCKS, partial(arguments, found),
        partial(expected, found)
    )
    for tiles, steps in ((70, 40), (31, 33), (33, 500), (64, 90), (5, 64))
    for found in (share_out(tiles, steps, BLOCKS),)
]  # fmt: skip
