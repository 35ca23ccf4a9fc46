"""The experiments on energy, breakdown, counters and long sequences, without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.errors import UnsupportedError
from experiments._harness import patches, recording
from experiments._harness.cells import Problem
from experiments.speed import energy, long_sequences
from experiments.tuning import breakdown, counters, race, rotated_rows

PAGE = """==PROF== Profiling "next_cell" - 0: 0%....100% - 9 passes
"ID","Kernel Name","Block Size",{metrics}
"","","","ns","","","",""
"0","cupy_fill(float *)","(1, 1, 1)","10","0","0","0","n/a"
"1","next_cell","(1, 1, 1)","10","0","0","0","n/a"
"2","attn_fa_tc(AttnParams)","(1, 1, 1)","1,000","400","40","8","1,048,576"
"3","next_cell","(1, 1, 1)","10","0","0","0","n/a"
"""


@pytest.mark.parametrize("form", breakdown.FORMS)
@pytest.mark.parametrize("part", breakdown.PARTS)
def test_each_part_can_be_left_out(form: str, part: str, tmp_path: Path) -> None:
    """Its lines are there exactly once, and the patch names the part that it leaves out."""
    sentence, file, *_ = (breakdown.FOLDER / f"{form}_{part}.patch").read_text().splitlines()
    assert breakdown.NAMES[part].lower() in sentence.lower() and " is left out: " in sentence
    assert file == f"--- a/{breakdown.FORMS[form].source}"
    folder = breakdown.changes(form, (part,), tmp_path)
    changed = (folder / breakdown.FORMS[form].source).read_text()
    assert changed != (race.compiler.KERNELS / breakdown.FORMS[form].source).read_text()
    with pytest.raises(LookupError, match=f"{form}_{part}.patch no longer applies"):
        patches.apply(f"{form}_{part}", breakdown.hunks_of(form, part), folder)


def test_forms_of_rotated_rows_make_the_mirrors_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert rotated_rows.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(rotated_rows.QUICK_FORMS)
    assert all(row["ok"] and row["steps"] > 1 for row in rows)
    assert "2 teams x 1 blocks, codes by the copy engine, rows by" in capsys.readouterr().out
    ones = np.ones((2, 8), np.int8)
    assert rotated_rows.equal((ones, ones), (ones[:1], ones[:1]))
    assert not rotated_rows.equal((ones, ones), (ones[:1], 0 * ones[:1]))


def test_forms_of_rotated_rows_have_names_of_their_own() -> None:
    assert set(rotated_rows.FORMS) == set(rotated_rows.ALL_GROUPS)
    for forms in rotated_rows.FORMS.values():
        assert len({one.name for one in forms}) == len(forms)


@pytest.mark.slow
def test_forms_of_rotated_rows_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert rotated_rows.main(["--compiled", "--groups", "GELU"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 1 + len(rotated_rows.FORMS["GELU"])
    assert all(int(line.split(" ok ")[1].split()[0]) > 32 for line in lines)  # registers


@pytest.mark.slow
@pytest.mark.parametrize("form", breakdown.FORMS)
def test_what_is_left_keeps_its_instructions(form: str, tmp_path: Path) -> None:
    """A compiler that saw that scores are equal, or that weights are unused, would drop more."""
    problem = race.parse_cell("128:4096")
    counts = {}
    for candidate, parts in zip(
        breakdown.candidates(form, tmp_path), breakdown.LEFT_OUT, strict=True
    ):
        if len(parts) in (0, 1):
            text = candidate.source.read_text()
            counts[parts] = text.count("ex2_approx_ftz("), text.count("mma")
    whole = counts[()]
    assert counts[("softmax",)][0] == 0 and counts[("scores",)][0] == whole[0] > 0
    assert all(counts[(part,)][1] < whole[1] for part in ("scores", "output"))
    one = breakdown.compiled(form, problem, tmp_path / "compiled", 1)
    assert all(cell.facts["spill_bytes"] <= breakdown.MOST_SPILLED for cell in one)
    left = one[breakdown.LEFT_OUT.index(("softmax", "output"))].facts["registers"]
    assert form == "sm90" or left >= 128  # O and S are still there


def test_the_breakdown_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "breakdown.json"
    arguments = ["--quick", "--cells", "64:4096", "--forms", "portable", "--json", str(file)]
    assert breakdown.main(arguments) == 0
    (found,) = json.loads(file.read_text())["problems"]
    assert [tuple(row["left_out"]) for row in found["rows"]] == list(breakdown.LEFT_OUT)
    assert found["ok"] and 0 < found["judgement"]["j2"] <= 1 and "parts" not in found


@pytest.mark.slow
def test_a_time_of_spills_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert breakdown.main(["--quick", "--cells", "64:4096", "--forms", "sm90"]) == 2
    assert "without-scores spills" in capsys.readouterr().err


def test_energy_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "energy.json"
    assert energy.main(["--quick", "--json", str(file)]) == 0
    problems = json.loads(file.read_text())["problems"]
    assert [[row["variant"] for row in found["rows"]] for found in problems] == [
        list(rungs) for rungs in energy.LENGTHS.values()
    ]
    assert energy.main(["--quick", "--seconds", "1"]) == 2
    assert "--seconds must be at least 2.0, got 1.0" in capsys.readouterr().err


def test_energy_of_gradients_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "energy_backward.json"
    assert energy.main(["--quick", "--backward", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["experiment"], record["turns"]) == ("energy_backward", 3)
    assert [found["problem"]["head_dim"] for found in record["problems"]] == [
        *(64, 64, 128, 128, 256, 256), *(128, 128)
    ]  # fmt: skip
    assert all(row["ok"] for found in record["problems"] for row in found["rows"])


def test_the_page_of_nsight_compute_is_read_by_cell() -> None:
    metrics = (counters.METRICS[0], counters.PASSES, *counters.CONFLICTS, counters.DRAM[0])
    page = PAGE.format(metrics=",".join(f'"{name}"' for name in metrics))
    page = page.replace('"ns","","","",""', '"ns","","","","byte"')
    first, second = counters.by_cell(counters.parsed(page.splitlines()))
    assert second == []
    (kernel,) = first
    assert kernel["kernel"] == "attn_fa_tc" and kernel[counters.DRAM[0]] == 2**20
    judged = {"j2": 0.5}
    named = {"variant": "fa_tc, sm_90a", "rung": "fa_tc", "form": "sm90"}
    row: dict[str, Any] = {**named, "judgement": judged, "device": first}
    row["interpreter"] = {"attn_fa_tc": {"passes": 100, "conflicts": 25}}
    (line,) = counters.table({"rows": [row], "least_bytes": 2**20})
    assert line[3:] == ["100", "25 %", "400", "12 %", "1.0 MiB", "1.0 MiB"]


def test_without_nsight_compute_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="not on the PATH"):
        counters.watched(0)


def test_the_interpreter_counts_the_passes_of_a_kernel() -> None:
    found = counters.interpreted("fa_tc", "sm_90", 0)
    assert found["attn_fa_tc"]["passes"] > 0 == found["attn_fa_tc"]["conflicts"]
    least = counters.least_bytes(Problem(1, 1, counters.INTERPRETED_LENGTH, 128))
    assert found["attn_fa_tc"]["global_bytes"] >= least


@pytest.mark.slow
def test_the_counters_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "counters.json"
    assert counters.main(["--quick", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["problems"]
    assert len(found["rows"]) == len(counters.WAYS)
    assert all(row["interpreter"] and row["ok"] for row in found["rows"])


def test_long_sequences_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    assert long_sequences.main(["--quick", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["problems"]
    assert [row["variant"] for row in found["rows"]] == list(long_sequences.VARIANTS)
    for length in long_sequences.LENGTHS:
        args = recording.parser(None).parse_args([])
        problem = long_sequences.problem_of(length, args)
        assert problem.length == length and problem.heads in long_sequences.HEADS.values()
