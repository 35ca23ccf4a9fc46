"""Time and memory of many heads at once: runs at a small size, and counts the requested memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments._harness.cells import Problem
from experiments.speed import large_batches
from tests.support.runs import normal


def test_it_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "large_batches.json"
    assert large_batches.main(["--quick", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["problems"]
    names = [row["variant"] for row in found["rows"]]
    assert names[0] == "fa_tc" and [n for n in names if n.endswith("codes given")] == [
        "fa_int8 balanced, codes given", "fa_int8 aggressive, codes given",
    ]  # fmt: skip
    assert all(row["ok"] for row in found["rows"])
    assert "beside them" in capsys.readouterr().out


def test_codes_take_half_of_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of 16 bits, codes of Q and K, codes of V too; scales and means are a few bytes."""

    @contextmanager
    def counted() -> Iterator[list[int]]:
        yield [0, 123]

    monkeypatch.setattr(large_batches, "counted", counted)
    problem = Problem(1, 2, 256, 128)
    inputs = normal((1, 2, 256, 128), (1, 2, 256, 128))
    held = {
        cell.name: large_batches.memory(cell, inputs) for cell in large_batches.cells_of(problem)
    }
    one = inputs[0].nbytes
    assert {row["call_bytes"] for row in held.values()} == {123}
    assert held["fa_tc"]["operand_bytes"] == held["fa_int8 balanced"]["operand_bytes"] == 3 * one
    assert 2 * one < held["fa_int8 balanced, codes given"]["operand_bytes"] < 2.1 * one
    assert 1.5 * one < held["fa_int8 aggressive, codes given"]["operand_bytes"] < 1.6 * one
