"""Attention on torch's tensors: the same memory, the same bits, gradients, refusals.

On CPU tensors, where the mirror or the interpreter runs; tests/gpu/test_interop_torch.py has what a
device adds.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn as ca
from cupyattn import BlockMask, QuantConfig, UnsupportedError
from cupyattn.gradients import judge_backward
from cupyattn.ops import operation
from tests.interop.torch_cases import (
    array,
    at_odd_address,
    leaves,
    options_of,
    problem,
    same_bits,
    tensor,
    tensors,
    through_the_forward_pass,
)

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
backward = importlib.import_module("cupyattn.ops.backward")

DTYPES = ("float16", "bfloat16", "float32")
OPTIONS = options_of(33, 70, 16, 4)
#: What the backward pass is defined for, with what torch's own attention has too.
DIFFERENTIABLE = {
    "plain": {}, "top-left": {"causal": True, "causal_align": "top-left", "scale": 0.3},
}  # fmt: skip


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_tensors_at_odd_addresses_give_the_same_bits(dtype: str, backend: str) -> None:
    given = [tensor(x) for x in problem(dtype, len_q=5, len_kv=9)[:3]]
    expected = interop.attention(*given, backend=backend)
    moved = [at_odd_address(x) for x in given]
    assert torch.equal(interop.attention(*moved, backend=backend), expected)
    if dtype == "float32":
        return
    gradients = []
    for some in (given, moved):
        wanted = [x.detach().requires_grad_() for x in some]
        interop.attention(*wanted, backend=backend).sum().backward()
        gradients.append([x.grad for x in wanted])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tensors_at_odd_addresses_come_in_by_dlpack(dtype: str) -> None:
    """torch.frombuffer with an odd offset: the capsule's address or its byte_offset is odd."""
    given = [tensor(x) for x in problem(dtype, len_q=5, len_kv=9)[:3]]
    moved = [at_odd_address(x) for x in given]
    before = [x.clone() for x in moved]
    o = ca.attention(*moved)
    assert isinstance(o, torch.Tensor) and torch.equal(o, ca.attention(*given))
    assert all(torch.equal(a, b) for a, b in zip(before, moved, strict=True))


def test_an_out_at_an_odd_address_is_refused() -> None:
    given = [tensor(x) for x in problem("float16", len_q=5, len_kv=9)[:3]]
    out = at_odd_address(torch.empty_like(given[0]))
    with pytest.raises(ValueError, match="out must have its elements at multiples of their 2"):
        interop.attention(*given, out=out, backend="mirror")


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "int32", "int64"])
def test_a_tensor_and_its_array_are_one_memory(dtype: str) -> None:
    whole = torch.zeros(3, 8, 5, dtype=getattr(torch, dtype))
    for x in (whole, whole[1:, ::2], whole.transpose(0, 2), whole[:0], whole[1, 2, 3]):
        a = bridge.as_array(x)
        assert a.shape == tuple(x.shape) and a.dtype.name == dtype
        if x.numel():
            assert a.ctypes.data == x.data_ptr()
            assert [s // a.itemsize for s in a.strides] == list(x.stride())
        back = bridge.as_tensor(a)
        assert back.dtype == x.dtype and back.shape == x.shape
        assert not x.numel() or back.data_ptr() == x.data_ptr()
    bridge.as_array(whole)[2, 7, 4] = 1
    assert whole[2, 7, 4] == 1


def test_importing_the_library_imports_no_torch() -> None:
    script = (
        "import sys, cupyattn, cupyattn.ops.attention, cupyattn.diffusion, cupyattn.checkpoints, "
        "cupyattn.interop; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# ---- the same bits as arrays ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_tensors_get_what_arrays_get(dtype: str, name: str) -> None:
    inputs, options = problem(dtype), OPTIONS[name]
    expected, expected_lse = ca.attention(*inputs, return_lse=True, **options)
    given = [tensor(x) for x in inputs]
    o, lse = interop.attention(*given, return_lse=True, backend="mirror", **tensors(options))
    assert same_bits(o, expected) and same_bits(lse, expected_lse)
    assert o.is_contiguous() and not o.requires_grad
    assert all(same_bits(x, y) for x, y in zip(given, inputs, strict=True)), "an input has changed"


@pytest.mark.parametrize("variant", ["unfused", "fa", "fa_warps", "fa_tc", "fa_int8"])
def test_every_rung_in_either_layout_and_into_out(variant: str) -> None:
    inputs = problem("bfloat16")
    expected = ca.attention(*inputs, variant=variant, causal=True)
    options: dict[str, Any] = {"variant": variant, "causal": True, "backend": "mirror"}
    q, k, v = (tensor(x) for x in inputs)
    out = torch.full_like(q, float("nan"))
    assert interop.attention(q, k, v, out=out, **options) is out and same_bits(out, expected)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    o = interop.attention(*turned, layout="BSHD", **options)
    assert o.is_contiguous() and same_bits(o, np.ascontiguousarray(expected.swapaxes(1, 2)))
    strided = [x.transpose(1, 2) for x in turned]
    assert same_bits(interop.attention(*strided, **options), expected)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        interop.attention(q, k, v, out=q, **options)


def test_int8_and_block_masks() -> None:
    inputs = problem("float16", len_q=130, len_kv=200)
    given = [tensor(x) for x in inputs]
    quant, near = QuantConfig(pv="int8"), BlockMask.from_window(130, 200, (64, 0))
    expected = ca.attention(*inputs, variant="fa_int8", quant=quant, block_mask=near)
    o = interop.int8_attention(*given, quant=quant, block_mask=near, backend="mirror")
    assert same_bits(o, expected)
    scales = np.full((1, 1, 1), 0.03, np.float32)
    quant = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(scales, 0.05))
    expected = ca.attention(*inputs, variant="fa_int8", quant=quant)
    assert same_bits(interop.int8_attention(*given, quant=quant), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_sequences(dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((50, 2, 16)).astype(
        array(torch.zeros(1, dtype=getattr(torch, dtype))).dtype
    )
    ends = np.array([0, 20, 20, 50], np.int32)
    for variant in ("fa_tc", "fa_int8"):
        options: dict[str, Any] = {"variant": variant, "causal": True, "return_lse": True}
        expected = ca.attention_varlen(x, x, x, ends, ends, **options)
        for offsets in (torch.from_numpy(ends), torch.from_numpy(ends).long()):
            found = interop.attention_varlen(*[tensor(x)] * 3, offsets, offsets, **options)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        interop.attention_varlen(*[tensor(x)] * 3, torch.from_numpy(ends), None)


def test_the_interpreter_runs_the_kernels_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = problem("float16", heads=2, heads_kv=1, len_q=5, len_kv=9)
    expected = ca.attention(*inputs, variant="fa_tc", backend="interpret")
    given = [tensor(x) for x in inputs]
    found = interop.attention(*given, variant="fa_tc", backend="interpret")
    assert same_bits(found, expected)
    asked: list[Any] = []
    run = operation.run_on_host
    monkeypatch.setattr(operation, "run_on_host", lambda *a: asked.append(a[1].backend) or run(*a))
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    assert same_bits(interop.attention(*given, variant="fa_tc"), expected)
    assert asked == ["interpret"]
    with pytest.raises(ValueError, match="backend='cuda' takes CuPy arrays"):
        interop.attention(*given, backend="cuda")


# ---- gradients -----------------------------------------------------------------------------------


def exact_gradients(
    d_out: np.ndarray, inputs: tuple[np.ndarray, ...], *, causal: bool = False, scale: Any = None,
    **_: Any,
) -> list[np.ndarray]:  # fmt: skip
    """Gradients that torch's own attention has in float64."""
    own = [tensor(x).double().requires_grad_() for x in inputs]
    o = torch.nn.functional.scaled_dot_product_attention(
        *own, is_causal=causal, scale=scale, enable_gqa=True
    )
    o.backward(tensor(d_out).double())
    return [x.grad.numpy() for x in own]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_within_bounds_of_torch_in_float64(
    dtype: str, name: str, deterministic: bool
) -> None:
    inputs, options = problem(dtype), DIFFERENTIABLE[name]
    q, k, v = leaves(*inputs)
    o, lse = interop.attention(
        q, k, v, return_lse=True, deterministic=deterministic, backend="mirror", **options
    )
    assert o.requires_grad and lse.requires_grad
    d_out = np.random.default_rng(1).standard_normal(o.shape).astype(inputs[0].dtype)
    o.backward(tensor(d_out))
    received = d_out, *inputs, array(o), array(lse)
    gradients = [array(x.grad) for x in (q, k, v)]
    report = judge_backward(gradients, *received, **options)
    assert report.passed, str(report)
    bound = through_the_forward_pass(*received, **options)
    exact = exact_gradients(d_out, inputs, **options)
    for found, expected, total in zip(gradients, exact, bound.values(), strict=True):
        error = abs(found.astype(np.float64) - expected)
        assert np.isfinite(total).all() and (error <= total).all()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "qk_norm"])
@pytest.mark.parametrize("variant", ["auto", "fa_int8"])
def test_gradients_are_those_of_the_backward_kernels(name: str, variant: str) -> None:
    """With every option, in either layout, and straight-through where the forward is in INT8."""
    inputs, options = problem("float16"), OPTIONS[name]
    o, lse = ca.attention(*inputs, variant=variant, return_lse=True, **options)
    d_out = np.random.default_rng(1).standard_normal(o.shape).astype(np.float16)
    expected = ca.attention_backward(d_out, *inputs, o, lse, **options)
    for layout in ("BHSD", "BSHD"):
        q, k, v = leaves(*inputs)
        given, g = [q, k, v], tensor(d_out)
        if layout == "BSHD":
            *given, g = (x.transpose(1, 2) for x in (*given, g))
        found = interop.attention(*given, variant=variant, layout=layout, **tensors(options))
        found.backward(g)
        grads = [x.grad for x in (q, k, v)]
        assert all(same_bits(x, y) for x, y in zip(grads, expected, strict=True)), layout


@pytest.mark.parametrize("of_o", [True, False])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_go_through_lse(of_o: bool, compiled: bool) -> None:
    """With the bits of the backward pass, also where O has no gradient."""
    inputs = problem("float16")
    o, lse = ca.attention(*inputs, causal=True, return_lse=True)
    d_lse = np.full(lse.shape, 0.75, np.float32)
    d_out = np.full(o.shape, 0.5 if of_o else 0, np.float16)
    expected = ca.attention_backward(d_out, *inputs, o, lse, d_lse=d_lse, causal=True)
    q, k, v = leaves(*inputs)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, lse = interop.attention(q, k, v, causal=True, return_lse=True)
        return lse.sum() * 0.75 + (o.sum(dtype=torch.float32) * 0.5 if of_o else 0)

    (torch.compile(loss, fullgraph=True) if compiled else loss)(q, k, v).backward()
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), expected, strict=True))


@pytest.mark.parametrize("shape", [(33, 70), (1, 4, 33, 70), (2, 1, 1, 70)], ids=str)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_bias_that_requires_a_gradient_gets_it(shape: tuple[int, ...], compiled: bool) -> None:
    """With the bits of the backward pass, of its own shape and type."""
    inputs = problem("float16")
    of_bias = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    o, lse = ca.attention(*inputs, bias=of_bias, return_lse=True)
    d_out = np.full_like(o, 0.5)
    expected = ca.attention_backward(d_out, *inputs, o, lse, bias=of_bias, grad_bias=True)
    q, k, v, bias = leaves(*inputs, of_bias)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        q, k, v, bias = x
        return interop.attention(q, k, v, bias=bias).sum(dtype=torch.float32) * 0.5

    (torch.compile(loss, fullgraph=True) if compiled else loss)(q, k, v, bias).backward()
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v, bias), expected, strict=True))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_of_a_norm_get_gradients(compiled: bool) -> None:
    """With the bits of the backward pass, also in transforms and for mapped entries."""
    inputs = problem("float16")
    of_norm = tuple(np.random.default_rng(3).standard_normal((2, 16)).astype(np.float32))
    o, lse = ca.attention(*inputs, qk_norm=of_norm, return_lse=True)
    expected = ca.attention_backward(np.full_like(o, 0.5), *inputs, o, lse, qk_norm=of_norm)
    q, k, v, *weights = leaves(*inputs, *of_norm)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        q, k, v, *weights = x
        return interop.attention(q, k, v, qk_norm=weights).sum(dtype=torch.float32) * 0.5

    every = q, k, v, *weights
    (torch.compile(loss, fullgraph=True) if compiled else loss)(*every).backward()
    assert all(same_bits(x.grad, y) for x, y in zip(every, expected, strict=True))
    free = [x.detach() for x in every]
    alone = torch.func.grad(loss, argnums=3)(*free)
    assert same_bits(alone, expected[3])
    two = torch.func.vmap(torch.func.grad(loss, argnums=(0, 4)), (0, *[None] * 4))
    found = two(torch.stack([free[0], free[0]]), *free[1:])
    for x, y in zip(found, (expected[0], expected[4]), strict=True):
        assert all(same_bits(entry, y) for entry in x)
    weights[0].grad = None
    interop.attention(*free[:3], qk_norm=(weights[0], free[4])).sum().mul(0.5).backward()
    assert weights[0].grad is not None


def test_norms_of_all_heads_run_and_refuse_gradients() -> None:
    inputs = problem("float16")
    q, k, v = leaves(*inputs)
    widths = (q.shape[1] * q.shape[3], k.shape[1] * k.shape[3])
    weights = [np.random.default_rng(3).uniform(0.5, 2, n).astype(np.float32) for n in widths]
    own = tuple(map(torch.from_numpy, weights))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return interop.attention(q, k, v, qk_norm=own)

    with torch.no_grad():
        found, two = attend(q), torch.func.vmap(attend)(torch.stack([q, q]))
    assert same_bits(found, ca.attention(*inputs, qk_norm=tuple(weights)))
    assert all(torch.equal(x, found) for x in two)
    with pytest.raises(ca.UnsupportedError, match="which normalise all heads of a token together"):
        attend(q)


def test_gradients_of_a_bias_alone_of_transforms_and_of_the_drop_in() -> None:
    inputs = problem("float16")
    q, k, v = map(tensor, inputs)

    def loss(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return interop.attention(q, k, v, bias=bias).sum(dtype=torch.float32)

    bias = torch.randn(33, 70, dtype=torch.float16, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(bias, q), bias)
    free = bias.detach()
    assert expected.dtype == torch.float16 and expected.any()
    assert torch.equal(torch.func.grad(loss)(free, q), expected)
    two = torch.func.vmap(torch.func.grad(loss), (None, 0))(free, torch.stack([q, q]))
    assert torch.equal(two, torch.stack([expected, expected]))
    found = interop.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    (by_drop_in,) = torch.autograd.grad(found.sum(dtype=torch.float32), bias)
    assert torch.equal(by_drop_in, expected)
    (first,) = torch.autograd.grad(loss(bias, q), bias, create_graph=True)
    with pytest.raises(UnsupportedError, match="attention_backward' is not implemented"):
        first.sum().backward()


def test_gradients_through_lse_of_transforms_and_of_packed_sequences() -> None:
    inputs = problem("float16")
    q, k, v = map(tensor, inputs)

    def loss(q: torch.Tensor) -> torch.Tensor:
        o, lse = interop.attention(q, k, v, return_lse=True)
        return lse.sum() + o.sum(dtype=torch.float32)

    (own,) = leaves(inputs[0])
    (expected,) = torch.autograd.grad(loss(own), own)
    assert torch.equal(torch.func.grad(loss)(q), expected)
    two = torch.func.vmap(torch.func.grad(loss))(torch.stack([q, q]))
    assert torch.equal(two, torch.stack([expected, expected]))

    x, ends = np.random.default_rng(2).standard_normal((50, 2, 16)), np.array([0, 20, 20, 50])
    x = x.astype(np.float16)
    o, lse = ca.attention_varlen(x, x, x, ends, ends, return_lse=True)
    d_lse = np.ones_like(lse)
    wanted = ca.attention_varlen_backward(0 * o, x, x, x, o, lse, ends, ends, d_lse=d_lse)
    q, k, v = leaves(x, x, x)
    offsets = torch.from_numpy(ends)
    interop.attention_varlen(q, k, v, offsets, offsets, return_lse=True)[1].sum().backward()
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), wanted, strict=True))


def test_gradients_of_packed_sequences_and_of_block_masks() -> None:
    rng = np.random.default_rng(2)
    x, ends = rng.standard_normal((50, 2, 16)).astype(np.float16), np.array([0, 20, 20, 50])
    o, lse = ca.attention_varlen(x, x, x, ends, ends, causal=True, return_lse=True)
    expected = ca.attention_varlen_backward(o, x, x, x, o, lse, ends, ends, causal=True)
    q, k, v = leaves(x, x, x)
    offsets = torch.from_numpy(ends)
    interop.attention_varlen(q, k, v, offsets, offsets, causal=True).backward(tensor(o))
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), expected, strict=True))

    q, k, v = inputs = problem("float16", len_q=130, len_kv=200)
    near = BlockMask.from_window(130, 200, (64, 0))
    o, lse = ca.attention(*inputs, block_mask=near, return_lse=True)
    expected = ca.attention_backward(o, *inputs, o, lse, block_mask=near)
    q, k, v = leaves(*inputs)
    found = interop.attention(q, k, v, block_mask=near)
    del near
    gc.collect(1)  # the graph keeps what it needs
    found.backward(tensor(o))
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), expected, strict=True))


def test_a_gradient_that_is_a_broadcast_view_and_one_operand_for_all_three() -> None:
    """What ``sum()`` hands back has stride 0, and gradients of one leaf add up."""
    inputs = problem("float16", heads=2, heads_kv=2, len_kv=33)
    x = tensor(inputs[0]).requires_grad_()
    interop.attention(x, x, x).sum().backward()
    q, k, v = leaves(*[inputs[0]] * 3)
    interop.attention(q, k, v).backward(torch.ones_like(q))
    # torch adds three numbers in float16, in an order of its own.
    total = sum(y.grad.double() for y in (q, k, v))
    size = sum(y.grad.double().abs() for y in (q, k, v))
    assert ((x.grad.double() - total).abs() <= 2 * 2.0**-11 * 1.001 * size + 2.0**-24).all()


@pytest.mark.parametrize(
    "sizes", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 1, 1)], ids=["batch", "q", "kv", "none"]
)
def test_tensors_of_nothing(sizes: tuple[int, int, int]) -> None:
    batch, len_q, len_kv = sizes
    q, k = (torch.ones(batch, 2, n, 16, dtype=torch.float16, requires_grad=True) for n in sizes[1:])
    o, lse = interop.attention(q, k, k, return_lse=True)
    assert o.shape == q.shape and lse.shape == (batch, 2, len_q)
    assert (o == (1 if len_kv else 0)).all() and (lse.isfinite() == bool(len_kv)).all()
    o.sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_torchs_switch_for_deterministic_algorithms_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, asked = problem("float16"), []
    resolve = backward.BACKWARD.resolve

    def heard(settings: Any, arrays: Any) -> Any:
        asked.append(settings.deterministic)
        return resolve(settings, arrays)

    monkeypatch.setattr(backward.BACKWARD, "resolve", heard)
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled)
        try:
            interop.attention(*leaves(*inputs)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    interop.attention(*leaves(*inputs), deterministic=True).sum().backward()
    assert asked == [None, True, True]


def test_checkpointing_and_no_grad() -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    inputs = problem("bfloat16")
    q, k, v = leaves(*inputs)
    checkpoint(
        lambda *x: interop.attention(*x, causal=True), q, k, v, use_reentrant=False
    ).sum().backward()
    again = leaves(*inputs)
    interop.attention(*again, causal=True).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip((q, k, v), again, strict=True))
    with torch.no_grad():
        assert not interop.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert same_bits(interop.attention(q, k, v), ca.attention(*inputs))


# ---- torch's own signature -----------------------------------------------------------------------


@pytest.mark.parametrize("axes", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "bias"])
def test_the_drop_in_is_within_bounds_of_torch(axes: int, name: str) -> None:
    rng = np.random.default_rng(axes)
    leading = (2, 2, 3)[: axes - 2] if axes != 3 else (3,)
    q, k, v = (tensor(rng.standard_normal((*leading, n, 16)).astype(np.float16)) for n in (6, 9, 9))
    options: dict[str, Any] = {"is_causal": True} if name == "causal" else {}
    if name == "mask":
        options["attn_mask"] = torch.from_numpy(rng.random((*leading, 6, 9)) < 0.6)
    if name == "bias":
        options["attn_mask"] = torch.from_numpy(rng.standard_normal((*leading[-1:], 6, 9)))
    wide = dict(options)
    if name == "bias":
        options["attn_mask"] = options["attn_mask"].half()
        wide["attn_mask"] = options["attn_mask"].double()
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), **wide
    )
    o = interop.scaled_dot_product_attention(q, k, v, **options)
    assert o.shape == exact.shape and o.dtype == torch.float16
    four = [x.reshape(-1, *x.shape[-3:]) if axes > 2 else x[None, None] for x in (q, k, v)]
    if axes == 3:
        four = [x[None] for x in (q, k, v)]
    added = {}
    if "attn_mask" in options:
        mask = options["attn_mask"].expand(*leading, 6, 9).reshape(*four[0].shape[:2], 6, 9)
        added[name] = array(mask)
    bound = ca.bounds.attention(
        *map(array, four), variant="fa_tc", causal=name == "causal", causal_align="top-left",
        **added,
    )  # fmt: skip
    error = (o.double() - exact).abs().numpy().reshape(bound.total.shape)
    assert (error <= bound.total).all()


def test_the_drop_in_broadcasts_and_groups_heads() -> None:
    q, k, v = (tensor(x) for x in problem("float16"))
    o = interop.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(o, interop.attention(q, k, v))
    assert torch.equal(
        interop.scaled_dot_product_attention(q, k[:1, :1], v[:1, :1]),
        interop.attention(q, *(x[:1, :1].expand(2, 4, -1, -1).contiguous() for x in (k, v))),
    )
    with pytest.raises(RuntimeError, match="enable_gqa=True"):
        interop.scaled_dot_product_attention(q, k, v)
    none = torch.zeros(33, 70, dtype=torch.bool)
    assert not interop.scaled_dot_product_attention(q, k, v, none, enable_gqa=True).any()


def test_the_drop_in_takes_the_place_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of torch's own, trained by both: gradients of its weights nearly agree."""
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 32, dtype=torch.bfloat16)
    grads = []
    functional = torch.nn.functional
    taken: list[str] = []

    def own(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        taken.append("cupyattn")
        return interop.scaled_dot_product_attention(*operands, **options)

    for function in (functional.scaled_dot_product_attention, own):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", function)
        layer.zero_grad()
        layer(x, x, x, need_weights=False)[0].square().sum().backward()
        grads.append(layer.in_proj_weight.grad.double())
    assert taken and (grads[0] - grads[1]).norm() <= 2.0**-5 * grads[0].norm()


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_bad_tensors_are_refused_in_torchs_words(grad: bool) -> None:
    q, k, v = (tensor(x).requires_grad_(grad) for x in problem("float16"))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RuntimeError, r"Expected all tensors to be on the same device, but q is on cpu, k is on "
         r"meta, v is on cpu", {"k": k.to("meta")}),
        (RuntimeError, "Expected all tensors to be on the same device, .* mask is on meta",
         {"mask": torch.ones(33, 70, dtype=torch.bool, device="meta")}),
        (NotImplementedError, "Could not run 'cupyattn::attention' with arguments from the 'meta' "
         "backend: .*; a meta tensor holds no numbers", {"q": q.to("meta")}),
        (RuntimeError, "Expected q, k and v to have the same dtype, but got q.dtype: torch.float16 "
         "and k.dtype: torch.bfloat16", {"k": k.bfloat16()}),
        (TypeError, r"attention\(\): argument 'k' must be Tensor, not ndarray", {"k": array(k)}),
        (TypeError, r"attention\(\): argument 'q' must be Tensor, not list", {"q": [1.0]}),
        (NotImplementedError, "expected v to be a strided tensor, got layout torch.sparse_coo",
         {"v": v.detach().to_sparse()}),
        (TypeError, "rope must be a pair of tensors or None, got Tensor", {"rope": q}),
        (ValueError, "k and v must agree on length", {"v": v[:, :, 1:]}),
        (ValueError, "the heads of k and v must divide", {"q": q[:, :3]}),
        (TypeError, "block_mask must be a cupyattn.BlockMask or None", {"block_mask": 3.5}),
        (ValueError, "backend must be 'cuda', 'mirror' or 'interpret'", {"backend": "cpu"}),
        (UnsupportedError, "pad the narrower of k and v", {"v": v[..., :8]}),
    ]  # fmt: skip
    for error, message, changed in cases:
        with pytest.raises(error, match=message):
            interop.attention(**{"q": q, "k": k, "v": v, **changed})
    with pytest.raises(TypeError, match="float64"):
        interop.attention(*(x.detach().double() for x in (q, k, v)))
    with pytest.raises(ValueError, match="q holds a NaN"):
        interop.attention(q * float("nan"), k, v, check_finite=True)


def test_what_has_no_derivative_says_so() -> None:
    q, k, v = leaves(*problem("float16"))
    bias = torch.zeros(33, 70)
    cos, sin = (tensor(x) for x in OPTIONS["rope"]["rope"])
    cases: list[tuple[str, dict[str, Any]]] = [
        (r"the derivative for 'rope_cos' is not implemented: give rope_cos.detach\(\)",
         {"rope": (cos.requires_grad_(), sin)}),
        ("not implemented for torch.float32: .* torch.autocast",
         dict(zip("qkv", (x.float() for x in (q, k, v)), strict=True))),
    ]  # fmt: skip
    for message, changed in cases:
        with pytest.raises(UnsupportedError, match=message):
            interop.attention(**{"q": q, "k": k, "v": v, **changed})
    with torch.no_grad():  # nothing is asked of them here
        assert interop.attention(q, k, v, bias=bias, rope=(cos, sin)).shape == q.shape
    with pytest.raises(RuntimeError, match="out=... arguments don't support automatic"):
        interop.attention(q, k, v, out=torch.empty_like(q))
    o = interop.attention(q, k, v)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="attention_qkv_backward' is not implemented"):
        dq.sum().backward()


def test_the_drop_in_refuses_what_torch_refuses_and_dropout() -> None:
    x = torch.ones(1, 2, 5, 16).half()
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.1 is not supported: give 0.0"):
        interop.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    mask = torch.ones(5, 5, dtype=torch.bool)
    for other, advice in ((mask.long(), "attn_mask != 0"), (mask.double(), r"attn_mask.float\(\)")):
        with pytest.raises(TypeError, match=f"got attn_mask.dtype={other.dtype}: give {advice}"):
            interop.scaled_dot_product_attention(x, x, x, other)
    with pytest.raises(RuntimeError, match="at least 2 dimensional, but got 1, 4 and 4"):
        interop.scaled_dot_product_attention(x[0, 0, 0], x, x)


def test_bfloat16_of_arrays_is_that_of_ml_dtypes() -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert array(x).dtype == ml_dtypes.bfloat16 and array(x).tolist() == [1.5, -2.0]
