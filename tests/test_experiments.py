"""The experiments: each runs in small without a device, and holds to its rules."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import compile as compiler
from cupyattn import device, timing
from experiments import (
    common,
    host_time,
    ladder,
    numerics_claims,
    others,
    peers,
    race,
    tile_sweep,
)  # fmt: skip
from experiments.common import Problem

FOLDER = Path(ladder.__file__).parent
EXPERIMENTS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("common", "others"))
SMALL = Problem(1, 1, 40, 16)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_does(name: str) -> None:
    text = importlib.import_module(f"experiments.{name}").__doc__ or ""
    assert text.splitlines()[0].endswith("?")
    for word in (
        "Varies ",
        "Holds fixed ",
        "Measures ",
        f"Run          python -m experiments.{name}",
    ):
        assert word in text
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()


def test_the_ladder_runs_in_small(tmp_path: Path) -> None:
    file = tmp_path / "ladder.json"
    assert ladder.main(["--quick", "--head-dims", "40", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["backend"] == "mirror" and record["rounds"] == 0
    assert {"device", "nvrtc", "cupy", "numpy", "python"} <= set(record["environment"])
    for found in record["problems"]:
        assert [row["variant"] for row in found["rows"]] == list(ca.VARIANTS)
        assert all(row["ok"] and "seconds" not in row for row in found["rows"])


def test_host_times_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "host_time.json"
    assert host_time.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3 * len(ca.VARIANTS)
    assert all(row["equal"] and not row["samples"] for row in rows)
    calls: list[int] = []
    assert host_time.sample(lambda: calls.append(1), 7, lambda: None) >= 0 and len(calls) == 7


def test_the_peers_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    assert peers.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert len(record["problems"]) == 4 and record["backend"] == "mirror"
    rows = [{"variant": "fa_tc", "seconds": 2.0}, {"variant": others.CUDNN, "seconds": 3.0}]
    rows.append({"variant": others.FLASH_3, "seconds": 1.0})
    text = peers.summary({"problems": [{"problem": {"name": "one"}, "rows": rows}]})
    assert text.splitlines()[0].split() == ["one", "0.500"], "the faster of the two rivals counts"
    assert text.splitlines()[1].endswith("0.500")


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
    changed = kernel.read_text() + 'static_assert(BLOCK_KV != 96, "not 96");\n'
    (tmp_path / "sm90" / kernel.name).write_text(changed)
    file = tmp_path / "race.json"
    candidates = ["now", f"new={tmp_path}", "wide@192x96w16s2", f"both={tmp_path}@192x96w16s2"]
    cells = ["--cells", "64:512", "128:512c"]
    assert race.main([*candidates, *cells, "--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [found["problem"]["causal"] for found in record["problems"]] == [False, True]
    for found in record["problems"]:
        assert record["rejected"][found["problem"]["name"]] == {"both": "not 96"}
        assert [row["variant"] for row in found["rows"]] == ["now", "new", "wide"]
        assert [row["tiles"]["block_kv"] for row in found["rows"]] == [128, 128, 96]
        assert all(row["ok"] and row["spill_bytes"] == 0 for row in found["rows"])
    assert "192x96 w16 s2: 128 registers, 0 bytes spilled" in capsys.readouterr().out


def test_a_candidate_brings_its_own_headers(tmp_path: Path) -> None:
    prims = tmp_path / "changes" / "prims"
    prims.mkdir(parents=True)
    (prims / "warp.cuh").write_text("#error mine\n")
    candidate = race.parse_candidate(f"new={tmp_path / 'changes'}", tmp_path / "stage")
    problem = race.parse_cell("64:512")
    assert "not found" not in str(race.compiled(candidate, problem))
    assert "mine" in str(race.compiled(candidate, problem))
    assert isinstance(race.compiled(race.parse_candidate("now", tmp_path), problem), common.Cell)


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
    cell = common.rung("fa_tc", SMALL, tiles=ca.Tiles(24, 32, 4, 2))
    reason = tile_sweep.compiled(SMALL, cell, "sm_90")
    assert reason == "BLOCK_Q / NUM_WARPS must be a multiple of 16, the rows of an mma"


def fake_times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the harness believe that there is a device; return the names of what it times."""
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
    good, absent = common.rung("fa", problem), common.rung("fa_tc", problem)
    wrong = common.Cell("wrong", "fa", lambda q, k, v: np.float32(1.01) * good.run(q, k, v))
    cells = [good, wrong, absent]
    rows = [common._judge(problem, cell, inputs) for cell in cells]
    common._time(problem, cells, rows, inputs, 15, "fa")
    assert timed == ["fa"]
    assert rows[0]["seconds"] == 1e-3 and rows[0]["speed_ratio"] == [1.0, 1.0, 1.0]
    assert rows[1]["judgement"]["j2"] > 1 and "seconds" not in rows[1]
    assert "takes float16, bfloat16" in rows[2]["unsupported"]
    header, printed = common.table({"rows": rows}, "fa")
    assert all(len(row) == len(header) for row in printed)
    assert "not timed" in " ".join(printed[1]) and "not supported" in printed[2]
    assert not common.passed({"problems": [{"rows": rows}]})


def test_codes_are_given_before_the_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = common.rung("fa_int8", SMALL, codes_given=True)
    (codes,) = cell.prepare(*SMALL.draw(on_device=False))
    monkeypatch.setattr(ca, "quantize", None)  # would raise if run called it
    assert isinstance(codes, ca.QuantizedQKV)
    assert cell.run(codes).shape == codes.shape


def test_operations_count_admitted_pairs_only() -> None:
    assert Problem(2, 3, 10, 8).operations == 4 * 8 * 2 * 3 * 100
    assert Problem(2, 3, 10, 8, causal=True).operations == 4 * 8 * 2 * 3 * 55


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if not device.device_missing():
        pytest.skip("there is a device")
    assert ladder.main([]) == 2
    assert "--quick runs without" in capsys.readouterr().err


def test_too_few_rounds_are_refused() -> None:
    args = argparse.Namespace(quick=False, rounds=14, seed=0, json=None)
    with pytest.raises(ValueError, match="at least 15"):
        common.run_grid(args, "x", [])


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
    table = ladder.readme_table(made_up(ladder.stored()))
    lines = table.splitlines()
    assert "Made up, driver 1.2" in lines[0]
    assert "| rung | the one idea | J2 | J3 | rel. error | time | TFLOP/s | ceiling |" in lines
    assert any(line.startswith(f"| {others.FLASH_2} |") and "10 % |" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("| `")}
    assert widths == {9}
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{ladder.BEGIN}\nold\n{ladder.END}\nbelow\n")
    ladder.update_readme(made_up(ladder.stored()), readme)
    assert readme.read_text() == f"above\n{ladder.BEGIN}\n{table}\n{ladder.END}\nbelow\n"


@pytest.mark.parametrize("text", ["nothing", f"{ladder.BEGIN} only", f"{ladder.END}{ladder.BEGIN}"])
def test_a_readme_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        ladder.update_readme(ladder.stored(), readme)
    assert readme.read_text() == text


def test_the_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ladder.draw(made_up(ladder.stored()), str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").stat().st_size > 10_000
