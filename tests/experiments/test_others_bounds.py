"""experiments/accuracy/others_bounds.py: which kernel keeps which bound, and its table."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from experiments._harness import recording
from experiments._harness.cells import Cell, Problem
from experiments.accuracy import others_bounds

SMALL = Problem(1, 1, 48, 16, True, "float16", "normal", 0)


def test_it_runs_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [SMALL, Problem(1, 1, 48, 16, False, "bfloat16", "outlier", 0)]
    monkeypatch.setattr(others_bounds, "problems", lambda args: iter(problems))
    file = tmp_path / "record.json"
    assert others_bounds.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [one["problem"]["name"] for one in record["problems"]] == [x.name for x in problems]
    rows = others_bounds.worst(record)
    held = {(row["dtype"], row["kernel"]): row["documented"] for row in rows}
    assert held["float16", "fa"] == "fa, portable"
    assert held["bfloat16", "fa_tc"] == "fa_tc, portable"
    assert all(row["ratio"] <= 1 and 0 < row["tightness"] < 0.1 for row in rows)
    assert "fa_tc, portable" in capsys.readouterr().out


@pytest.mark.frameworks
def test_torch_keeps_what_it_documents() -> None:
    pytest.importorskip("torch")
    found = others_bounds.judge_problem(SMALL, on_device=False)
    rows = {row["kernel"]: row for row in found["rows"]}
    math, flash = rows["torch SDPA, math"], rows["torch SDPA, flash"]
    assert math["documented"] == "fp32 P, fp32 sums" and math["ratio"] <= 1
    assert flash["documented"] == "fp16 P, fp32 sums" and flash["ratio"] <= 1
    assert "unsupported" in rows["torch SDPA, cuDNN"]


def test_a_kernel_that_rounds_more_than_it_says_is_reported() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return ca.attention(q, k, v, variant="fa_tc", causal=True)

    inputs = SMALL.host()
    judged = others_bounds.Judged(Cell("theirs", "fa_tc", run, peer=True), {"p": "fp32 P"})
    row = others_bounds.judge(judged, SMALL, inputs)
    assert row["ratio"] > 1 and row["ratio"] == row["ladder"]["fp32"]
    assert row["ladder"]["bf16"] < row["ladder"]["fp16"] <= 1

    def refuse(q: Any, k: Any, v: Any) -> Any:
        raise ca.UnsupportedError("theirs: none here")

    judged = others_bounds.Judged(Cell("theirs", "fa_tc", refuse, peer=True), {"p": "fp32 P"})
    row = others_bounds.judge(judged, SMALL, inputs)
    assert row["unsupported"] == "theirs: none here" and row["ratio"] is None


def test_the_documented_words_are_words() -> None:
    for words in (others_bounds.SAGE_1, others_bounds.SAGE_2, others_bounds.FLASH_3_FP8):
        assert ca.testing.numerics(**words).foreign is not None
    args = argparse.Namespace(quick=False, seed=0)
    assert len(list(others_bounds.problems(args))) == 18


def test_the_page_is_what_the_record_says() -> None:
    record = recording.stored(others_bounds.NAME)
    text = others_bounds.PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(others_bounds.BEGIN)
    assert rest.partition(others_bounds.END)[0].strip() == others_bounds.page(record)
    assert others_bounds.ours_hold(record)
    worse = copy.deepcopy(record)
    row = next(row for row in worse["problems"][0]["rows"] if row["kernel"] == "fa")
    row["ratio"] = float("nan")
    assert not others_bounds.ours_hold(worse)
    assert "(missed)" in others_bounds.page(worse)
    worse["environment"]["device"] = {"name": "Some GPU"}
    assert others_bounds.page(worse).startswith("Measured on Some GPU: ")
