"""The experiment on INT8 layers of torch runs in small, and fails where a bound is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments.speed import int8_layers
from experiments.speed import int8_layers_few_rows as few_rows


def test_layers_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "layers.json"
    assert int8_layers.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    for row in (*record["rows"], record["product"]):
        assert row["shares"].keys() == {"block", "channel"}
        assert 0.5 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    made = int8_layers.layers_of

    def wrong(weight, bias):  # type: ignore[no-untyped-def]
        layers = made(weight, bias)
        layers["channel"].forward = lambda x: made(weight.flip(0), bias)["channel"](x)
        return layers

    monkeypatch.setattr(int8_layers, "layers_of", wrong)
    assert int8_layers.main(["--quick"]) == 1


def test_layers_of_few_rows_run_in_small(tmp_path: Path) -> None:
    file = tmp_path / "few.json"
    assert few_rows.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["m"] for row in rows] == list(few_rows.QUICK_ROWS)
    for row in rows:
        assert 0.2 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    timed = rows[0] | {
        "seconds": {"torch BF16": 3e-6, "block": 2e-6, "channel": 1e-6},
        "ratios": {"block": [1.5, 1.4, 1.6], "channel": [3.0, 2.9, 3.1]},
    }
    header, (line,) = few_rows.table([timed])
    assert dict(zip(header, line, strict=True))["channel x torch BF16"] == "3.000 [2.900, 3.100]"
