"""Experiments over a grid of problems: what is written, and when."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import recording
from experiments.cells import Cell, Problem, rung

SMALL = Problem(1, 1, 40, 16)


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
