"""How the keys of a call with few query rows are split: which slices, and when.

The slices follow from the sizes of a call alone, so that its result is the same on every run and on
every device. Kernel (``kernels_cu/split/``), mirror and bound take them from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cupyattn.kernels.tiles import Tiles

#: Thread blocks that a call is split into where it has fewer by itself: two, which is what their
#: shared memory has room for, on each of the 132 SMs of an H100 or H200 SXM.
BLOCKS = 264
#: Blocks up to which tiles of 16 rows stay ahead of tiles of 32: they find K and V in the L2 cache
#: the second time, and wait less for their own products (experiments/results/decode.json).
NARROW_BLOCKS = BLOCKS
#: Queries up to which the rows of all query heads that share a key head are packed into tiles.
MOST_QUERIES = 16
#: Keys from which on it pays: fewer are read sooner than a second kernel starts.
LEAST_KEYS = 512
#: Least keys of a slice, for each row of its tile: what it leaves to be merged, float32, is then a
#: quarter of what it read. So it goes on up to ENOUGH_KEYS, half at 128 rows: fewer slices would
#: leave the tensor cores of some SMs with nothing to do, and so many rows keep those of all busy.
KEYS_PER_ROW = 4
ENOUGH_KEYS = 256
#: Rows whose Q and O the registers of a warp hold, up to head_dim 128 and beyond;
#: kernels_cu/forms/split/attn_fa_tc.cu has the same numbers.
WARP_ROWS, WIDE_WARP_ROWS = 32, 16
#: Those of merge_splits.cu, which has no tiles but warps.
MERGE_TILES = Tiles(16, 16, 16, 2)
#: Parts that a warp of it brings together, in one round of waiting for memory.
MERGED_AT_ONCE = 4


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
    block_slices : int
        Slices that a thread block takes, and brings together.
    """

    first: int
    end: int
    slice_keys: int
    slices: int
    block_slices: int

    @property
    def parts(self) -> int:
        """Thread blocks that share the keys of a head; one has the result."""
        return -(-self.slices // self.block_slices)

    @property
    def meetings(self) -> int:
        """How often what a slice came to meets that of others: in its block, then of blocks.

        Examples
        --------
        >>> [Splits(0, 64 * n, 64, n, 4).meetings for n in (1, 2, 4, 5)]
        [0, 1, 1, 2]
        """
        return (min(self.slices, self.block_slices) > 1) + (self.parts > 1)

    @property
    def row_warps(self) -> int:
        """Warps that bring the parts of a row together, a power of two.

        Examples
        --------
        >>> [Splits(0, 64 * n, 64, n, 1).row_warps for n in (1, 8, 9, 33, 128, 999)]
        [1, 2, 4, 16, 16, 16]
        """
        wanted = -(-self.parts // MERGED_AT_ONCE)
        return min(MERGE_TILES.num_warps, 1 << (wanted - 1).bit_length())

    def merge_blocks(self, rows: int) -> int:
        """Thread blocks that bring together so many rows, those of all heads and batch entries."""
        return -(-rows // (MERGE_TILES.num_warps // self.row_warps))

    def params(self, rows: int) -> dict[str, str | int]:
        """Return what `cupyattn.plans.structs.SPLIT_PARAMS` packs, rows being those of a key
        head."""
        sizes: dict[str, str | int] = {
            "first_key": self.first, "end_key": self.end, "slice_keys": self.slice_keys,
            "parts": self.parts, "rows": rows, "row_warps": self.row_warps,
        }  # fmt: skip
        return sizes | {"O": "part_O", "M": "part_M", "l": "part_l"} if self.parts > 1 else sizes

    def buffers(
        self, lse_shape: tuple[int, ...], head_dim: int
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what is left to be merged: names, shapes and types."""
        if self.parts == 1:
            return []
        shape = (self.parts, *lse_shape)
        shapes = {"part_O": (*shape, head_dim), "part_M": shape, "part_l": shape}
        return [(name, shape, "float32") for name, shape in shapes.items()]

    def describe(self, rows: int, reads: int) -> str:
        """Say how often K and V are read for so many rows, and in which slices."""
        times = "once" if reads == 1 else f"{reads} times"
        return (
            f"{rows} query rows share each key head, whose K and V are read {times}, in "
            f"{self.slices} slices of {self.slice_keys} keys, {self.block_slices} to a block"
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first key of each slice and the one past its last."""
        for i in range(self.slices):
            begin = self.first + i * self.slice_keys
            yield begin, max(begin, min(begin + self.slice_keys, self.end))


def applies(len_q: int, len_kv: int) -> bool:
    """Whether a call of these lengths is worth splitting."""
    return 0 < len_q <= MOST_QUERIES and len_kv >= LEAST_KEYS


def shared_rows(heads: int, heads_kv: int, len_q: int) -> int:
    """Rows of all query heads that share a key head, for which its K and V are read together."""
    return heads // max(1, heads_kv) * len_q


def wanted_rows(batch: int, heads: int, heads_kv: int, len_q: int) -> int:
    """Rows that the tiles of a call should hold: those that share a key head.

    But not one tile of 32 where two of 16 are no more than `NARROW_BLOCKS` in all.

    Examples
    --------
    >>> wanted_rows(16, 64, 8, 4), wanted_rows(64, 64, 8, 4), wanted_rows(1, 64, 8, 16)
    (16, 32, 128)
    """
    rows = shared_rows(heads, heads_kv, len_q)
    return 16 if rows <= 32 and 2 * batch * heads_kv <= NARROW_BLOCKS else rows


def fitting(rising: Sequence[Tiles], rows: int) -> Tiles:
    """Return the tiles of a call: the first that hold so many rows, or the last.

    Examples
    --------
    >>> fitting((Tiles(16, 16, 4, 3), Tiles(32, 16, 4, 3)), 17).block_q
    32
    """
    return next((tiles for tiles in rising if tiles.block_q >= rows), rising[-1])


def block_slices(tiles: Tiles, head_dim: int) -> int:
    """Slices that a thread block takes: the warps that the rows of a tile need share one.

    Examples
    --------
    >>> [block_slices(Tiles(block_q, 16, 4, 3), 128) for block_q in (16, 32, 64, 128)]
    [4, 4, 2, 1]
    """
    most = WARP_ROWS if head_dim <= 128 else WIDE_WARP_ROWS
    return tiles.num_warps // (tiles.block_q // min(tiles.block_q, most))


def split(
    sizes: tuple[int, int, int, int, int, int],
    limits: tuple[int | None, int | None],
    tiles: Tiles,
) -> Splits:
    """Split the keys of a call.

    Parameters
    ----------
    sizes : (int, int, int, int, int, int)
        batch, heads, heads_kv, len_q, len_kv, head_dim.
    limits : (int or None, int or None)
        Row i attends key j only where ``i + first <= j <= i + last``, as
        `cupyattn.problem.checks.check_limits` returns them.
    tiles : Tiles
        Of the split form.

    Examples
    --------
    >>> split((1, 32, 8, 1, 32768, 128), (None, None), Tiles(16, 16, 4, 3))
    Splits(first=0, end=32768, slice_keys=256, slices=128, block_slices=4)
    >>> split((1, 64, 8, 16, 32768, 128), (None, None), Tiles(128, 16, 4, 8))
    Splits(first=0, end=32768, slice_keys=1008, slices=33, block_slices=1)
    """
    batch, heads, heads_kv, len_q, len_kv, head_dim = sizes
    first, last = limits
    begin = 0 if first is None else max(0, first) // tiles.block_kv * tiles.block_kv
    end = len_kv if last is None else max(0, min(len_kv, len_q + last))
    row_tiles = -(-shared_rows(heads, heads_kv, len_q) // tiles.block_q)
    blocks = max(1, batch * heads_kv * row_tiles)
    at_once = block_slices(tiles, head_dim)
    wanted = at_once * max(1, BLOCKS // blocks)
    least = min(KEYS_PER_ROW * tiles.block_q, ENOUGH_KEYS)
    keys = max(least, -(-(end - begin) // wanted))
    keys = -(-keys // tiles.block_kv) * tiles.block_kv
    return Splits(begin, end, keys, max(1, -(-(end - begin) // keys)), at_once)
