"""Softcap, bias and masks in the Hopper forms of fa_int8, in the interpreter and on the mirror."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import BlockMask, bounds, testing
from cupyattn.compiler import modules as compiler
from cupyattn.interpret import KernelFault
from cupyattn.kernels import tile_pieces
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.numerics import HEADROOM, numerics
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans.records import Plan
from cupyattn.quant import QuantConfig
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper.test_hopper_scores import (
    BFLOAT16,
    LEN_KV,
    LEN_Q,
    MISTAKES,
    arrays,
    bias_of,
    counted,
    dense,
    key_mask,
    row_mask,
)
from tests.support import runs
from tests.support.runs import Arrays, bits, hopper_blocks, packed, run_packed

#: V in 16 bits; whole numbers; by tile; in e4m3.
RUNGS = ("fa_int8@sm90", "fa_int8@sm90_pv8", "fa_int8@sm90_pv8_by_tile", "fa_int8@sm90_fp8")
SLOW = pytest.mark.slow
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.5, "causal": True},
    "mask of rows": {"mask": row_mask()},
    "mask of keys": {"mask": key_mask(), "window": (100, 20)},
    "dense bias": {"bias": dense(), "causal": True},
    "bias of keys": {"bias": bias_of(1, LEN_KV)},
    "bias of rows": {"bias": bias_of(2, LEN_Q, 1, dtype=np.float32), "softcap": 30.0},
    "all": {"softcap": 20.0, "bias": dense(BFLOAT16), "mask": row_mask()},
    "causal mask": {"mask": row_mask(), "causal": True},
    "block mask": {
        "mask": key_mask(), "bias": dense(),
        "block_mask": BlockMask(np.array([[1, 0, 1], [0, 1, 1]], bool)[None, None], 128, 128),
    },
}  # fmt: skip
#: Options that run with each form in a quick run of the tests.
QUICK = dict(zip(RUNGS, ("dense bias", "mask of keys", "all", "mask of rows"), strict=True))


def quant_of(rung: str, **changed: Any) -> QuantConfig:
    return replace(runs.asked_for(rung).get("quant", QuantConfig()), **changed)


def run(
    rung: str, inputs: Arrays, *, backend: str = "interpret", blocks: int = 1, **options: Any
) -> runs.Run:
    """Call `attention`; in the interpreter a block takes several tiles, one after the other."""
    with hopper_blocks(blocks):
        one = runs.run(rung, inputs, arch="sm_90a", backend=backend, **options)
    assert one.form == rung.partition("@")[2]
    return one


def planned(rung: str, inputs: Arrays | None = None, **options: Any) -> Plan:
    asked = {**runs.asked_for(rung), "arch": "sm_90a", "backend": "interpret", **options}
    return explain.plans(resolved(*(inputs or arrays()), **asked))[-1]


def with_speeds(chosen: dict[str, str]) -> list[Any]:
    """Each of `OPTIONS` with every other form, in turn; all but the chosen ones are slow."""
    return [
        pytest.param(rung, name, marks=[] if chosen.get(rung) == name else SLOW)
        for i, rung in enumerate(RUNGS)
        for j, name in enumerate(OPTIONS)
        if chosen.get(rung) == name or (i + j) % 2
    ]


# ---- judged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_judgements_hold_on_the_mirror(rung: str, name: str) -> None:
    run(rung, arrays(), backend="mirror", **OPTIONS[name]).check()


@pytest.mark.parametrize(("rung", "name"), with_speeds(QUICK))
def test_the_judgements_hold(rung: str, name: str) -> None:
    one = run(rung, arrays(), **OPTIONS[name])
    one.check()
    if "mask" in OPTIONS[name] and OPTIONS[name]["mask"].shape[2] > 1:
        assert (one.o[:, :, 5] == 0).all() and (one.lse[:, :, 5] == -np.inf).all()


def masked_operands(kind: str, head_dim: int, dtype: str) -> tuple[Arrays, dict[str, Any]]:
    """Operands, and a mask of rows; with "huge" the keys that it masks have the largest scores."""
    q, k, v = arrays(dtype, head_dim)
    mask = row_mask()
    if kind == "huge":
        mask = mask & (np.arange(LEN_KV) % 3 != 1)
        k = np.where((np.arange(LEN_KV) % 3 == 1)[:, None], 100 * k, k).astype(k.dtype)
    return (q, k, v), {"mask": mask, "causal": kind == "causal"}


def coded(inputs: Arrays) -> Any:
    return ca.quantize(*inputs, quant=quant_of(RUNGS[0]), arch="sm_90a", backend="interpret")


def o_with_and_without_lse(z: Any, **options: Any) -> tuple[Any, Any]:
    """O of codes, from a kernel that sums weights for lse and from one that cuts them."""
    asked = {"variant": "fa_int8", "arch": "sm_90a", "backend": "interpret", **options}
    return ca.attention(z, return_lse=True, **asked)[0], ca.attention(z, **asked)


@pytest.mark.parametrize(
    ("kind", "head_dim", "dtype"),
    [
        ("causal", 64, "float16"), ("huge", 64, "float16"),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (("rows", 64, "float16"), ("causal", 128, "bfloat16"),
                        ("huge", 128, "bfloat16"))
        ),
    ],
)  # fmt: skip
def test_weights_are_cut_as_scores_are_masked(kind: str, head_dim: int, dtype: str) -> None:
    """Without lse, masks of rows cut weights out of packed pairs; with it they mask scores.

    A row that has had no key yet makes its warp look for maxima only where scores are masked, so
    bits are those of rows that lie in other warps.
    """
    inputs, options = masked_operands(kind, head_dim, dtype)
    z = coded(inputs)
    masked, cut = o_with_and_without_lse(z, **options)
    assert (masked[:, :, 16:].view(np.uint16) == cut[:, :, 16:].view(np.uint16)).all()
    assert (cut[:, :, 5] == 0).all()  # the mask leaves it no key
    report = testing.judge(cut, *inputs, variant="fa_int8", quantized=z, form="sm90", **options)
    assert report.passed, str(report)
    assert not testing.judge(
        1.01 * cut, *inputs, variant="fa_int8", quantized=z, form="sm90", **options
    ).passed


@pytest.mark.parametrize(
    ("source", "line", "instead"),
    [
        pytest.param(
            "sm90/int8/step_bits.cuh", "0xcc88 + bit / 8", "0x88cc + bit / 8",
            marks=SLOW, id="the keys of a pair are exchanged",
        ),
        pytest.param(
            "sm90/attn_fa_int8.cu", "SUM_BOXES && !LSE;", "SUM_BOXES;", id="lse sums what is cut"
        ),
    ],
)  # fmt: skip
def test_a_cut_that_goes_wrong_is_seen(
    source: str, line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    if source.endswith(".cu"):
        assert not run(RUNGS[0], arrays(), mask=row_mask()).judge().passed
    else:
        masked, cut = o_with_and_without_lse(coded(arrays()), mask=row_mask())
        assert (masked != cut).any()


@SLOW
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("name", "head_dim"), [("all", 80), ("dense bias", 128), ("mask of rows", 256), ("all", 256)]
)
def test_they_hold_at_other_head_sizes(rung: str, head_dim: int, name: str) -> None:
    variant, _, form = rung.partition("@")
    if head_dim <= lookup(variant).forms[form].tiles.largest_head_dim:
        run(rung, arrays("bfloat16", head_dim, heads_kv=2), **OPTIONS[name]).check()


@SLOW
@pytest.mark.parametrize("rung", ["fa_int8@sm90", "fa_int8@sm90_fp8"])
def test_zero_points_and_the_steps_of_a_mask(rung: str) -> None:
    """Data of the keys is loaded for the steps that the mask leaves."""
    q, k, v = arrays()
    quant = quant_of(rung, symmetric=False)
    run(rung, (q + 2, k + 3, v), mask=row_mask(), quant=quant).check()


@SLOW
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_sequences_that_are_packed(rung: str, name: str) -> None:
    inputs, ends = packed(((60, 70), (37, 104), (0, 9), (150, 0)), 2, 1, 64)
    mask = np.random.default_rng(3).random((4, 1, 150, 104)) < 0.6
    options: dict[str, Any] = {"mask": mask} if name == "mask" else {"softcap": 8.0}
    if name == "bias":
        options["bias"] = bias_of(4, 1, 150, 104)
    with hopper_blocks(1):
        found = run_packed(rung, inputs, ends, arch="sm_90a", backend="interpret", **options)
    for one in found:
        assert one.form == rung.partition("@")[2]
        one.check()


@SLOW
@pytest.mark.parametrize("rung", RUNGS[:2])
def test_tiles_are_cut_into_pieces(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a softcap, and a bias that all rows share, tiles are alike."""
    monkeypatch.setattr(tile_pieces, "LEAST_SAVED", 1)
    options: dict[str, Any] = {"softcap": 8.0, "bias": bias_of(1, LEN_KV)}
    with hopper_blocks(3):
        assert planned(rung, **options).launches[-1].entry == "merge_pieces"
    run(rung, arrays(), blocks=3, **options).check()


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [rung.partition("@")[2] for rung in RUNGS])
def test_scores_are_changed_in_log2_units(form: str) -> None:
    n = numerics("int8", form, "float16", softcap=True, bias=True)
    assert n.scored and not n.subtracts_first
    assert replace(n, softcap=False, bias=False, scored=False) == numerics("int8", form, "float16")
    assert n.headroom == (HEADROOM if form == "sm90" else 0)


@SLOW
def test_counts_come_out_exact() -> None:
    """Scores of 0, as many keys as a power of two, whole values: no rounding but the last."""
    operands, mask, expected = counted()
    assert bits(run(RUNGS[0], operands, mask=mask).o) == bits(expected)
    bias = runs.embedded(np.where(mask, np.float16(0), np.float16(-np.inf)))
    assert bits(run(RUNGS[0], operands, bias=bias, softcap=3.0).o) == bits(expected)


@pytest.mark.parametrize("rung", [RUNGS[0], *(pytest.param(x, marks=SLOW) for x in RUNGS[1:])])
def test_a_mask_of_the_last_keys_gives_the_bits_of_a_call_without_them(rung: str) -> None:
    """A mask alone changes no number: full steps and mixed ones round as plain kernels do."""
    q, k, v = arrays()
    keys = 208  # ends within a step
    k[:, :, keys:] = v[:, :, keys:] = 0  # no scale of a channel depends on them
    options: dict[str, Any] = {"quant": quant_of(rung, smooth_k=False, smooth_v=False)}
    mask = (np.arange(LEN_KV) < keys)[None, None, None]
    options["tiles"] = planned(rung, mask=mask, **options).tiles
    assert keys % options["tiles"].block_kv
    one = run(rung, (q, k, v), mask=mask, **options)
    other = run(rung, (q, k[:, :, :keys], v[:, :, :keys]), **options)
    assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@SLOW
@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_masked_has_no_influence(rung: str) -> None:
    """Keys that share a scale, which is NaN, and that mask or bias keep out."""
    q, k, v = arrays()
    spoilt = k.copy()
    spoilt[:, :, 32:48] = np.nan
    mask = row_mask()
    mask[..., 32:48] = False
    bias = dense()
    bias[..., 32:48] = -np.inf
    quant = quant_of(rung, smooth_k=False)
    for options in ({"bias": bias, "softcap": 9.0}, {"mask": mask}):
        one, other = (run(rung, (q, x, v), quant=quant, **options) for x in (k, spoilt))
        assert np.isfinite(one.o.astype(float)).all()
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@pytest.mark.parametrize("rung", [RUNGS[1], *(pytest.param(x, marks=SLOW) for x in RUNGS[2:])])
@pytest.mark.parametrize("value", [np.inf, pytest.param(np.nan, marks=SLOW)])
def test_a_bias_that_is_no_number_is_passed_on(rung: str, value: float) -> None:
    """To its row alone: no code says so."""
    bias = np.zeros((1, 1, LEN_Q, LEN_KV), np.float16)
    bias[:, :, 3, 200] = value
    for backend in ("interpret", "mirror"):
        o = run(rung, arrays(), backend=backend, bias=bias).o.astype(float)
        assert np.isnan(o[:, :, 3]).all() and np.isfinite(np.delete(o, 3, axis=2)).all()


@SLOW
@pytest.mark.parametrize("rung", RUNGS)
def test_a_very_negative_bias_masks(rung: str) -> None:
    """In whole steps too, over which M is coarse; a row of nothing else gets some finite mean."""
    bias = np.zeros((1, 1, LEN_Q, LEN_KV), BFLOAT16)
    bias[..., :200] = bias[:, :, 7] = -1e9
    inputs = arrays("bfloat16")
    one = run(rung, inputs, bias=bias)
    assert np.isfinite(one.o.astype(float)).all()
    masked = run(rung, inputs, mask=bias[:, :, :1] == 0).o.astype(float)
    others = np.arange(LEN_Q) != 7
    np.testing.assert_allclose(one.o.astype(float)[:, :, others], masked[:, :, others], atol=0.03)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_bound_with_all_of_them_stays_near_that_without(rung: str) -> None:
    variant, _, form = rung.partition("@")
    q, k, v = arrays()
    z = run(rung, (q, k, v), backend="mirror", softcap=50.0).quantized
    given: dict[str, Any] = {"variant": variant, "form": form, "quantized": z}
    plain = bounds.attention(q, k, v, **given).total
    bias = np.full((1, 1, 1, LEN_KV), 0.25, np.float16)
    options: dict[str, Any] = {"softcap": 50.0, "bias": bias, "mask": np.ones(LEN_KV, bool)}
    scored = bounds.attention(q, k, v, **given, **options).total
    assert (scored < 1.5 * plain).all()


# ---- plans ---------------------------------------------------------------------------------------

#: Bytes that default tiles may spill: an address or two of the thread that copies. With a mask
#: alone less than a plain kernel spills with scales of 16 keys (SPILLED_FINE). The bits that
#: weights are cut by take one word more, and fewer instructions.
SPILLED = {("fa_int8@sm90_fp8", 128, "bias"): 8, ("fa_int8@sm90", 64, "mask"): 20}


@SLOW
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("head_dim", "name", "blocks"),
    [
        *((128, *one) for one in (
            ("softcap", 0), ("mask of rows", 128), ("causal mask", 0), ("dense bias", 0), ("all", 0)
        )),
        (64, "causal mask", 0),
        *((other, *one) for other in (64, 256) for one in (("mask of rows", 128), ("all", 0))),
    ],
)  # fmt: skip
def test_default_tiles_spill_nothing_and_fit(
    rung: str, head_dim: int, name: str, blocks: int
) -> None:
    """Each option at 128, where registers are few; at other head sizes all, and masks."""
    variant, _, form = rung.partition("@")
    if head_dim > lookup(variant).forms[form].tiles.largest_head_dim:
        return
    options = {n: x for n, x in OPTIONS[name].items() if n != "causal"}
    if blocks:
        kept = np.ones((1, 1, 2, -(-LEN_KV // blocks)), bool)
        options["block_mask"] = BlockMask(kept, 128, blocks)
    plan = planned(rung, arrays("bfloat16", head_dim), **options)
    (launch,) = (one for one in plan.launches if one.entry.startswith("attn_"))
    binary = compiler.build(launch.module, "sm_90a")
    taken = binary.kernels[launch.entry]
    allowed = SPILLED.get((rung, head_dim, name.split()[-1]), 0)
    assert plan.form == form and "serialized" not in binary.log
    assert max(taken.spill_stores, taken.spill_loads) <= allowed
    assert binary.smem_bytes <= 227 * 1024


@pytest.mark.parametrize("rung", RUNGS)
def test_steps_have_at_most_128_keys(rung: str) -> None:
    for options in OPTIONS.values():
        plan = planned(rung, **{n: x for n, x in options.items() if n != "block_mask"})
        assert plan.form == rung.partition("@")[2] and plan.tiles.block_kv <= 128
    plain = planned(rung)
    assert not plain.features.scored and [one.entry for one in plain.launches][-1:] == [
        lookup("fa_int8").forms[plain.form].entry_point
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2e4}, "takes softcap*log2(e) from 2**-10 to 2**14"),
    ],
)
def test_what_the_portable_form_takes(options: dict[str, Any], reason: str) -> None:
    quant = QuantConfig(smooth_k=False)
    plan = planned(RUNGS[0], quant=quant, **options)
    assert plan.form == "portable" and reason in plan.note
    assert planned(RUNGS[0], quant=quant, softcap=1e4, scale=1e-6).form == "sm90"


def test_a_float32_bias_stays_in_the_form_for_values_of_16_bits() -> None:
    """And in head sizes with room for two stages of it."""
    for rung in RUNGS[1:]:
        plan = planned(rung, bias=dense(np.float32))
        assert plan.form != rung.partition("@")[2]
        assert "takes a bias of float16 or bfloat16, got float32" in plan.note
    plan = planned(RUNGS[0], arrays(head_dim=136), bias=dense(np.float32))
    assert plan.form == "portable" and "float32 bias up to head_dim 128, got 136" in plan.note


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {"causal": True}),
        *(
            pytest.param(*one, marks=SLOW)
            for one in ((64, {"mask": row_mask(), "softcap": 20.0}), (128, {}), (96, {}))
        ),
    ],
)
def test_the_judgements_hold_with_a_float32_bias(head_dim: int, options: dict[str, Any]) -> None:
    run(RUNGS[0], arrays("bfloat16", head_dim), bias=dense(np.float32), **options).check()


def test_a_bias_out_of_reach_is_copied() -> None:
    bias = np.zeros((LEN_Q, LEN_KV + 1), np.float16)[:, 1:]
    for rung in RUNGS:
        assert planned(rung, bias=bias).form == planned(rung, bias=dense()).form != "portable"


# ---- mistakes ------------------------------------------------------------------------------------

OWN_MISTAKES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "scores in natural units": (
        "sm90/int8/scored_step.cuh",
        "S_acc[i] = float(dot[i]) * factor[i / PART][i / 2 % 2];",
        "S_acc[i] = float(dot[i]) * factor[i / PART][i / 2 % 2] * 0.693f;",
        {"softcap": 2.5},
    ),
    "a skipped step keeps its bias": (
        "sm90/attn_fa_int8.cu", "      change_scores.skip(smem.places);", "",
        {"bias": dense(), "causal": True},
    ),
    "a mixed step taken for a full one": (
        "sm90/int8/producer.cuh", "if (LISTED) smem.step[at.stage] = step_word;",
        "if (LISTED) smem.step[at.stage] = step_word & ~1;", {"mask": row_mask()},
    ),
    "a mixed step counted among the whole ones": (
        "prepare/pack_mask.cu", "found == MIXED || (found == FULL &&", "(found == FULL &&",
        {"mask": key_mask()},
    ),
    "places left out of a mixed step": (
        "sm90/int8/step_bits.cuh", "step.bits[h] & bits_below(place.end[h]);", "step.bits[h];",
        {"mask": row_mask(), "causal": True},
    ),
    "a lane's last key left out by a place": (
        "prims/score/mask_bits.cuh", "count = keys / 8 * 2 + min(keys % 8, 2);",
        "count = keys / 8 * 2 + min(keys % 8, 1);", {"mask": row_mask(), "causal": True},
    ),
}  # fmt: skip
FOUND = [(rung, name) for rung in RUNGS for name in MISTAKES] + [
    (RUNGS[0], name) for name in OWN_MISTAKES
]
#: One of each, and each form once.
FOUND_QUICKLY = {*zip(RUNGS, MISTAKES, strict=True)}


@pytest.mark.parametrize(
    ("rung", "name"),
    [pytest.param(*x, marks=[] if x in FOUND_QUICKLY else SLOW) for x in FOUND],
)
def test_a_mistake_is_found(
    rung: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, line, instead, options = {**MISTAKES, **OWN_MISTAKES}[name]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    try:
        one = run(rung, arrays(), **options)
    except KernelFault as fault:
        assert fault.finding.kind == "deadlock"
    else:
        assert not one.judge().passed
