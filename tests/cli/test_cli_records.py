"""`cupyattn compare` and `cupyattn ablate`: output, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupyattn import cli
from cupyattn.measure import records, timing

SMALL = ["--heads", "1", "--len", "40", "--head-dim", "24"]


def write(path: Path, scale: float, **more: Any) -> Path:
    """Write a record of three cells, one of them noisy, `scale` times as slow."""
    samples = {"fast": [1.0] * 15, "slow": [4.0] * 15, "noisy": [1.0, 2.0] * 8}
    rows = [
        {"variant": name, "rung": name, "samples": [scale * x for x in some]}
        for name, some in samples.items()
    ]
    record: dict[str, Any] = {
        "experiment": "x", "environment": {"revision": "a", "device": {"name": "One"}},
        "problems": [{"problem": {"name": "p"}, "rows": rows}],
    }  # fmt: skip
    path.write_text(json.dumps(record | more))
    return path


def test_a_faster_record_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.json", 1.0), write(tmp_path / "b.json", 0.5)
    file = tmp_path / "out.json"
    assert cli.main(["compare", str(first), str(second), "--json", str(file)]) == 0
    found = {cell["name"]: cell for cell in json.loads(file.read_text())["cells"]}
    assert list(found) == ["p, fast", "p, slow", "p, noisy"]
    assert found["p, slow"]["speed"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["p, slow"]["verdict"] == "faster" and found["p, noisy"]["verdict"] == "undecided"
    assert "Device, libraries and revision are the same." in capsys.readouterr().out


def test_what_differs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"revision": "b", "device": {"name": "Two"}}
    first = write(tmp_path / "a.json", 1.0)
    second = write(tmp_path / "b.json", 1.0, environment=other)
    assert cli.main(["compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "2 same, 1 undecided" in printed and "The devices differ" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"experiment": "y"}, "of two experiments, 'x' and 'y'"),
        ({"problems": []}, "no timed cell in common"),
        ({"environment": None}, "is no record"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write(tmp_path / "a.json", 1.0), write(tmp_path / "b.json", 1.0, **more)
    assert cli.main(["compare", str(first), str(second)]) == 2
    assert message in capsys.readouterr().err


def test_a_record_without_samples_has_the_widest_interval() -> None:
    row = {"variant": "fa", "seconds": 2.0, "seconds_interval": [1.0, 4.0]}
    record = {"environment": {}, "rows": [row]}
    (one,) = records.compare(record, record)
    assert one.speed == timing.Estimate(1.0, 0.25, 4.0) and one.verdict == "undecided"


def test_ablate_judges_every_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert cli.main(["ablate", "rungs", "bits", *SMALL, "--json", str(file)]) == 0
    (problem,) = json.loads(file.read_text())["problems"]
    names = [row["variant"] for row in problem["rows"]]
    assert names[-5:-2] == ["fa_int8", "4 bits", "4 bits, Q and K per token"] and "fa_tc" in names
    rows = problem["rows"][:-2]
    assert all(row["ok"] and row["judgement"]["j2"] <= 1 for row in rows)
    rotated = [row["unsupported"] for row in problem["rows"][-2:]]
    assert all("rotate='hadamard' takes head_dim 64" in said for said in rotated)
    errors = {row["variant"]: row["error_over_default"] for row in rows}
    assert errors["fa_int8"] == 1 and errors["fa_tc"] < 1 < errors["4 bits"]
    assert cli.main(["ablate", "nothing", *SMALL]) == 2
    assert "NAME must be one of rungs, granularity" in capsys.readouterr().err


def test_ablate_judges_the_ways_of_diffusion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    shape = ["--distribution", "normal", "--len", "160", "--heads", "1", "--head-dim", "8"]
    words = ["ablate", "diffusion", *shape, "--batch", "1"]
    assert cli.main([*words, "--json", str(file)]) == 0
    rows = {row["variant"]: row for row in json.loads(file.read_text())["problems"][0]["rows"]}
    pruned, local, blocks = (
        rows[f"{name} of the keys"] for name in ("pruned, 20%", "local, 25%", "block-sparse, 25%")
    )
    static, later = rows["static scales of a head"], rows["the same by timestep, 2 times the noise"]
    for row in (rows["given scales of a tensor"], static, later, local, blocks):
        assert row["ok"] and 0 < row["judgement"]["j2"] <= 1
    assert pruned["ok"] and pruned["judgement"]["j2"] is None
    error = {name: row["error_over_default"] for name, row in rows.items()}
    assert 1 < error["static scales of a head"] < error["the same by timestep, 2 times the noise"]
    for row in (pruned, local, blocks):  # normal data spreads attention over all keys
        assert row["judgement"]["relative_error"] > 0.1
    assert cli.main(["ablate", "diffusion", *SMALL, "--causal"]) == 0
    assert "leave --causal out" in capsys.readouterr().out
