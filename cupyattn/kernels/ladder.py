"""The ladder on one screen: every variant, its one idea, its tiles and what it rounds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cupyattn.errors import UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.tiles import Tiles

#: What a rung computes with.
FAMILIES = ("unfused", "float32", "tensor_core", "int8")
#: The largest head size of the kernels.
MOST_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class Variant:
    """One rung of the ladder; two are equal only if they are the same object.

    Parameters
    ----------
    name : str
        What users type; the source is ``kernels_cu/attn_<name>.cu``, the entry point
        ``attn_<name>``.
    idea : str
        The one idea that this rung adds.
    family : {"unfused", "float32", "tensor_core", "int8"}
        What it computes with: `cupyattn.kernels.numerics.numerics` composes its rounding points
        from this.
    tiles : mapping of int to Tiles
        Default tiles by largest head_dim, in rising order, ending with 256. They fit in the
        99 KB of shared memory that every device from compute capability 8.0 on has.
    dtypes : tuple of str
        Storage types that it takes.
    hopper_tiles : mapping of int to Tiles
        The same for the Hopper form (``kernels_cu/sm90/``); empty where there is none.
    hopper_other_tiles : mapping of str to mapping of int to (Tiles, float)
        By Hopper form: tiles that some lengths fit better, and how many times as long a score takes
        in them as in its default ones where either are full; no entry where one serves all.
    split_tiles : mapping of int to tuple of Tiles
        Those of the split form (``forms/split/``), which takes few query rows and many keys,
        with more and more rows: of each entry the first that hold those of a call; empty where
        there is none.
    hopper_block_mask_tiles : mapping of int to tuple of Tiles
        Those of the Hopper forms for calls with a block mask: of each entry the first that divide
        its blocks; empty where they take none.
    block_mask_tiles : mapping of int to Tiles
        Those of the portable form for calls with a block mask, where those of `tiles` do not divide
        its blocks of 64 or 128; empty where they do.
    pv8_tiles : mapping of int to Tiles
        The same for the form with P and V in 8 bits (``attn_<name>_pv8.cu``).
    hopper_pv8_tiles : mapping of int to Tiles
        The same for the Hopper form with P in u8 and V in INT8. Granularity "block" means the keys
        of these, whichever tiles a call takes.
    hopper_fp8_tiles : mapping of int to Tiles
        The same for the Hopper form with P and V in e4m3, whose largest head_dim need not be 256.
    hopper_by_tile_tiles : mapping of int to Tiles
        The same for the Hopper form with P in u8 and V in INT8, a scale for every channel and tile
        of keys. Granularity "block" of such V means the keys of these.
    fused_tiles : mapping of int to Tiles
        The same for the form that quantises by itself (``attn_<name>_fused.cu``); they divide the
        blocks of every block mask.
    source : Path, optional
        A ``.cu`` outside the package, given by `cupyattn.register`.

    Raises
    ------
    ValueError
        For a name, family, tiles or dtypes that cannot be.
    """

    name: str
    idea: str
    family: str
    tiles: Mapping[int, Tiles]
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    hopper_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    hopper_other_tiles: Mapping[str, Mapping[int, tuple[Tiles, float]]] = field(
        default_factory=dict
    )
    split_tiles: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict)
    block_mask_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    hopper_block_mask_tiles: Mapping[int, tuple[Tiles, ...]] = field(default_factory=dict)
    source: Path | None = None
    pv8_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    hopper_pv8_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    hopper_fp8_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    hopper_by_tile_tiles: Mapping[int, Tiles] = field(default_factory=dict)
    fused_tiles: Mapping[int, Tiles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII)):
            raise ValueError(
                "name must be letters, digits and underscores, as the kernel is called "
                f"attn_<name>, got {self.name!r:.60}"
            )
        if self.family not in FAMILIES:
            raise ValueError(
                f"family must be one of {', '.join(map(repr, FAMILIES))}, got {self.family!r:.60}"
            )
        if not (
            isinstance(self.dtypes, tuple)
            and self.dtypes
            and all(isinstance(dtype, str) and dtype in DTYPES for dtype in self.dtypes)
        ):
            raise ValueError(
                f"dtypes must be a tuple of some of {', '.join(map(repr, DTYPES))}, such as "
                f"('float16',), got {self.dtypes!r:.60}"
            )
        self._check_tiles()

    def _check_tiles(self) -> None:
        """Raise unless the default tiles are those of every head size."""
        table = self.tiles
        limits = list(table) if isinstance(table, Mapping) else []
        whole = all(type(limit) is int and limit > 0 for limit in limits)
        if not (
            limits
            and whole
            and limits == sorted(limits)
            and limits[-1] == MOST_HEAD_DIM
            and all(isinstance(tiles, Tiles) for tiles in table.values())
        ):
            raise ValueError(
                "tiles must be a mapping of the largest head_dim to cupyattn.Tiles, rising and "
                f"ending with {MOST_HEAD_DIM}, such as {{256: Tiles(32, 32, 4)}}, got {table!r:.90}"
            )

    @property
    def entry_point(self) -> str:
        """Name of the kernel in its portable source; those of other forms begin with it."""
        return f"attn_{self.name}"

    @property
    def forms(self) -> tuple[str, ...]:
        """Which forms exist of ``"portable"``, ``"sm90"`` (compute capability 9.0), ``"split"``,
        ``"pv8"``, ``"pv8_whole"``, ``"sm90_pv8"``, ``"sm90_pv8_by_tile"``, ``"sm90_fp8"`` and
        ``"fused"``.

        A source of one's own has one form.
        """
        if self.source:
            return ("portable",)
        return tuple(form for form, table in self._tables.items() if table)

    @property
    def _tables(self) -> dict[str, Mapping[int, Tiles]]:
        return {
            "portable": self.tiles, "sm90": self.hopper_tiles,
            "split": {limit: rising[0] for limit, rising in self.split_tiles.items()},
            "pv8": self.pv8_tiles, "pv8_whole": self.pv8_tiles,
            "sm90_pv8": self.hopper_pv8_tiles, "sm90_pv8_by_tile": self.hopper_by_tile_tiles,
            "sm90_fp8": self.hopper_fp8_tiles, "fused": self.fused_tiles,
        }  # fmt: skip

    def form_for(
        self, len_q: int, len_kv: int, tiles: Tiles | None = None, *, changed: bool = False
    ) -> str:
        """Return the form that a call of these lengths takes where no copy engine is asked for.

        Parameters
        ----------
        len_q, len_kv : int
        tiles : Tiles, optional
            The caller's, which mean the portable form.
        changed : bool
            Whether the call has a softcap, mask, bias, block mask or packed sequences, which the
            split form leaves to the portable one.
        """
        fits = "split" in self.forms and tiles is None and not changed
        return "split" if fits and splits.applies(len_q, len_kv) else "portable"

    def check_form(self, form: str | None) -> None:
        """Raise ValueError unless there is such a form, or none is named."""
        if form is not None and form not in self.forms:
            raise ValueError(
                f"form must be one of {', '.join(map(repr, self.forms))} for {self.name}, got "
                f"{form!r:.60}"
            )

    @property
    def turns_on_load(self) -> bool:
        """Whether rotary embeddings happen as Q and K are loaded; otherwise in a pass before."""
        return self.family in ("unfused", "float32")

    def check_dtype(self, dtype: str) -> None:
        """Raise UnsupportedError unless this rung takes arrays of `dtype`."""
        if dtype not in self.dtypes:
            raise UnsupportedError(
                f"{self.name} takes {', '.join(self.dtypes)}, got {dtype}: "
                "convert the arrays, or use variant='auto'"
            )

    def default_tiles(self, head_dim: int, form: str = "portable") -> Tiles:
        """Return the tiles used for a head size when the caller names none.

        Raises
        ------
        ValueError
            If the form takes no such head size.
        """
        return self._tables[form][self._limit(head_dim, form)]

    def largest_head_dim(self, form: str) -> int:
        """Return the largest head size that a form takes; 0 where there is no such form."""
        return max(self._tables[form], default=0)

    def _limit(self, head_dim: int, form: str) -> int:
        """Return which entry of the table of tiles a head size belongs to."""
        table = self._tables[form]
        limit = next((limit for limit in table if head_dim <= limit), None)
        if limit is None:
            most = self.largest_head_dim(form)
            raise ValueError(
                f"the {form} form of {self.name} takes head_dim up to {most}, got {head_dim}"
            )
        return limit

    def block_mask_tiles_for(
        self, head_dim: int, block_mask: tuple[int, int], form: str
    ) -> Tiles | None:
        """Return the tiles of a form that divide the blocks of a block mask.

        None where it has none of their own: in the Hopper form there is then none that divides
        them, in the others those of any call do.
        """
        if form == "fused":
            return None
        table: Mapping[int, tuple[Tiles, ...]] = self.hopper_block_mask_tiles
        if not form.startswith("sm90"):
            table = {limit: (tiles,) for limit, tiles in self.block_mask_tiles.items()}
        choice = next((tiles for limit, tiles in table.items() if head_dim <= limit), ())
        if form == "sm90_fp8":  # whose registers hold so many keys and no more
            most = self.default_tiles(head_dim, form).block_kv
            choice = tuple(tiles for tiles in choice if tiles.block_kv <= most)
        divide = (
            x for x in choice if not block_mask[0] % x.block_q and not block_mask[1] % x.block_kv
        )
        return next(divide, None)

    def tiles_for(
        self,
        head_dim: int,
        given: Tiles | None = None,
        *,
        form: str = "portable",
        lengths: tuple[int, int] | None = None,
        causal: bool = False,
        block_mask: tuple[int, int] = (0, 0),
        rows: int = 1,
    ) -> Tiles:
        """Return the tiles of a call: those given, or the variant's own.

        Parameters
        ----------
        head_dim : int
        given : Tiles, optional
            The caller's.
        form : {"portable", "sm90"}
        lengths : (int, int), optional
            Query rows and keys, which the tiles of the Hopper forms depend on.
        causal : bool
            Whether the keys that a row attends to end with its place, by a causal mask or a window:
            the tiles of Hopper forms depend on that, too.
        block_mask : (int, int)
            Rows and keys of a block of the call's block mask; (0, 0): there is none.
        rows : int
            Those that tiles of the split form should hold (`cupyattn.kernels.splits.wanted_rows`).

        Raises
        ------
        ValueError
            If the form takes no such head size, or tiles do not divide the blocks.
        """
        tiles = given
        if tiles is None and block_mask != (0, 0):
            tiles = self.block_mask_tiles_for(head_dim, block_mask, form)
        fixed = tiles is not None
        tiles = tiles or self.default_tiles(head_dim, form)
        limit = self._limit(head_dim, form)
        if form == "split" and not fixed:
            tiles = splits.fitting(self.split_tiles[limit], rows)
        if limit in self.hopper_other_tiles.get(form, {}) and not fixed:
            other, cost = self.hopper_other_tiles[form][limit]
            mine, others = (
                1 if lengths is None else computed(lengths, causal, x) for x in (tiles, other)
            )
            tiles = other if cost * others <= mine else tiles
            if form == "sm90" and lengths is not None:  # few keys, as those of a text, fill no step
                keys = max(LEAST_KEYS, -(-lengths[1] // 16) * 16)
                tiles = replace(tiles, block_kv=min(tiles.block_kv, keys))
        if block_mask[0] % tiles.block_q or block_mask[1] % tiles.block_kv:
            raise ValueError(
                f"tiles.block_q={tiles.block_q} and tiles.block_kv={tiles.block_kv} must divide "
                f"the blocks of the block mask, {block_mask[0]} x {block_mask[1]}: leave tiles "
                "out, or give powers of two"
            )
        return tiles


_ALL = ("float16", "bfloat16", "float32")
_16_BIT = ("float16", "bfloat16")

#: Default tiles by largest head_dim, among those that do not spill and fit in 99 KB. How far those
#: of fa_tc and fa_int8 are from the fastest: experiments/results/NOTES.md, "Tiles". Those of the
#: plain rungs were chosen to be read, not swept.
_TILES = {
    "unfused": {256: Tiles(32, 32, 4)},
    "fa": {128: Tiles(32, 32, 4), 256: Tiles(16, 16, 4)},
    "fa_warps": {128: Tiles(32, 32, 4), 256: Tiles(16, 32, 4)},
    "fa_tc": {64: Tiles(128, 64, 4, 2), 128: Tiles(128, 48, 4, 2), 256: Tiles(64, 32, 4, 2)},
    "fa_int8": {64: Tiles(128, 32, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 48, 4, 2)},
}

#: The same for block masks, the only ones of these that divide blocks of 64 in either direction.
_BLOCK_MASK_TILES = {
    "fa_tc": {128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
    "fa_int8": {128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
}

#: The same for block masks in the Hopper forms: two warpgroups share a list of keys, so blocks of
#: 128 rows. Where there are two, both have as many keys on their way. Those of fa_int8 were not
#: measured.
_HOPPER_BLOCK_MASK_TILES = {
    "fa_tc": {
        128: (Tiles(128, 128, 12, 2), Tiles(128, 64, 12, 4)), 256: (Tiles(128, 64, 12, 2),),
    },
    "fa_int8": {
        128: (Tiles(128, 128, 12, 2), Tiles(128, 64, 12, 4)), 256: (Tiles(128, 64, 12, 3),),
    },
}  # fmt: skip

#: The same for the Hopper forms: four warps that copy, four for every 64 query rows. Fastest of
#: those in experiments/results/race_fa_tc_sm90_hd*.json; at head_dim 256 see NOTES.md there.
_HOPPER_TILES = {
    "fa_tc": {
        64: Tiles(192, 128, 16, 2), 96: Tiles(192, 112, 16, 2), 128: Tiles(192, 80, 16, 2),
        192: Tiles(128, 112, 12, 2), 256: Tiles(128, 64, 12, 2),
    },
    "fa_int8": {
        64: Tiles(192, 128, 16, 3), 128: Tiles(192, 80, 16, 2), 256: Tiles(128, 96, 12, 2),
    },
}  # fmt: skip
#: Other tiles of the Hopper forms, and how many times as long a score takes in them where either
#: are full. Smaller ones of fa_tc take 1.29 (at length 4,096) and 1.08 to 1.12; with P and V in 8
#: bits two warpgroups have registers for twice the keys.
_HOPPER_OTHER_TILES = {
    "fa_tc": {
        "sm90": {64: (Tiles(128, 128, 12, 2), 1.29), 128: (Tiles(128, 128, 12, 2), 1.1)},
    },
    "fa_int8": {"sm90_pv8": {128: (Tiles(128, 256, 12, 2), 1 / 1.05)}},
}  # fmt: skip
#: The fewest keys that a step of the Hopper form may have.
LEAST_KEYS = 64


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


#: The same for the split forms, for up to 16, 32, 64 and 128 rows: 64 to 99 KB of keys on their
#: way, as many keys to a step as leave registers for Q and O. Raced on an H200: NOTES.md there,
#: "More rows to a read of K and V".
_SPLIT_TILES = {
    "fa_tc": {
        64: (
            Tiles(16, 32, 4, 3), Tiles(32, 32, 4, 3), Tiles(64, 32, 4, 4), Tiles(128, 64, 4, 4),
        ),
        128: (
            Tiles(16, 16, 4, 3), Tiles(32, 16, 4, 3), Tiles(64, 16, 4, 4), Tiles(128, 16, 4, 8),
        ),
        256: (Tiles(16, 16, 2, 3), Tiles(32, 16, 2, 4), Tiles(64, 16, 4, 4)),
    },
}  # fmt: skip

#: The same for P and V in 8 bits: keys in tiles of 32, 64 or 128. Why these: NOTES.md there, "The
#: portable fa_int8". Up to three registers of a loop may not fit (tests/support/runs.py).
_PV8_TILES = {
    "fa_int8": {64: Tiles(128, 64, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 32, 4, 3)}
}

#: The same in its Hopper form, as timed: NOTES.md there, "fa_int8 against 8-bit attention".
_HOPPER_PV8_TILES = {
    "fa_int8": {
        64: Tiles(192, 192, 16, 3),
        80: Tiles(192, 128, 16, 3),
        128: Tiles(192, 128, 16, 3),
        256: Tiles(128, 128, 12, 2),
    }
}

#: The same with P and V in e4m3: as many keys as leave registers for two levels of sums.
_HOPPER_FP8_TILES = {
    "fa_int8": {64: Tiles(128, 192, 12, 3), 96: Tiles(128, 128, 12, 3), 128: Tiles(128, 96, 12, 3)}
}

#: The same with P in u8 and V with a scale for every channel and tile: the keys of a tile are those
#: that share a scale of V. Two warpgroups up to 128 take longer (the kernel's header).
_HOPPER_BY_TILE_TILES = {
    "fa_int8": {
        64: Tiles(192, 128, 16, 3), 128: Tiles(192, 128, 16, 2), 256: Tiles(128, 128, 12, 2),
    }
}  # fmt: skip

#: The same for the form that quantises by itself: few registers, since it waits for each tile.
_FUSED_TILES = {"fa_int8": {256: Tiles(64, 64, 4, 1)}}

#: The kernel of every form of a rung, ``{}`` being its name: file below ``kernels_cu/``. The entry
#: point has the name of the file.
FORM_SOURCES = {
    "portable": "attn_{}.cu",
    "fused": "forms/attn_{}_fused.cu",
    "pv8": "forms/attn_{}_pv8.cu",
    "pv8_whole": "forms/attn_{}_pv8_whole.cu",
    "split": "forms/split/attn_{}.cu",
    "sm90": "sm90/attn_{}.cu",
    "sm90_pv8": "sm90/attn_{}_pv8.cu",
    "sm90_pv8_by_tile": "sm90/attn_{}_pv8_by_tile.cu",
    "sm90_fp8": "sm90/attn_{}_fp8.cu",
}

#: The rungs: name, the one idea, what it computes in, what it takes.
_LADDER = (
    ("unfused",  "S and P live in global memory",          "unfused",     _ALL),
    ("fa",       "online softmax: S never leaves the SM",  "float32",     _ALL),
    ("fa_warps", "each warp owns whole query rows",        "float32",     _ALL),
    ("fa_tc",    "both products on tensor cores",          "tensor_core", _16_BIT),
    ("fa_int8",  "Q.K^T on INT8 tensor cores",             "int8",        _ALL),
)  # fmt: skip

#: The ladder: every rung by its name, each one idea above the one before, then those registered.
VARIANTS: dict[str, Variant] = {
    name: Variant(
        name,
        idea,
        family,
        _TILES[name],
        dtypes,
        _HOPPER_TILES.get(name, {}),
        _HOPPER_OTHER_TILES.get(name, {}),
        _SPLIT_TILES.get(name, {}),
        _BLOCK_MASK_TILES.get(name, {}),
        _HOPPER_BLOCK_MASK_TILES.get(name, {}),
        pv8_tiles=_PV8_TILES.get(name, {}),
        hopper_pv8_tiles=_HOPPER_PV8_TILES.get(name, {}),
        hopper_fp8_tiles=_HOPPER_FP8_TILES.get(name, {}),
        hopper_by_tile_tiles=_HOPPER_BY_TILE_TILES.get(name, {}),
        fused_tiles=_FUSED_TILES.get(name, {}),
    )
    for name, idea, family, dtypes in _LADDER
}


def lookup(name: str) -> Variant:
    """Return the variant called `name`.

    Raises
    ------
    ValueError
        If there is none; the message lists those that exist.
    """
    try:
        return VARIANTS[name]
    except (KeyError, TypeError):  # a list has no hash
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {name!r}") from None


def register(variant: Variant, source: str | Path) -> Variant:
    """Add a rung from a ``.cu`` file of your own.

    Parameters
    ----------
    variant : Variant
        Its name, idea, family and tiles. The kernel's entry point must be ``attn_<name>``.
    source : path
        The ``.cu`` file; it may include ``prims/*.cuh``.

    Returns
    -------
    Variant
        The registered variant, now in `VARIANTS` and accepted by `cupyattn.attention`.

    Raises
    ------
    TypeError
        If `variant` is not a `Variant`.
    ValueError
        If the name is taken or the file does not exist.
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant must be a cupyattn.Variant, got {variant!r:.60}")
    path = Path(source).resolve()
    if variant.name in VARIANTS:
        raise ValueError(f"a variant called {variant.name!r} is already registered")
    if not path.is_file():
        raise ValueError(f"source must be an existing .cu file, got {str(path)!r}")
    added = replace(variant, source=path)
    VARIANTS[added.name] = added
    return added
