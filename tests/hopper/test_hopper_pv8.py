"""P and V in 8 bits in the Hopper form of fa_int8: O is whole numbers, and M falls as well."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, explain, strategies
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.numerics import Shifts
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.testing import verdict
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.quant import pv8_cases
from tests.support.runs import bits, normal

LN2 = math.log(2.0)
BY = Shifts()
FORM: dict[str, Any] = {"variant": "fa_int8", "form": "sm90_pv8"}
CHANNEL = QuantConfig(pv="int8", granularity_v="channel")
#: Configurations of each form with P and V in 8 bits.
FORMS: dict[str, dict[str, Any]] = {
    cases.PV8: {"quant": CHANNEL},
    cases.FP8: {"quant": QuantConfig(pv="fp8", granularity_v="channel")},
    cases.BY_TILE: {"quant": QuantConfig(pv="int8"), "arch": "sm_90a"},
}


def on_mirror(z: Any, **options: Any) -> Any:
    return attention_mirror(z, **FORM, return_lse=True, **options)


# ---- the mirror ----------------------------------------------------------------------------------


def test_m_follows_the_tiles_up_and_down() -> None:
    """It falls with them, not far below the highest; no weight leaves its code."""
    z = cases.exact(np.asarray, cases.up_and_down())
    _, _, steps = on_mirror(z, scale=LN2, trace=True)
    moves = [np.log2(step.alpha) for step in steps[1:]]
    assert (max(x.max() for x in moves), min(x.min() for x in moves)) == (BY.lower_bits, -5)
    highest = np.maximum.accumulate([step.S.max(axis=-1) for step in steps])
    for step, top in zip(steps, highest, strict=True):
        assert step.P.max() <= 2.0 ** (
            BY.code_bits - 1
        )  # a power of two here, and 255 if it were not
        assert (step.m >= np.floor(top) + 1 - BY.code_bits - BY.lower_bits).all()


def test_sums_of_many_keys_stay_in_their_range() -> None:
    """131,072 equal scores: M rises so that l, and with it O, keeps to half of its bits."""
    q, k, v = normal((1, 1, 2, 16), (1, 1, 131072, 16), seed=4)
    z = quantize(q * 0, k, v + 2, quant=CHANNEL, backend="mirror")
    o, lse, steps = on_mirror(z, trace=True)
    tiles = lookup("fa_int8").default_tiles(64, "sm90_pv8")
    limit = 2.0**BY.sum_bits + 2.0**BY.code_bits * tiles.block_kv
    assert 2.0**BY.sum_bits / 4 < max(step.l.max() for step in steps) <= limit
    assert steps[-1].m.max() > steps[0].m.max() and BY.guards(2048) and not BY.guards(2047)
    report = verdict.judge(o, q * 0, k, v + 2, lse=lse, quantized=z, **FORM)
    assert report.passed, str(report)


def test_steps_are_wide_where_lengths_fill_them() -> None:
    """Scales of K belong to the same keys either way."""
    rung = lookup("fa_int8")
    own = rung.forms["sm90_pv8"].tiles
    narrow, (wide, _) = own.default[128], own.other[128]
    few = rung.tiles_for(128, form="sm90_pv8", lengths=(4096, 77))
    some = rung.tiles_for(128, form="sm90_pv8", lengths=(512, 300))
    assert few == some == narrow
    for causal in (False, True):
        assert rung.tiles_for(128, form="sm90_pv8", lengths=(4096, 4096), causal=causal) == wide
    assert rung.tiles_for(80, form="sm90_pv8", lengths=(4096, 4096)) == own.default[80]
    q, k, v = normal((1, 1, 8, 128), (1, 1, 600, 128), seed=1)
    quant = QuantConfig("token", "block", pv="int8", granularity_v="channel")
    z = quantize(q, k, v, quant=quant, backend="mirror", arch="sm_90a")
    assert z.k_scale.shape[-1] == -(-600 // narrow.block_kv)


@pytest.mark.parametrize("rung", FORMS)
@pytest.mark.parametrize("regime", strategies.REGIMES)
def test_kinds_of_values(rung: str, regime: str) -> None:
    inputs = strategies.make_regime(regime, (1, 1, 17, 32), (1, 1, 400, 32), "float16", seed=1)
    form = {**FORM, "form": rung.partition("@")[2]}
    z = quantize(*inputs, backend="mirror", **FORMS[rung])
    o, lse = attention_mirror(z, return_lse=True, **form)
    report = verdict.judge(o, *inputs, lse=lse, quantized=z, **form)
    assert report.passed, str(report)
    assert np.isfinite(o.astype(np.float32)).all()


def test_the_bound_is_a_third_of_the_output_and_the_error_a_seventieth() -> None:
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64))
    z = quantize(q, k, v, quant=CHANNEL, backend="mirror")
    o, lse = on_mirror(z)
    report = verdict.judge(o, q, k, v, lse=lse, quantized=z, **FORM)
    assert 0.05 < report.ratio < 1 and report.tightness < 1 / 3 and report.relative_l2 < 1 / 70


# ---- the kernel, interpreted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "case"),
    [
        pytest.param(rung, case, marks=[] if case == quick else pytest.mark.slow)
        for rung, quick in ((cases.PV8, 0), (cases.FP8, 2), (cases.BY_TILE, 0))
        for case in range(4)
    ],
)
def test_problems(rung: str, case: int) -> None:
    inputs, options = list(cases.problems(rung))[case]
    cases.run(rung, inputs, backend="interpret", **options).check()


@pytest.mark.parametrize("rung", [cases.FP8, cases.BY_TILE])
def test_rows_without_keys(rung: str) -> None:
    q, k, v = normal((1, 1, 40, 16), (1, 1, 30, 16))
    one = cases.run(rung, (q, k, v + 5), backend="interpret", causal=True)
    one.check()
    assert not one.o[:, :, :10].any() and (one.lse[:, :, :10] == -np.inf).all()


@pytest.mark.parametrize("len_kv", [1, 193, 600])
def test_whole_numbers_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    """Scores are whole numbers, weights powers of two, all sums exact: every bit is known."""
    z = cases.exact(np.asarray, cases.up_and_down(len_kv=len_kv))
    given = {"scale": LN2, "return_lse": True}
    o, lse = attention(z, arch="sm_90a", backend="interpret", **given)
    expected, expected_lse = on_mirror(z, scale=LN2)
    assert bits(o) == bits(expected)
    assert np.abs(lse - expected_lse).max() <= 2.0**-20


@pytest.mark.parametrize(("check", "p_type"), pv8_cases.HOPPER_CHECKS)
def test_exactly(check: Any, p_type: str) -> None:
    """The portable form's fixtures, in tiles of this one; both Hopper forms."""
    z = pv8_cases.codes_of(np.zeros((8, 9)), np.zeros((9, 64)), np.asarray, p_type=p_type)
    form = "sm90_fp8" if p_type == "e4m3" else "sm90_pv8"
    assert f"fa_int8 ({form})" in str(explain(z, arch=pv8_cases.HOPPER))
    check("interpret", p_type, np.asarray, pv8_cases.HOPPER)


#: Sums that reach a quarter of their range once M has fallen: it rises again without a maximum.
WATCHED: dict[str, Any] = {"len_kv": 30 * cases.BLOCK_KV, "levels": (8,) * 21 + (3,) * 6 + (0,) * 3}


@pytest.mark.slow
def test_sums_are_watched_as_the_mirror_watches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit is known; of a kernel that watches nothing, others come out."""
    z = cases.exact(np.asarray, cases.up_and_down(**WATCHED))
    given: dict[str, Any] = {"scale": LN2, "causal": True}  # whose tiles are not cut
    expected, _, steps = on_mirror(z, trace=True, **given)
    rises = [i for i, step in enumerate(steps) if i and (np.log2(step.alpha) < 0).any()]
    assert BY.guards(WATCHED["len_kv"]) and rises == [4 * BY.watch_steps]

    def attend() -> Any:
        return attention(z, arch="sm_90a", backend="interpret", **given)

    assert bits(attend()) == bits(expected)
    watches = "may_overflow && step % WATCH_STEPS == 0"
    put_a_line_in_place("sm90/attn_fa_int8_pv8.cu", watches, "false", tmp_path, monkeypatch)
    assert bits(attend()) != bits(expected)


@pytest.mark.slow
def test_guarded_sums_and_rows_without_keys() -> None:
    """The number of keys requires checks for overflow; the first rows attend to none of them."""
    q, k, v = normal((1, 1, 20, 16), (1, 1, 4160, 16))
    one = cases.run(
        cases.PV8, (q, k, v), backend="interpret", window=(9, 0), causal_align="top-left"
    )
    one.check()
    q, k, v = normal((1, 1, 40, 16), (1, 1, 30, 16))
    one = cases.run(cases.PV8, (q, k, v + 5), backend="interpret", causal=True)
    one.check()
    assert not one.o[:, :, :10].any() and (one.lse[:, :, :10] == -np.inf).all()


# ---- which calls it takes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        (
            QuantConfig(pv="int8", granularity_v="channel", p_type="s8"),
            "takes P in u8, or in e4m3 with pv='fp8', got p_type 's8'",
        ),
        (QuantConfig(pv="int8", granularity_v="channel", symmetric=False), "takes no zero points"),
        (
            QuantConfig("block", "token", pv="int8", granularity_v="channel"),
            "one scale for 16 keys, or for a multiple, got 1",
        ),
    ],
)
def test_what_it_leaves_to_the_portable_form(quant: QuantConfig, reason: str) -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    given: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90a"}
    text = str(explain(q, k, v, quant=quant, **given))
    assert re.search(r"fa_int8 \(pv8(_whole)?\)", text) and reason in text
    assert "fa_int8 (sm90_pv8)" in str(explain(q, k, v, quant=CHANNEL, **given))
