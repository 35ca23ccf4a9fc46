"""What ``variant="auto"`` takes: the fastest rung of the accuracy class, where it was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn import attention, auto, explain, measured
from cupyattn.quant import QuantConfig
from cupyattn.registry import VARIANTS
from cupyattn.request import Options, resolve
from experiments import common, fastest
from tests.runs import bits, normal


def test_the_table_is_what_the_record_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastest.main(["--check"]) == 0, capsys.readouterr().out
    for (capability, dtype, head_dim, length, causal, times), found in zip(
        measured.MEASURED, common.stored("ladder")["problems"], strict=True
    ):
        problem = found["problem"]
        assert (dtype, head_dim, length, causal) == tuple(
            problem[name] for name in ("dtype", "head_dim", "length", "causal")
        )
        assert capability == 90 and set(times) == set(VARIANTS)
        for row in found["rows"]:
            if row["variant"] in times:
                assert times[row["variant"]] == pytest.approx(1e6 * row["seconds"], abs=0.06)


def test_a_table_that_was_written_by_hand_is_noticed(tmp_path: Any) -> None:
    copy = tmp_path / "measured.py"
    assert fastest.main([], copy) == 0 and fastest.main(["--check"], copy) == 0
    number = str(measured.MEASURED[0][-1]["fa_tc"])
    assert number in copy.read_text()
    copy.write_text(copy.read_text().replace(number, "53.9"))
    assert fastest.main(["--check"], copy) == 1
    with pytest.raises(ValueError, match="the record has no times"):
        fastest.module_text({"backend": "mirror"})


def test_the_fastest_of_the_nearest_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head_dim counts first, then length, then the mask; classes and types are kept apart."""
    rows = (
        (90, "float16", 64, 1024, False, {"fa": 1.0, "fa_warps": 2.0, "fa_tc": 3.0}),
        (90, "float16", 64, 4096, False, {"fa": 3.0, "fa_warps": 2.0, "fa_tc": 4.0}),
        (90, "float16", 64, 4096, True, {"unfused": 1.0, "fa": 2.0, "fa_tc": 4.0}),
        (90, "float16", 128, 4096, False, {"fa": 5.0, "fa_int8": 1.0, "fa_tc": 4.0}),
        (80, "float32", 128, 4096, False, {"fa": 5.0, "fa_warps": 8.0}),
    )
    monkeypatch.setattr(auto, "MEASURED", rows)
    for arguments, rung in (
        (("float16", 64, 1000, False, 90), "fa"),
        (("float16", 40, 5000, False, 90), "fa_warps"),
        (("float16", 40, 5000, True, 90), "unfused"),
        (("bfloat16", 128, 7, True, 90), "fa_tc"),
        (("float16", 128, 4096, False, 80), "fa_tc"),
        (("float32", 128, 4096, False, 80), "fa"),
        (("float32", 128, 4096, False, 90), "fa_warps"),
        (("float32", 128, 0, False, None), "fa_warps"),
    ):
        assert auto.choose("full", *arguments).variant == rung, arguments
    assert auto.choose("full", "float16", 64, 1024, False, 90).why == (
        "the fastest rung of accuracy class 'full' for float16, 1 us at hd64 1024 on compute "
        f"capability 9.0 in {measured.RECORD}"
    )
    rule = auto.choose("full", "float16", 64, 1024, False, 89).why
    assert rule.endswith("by rule: nothing was measured on compute capability 8.9 in float16")
    assert auto.choose("balanced", "float16", 128, 4096, False, 90).why.endswith("the only one")


def test_a_rung_of_ones_own_is_never_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    source = tmp_path / "attn_mine.cu"
    source.write_text("")
    mine = type(VARIANTS["fa_tc"])(**{**VARIANTS["fa_tc"].__dict__, "name": "m", "source": source})
    monkeypatch.setitem(VARIANTS, "m", mine)
    assert auto.choose("full", "float16", 64, 64, False).variant == "fa_tc"


def test_no_class_is_left_for_a_faster_one() -> None:
    inputs = normal((1, 2, 40, 64), (1, 2, 70, 64))
    full = {"unfused", "float32", "tensor_core"}
    for accuracy, families in (("full", full), ("balanced", {"int8"})):
        for arch in (None, "sm_80", "sm_90a"):
            request = resolve(*inputs, Options(accuracy=accuracy, arch=arch))
            assert request.variant.family in families
    text = explain(*inputs, arch="sm_90a")
    assert "fa_tc: the fastest rung of accuracy class 'full' for float16, 297 us" not in text
    assert " us at hd64 4096 on compute capability 9.0 in experiments/results/ladder.json" in text


def test_aggressive_is_eight_bits_in_both_products() -> None:
    q, k, v = normal((1, 2, 40, 64), (1, 2, 70, 64))
    quant = QuantConfig(pv="int8")
    o = attention(q, k, v, accuracy="aggressive")
    assert bits(o) == bits(attention(q, k, v, variant="fa_int8", quant=quant))
    assert bits(o) != bits(attention(q, k, v, accuracy="balanced"))
    with pytest.raises(ValueError, match=r"'balanced' takes quant.pv='16bit', got 'int8'"):
        attention(q, k, v, accuracy="balanced", quant=quant)


def test_a_class_takes_its_own_quantisation_alone() -> None:
    q, k, v = normal((1, 2, 40, 64), (1, 2, 70, 64))
    quant = QuantConfig(granularity_q="head")
    o = attention(q, k, v, accuracy="balanced", quant=quant)
    assert bits(o) == bits(attention(q, k, v, variant="fa_int8", quant=quant))
    with pytest.raises(ValueError, match=r"'aggressive' takes quant.pv='int8' or 'fp8', got '16b"):
        attention(q, k, v, accuracy="aggressive", quant=quant)
    with pytest.raises(ValueError, match="quant is for fa_int8, got variant 'fa_tc'"):
        attention(q, k, v, quant=quant)
    with pytest.raises(ValueError, match="accuracy must be 'full', 'balanced' or 'aggressive'"):
        attention(q, k, v, accuracy=np.str_("best"))
