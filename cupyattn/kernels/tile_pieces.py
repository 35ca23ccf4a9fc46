"""Distribute tiles of one size over the blocks of a persistent kernel.

Blocks take whole tiles, wave by wave. If the last wave would leave blocks idle, its tiles are cut
into pieces along the keys. The sizes of a call, including batch and heads, decide which rows come
from pieces. This changes only how float32 sums are rounded (docs/MATH_REFERENCE.md [L32]).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.kernels.numerics import MOST_PIECES
from cupyattn.kernels.tiles import Tiles

#: Least number of steps of up to `STEP_KEYS` keys that cutting must save: merging the pieces in a
#: second kernel costs about ten. A tile has at most MOST_PIECES + 1 pieces, one for each lane of a
#: warp.
LEAST_SAVED, STEP_KEYS = 16, 128
#: Numbers of steps stay well within an int.
MOST_STEPS = 2**30


class Pieces(NamedTuple):
    """The tiles that are cut, and the cuts.

    Parameters
    ----------
    whole, cut : int
        Number of whole tiles, which come first, and of tiles that are cut.
    steps : int
        Number of steps over the keys of a tile.
    share : int
        Number of consecutive steps that a block takes of the cut tiles, one tile after another.
    """

    whole: int
    cut: int
    steps: int
    share: int

    @property
    def slots(self) -> int:
        """Number of places for results of pieces: one more for every block and for every tile."""
        return -(-self.cut * self.steps // self.share) + self.cut - 1 if self.cut else 0

    @property
    def params(self) -> dict[str, Any]:
        """``struct PieceParams``, buffers by name."""
        sizes = {"whole": self.whole, "cut": self.cut, "steps": self.steps, "share": self.share}
        return sizes | {"O": "piece_O", "rows": "piece_rows"} if self.cut else sizes

    def buffers(self, tiles: Tiles, head_dim: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of the scratch memory."""
        if not self.cut:
            return ()
        rows = self.slots, tiles.block_q
        return (("piece_O", (*rows, head_dim), "float32"), ("piece_rows", (*rows, 3), "float32"))


def share_out(tiles: int, steps: int, blocks: int, step_keys: int = STEP_KEYS) -> Pieces:
    """Cut the tiles of the last wave so that all blocks take equally many of their steps.

    Parameters
    ----------
    tiles, steps, blocks : int
        Tiles, the steps of each, and blocks that take them.
    step_keys : int
        Keys of a step.

    Examples
    --------
    >>> share_out(1376, 205, 132)  # 10.4 waves
    Pieces(whole=1320, cut=56, steps=205, share=87)
    >>> share_out(1320, 205, 132)
    Pieces(whole=1320, cut=0, steps=205, share=205)
    """
    cut = tiles % blocks
    share = max(-(-cut * steps // blocks), -(-steps // MOST_PIECES), 1)
    least = max(1, LEAST_SAVED // max(1, step_keys // STEP_KEYS))
    if not cut or steps - share < least or max(tiles, blocks) * steps > MOST_STEPS:
        return Pieces(tiles, 0, max(steps, 1), max(steps, 1))
    return Pieces(tiles - cut, cut, steps, share)
