"""The one rule between scales of blocks and of channels, for files and for models in memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import analyze, convert
from cupyattn.checkpoints.analysis import layer_errors
from cupyattn.checkpoints.choosing import choose
from experiments.dit import checkpoint
from experiments.dit import model as dit
from experiments.dit.train import WEIGHTS
from tests.checkpoints.checkpoint_files import write
from tests.support.marks import slow_unless

NAME = "blocks.0.fc"


def given(outliers: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A weight, and activations of which three channels are so many times as large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 512)).astype(np.float32)
    x[:, [5, 70, 300]] *= outliers
    return {f"{NAME}.weight": rng.standard_normal((128, 512)).astype(np.float32)}, {NAME: x}


def strategy_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return str(config["config_groups"]["group_0"]["weights"]["strategy"])


@pytest.mark.parametrize(
    ("outliers", "expected"), [(1.0, "channel"), (10.0, "block"), (50.0, "block")]
)
def test_planted_outlier_channels_get_blocks(
    outliers: float, expected: str, tmp_path: Path
) -> None:
    weights, activations = given(outliers)
    path = write(tmp_path / "x.safetensors", weights)
    found = analyze(path, activations=activations)
    assert found.config.strategy == expected
    assert f"Scales by {expected}: " in found.summary()
    convert(path, tmp_path / "out", analysis=found)
    assert strategy_of(tmp_path / "out") == expected


@pytest.mark.frameworks
@pytest.mark.parametrize(("outliers", "expected"), [(1.0, "channel"), (10.0, "block")])
def test_a_model_in_memory_is_judged_by_the_same_rule(outliers: float, expected: str) -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import replace_linear_with_int8

    weights, activations = given(outliers)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Module()])
    model.blocks[0].fc = torch.nn.Linear(512, 128, bias=False)
    model.blocks[0].fc.weight.data = torch.from_numpy(weights[f"{NAME}.weight"])
    x = {NAME: torch.from_numpy(activations[NAME])}
    with replace_linear_with_int8(model, activations=x) as handle:
        assert model.blocks[0].fc.strategy == expected
        assert f"\nscales by {expected}: " in handle.report()
    for strategy in ("block", "channel"):  # what is asked for holds
        config = ca.Int8Config(strategy=strategy)
        with replace_linear_with_int8(model, config=config, activations=x):
            assert model.blocks[0].fc.strategy == strategy
    with replace_linear_with_int8(model):
        assert model.blocks[0].fc.strategy == "block"
    wrong = {"blocks.0.other": x[NAME]}
    with pytest.raises(ValueError, match=r"'blocks.0.other' are \(16, 512\), and it is no layer"):
        replace_linear_with_int8(model, activations=wrong)
    with pytest.raises(ValueError, match=r"and it takes \(..., 512\)"):
        replace_linear_with_int8(model, activations={NAME: x[NAME][:, 1:]})


def test_without_activations_the_family_decides(tmp_path: Path) -> None:
    weights, _ = given()
    wide = {f"transformer_blocks.{i}.ff.weight": np.zeros((4, 3072), np.float16) for i in range(2)}
    for tensors, cls, expected in (
        (wide, "FluxTransformer2DModel", "channel"), (wide, "UNet2DConditionModel", "block"),
        (weights, "FluxTransformer2DModel", "block"),
    ):  # fmt: skip
        folder = tmp_path / f"{cls}{len(tensors)}"
        folder.mkdir()
        write(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps({"_class_name": cls}))
        found = analyze(folder, ca.Int8Config(min_elements_for_int8=100))
        assert found.config.strategy == expected
    assert choose("block", "FluxTransformer2DModel", [3072]).strategy == "block"


def test_a_layout_of_blocks_alone_gets_blocks(tmp_path: Path) -> None:
    tensors = {"transformer_blocks.0.ff.weight": np.ones((128, 3072), np.float32)}
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    done = convert(tmp_path, tmp_path / "out", export="deepseek")
    assert done.analysis is not None and done.analysis.config.strategy == "block"


def test_the_command_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, _ = given()
    path = write(tmp_path / "x.safetensors", weights)
    assert cli.main(["convert", str(path), "--output", str(tmp_path / "out")]) == 0
    assert "Scales by block: no activations were given" in capsys.readouterr().out


# ---- activations of the trained transformer ------------------------------------------------------


class PlainAttention:
    """Attention in NumPy: the transformer's own takes minutes on the mirror."""

    dtype = "float16"

    def forward(self, q: Any, k: Any, v: Any, *, layer: int) -> tuple[Any, None]:
        q, k, v = (x.astype(np.float32).swapaxes(1, 2) for x in (q, k, v))
        p = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]))
        return (p @ v / p.sum(-1, keepdims=True)).swapaxes(1, 2).astype(np.float16), None

    def backward(self, d_o: Any, saved: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("depth", slow_unless(lambda _, depth: depth == 1, [1, 6]))
def test_activations_of_the_trained_transformer_allow_channels(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, weights = checkpoint.load_weights(WEIGHTS, np)
    shape = dataclasses.replace(shape, depth=depth)
    seen: dict[str, Any] = {}
    own = dit._linear

    def recording(parameters: Any, rounded: Any, layers: Any) -> Any:
        apply = own(parameters, rounded, layers)

        def run(name: str, x: Any) -> Any:
            seen[name] = x.reshape(-1, x.shape[-1])[::8].astype(np.float32)
            return apply(name, x)

        return run

    monkeypatch.setattr(dit, "_linear", recording)
    x = np.random.default_rng(0).standard_normal((1, shape.size, shape.size, 3), np.float32)
    wide = {name: weights[name].astype(np.float32) for name in weights}
    dit.Model(shape, np).forward(
        wide, weights, x, np.ones(1, np.float32), np.zeros(1, int), PlainAttention(), keep=False
    )
    layers = [n for n in seen if n[0].isdigit()]
    assert len(layers) == 4 * depth
    errors = {n: layer_errors(weights[f"{n}.weight"].T, seen[n], 128) for n in layers}
    chose = choose("auto", errors=errors)
    assert chose.strategy == "channel", chose
    for n in layers:  # planted outliers in a single layer do not; others have two blocks of columns
        if n.endswith("mlp.1"):
            seen[n][:, :3] *= 20
            planted = {**errors, n: layer_errors(weights[f"{n}.weight"].T, seen[n], 128)}
            chose = choose("auto", errors=planted)
            assert chose.strategy == "block" and chose.why.endswith(f"activations of {n}")
