"""The transforms of ``torch.func``: `grad`, `vjp`, `jacrev`, `vmap` and their nesting, and the
refusal of forward-mode and second derivatives.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, QuantConfig, UnsupportedError
from tests.interop.torch_cases import (
    array,
    options_of,
    problem,
    tensor,
    tensors,
    through_the_forward_pass,
)

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
linear_module = importlib.import_module("cupyattn.interop.torch.linear")
forward_ad = importlib.import_module("torch.autograd.forward_ad")
func = torch.func

ENDS = torch.tensor([0, 2, 2, 5])
OPTIONS = options_of(9, 9, 16, 2)
#: Unit roundoff of float32, and of float16.
F32, F16 = 2.0**-24, 2.0**-11


def heads(*leading: int, seed: int = 0) -> Any:
    """Return a float16 tensor of leading axes, two heads, nine tokens and 16 features."""
    rng = np.random.default_rng(seed)
    return tensor(rng.standard_normal((*leading, 2, 9, 16)).astype(np.float16))


def linear(**options: Any) -> Any:
    torch.manual_seed(0)
    return interop.Int8Linear.from_linear(torch.nn.Linear(256, 40), backend="mirror", **options)


WINDOW = interop.Attention(window=(3, 0))
LAYER = interop.Int8Attention(2, 16, num_timesteps=10, backend="mirror")
LINEAR = linear()
#: Every function that has a derivative, and an input of it.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "attention": (lambda x: interop.attention(x, x, 0.5 * x, causal=True), heads(2)),
    "attention_varlen": (
        lambda x: interop.attention_varlen(x, x, x, ENDS, ENDS), heads()[:, :5].swapaxes(0, 1)
    ),
    "int8_attention": (lambda x: interop.int8_attention(x, x, x), heads(2)),
    "scaled_dot_product_attention": (
        lambda x: interop.scaled_dot_product_attention(x, x, x, is_causal=True), heads()
    ),
    "Attention": (lambda x: WINDOW(x, x, x), heads(2)),
    "Int8Attention": (lambda x: LAYER(x, x, x, 3), heads(2)),
    "Int8Linear": (lambda x: LINEAR(x), torch.randn(3, 256)),
}  # fmt: skip
NAMES = tuple(FUNCTIONS)


def loss_of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: (function(x).float() ** 2).sum()


def by_autograd(function: Callable[[Any], Any], x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf)
    return found


# ---- first derivatives ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_transforms_give_the_gradient_of_autograd(name: str) -> None:
    function, x = FUNCTIONS[name]
    loss = loss_of(function)
    expected = by_autograd(loss, x)
    assert expected.abs().sum() > 0
    assert torch.equal(func.grad(loss)(x), expected)
    value, pull = func.vjp(loss, x)
    assert torch.equal(pull(torch.ones(()))[0], expected) and torch.equal(value, loss(x))
    assert torch.equal(func.grad_and_value(loss)(x)[0], expected)
    several = torch.stack([x, -x, 2 * x])
    mapped = func.vmap(func.grad(loss))(several)
    nested = func.vmap(func.vmap(func.grad(loss)))(several[None])[0]
    for i, y in enumerate(several):
        for one in (mapped[i], nested[i]):
            if name == "Int8Linear":  # torch's product with the weight sums in another order
                assert_close(one, by_autograd(loss, y))
            else:
                assert torch.equal(one, by_autograd(loss, y))


@pytest.mark.parametrize("name", NAMES)
def test_a_jacobian_has_the_rows_of_autograd(name: str) -> None:
    function, x = FUNCTIONS[name]
    x = x[..., :5, :] if x.ndim > 2 and name != "attention_varlen" else x
    jacobian = func.jacrev(function)(x)
    leaf = x.clone().requires_grad_()
    o = function(leaf)
    assert jacobian.shape == (*o.shape, *x.shape) and jacobian.abs().sum() > 0
    for i in (0, o.numel() // 2, o.numel() - 1):
        one = torch.zeros_like(o).flatten()
        one[i] = 1
        (row,) = torch.autograd.grad(o, leaf, one.view_as(o), retain_graph=True)
        assert torch.equal(jacobian.flatten(0, o.ndim - 1)[i], row)
    own = torch.autograd.functional.jacobian(function, x, vectorize=True)
    assert torch.equal(own, jacobian)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_mapped_function_are_the_sum_of_those_of_its_entries(name: str) -> None:
    """`vmap` within `grad`, where no entry says that it is differentiated."""
    function, x = FUNCTIONS[name]
    several = torch.stack([x, -x])
    expected = torch.stack([by_autograd(loss_of(function), y) for y in several])
    total = lambda y: func.vmap(loss_of(function))(y).sum()  # noqa: E731
    assert_close(func.grad(total)(several), expected)
    assert_close(by_autograd(total, several), expected)


def assert_close(found: Any, expected: Any) -> None:
    """Compare sums that differ in the order of their terms.

    Attention adds the float16 gradients of q, k and v, which rounds twice; a layer of codes sums 40
    products in float32. Terms are assumed to be at most 8 times as large as the largest sum.
    """
    roundings, unit = (2, F16) if expected.dtype == torch.float16 else (41, F32)
    size = 8 * expected.abs().max().double()
    assert ((found.double() - expected.double()).abs() <= 2 * roundings * unit * size).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_transforms_are_within_bounds_of_torch_in_float64(dtype: str, causal: bool) -> None:
    inputs = problem(dtype)
    options = {"causal": True, "causal_align": "top-left"} if causal else {}
    q, k, v = map(tensor, inputs)
    function = lambda *x: interop.attention(*x, return_lse=True, **options)  # noqa: E731
    (o, lse), pull = func.vjp(function, q, k, v)
    d_out = np.random.default_rng(1).standard_normal(o.shape).astype(inputs[0].dtype)
    found = pull((tensor(d_out), torch.zeros_like(lse)))
    per_entry = func.vmap(
        lambda d, *x: func.vjp(lambda *y: interop.attention(*y, **options), *x)[1](d)
    )(tensor(d_out)[:, None], *(x[:, None] for x in (q, k, v)))

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=causal, enable_gqa=True
    )
    exact.backward(tensor(d_out).double())
    bound = through_the_forward_pass(d_out, *inputs, array(o), array(lse), **options)
    for g, each, x, total in zip(found, per_entry, wide, bound.values(), strict=True):
        assert np.isfinite(total).all()
        for one in (g, each[:, 0]):
            assert (abs(one.double() - x.grad).numpy() <= total).all()


def test_the_layer_of_codes_is_within_bounds_of_float64() -> None:
    layer = linear()
    w = linear_module.dequantised(layer.weight_codes, layer.weight_scale, torch.float32).double()
    x, d_y = torch.randn(3, 256), torch.randn(3, 40).double()
    loss = lambda x: (layer(x) * d_y.float()).sum()  # noqa: E731
    exact, size = d_y.float().double() @ w, d_y.abs() @ w.abs()
    assert ((func.grad(loss)(x).double() - exact).abs() <= 42 * F32 * size).all()
    # |layer(x)|^2 has the second derivative 2 W^T W, whatever x is: quantising is the identity.
    square = lambda x: (layer(x) ** 2).sum()  # noqa: E731
    second = func.grad(lambda x: func.grad(square)(x)[0])(x[0])
    twice, size = 2 * w.T @ w[:, 0], 2 * w.abs().T @ w[:, 0].abs()
    assert ((second.double() - twice).abs() <= 90 * F32 * size).all()
    assert torch.equal(second, by_autograd_twice(square, x[0]))


def by_autograd_twice(function: Callable[[Any], Any], x: Any) -> Any:
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.flatten()[0], leaf)
    return second


def test_parameters_of_a_model_are_differentiated_for_each_sample() -> None:
    """`functional_call`, and gradients by sample of a bias beside codes and of attention."""

    class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96, dtype=torch.float16)
            out = torch.nn.Linear(32, 256, dtype=torch.float16)
            self.out = interop.Int8Linear.from_linear(out, backend="mirror")

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(1, 2, 0, 3)[:, None]
            return self.out(interop.attention(q, k, v)[0].transpose(0, 1).flatten(1))

    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 9, 32).half()
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters: Any, x: Any) -> Any:
        return func.functional_call(block, parameters, x).float().square().mean()

    each = func.vmap(func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert set(each) == {"qkv.weight", "qkv.bias", "out.bias"}
    for i, sample in enumerate(x):
        block.zero_grad()
        block(sample).float().square().mean().backward()
        for name, parameter in block.named_parameters():
            expected = parameter.grad.double()
            error = (each[name][i].double() - expected).abs().max()
            # Sums of float16 products in another order: a few roundings of 2^-11 each.
            assert expected.abs().max() > 0 and error <= 0.01 * expected.abs().max()


def test_a_layer_of_one_row_has_a_gradient_of_the_bias() -> None:
    layer = linear()
    d_y = torch.randn(40)
    layer(torch.randn(256)).backward(d_y)
    assert torch.equal(layer.bias.grad, d_y)


# ---- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "top-left"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_a_mapped_axis_joins_the_batch(name: str, layout: str) -> None:
    """Each entry has the bits of a call of its own, with gradients of its own."""
    options = tensors(OPTIONS[name])
    given = [heads(3, 2, seed=i) for i in range(3)]
    if layout == "BSHD":
        given = [x.transpose(2, 3) for x in given]
    call = lambda q, k, v: interop.attention(  # noqa: E731
        q, k, v, layout=layout, return_lse=True, **options
    )
    o, lse = func.vmap(call, in_dims=(0, None, 1))(given[0], given[1][0], given[2].movedim(0, 1))
    assert o.shape == given[0].shape and lse.shape == (3, 2, 2, 9)
    for i in range(3):
        one, its_lse = call(given[0][i], given[1][0], given[2][i])
        assert torch.equal(o[i], one) and torch.equal(lse[i], its_lse)
    if name == "qk_norm":
        return
    gradient = func.grad(lambda *x: call(*x)[0].float().square().sum(), argnums=(0, 1, 2))
    mapped = func.vmap(gradient, in_dims=(0, None, 0))(given[0], given[1][0], given[2])
    for i in range(3):
        expected = gradient(given[0][i], given[1][0], given[2][i])
        assert all(torch.equal(x[i], y) for x, y in zip(mapped, expected, strict=True))


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (1, 2, 9, 9), (2, 1, 9, 9), (2, 2, 1, 9)])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_mapped_mask_belongs_to_its_entry(shape: tuple[int, ...], mapped: bool) -> None:
    x = heads(3, 2)
    rng = np.random.default_rng(3)
    mask = torch.from_numpy(rng.random((*[3] * mapped, *shape)) < 0.6)
    bias = torch.from_numpy(rng.standard_normal(mask.shape).astype(np.float32))
    call = lambda x, m, b: interop.attention(x, x, x, mask=m, bias=b)  # noqa: E731
    own = 0 if mapped else None
    o = func.vmap(call, in_dims=(0, own, own))(x, mask, bias)
    for i in range(3):
        its = (mask[i], bias[i]) if mapped else (mask, bias)
        assert torch.equal(o[i], call(x[i], *its))


@pytest.mark.parametrize(
    "options",
    [
        {"quant": QuantConfig(granularity_q="tensor", granularity_k="tensor")},
        {"quant": QuantConfig(pv="int8", smooth_v=True)},
        {"block_mask": BlockMask.from_window(9, 9, (3, 0))},
    ],
)
def test_entries_keep_scales_and_block_masks_of_their_own(options: dict[str, Any]) -> None:
    x = heads(3, 2) * torch.tensor([1, 30, 0.01]).view(3, 1, 1, 1, 1).half()
    variant = "fa_int8" if "quant" in options else "fa_tc"
    call = lambda x: interop.attention(x, x, x, variant=variant, **options)  # noqa: E731
    assert all(torch.equal(a, call(b)) for a, b in zip(func.vmap(call)(x), x, strict=True))


def test_mapped_tables_offsets_weights_and_axes_that_were_contiguous() -> None:
    x = heads(3, 2)
    angles = torch.randn(3, 9, 8)
    turned = lambda x, a: interop.attention(x, x, x, rope=(a.cos(), a.sin()))  # noqa: E731
    found = func.vmap(turned)(x, angles)
    assert all(torch.equal(found[i], turned(x[i], angles[i])) for i in range(3))

    ends = torch.tensor([[0, 4, 9], [0, 0, 9], [0, 9, 9]], dtype=torch.int32)
    rows = x[:, 0].transpose(1, 2)
    call = lambda x, e: interop.attention_varlen(x, x, x, e, e)  # noqa: E731
    found = func.vmap(call)(rows, ends)
    assert all(torch.equal(found[i], call(rows[i], ends[i])) for i in range(3))

    plain = lambda x: interop.attention(x, x, x)  # noqa: E731
    last = x.movedim(0, -1).contiguous()
    assert torch.equal(func.vmap(plain, in_dims=-1)(last), func.vmap(plain)(x))
    layers = [linear(), linear()]
    weights = torch.stack([layers[0].weight_codes, layers[1].weight_codes.roll(1, 0)])
    operator = torch.ops.cupyattn.int8_linear
    y = torch.randn(2, 3, 256)
    own = layers[0].weight_scale, layers[0].bias.detach(), "gelu", None, "mirror"
    found = func.vmap(lambda y, w: operator(y, w, *own))(y, weights)
    assert all(torch.equal(found[i], operator(y[i], weights[i], *own)) for i in range(2))
    columns = func.vmap(LINEAR, in_dims=-1)(y[0].T.contiguous())
    assert torch.equal(columns, LINEAR(y[0]))


def test_a_mapped_axis_may_be_empty_where_it_joins_the_batch() -> None:
    x = heads(3, 2)[:0]
    assert func.vmap(lambda x: interop.attention(x, x, x))(x).shape == x.shape
    with pytest.raises(UnsupportedError, match="an axis of size 0 is not supported"):
        func.vmap(lambda x: LAYER(x, x, x, 3))(x)


def test_several_gradients_at_once() -> None:
    """``is_grads_batched``, which maps gradients without `torch.func`."""
    for name in ("attention", "Int8Linear"):
        function, x = FUNCTIONS[name]
        leaf = x.clone().requires_grad_()
        o = function(leaf)
        d = torch.randn(3, *o.shape).to(o.dtype)
        (found,) = torch.autograd.grad(o, leaf, d, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            (row,) = torch.autograd.grad(o, leaf, d[i], retain_graph=True)
            assert torch.equal(found[i], row)


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "Int8Attention", "Int8Linear"])
def test_compiled_transforms_are_one_graph(name: str) -> None:
    function, x = FUNCTIONS[name]
    loss, several = loss_of(function), torch.stack([x, -x])
    for transformed, given in (
        (func.grad(loss), x), (func.vmap(func.grad(loss)), several), (func.vmap(function), several),
    ):  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(given), transformed(given))


def test_traced_transforms_have_the_operators() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    function, x = FUNCTIONS["attention"]
    graph = make_fx(func.grad(loss_of(function)))(x)
    assert "cupyattn.attention_qkv_backward.default" in graph.code
    assert torch.equal(graph(x), func.grad(loss_of(function))(x))
    assert torch.equal(func.functionalize(function)(x), function(x))


# ---- what is refused -----------------------------------------------------------------------------

FORWARD = r"forward-mode derivatives of 'cupyattn::\w+' are not implemented .*: use reverse mode"


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused(name: str) -> None:
    function, x = FUNCTIONS[name]
    several = torch.stack([x, x])

    def jvp(function: Callable[[Any], Any], y: Any) -> Any:
        return func.jvp(function, (y,), (torch.ones_like(y),))

    def dual(function: Callable[[Any], Any], y: Any) -> Any:
        with forward_ad.dual_level():
            return function(forward_ad.make_dual(y, torch.ones_like(y)))

    loss = loss_of(function)
    with torch.no_grad():
        refused([lambda: jvp(function, x), lambda: dual(function, x)])
    refused([
        lambda: jvp(function, x), lambda: func.jacfwd(function)(x),
        lambda: jvp(func.vmap(function), several),
        lambda: func.vmap(lambda y: jvp(function, y))(several),
        lambda: func.hessian(loss)(x), lambda: func.linearize(function, x),
        lambda: jvp(func.grad(loss), x),
        lambda: dual(function, x), lambda: dual(function, x.clone().requires_grad_()),
        lambda: dual(func.vmap(function), several), lambda: dual(func.grad(loss), x),
        lambda: torch.autograd.functional.jacobian(
            function, x, vectorize=True, strategy="forward-mode"
        ),
    ])  # fmt: skip
    # Where the input has no tangent there is nothing to refuse.
    constant = function(x)
    _, tangent = jvp(lambda y: y + function(x), torch.zeros_like(constant))
    assert torch.equal(tangent, torch.ones_like(constant))
    with forward_ad.dual_level():
        assert torch.equal(function(x), constant)


def refused(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        with pytest.raises(UnsupportedError, match=FORWARD):
            call()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Int8Linear"])
def test_a_second_derivative_is_refused(name: str) -> None:
    function, x = FUNCTIONS[name]
    inner = func.grad(loss_of(function))
    said = r"_backward' is not implemented: attention has no second derivative here"
    with pytest.raises(UnsupportedError, match=said):
        func.grad(lambda x: inner(x).float().sum())(x)
    with pytest.raises(UnsupportedError, match=said):
        by_autograd_twice(loss_of(function), x)
    with pytest.raises(UnsupportedError, match=said):
        func.vmap(func.grad(lambda x: inner(x).float().sum()))(torch.stack([x, x]))
    assert not func.grad(lambda x: inner(x.detach()).float().sum() + x.sum())(x).ne(1).any()


def test_a_forward_mode_derivative_of_the_backward_pass_is_refused() -> None:
    function, x = FUNCTIONS["attention"]
    leaf = x.clone().requires_grad_()
    o = function(leaf)
    with forward_ad.dual_level():
        d_out = forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
        with pytest.raises(UnsupportedError, match=r"attention_qkv_backward' are not implemented"):
            torch.autograd.grad(o, leaf, d_out)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        (r"the derivative for 'rope_cos' is not implemented: give rope_cos.", {"rope": True}),
        ("is not implemented for torch.float32", {"dtype": "float32"}),
    ],
)
def test_gradients_that_autograd_refuses_are_refused_where_vmap_hides_them(
    said: str, options: dict[str, Any]
) -> None:
    x = heads(3, 2)
    x = x.float() if "dtype" in options else x
    table, weight = torch.ones(3, 9, 8), torch.ones(16)

    def total(x: Any, table: Any) -> Any:
        def one(x: Any, table: Any) -> Any:
            own = {"rope": (table, table)} if "rope" in options else {}
            own |= {"qk_norm": (weight, weight)} if "qk_norm" in options else {}
            return interop.attention(x, x, x, **own).float().sum()

        return func.vmap(one)(x, table).sum()

    gradient = func.grad(total, (0, 1))
    with pytest.raises(UnsupportedError, match=said):
        gradient(x, table)
    with pytest.raises(UnsupportedError, match=said):
        func.vmap(gradient)(x[None], table[None])
    assert total(x, table).isfinite()


def test_the_gradient_of_a_mapped_bias_is_that_of_each_entry() -> None:
    x, bias = heads(3, 2), torch.randn(3, 9, 9)

    def one(x: Any, bias: Any) -> Any:
        return interop.attention(x, x, x, bias=bias).float().sum()

    found = func.grad(lambda b: func.vmap(one)(x, b).sum())(bias)
    each = torch.stack([func.grad(one, 1)(x[i], bias[i]) for i in range(3)])
    torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)  # sums are in NumPy's order


def test_a_layer_refuses_a_gradient_through_its_norm_where_vmap_hides_it() -> None:
    weights = torch.ones(16), torch.ones(16)
    layer = interop.Int8Attention(2, 16, num_timesteps=10, backend="mirror", qk_norm=weights)
    x = heads(3, 2)
    call = lambda x: layer(x, x, x, 3)  # noqa: E731
    assert torch.equal(func.vmap(call)(x)[1], call(x[1]))
    with pytest.raises(UnsupportedError, match="through qk_norm of a layer is not implemented"):
        func.grad(lambda x: func.vmap(call)(x).float().sum())(x)


def test_an_activation_is_mapped_and_its_derivative_refused() -> None:
    layer, x = linear(activation="gelu").requires_grad_(False), torch.randn(2, 3, 256)
    assert torch.equal(func.vmap(layer)(x), layer(x))
    with pytest.raises(UnsupportedError, match="not implemented with activation='gelu'"):
        func.grad(lambda x: func.vmap(layer)(x).sum())(x)
