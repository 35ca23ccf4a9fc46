"""The experiment on INT8 layers of torch runs in small, and fails where a bound is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments.speed import int8_layers


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
