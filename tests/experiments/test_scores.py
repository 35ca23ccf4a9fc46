"""The measurement of masks, biases and softcap: its calls, and a run at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments._harness import recording
from experiments._harness.cells import Problem
from experiments.speed import scores


def test_a_cell_is_read() -> None:
    cell = scores.ScoreCell.parse("64:4096:bfloat16")
    assert cell in scores.CELLS and str(cell) == "64:4096:bfloat16"
    with pytest.raises(ValueError, match="a cell is HEAD_DIM:LENGTH:DTYPE, such as .*, got '64:x'"):
        scores.ScoreCell.parse("64:x")


def test_every_feature_has_its_options() -> None:
    problem = Problem(4, 2, 64, 64)
    found = {one: scores.options_of(one, problem, np) for one in scores.features_of(problem)}
    assert tuple(found) == scores.FEATURES and found[scores.PLAIN] == {}
    keys, rows = found[scores.PADDING]["mask"], found[scores.MASK]["mask"]
    assert keys.shape == (4, 1, 1, 64) and keys.sum(axis=-1).ravel().tolist() == [64, 46, 46, 46]
    assert found[scores.LENGTHS]["lengths_kv"].tolist() == [64, 46, 46, 46]
    assert rows.shape == (64, 64) and 0.4 < rows.mean() < 0.6
    assert found[scores.BIAS]["bias"].shape == (1, 2, 64, 64)
    assert found[scores.OWN_BIAS]["bias"].shape == (4, 2, 64, 64)
    assert scores.OWN_BIAS not in scores.features_of(Problem(1, 2, 64, 64))


def row(feature: str, **more: Any) -> dict[str, Any]:
    return {"feature": feature, "peer": False, "seconds": [2.0, 2.0, 2.0], **more}


def test_what_is_asked_of_a_feature() -> None:
    ratio = {"of_plain": [1.0, 1.0, 1.0]}
    for padded in scores.PADDED:
        assert scores.aim_of(row(padded, **ratio), 64, 0.8) == (1.25, 1.08)
    assert scores.aim_of(row(scores.SOFTCAP, **ratio), 128, 0.8) == (1.0, 1.5)
    own = row(scores.OWN_BIAS, copy_seconds=4.0, **ratio)
    assert scores.aim_of(own, 64, 1.0) == (0.5, scores.OWN_AIM)
    assert scores.aim_of(own | {"copy_seconds": 0.5}, 64, 1.0) == (1.0, scores.OWN_AIM)
    assert scores.aim_of(row(scores.PLAIN), 64, 1.0) is None
    assert scores.aim_of(own | {"peer": True}, 64, 1.0) is None


def test_a_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    assert scores.main(["--quick", "--cells", "64:1024:float16", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["problems"]
    assert {one["feature"] for one in found["rows"]} == set(scores.FEATURES)
    assert all(one["form"] == "sm90" for one in found["rows"] if one["name"] == "fa_tc")


def test_records_in_parts_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    for name, head_dim in (("scores", 64), ("part", 128)):
        problem = {"name": f"hd{head_dim}", "head_dim": head_dim}
        rows = [row(scores.SOFTCAP, name="fa_tc", of_plain=[1.2, 1.1, 1.3])]
        record = {
            "experiment": "scores", "command": name, "environment": {},
            "problems": [{"problem": problem, "admitted": 0.8, "rows": rows}],
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert scores.main(["--stored", "--merge", str(tmp_path / "part.json")]) == 0
    said = capsys.readouterr().out
    assert "hd64" in said and "hd128" in said and "1.200" in said and "1.90" in said
    merged = json.loads((tmp_path / "scores.json").read_text())
    assert [one["problem"]["head_dim"] for one in merged["problems"]] == [64, 128]


def test_flash_attention_4_is_beside_from_the_run_that_had_it() -> None:
    record = recording.stored(scores.WITH_FLASH_4)
    assert scores.has_flash_4(record)
    problem, *_ = record["problems"]
    said = scores.beside_flash_4({**record, "problems": [problem]})
    times = {
        row["name"]: row["seconds"][0]
        for row in problem["rows"]
        if row["feature"] == scores.SOFTCAP
    }
    cells = [cell.strip() for cell in said[-1].split("|")[1:-1]]
    assert cells[0] == problem["problem"]["name"] and len(cells) == 5
    assert float(cells[3]) == pytest.approx(times[scores.FLASH_4] / times["fa_tc"], rel=0.02)
    without = [{**problem, "rows": [row for row in problem["rows"] if not row["peer"]]}]
    assert not scores.has_flash_4({"problems": without})
    section = scores.section({**record, "problems": without})
    assert scores.FLASH_4 in section and record["environment"]["revision"][:10] in section
    assert "An earlier one did" in section and "An earlier one" not in scores.section(record)


def test_the_section_names_the_libraries_that_were_timed() -> None:
    record = recording.stored("scores")
    said = scores.section(record)
    assert "cuDNN, torch's memory-efficient attention, compiled FlexAttention. " in said
    assert "FlashAttention-3 was not among them" in said
    for found in record["problems"]:
        found["rows"] = [row for row in found["rows"] if row["name"] in ("cuDNN", *scores.RUNGS)]
        for row in found["rows"]:
            row.pop("speed_of_best_peer", None)
    said = scores.section(record)
    assert "timed, of: cuDNN. " in said and "FlexAttention" not in said
    assert "| softcap | fa_tc | 1.51 ms | x 1.75 | no rival was timed |" in said


def test_problems_of_another_revision_are_named() -> None:
    record = recording.stored("scores")
    others = [found["problem"]["name"] for found in record["problems"] if "revision" in found]
    assert len(others) == 2
    assert f", but {' and '.join(others)} of revision " in scores.section(record)
