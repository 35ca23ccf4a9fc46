"""The INT8 layer of torch: the bits of `cupyattn.Int8Linear`, gradients, sums, refusals."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import UnsupportedError
from tests.interop.torch_cases import at_odd_address, same_bits

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
linear_module = importlib.import_module("cupyattn.interop.torch.linear")

nn = torch.nn
DTYPES = ("float16", "bfloat16", "float32")


pytestmark = pytest.mark.usefixtures("seeded")


def linear(columns: int = 300, rows: int = 200, dtype: str = "bfloat16") -> Any:
    return nn.Linear(columns, rows, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_layer_is_that_of_arrays_and_in_bounds(dtype: str, activation: str | None) -> None:
    module = linear(dtype=dtype).requires_grad_(False)
    layer = interop.Int8Linear.from_linear(module, activation=activation, backend="mirror")
    weight, bias = (bridge.as_array(x) for x in (module.weight, module.bias))
    core = ca.Int8Linear.from_weight(weight, bias, activation=activation)
    assert same_bits(layer.weight_codes, core.codes) and same_bits(layer.weight_scale, core.scales)
    assert layer.bias is module.bias
    x = torch.randn(2, 5, 300, dtype=module.weight.dtype)
    y, many = layer(x), layer(x.transpose(0, 1))
    assert same_bits(y, core(bridge.as_array(x)))
    assert torch.equal(many, y.transpose(0, 1))
    wide = x.double() @ module.weight.double().T + module.bias.double()
    exact = (nn.functional.gelu(wide) if activation else wide).detach().numpy()
    assert (abs(y.double().numpy() - exact) <= core.error(bridge.as_array(x), weight)).all()
    assert layer(x[:0]).shape == (0, 5, 200)


def test_gradients_go_through_the_weight_of_the_codes() -> None:
    module = linear(dtype="float16")
    layer = interop.Int8Linear.from_linear(module, backend="mirror")
    w = linear_module.dequantised(layer.weight_codes, layer.weight_scale, torch.float16)
    codes, scales = bridge.as_array(layer.weight_codes), bridge.as_array(layer.weight_scale)
    assert same_bits(w, ca.weight_dequant(codes, scales, out_dtype="float16"))
    x = torch.randn(2, 7, 300, dtype=torch.float16, requires_grad=True)
    d_y = torch.randn(2, 7, 200, dtype=torch.float16)
    layer(x).backward(d_y)
    exact, size = d_y.double() @ w.double(), d_y.double().abs() @ w.double().abs()
    # torch sums 200 products in float32 or wider, in whatever order, and rounds to float16 once.
    assert ((x.grad.double() - exact).abs() <= 2.0**-11 * exact.abs() + 201 * 2.0**-24 * size).all()
    total, size = d_y.double().sum((0, 1)), d_y.double().abs().sum((0, 1))
    error = (module.bias.grad.double() - total).abs()
    assert (error <= 2.0**-11 * total.abs() + 15 * 2.0**-24 * size).all()
    gelu = interop.Int8Linear.from_linear(module, activation="gelu")
    with pytest.raises(UnsupportedError, match="not implemented with activation='gelu'"):
        gelu(x)


def test_the_layer_is_an_operator_where_torch_compiles() -> None:
    layer = interop.Int8Linear.from_linear(linear(dtype="float16"), backend="mirror")
    x = torch.randn(3, 300, dtype=torch.float16, requires_grad=True)
    own = layer.weight_codes, layer.weight_scale, layer.bias, "", None, "mirror"
    torch.library.opcheck(torch.ops.cupyattn.int8_linear.default, (x, *own))
    torch._dynamo.reset()
    function = torch.compile(lambda x: layer(x * 2) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), layer(x * 2) + 1)
    function(x).sum().backward()
    assert x.grad.abs().sum() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16


def test_a_model_is_traced_by_symbols() -> None:
    """``torch.fx`` calls the layer with proxies, of which it makes operators."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                interop.Int8Linear.from_linear(torch.nn.Linear(128, 128), backend="mirror")
                for _ in range(2)
            )

        def forward(self, x: Any, gate: Any) -> Any:
            y = self.a(x) @ self.a.weight.T
            return self.b(y, residual=x, gate=gate) + self.b(x, activation="gelu")

    model = Gated().requires_grad_(False)
    x, gate = torch.randn(3, 128), torch.randn(3, 128)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x, gate), model(x, gate))
    named = [str(node.target) for node in traced.graph.nodes]
    assert named.count("cupyattn.int8_linear.default") == 2
    assert named.count("cupyattn.int8_layer.default") == 1
    other = torch.randn(7, 128)
    assert torch.equal(traced(other, other), model(other, other))


def test_calls_are_operators_of_a_trace() -> None:
    """Other calls leave ``torch.jit.trace`` with memory that nothing wrote."""
    layer = interop.Int8Linear.from_linear(linear(dtype="float16"), backend="mirror")
    layer.requires_grad_(False)
    q, x = torch.randn(1, 2, 8, 16).half(), torch.randn(3, 300, dtype=torch.float16)
    attend = interop.Attention(causal=True, backend="mirror")
    for module, given in ((layer, (x,)), (attend, (q, q, q))):
        other = tuple(-one for one in given)
        assert torch.equal(torch.jit.trace(module, given)(*other), module(*other))


def test_constructors_have_one_signature() -> None:
    """The layers of CuPy, torch and JAX agree, except for the types of each library."""
    others = [ca.Int8Linear]
    if importlib.util.find_spec("jax") is not None:
        others.append(importlib.import_module("cupyattn.interop.jax").Int8Linear)
    for other in others:
        for name in ("__init__", "from_weight"):
            own, of_other = (
                inspect.signature(getattr(cls, name)).parameters.values()
                for cls in (interop.Int8Linear, other)
            )
            assert [(p.name, p.kind, p.default) for p in own] == [
                (p.name, p.kind, p.default) for p in of_other
            ]
        call = inspect.signature(other.__call__).parameters
        mine = inspect.signature(interop.Int8Linear.forward).parameters
        assert {"x", "residual", "gate"} <= call.keys() & mine.keys()


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_adds_to_a_residual(compiled: bool, gated: bool, strategy: str) -> None:
    """It equals a call of `cupyattn.Int8Linear`, bit for bit."""
    weight, bias = (torch.randn(*s, dtype=torch.float16) for s in ((200, 300), (200,)))
    options = {"strategy": strategy, "activation": "silu", "backend": "mirror"}
    layer = interop.Int8Linear.from_weight(weight, bias, **options)
    own = ca.Int8Linear.from_weight(weight.numpy(), bias.numpy(), **options)
    x, residual = (torch.randn(2, 3, n, dtype=torch.float16) for n in (300, 200))
    gate = torch.randn(2, 200, dtype=torch.float16) if gated else None
    torch._dynamo.reset()
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    y = call(x, residual=residual, gate=gate)
    beside = {"residual": residual.numpy(), "gate": None if gate is None else gate.numpy()}
    assert y.numpy().tobytes() == own(x.numpy(), **beside).tobytes()
    assert torch.equal(residual, torch.from_numpy(beside["residual"]))


def test_what_a_call_beside_a_residual_refuses() -> None:
    layer = interop.Int8Linear.from_linear(linear(), backend="mirror")
    layer.requires_grad_(False)
    x, residual = (torch.randn(3, n, dtype=torch.bfloat16) for n in (300, 200))
    with pytest.raises(ValueError, match="gate goes with residual, got residual=None"):
        layer(x, gate=residual[0])
    with pytest.raises(ValueError, match=r"residual .*\(3, 200\), got \(3, 199\)"):
        layer(x, residual=residual[:, 1:])
    both = {"x": x.expand(2, 3, 300), "residual": residual.expand(2, 3, 200)}
    with pytest.raises(ValueError, match=r"got \(1, 3, 200\) for rows \(2, 3\): expand it"):
        layer(**both, gate=residual[None])  # which would be of groups of two rows
    assert layer(**both, gate=residual.expand(2, 3, 200)).shape == (2, 3, 200)
    said = "the derivative for 'cupyattn::int8_layer' is not implemented beside residual: leave"
    for name in ("x", "residual"):
        given = {"x": x.clone(), "residual": residual.clone()}
        given[name].requires_grad_()
        with pytest.raises(UnsupportedError, match=said):
            layer(**given)
        with torch.no_grad():
            assert torch.equal(layer(**given), layer(x, residual=residual))
    with pytest.raises(UnsupportedError, match=said):
        torch.func.grad(lambda x: layer(x, residual=residual).sum())(x)


def test_the_layer_moves_converts_and_saves() -> None:
    layer = interop.Int8Linear.from_linear(linear(), backend="mirror")
    scale = layer.weight_scale.clone()
    x = torch.randn(3, 300)
    assert layer.half().weight_scale.dtype == torch.float32 and layer.bias.dtype == torch.float16
    assert torch.equal(layer.weight_scale, scale) and layer.weight_codes.dtype == torch.int8
    assert set(layer.state_dict()) == {"weight_codes", "weight_scale", "bias"}
    other = interop.Int8Linear.from_linear(linear(), backend="mirror").half()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and "in_features=300" in repr(layer)


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"strict": False, "assign": True}])
def test_loading_refuses_what_are_no_codes_of_the_layer(options: dict[str, bool]) -> None:
    """Before anything is copied: a float weight would be cut to whole numbers in silence."""
    made = interop.Int8Linear.from_linear
    module = nn.Sequential(made(linear(), backend="mirror"))
    codes = module.state_dict()
    other = nn.Sequential(made(linear(), backend="mirror")).state_dict()
    by_channel = nn.Sequential(made(linear(), strategy="channel", backend="mirror")).state_dict()
    without = {name: x for name, x in other.items() if name != "0.weight_scale"}
    own = other["0.weight_codes"]
    cases: list[tuple[dict[str, Any], str]] = [
        (nn.Sequential(linear()).state_dict(),
         r"0\.weight must be INT8 codes of shape \(200, 300\), got torch\.bfloat16 of shape "
         r"\(200, 300\): load weights that are no codes before replace_linear_with_int8, or after "
         r"restore\(\)$"),
        ({**other, "0.weight_codes": own.int()}, r"codes of .* got torch\.int32"),
        ({**other, "0.weight_codes": own[:128]},
         r"0\.weight_codes must have shape \(200, 300\), .* got \(128, 300\): load it into a "),
        (by_channel, r"0\.weight_scale must have shape \(2, 3\), .* strategy='block', got "
         r"\(200, 1\)"),
        (without, "0.weight_codes needs 0.weight_scale beside it: load both, or neither"),
        ({"0.weight_scale": other["0.weight_scale"]}, "0.weight_scale needs 0.weight_codes beside"),
    ]  # fmt: skip
    before = {name: x.clone() for name, x in codes.items()}
    for state, said in cases:
        with pytest.raises(RuntimeError, match=said):
            module.load_state_dict(state, **options)
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    module.load_state_dict(other, **options)
    assert all(torch.equal(x, other[name]) for name, x in module.state_dict().items())
    if options:
        module.load_state_dict({"0.bias": before["0.bias"]}, **options)
        assert torch.equal(module[0].weight_codes, other["0.weight_codes"])


@pytest.mark.parametrize("assign", [False, True])
def test_codes_are_loaded_under_their_former_name(assign: bool) -> None:
    """Files of compressed-tensors and earlier state dicts have this name."""
    made = interop.Int8Linear.from_linear
    module, other = (nn.Sequential(made(linear(), backend="mirror")) for _ in range(2))
    state = other.state_dict()
    former = {name.replace("weight_codes", "weight"): x for name, x in state.items()}
    assert set(former) == {"0.weight", "0.weight_scale", "0.bias"}
    module.load_state_dict(former, assign=assign)
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())


def test_what_the_layer_refuses() -> None:
    layer = interop.Int8Linear.from_linear(linear(), backend="mirror")
    codes, scale = layer.weight_codes, layer.weight_scale
    cases: list[tuple[type[Exception], str, Any]] = [
        (RuntimeError, r"expected an input of shape \(..., 300\), got \(3, 301\)",
         lambda: layer(torch.ones(3, 301))),
        (RuntimeError, "x is on meta, weight is on cpu",
         lambda: layer(torch.ones(3, 300, device="meta"))),
        (TypeError, "float64", lambda: layer(torch.ones(3, 300).double())),
        (TypeError, r"codes must be int8 with two axes or more and scales float32, got float32",
         lambda: interop.Int8Linear(codes.float(), scale)),
        (ValueError, r"in blocks of 128 must have shape \(2, 3\), got \(2, 2\)",
         lambda: interop.Int8Linear(codes, scale[:, :2])),
        (ValueError, r"bias must have shape \(200,\)",
         lambda: interop.Int8Linear(codes, scale, torch.ones(3))),
        (ValueError, "activation", lambda: interop.Int8Linear(codes, scale, activation="relu")),
        (TypeError, "^bias must be a tensor, got 3$", lambda: interop.Int8Linear(codes, scale, 3)),
        (UnsupportedError, r"got block_size=64", lambda: interop.Int8Linear(
            codes, scale, block_size=64)),
        (UnsupportedError, r"outlier_columns are not supported in a module, got \[3\]: leave them",
         lambda: interop.Int8Linear.from_linear(linear(), outlier_columns=[3])),
        (ValueError, "outlier_dtype goes with outlier_columns, got 'float16': leave it out",
         lambda: interop.Int8Linear.from_weight(torch.ones(8, 8), outlier_dtype="float16")),
        (TypeError, r"weight must be a tensor, got an array of shape \(8, 8\)",
         lambda: interop.Int8Linear.from_weight(torch.ones(8, 8).numpy())),
        (ValueError, r"weight must have two axes, \(out, in\), got shape \(8,\)",
         lambda: interop.Int8Linear.from_weight(torch.ones(8))),
        (UnsupportedError, r"outlier_columns are not supported in a module, got \[3\]: leave them",
         lambda: interop.Int8Linear(codes, scale, outlier_columns=[3],
                                    outlier_weight=torch.zeros(200, 1).half())),
    ]  # fmt: skip
    for error, message, function in cases:
        with pytest.raises(error, match=message), torch.no_grad():
            function()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_tensors_at_odd_addresses_give_the_same_bits(dtype: str, backend: str) -> None:
    layer = interop.Int8Linear.from_linear(linear(200, 5, dtype), backend=backend)
    moved = interop.Int8Linear(
        layer.weight_codes, at_odd_address(layer.weight_scale), at_odd_address(layer.bias.detach()),
        backend=backend,
    )  # fmt: skip
    x = torch.randn(3, 200).to(getattr(torch, dtype))
    assert torch.equal(moved(at_odd_address(x)), layer(x))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_scales_are_of_any_float_type(kind: str) -> None:
    """Other libraries' files have them; this holds for arrays and JAX, too."""
    weight = torch.randn(200, 300)
    made = interop.Int8Linear.from_weight(weight, strategy="channel")
    codes, scales = made.weight_codes, made.weight_scale.to(getattr(torch, kind))
    layer = interop.Int8Linear(codes, scales, backend="mirror")
    wide = interop.Int8Linear(codes, scales.float(), backend="mirror")
    assert layer.weight_scale.dtype == torch.float32
    assert layer.weight.dtype == (torch.float32 if kind == "float64" else scales.dtype)
    x = torch.randn(3, 300)
    assert torch.equal(layer(x), wide(x))
    core = ca.Int8Linear(codes, scales, backend="mirror")
    assert core.scales.dtype.name == "float32" and torch.equal(core(x), wide(x))
    of_arrays = ca.Int8Linear(bridge.as_array(codes), bridge.as_array(scales), backend="mirror")
    assert same_bits(wide(x), of_arrays(x.numpy()))
    for cls in (interop.Int8Linear, ca.Int8Linear):
        with pytest.raises(TypeError, match="and scales float32, got int8 .* and int32"):
            cls(codes, scales.int())


def test_a_layer_names_what_it_is() -> None:
    said = (
        "Int8Linear(in_features=300, out_features=200, bias=True, strategy='block', "
        "weight_dtype=torch.bfloat16, backend='mirror')"
    )
    layer = interop.Int8Linear.from_linear(linear(), backend="mirror")
    assert repr(layer) == said and repr(layer.half()) == said.replace("bfloat", "float")


def test_functions_that_only_read_take_parameters() -> None:
    module, x = linear(), torch.randn(3, 300, dtype=torch.bfloat16)
    weight, bias = module.weight, module.bias
    codes, scales = ca.weight_quant(weight)
    assert all(map(torch.equal, (codes, scales), ca.weight_quant(weight.detach())))
    layer = ca.Int8Linear.from_weight(weight, bias)
    assert torch.equal(layer(x), ca.Int8Linear(codes, scales, bias)(x))
    assert torch.equal(layer(x), interop.Int8Linear.from_linear(module, backend="mirror")(x))
    int8 = interop.Int8Linear(codes, scales, bias).weight
    again = ca.weight_quant(int8)
    assert all(map(torch.equal, again, ca.weight_quant(int8.clone())))
    assert ca.quant.outlier_columns(x.requires_grad_(), 0.0) == [*range(300)]
    with pytest.raises(TypeError, match="x requires a gradient"):
        layer(x)


@pytest.mark.parametrize("trained", [False, True])
def test_a_bias_without_numbers_is_refused(trained: bool) -> None:
    """As after a state dict that lacked it, assigned to a model on the meta device."""
    layer = interop.Int8Linear.from_weight(torch.randn(8, 16), torch.zeros(8), backend="mirror")
    layer.bias = torch.nn.Parameter(layer.bias.to("meta"), requires_grad=trained)
    with pytest.raises(RuntimeError, match="on the meta device|at least two devices, cpu and meta"):
        layer(torch.randn(3, 16))
    with pytest.raises(RuntimeError, match="at least two devices, cpu and meta: tensors on meta"):
        interop.norm_quant(torch.randn(3, 16), norm="rms", weight=torch.ones(16, device="meta"))
    if not trained:
        with pytest.raises(RuntimeError, match=r"a tensor of shape .* is on the meta device"):
            layer.to("meta")(torch.randn(3, 16, device="meta"))


def test_factors_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match="smooth must be a tensor, got an array of shape"):
        interop.Int8Linear.from_weight(
            torch.randn(8, 16), strategy="channel", smooth=np.ones(16, np.float32)
        )
