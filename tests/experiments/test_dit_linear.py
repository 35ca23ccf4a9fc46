"""Images with INT8 linear layers: every mode runs in small, is recorded and told on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.errors import UnsupportedError
from cupyattn.measure import pictures
from experiments.dit import checkpoint, linear, metrics, modes, quality, report
from experiments.dit.attention import Kernels
from experiments.dit.model import Model
from experiments.dit.train import QUICK


def test_every_mode_runs_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "DISTANCE_RESAMPLES", 20)
    file = tmp_path / "dit_linear.json"
    given = ["--quick", "--images", "8", "--steps", "4", "--json", str(file)]
    assert linear.main(given) == 0
    record = json.loads(file.read_text())
    rows = {row["mode"]: row for row in record["rows"]}
    assert tuple(rows) == (modes.REFERENCE, modes.FULL, *linear.MODES)
    psnr = {n: row[f"psnr to {modes.FULL}"][0] for n, row in rows.items() if n != modes.FULL}
    by_block, by_channel, attention, *both = (psnr[name] for name in linear.MODES)
    assert max(by_block, by_channel) < attention < psnr[modes.REFERENCE]
    assert max(both) < attention
    told = "\n".join(report._linear_layers(record))
    for name in linear.MODES:
        figure = report.with_interval(rows[name][f"psnr to {modes.REFERENCE}"], 2)
        assert f"| {name} | {figure} |" in told
    (_, said, verdict), *others = report.claims(_plain(rows), None, None, record)[-5:]
    assert said.endswith(" %") and verdict in ("holds", "undecided", "does not hold")
    assert len(others) == 4


def _plain(rows: dict[str, Any]) -> dict[str, Any]:
    """A record of `experiments.dit.quality` whose modes all have the row of 16 bits."""
    own = {f"psnr to {modes.REFERENCE}": [1, 1, 1], f"psnrs to {modes.REFERENCE}": [1.0, 2.0]}
    return {"rows": [{**rows[modes.REFERENCE], **own, "mode": name} for name in modes.NAMES]}


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_only_the_linear_layers_of_the_blocks_change(strategy: str) -> None:
    weights = checkpoint.untrained(QUICK, 0, np)
    layers = linear.int8_layers(Model(QUICK, np), weights, strategy)
    assert set(layers) == {f"{i}.{n}" for i in range(QUICK.depth) for n in linear.LAYERS}
    x = np.random.default_rng(0).standard_normal((2, 5, QUICK.width), np.float32)
    name = "0.qkv"
    exact = x @ weights[f"{name}.weight"].astype(np.float32) + weights[f"{name}.bias"]
    y = layers[name](x)
    assert y.dtype == np.float32 and y.shape == exact.shape
    assert 1e-4 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 2e-2


def test_such_layers_have_no_gradients() -> None:
    weights = checkpoint.untrained(QUICK, 0, np)
    model = Model(QUICK, np, linear=linear.int8_layers(Model(QUICK, np), weights, "block"))
    x = np.zeros((1, QUICK.size, QUICK.size, 3), np.float32)
    call = weights, weights, x, np.ones(1, np.float32), np.zeros(1, int), Kernels()
    with pytest.raises(UnsupportedError, match="have no gradients"):
        model.forward(*call)


def test_one_definition_of_psnr_and_ssim() -> None:
    """The window of SSIM is one of 11 x 11 pixels: others do not count for a pixel."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 24, 24, 3)), rng.random((2, 24, 24, 3))
    for name in ("psnr", "ssim"):
        each = [getattr(pictures, name)(a * 255, b * 255) for a, b in zip(x, y, strict=True)]
        np.testing.assert_allclose(getattr(metrics, name)(x, y), each, rtol=1e-12)
    flat, spot = np.zeros((25, 25, 1)), np.zeros((25, 25, 1))
    spot[12, 12] = 1e12
    assert 1 - pictures.ssim(flat, spot) == pytest.approx(11**2 / 25**2, rel=1e-6)
