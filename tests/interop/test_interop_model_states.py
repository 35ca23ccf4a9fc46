"""Models in states that libraries and users leave them in, and INT8 layers made of these."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")

nn = torch.nn
ALL = ca.Int8Config(min_elements_for_int8=0)
X = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128, bias=False))


def replaced(model: Any, **options: Any) -> Any:
    return interop.replace_linear_with_int8(model, config=ALL, backend="mirror", **options)


def relative(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())


# ---- inference mode ------------------------------------------------------------------------------


@pytest.mark.parametrize("originals", ["cpu", "device", "drop"])
def test_a_model_of_inference_mode_is_replaced(originals: str) -> None:
    with torch.inference_mode():
        model = network()
        native = model(X)
    handle = replaced(model, originals=originals)
    with torch.inference_mode():
        assert 0 < relative(model(X), native) < 0.05
        if originals != "drop":
            handle.restore()
            assert torch.equal(model(X), native)


def test_layers_that_inference_mode_makes_are_trained_and_loaded() -> None:
    model, linear = network(), network()[0]
    with torch.inference_mode():
        handle = replaced(model)
        layer = interop.Int8Linear.from_linear(linear, backend="mirror")
    for one in (model, layer):
        one(X.clone().requires_grad_()).sum().backward()
        one.load_state_dict(one.state_dict())
    model.half()
    with torch.inference_mode():
        handle.restore()
    assert not any(x.is_inference() for x in model.parameters())
    model.float()(X).sum().backward()


# ---- other states --------------------------------------------------------------------------------


def test_a_layer_without_a_weight_yet_is_kept() -> None:
    model = network().append(nn.LazyLinear(16)).append(nn.LazyConv1d(4, 1))
    handle = replaced(model)
    assert handle.kept == {"3": "a LazyLinear, whose weight is made in its first call"}
    assert [*handle.replaced] == ["0", "2"] and "weights -" in handle.report()
    handle.restore()
    assert [type(layer) for layer in model[:3]] == [nn.Linear, nn.Tanh, nn.Linear]


def test_codes_stay_int8_when_a_module_gets_a_type() -> None:
    model, half = network(), network()
    replaced(model)
    replaced(half)
    x = X.half()
    model.type(torch.float16)
    half.half()
    assert model[0].weight_codes.dtype == torch.int8
    assert model[0].weight_scale.dtype == torch.float32
    assert model[0].weight.dtype == model[0].bias.dtype == torch.float16
    assert torch.equal(model(x), half(x))


def test_a_weight_is_formatted_and_makes_tensors_beside_it() -> None:
    layer = interop.Int8Linear.from_linear(network()[0], backend="mirror").bfloat16()
    weight, plain = layer.weight, layer.weight.clone()
    assert f"{weight[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    found = weight.new_tensor([1.0, 2.0])
    assert (found.tolist(), found.dtype, found.device) == ([1, 2], torch.bfloat16, plain.device)
