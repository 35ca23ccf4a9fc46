"""Split the keys of a call with few query rows into slices.

The slices depend only on the sizes of a call, so its result is the same on every run and on every
device. Kernel (``kernels_cu/forms/split/``), mirror and bound take them from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cupyattn.kernels.tiles import Tiles

#: Number of thread blocks to split a call into when it has too few. It is two on each of the 132
#: SMs of an H100 or H200 SXM, as many as fit in shared memory.
BLOCKS = 264
#: Number of blocks up to which tiles of 16 rows are faster than tiles of 32. Their second read of K
#: and V comes from the L2 cache, and they wait less for products (experiments/results/decode.json).
NARROW_BLOCKS = BLOCKS
#: Number of queries up to which a tile packs the rows of all query heads that share a key head.
MOST_QUERIES = 16
#: Least number of keys worth splitting: reading fewer takes less time than starting a second
#: kernel.
LEAST_KEYS = 512
#: Least number of keys of a slice per row of its tile. The float32 result of a slice is then a
#: quarter of the bytes that it read. The number grows up to ENOUGH_KEYS, half of that at 128 rows:
#: with fewer slices some SMs would be idle.
KEYS_PER_ROW = 4
ENOUGH_KEYS = 256
#: Number of rows whose Q and O fit in the registers of a warp, up to head_dim 128 and past it. The
#: same numbers are in kernels_cu/forms/split/attn_fa_tc.cu.
WARP_ROWS, WIDE_WARP_ROWS = 32, 16
#: Warps of merge_splits.cu, which has no tiles.
MERGE_TILES = Tiles(16, 16, 16, 2)
#: Number of parts that a warp of merge_splits.cu merges after one wait for memory.
MERGED_AT_ONCE = 4


class Splits(NamedTuple):
    """Slices of the keys to which some row of a call may attend, by its position.

    Parameters
    ----------
    first, end : int
        First key, a multiple of the step, and end of these keys.
    slice_keys : int
        Keys of each slice but the last; a multiple of the step.
    slices : int
        Number of slices, at least one; the only slice may be empty.
    block_slices : int
        Slices that a thread block computes and merges.
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
        """Number of merges of a slice's result: first in its block, then between blocks.

        Examples
        --------
        >>> [Splits(0, 64 * n, 64, n, 4).meetings for n in (1, 2, 4, 5)]
        [0, 1, 1, 2]
        """
        return (min(self.slices, self.block_slices) > 1) + (self.parts > 1)

    @property
    def row_warps(self) -> int:
        """Number of warps that merge the parts of a row, a power of two.

        Examples
        --------
        >>> [Splits(0, 64 * n, 64, n, 1).row_warps for n in (1, 8, 9, 33, 128, 999)]
        [1, 2, 4, 16, 16, 16]
        """
        wanted = -(-self.parts // MERGED_AT_ONCE)
        return min(MERGE_TILES.num_warps, 1 << (wanted - 1).bit_length())

    def merge_blocks(self, rows: int) -> int:
        """Number of thread blocks that merge `rows` rows, over all heads and batch entries."""
        return -(-rows // (MERGE_TILES.num_warps // self.row_warps))

    def params(self, rows: int) -> dict[str, str | int]:
        """Return values for `cupyattn.plans.structs.SPLIT_PARAMS`, for the rows of a key head."""
        sizes: dict[str, str | int] = {
            "first_key": self.first, "end_key": self.end, "slice_keys": self.slice_keys,
            "parts": self.parts, "rows": rows, "row_warps": self.row_warps,
        }  # fmt: skip
        return sizes | {"O": "part_O", "M": "part_M", "l": "part_l"} if self.parts > 1 else sizes

    def buffers(
        self, lse_shape: tuple[int, ...], head_dim: int
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the buffers of partial results: names, shapes and types."""
        if self.parts == 1:
            return []
        shape = (self.parts, *lse_shape)
        shapes = {"part_O": (*shape, head_dim), "part_M": shape, "part_l": shape}
        return [(name, shape, "float32") for name, shape in shapes.items()]

    def describe(self, rows: int, reads: int) -> str:
        """Describe the slices, and how often K and V are read for the rows of a call."""
        times = "once" if reads == 1 else f"{reads} times"
        return (
            f"{rows} query rows share each key head, whose K and V are read {times}, in "
            f"{self.slices} slices of {self.slice_keys} keys, {self.block_slices} to a block"
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first key of each slice and the key past its last."""
        for i in range(self.slices):
            begin = self.first + i * self.slice_keys
            yield begin, max(begin, min(begin + self.slice_keys, self.end))


def applies(len_q: int, len_kv: int) -> bool:
    """Whether a call of these lengths is worth splitting."""
    return 0 < len_q <= MOST_QUERIES and len_kv >= LEAST_KEYS


def shared_rows(heads: int, heads_kv: int, len_q: int) -> int:
    """Number of rows of all query heads that share a key head: one read of K and V serves them."""
    return heads // max(1, heads_kv) * len_q


def wanted_rows(batch: int, heads: int, heads_kv: int, len_q: int) -> int:
    """Number of rows that the tiles of a call should hold: all rows that share a key head.

    Two tiles of 16 replace one tile of 32 if the call has at most `NARROW_BLOCKS` of them.

    Examples
    --------
    >>> wanted_rows(16, 64, 8, 4), wanted_rows(64, 64, 8, 4), wanted_rows(1, 64, 8, 16)
    (16, 32, 128)
    """
    rows = shared_rows(heads, heads_kv, len_q)
    return 16 if rows <= 32 and 2 * batch * heads_kv <= NARROW_BLOCKS else rows


def fitting(rising: Sequence[Tiles], rows: int) -> Tiles:
    """Return the tiles of a call: the first that hold all rows, or the last.

    Examples
    --------
    >>> fitting((Tiles(16, 16, 4, 3), Tiles(32, 16, 4, 3)), 17).block_q
    32
    """
    return next((tiles for tiles in rising if tiles.block_q >= rows), rising[-1])


def block_slices(tiles: Tiles, head_dim: int) -> int:
    """Number of slices of a thread block; the warps of one tile of rows share a slice.

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
        Row i attends key j only if ``i + first <= j <= i + last``, as
        `cupyattn.problem.checks.check_limits` returns them.
    tiles : Tiles
        Tiles of the split form.

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
