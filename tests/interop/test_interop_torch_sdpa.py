"""`scaled_dot_product_attention` held against torch's own: masks, views, layouts, broadcasting."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from tests.interop.torch_cases import array, compiled, tensor

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bias_of = importlib.import_module("torch.nn.attention.bias")

own = interop.scaled_dot_product_attention
torchs = torch.nn.functional.scaled_dot_product_attention
ALIGN = {"causal_upper_left": "top-left", "causal_lower_right": "bottom-right"}


def normal(*shape: int, seed: int = 0, dtype: str = "float16") -> Any:
    rng = np.random.default_rng([seed, *shape])
    return tensor(rng.standard_normal(shape).astype(np.float32)).to(getattr(torch, dtype))


def problem(**options: Any) -> tuple[Any, Any, Any]:
    return (
        normal(2, 4, 5, 16, **options), normal(2, 4, 9, 16, seed=1, **options),
        normal(2, 4, 9, 16, seed=2, **options),
    )  # fmt: skip


def causal_bias(name: str, *lengths: int) -> Any:
    with warnings.catch_warnings():  # torch's, of rows that attend to nothing
        warnings.simplefilter("ignore")
        return getattr(bias_of, name)(*lengths)


def assert_within_bounds(o: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Hold an output to torch's in float64: same shape, each element within its own bound."""
    wide = {n: x.double() if n == "attn_mask" and x.is_floating_point() else x
            for n, x in options.items()}  # fmt: skip
    exact = torchs(q.double(), k.double(), v.double(), **wide)
    assert o.shape == exact.shape and o.dtype == q.dtype
    leading = torch.broadcast_shapes(*[x.shape[:-2] for x in (q, k, v)])
    four = [
        x.expand(*leading, *x.shape[-2:]).reshape(1, -1, *x.shape[-2:]).contiguous()
        for x in (q, k, v)
    ]
    mask = torch.ones(exact.shape[-2], k.shape[-2], dtype=torch.bool)
    if options.get("is_causal"):
        mask = mask.tril()
    if "attn_mask" in options:
        mask = options["attn_mask"] & mask
    mask = mask.expand(*leading, *mask.shape[-2:]).reshape(1, -1, *mask.shape[-2:])
    scale = options.get("scale")
    if scale is not None and scale < 0:  # the bound is of magnitudes
        four[0], scale = -four[0], -scale
    bound = ca.bounds.attention(
        *map(array, four), variant="fa_tc", mask=array(mask), scale=scale
    )  # fmt: skip
    error = (o.double() - exact).abs().numpy().reshape(bound.total.shape)
    assert (error <= bound.total).all()


# ---- masks that are objects ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALIGN)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7)])
def test_causal_masks_of_torch_are_causal(name: str, lengths: tuple[int, int]) -> None:
    len_q, len_kv = lengths
    q, k, v = normal(2, 4, len_q, 16), *(normal(2, 4, len_kv, 16, seed=s) for s in (1, 2))
    mask = causal_bias(name, len_q, len_kv)
    o = own(q, k, v, mask)
    assert_within_bounds(o, q, k, v, attn_mask=mask._materialize())
    assert torch.equal(o, interop.attention(q, k, v, causal=True, causal_align=ALIGN[name]))
    grouped = own(q, k[:, :2], v[:, :2], mask, enable_gqa=True)
    expected = interop.attention(q, k[:, :2], v[:, :2], causal=True, causal_align=ALIGN[name])
    assert torch.equal(grouped, expected)
    assert torch.equal(own(q[0], k[0], v[0], mask), o[0])
    for argument in ("mask", "bias"):
        assert torch.equal(interop.attention(q, k, v, **{argument: mask}), o)
        assert torch.equal(interop.Attention()(q, k, v, **{argument: mask}), o)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(interop.attention(*turned, bias=mask, layout="BSHD").transpose(1, 2), o)


@pytest.mark.parametrize("name", ALIGN)
def test_causal_masks_of_torch_in_a_graph(name: str) -> None:
    q, k, v = problem()
    mask = causal_bias(name, 5, 9)
    assert torch.equal(compiled(own)(q, k, v, mask), own(q, k, v, mask))


def test_causal_masks_of_torch_are_refused_where_they_mean_nothing() -> None:
    q, k, v = problem()
    mask = causal_bias("causal_lower_right", 5, 9)
    for function in (own, torchs):
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            function(q, k, v, mask, is_causal=True)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        interop.attention(q, k, v, bias=mask, causal=True)
    message = r"bias must be causal_lower_right\(5, 9\), .* got causal_lower_right\(4, 9\)"
    with pytest.raises(RuntimeError, match=message):
        own(q, k, v, causal_bias("causal_lower_right", 4, 9))
    counts = torch.tensor([3, 5])
    with pytest.raises(ValueError, match="beside lengths_kv: give causal=True and causal_align="):
        interop.attention(q, k, v, bias=mask, lengths_kv=counts)
    rows, ends = q[0].transpose(0, 1), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="beside cu_seqlens_q: give causal=True"):
        interop.attention_varlen(rows, rows, rows, ends, ends, mask=mask)
    layer = interop.Int8Attention(num_heads=4, head_dim=16, num_timesteps=10)
    with pytest.raises(TypeError, match="mask is a CausalBias, which is taken by attention"):
        layer(q, k, v, 3, mask=mask)


class Unknown(torch.Tensor):
    """A tensor whose class might make anything of an operator."""


def test_masks_of_unknown_classes_are_refused() -> None:
    q, k, v = problem()
    mask = torch.ones(5, 9, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"attn_mask must be a torch.Tensor, got its subclass "
                       r".*Unknown.*: if it is one, give attn_mask.as_subclass\(torch.Tensor\)"):
        own(q, k, v, mask.as_subclass(Unknown))
    for argument, given in (("mask", mask), ("bias", torch.zeros(5, 9))):
        for function in (interop.attention, interop.Attention()):
            with pytest.raises(TypeError, match=f"{argument} must be a torch.Tensor, got its sub"):
                function(q, k, v, **{argument: given.as_subclass(Unknown)})
    parameter = torch.nn.Parameter(torch.zeros(5, 9), requires_grad=False)
    assert torch.equal(own(q, k, v, parameter), own(q, k, v, torch.zeros(5, 9)))


# ---- views that negate ---------------------------------------------------------------------------


@pytest.mark.parametrize("negated", ["q", "k", "v", "bias"])
def test_views_that_negate_are_the_numbers_that_they_show(negated: str) -> None:
    given = dict(zip("qkv", problem(), strict=True)) | {"bias": normal(5, 9)}
    seen = given | {negated: torch._neg_view(given[negated])}
    expected = interop.attention(**given | {negated: -given[negated]})
    assert torch.equal(interop.attention(**seen), expected)
    operands = [seen[n] for n in ("q", "k", "v", "bias")]
    assert torch.equal(own(*operands), expected)
    for backend in ("eager", "aot_eager"):
        assert torch.equal(compiled(own, backend)(*operands), expected)


def test_gradients_and_parts_of_conjugates_that_negate() -> None:
    rng = np.random.default_rng(3)
    numbers = torch.from_numpy(rng.standard_normal((2, 4, 5, 16)) + 1j).to(torch.complex64)
    q = numbers.conj().imag
    for x in (numbers, numbers.conj()):
        with pytest.raises(TypeError, match="of one type, float16, bfloat16 or float32, got q.dty"):
            own(x, x, x)
    with pytest.raises(RuntimeError, match="out must not be a view that negates"):
        interop.attention(*problem(), out=torch._neg_view(normal(2, 4, 5, 16)))
    _, k, v = problem(dtype="float32")
    assert q.is_neg() and torch.equal(own(q, k, v), own(-numbers.imag, k, v))
    found = []
    for d_out in (torch._neg_view(normal(2, 4, 5, 16, seed=5)), -normal(2, 4, 5, 16, seed=5)):
        leaves = [x.requires_grad_() for x in problem()]
        own(*leaves).backward(d_out)
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    o, _ = torch.ops.cupyattn.attention_qkv(q, k, v, None, 0, False, "")
    assert torch.equal(o, own(q, k, v))
    steps = interop.Int8Attention(num_heads=4, head_dim=16, num_timesteps=10)
    found, _ = steps(q, k, v, 3, return_mask=True)
    assert torch.equal(found, steps(q.resolve_neg(), k, v, 3))
    layer = interop.Int8Linear(*map(tensor, ca.weight_quant(array(normal(32, 16)))))
    x = torch._neg_view(normal(5, 16))
    assert torch.equal(layer(x), layer(x.resolve_neg()))


# ---- layouts -------------------------------------------------------------------------------------

#: Ways in which (2, 4, 5, 16) lies in memory.
LAYOUTS = {
    "contiguous": lambda: normal(2, 4, 5, 16),
    "heads after length": lambda: normal(2, 5, 4, 16).transpose(1, 2),
    "length first": lambda: normal(5, 2, 4, 16).permute(1, 2, 0, 3),
    "part of qkv": lambda: normal(2, 5, 3, 4, 16)[:, :, 1].transpose(1, 2),
    "every other row": lambda: normal(2, 4, 10, 16)[:, :, ::2],
    "one head for all": lambda: normal(2, 1, 5, 16).expand(2, 4, 5, 16),
    "one batch entry": lambda: normal(1, 5, 4, 16).transpose(1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_an_output_is_laid_out_as_torch_lays_it_out(name: str, grad: bool) -> None:
    q = LAYOUTS[name]().requires_grad_(grad)
    k, v = normal(q.shape[0], 4, 9, 16, seed=1), normal(q.shape[0], 4, 9, 16, seed=2)
    o = own(q, k, v)
    assert o.stride() == torchs(q, k, v).stride() == torch.empty_like(q).stride()
    assert torch.equal(o, own(q.contiguous(), k, v))
    if grad:
        o.sum().backward()
        assert q.grad.shape == q.shape


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_output_in_a_graph_is_laid_out_as_without_one(name: str) -> None:
    q = LAYOUTS[name]()
    k, v = normal(q.shape[0], 4, 9, 16, seed=1), normal(q.shape[0], 4, 9, 16, seed=2)
    operator = torch.ops.cupyattn.attention_qkv
    rest = None, 0, True, ""
    torch.library.opcheck(operator.default, (q, k, v, *rest), test_utils="test_faketensor")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = operator(*map(mode.from_tensor, (q, k, v)), *rest)
    assert fake[0].stride() == torch.empty_like(q).stride()

    def layer(q: Any, k: Any, v: Any) -> Any:
        o = own(q, k, v)
        return o, o.transpose(1, 2).reshape(*o.shape[::2], -1)

    found = compiled(layer)(q, k, v)
    for x, y in zip(found, layer(q, k, v), strict=True):
        assert x.stride() == y.stride() and torch.equal(x, y)


def flat(q: Any, k: Any, v: Any, heads: int = 4) -> Any:
    """Attention as models write it: rows, heads by a view, and a view of what comes back."""
    batch, length, width = q.shape
    q, k, v = (x.view(batch, -1, heads, width // heads).transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return o.transpose(1, 2).view(batch, length, width)


def test_code_that_views_the_output_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(2, n, 64, seed=n) for n in (5, 9, 9))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
    o = flat(q, k, v)
    assert o.shape == (2, 5, 64) and o.is_contiguous()
    assert torch.equal(compiled(flat)(q, k, v), o)


@pytest.mark.slow  # compiles C++
def test_code_that_views_the_output_runs_under_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(2, n, 64, seed=n) for n in (5, 9, 9))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
    assert torch.equal(compiled(flat, "inductor")(q, k, v), flat(q, k, v))


def test_other_numbers_of_axes_are_contiguous_as_in_torch() -> None:
    turned = normal(5, 4, 16).transpose(0, 1), normal(2, 2, 5, 4, 16).transpose(2, 3)
    for q, k in zip(turned, (normal(4, 9, 16), normal(2, 2, 4, 9, 16)), strict=True):
        assert own(q, k, k).stride() == torchs(q, k, k).stride()


@pytest.mark.parametrize("turned", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_last_axis_that_is_not_contiguous_is_copied(turned: str, grad: bool) -> None:
    given = dict(zip("qkv", problem(), strict=True))
    seen = given | {n: given[n].mT.contiguous().mT for n in turned}
    given, seen = (
        {n: x.detach().requires_grad_(grad) for n, x in some.items()} for some in (given, seen)
    )
    assert all(seen[n].stride(-1) != 1 for n in turned)
    expected = own(*given.values())
    for function in (own, interop.attention, interop.Attention()):
        o = function(*seen.values())
        assert torch.equal(o, expected)
        assert o.stride() == torchs(*seen.values()).stride()
    found = compiled(own)(*seen.values())
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    if grad:
        o.sum().backward()
        expected.sum().backward()
        assert all(torch.equal(seen[n].grad, given[n].grad) for n in "qkv")


# ---- what torch computes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 4), (2, 4), (2, 4)), ((2, 1), (2, 4), (2, 4)), ((), (2, 4), (2, 4)),
        ((4,), (2, 4), (2, 4)), ((2, 4), (4,), (4,)), ((2, 4), (2, 4), (4,)),
        ((1, 1), (1, 4), (2, 1)), ((4,), (3, 2, 4), (3, 2, 4)), ((3, 1, 4), (2, 4), (2, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_all_operands_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (
        normal(*leading, n, 16, seed=i)
        for i, (leading, n) in enumerate(zip(shapes, (5, 9, 9), strict=True))
    )
    assert_within_bounds(own(q, k, v), q, k, v)
    leading = torch.broadcast_shapes(*shapes)
    mask = normal(*leading[-1:], 5, 9, seed=4) > -0.5
    assert_within_bounds(own(q, k, v, mask), q, k, v, attn_mask=mask)
    assert torch.equal(compiled(own)(q, k, v), own(q, k, v))


def test_batches_broadcast_where_heads_are_grouped() -> None:
    q, k, v = normal(1, 4, 5, 16), normal(2, 2, 9, 16), normal(2, 2, 9, 16, seed=2)
    o = own(q, k, v, enable_gqa=True)
    assert o.shape == torchs(q, k, v, enable_gqa=True).shape
    assert torch.equal(o, interop.attention(q.expand(2, 4, 5, 16), k, v))
    with pytest.raises(RuntimeError, match=r"but got shapes \(3, 4, 5, 16\), \(2, 4, 9, 16\)"):
        own(normal(3, 4, 5, 16), normal(2, 4, 9, 16), normal(2, 4, 9, 16))


@pytest.mark.parametrize("scale", [-0.3, -1])
def test_a_negative_scale(scale: float) -> None:
    q, k, v = (x.requires_grad_() for x in problem())
    o = own(q, k, v, scale=scale)
    assert_within_bounds(o.detach(), *(x.detach() for x in (q, k, v)), scale=scale)
    assert torch.equal(o, own(-q, k, v, scale=-scale))
    assert torch.equal(compiled(own)(q, k, v, scale=scale), o)
    (gradient,) = torch.autograd.grad(o.sum(), q)
    (negated,) = torch.autograd.grad(own(-q, k, v, scale=-scale).sum(), q)
    assert torch.equal(gradient, negated)
    for other in (0.0, -0.0, float("nan"), -float("inf")):
        with pytest.raises(ValueError, match=f"be a finite number other than 0, got {other}: leav"):
            own(q, k, v, scale=other)


@pytest.mark.parametrize("axes", [3, 4, 5])
def test_a_mask_beside_is_causal(axes: int) -> None:
    """Torch has both on a CPU, for four axes; the same holds for others here."""
    leading = (2, 3, 4)[5 - axes :]
    q, k, v = (normal(*leading, n, 16, seed=n) for n in (6, 9, 9))
    mask = normal(6, 9, seed=7) > -0.5
    o = own(q, k, v, mask, is_causal=True)
    if axes == 4:
        assert_within_bounds(o, q, k, v, attn_mask=mask, is_causal=True)
    assert torch.equal(o, own(q, k, v, is_causal=True, mask=mask))
    both = mask & torch.ones(6, 9, dtype=torch.bool).tril()
    assert (o.double() - own(q, k, v, both).double()).abs().max() <= 2.0**-9


def test_nested_tensors_are_refused_by_one_sentence() -> None:
    with warnings.catch_warnings():  # of torch's, that they are a prototype
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([normal(4, 5, 16), normal(4, 7, 16)])
        jagged = torch.nested.nested_tensor([normal(5, 64), normal(7, 64)], layout=torch.jagged)
    for x in (strided, jagged):
        with pytest.raises(NotImplementedError, match="expected query to be a strided tensor, got "
                           "a nested one: give its rows .* to attention_varlen, or pad them"):
            own(x, x, x)
        with pytest.raises(NotImplementedError, match="expected q to be a strided tensor, got a "):
            interop.attention(x, x, x)


def test_a_mask_of_16_bits_has_the_type_of_the_query() -> None:
    q, k, v = problem()
    for dtype in (torch.float16, torch.float32, torch.bool):
        mask = torch.ones(5, 9, dtype=dtype)
        assert own(q, k, v, mask).shape == q.shape
    wrong = torch.ones(5, 9, dtype=torch.bfloat16)
    for function in (own, torchs):
        with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float or to "
                           "match query dtype"):
            function(q, k, v, wrong)
    with pytest.raises(RuntimeError, match=r"give attn_mask.to\(query.dtype\)"):
        own(q.float(), k.float(), v.float(), wrong.half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = q.float(), k.float(), v.float()
        for mask in (wrong, wrong.half()):
            assert own(*wide, mask).dtype == torchs(*wide, mask).dtype == torch.bfloat16
