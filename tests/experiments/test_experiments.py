"""The experiments: each runs in small without a device, and holds to its rules."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler import modules as compiler
from cupyattn.measure import device
from docs import performance_plots
from experiments._harness import others, plots, recording
from experiments._harness.cells import Cell, Problem, rung
from experiments.accuracy import numerics_claims, precision_ablation, rotated_scores, smoothing
from experiments.diffusion import timestep_ablation, token_pruning
from experiments.speed import (
    first_call,
    framework_costs,
    host_places,
    host_revisions,
    host_time,
    ladder,
    norm_quant,
    quantise,
)
from experiments.tuning import race, tile_order, tile_sweep

FOLDER = recording.ROOT / "experiments"
SHARED = FOLDER / "_harness"
#: Each module of these folders is an experiment.
SUBJECTS = ("speed", "accuracy", "diffusion", "tuning")
#: A folder of modules with a README of its own is a program.
PROGRAMS = sorted(
    path.parent for path in FOLDER.rglob("*/README.md") if list(path.parent.glob("*.py"))
)
EXPERIMENTS = sorted(f"{subject}.{p.stem}" for subject in SUBJECTS
                     for p in (FOLDER / subject).glob("*.py"))  # fmt: skip
SMALL = Problem(1, 1, 40, 16)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_does(name: str) -> None:
    text = importlib.import_module(f"experiments.{name}").__doc__ or ""
    assert text.splitlines()[0].endswith("?")
    run = f"Run          python -m experiments.{name}"
    for word in ("Varies ", "Holds fixed ", "Measures ", run):
        assert word in text


def test_every_module_lies_in_a_folder_of_the_readme() -> None:
    """Its headings are the folders, each above a table of exactly its modules."""
    assert not list(FOLDER.glob("*.py"))
    folders = {path.parent for path in FOLDER.rglob("*.py")}
    assert folders - {*PROGRAMS} == {SHARED, *(FOLDER / subject for subject in SUBJECTS)}
    readme = (FOLDER / "README.md").read_text()
    for folder in sorted(folders - {*PROGRAMS}):
        section = readme.split(f"\n## {folder.name}/\n")[1].split("\n## ")[0]
        rows = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
        assert set(re.findall(r"`(\w+\.py)`", rows)) == {p.name for p in folder.glob("*.py")}
        for where, module in re.findall(r"python -m experiments\.(\w+)\.(\w+)", section):
            assert (folder.name, True) == (where, (folder / f"{module}.py").is_file())


def test_the_readme_points_to_every_program() -> None:
    """The README of a program names all its modules."""
    readme = (FOLDER / "README.md").read_text()
    assert PROGRAMS
    for folder in PROGRAMS:
        assert f"]({(folder / 'README.md').relative_to(FOLDER)})" in readme
        named = re.findall(r"`(\w+\.py)`", (folder / "README.md").read_text())
        assert {path.name for path in folder.glob("*.py")} == {*named}, folder


def test_what_is_shared_imports_no_experiment() -> None:
    for path in SHARED.glob("*.py"):
        imported = re.findall(r"(?:from|import) experiments\.(\w+)", path.read_text())
        assert set(imported) <= {SHARED.name}, path


def test_the_command_of_a_record_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with blanks are quoted, and where a result was written is left out."""
    given = ["--forms", "fa", "u8 by tile", "--json", "a b.json"]
    monkeypatch.setattr("sys.argv", ["sensitivity.py", *given])
    quiet = argparse.Namespace(seed=0, quick=True, json=None)
    record = recording.keep(quiet, "sensitivity", "interpret", {})
    assert record["command"].endswith(".sensitivity --forms fa 'u8 by tile'")
    assert shlex.split(record["command"])[-3:] == given[:3]


def test_a_source_says_where_kernels_ran_without_a_device() -> None:
    facts = {"environment": {"device": None, "revision": "0a"}}
    assert plots.source({**facts, "backend": "interpret"}).startswith("in the interpreter, ")
    assert plots.source({**facts, "backend": "mirror"}).startswith("on the mirror, ")


def test_the_command_of_a_record_is_found_where_its_module_stands() -> None:
    """A module is found by the last part of its name, which no other one may have.

    One that was removed says in which revision it was last.
    """
    names = [path.stem for path in FOLDER.rglob("*.py")]
    assert len(names) == len(set(names))
    for path in recording.RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        command = recording.command_now(record).split()
        assert command[:2] == ["python", "-m"], path
        assert "module_until" in record or find_spec(command[2]), path


def test_the_ladder_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    assert ladder.main(["--quick", "--head-dims", "40", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and record["rounds"] == 0
    assert {"device", "nvrtc", "cupy", "numpy", "python"} <= set(record["environment"])
    for found in record["problems"]:
        assert [row["variant"] for row in found["rows"]] == list(ca.VARIANTS)
        assert all(row["ok"] and "seconds" not in row for row in found["rows"])


def test_the_order_of_tiles_is_modelled_without_a_device(tmp_path: Path) -> None:
    file = tmp_path / "tile_order.json"
    assert tile_order.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 and all(x >= 1 for row in rows for x in row["imbalance"].values())
    assert sum(tile_order.work(100, ca.Tiles(50, 50, 4), [2, 1])) == 3 * (1 + 2) + 6 * 1.5


def test_scales_by_timestep_run_in_small(tmp_path: Path) -> None:
    """One scale for all steps loses late ones where activations fall; bins do not."""
    file, drawing = tmp_path / "timestep_ablation.json", tmp_path / "steps.svg"
    given = ["--quick", "--json", str(file), "--plot", str(drawing)]
    assert timestep_ablation.main(given) == 0
    rows = json.loads(file.read_text())["rows"]
    late = {(r["activations"], r["scales"]): r for r in rows if r["timestep"] == 42}
    assert (
        late["raw", "uniform static"]["range"] < 0.03 < 0.5 < late["raw", "static by bin"]["range"]
    )
    assert late["raw", "uniform static"]["error"] > 20 * late["raw", "static by bin"]["error"]
    assert late["raw", "dynamic, policy"]["mode"] == "precision"
    assert all(r["error"] < 0.05 for (_, name), r in late.items() if name == "dynamic")
    assert drawing.read_text().startswith("<?xml")


def test_what_pruning_loses_runs_in_small(tmp_path: Path) -> None:
    """On real data an estimate from rows chooses better than chance, and more rows better yet."""
    file = tmp_path / "token_pruning.json"
    assert token_pruning.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["operands"] for row in rows} == set(token_pruning.sources())
    mean = {
        kind: np.mean(
            [r["error"] for r in rows if r["rows"] == kind and r["operands"].startswith("encoder")]
        )
        for kind in (8, 128, token_pruning.RANDOM)
    }
    assert 0 < mean[128] < mean[8] < mean[token_pruning.RANDOM]


def test_revisions_are_compared_round_by_round_and_pair_by_pair() -> None:
    slow = {"old": {"attention()": [2.0, 4.0, 2.0]}, "new": {"attention()": [2.2, 4.4, 2.2]}}
    fast = {"old": {"attention()": [1.0, 1.0, 2.0]}, "new": {"attention()": [1.0, 1.0, 9.0]}}
    even = {"old": {"attention()": [1.0, 1.0, 1.0]}, "new": {"attention()": [1.01, 1.01, 1.01]}}
    (row,) = host_revisions.compare([slow, fast, even])
    assert row["old"] == [2.0, 1.0, 1.0] and row["new"] == [2.2, 1.0, 1.01]
    assert [median for median, *_ in row["ratios"]] == pytest.approx([1.1, 1.0, 1.01])
    assert row["ratio"] == pytest.approx(1.01) and row["ratio"] <= host_revisions.MOST


def test_two_revisions_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "calls.py"
    script.write_text(
        'import sys\nimport cupyattn\nprint(\'["a", "b"]\', flush=True)\n'
        "for line in sys.stdin:\n    print(cupyattn.SECONDS[line.strip()], flush=True)\n"
    )
    monkeypatch.setattr(host_revisions, "CALLS", script)
    for way, a in (("old", 1.0), ("new", 3.0)):
        (tmp_path / way / "cupyattn").mkdir(parents=True)
        (tmp_path / way / "cupyattn" / "__init__.py").write_text(f"SECONDS = {{'a': {a}, 'b': 2}}")
    assert host_revisions.measured(tmp_path / "old", tmp_path / "new", rounds=2) == {
        "old": {"a": [1.0, 1.0], "b": [2.0, 2.0]}, "new": {"a": [3.0, 3.0], "b": [2.0, 2.0]},
    }  # fmt: skip
    (tmp_path / "new" / "cupyattn" / "__init__.py").write_text("raise OSError('no device')")
    with pytest.raises(RuntimeError, match="new failed: Python's message stands above"):
        host_revisions.measured(tmp_path / "old", tmp_path / "new", rounds=2)
    assert "OSError: no device" in capfd.readouterr().err
    with pytest.raises(ValueError, match="none holds no revision: it has no cupyattn/__init__.py"):
        host_revisions.Revision(tmp_path / "none")


@pytest.mark.frameworks
def test_calls_at_their_place_run_in_small(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "host_places.json"
    assert host_places.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == ["dispatcher", "place"] * 3
    assert all(row["equal"] and not row["samples"] for row in rows)


@pytest.mark.frameworks
def test_host_times_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "host_time.json"
    assert host_time.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    of_torch = [row for row in rows if row["way"].startswith("torch")]
    assert len(of_torch) == (0 if find_spec("torch") is None else 3 * len(ca.VARIANTS))
    assert len(rows) - len(of_torch) == 4 * len(ca.VARIANTS)
    assert all(row["equal"] and not row["samples"] for row in rows)
    calls: list[int] = []
    assert host_time.sample(lambda: calls.append(1), 7, lambda: None) >= 0 and len(calls) == 7


@pytest.mark.slow
def test_costs_of_frameworks_run_in_small(tmp_path: Path) -> None:
    for library in ("jax", "diffusers"):
        pytest.importorskip(library)
    file = tmp_path / "framework_costs.json"
    assert framework_costs.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["framework"] for row in rows] == ["jax", "jax", "diffusers", "diffusers"]
    assert all(row["samples"][0] > 0 for row in rows)


def test_plots_are_seen_on_white_and_on_black() -> None:
    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    drawn = {plots.TEXT, *plots.COLOURS, *performance_plots.COLOURS, performance_plots.PEER}
    drawn |= {*precision_ablation.COLOURS.values(), *timestep_ablation.ARMS.values()}
    for lines in (plots.LINES, plots.BACKWARD_LINES):
        drawn |= {colour for colour, *_ in lines.values()}
    for colour in sorted(drawn):
        for page in ("#FFFFFF", "#0D1117"):
            dark, light = sorted(luminance(x) + 0.05 for x in (colour, page))
            assert light / dark > 3, f"{colour} on {page}: WCAG asks 3 of graphics"


def test_the_claims_are_those_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of mathematics quotes the record, and the record is what the code gives today."""
    record = json.loads((FOLDER / "results" / "numerics_claims.json").read_text())
    text = " ".join((FOLDER.parent / "docs" / "MATH_REFERENCE.md").read_text().split())
    quoted = [r["bound_over_rms"] for r in record["bounds"]] + [
        r["scores"] for r in record["codes"]
    ]
    quoted += [r["codes"] for r in record["codes"] if r["distribution"] == "normal"]
    for value in quoted:
        assert any(f"{100 * value:.{digits}g} %" in text for digits in (1, 2)), value
    first = record["bounds"][1]
    again = numerics_claims.sharpness(first["variant"], first["dtype"], 256, record["seed"])
    assert again == pytest.approx(first["bound_over_rms"], rel=1e-3)
    assert numerics_claims.main(["--quick"]) == 0 and "scores" in capsys.readouterr().out


def test_the_second_first_call_reads_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    assert first_call.main(["--quick", "--json", str(file)]) == 0
    empty, filled = json.loads(file.read_text())["rows"]
    assert (empty["filled"], filled["filled"]) == (False, True)
    assert filled["first"] < empty["first"] / 3  # it compiled nothing


def test_quantising_runs_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quantise.json"
    names = "balanced", "aggressive", "rotated"
    assert quantise.main(["--quick", "--modes", *names, "--json", str(file)]) == 0
    balanced, aggressive, rotated = json.loads(file.read_text())["rows"]
    rows, size = 70 * 64, 2
    scales = 4 * (35 + 3 + 64)  # of Q, of K for tiles of 32 keys, and the mean
    assert balanced["bytes"] == 3 * rows * size + 2 * rows + scales
    more = 2 * rows * size + 64 * 128 + 4 * (64 + 64)  # padded codes of V, scales, mean
    more += 4 * 35  # a scale of Q for each row, not for two
    more -= 4  # tiles of 64 keys
    assert aggressive["bytes"] == balanced["bytes"] + more
    assert balanced["launches"] == aggressive["launches"] == rotated["launches"] == 1
    assert rotated["bytes"] == balanced["bytes"] + 4 * (5 - 3)  # scales of 16 keys
    # A code that is not the mirror's fails the run.
    quantize = ca.quantize
    wrong = lambda *x, **options: quantize(x[0] * np.float16(2), *x[1:], **options)  # noqa: E731
    monkeypatch.setattr(ca, "quantize", wrong)
    monkeypatch.setattr(quantise, "MODES", {"balanced": quantise.MODES["balanced"]})
    assert quantise.main(["--quick"]) == 1


@pytest.mark.slow
def test_quantising_behind_norms_and_tables_runs_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, both = tmp_path / "quantise.json", ("balanced", "balanced, prepared")
    assert quantise.main(["--quick", "--modes", *both, "--json", str(file)]) == 0
    plain, prepared = json.loads(file.read_text())["rows"]
    assert prepared["ok"] and prepared["launches"] == 1
    assert prepared["bytes"] == plain["bytes"] + 4 * 64 * (2 * 70 + 2)  # tables, weights
    assert quantise.main(["--quick", "--only", "9 x 9"]) != 0
    assert "--only '9 x 9': no shape is called so" in capsys.readouterr().err


def test_the_pass_in_front_of_a_product_runs_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "norm_quant.json"
    assert norm_quant.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    ways = ["row", "rotated", "block", "row", "rotated"]
    assert [row["way"] for row in rows] == ways and all(row["ok"] for row in rows)
    # A code that is not the mirror's fails the run.
    made = ca.norm_quant

    def wrong(x: Any, **how: Any) -> Any:
        return made(x * np.float32(2) if how["backend"] == "interpret" else x, **how)

    monkeypatch.setattr(ca, "norm_quant", wrong)
    assert norm_quant.main(["--quick"]) == 1


def test_smoothing_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "smoothing.json"
    assert smoothing.main(["--quick", "--json", str(file)]) == 0
    plain, outliers = (row["of block"] for row in json.loads(file.read_text())["rows"])
    assert all(0.8 < one < 1.3 for one in plain.values())
    assert outliers["smoothed, rotated"] < 0.5 * outliers["rotated"] < outliers["channel"]
    assert "three x 100" in capsys.readouterr().out


def test_rotated_scores_run_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rotated_scores.json"
    assert rotated_scores.main(["--quick", "--json", str(file)]) == 0
    rows = {row["input"]: row["errors"] for row in json.loads(file.read_text())["rows"]}
    large = rows["a channel of K x 30"]
    assert all(one["rotated"] < one["as it is"] for one in large.values())
    assert large["2 rows, 16 keys"]["rotated"] < 0.4 * large["2 rows, 16 keys"]["as it is"]
    assert 0.8 < rows["normal"]["tiles"]["rotated"] / rows["normal"]["tiles"]["as it is"] < 1.25
    assert "a channel of K x 30" in capsys.readouterr().out


def test_the_tile_sweep_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiles.json"
    arguments = ["fa_tc", "--quick", "--head-dims", "64", "--json", str(file)]
    assert tile_sweep.main(arguments) == 0
    (found,) = json.loads(file.read_text())["problems"]
    own, *others = found["rows"]
    assert own["variant"] == "own tiles" and others
    assert own["tiles"] == vars(ca.VARIANTS["fa_tc"].default_tiles(64))
    assert all(row["registers"] > 0 and row["shared_bytes"] > 0 for row in found["rows"])
    assert "tiles hold their bound" in capsys.readouterr().out


def test_the_race_runs_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sm90").mkdir()
    kernel = compiler.KERNELS / "sm90" / "attn_fa_tc.cu"
    changed = kernel.read_text() + 'static_assert(BLOCK_KV != 64, "not 64");\n'
    (tmp_path / "sm90" / kernel.name).write_text(changed)
    file = tmp_path / "race.json"
    candidates = ["now", f"new={tmp_path}", "narrow@192x64w16s2", f"both={tmp_path}@192x64w16s2"]
    cells = ["--cells", "64:512", "128:512c"]
    assert race.main([*candidates, *cells, "--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [found["problem"]["causal"] for found in record["problems"]] == [False, True]
    for found in record["problems"]:
        assert record["rejected"][found["problem"]["name"]] == {"both": "not 64"}
        assert [row["variant"] for row in found["rows"]] == ["now", "new", "narrow"]
        sizes = {x: found["problem"][x] for x in ("batch", "heads", "length", "head_dim")}
        own = race.tiles_of(race.parse_candidate("now", tmp_path), Problem(**sizes)).block_kv
        assert [row["tiles"]["block_kv"] for row in found["rows"]] == [own, own, 64]
        assert all(row["ok"] and row["spill_bytes"] == 0 for row in found["rows"])
    assert "192x64 w16 s2: 128 registers, 0 bytes spilled" in capsys.readouterr().out


def test_a_candidate_brings_its_own_headers(tmp_path: Path) -> None:
    prims = tmp_path / "changes" / "prims" / "instructions"
    prims.mkdir(parents=True)
    (prims / "warp.cuh").write_text("#error mine\n")
    candidate = race.parse_candidate(f"new={tmp_path / 'changes'}", tmp_path / "stage")
    problem = race.parse_cell("64:512")
    assert "not found" not in str(race.compiled(candidate, problem))
    assert "mine" in str(race.compiled(candidate, problem))
    assert isinstance(race.compiled(race.parse_candidate("now", tmp_path), problem), Cell)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["now@192x96"], "a candidate looks like"),
        (["now=nowhere"], "now: nowhere is not a folder"),
        (["now", "now@192x96w16s2"], "two candidates have one name: now, now"),
        (["now", "--cells", "128x512"], "a cell looks like 128:512"),
    ],
)
def test_a_race_says_what_it_did_not_understand(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race.main([*arguments, "--quick"]) == 2
    assert message in capsys.readouterr().err


def test_a_race_is_told_in_pairs_of_the_same_rounds() -> None:
    rows = [
        {"variant": "now", "seconds": 2.0, "samples": [2.0, 4.0]},
        {"variant": "new", "seconds": 1.0, "samples": [1.0, 2.0]},
        {"variant": "wrong"},
        {"variant": others.CUDNN, "seconds": 8.0, "samples": [8.0, 16.0]},
        {"variant": others.FLASH_3, "seconds": 1.5, "samples": [1.5, 3.0]},
    ]
    record = {"problems": [{"problem": {"name": "one"}, "rows": rows}]}
    names = ["now", "new", "wrong", "absent"]
    (found,) = race.compared(record, names)
    assert found["first"] == {"now": [1.0] * 3, "new": [2.0] * 3, "wrong": None, "absent": None}
    assert found["rival"] == {"now": [0.75] * 3, "new": [1.5] * 3, "wrong": None, "absent": None}
    header, first, mean, rival, _ = race.summary([found], names).splitlines()
    assert header.split() == ["against", *names]
    assert first.split()[:2] == ["one", "now"] and "2.000 [2.000, 2.000]" in first
    assert "2.000 (1)" in mean and rival.split()[:2] == ["one", "rival"]


def test_tiles_that_do_not_compile_are_reported_with_the_reason() -> None:
    cell = rung("fa_tc", SMALL, tiles=ca.Tiles(24, 32, 4, 2))
    reason = tile_sweep.compiled(SMALL, cell, "sm_90")
    assert reason == "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma"


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if not device.device_missing():
        pytest.skip("there is a device")
    assert ladder.main([]) == 2
    assert "--quick runs without" in capsys.readouterr().err


def made_up(record: dict[str, Any]) -> dict[str, Any]:
    """Give a mirror's record the times of a device."""
    facts = {"name": "Made up", "driver": "1.2", "power_w": 70.0}
    record = {**record, "backend": "cuda"}
    record["environment"] = {**record["environment"], "device": facts}
    for found in record["problems"]:
        found["rows"] = [
            {**row, "seconds": 1e-3, "tflops": 7.0 + i, "share": 0.1}
            for i, row in enumerate(found["rows"])
        ]
        found["rows"].append({**found["rows"][3], "variant": others.FLASH_2, "peer": True})
        found["rows"].append({"variant": others.CUDNN, "judgement": None, "peer": True})
    return record


def test_the_readme_table_of_a_device_has_times_and_peers(tmp_path: Path) -> None:
    table = ladder.page_table(made_up(recording.stored("ladder")))
    lines = table.splitlines()
    assert "Made up, driver 1.2" in lines[0]
    assert (
        "| rung | the one idea | form | J2 | J3 | rel. error | time | TFLOP/s | ceiling |" in lines
    )
    assert any(line.startswith("| `fa_tc` |") and " | sm90 | " in line for line in lines)
    assert any(line.startswith(f"| {others.FLASH_2} |") and "10 % |" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("| `")}
    assert widths == {10}
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{ladder.BEGIN}\nold\n{ladder.END}\nbelow\n")
    ladder.update_docs(made_up(recording.stored("ladder")), readme)
    assert readme.read_text() == f"above\n{ladder.BEGIN}\n{table}\n{ladder.END}\nbelow\n"


@pytest.mark.parametrize("text", ["nothing", f"{ladder.BEGIN} only", f"{ladder.END}{ladder.BEGIN}"])
def test_a_readme_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        ladder.update_docs(recording.stored("ladder"), readme)
    assert readme.read_text() == text


def test_the_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = recording.stored("ladder")
    few = {**record, "problems": record["problems"][:2]}
    ladder.draw(made_up(few), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_ladder_that_was_cut_off_takes_what_it_lacks_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(revision: str, *head_dims: int) -> dict[str, Any]:
        problems = [
            {"problem": {"name": f"hd{d}", "head_dim": d}, "rows": [], "of": revision}
            for d in head_dims
        ]
        environment = {"revision": revision}
        return {
            "experiment": "ladder", "command": "run", "environment": environment,
            "problems": problems,
        }  # fmt: skip

    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    (tmp_path / "ladder.json").write_text(json.dumps(record("later", 64, 256)))
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(record("earlier", 64, 128)))
    assert ladder.main(["--stored", "--merge", str(earlier)]) == 0
    found = json.loads((tmp_path / "ladder.json").read_text())
    assert [(p["of"], p.get("revision")) for p in found["problems"]] == [
        ("later", None), ("earlier", "earlier"), ("later", None)
    ]  # fmt: skip
    assert found["environment"] == {"revision": "later"}
