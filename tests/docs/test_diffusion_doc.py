"""docs/DIFFUSION.md runs, names what exists, and the examples in the docstrings are true."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.diffusion.settings import Int8AttentionSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "DIFFUSION.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
        o = names["o"]
        assert isinstance(o, np.ndarray) and np.isfinite(o).all()
    assert (tmp_path / "scales.safetensors").is_file()


def test_the_table_is_what_the_record_says() -> None:
    record = json.loads((ROOT / "experiments" / "results" / "timestep_ablation.json").read_text())
    found = {(r["activations"], r["scales"], r["timestep"]): r for r in record["rows"]}
    named = {"one static scale": "uniform static", "static by bin": "static by bin"}
    rows = re.findall(r"^\| (raw|scaled), (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for model, scales, cells in rows:
        for t, cell in zip((0, 21, 49), cells.split(" | "), strict=True):
            row = found[model, named.get(scales, scales), t]
            error, reach = re.fullmatch(r"(\S+) \((\d+) %\)", cell).groups()  # type: ignore[union-attr]
            assert float(error) == float(f"{row['error']:.1e}")
            assert int(reach) == round(100 * row["range"])


def test_the_table_of_pruning_is_what_the_record_says() -> None:
    record = json.loads((ROOT / "experiments" / "results" / "token_pruning.json").read_text())
    found = {(r["operands"], r["rows"]): r["error"] for r in record["rows"] if r["ratio"] == 0.2}
    pattern = r"^\| ((?:transformer|encoder), \w+ \d+)(?:: [\w ]+)? \| ([\d. |]+) \|$"
    rows = re.findall(pattern, PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(dict.fromkeys(name for name, _ in found))
    for name, cells in rows:
        for kind, cell in zip((8, 32, 128, 512, "random"), cells.split(" | "), strict=True):
            assert cell == f"{found[name, kind]:.2g}"


def test_every_argument_is_in_the_table_and_in_the_docstring() -> None:
    table = PAGE.split("## Arguments")[1].split("## Limits")[0]
    named = set(re.findall(r"`(\w+)`", table))
    arguments = set(inspect.signature(ca.Int8Attention).parameters)
    assert arguments <= named
    assert {field.name for field in fields(Int8AttentionSettings)} <= named
    described = inspect.getdoc(ca.Int8Attention) or ""
    parameters = described.split("Parameters\n")[1].split("Raises\n")[0]
    headings = re.findall(r"^(\w[\w, ]*?) : ", parameters, re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == arguments


