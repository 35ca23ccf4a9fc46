"""Other designs of the Hopper backward kernels: their patches, their gradients, and the table."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.measure import device, timing
from experiments._harness import joules, patches
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
    assert experiment.main(["--quick", "--cells", "32:64"]) == 2
    assert "head_dim must be one of [64, 128, 256]" in capsys.readouterr().err


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


def test_joules_stand_beside_those_of_the_form_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {"taken": [4e-3] * 3, "tree": [4e-3] * 3}
    counted = {"taken": [20.0, 30.0, 10.0], "tree": [19.0, 27.0, 9.0]}
    monkeypatch.setattr(timing, "time_interleaved", lambda calls, rounds: samples)
    monkeypatch.setattr(device, "clocks", dict)
    monkeypatch.setattr(
        joules,
        "on_device",
        lambda *_: {
            name: {"joules_of_turns": x, "joules_per_call": x[0], "watts": 690.0, "clocks": {}}
            for name, x in counted.items()
        },
    )
    problem = Problem(1, 16, 4096, 128, dtype="bfloat16")
    rows: list[dict[str, Any]] = [
        {"variant": name, "right": True, "j2": 0.5, "ok": True} for name in samples
    ]
    args = argparse.Namespace(rounds=3, joules=True, seconds=2.0, turns=3)
    experiment.timed(problem, rows, dict.fromkeys(samples, print), args)
    assert [row["joules"] for row in rows] == [[1.0, 1.0, 1.0], pytest.approx([0.9, 0.9, 0.95])]
    experiment.report({"problem": {"name": problem.name}, "rows": rows})
    assert "0.900 [0.900, 0.950]" in capsys.readouterr().out


def test_last_heads_may_have_other_bits_under_a_causal_mask() -> None:
    bits = np.zeros((1, 4, 2, 3), np.uint16)
    assert experiment.heads_are_alike(bits, causal=False)
    bits[0, 2:, 1, 1] = 1
    assert experiment.heads_are_alike(bits, causal=True)
    assert not experiment.heads_are_alike(bits, causal=False)
    bits[0, 1, 0, 0] = 1
    assert not experiment.heads_are_alike(bits, causal=True)


def test_trees_run_instead_of_patches(tmp_path: Path) -> None:
    folder = tmp_path / "leaner"
    (folder / "backward").mkdir(parents=True)
    found = experiment.designs(trees=[str(folder), f"{folder}:sm90_atomic"])
    assert [one.name for one in found] == ["taken", "leaner", "leaner:sm90_atomic"]
    assert [one.deterministic for one in found] == [None, None, False]
    for one in found[1:]:
        assert one.takes(128) and one.takes(256)
        with one.in_place(tmp_path / "patched"):
            assert folder == compiler.KERNELS
    named = experiment.designs(["keys_longest_first"], [str(folder)])
    assert [one.name for one in named] == ["taken", "keys_longest_first", "leaner"]


@pytest.mark.parametrize("text", ["missing", "{}:sm80"])
def test_trees_are_copies_of_the_kernels(text: str, tmp_path: Path) -> None:
    (tmp_path / "backward").mkdir()
    with pytest.raises(ValueError, match="each is a copy of kernels_cu"):
        experiment.designs(trees=[text.format(tmp_path)])


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
