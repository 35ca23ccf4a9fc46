"""Other designs of the Hopper backward kernels: their patches, their gradients, and the table."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.measure import device, timing
from experiments._harness import patches
from experiments._harness.cells import Problem
from experiments.tuning import backward_designs as experiment
from experiments.tuning import breakdown
from experiments.tuning.backward_designs import Design
from tests.backward.backward_cases import received, run_backward
from tests.backward.test_backward_hopper import SERIALISED, hopper_plan
from tests.backward.test_backward_kernels import call_of
from tests.support.runs import normal

DESIGNS = experiment.designs()


@pytest.fixture(params=[one for one in DESIGNS if one.hunks], ids=lambda one: one.name)
def design(request: Any) -> Design:
    """A design of a patch."""
    one: Design = request.param
    return one


def head_dim_of(design: Design) -> int:
    return 256 if design.paired else 128


def test_it_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "backward_designs.json"
    cells = ("--cells", "256:64", "128:64c")
    assert experiment.main(["--quick", *cells, "--json", str(file)]) == 0
    for found in json.loads(file.read_text())["problems"]:
        (row,) = found["rows"]
        assert row["variant"] == experiment.TAKEN and row["ok"] and row["j2"] <= 1


def test_a_patch_is_of_one_kernel(design: Design, tmp_path: Path) -> None:
    for file in {hunk.file for hunk in design.hunks}:
        copy = tmp_path / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiler.KERNELS / file, copy)
    patches.apply(design.name, design.hunks, tmp_path)
    assert design.takes(head_dim_of(design)) and not design.takes(384 - head_dim_of(design))
    own = {Path(hunk.file).name for hunk in design.hunks if hunk.file.endswith(".cu")}
    assert own <= {"backward_keys_pair.cu" if design.paired else "backward_keys.cu"}


def test_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(["--quick", "--designs", "keys"]) == 2
    assert experiment.main(["--quick", "--cells", "64:64"]) == 2
    assert "head_dim must be one of [128, 256]" in capsys.readouterr().err


def test_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = {"taken": [4e-3] * 3, "pair": [3e-3] * 3}
    monkeypatch.setattr(timing, "time_interleaved", lambda calls, rounds: samples)
    problem = Problem(1, 16, 4096, 256, dtype="bfloat16")
    rows: list[dict[str, Any]] = [
        {"variant": name, "right": True, "j2": 0.5, "ok": name == "taken", "spill_bytes": 0}
        for name in samples
    ]
    monkeypatch.setattr(device, "clocks", dict)
    args = argparse.Namespace(rounds=15, joules=False)
    experiment.timed(problem, rows, dict.fromkeys(samples, print), args)
    assert rows[1]["tflops"] == pytest.approx(10 * 16 * 4096**2 * 256 / 3e-3 / 1e12)
    experiment.report({"problem": {"name": problem.name}, "rows": rows})
    told = capsys.readouterr().out
    assert "1.333" in told and "0.500 FAILED" in told


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_it_spills_next_to_nothing(design: Design, causal: bool, tmp_path: Path) -> None:
    with design.in_place(tmp_path):
        call = call_of(512, 512, head_dim_of(design), dtype="bfloat16", causal=causal)
        plan = hopper_plan(call, deterministic=design.deterministic)
        (keys,) = (x for x in plan.launches if x.entry.startswith("backward_keys"))
        binary = compiler.build(keys.module, "sm_90a")
    assert binary.kernels[keys.entry].spill_stores <= breakdown.MOST_SPILLED
    assert SERIALISED not in binary.log


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "design", [x for x in DESIGNS if x.hunks and x.right], ids=lambda x: x.name
)
def test_its_gradients_are_right(design: Design, causal: bool, tmp_path: Path) -> None:
    n = head_dim_of(design)
    inputs = received(*normal((1, 2, 330, n), (1, 1, 512, n), "bfloat16"), causal=causal)
    how = {"deterministic": design.deterministic, "arch": "sm_90a", "backend": "interpret"}
    with design.in_place(tmp_path):
        run_backward(inputs, **how, causal=causal).check()
