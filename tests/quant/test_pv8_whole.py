"""fa_int8 with P and V in 8 bits and O as whole numbers, in its portable form.

`tests.quant.pv8_cases` and whole calls (`tests.support.runs.RUNGS`) run this form, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, explain
from cupyattn.compiler.modules import KERNELS
from cupyattn.kernels.numerics import WHOLE
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.quant import pv8_cases
from tests.support.runs import bits, normal

LN2 = math.log(2.0)
SOURCE = "forms/attn_fa_int8_pv8_whole.cu"
CHANNEL = QuantConfig("block", "block", pv="int8", granularity_v="channel")
FORM: dict[str, Any] = {"variant": "fa_int8", "form": "pv8_whole"}
HERE: dict[str, Any] = {"arch": pv8_cases.PORTABLE, "backend": "interpret", "scale": LN2}


def scores_of(len_kv: int, **levels: Any) -> np.ndarray:
    return cases.up_and_down(len_kv=len_kv, block_kv=pv8_cases.BLOCK_KV, **levels)


def test_constants_are_those_of_the_kernel() -> None:
    text = (KERNELS / SOURCE).read_text() + (KERNELS / "prims/score/shift_state.cuh").read_text()
    found = dict(re.findall(r"constexpr int ([A-Z_]+) = (\d+);", text))
    for name in ("code_bits", "lower_bits", "watch_steps", "sum_bits", "l_bits"):
        assert int(found[name.upper()]) == getattr(WHOLE, name)
    # What comes between two looks at l, in units of the lowest M, in the largest tiles there are.
    added = WHOLE.watch_steps * 128 * 255 << WHOLE.lower_bits
    assert added < 3 << WHOLE.sum_bits - 2


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_error_is_a_fiftieth(length: int, head_dim: int) -> None:
    """It exceeds the error of scales by tile, whose codes of P use their whole range."""
    q, k, v = normal((1, 1, 64, head_dim), (1, 1, length, head_dim))
    z = quantize(q, k, v, quant=CHANNEL, backend="mirror")
    exact = attention_exact(q, k, v)
    o, by_tile = (
        attention_mirror(z, variant="fa_int8", form=form).astype(np.float64)
        for form in ("pv8_whole", "pv8")
    )
    error, finer = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (o, by_tile))
    assert finer < error < 2.0e-2


@pytest.mark.parametrize("len_kv", [1, 65, 320])
def test_whole_numbers_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    """Scores are whole numbers, weights powers of two, all sums exact: every bit is known."""
    z = cases.exact(np.asarray, scores_of(len_kv))
    o, lse = attention(z, return_lse=True, **HERE)
    expected, expected_lse = attention_mirror(z, **FORM, return_lse=True, scale=LN2)
    assert bits(o) == bits(expected)
    assert np.abs(lse - expected_lse).max() <= 2.0**-20


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("shifted(O_acc[r][c][i], right_shift(-rise))", "O_acc[r][c][i]"),
        ("l = shifted(l, right_shift(-rise));", ""),
        ("highest - LOWER_BITS", "highest"),
    ],
)
def test_a_shift_left_out_is_noticed(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = cases.exact(np.asarray, scores_of(320))
    expected = attention_mirror(z, **FORM, scale=LN2)
    put_a_line_in_place(SOURCE, line, instead, tmp_path, monkeypatch)
    assert bits(attention(z, **HERE)) != bits(expected)


#: Sums that reach a quarter of their range once M has fallen: it rises again without a maximum.
WATCHED: dict[str, Any] = {
    "len_kv": 66 * pv8_cases.BLOCK_KV,
    "levels": (8,) * 57 + (3,) * 6 + (0,) * 3,
}


@pytest.mark.slow
def test_sums_are_watched_as_the_mirror_watches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit is known; of a kernel that watches nothing, others come out."""
    z = cases.exact(np.asarray, scores_of(**WATCHED))
    expected, steps = attention_mirror(z, **FORM, scale=LN2, trace=True)
    rises = [i for i, step in enumerate(steps) if i and (np.log2(step.alpha) < 0).any()]
    assert WHOLE.guards(WATCHED["len_kv"]) and rises == [5 * WHOLE.watch_steps]
    assert bits(attention(z, **HERE)) == bits(expected)
    put_a_line_in_place(SOURCE, "step == watched", "false", tmp_path, monkeypatch)
    assert bits(attention(z, **HERE)) != bits(expected)


def test_sums_of_many_keys_stay_in_their_range() -> None:
    """131,072 equal scores: M rises so that l, and with it O, keeps to half of its bits."""
    q, k, v = normal((1, 1, 2, 16), (1, 1, 131072, 16), seed=4)
    z = quantize(q * 0, k, v + 2, quant=CHANNEL, backend="mirror")
    _, steps = attention_mirror(z, **FORM, trace=True)
    assert 2.0**WHOLE.sum_bits / 4 < max(step.l.max() for step in steps) <= 2.0**WHOLE.sum_bits
    assert steps[-1].m.max() > steps[0].m.max()


#: Every mask, architecture and end of the range once; the others are slow.
OF_EACH_SIZE = ((300.0, True, "sm_90"), (60000.0, False, "sm_80"))


@pytest.mark.parametrize(
    ("size", "causal", "arch"),
    [
        pytest.param(*one, marks=[] if one in OF_EACH_SIZE else [pytest.mark.slow])
        for one in itertools.product((300.0, 3000.0, 60000.0), (False, True), ("sm_80", "sm_90"))
    ],
)
def test_scores_of_any_size_give_means_of_values(size: float, causal: bool, arch: str) -> None:
    """Past what M counts in ones, and below all that it counts; with one key that some rows see."""
    q, k = np.full((2, 1, 70, 64), size, np.float16), np.full((2, 1, 130, 64), size, np.float16)
    q[1, 0, 35:] *= -1
    k[1] *= -1
    k[1, 0, 40] *= -1
    v = np.random.default_rng(8).uniform(1, 2, k.shape).astype(np.float16)
    quant = dataclasses.replace(CHANNEL, smooth_k=False)
    given: dict[str, Any] = {"arch": arch, "backend": "interpret", "variant": "fa_int8"}
    o, lse = attention(q, k, v, quant=quant, causal=causal, return_lse=True, scale=1.0, **given)
    assert np.isfinite(lse).all() and o.min() >= 1 - 1e-2 and o.max() <= 2 + 1e-2
    assert np.abs(o[1, 0, :35] - v[1, 0, 40]).max() <= 1e-2


def test_the_lowest_scores_weigh_the_same_until_there_is_a_larger_one() -> None:
    """Rows before the first larger key have the mean of all that they see, those after it that key.

    The key lies in the second tile, and some rows do not see all of the first.
    """
    first = pv8_cases.BLOCK_KV + 9
    rng = np.random.default_rng(9)
    q, k = np.full((1, 1, 100, 64), 3000, np.float16), np.full((1, 1, 100, 64), -3000, np.float16)
    k[0, 0, first] = 1
    v = rng.uniform(1, 2, k.shape).astype(np.float16)
    quant = dataclasses.replace(CHANNEL, smooth_k=False, smooth_v=False)
    given: dict[str, Any] = {"arch": pv8_cases.PORTABLE, "backend": "interpret", "causal": True}
    o = attention(q, k, v, variant="fa_int8", quant=quant, scale=1.0, **given)[0, 0]
    means = np.cumsum(v[0, 0].astype(np.float64), axis=0) / np.arange(1, 101)[:, None]
    assert np.abs(o[:first] - means[:first]).max() <= 1e-2
    assert np.abs(o[first:] - v[0, 0, first]).max() <= 1e-2


@pytest.mark.slow
def test_many_of_the_lowest_scores_stay_in_range() -> None:
    """Where l makes M rise their weight falls as it does: late keys weigh what early ones weigh."""
    len_kv = 20000
    q, k = np.full((1, 1, 16, 16), 3000, np.float16), np.full((1, 1, len_kv, 16), -3000, np.float16)
    v = np.linspace(1, 2, len_kv)[None, None, :, None].repeat(16, axis=-1).astype(np.float16)
    quant = dataclasses.replace(CHANNEL, smooth_k=False, smooth_v=False)
    given: dict[str, Any] = {"arch": pv8_cases.PORTABLE, "backend": "interpret"}
    o = attention(q, k, v, variant="fa_int8", quant=quant, scale=1.0, **given)
    assert np.abs(o.astype(np.float64) - 1.5).max() <= 4e-3


@pytest.mark.parametrize(
    ("quant", "options", "form"),
    [
        (CHANNEL, {}, "pv8_whole"),
        (CHANNEL, {"causal": True, "window": (30, 0)}, "pv8_whole"),
        (CHANNEL, {"softcap": 5.0}, "pv8"),
        (QuantConfig(pv="int8"), {}, "pv8"),
        (QuantConfig(pv="int8", granularity_v="channel", p_type="s8"), {}, "pv8"),
        (QuantConfig(pv="fp8", granularity_v="channel"), {}, "pv8"),
        (QuantConfig(pv="int8", granularity_v="channel", symmetric=False), {}, "pv8"),
    ],
)
def test_which_calls_take_it(quant: QuantConfig, options: dict[str, Any], form: str) -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    if options.get("softcap"):
        quant = QuantConfig("block", "block", pv="int8", granularity_v="channel", smooth_k=False)
    given: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90", **options}
    assert f"fa_int8 ({form})" in str(explain(q, k, v, quant=quant, **given))
