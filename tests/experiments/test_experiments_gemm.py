"""The experiment on products of INT8 codes runs at a small size, and times the stated products."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from experiments.speed import gemm, gemm_layers


def test_products_run_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gemm.json"
    assert gemm.main(["--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [row["m"] for row in record["rows"]] == [256, 1]
    for row in record["rows"]:
        assert 0 < min(row["shares"].values()) <= max(row["shares"].values()) <= 1
    assert gemm.main(["--quick", "--only", "few", "--json", str(file)]) == 0
    assert [row["m"] for row in json.loads(file.read_text())["rows"]] == [1]
    assert gemm.main(["--quick", "--only", "layer"]) == 2
    # A product that misses its bound fails the run.
    monkeypatch.setattr(ca, "int8_gemm", lambda *codes, **_: wrong(*codes))
    wrong = lambda a, a_scales, b, b_scales: np.zeros((len(a), len(b)), np.float16)  # noqa: E731
    assert gemm.main(["--quick"]) == 1


def test_only_products_with_a_shared_last_wave_are_timed_without_one() -> None:
    shared = {s.label for s in gemm.SIZES if s.m > 64 and gemm.ways_of_the_last_wave(s)}
    assert "Flux, attention" in shared and "Kandinsky 5 Pro, attention" not in shared


def test_layers_of_the_same_codes_run_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "layers.json"
    assert gemm_layers.main(["--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["m"], row["ok"], row["taken"]) for row in rows] == [
        (40, True, True), (9, True, True)
    ]  # fmt: skip
    assert gemm_layers.main(["--quick", "--only", "layer"]) == 2
    # Bits that are not the mirror's fail the run.
    made = gemm_layers.gemm_mirror
    monkeypatch.setattr(gemm_layers, "gemm_mirror", lambda *x, **more: made(*x, **more) + 1)
    assert gemm_layers.main(["--quick", "--only", "text"]) == 1


@pytest.mark.parametrize("name", ["act_quant", "weight_quant", "weight_dequant"])
def test_passes_over_matrices_run_in_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "passes.json"
    assert gemm.main(["--quick", "--passes", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["rows"] == [] and {row["pass"] for row in record["passes"]} == set(gemm.PASSES)
    # One whose bits depend on how many rows there are fails the run.
    way = gemm.PASSES[name]
    monkeypatch.setitem(gemm.PASSES, name, lambda *x: (way(*x)[0] + np.int8(len(x[0]) > 200),))
    if name == "act_quant":
        monkeypatch.setattr(gemm, "QUICK_ACTIVATIONS", ((256, 384),))
    assert gemm.main(["--quick", "--passes"]) == 1
