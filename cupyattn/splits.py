"""How the keys of a call with few query rows are split: which slices, and when.

The slices follow from the sizes of a call alone, so that its result is the same on every run and on
every device. Kernel (``kernels_cu/split/``), mirror and bound take them from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupyattn.tiles import Tiles

#: Thread blocks that a call is split into where it has fewer by itself: two, which is what their
#: shared memory has room for, on each of the 132 SMs of an H100 or H200 SXM.
BLOCKS = 264
#: Query rows up to which reading K and V is all that takes time: one mma holds them.
MOST_ROWS = 16
#: Keys from which on it pays: fewer are read sooner than a second kernel starts.
LEAST_KEYS = 512
#: Least keys of a slice. What one of 64 leaves to be merged is, for 4 rows, an eighth of what it
#: read.
LEAST_SLICE_KEYS = 64


@dataclass(frozen=True)
class Splits:
    """Slices of the keys that some row of a call may attend to by its place.

    Parameters
    ----------
    first, end : int
        Those keys, from a multiple of the step on.
    slice_keys : int
        Keys of a slice, the last one excepted; a multiple of the step.
    slices : int
        At least one, which may be empty.
    """

    first: int
    end: int
    slice_keys: int
    slices: int

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first key of each slice and the one past its last."""
        for i in range(self.slices):
            begin = self.first + i * self.slice_keys
            yield begin, max(begin, min(begin + self.slice_keys, self.end))


def applies(len_q: int, len_kv: int) -> bool:
    """Whether a call of these lengths is worth splitting."""
    return 0 < len_q <= MOST_ROWS and len_kv >= LEAST_KEYS


def row_tiles(heads: int, heads_kv: int, len_q: int, tiles: Tiles) -> int:
    """Tiles that the rows of all query heads of one key head take, packed."""
    return -(-(heads // max(1, heads_kv)) * len_q // tiles.block_q)


def split(
    sizes: tuple[int, int, int, int, int],
    limits: tuple[int | None, int | None],
    tiles: Tiles,
) -> Splits:
    """Split the keys of a call.

    Parameters
    ----------
    sizes : (int, int, int, int, int)
        batch, heads, heads_kv, len_q, len_kv.
    limits : (int or None, int or None)
        Row i attends key j only where ``i + first <= j <= i + last``, as
        `cupyattn.checks.check_limits` returns them.
    tiles : Tiles
        Of the split form: each warp takes slices of its own.

    Examples
    --------
    >>> split((1, 32, 8, 1, 32768), (None, None), Tiles(16, 16, 4, 3))
    Splits(first=0, end=32768, slice_keys=256, slices=128)
    """
    batch, heads, heads_kv, len_q, len_kv = sizes
    first, last = limits
    begin = 0 if first is None else max(0, first) // tiles.block_kv * tiles.block_kv
    end = len_kv if last is None else max(0, min(len_kv, len_q + last))
    blocks = batch * heads_kv * row_tiles(heads, heads_kv, len_q, tiles)
    wanted = tiles.num_warps * max(1, BLOCKS // max(1, blocks))
    keys = max(LEAST_SLICE_KEYS, -(-(end - begin) // wanted))
    keys = -(-keys // tiles.block_kv) * tiles.block_kv
    return Splits(begin, end, keys, max(1, -(-(end - begin) // keys)))
