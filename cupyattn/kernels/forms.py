"""One form of a rung as a row: its kernel, its tiles, and which calls it takes.

The conditions in `Takes` are compared with a call in `cupyattn.problem.support`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from cupyattn.kernels import splits
from cupyattn.kernels.tiles import Tiles

#: Kinds of operands that a form may support, each with its description.
VALUES = {
    "16bit": "V in 16 or 32 bits",
    "int8": "V as INT8 codes with one scale for each channel",
    "int8 by group": "V as INT8 codes with a scale for each channel and group of keys",
    "int8 beside 16bit": "V as INT8 codes beside P in 16 bits",
    "fp8": "V as e4m3 codes",
    "fused": "arrays of which it makes the codes itself",
}
#: Options of a call that a form may leave to another form. A form that takes packed sequences also
#: takes padded entries with separate lengths.
OPTIONS = ("softcap", "mask", "bias", "block_mask", "packed")
#: Name of the tiles for a float32 bias. With a number for each key it takes twice the room of one
#: in 16 bits. A Hopper form without such tiles does not take it.
WIDE_BIAS = "float32 bias"


class Takes(NamedTuple):
    """The calls that a form supports.

    Parameters
    ----------
    values : tuple of str
        The kinds of operands that it supports, from `VALUES`.
    arch : str, optional
        The only architecture that it runs on, ``"sm_90a"`` if the copy engine moves its operands.
        None: every architecture.
    options : tuple of str
        The names in `OPTIONS` that it takes. A form for ``"sm_90a"`` takes no block mask of packed
        sequences.
    p_types : tuple of str
        Types of P that it takes if V is INT8 codes.
    zero_points : bool
        Whether it takes codes with zero points.
    scale_keys : int
        The number of keys that share a scale of K must be a multiple of this.
    value_keys : int
        The number of keys that share a scale of a channel of V must be a multiple of this or of a
        step of the caller's tiles, or include all keys. `GROUP_ALL`: it must include all.
    few_rows : bool
        Whether it takes only few query rows with many keys (`cupyattn.kernels.splits.applies`), in
        its own tiles.
    stacks : bool
        Whether it takes the calls of a form for few rows, too, with query heads stacked
        (`cupyattn.problem.operands.stacking_pays`).
    """

    values: tuple[str, ...] = ("16bit",)
    arch: str | None = None
    options: tuple[str, ...] = OPTIONS
    p_types: tuple[str, ...] = ("u8", "s8")
    zero_points: bool = True
    scale_keys: int = 1
    value_keys: int = 1
    few_rows: bool = False
    stacks: bool = False


@dataclass(frozen=True)
class FormTiles:
    """The tiles of a form, each mapping by largest head_dim, in rising order.

    Parameters
    ----------
    default : mapping of int to Tiles
        Tiles of a call that names none. The last key is the largest head_dim of the form.
    other : mapping of int to (Tiles, float)
        Tiles that fit some lengths better, and their time per score relative to the default tiles
        when both are full.
    block_mask : mapping of int to tuple of Tiles
        Tiles of calls with a block mask: the first that divide its blocks. Without an entry the
        default tiles must divide them.
    more_rows : mapping of int to tuple of Tiles
        Tiles of calls with more rows than the default tiles hold, in rising order: the first that
        hold the rows, or the last.
    least_keys : int
        If `other` has an entry, a step is cut to the keys of a call, but not below this number; 0:
        it is never cut.
    scored : mapping of str to FormTiles
        Tiles of calls with one of these `OPTIONS`, or with a `WIDE_BIAS`. The first entry counts
        that the call has.

    Attributes
    ----------
    largest_head_dim : int
        The largest head size that the form takes.
    """

    default: Mapping[int, Tiles]
    other: Mapping[int, tuple[Tiles, float]] = field(default_factory=dict)
    block_mask: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict)
    more_rows: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict)
    least_keys: int = 0
    scored: Mapping[str, FormTiles] = field(default_factory=dict)
    largest_head_dim: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest_head_dim", max(self.default))

    def with_options(self, options: Collection[str]) -> FormTiles:
        """Return the tiles of calls that have some of the keys of `scored`."""
        return next((x for name, x in self.scored.items() if name in options), self)

    def limit(self, head_dim: int) -> int:
        """Return the entry of `default` that a head size belongs to.

        Raises
        ------
        LookupError
            If the form takes no such head size.
        """
        for limit in self.default:
            if head_dim <= limit:
                return limit
        raise LookupError(f"takes head_dim up to {self.largest_head_dim}, got {head_dim}")

    def with_blocks(self, head_dim: int) -> tuple[Tiles, ...]:
        """Return the entry of `block_mask` that a head size belongs to; () if there is none."""
        return next((x for limit, x in self.block_mask.items() if head_dim <= limit), ())

    def for_blocks(self, head_dim: int, blocks: tuple[int, int]) -> Tiles | None:
        """Return the tiles in `block_mask` that divide blocks of these rows and keys, or None."""
        return next((x for x in self.with_blocks(head_dim) if divides(x, blocks)), None)

    def for_rows(self, limit: int, rows: int) -> Tiles:
        """Return the first tiles of an entry that hold all rows, or its largest."""
        return splits.fitting((self.default[limit], *self.more_rows.get(limit, ())), rows)

    def for_lengths(self, limit: int, lengths: tuple[int, int] | None, causal: bool) -> Tiles:
        """Return the tiles of an entry that take less time for a call of these lengths."""
        tiles = self.default[limit]
        if limit not in self.other:
            return tiles
        other, cost = self.other[limit]
        if lengths is None:
            return other if cost <= 1 else tiles
        if cost * computed(lengths, causal, other) <= computed(lengths, causal, tiles):
            tiles = other
        if self.least_keys:  # a few keys, such as the tokens of a prompt, do not fill a step
            keys = max(self.least_keys, -(-lengths[1] // 16) * 16)
            tiles = replace(tiles, block_kv=min(tiles.block_kv, keys))
        return tiles

    def for_call(
        self,
        head_dim: int,
        given: Tiles | None = None,
        *,
        lengths: tuple[int, int] | None = None,
        causal: bool = False,
        block_mask: tuple[int, int] = (0, 0),
        rows: int = 1,
        options: Collection[str] = (),
    ) -> Tiles:
        """Return the tiles of a call: the caller's, or the default tiles of the form.

        Parameters
        ----------
        head_dim : int
        given : Tiles, optional
            The caller's.
        lengths : (int, int), optional
            Query rows and keys. The tiles of Hopper forms depend on them.
        causal : bool
            Whether a causal mask or a window ends the keys of a row at its position. The tiles of
            Hopper forms depend on this, too.
        block_mask : (int, int)
            Rows and keys of a block of the call's block mask; (0, 0) without one.
        rows : int
            Rows that tiles of the split form should hold (`cupyattn.kernels.splits.wanted_rows`).
        options : collection of str
            The options of the call, by their names in `scored`.

        Raises
        ------
        LookupError
            If the form takes no such head size.
        ValueError
            If the tiles do not divide the blocks.
        """
        own = self.with_options(options)
        limit = own.limit(head_dim)
        tiles = given
        if tiles is None and block_mask != (0, 0):
            tiles = own.for_blocks(head_dim, block_mask)
        if tiles is None and own.more_rows:
            tiles = own.for_rows(limit, rows)
        tiles = tiles or own.for_lengths(limit, lengths, causal)
        if not divides(tiles, block_mask):
            raise ValueError(
                f"tiles.block_q={tiles.block_q} and tiles.block_kv={tiles.block_kv} must divide "
                f"the blocks of the block mask, {block_mask[0]} x {block_mask[1]}: leave tiles "
                "out, or give powers of two"
            )
        return tiles


@dataclass(frozen=True)
class Form:
    """One form of a rung.

    Parameters
    ----------
    source : str or Path
        Its kernel: a file below ``kernels_cu/``, or the path of a file elsewhere.
    tiles : FormTiles
    takes : Takes
        Which calls it takes.
    pieces : bool
        Whether it cuts the tiles of the last wave (`cupyattn.kernels.tile_pieces`).
    block_scales : bool
        Whether granularity "block" means the rows and keys of its tiles, if it is the fastest form
        for the operands.

    Attributes
    ----------
    on_hopper : bool
        Whether it runs on compute capability 9.0 only.
    """

    source: str | Path
    tiles: FormTiles
    takes: Takes = Takes()
    pieces: bool = False
    block_scales: bool = True
    on_hopper: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_hopper", self.takes.arch is not None)

    @property
    def entry_point(self) -> str:
        """Name of the kernel in a source below ``kernels_cu/``, which is the name of the file."""
        return PurePath(self.source).stem


def divides(tiles: Tiles, blocks: tuple[int, int]) -> bool:
    """Whether tiles divide the blocks of a block mask; (0, 0) stands for no mask."""
    return not blocks[0] % tiles.block_q and not blocks[1] % tiles.block_kv


def computed(lengths: tuple[int, int], causal: bool, tiles: Tiles) -> int:
    """Return how many scores whole tiles compute; the last row of a causal mask sees every key.

    Examples
    --------
    >>> computed((512, 512), False, Tiles(192, 128, 16)) == 3 * 192 * 512
    True
    >>> computed((512, 512), True, Tiles(128, 128, 12)) == (1 + 2 + 3 + 4) * 128 * 128
    True
    """
    len_q, len_kv = lengths
    ends = [q0 + tiles.block_q for q0 in range(0, len_q, tiles.block_q)]
    keys = [min(max(0, end + len_kv - len_q), len_kv) if causal else len_kv for end in ends]
    return sum(-(-n // tiles.block_kv) for n in keys) * tiles.block_kv * tiles.block_q
