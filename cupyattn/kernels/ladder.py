"""The ladder on one screen: every variant, its one idea, its tiles and its rounding points."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.forms import OPTIONS, WIDE_BIAS, Form, FormTiles, Takes
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles

#: The kinds of arithmetic that a rung may use.
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
        Its arithmetic, from which `cupyattn.kernels.numerics.numerics` composes its rounding
        points.
    tiles : mapping of int to Tiles
        Default tiles of the portable form by largest head_dim, in rising order, ending with 256.
        They fit in the 99 KB of shared memory that every device from compute capability 8.0 on
        has.
    dtypes : tuple of str
        Storage types that it takes.
    forms : mapping of str to Form
        Its forms by name, `cupyattn.kernels.forms.Form`. If two take a call, the later one runs.
        The portable form is always the first, and its default tiles are `tiles`.
    source : Path, optional
        A ``.cu`` outside the package, given to `cupyattn.register`. It is the only form.

    Raises
    ------
    ValueError
        For a name, family, tiles, dtypes or forms that cannot be.
    """

    name: str
    idea: str
    family: str
    tiles: Mapping[int, Tiles]
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    forms: Mapping[str, Form] = field(default_factory=dict)
    source: Path | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and re.fullmatch(r"[A-Za-z_]\w*", self.name, re.ASCII)):
            raise ValueError(
                "name must be letters, digits and underscores, as the kernel is called "
                f"attn_<name>, got {shown(self.name)}"
            )
        if self.family not in FAMILIES:
            raise ValueError(
                f"family must be one of {', '.join(map(repr, FAMILIES))}, got {shown(self.family)}"
            )
        if not (
            isinstance(self.dtypes, tuple)
            and self.dtypes
            and all(isinstance(dtype, str) and dtype in DTYPES for dtype in self.dtypes)
        ):
            raise ValueError(
                f"dtypes must be a tuple of some of {', '.join(map(repr, DTYPES))}, such as "
                f"('float16',), got {shown(self.dtypes)}"
            )
        self._check_tiles()
        if not (
            isinstance(self.forms, Mapping)
            and all(isinstance(form, Form) for form in self.forms.values())
        ):
            raise ValueError(
                "forms must be a mapping of names to cupyattn.kernels.forms.Form, got "
                f"{shown(self.forms)}"
            )
        object.__setattr__(self, "forms", self._whole_forms())

    def _whole_forms(self) -> dict[str, Form]:
        """Return the forms; the portable one has the source and tiles of the variant."""
        first = self.forms.get("portable", Form(f"attn_{self.name}.cu", FormTiles(self.tiles)))
        source, tiles = self.source or first.source, replace(first.tiles, default=self.tiles)
        portable = {"portable": replace(first, source=source, tiles=tiles)}
        return portable if self.source else portable | {**self.forms, **portable}

    def _check_tiles(self) -> None:
        """Raise unless the default tiles cover every head size."""
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
        """Name of the kernel in its portable source; the names of other forms begin with it."""
        return f"attn_{self.name}"

    @functools.cached_property
    def fastest_first(self) -> tuple[tuple[str, Form], ...]:
        """The forms and their names in the order in which a call is offered to them."""
        return tuple(self.forms.items())[::-1]

    def check_form(self, form: str | None) -> None:
        """Raise ValueError if a form is named that does not exist."""
        if form is not None and form not in self.forms:
            raise ValueError(
                f"form must be one of {', '.join(map(repr, self.forms))} for {self.name}, got "
                f"{shown(form)}"
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
            If there is no such form, or it takes no such head size.
        """
        self.check_form(form)
        return self.forms[form].tiles.default[self._limit(head_dim, form)]

    def largest_head_dim(self, form: str) -> int:
        """Return the largest head size that a form takes; 0 if the variant has no such form."""
        return self.forms[form].tiles.largest_head_dim if form in self.forms else 0

    def _limit(self, head_dim: int, form: str) -> int:
        """Return which entry of the default tiles a head size belongs to."""
        try:
            return self.forms[form].tiles.limit(head_dim)
        except LookupError as error:
            raise ValueError(f"the {form} form of {self.name} {error}") from None

    def tiles_for(
        self, head_dim: int, given: Tiles | None = None, *, form: str = "portable", **call: Any
    ) -> Tiles:
        """Return the tiles of a call: the caller's, or the default tiles of the variant.

        Parameters
        ----------
        head_dim : int
        given : Tiles, optional
            The caller's.
        form : str
            One of `forms`.
        **call
            As for `cupyattn.kernels.forms.FormTiles.for_call`.

        Raises
        ------
        ValueError
            If there is no such form, it takes no such head size, or tiles do not divide the
            blocks.
        """
        self.check_form(form)
        self._limit(head_dim, form)
        return self.forms[form].tiles.for_call(head_dim, given, **call)


_ALL = ("float16", "bfloat16", "float32")
_16_BIT = ("float16", "bfloat16")

#: Least number of keys that share a scale in the Hopper forms; multiples are supported, too.
HOPPER_SCALE_KEYS = 16
#: Least number of keys that share a scale of a channel of V in that form: the keys of a step.
HOPPER_VALUE_KEYS = 128

#: Options that every Hopper form leaves to the portable forms, and options that Hopper forms of
#: fa_int8 leave to them.
_HOPPER = Takes(arch="sm_90a", options=("block_mask", "packed"))
_HOPPER_INT8 = _HOPPER._replace(options=OPTIONS, scale_keys=HOPPER_SCALE_KEYS)
_HOPPER_PV8 = _HOPPER_INT8._replace(p_types=("u8",), zero_points=False)

#: Tiles for block masks in the portable forms, the only ones of theirs that divide blocks of 64 in
#: either direction.
_PORTABLE_BLOCKS = {128: (Tiles(64, 64, 4, 2),), 256: (Tiles(64, 32, 4, 2),)}
#: The same for the Hopper forms, up to head_dim 128. Two warpgroups share a list of keys, so a
#: block has 128 rows. The tiles of fa_int8 were not measured.
_HOPPER_BLOCKS = (Tiles(128, 128, 12, 2), Tiles(128, 64, 12, 4))
_HOPPER_INT8_BLOCKS = {128: _HOPPER_BLOCKS, 256: (Tiles(128, 64, 12, 3),)}

#: Tiles of the portable fa_tc with softcap or bias, in which M is not lazy. At head_dim 64 such a
#: kernel takes 1.19 times as long with 32 keys a step as with 64. See NOTES.md there, "A lazy
#: maximum in the portable fa_tc". At 128, more keys a step spill more. A call with only a mask has
#: the tiles of a call without one, so a mask of True changes no bit.
_PORTABLE_SCORED = dict.fromkeys(
    ("softcap", "bias"),
    FormTiles(
        {64: Tiles(128, 64, 4, 2), 128: Tiles(128, 48, 4, 2), 256: Tiles(64, 32, 4, 2)},
        block_mask=_PORTABLE_BLOCKS,
    ),
)

#: Tiles for P and V in 8 bits: keys in tiles of 32, 64 or 128. Why these:
#: experiments/results/NOTES.md, "The portable fa_int8". Up to three registers of a loop may not fit
#: (tests/support/runs.py).
_PV8 = FormTiles(
    {64: Tiles(128, 64, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 32, 4, 3)},
    block_mask=_PORTABLE_BLOCKS,
)

#: The forms of each rung. Default tiles do not spill, and in portable forms they fit in 99 KB. The
#: notebook (experiments/results/NOTES.md, "Tiles") compares the tiles of fa_tc and fa_int8 with
#: the fastest. The tiles of the plain rungs were chosen for readability, not swept. A Hopper form
#: has four warps that copy, and four more for every 64 query rows.
_UNFUSED = {"portable": Form("attn_unfused.cu", FormTiles({256: Tiles(32, 32, 4)}))}
_FA = {
    "portable": Form(
        "attn_fa.cu", FormTiles({128: Tiles(32, 32, 4), 256: Tiles(16, 16, 4)})
    ),
}  # fmt: skip
_FA_WARPS = {
    "portable": Form(
        "attn_fa_warps.cu", FormTiles({128: Tiles(32, 32, 4), 256: Tiles(16, 32, 4)})
    ),
}  # fmt: skip
#: Tiles of calls with softcap, bias or mask: the fastest at head_dim 64 and 128 that do not spill.
#: See NOTES.md there, "Softcap, bias and masks in the Hopper form". Tiles for a softcap leave room
#: for a bias and a mask as well; tiles for a bias leave room for a mask.
_BIAS_BLOCKS = {
    64: _HOPPER_BLOCKS, 128: (Tiles(128, 64, 12, 3),), 256: (Tiles(128, 64, 12, 2),),
}  # fmt: skip
_FA_TC_SCORED = {
    WIDE_BIAS: FormTiles(  # two stages of it beside Q, K and V
        {128: Tiles(192, 64, 16, 2), 256: Tiles(128, 64, 12, 2)},
        block_mask={256: (Tiles(128, 64, 12, 2),)},
    ),
    "softcap": FormTiles(
        {64: Tiles(192, 112, 16, 2), 128: Tiles(192, 64, 16, 2), 256: Tiles(128, 64, 12, 2)},
        block_mask=_BIAS_BLOCKS,
    ),
    "bias": FormTiles(
        {64: Tiles(192, 128, 16, 2), 128: Tiles(192, 64, 16, 2), 256: Tiles(128, 64, 12, 2)},
        block_mask=_BIAS_BLOCKS,
    ),
    "mask": FormTiles(
        {
            64: Tiles(192, 128, 16, 2), 96: Tiles(192, 112, 16, 2), 128: Tiles(192, 80, 16, 2),
            192: Tiles(128, 112, 12, 2), 256: Tiles(128, 64, 12, 2),
        },
        block_mask={128: _HOPPER_BLOCKS, 256: (Tiles(128, 64, 12, 2),)},
    ),
}  # fmt: skip
_FA_TC = {
    "portable": Form(
        "attn_fa_tc.cu",
        FormTiles(
            {64: Tiles(128, 32, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
            block_mask=_PORTABLE_BLOCKS,
            scored=_PORTABLE_SCORED,
        ),
    ),
    # The fastest in experiments/results/race_fa_tc_sm90_hd*.json; for head_dim 256 see NOTES.md
    # there. If both tiles are full, the smaller ones take 1.29 times as long at head_dim 64
    # (length 4,096), and 1.08 to 1.12 at 128.
    "sm90": Form(
        "sm90/attn_fa_tc.cu",
        FormTiles(
            {
                64: Tiles(192, 128, 16, 2), 96: Tiles(192, 112, 16, 2), 128: Tiles(192, 80, 16, 2),
                192: Tiles(128, 112, 12, 2), 256: Tiles(128, 64, 12, 2),
            },
            other={64: (Tiles(128, 128, 12, 2), 1.29), 128: (Tiles(128, 128, 12, 2), 1.1)},
            block_mask={128: _HOPPER_BLOCKS, 256: (Tiles(128, 64, 12, 2),)},
            least_keys=64,
            scored=_FA_TC_SCORED,
        ),
        _HOPPER._replace(options=OPTIONS, stacks=True),
        pieces=True,
    ),
    # For up to 16, 32, 64 and 128 rows: 64 to 99 KB of keys in flight. A step has as many keys as
    # leave registers for Q and O. Raced on an H200: NOTES.md there, "More rows to a read of K and
    # V".
    "split": Form(
        "forms/split/attn_fa_tc.cu",
        FormTiles(
            {64: Tiles(16, 32, 4, 3), 128: Tiles(16, 16, 4, 3), 256: Tiles(16, 16, 2, 3)},
            more_rows={
                64: (Tiles(32, 32, 4, 3), Tiles(64, 32, 4, 4), Tiles(128, 64, 4, 4)),
                128: (Tiles(32, 16, 4, 3), Tiles(64, 16, 4, 4), Tiles(128, 16, 4, 8)),
                256: (Tiles(32, 16, 2, 4), Tiles(64, 16, 4, 4)),
            },
            block_mask=_PORTABLE_BLOCKS,  # of mirror and bounds, which take the form by name
        ),
        Takes(options=(), few_rows=True),
    ),
}  # fmt: skip
#: The same for the forms of fa_int8: the widest steps that do not spill. None was measured. Tiles
#: for a bias leave room for a softcap and a mask as well. A call with only a mask has the tiles of
#: plain calls, with steps of at most 128 keys, one word of mask bits.
_INT8_BIAS_BLOCKS = {
    64: _HOPPER_BLOCKS, 128: (Tiles(128, 64, 12, 3),), 256: (Tiles(128, 64, 12, 2),),
}  # fmt: skip
_INT8_BIAS = FormTiles(
    {64: Tiles(192, 64, 16, 3), 128: Tiles(192, 64, 16, 2), 256: Tiles(128, 64, 12, 2)},
    block_mask=_INT8_BIAS_BLOCKS,
)
_INT8_WIDE_BIAS = FormTiles(
    {64: Tiles(192, 64, 16, 2), 256: Tiles(128, 64, 12, 2)},
    block_mask={256: (Tiles(128, 64, 12, 2),)},
)
_PV8_SCORED = FormTiles(
    {128: Tiles(192, 128, 16, 3), 256: Tiles(128, 128, 12, 2)}, block_mask=_HOPPER_INT8_BLOCKS
)
_BY_TILE_SCORED = FormTiles(  # a block mask leaves less room for the bits of a mask
    {64: Tiles(192, 128, 16, 3), 128: Tiles(192, 128, 16, 2), 256: Tiles(128, 128, 12, 2)},
    block_mask={128: _HOPPER_BLOCKS, 256: (Tiles(128, 64, 12, 2),)},
)
_FP8_SCORED = FormTiles(
    {96: Tiles(128, 128, 12, 3), 128: Tiles(128, 96, 12, 3)},
    block_mask={96: _HOPPER_BLOCKS, 128: _HOPPER_BLOCKS[1:]},
)
_FP8_BIAS = FormTiles(
    {64: Tiles(128, 96, 12, 3), 96: Tiles(128, 96, 12, 2), 128: Tiles(128, 64, 12, 3)},
    block_mask={128: (Tiles(128, 64, 12, 3),)},
)
_FA_INT8 = {
    "portable": Form(
        "attn_fa_int8.cu",
        FormTiles(
            {64: Tiles(128, 32, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 48, 4, 2)},
            block_mask=_PORTABLE_BLOCKS,
        ),
    ),
    "sm90": Form(
        "sm90/attn_fa_int8.cu",
        FormTiles(
            {64: Tiles(192, 128, 16, 3), 128: Tiles(192, 80, 16, 2), 256: Tiles(128, 96, 12, 2)},
            block_mask=_HOPPER_INT8_BLOCKS,
            scored={WIDE_BIAS: _INT8_WIDE_BIAS, "bias": _INT8_BIAS},
        ),
        _HOPPER_INT8,
        pieces=True,
    ),
    "pv8": Form(
        "forms/attn_fa_int8_pv8.cu", _PV8, Takes(values=("int8", "int8 by group", "fp8"))
    ),
    "pv8_whole": Form(
        "forms/attn_fa_int8_pv8_whole.cu",
        _PV8,
        Takes(
            values=("int8",), options=("mask", "block_mask", "packed"), p_types=("u8",),
            zero_points=False,
        ),
    ),
    # As timed: NOTES.md there, "fa_int8 against 8-bit attention". Two warpgroups have registers for
    # twice the keys.
    "sm90_pv8": Form(
        "sm90/attn_fa_int8_pv8.cu",
        FormTiles(
            {
                64: Tiles(192, 192, 16, 3), 80: Tiles(192, 128, 16, 3),
                128: Tiles(192, 128, 16, 3), 256: Tiles(128, 128, 12, 2),
            },
            other={128: (Tiles(128, 256, 12, 2), 1 / 1.05)},
            block_mask=_HOPPER_INT8_BLOCKS,
            scored={"bias": _INT8_BIAS, "softcap": _PV8_SCORED, "mask": _PV8_SCORED},
        ),
        _HOPPER_PV8._replace(values=("int8",)),
        pieces=True,
    ),
    # The keys of a tile share a scale of V. Two warpgroups up to 128 take longer (NOTES.md there,
    # "What was tried in the kernels").
    "sm90_pv8_by_tile": Form(
        "sm90/attn_fa_int8_pv8_by_tile.cu",
        FormTiles(
            {64: Tiles(192, 128, 16, 3), 128: Tiles(192, 128, 16, 2), 256: Tiles(128, 128, 12, 2)},
            block_mask=_HOPPER_INT8_BLOCKS,
            scored={"bias": _INT8_BIAS, "softcap": _BY_TILE_SCORED, "mask": _BY_TILE_SCORED},
        ),
        _HOPPER_PV8._replace(values=("int8 by group",), value_keys=HOPPER_VALUE_KEYS),
    ),
    # The most keys that leave registers for two levels of sums.
    "sm90_fp8": Form(
        "sm90/attn_fa_int8_fp8.cu",
        FormTiles(
            {64: Tiles(128, 192, 12, 3), 96: Tiles(128, 128, 12, 3), 128: Tiles(128, 96, 12, 3)},
            block_mask={96: _HOPPER_BLOCKS, 128: _HOPPER_BLOCKS[1:]},
            scored={"bias": _FP8_BIAS, "softcap": _FP8_SCORED, "mask": _FP8_SCORED},
        ),
        _HOPPER_INT8._replace(values=("fp8",), value_keys=GROUP_ALL),
        block_scales=False,
    ),
    # The tiles of the portable form, with steps that fit V's codes. They were not swept.
    "v8": Form(
        "forms/attn_fa_int8_v8.cu",
        FormTiles(
            {64: Tiles(128, 32, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
            block_mask=_PORTABLE_BLOCKS,
        ),
        Takes(values=("int8 beside 16bit",), p_types=("16bit",), value_keys=GROUP_ALL),
    ),
    # Few registers, since it waits for each tile; these divide the blocks of every block mask.
    "fused": Form(
        "forms/attn_fa_int8_fused.cu", FormTiles({256: Tiles(64, 64, 4, 1)}),
        Takes(values=("fused",)),
    ),
}  # fmt: skip

#: The rungs: name, the one idea, arithmetic, storage types, forms.
_LADDER = (
    ("unfused",  "S and P live in global memory",          "unfused",     _ALL,    _UNFUSED),
    ("fa",       "online softmax: S never leaves the SM",  "float32",     _ALL,    _FA),
    ("fa_warps", "each warp owns whole query rows",        "float32",     _ALL,    _FA_WARPS),
    ("fa_tc",    "both products on tensor cores",          "tensor_core", _16_BIT, _FA_TC),
    ("fa_int8",  "Q.K^T on INT8 tensor cores",             "int8",        _ALL,    _FA_INT8),
)  # fmt: skip

#: The ladder by name, each rung one idea above the one before, followed by registered kernels.
VARIANTS: dict[str, Variant] = {
    name: Variant(name, idea, family, forms["portable"].tiles.default, dtypes, forms)
    for name, idea, family, dtypes, forms in _LADDER
}


def lookup(name: str, *, also: tuple[str, ...] = ()) -> Variant:
    """Return the variant called `name`.

    Parameters
    ----------
    name : str
    also : tuple of str
        Further names that the caller accepts, for the message.

    Raises
    ------
    ValueError
        If no rung has this name. The message lists the accepted names.
    """
    try:
        return VARIANTS[name]
    except (KeyError, TypeError):  # a list has no hash
        taken = ", ".join((*VARIANTS, *also))
        hint = ""
        if isinstance(name, str) and name.endswith(".cu"):
            hint = ": cupyattn verify FILE.cu checks a file, cupyattn.register makes it a variant"
        raise ValueError(f"variant must be one of {taken}, got {shown(name)}{hint}") from None
