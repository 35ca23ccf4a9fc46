"""Rotated INT8 layers of torch: their weight, state dicts, graphs, gradients, and files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.checkpoints import dequantize, open_checkpoint
from cupyattn.errors import UnsupportedError
from cupyattn.quant import smoothing_factors
from tests.support.marks import slow_unless

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
write_int8 = importlib.import_module("cupyattn.interop.torch.writing").write_int8
fusing = importlib.import_module("cupyattn.interop.torch.fusing")
Int8Linear, load_int8 = interop.Int8Linear, interop.load_int8
replace_linear_with_int8 = interop.replace_linear_with_int8

ROTATIONS = ["hadamard", "hadamard_contiguous"]
SMALL = {"min_elements_for_int8": 100}


def linear(channels: int = 512, out: int = 40, **options: Any) -> Any:
    return torch.nn.Linear(channels, out, **options).requires_grad_(False)


def rows(channels: int = 512) -> Any:
    x = torch.randn(2, 5, channels)
    x[..., 7] *= 30
    return x


def away(y: Any, exact: Any) -> float:
    return float((y.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("channels", [64, 384, 512])
def test_a_layer_has_the_bits_of_the_one_in_numpy(rotate: str, channels: int) -> None:
    own, x = linear(channels), rows(channels)
    layer = Int8Linear.from_linear(own, strategy="channel", rotate=rotate, backend="mirror")
    plain = ca.Int8Linear.from_weight(
        own.weight.numpy(), own.bias.numpy(), strategy="channel", rotate=rotate, backend="mirror"
    )
    assert layer.rotate == rotate and f"rotate='{rotate}'" in repr(layer)
    assert torch.equal(layer(x), torch.from_numpy(plain(x.numpy())))
    assert away(layer(x), own(x)) < 0.015
    beside = torch.randn(2, 5, 40)
    assert torch.equal(
        layer(x, residual=beside), torch.from_numpy(plain(x.numpy(), residual=beside.numpy()))
    )


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_its_weight_is_that_of_the_plain_layer(rotate: str) -> None:
    """Libraries that read `weight`, and gradients, get it as it was before it was rotated."""
    own, x = linear(), rows()
    layer = Int8Linear.from_linear(own, strategy="channel", rotate=rotate, backend="mirror")
    assert away(layer.weight, own.weight) < 0.012
    x.requires_grad_()
    layer(x).sum().backward()
    assert away(x.grad[0, 0], layer.weight.sum(0)) < 1e-5
    half = layer.half()
    assert half.weight.dtype == torch.float16 and half.weight_rotation.dtype == torch.int32


@pytest.mark.parametrize("rotate", [None, *ROTATIONS])
def test_a_state_dict_loads_into_layers_of_its_rotation_only(rotate: str | None) -> None:
    options = {"strategy": "channel", "backend": "mirror"}
    layer = Int8Linear.from_linear(linear(), rotate=rotate, **options)
    state = layer.state_dict()
    assert ("weight_rotation" in state) == (rotate is not None)
    for other in (None, *ROTATIONS):
        into = Int8Linear.from_linear(linear(), rotate=other, **options)
        before = into.weight_codes.clone()
        if other == rotate:
            into.load_state_dict(state)
            assert torch.equal(into.weight_codes, layer.weight_codes)
            continue
        with pytest.raises(RuntimeError, match="a layer that was made with the same rotate"):
            into.load_state_dict(state)
        if rotate is not None:
            mark = {"weight_rotation": state["weight_rotation"]}
            with pytest.raises(RuntimeError, match="a layer that was made with the same rotate"):
                into.load_state_dict(mark, strict=False)
        assert torch.equal(into.weight_codes, before)


# ---- factors of channels -------------------------------------------------------------------------


def smoothed(channels: int = 256, **options: Any) -> tuple[Any, Any, Any]:
    """Return rows with an outlier channel, a linear layer, and an INT8 layer with factors."""
    x, own = rows(channels), linear(channels)
    x[..., 9] *= 60
    factors = torch.from_numpy(smoothing_factors(x.numpy(), own.weight.detach().numpy()))
    options = {"strategy": "channel", "backend": "mirror", **options}
    return x, own, Int8Linear.from_linear(own, smooth=factors, **options)


@pytest.mark.parametrize("rotate", [None, *ROTATIONS])
def test_a_smoothed_layer_has_the_bits_of_the_one_in_numpy(rotate: str | None) -> None:
    x, own, layer = smoothed(rotate=rotate)
    same = ca.Int8Linear.from_weight(
        own.weight.detach().numpy(), own.bias.detach().numpy(), strategy="channel",
        rotate=rotate, smooth=layer.weight_smooth.numpy(),
    )  # fmt: skip
    x.requires_grad_(True)
    y = layer(x)
    assert np.array_equal(y.detach().numpy(), same(x.detach().numpy()))
    plain = Int8Linear.from_linear(own, strategy="channel", rotate=rotate, backend="mirror")
    exact = own(x).detach()
    assert away(y.detach(), exact) < 0.7 * away(plain(x).detach(), exact)
    # `weight` and gradients are of x as the layer gets it.
    assert away(layer.weight, own.weight.detach()) < 0.03
    y.sum().backward()
    assert away(x.grad[0, 0], layer.weight.sum(0)) < 1e-5
    assert layer.half().weight_smooth.dtype == torch.float32 and "smooth=True" in repr(layer)


def test_a_state_dict_has_the_factors() -> None:
    x, own, layer = smoothed()
    plain = Int8Linear.from_linear(own, strategy="channel", backend="mirror")
    assert "weight_smooth" in layer.state_dict() and "weight_smooth" not in plain.state_dict()
    ones = torch.ones(256)
    other = Int8Linear.from_linear(own, strategy="channel", backend="mirror", smooth=ones)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    for into, state in ((plain, layer.state_dict()), (layer, plain.state_dict())):
        with pytest.raises(RuntimeError, match="a layer that was made with smooth alike"):
            into.load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match="smooth must be powers of two"):
        Int8Linear.from_linear(own, strategy="channel", smooth=3 * ones)
    with np.errstate(all="raise"), pytest.raises(ValueError, match="smooth must be powers of two"):
        Int8Linear.from_linear(own, strategy="channel", smooth=0 * ones)
    before = layer(x)
    with pytest.raises(RuntimeError, match="weight_smooth: smooth must be powers of two"):
        layer.load_state_dict({**layer.state_dict(), "weight_smooth": 3 * ones})
    assert torch.equal(layer(x), before)


def test_files_have_no_place_for_factors(tmp_path: Path) -> None:
    _, _, layer = smoothed()
    with pytest.raises(UnsupportedError, match="0 has factors of channels"):
        write_int8(torch.nn.Sequential(layer), tmp_path / "model")


def test_projections_with_the_same_factors_are_fused() -> None:
    x, own, layer = smoothed()
    for factors in (layer.weight_smooth, torch.ones(256)):
        parts = [layer, Int8Linear.from_linear(own, strategy="channel", smooth=factors)]
        whole = torch.nn.Linear(256, 80)
        whole.weight.data = torch.cat([own.weight, own.weight]).detach()
        made = fusing._fused(whole, "to_kv", parts)
        assert (made.weight_smooth is None) == (factors is not layer.weight_smooth)
        assert away(made.weight, whole.weight.detach()) < 0.03


@pytest.mark.slow
def test_accelerate_fills_in_the_mark_of_a_rotation(tmp_path: Path) -> None:
    """As INTEROP says: codes that are not rotated go into rotated layers, those that are do not."""
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    options = {"strategy": "channel", "backend": "mirror"}
    x = rows()

    def layer(rotate: str | None) -> Any:
        return Int8Linear.from_linear(linear(), rotate=rotate, **options)

    for rotate in (None, "hadamard"):
        own, into = layer(rotate), layer("hadamard")
        save_file(own.state_dict(), tmp_path / "m.safetensors")
        accelerate.load_checkpoint_in_model(into, str(tmp_path / "m.safetensors"), strict=True)
        assert torch.equal(into.weight_codes, own.weight_codes)
        assert torch.equal(into(x), own(x)) == (rotate is not None)
    with pytest.raises(RuntimeError, match="a layer that was made with the same rotate"):
        accelerate.load_checkpoint_in_model(layer(None), str(tmp_path / "m.safetensors"))


def test_a_state_dict_without_numbers_is_assigned() -> None:
    options = {"strategy": "channel", "backend": "mirror"}
    layer = Int8Linear.from_linear(linear(), rotate="hadamard", **options)
    state = {name: x.to("meta") for name, x in layer.state_dict().items()}
    into = Int8Linear.from_linear(linear(), rotate="hadamard", **options)
    into.load_state_dict(state, assign=True)
    assert into.weight_codes.is_meta and into.weight_rotation.is_meta
    into.load_state_dict(layer.state_dict(), assign=True)
    x = rows()
    assert torch.equal(into(x), layer(x))
    plain = Int8Linear.from_linear(linear(), **options)
    with pytest.raises(RuntimeError, match="a layer that was made with the same rotate"):
        plain.load_state_dict(state, assign=True)


@pytest.mark.parametrize("assign", [False, True])
def test_scales_and_factors_that_are_loaded_stay_float32(assign: bool) -> None:
    smooth = torch.ones(linear().in_features)
    options = {"strategy": "channel", "smooth": smooth, "backend": "mirror"}
    layer, into = (Int8Linear.from_linear(linear(), **options) for _ in range(2))
    state = {n: x.double() if x.is_floating_point() else x for n, x in layer.state_dict().items()}
    state["bias"] = layer.bias
    into.load_state_dict(state, assign=assign)
    assert into.weight_scale.dtype == into.weight_smooth.dtype == torch.float32
    x = rows()
    assert torch.equal(into(x), layer(x))
    with pytest.raises(RuntimeError, match="weight_scale must be of a float type, got torch.int32"):
        into.load_state_dict({**state, "weight_scale": layer.weight_scale.int()}, assign=assign)


@pytest.mark.parametrize("rotate", slow_unless(lambda _, rotate: rotate == "hadamard", ROTATIONS))
def test_graphs_have_the_layer(rotate: str) -> None:
    layers = [
        Int8Linear.from_linear(linear(), strategy="channel", rotate=one, backend="mirror")
        for one in (rotate, rotate, None)
    ]
    x = rows()

    def function(x: Any) -> Any:
        x = torch.relu(x)
        return [layer(x) for layer in layers]

    with torch.no_grad():
        found, expected = torch.compile(function, fullgraph=True)(x), function(x)
    assert all(map(torch.equal, found, expected))
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(layers[0]))
    assert torch.equal(traced(x), layers[0](x))
    read = torch.compile(lambda x: x @ layers[0].weight.T, fullgraph=True)
    assert away(read(x), x @ layers[0].weight.T) < 1e-5
    given = x, layers[0].weight_codes, layers[0].weight_scale, None, "", None, "mirror", "hadamard"
    torch.library.opcheck(torch.ops.cupyattn.int8_linear.default, given)


def model() -> Any:
    block = torch.nn.Module()
    block.to_q, block.to_k = linear(), linear(200)
    return torch.nn.ModuleDict({"attn": block})


def test_a_model_is_rotated_where_it_can_be_written_and_loaded(tmp_path: Path) -> None:
    made = model()
    config = ca.Int8Config(rotate="hadamard", **SMALL)
    handle = replace_linear_with_int8(made, config=config, backend="mirror")
    q, k = made["attn"].to_q, made["attn"].to_k
    assert (q.strategy, q.rotate, k.strategy, k.rotate) == ("channel", "hadamard", "channel", None)
    assert handle.replaced["attn.to_q"].endswith(", rotated")
    assert not handle.replaced["attn.to_k"].endswith("rotated")
    x = rows()
    write_int8(made, tmp_path / "int8")
    again = load_int8(model(), tmp_path / "int8", backend="mirror")
    assert again["attn"].to_q.rotate == "hadamard" and torch.equal(again["attn"].to_q(x), q(x))
    handle.restore()
    assert type(made["attn"].to_q) is torch.nn.Linear
    # Codes of this model go into it, and those of another do not.
    with replace_linear_with_int8(made, tmp_path / "int8", backend="mirror"):
        assert torch.equal(made["attn"].to_q(x), q(x))
    with pytest.raises(ValueError, match="is of another weight"):
        replace_linear_with_int8(model(), tmp_path / "int8", backend="mirror")
    dequantize(tmp_path / "int8", tmp_path / "back")
    back = torch.from_numpy(np.array(open_checkpoint(tmp_path / "back").read("attn.to_q.weight")))
    assert away(back, q.weight) < 1e-6


def test_a_model_may_stay_without_a_rotation() -> None:
    made, x = model(), rows()
    for rotate, expected in ((None, "block"), ("auto", "channel")):
        config = ca.Int8Config(rotate=rotate, **SMALL)
        given = {"attn.to_q": x}
        with replace_linear_with_int8(made, config=config, activations=given, backend="mirror"):
            assert made["attn"].to_q.strategy == expected


def test_projections_of_one_rotation_are_fused() -> None:
    options = {"strategy": "channel", "backend": "mirror"}
    for second in ("hadamard", None):
        layers = [
            Int8Linear.from_linear(linear(bias=False), rotate=one, **options)
            for one in ("hadamard", second)
        ]
        whole = linear(512, 80, bias=False)
        whole.weight.data = torch.cat([fusing.as_linear(one).weight for one in layers])
        made = fusing._fused(whole, "to_kv", layers)
        assert made.rotate == "hadamard"
        own = torch.cat([one.weight_codes for one in layers])
        assert torch.equal(made.weight_codes, own) == (second == "hadamard")
