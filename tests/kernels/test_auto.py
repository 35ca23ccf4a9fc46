"""``variant="auto"`` chooses the fastest measured rung of the accuracy class."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, explain
from cupyattn.kernels import measured_times
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops.attention import resolved
from cupyattn.problem import choose
from cupyattn.quant import QuantConfig
from experiments._harness import recording
from experiments.tuning import fastest
from tests.support.runs import bits, normal


def test_the_tables_are_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastest.main(["--check"]) == 0, capsys.readouterr().out
    for rows, record, names in (
        (measured_times.MEASURED, fastest.LADDER, {name: name for name in VARIANTS}),
        (measured_times.MEASURED_8_BIT, fastest.EIGHT_BIT, fastest.CLASSES),
    ):
        for (capability, dtype, head_dim, len_q, len_kv, causal, times), found in zip(
            rows, recording.stored(record)["problems"], strict=True
        ):
            problem = found["problem"]
            assert (dtype, head_dim, len_q, causal) == tuple(
                problem[name] for name in ("dtype", "head_dim", "length", "causal")
            )
            assert len_kv == (problem["length_kv"] or len_q)
            assert capability == 90 and set(times) == set(names.values())
            for row in found["rows"]:
                if row["variant"] in names:
                    name = names[row["variant"]]
                    assert times[name] == pytest.approx(1e6 * row["seconds"], abs=0.06)


def test_a_table_that_was_written_by_hand_is_noticed(tmp_path: Any) -> None:
    copy = tmp_path / "measured.py"
    assert fastest.main([], copy) == 0 and fastest.main(["--check"], copy) == 0
    tables = (measured_times.MEASURED, "fa_tc"), (measured_times.MEASURED_8_BIT, "balanced")
    for rows, name in tables:
        text = copy.read_text()
        number = str(rows[0][-1][name])
        assert number in text
        copy.write_text(text.replace(number, "53.9"))
        assert fastest.main(["--check"], copy) == 1
        copy.write_text(text)
    without = {"backend": "mirror"}
    with pytest.raises(ValueError, match="the record has no times"):
        fastest.module_text(without, without)


def test_the_fastest_of_the_nearest_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head_dim counts first, then length, then the mask; classes and types are kept apart."""
    rows = (
        (90, "float16", 64, *2 * (1024,), False, {"fa": 1.0, "fa_warps": 2.0, "fa_tc": 3.0}),
        (90, "float16", 64, *2 * (4096,), False, {"fa": 3.0, "fa_warps": 2.0, "fa_tc": 4.0}),
        (90, "float16", 64, *2 * (4096,), True, {"unfused": 1.0, "fa": 2.0, "fa_tc": 4.0}),
        (90, "float16", 128, *2 * (4096,), False, {"fa": 5.0, "fa_int8": 1.0, "fa_tc": 4.0}),
        (80, "float32", 128, *2 * (4096,), False, {"fa": 5.0, "fa_warps": 8.0}),
    )
    monkeypatch.setattr(choose, "MEASURED", rows)
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
        assert choose.choose("full", *arguments).variant == rung, arguments
    assert choose.choose("full", "float16", 64, 1024, False, 90).why == (
        "the fastest rung of accuracy class 'full' for float16, 1 us at hd64 1024 on compute "
        f"capability 9.0 in {measured_times.RECORD}"
    )
    rule = choose.choose("full", "float16", 64, 1024, False, 89).why
    assert rule.endswith("by rule: nothing was measured on compute capability 8.9 in float16")


def test_eight_bits_only_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class allows what those before it allow: none is slower for leave to be less exact."""
    fast, middling = {"fa_tc": 3.0, "balanced": 2.0, "aggressive": 1.0}, {"fa_tc": 3.0}
    middling |= {"balanced": 1.0, "aggressive": 2.0}
    rows = (
        (90, "float16", 64, 1024, 1024, False, {"fa_tc": 1.0, "balanced": 2.0, "aggressive": 3.0}),
        (90, "float16", 64, 4096, 4096, False, fast),
        (90, "float16", 64, 8192, 8192, False, middling),
    )
    monkeypatch.setattr(choose, "MEASURED_8_BIT", rows)
    for accuracy, length, name in (
        ("balanced", 1024, None), ("balanced", 4096, "balanced"), ("balanced", 8192, "balanced"),
        ("aggressive", 1024, None), ("aggressive", 4095, None),
        ("aggressive", 4096, "aggressive"), ("aggressive", 8191, "aggressive"),
        ("aggressive", 9000, "balanced"),
    ):  # fmt: skip
        choice = choose.choose(accuracy, "float16", 64, length, False, 90)
        assert choice.variant == ("fa_int8" if name else "fa_tc"), (accuracy, length)
        assert choice.quant == (choose.QUANT[name] if name else None)
        assert choice.why.endswith(f"on compute capability 9.0 in {measured_times.RECORD_8_BIT}")
    for capability, dtype in ((80, "float16"), (90, "float32"), (None, "float16")):
        for accuracy, quant in choose.QUANT.items():
            choice = choose.choose(accuracy, dtype, 64, 1024, False, capability)
            assert (choice.variant, choice.quant) == ("fa_int8", quant)
            assert ", by rule: " in choice.why


def test_a_row_answers_for_calls_that_are_no_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """In queries and in keys; without a mask, for causal calls of twice its length."""
    gain, loss = {"fa_tc": 2.0, "balanced": 1.0}, {"fa_tc": 1.0, "balanced": 2.0}
    rows = (
        (90, "float16", 64, 1024, 1024, False, gain),
        (90, "float16", 64, 4096, 77, False, loss),
        (90, "float16", 64, 4096, 4096, True, loss),
        (90, "float16", 128, 4096, 4096, True, gain),
    )
    monkeypatch.setattr(choose, "MEASURED_8_BIT", rows)
    by_rule = "nothing up to hd{} is in " + measured_times.RECORD_8_BIT
    for head_dim, len_q, len_kv, causal, said in (
        (64, 1024, 1024, False, "hd64 1024 on"),
        (64, 8192, 8192, False, "hd64 1024 on"),  # and no causal one
        (64, 4096, 1023, False, "hd64 4096x77 on"),
        (64, 4096, 1024, False, "hd64 1024 on"),
        (64, 1, 16_384, False, by_rule.format("64 1x16384")),
        (64, 1023, 16_384, False, by_rule.format("64 1023x16384")),
        (64, 4095, 76, False, by_rule.format("64 4095x76")),
        (64, 2047, 2047, True, by_rule.format("64 2047 causal")),
        (64, 2048, 2048, True, "hd64 1024 on"),
        (64, 4096, 4096, True, "hd64 4096 causal on"),
        (128, 4096, 4096, False, by_rule.format("128 4096")),
        (128, 4096, 4096, True, "hd128 4096 causal on"),
        (96, 8192, 8192, True, "hd128 4096 causal on"),
    ):
        choice = choose.choose("balanced", "float16", head_dim, len_kv, causal, 90, len_q)
        assert said in choice.why, choice.why
        gained = said in ("hd64 1024 on", "hd128 4096 causal on")
        assert choice.variant == ("fa_int8" if gained else "fa_tc"), said


LENGTHS = (1, 16, 77, 512, 1024, 2048, 4096, 8192, 16_384, 118_800)


@pytest.mark.parametrize("accuracy", choose.QUANT)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 128, 192, 256])
def test_no_choice_is_slower_than_fa_tc_as_recorded(accuracy: str, head_dim: int) -> None:
    """8 bits have a row of no more queries and keys in which they were the faster."""
    for len_q, len_kv, causal in itertools.product(LENGTHS, LENGTHS, (False, True)):
        choice = choose.choose(accuracy, "float16", head_dim, len_kv, causal, 90, len_q)
        if choice.quant is None:
            assert choice.variant == "fa_tc"
            continue
        (name,) = (name for name, quant in choose.QUANT.items() if quant == choice.quant)
        held = [
            times
            for *_, d, q, k, masked, times in measured_times.MEASURED_8_BIT
            if d in nearest_head_dims(head_dim) and q <= len_q and k <= len_kv
            and (causal if masked else max(q / len_q, k / len_kv) <= (0.5 if causal else 1))
            if times["fa_tc"] > times[name] and f"{times[name]:.0f} us at hd{d}" in choice.why
        ]  # fmt: skip
        assert held, (len_q, len_kv, causal, choice)


def nearest_head_dims(head_dim: int) -> set[int]:
    """Head sizes that were measured, with none between them and this one."""
    known = {row[2] for row in measured_times.MEASURED_8_BIT}
    below, above = ({d for d in known if sign * d >= sign * head_dim} for sign in (-1, 1))
    return {*sorted(below)[-1:], *sorted(above)[:1]}


@pytest.mark.parametrize("accuracy", choose.QUANT)
def test_what_is_asked_for_is_the_call_s(accuracy: str) -> None:
    """Queries, and of a window the keys that a row sees, count as keys do."""

    def taken(len_q: int, len_kv: int, **options: Any) -> str:
        q, kv = ((1, 1, n, 128) for n in (len_q, len_kv))
        views = (np.broadcast_to(np.float16(0), shape) for shape in (q, kv, kv))
        given = dict(accuracy=accuracy, arch="sm_90a", **options)
        return resolved(*views, **given).variant.name

    assert taken(8192, 8192) == taken(8192, 8192, causal=True) == "fa_int8"
    for window in ((8191, 0), (4096, 4096)):
        assert taken(8192, 8192, window=window) == "fa_int8"
    for len_q, len_kv, options in (
        (1, 16_384, {}), (1024, 16_384, {}), (8192, 77, {}), (2048, 2048, {"causal": True}),
        (8192, 8192, {"window": (500, 0)}), (8192, 8192, {"window": (300, 300)}),
    ):  # fmt: skip
        assert taken(len_q, len_kv, **options) == "fa_tc", (len_q, len_kv, options)


def test_a_rung_of_ones_own_is_never_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    source = tmp_path / "attn_mine.cu"
    source.write_text("")
    mine = replace(VARIANTS["fa_tc"], name="m", source=source)
    monkeypatch.setitem(VARIANTS, "m", mine)
    assert choose.choose("full", "float16", 64, 64, False).variant == "fa_tc"


def test_full_accuracy_is_never_left_for_speed() -> None:
    inputs = normal((1, 2, 40, 64), (1, 2, 70, 64))
    for arch in (None, "sm_80", "sm_90a"):
        request = resolved(*inputs, arch=arch)
        assert request.variant.family in {"unfused", "float32", "tensor_core"}
    text = explain(*inputs, arch="sm_90a")
    assert " us at hd64 4096 on compute capability 9.0 in experiments/results/ladder.json" in text


def test_a_class_quantises_as_it_says() -> None:
    q, k, v = normal((1, 2, 40, 64), (1, 2, 70, 64))
    outputs = []
    for accuracy, quant in choose.QUANT.items():
        outputs.append(attention(q, k, v, accuracy=accuracy))
        assert bits(outputs[-1]) == bits(attention(q, k, v, variant="fa_int8", quant=quant))
    assert bits(outputs[0]) != bits(outputs[1])
    with pytest.raises(ValueError, match=r"'balanced' takes quant.pv='16bit', got 'int8'"):
        attention(q, k, v, accuracy="balanced", quant=QuantConfig(pv="int8"))


def test_a_class_takes_its_own_quantisation_alone() -> None:
    q, k, v = normal((1, 2, 40, 64), (1, 2, 70, 64))
    quant = QuantConfig(granularity_q="head")
    o = attention(q, k, v, accuracy="balanced", quant=quant)
    assert bits(o) == bits(attention(q, k, v, variant="fa_int8", quant=quant))
    with pytest.raises(ValueError, match=r"'aggressive' takes quant.pv='int8' or 'fp8', got '16b"):
        attention(q, k, v, accuracy="aggressive", quant=quant)
    with pytest.raises(ValueError, match="got variant .auto.: add variant=.fa_int8."):
        attention(q, k, v, quant=quant)
    with pytest.raises(ValueError, match="accuracy must be 'full', 'balanced' or 'aggressive'"):
        attention(q, k, v, accuracy=np.str_("best"))
