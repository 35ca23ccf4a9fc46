"""Gated linear units of `cupyattn.interop.torch.Int8Linear`: bits, operators and refusals."""

from __future__ import annotations

import importlib

import pytest

import cupyattn as ca
from cupyattn import UnsupportedError

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_a_gated_linear_unit_is_that_of_cupyattn(activation: str, strategy: str) -> None:
    linear = torch.nn.Linear(256, 80)
    layer = interop.Int8Linear.from_linear(
        linear, strategy=strategy, activation=activation, backend="mirror"
    )
    x = torch.randn(2, 3, 256)
    own = ca.Int8Linear(
        *(one.numpy() for one in (layer.weight_codes, layer.weight_scale, layer.bias.detach())),
        activation=activation,
    )
    with torch.no_grad():
        y = layer(x)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert layer.out_features == 40 and y.numpy().tobytes() == own(x.numpy()).tobytes()
    assert torch.equal(compiled, y)
    with pytest.raises(ValueError, match="even number of rows.*got 5"):
        interop.Int8Linear.from_linear(torch.nn.Linear(256, 5), activation=activation)


def test_operators_of_gated_linear_units_are_what_they_say() -> None:
    """Their fake results have half as many columns, one activation for each of several layers."""
    x, residual = torch.randn(3, 256), torch.randn(3, 40)
    linear = interop.Int8Linear.from_linear(torch.nn.Linear(256, 80), backend="mirror")
    bias = linear.bias.detach()
    where = None, "mirror"
    own = linear.weight_codes, linear.weight_scale, bias
    of_one, operators = (x, *own), torch.ops.cupyattn
    one = (*of_one, "swiglu", *where)
    beside = (*of_one, residual, bias[:40], "swiglu", *where)
    several = (x, *([part] * 2 for part in own), ["geglu", ""], *where)
    torch.library.opcheck(operators.int8_linear.default, one)
    torch.library.opcheck(operators.int8_layer.default, beside)
    torch.library.opcheck(operators.int8_layers.default, several)
    assert [y.shape for y in operators.int8_layers(*several)] == [(3, 40), (3, 80)]
    expected = residual + bias[:40] * operators.int8_linear(*one)
    torch.testing.assert_close(operators.int8_layer(*beside), expected)


def test_a_gated_linear_unit_has_no_gradient() -> None:
    layer = interop.Int8Linear.from_linear(
        torch.nn.Linear(256, 80), activation="swiglu", backend="mirror"
    )
    with pytest.raises(UnsupportedError, match="not implemented with activation='swiglu'"):
        layer(torch.randn(3, 256, requires_grad=True))
