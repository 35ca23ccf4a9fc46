"""The one rule for scales of blocks, of channels and of rotated rows, in files and in memory."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import cli
from cupyattn.checkpoints import analyze, convert, open_checkpoint
from cupyattn.checkpoints.analysis import layer_errors
from cupyattn.checkpoints.choosing import LIMIT, ROTATED_LIMIT, Way, choose
from cupyattn.checkpoints.predicted_errors import MOST_ROWS, Errors, predicted_errors
from cupyattn.errors import UnsupportedError
from cupyattn.reference.gemm import activate
from experiments.dit import checkpoint
from experiments.dit import model as dit
from experiments.dit.train import WEIGHTS
from tests.checkpoints.checkpoint_files import write
from tests.support.marks import slow_unless

predicted = importlib.import_module("cupyattn.checkpoints.predicted_errors")
NAME = "blocks.0.fc"
ROTATED = Way("channel", "hadamard")


def given(outliers: float = 1.0, channels: int = 512) -> tuple[dict[str, Any], dict[str, Any]]:
    """A weight, and activations of which three channels are so many times as large."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, channels)).astype(np.float32)
    x[:, [5, 70, 300]] *= outliers
    return {f"{NAME}.weight": rng.standard_normal((128, channels)).astype(np.float32)}, {NAME: x}


def strategy_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return str(config["config_groups"]["group_0"]["weights"]["strategy"])


#: Times that three channels are as large, all channels, and what the layer gets; 64 does not divide
#: 500 channels.
PLANTED = [
    (1.0, 512, Way("channel")), (10.0, 512, ROTATED), (50.0, 512, ROTATED),
    (10.0, 500, Way("block")),
]  # fmt: skip


@pytest.mark.parametrize(("outliers", "channels", "expected"), PLANTED)
def test_planted_outlier_channels_get_a_rotation_or_blocks(
    outliers: float, channels: int, expected: Way, tmp_path: Path
) -> None:
    weights, activations = given(outliers, channels)
    path = write(tmp_path / "x.safetensors", weights)
    found = analyze(path, activations=activations)
    (report,) = found.tensors
    assert (found.config.strategy, report.rotate) == (expected.strategy, expected.rotate)
    assert f"Scales by {expected.strategy}: " in found.summary()
    convert(path, tmp_path / "out", analysis=found)
    assert strategy_of(tmp_path / "out") == expected.strategy
    written = open_checkpoint(tmp_path / "out")
    assert found.totals["bytes_out"] == sum(written.read(n).nbytes for n in written.tensors)


@pytest.mark.frameworks
@pytest.mark.parametrize(("outliers", "channels", "way"), PLANTED)
def test_a_model_in_memory_is_judged_by_the_same_rule(
    outliers: float, channels: int, way: Way
) -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import replace_linear_with_int8

    weights, activations = given(outliers, channels)
    expected = way.strategy
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Module()])
    model.blocks[0].fc = torch.nn.Linear(channels, 128, bias=False)
    model.blocks[0].fc.weight.data = torch.from_numpy(weights[f"{NAME}.weight"])
    x = {NAME: torch.from_numpy(activations[NAME])}
    with replace_linear_with_int8(model, activations=x) as handle:
        assert model.blocks[0].fc.strategy == way.strategy
        assert model.blocks[0].fc.rotate == way.rotate
        assert model.blocks[0].fc.weight_smooth is None
        assert f"\nscales by {expected}: " in handle.report()
        assert handle.report().endswith(", rotated") == (way.rotate is not None)
    for strategy in ("block", "channel"):  # what is asked for holds
        config = ca.Int8Config(strategy=strategy)
        with replace_linear_with_int8(model, config=config, activations=x):
            assert model.blocks[0].fc.strategy == strategy
    with replace_linear_with_int8(model):
        assert model.blocks[0].fc.strategy == "block"
    wrong = {"blocks.0.other": x[NAME]}
    with pytest.raises(ValueError, match="'blocks.0.other', which is no linear layer, there are b"):
        replace_linear_with_int8(model, activations=wrong)
    with pytest.raises(ValueError, match=r"it takes one or more rows of 5.. channels"):
        replace_linear_with_int8(model, activations={NAME: x[NAME][:, 1:]})
    with pytest.raises(ValueError, match="infinite in float32: record others"):
        replace_linear_with_int8(model, activations={NAME: x[NAME].double() * 1e300})


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


def relative(layer: ca.Int8Linear, x: Any, w: Any) -> float:
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    return float(np.linalg.norm(layer(x) - exact) / np.linalg.norm(exact))


#: Inputs of a layer: their channels, the change of normal numbers, and the layer's way.
INPUTS = {
    "normal": (1536, lambda x: x, Way("channel")),
    "0.5 % x 30": (3072, lambda x: planted(x, np.arange(0, 3072, 200), 30), ROTATED),
    "one head x 10": (3072, lambda x: planted(x, np.arange(384, 512), 10), ROTATED),
    "half x 10": (3072, lambda x: planted(x, np.arange(1536), 10), ROTATED),
    "GELU": (6144, lambda x: activate(x, "gelu"), ROTATED),
    "one row": (512, lambda x: x[:1], Way("channel")),
}


def planted(x: Any, channels: Any, factor: float) -> Any:
    x[:, channels] *= factor
    return x


@pytest.mark.parametrize("name", INPUTS)
def test_layers_get_what_errs_little_more_than_blocks(name: str) -> None:
    """Errors are foretold within 5 %, and no layer errs more than its limit allows."""
    channels, changed, way = INPUTS[name]
    rng = np.random.default_rng(3)
    x = np.float32(changed(rng.standard_normal((96, channels))))
    w = rng.standard_normal((96, channels), np.float32)
    one = predicted_errors(w, x)
    assert choose("auto", errors={"a": one}).layers == {"a": way}
    make = ca.Int8Linear.from_weight
    found = {
        each: relative(make(w, strategy=each.strategy, rotate=each.rotate), x, w)
        for each in (Way("block"), Way("channel"), ROTATED)
    }
    for error, each in zip((one.block, one.channel, one.rotated), found, strict=True):
        assert error is not None and abs(error / found[each] - 1) < (0.05 if len(x) > 1 else 0.3)
    limit = LIMIT if way.rotate is None else ROTATED_LIMIT
    assert found[way] <= limit * 1.05 * found[Way("block")]


@pytest.mark.frameworks
def test_wide_rows_in_small_groups_may_be_smoothed_first() -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import replace_linear_with_int8

    rng, channels = np.random.default_rng(0), 253 * 64
    w, x = (torch.from_numpy(rng.standard_normal((8, channels), np.float32)) for _ in range(2))
    x[:, 100] *= 300
    exact, off = x.double() @ w.double().T, {}
    for smooth, way in (
        (False, ("block", None)), ("auto", ("channel", "hadamard")), (True, ("channel", "hadamard"))
    ):  # fmt: skip
        model = torch.nn.ModuleDict({"fc": torch.nn.Linear(channels, 8, bias=False)})
        model["fc"].weight.data = w.clone()
        config = ca.Int8Config(smooth=smooth, max_outlier_ratio=1)
        with replace_linear_with_int8(model, config=config, activations={"fc": x}) as handle:
            layer = model["fc"]
            assert (layer.strategy, layer.rotate) == way
            assert (layer.weight_smooth is None) == (smooth is False)
            assert (", smoothed, rotated" in handle.report()) == (smooth is not False)
            layer.backend = "mirror"
            off[smooth] = float((layer(x) - exact).norm() / exact.norm())
        assert torch.equal(model["fc"].weight, w)
    assert off["auto"] == off[True] < 0.5 * off[False]


@pytest.mark.frameworks
def test_layers_of_one_input_get_the_same_factors() -> None:
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import replace_linear_with_int8

    model = torch.nn.ModuleDict({name: torch.nn.Linear(128, 64) for name in ("q", "k", "other")})
    x, y = torch.randn(2, 9, 128)
    x[:, 3] *= 50
    given = {"q": x[None], "k": x.clone(), "other": y}
    config = ca.Int8Config(smooth=True)
    with replace_linear_with_int8(model, config=config, activations=given) as handle:
        q, k, other = (model[name].weight_smooth for name in given)
        assert q is k and not torch.equal(q, other) and "3 layers smoothed" in handle.report()
        lines = handle.report().splitlines()
        rotated = sum("smoothed, rotated" in line for line in lines)
        said = f"scales by channel: 3 layers smoothed, {rotated} of them rotated, as asked for"
        assert lines[1] == said and rotated == 3
    config = ca.Int8Config(smooth=True, strategy="channel", rotate=None)
    with replace_linear_with_int8(model, config=config, activations={"q": x}):
        assert model["q"].weight_smooth is not None and model["q"].rotate is None
        assert model["k"].weight_smooth is None and model["k"].strategy == "channel"
    with pytest.raises(ValueError, match="smooth=True takes activations"):
        replace_linear_with_int8(model, config=config)
    with pytest.raises(ValueError, match="smooth=True takes activations"):
        replace_linear_with_int8(model, config=config, exclude="other", activations={"other": y})


@pytest.mark.frameworks
def test_layers_that_keep_their_type_do_not_choose() -> None:
    """As for `analyze`: a layer of the time has one row, whose outliers no rotation spreads."""
    torch = pytest.importorskip("torch")
    from cupyattn.interop.torch import replace_linear_with_int8

    sizes = {"time_embed": 500, "q": 128, "other": 128}
    model = torch.nn.ModuleDict({name: torch.nn.Linear(n, 64) for name, n in sizes.items()})
    given = {name: torch.randn(9, sizes[name]) for name in ("time_embed", "q")}
    given["time_embed"][:, 3] *= 50.0
    with replace_linear_with_int8(model, activations=given) as handle:
        assert "time_embed" in handle.kept and "\nscales by channel: " in handle.report()
        assert model["other"].strategy == "channel"
    model = torch.nn.ModuleDict({name: torch.nn.Linear(128, 64) for name in ("q", "k", "other")})
    model["k"].weight.data[3, 5] = float("nan")
    given = {name: torch.randn(9, 128) for name in ("q", "k")}
    config = ca.Int8Config(smooth="auto")
    with replace_linear_with_int8(model, config=config, activations=given) as handle:
        assert "k" in handle.kept and model["other"].strategy == "channel"


def test_a_weight_that_is_not_finite_does_not_choose(tmp_path: Path) -> None:
    weights, activations = given()
    other = np.full_like(weights[f"{NAME}.weight"], np.nan)
    path = write(tmp_path / "x.safetensors", {**weights, "blocks.0.other.weight": other})
    alone = analyze(path, activations=activations)
    samples = {**activations, "blocks.0.other": activations[NAME]}
    assert analyze(path, activations=samples).choice == alone.choice


def test_files_have_no_place_for_factors(tmp_path: Path) -> None:
    weights, activations = given()
    path = write(tmp_path / "x.safetensors", weights)
    with pytest.raises(UnsupportedError, match="files have no place for factors"):
        analyze(path, ca.Int8Config(smooth=True), activations=activations)
    with pytest.raises(ValueError, match="smooth must be False, 'auto' or True, got 'yes'"):
        ca.Int8Config(smooth="yes")
    with pytest.raises(UnsupportedError, match="smooth=True goes with strategy='channel'"):
        ca.Int8Config(smooth=True, strategy="block")


def test_few_rows_of_activations_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are spread over all of them."""
    x = np.zeros((10_000, 64), np.float32)
    x[::9999] = 1.0
    seen: list[int] = []
    own = predicted._noise
    monkeypatch.setattr(predicted, "_noise", lambda v, *a: (seen.append(len(v)), own(v, *a))[1])
    predicted_errors(np.ones((4, 64), np.float32), x)
    assert seen[0] == MOST_ROWS


def test_layers_without_activations_are_as_the_rest() -> None:
    plain, outliers = Errors(0.01, 0.0101, 0.01), Errors(0.01, 0.03, 0.01)
    assert choose("auto", errors={"a": plain}).way_of("other") == Way("channel")
    assert choose("auto", errors={"a": plain, "b": outliers}).way_of("other") == ROTATED
    bad = Errors(0.01, 0.03, 0.02)
    chose = choose("auto", errors={"a": plain, "b": outliers, "c": bad})
    assert [chose.way_of(n) for n in "abcd"] == [
        Way("channel"), ROTATED, Way("block"), Way("block")
    ]  # fmt: skip
    assert str(chose).endswith("scales of channels err 3 times as much on the activations of c")
    saved = choose("auto", errors={"a": plain, "c": dataclasses.replace(bad, smoothed=0.012)})
    assert saved.way_of("c") == Way("channel", "hadamard", True) and saved.strategy == "channel"
    assert str(saved.way_of("c")) == "by channel, smoothed, rotated"
    assert "rotated in 1 of 2 layers, where they err at most 1.2 times" in str(saved)


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
    matrices = {n: np.ascontiguousarray(weights[f"{n}.weight"].T, np.float32) for n in layers}
    errors = {n: predicted_errors(matrices[n], seen[n]) for n in layers}
    chose = choose("auto", errors=errors)
    assert chose.strategy == "channel", chose
    for n, one in errors.items():  # the prediction is right, and a rotation errs less than blocks
        of_block, of_channel = layer_errors(matrices[n], seen[n], 128)
        layer = ca.Int8Linear.from_weight(matrices[n], strategy="channel", rotate="hadamard")
        exact = seen[n].astype(np.float64) @ matrices[n].astype(np.float64).T
        rotated = np.linalg.norm(layer(seen[n]) - exact) / np.linalg.norm(exact)
        assert abs(one.channel / one.block / (of_channel / of_block) - 1) < 0.05
        assert abs(one.rotated / one.block / (rotated / of_block) - 1) < 0.05
        assert rotated < of_block
    for n in layers:  # planted outliers in a single layer ask for a rotation of it
        if n.endswith("mlp.1"):
            seen[n][:, :3] *= 20
            planted = {**errors, n: predicted_errors(matrices[n], seen[n])}
            chose = choose("auto", errors=planted)
            assert chose.way_of(n) == ROTATED and "rotated in" in chose.why
            without = choose("auto", errors=planted, rotate=None)
            assert without.strategy == "block" and without.why.endswith(f"activations of {n}")
