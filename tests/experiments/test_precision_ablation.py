"""The ablation of precisions: every choice is there, runs in small, and is drawn."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import cupyattn as ca
from experiments.accuracy import precision_ablation


@pytest.mark.slow
def test_choices_of_precision_run_in_small(tmp_path: Path, capsys: Any) -> None:
    """Every field of QuantConfig is varied; finer scales lose less, and 8-bit P and V more."""
    varied = {
        name
        for some in precision_ablation.CHOICES.values()
        for fields_ in some.values()
        for name in fields_
    }
    # Given scales are one more cell.
    assert varied == {f.name for f in fields(ca.QuantConfig)} - {"scales"}
    file, drawing = tmp_path / "precision_ablation.json", tmp_path / "pareto.svg"
    given = ["--quick", "--distributions", "outlier", "--json", str(file)]
    assert precision_ablation.main([*given, "--plot", str(drawing)]) == 0
    assert "no times" in capsys.readouterr().out and "no times" in drawing.read_text()
    record = json.loads(file.read_text())
    (found,), (compared,) = record["problems"], record["compared"]
    assert all(row["ok"] for row in found["rows"]) and compared["unbeaten"] == []
    lost = compared["error over default"]
    assert lost["fa_tc, 16 bits"] < 0.2 < lost["Q and K per token"] < 1 < lost["Q and K per tensor"]
    assert lost["Q and K per head"] < lost["scales given"] and lost["INT8 P and V"] > 1
    assert lost["4 bits"] > 5
    by_tile, running = (
        [lost[f"P by {reference}, {form}"] for form in precision_ablation.FORMS]
        for reference in precision_ablation.REFERENCES
    )
    assert 1 < max(by_tile) < min(running)
    # Without a device no architecture means the portable form.
    assert by_tile[1] == lost["INT8 P and V"] and lost["rescaled at every rise"] == lost["default"]


def test_what_runs_alike_is_measured_once() -> None:
    """On Hopper a call that names no architecture runs the Hopper form, as one that names it."""
    args = argparse.Namespace(quick=True, seed=0, distributions=["normal"])
    (problem,) = precision_ablation.problems(args)
    cells = precision_ablation.cells(problem, "sm_90a")
    assert len({(cell.quant, cell.arch or "sm_90a") for cell in cells}) == len(cells)
    assert {cell.name: cell.facts["also"] for cell in cells if cell.facts["also"]} == {
        "default": {"rescaled past a margin": "rescaling"},
        "INT8 P and V": {"P by its tile's maximum, Hopper form": "what P is relative to"},
        "INT8 P and V, V per channel": {
            "P by the running maximum, Hopper form": "what P is relative to"
        },
    }
    rows = [{"variant": cell.name, **cell.facts} for cell in cells]
    assert len([*precision_ablation.rows_of({"rows": rows})]) == len(cells) + 3


def test_the_recorded_input_of_the_precisions_is_a_problem_like_others() -> None:
    args = argparse.Namespace(quick=False, seed=0, distributions=[precision_ablation.RECORDED])
    (problem,) = precision_ablation.problems(args)
    assert all(x.shape == problem.call.output_shape for x in problem.draw(on_device=False))


def test_choices_that_nothing_beats_are_drawn(tmp_path: Path) -> None:
    def row(name: str, ratio: float, error: float) -> dict[str, Any]:
        judged = {"j2": 0.1, "j3": None, "relative_error": error}
        row = {"variant": name, "choice": precision_ablation.ENDS, "judgement": judged}
        return row | {"speed_ratio": [ratio] * 3}

    rows = [row("default", 1.0, 0.01), row("fast", 2.0, 0.02), row("worse", 1.0, 0.03)]
    refused = {"variant": "refused", "choice": precision_ablation.ENDS, "judgement": None}
    found = {"problem": {"name": "p", "distribution": "normal"}, "rows": [*rows, refused]}
    (compared,) = precision_ablation.conclude([found])["compared"]
    assert compared["unbeaten"] == ["fast", "default"]
    assert compared["error over default"] == {"default": 1.0, "fast": 2.0, "worse": 3.0}
    device_ = {"name": "a device", "driver": "1"}
    record = {"backend": "cuda", "environment": {"device": device_}, "problems": [found]}
    precision_ablation.draw(record, str(tmp_path / "pareto.svg"))
    assert "<!-- fast -->" in (tmp_path / "pareto.svg").read_text()
