"""Cells of experiments: judged, timed and counted; and grids of cells, with the written records."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.measure import device, timing
from experiments._harness import recording
from experiments._harness.cells import (
    Cell,
    Problem,
    judge_cell,
    judge_problem,
    rung,
    time_cells,
)

SMALL = Problem(1, 1, 40, 16)


def test_a_problem_may_have_two_lengths() -> None:
    problem = Problem(1, 2, 40, 16, length_kv=24)
    assert problem.name == "B1 H2 40x24 hd16 float16 normal" and SMALL.len_kv == 40
    q, k, v = problem.draw(on_device=False)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (40, 24, 24)
    assert problem.operations == 4 * 16 * 2 * 40 * 24
    with pytest.raises(ValueError, match="must have one length, got 40 and 24"):
        Problem(1, 2, 40, 16, causal=True, length_kv=24)


def fake_times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the harness believe that there is a device; return the names of timed calls."""
    timed: list[str] = []

    def time_interleaved(calls: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        timed.extend(calls)
        for call in calls.values():
            call(0), call(1)
        return {name: [1e-3 * (i + 1)] * 15 for i, name in enumerate(calls)}

    monkeypatch.setattr(timing, "time_interleaved", time_interleaved)
    monkeypatch.setattr(timing, "rotated", lambda arrays: [tuple(arrays)] * 2)
    monkeypatch.setattr(device, "clocks", lambda *_: {})
    monkeypatch.setattr(device, "device_ceiling", lambda family: 1e12)
    return timed


def test_a_cell_that_misses_its_bound_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed = fake_times(monkeypatch)
    problem = Problem(1, 1, 40, 16, dtype="float32")
    inputs = problem.draw(on_device=False)
    good, absent = rung("fa", problem), rung("fa_tc", problem)
    wrong = Cell("wrong", "fa", lambda q, k, v: np.float32(1.01) * good.run(q, k, v))
    cells = [good, wrong, absent]
    rows = [judge_cell(problem, cell, inputs) for cell in cells]
    time_cells(problem, cells, rows, inputs, 15, "fa", in_graphs=False)
    assert timed == ["fa"]
    assert rows[0]["seconds"] == 1e-3 and rows[0]["speed_ratio"] == [1.0, 1.0, 1.0]
    assert rows[1]["judgement"]["j2"] > 1 and "seconds" not in rows[1]
    assert "takes float16, bfloat16" in rows[2]["unsupported"]
    header, printed = recording.table({"rows": rows}, "fa")
    assert all(len(row) == len(header) for row in printed)
    assert "not timed" in " ".join(printed[1]) and "not supported" in printed[2]
    assert not recording.passed({"problems": [{"rows": rows}]})


def test_codes_are_given_before_the_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = rung("fa_int8", SMALL, codes_given=True)
    (codes,) = cell.prepare(*SMALL.draw(on_device=False))
    monkeypatch.setattr(ca, "quantize", None)  # would raise if run called it
    assert isinstance(codes, ca.QuantizedQKV)
    assert cell.run(codes).shape == codes.shape


def test_operations_count_admitted_pairs_only() -> None:
    assert Problem(2, 3, 10, 8).operations == 4 * 8 * 2 * 3 * 100
    assert Problem(2, 3, 10, 8, causal=True).operations == 4 * 8 * 2 * 3 * 55


def test_too_few_rounds_are_refused() -> None:
    args = argparse.Namespace(quick=False, rounds=14, seed=0, json=None)
    with pytest.raises(ValueError, match="at least 15"):
        recording.run_grid(args, "x", [])


def test_a_grid_is_written_once_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    args = argparse.Namespace(quick=True, rounds=15, seed=0, json=file)
    written = []
    monkeypatch.setattr(
        recording.output, "write_json", lambda path, record: written.append(len(record["problems"]))
    )
    grid = [(SMALL, [rung("fa", SMALL)])] * 3
    record = recording.run_grid(args, "x", grid, conclude=lambda found: {"seen": len(found)})
    assert written == [1, 2, 3]
    assert record["seen"] == len(record["problems"]) == 3


def test_a_grid_that_is_cut_off_leaves_what_it_has(tmp_path: Path) -> None:
    def cut_off(q: Any, k: Any, v: Any) -> Any:
        raise KeyboardInterrupt

    file = tmp_path / "x.json"
    args = argparse.Namespace(quick=True, rounds=15, seed=0, json=file)
    grid = [(SMALL, [rung("fa", SMALL)]), (SMALL, [Cell("cut off", "fa", cut_off)])]
    with pytest.raises(KeyboardInterrupt):
        recording.run_grid(args, "x", grid, conclude=lambda found: {"seen": len(found)})
    record = json.loads(file.read_text())
    assert record["seen"] == len(record["problems"]) == 1
    assert [row["variant"] for row in record["problems"][0]["rows"]] == ["fa"]


@pytest.mark.parametrize("variant", ["fa", "fa_int8"])
def test_entries_judged_one_after_the_other_are_judged_as_together(variant: str) -> None:
    problem = Problem(3, 1, 40, 16)
    inputs, cell = problem.draw(on_device=False), rung(variant, problem)
    together, apart = (
        judge_problem(problem, [cell], inputs, entries)["rows"][0] for entries in (None, 2)
    )
    for name in ("j2", "j3"):
        assert apart["judgement"][name] == together["judgement"][name]
    wrong = Cell("late", "fa", lambda q, k, v: np.concatenate([cell.run(q, k, v)[:2], v[2:]]))
    assert not judge_problem(problem, [wrong], inputs, 2)["rows"][0]["ok"]
