"""Tile sizes of the kernels: the one source of every compile-time size."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

from cupyattn.errors import shown

#: More than any kernel has room for.
_MOST = 2**20


@dataclass(frozen=True)
class _Sizes:
    """Fields and checks that the sizes of all kernels share; a subclass adds its sizes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                size = 0 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                size = 0
            if not 1 <= size <= _MOST:
                raise ValueError(
                    f"tiles.{field.name} must be a positive integer up to 2**20, got {shown(value)}"
                )
            object.__setattr__(self, field.name, size)
        if self.num_threads > 1024:
            raise ValueError(f"tiles.num_warps must be at most 32, got {self.num_threads // 32}")

    @property
    def num_threads(self) -> int:
        """Threads per block."""
        return 32 * int(getattr(self, "num_warps", 0))

    def defines(self) -> dict[str, int]:
        """Return the ``CFG_*`` macros that carry these sizes to ``prims/config.cuh``."""
        return {f"CFG_{field.name.upper()}": getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Tiles(_Sizes):
    """Block sizes of one attention kernel.

    Parameters
    ----------
    block_q : int
        Query rows per thread block.
    block_kv : int
        Key rows per step of the loop.
    num_warps : int
        Warps per thread block.
    num_stages : int
        Key and value tiles in flight (1: no prefetch).

    Raises
    ------
    ValueError
        If a size is not positive, or there are more than 32 warps.

    Notes
    -----
    The conditions that a kernel sets for its tiles (divisibility, multiples of the instruction
    shape) are ``static_assert`` sentences in ``kernels_cu``. If the tiles of a call break one, the
    call raises a ValueError with that sentence, on every backend.

    Examples
    --------
    >>> Tiles(block_q=64, block_kv=32, num_warps=4).num_threads
    128
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class GemmTiles(_Sizes):
    """Block sizes of one matrix product; along k a step is the 128 codes that share a scale.

    Parameters
    ----------
    block_m, block_n : int
        Rows and columns of C per thread block.
    num_warps : int
        Warps per thread block.
    num_stages : int
        Slices of 128 codes in flight.
    splits : int
        Thread blocks that share a tile, each with a part of k: a cluster of 2, 4 or 8, from compute
        capability 9.0 on. They add their sums in one order, so the same sizes give the same bits.
    tail_splits : int
        Thread blocks that share a tile of the last wave only, if enough blocks are idle for all of
        its tiles at once; Hopper form. Each other tile has one block.

    Raises
    ------
    ValueError
        As for `Tiles`, and where both `splits` and `tail_splits` are more than 1.

    Examples
    --------
    >>> GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=4).num_threads
    384
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1
    tail_splits: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits > 1 and self.tail_splits > 1:
            raise ValueError(
                "tiles.splits and tiles.tail_splits cannot both be more than 1: all tiles are "
                f"shared, or only the last wave's, got {self.splits} and {self.tail_splits}"
            )

    @property
    def cluster(self) -> int:
        """Number of thread blocks in a cluster, which share a tile; 1 if no tile is shared."""
        return self.splits * self.tail_splits


def check_kind(tiles: Any, kind: type[_Sizes] = Tiles) -> None:
    """Raise TypeError unless the caller's tiles are None or a record of the right class."""
    if tiles is not None and not isinstance(tiles, kind):
        raise TypeError(f"tiles must be a cupyattn.{kind.__name__} or None, got {shown(tiles)}")
