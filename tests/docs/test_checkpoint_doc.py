"""docs/CHECKPOINTS.md runs, names what exists, and has the record's table; docstrings are true."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

import cupyattn as ca
from cupyattn import cli
from experiments._harness import recording
from experiments.diffusion import checkpoints, kandinsky_block
from tests.checkpoints.checkpoint_files import source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "CHECKPOINTS.md").read_text(encoding="utf-8")


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)
    assert "INT8: 1 tensor," in capsys.readouterr().out
    assert ca.checkpoints.open_checkpoint(tmp_path / "back").tensors.keys() == {
        "blocks.0.mlp.fc1.weight"
    }


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(source(tmp_path / "model")), "INT8": "int8", "BACK": "back"}
    lines = re.findall(r"^cupyattn (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    runnable = [line for line in lines if "PIPELINE" not in line]  # test_checkpoint_kandinsky.py
    assert [line.split()[0] for line in runnable] == ["analyze", "convert", "dequantize"]
    for line in runnable:
        assert cli.main([places.get(word, word) for word in line.split()]) == 0
    before, after = (ca.checkpoints.open_checkpoint(x).tensors.keys() for x in ("model", "back"))
    assert before == after


def test_commands_and_settings_exist() -> None:
    for line in re.findall(r"^cupyattn (.*?)(?: +#.*)?$", PAGE, re.MULTILINE):
        cli.parser().parse_args(line.split())
    settings = {field.name for field in fields(ca.Int8Config)}
    assert {"min_elements_for_int8", "max_outlier_ratio", "min_sqnr_db", "fp32_patterns"} <= set(
        re.findall(r"`(\w+)`", PAGE)
    ) & settings
    defaults = ca.Int8Config()
    assert f"({defaults.min_elements_for_int8})" in PAGE and f"({defaults.min_sqnr_db:g})" in PAGE


def test_the_table_is_what_the_record_says() -> None:
    inside = PAGE.split(checkpoints.BEGIN)[1].split(checkpoints.END)[0]
    assert inside == f"\n{checkpoints.section(recording.stored('checkpoints'))}\n", (
        "run python -m experiments.diffusion.checkpoints --stored"
    )


def test_what_a_block_takes_is_what_its_record_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = PAGE.split(kandinsky_block.BEGIN)[1].split(kandinsky_block.END)[0]
    assert inside == f"\n{kandinsky_block.section(recording.stored('kandinsky_block'))}\n", (
        "run python -m experiments.diffusion.kandinsky_block --stored"
    )
    file = tmp_path / "block.json"
    assert kandinsky_block.main(["--quick", "--json", str(file)]) == 0
    assert "6 x projections of tokens" in capsys.readouterr().out
    record = json.loads(file.read_text())
    record["environment"] |= {"device": {"name": "some device"}, "revision": "0123456789abcdef"}
    said = kandinsky_block.section(record)
    assert "Kandinsky 5 small, 150 tokens" in said
    assert "on some device, revision 0123456789:" in said
    assert "| 1 x feed-forward, out | - | - | - |" in said
    assert said.endswith(" KiB.") and "Weights of the block" in said


def test_the_experiment_runs_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps in this process; what they cost is not judged."""
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 300_000)
    shapes = checkpoints.shapes(400_000, checkpoints.SMALL_SIZES)
    checkpoints.make(tmp_path / "model", shapes, seed=0)
    assert len(list((tmp_path / "model").iterdir())) > 2
    rows = [{"step": "write", "seconds": 1.0}]
    rows += [checkpoints.step(name, tmp_path) for name in checkpoints.STEPS]
    source = ca.checkpoints.open_checkpoint(tmp_path / "model")
    nbytes = sum(t.nbytes for t in source.tensors.values())
    largest = max(t.nbytes for t in source.tensors.values())
    header, cells = checkpoints.table({"rows": rows, "bytes": nbytes, "largest": largest})
    assert [row[0] for row in cells] == ["write", *checkpoints.STEPS]
    assert all(len(row) == len(header) for row in cells)
    assert rows[-2]["bytes_out"] < 0.75 * nbytes < rows[-1]["bytes_out"]
    assert 400_000 <= sum(t.elements for t in source.tensors.values()) < 800_000
