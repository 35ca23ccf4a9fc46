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
