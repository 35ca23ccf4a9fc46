"""Every form of a rung is one row: its kernel, its tiles, the calls it takes and why no others."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import KERNELS
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.kernels.forms import OPTIONS, VALUES, Form, FormTiles, Takes
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import support
from cupyattn.problem.checks import AttentionSpec, Packed
from cupyattn.problem.form import scale_tiles, settle
from cupyattn.problem.operands import Codes, Operands, ValueCodes
from cupyattn.quant import QuantConfig
from tests.support.own_kernels import renamed

#: Every form that the library has, by rung and name.
ROWS = {
    (rung, name): form
    for rung, variant in ladder.VARIANTS.items()
    if variant.source is None
    for name, form in variant.forms.items()
}
IDS = [f"{rung}@{name}" for rung, name in ROWS]
CALL = AttentionSpec(1, 8, 1, 4, 1024, 64, "float16", 0.125)


def operands_of(call: AttentionSpec, misalignment: int = 0) -> Operands:
    q = Operand.contiguous((call.batch, call.heads, call.len_q, call.head_dim), 2)
    k = Operand.contiguous((call.batch, call.heads_kv, call.len_kv, call.head_dim), 2)
    return Operands(replace(q, misalignment=misalignment), k, k, q)


def calls() -> Iterator[AttentionSpec]:
    """One call with each option, few rows and many, sizes that some form has no tiles for."""
    packed = Packed(300, 3000, bottom_right=True)
    options: tuple[dict[str, Any], ...] = (
        {}, {"softcap": 20.0}, {"mask": True}, {"bias": "float32"}, {"packed": packed},
        {"block_mask": (128, 64)}, {"block_mask": (64, 64)},
        {"block_mask": (128, 64), "packed": packed}, {"mask": True, "bias": "float16"},
        {"len_q": 512}, {"len_q": 512, "len_kv": 0}, {"len_q": 512, "head_dim": 256},
    )  # fmt: skip
    yield from (replace(CALL, **one) for one in options)


def values_of(group: int, p_type: str, misalignment: int = 0) -> ValueCodes:
    scale = replace(Operand.contiguous((1, 1, 8, 64), 4), misalignment=misalignment)
    return ValueCodes(scale, group, p_type, smoothed=True)


def codes() -> Iterator[Codes | None]:
    """Codes of every kind, including codes of each kind that some form does not support."""
    values = (
        None, values_of(GROUP_ALL, "u8"), values_of(GROUP_ALL, "s8"), values_of(128, "u8"),
        values_of(32, "u8"), values_of(128, "u8", 4), values_of(128, "s8"),
        values_of(GROUP_ALL, "e4m3"), values_of(128, "e4m3"), values_of(GROUP_ALL, "16bit"),
    )  # fmt: skip
    yield None
    yield Codes(64, 64, fused=True)
    for one, zero_points, keys in itertools.product(values, (False, True), (16, 8)):
        yield Codes(16, keys, zero_points, one)


def offers() -> list[support.Offer]:
    """All of them together, for each architecture, with tiles and without."""
    tiles, archs = (None, Tiles(128, 64, 12, 2)), ("sm_80", "sm_90a")
    return [
        support.Offer(call, operands, one, given, arch)
        for call, one, given, arch in itertools.product(calls(), codes(), tiles, archs)
        for operands in (operands_of(call), operands_of(call, 2), None)
    ]


OFFERS = offers()


# ---- rows ----------------------------------------------------------------------------------------


def test_every_kernel_of_attention_is_in_one_row() -> None:
    """The folders also have kernels of other operations, which have no row."""
    sources = Counter(KERNELS / form.source for form in ROWS.values())
    assert sources == Counter(KERNELS.rglob("attn_*.cu"))
    folders = {Path("."), Path("forms"), Path("forms/split"), Path("sm90")}
    found = {path for folder in folders for path in (KERNELS / folder).glob("*.cu")}
    assert found == set(sources)


@pytest.mark.parametrize(("rung", "name"), ROWS, ids=IDS)
def test_the_tiles_of_a_form_end_with_its_largest_head_dim(rung: str, name: str) -> None:
    variant, tiles = ladder.lookup(rung), ROWS[rung, name].tiles
    limits = list(tiles.default)
    assert limits == sorted(limits) and limits[-1] == variant.largest_head_dim(name)
    assert limits[-1] == ladder.MOST_HEAD_DIM or (rung, name) == ("fa_int8", "sm90_fp8")
    assert variant.default_tiles(limits[-1], name) == tiles.default[limits[-1]]
    with pytest.raises(ValueError, match=f"the {name} form of {rung} takes head_dim up to"):
        variant.tiles_for(limits[-1] + 1, form=name)
    assert {*tiles.other, *tiles.more_rows} <= set(limits)
    blocks = list(tiles.block_mask)
    assert blocks == sorted(blocks) and blocks[-1:] in ([], limits[-1:])


def test_the_portable_form_comes_first_and_takes_all_that_others_leave() -> None:
    for variant in ladder.VARIANTS.values():
        first, *_ = variant.forms.items()
        assert first == ("portable", variant.forms["portable"])
        assert first[1].takes == Takes() and first[1].tiles.default is variant.tiles


def test_rows_name_kinds_and_options_that_there_are() -> None:
    for form in ROWS.values():
        assert set(form.takes.values) <= set(VALUES) and form.takes.values
        assert set(form.takes.options) <= set(OPTIONS)
        assert form.on_hopper == (Path(form.source).parent.name == "sm90")


# ---- which calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rung", "name"), ROWS, ids=IDS)
def test_a_refusal_has_one_sentence_of_reason(rung: str, name: str) -> None:
    """And a call that is taken has none."""
    form, said = ROWS[rung, name], set()
    for one in OFFERS:
        found = support.takes(name, form, one)
        assert found.supported == (found.reason == "")
        said.add(found.reason)
    assert "" in said, "it takes none of the calls"
    for reason in said - {""}:
        assert re.fullmatch(r"(the|there) [^\n]*[^.\s]", reason) and ". " not in reason
    assert len(said) > (10 if form.on_hopper and rung == "fa_int8" else 1)


def test_every_reason_is_met() -> None:
    """Each message of `cupyattn.problem.support` is one that some call above gets."""
    said = {
        support.takes(name, form, one).reason
        for (_, name), form in ROWS.items() for one in OFFERS
    }  # fmt: skip
    for words in (
        "takes V in 16 or 32 bits, got", "needs arch='sm_90a'",
        "no keys for the copy engine", "takes no zero points", "has one scale for 16 keys",
        "takes P in u8", "takes one scale for a channel", "has one scale of V for 128 keys",
        "has one scale of V for 64 keys", "reads scales of V 16 bytes", "takes head_dim up to 128",
        "takes no softcap", "takes no mask and no bias", "takes no packed sequences",
        "block mask of packed sequences", "block masks of 128 query rows", "of the caller's",
        "takes 1 to 16 queries", "the copy engine needs addresses",
    ):  # fmt: skip
        assert any(words in reason for reason in said), words


@pytest.mark.parametrize("rung", ladder.VARIANTS)
def test_of_the_forms_that_take_a_call_the_last_runs(rung: str) -> None:
    """Unless a form for few rows would run, and another takes them with heads stacked."""
    variant, taken = ladder.lookup(rung), set()
    for one in OFFERS:
        names = [
            name for name, form in variant.forms.items()
            if support.takes(name, form, one).supported
        ]  # fmt: skip
        if not names:
            with pytest.raises(UnsupportedError, match=f"^{rung} has no kernel for codes"):
                settle_offer(variant, one)
            continue
        try:
            kernel = settle_offer(variant, one)
        except ValueError as error:
            assert "must divide the blocks of the block mask" in str(error)
            continue
        assert kernel.form == names[-1] or (kernel.stacks and names[-1] == "split")
        meant = any(form.on_hopper for _, form in support.candidates(variant, one))
        left_out = meant and not kernel.row.on_hopper
        if kernel.form != "split":  # whose note says how the keys are split
            assert kernel.note.startswith("portable form: ") == left_out
        taken.add(kernel.form)
    assert taken == set(variant.forms)


def settle_offer(variant: ca.Variant, one: support.Offer) -> Any:
    return settle(variant, one.call, one.operands, codes=one.codes, tiles=one.tiles, arch=one.arch)


def test_a_form_of_ones_own_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a form has to know nothing else of it."""
    fa_tc, tiles = ladder.lookup("fa_tc"), Tiles(64, 64, 4, 2)
    row = Form("attn_fa_tc.cu", FormTiles({128: tiles}), Takes(options=("mask",), few_rows=True))
    mine = replace(fa_tc, forms={**fa_tc.forms, "mine": row})
    monkeypatch.setitem(ladder.VARIANTS, "fa_tc", mine)
    assert settle(mine, CALL).form == "mine" and settle(mine, CALL).tiles == tiles
    assert settle(mine, replace(CALL, mask=True)).form == "mine"
    assert settle(mine, replace(CALL, bias="float32")).form == "portable"
    assert settle(mine, replace(CALL, head_dim=256)).form == "split"
    with pytest.raises(UnsupportedError, match="the portable form takes head_dim up to 256, got"):
        settle(mine, replace(CALL, head_dim=300))
    assert settle(fa_tc, CALL).form == "split"


# ---- rungs of one's own --------------------------------------------------------------------------


@pytest.fixture(params=["made", "copied"])
def own(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ca.Variant:
    """An INT8 rung of one's own, which has one form: a new one, or a copy of fa_int8."""
    monkeypatch.setattr(ladder, "VARIANTS", dict(ladder.VARIANTS))
    made = ca.Variant("own", "one's own", "int8", {256: Tiles(64, 32, 4, 2)})
    copied = replace(ladder.lookup("fa_int8"), name="own")
    variant = {"made": made, "copied": copied}[request.param]
    return ca.register(variant, renamed(tmp_path, "own", "fa_int8"))


def test_a_rung_of_ones_own_has_one_form(own: ca.Variant) -> None:
    assert list(own.forms) == ["portable"]
    assert own.forms["portable"].source == own.source
    assert own.forms["portable"].tiles.default is own.tiles
    assert settle(own, CALL, codes=Codes(16, 16)).form == "portable"
    with pytest.raises(ValueError, match="form must be one of 'portable' for own, got 'sm90'"):
        own.default_tiles(64, "sm90")


@pytest.mark.parametrize(
    ("quant", "instead"),
    [
        (QuantConfig(pv="int8"), "codes of V: use quant.pv='16bit'"),
        (
            QuantConfig(smooth_k=False, fused=True),
            "codes that it makes itself: use quant.fused=False",
        ),
    ],
)
def test_codes_that_it_has_no_kernel_for_are_refused(
    own: ca.Variant, quant: QuantConfig, instead: str
) -> None:
    said = re.escape(f"own has no kernel for {instead}, or fa_int8")
    with pytest.raises(UnsupportedError, match=said):
        scale_tiles(own, 64, quant, None)
    of_v = None if quant.fused else values_of(GROUP_ALL, "u8")
    with pytest.raises(UnsupportedError, match=said):
        settle(own, CALL, codes=Codes(16, 16, values=of_v, fused=quant.fused))
