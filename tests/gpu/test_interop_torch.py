"""Attention on torch's tensors on a device: its memory, its stream, its graphs.

tests/interop/test_interop_torch.py has the tests without a device.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import BlockMask, QuantConfig
from cupyattn.compiler import modules as compiler
from cupyattn.runtime import ready, recent
from tests.gpu.support import arch_of, moved
from tests.interop.torch_cases import options_of, problem, through_the_forward_pass
from tests.support.runs import RUNGS, asked_for, bits, normal

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch has no CUDA device", allow_module_level=True)
interop = importlib.import_module("cupyattn.interop.torch")
bridge = importlib.import_module("cupyattn.interop.torch.bridge")
calls = importlib.import_module("cupyattn.interop.torch.calls")
precompile = importlib.import_module("cupyattn.interop.torch.precompile")
schema = importlib.import_module("cupyattn.interop.torch.schema")

SHAPES = ((2, 4, 100, 64), (2, 2, 130, 64))
OPTIONS = options_of(33, 70, 16, 4)


def on_device(*arrays: np.ndarray, grad: bool = False) -> list[Any]:
    """Return tensors on torch's current device."""
    return [bridge.as_tensor(x.copy()).cuda().requires_grad_(grad) for x in arrays]


def tensors(options: dict[str, Any]) -> dict[str, Any]:
    found = dict(options)
    for name, x in options.items():
        if isinstance(x, np.ndarray):
            (found[name],) = on_device(x)
        elif name in ("rope", "qk_norm"):
            found[name] = tuple(on_device(*x))
    return found


def same_bits(x: Any, y: Any) -> bool:
    """Whether a tensor has the numbers of a CuPy array."""
    host = bridge.as_array(x.detach().cpu())
    return bool(host.shape == y.shape and host.dtype == y.dtype) and bits(host) == bits(y)


def of_rung(rung: str, **others: Any) -> dict[str, Any]:
    return {**asked_for(rung), "arch": arch_of(rung), **others}


# ---- the same bits as CuPy's arrays --------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_get_what_arrays_get_the_first_time_and_again(rung: str, dtype: str) -> None:
    for seed in range(3):  # the first call is planned, the others are found again
        inputs = normal(*SHAPES, dtype, seed)
        q, k, v = on_device(*inputs)
        options = of_rung(rung, causal=True, return_lse=True)
        expected = ca.attention(*map(cupy.asarray, inputs), **options)
        found = interop.attention(q, k, v, **options)
        assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))
        turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        o, _ = interop.attention(*turned, layout="BSHD", **options)
        assert o.is_contiguous() and same_bits(o.transpose(1, 2), expected[0])
        out = torch.full_like(q, float("nan"))
        assert interop.attention(q, k, v, out=out, **of_rung(rung, causal=True)) is out
        assert same_bits(out, expected[0])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("variant", ["fa", "fa_tc", "fa_int8"])
def test_every_option(name: str, variant: str) -> None:
    for _ in range(2):
        inputs, options = problem("float16"), OPTIONS[name]
        if name == "qk_norm":
            options = {**options, "qk_norm": tuple(map(cupy.asarray, options["qk_norm"]))}
            expected = ca.attention(*map(cupy.asarray, inputs), variant=variant, **options)
        else:
            expected = ca.attention(
                *map(cupy.asarray, inputs), variant=variant, **moved(dict(options))
            )
        found = interop.attention(*on_device(*inputs), variant=variant, **tensors(OPTIONS[name]))
        assert same_bits(found, expected)


def test_block_masks_packed_sequences_and_float32() -> None:
    inputs = normal((1, 2, 300, 64), (1, 2, 500, 64))
    for seed in range(3):  # masks of one form, one after the other
        blocks = np.random.default_rng(seed).random((1, 2, 5, 8)) < 0.6
        near = BlockMask(blocks, 64, 64)
        expected = ca.attention(*map(cupy.asarray, inputs), block_mask=near)
        assert same_bits(interop.attention(*on_device(*inputs), block_mask=near), expected)
    x, ends = normal((1, 50, 2, 64), (1, 50, 2, 64))[0][0], np.array([0, 20, 20, 50], np.int32)
    for limits in ({}, {"max_len_q": 30, "max_len_k": 30}):
        for offsets in (ends, np.array([0, 1, 30, 50], np.int32), ends.astype(np.int64)):
            given = cupy.asarray(offsets)
            expected = ca.attention_varlen(*[cupy.asarray(x)] * 3, given, given, **limits)
            (own,), (e,) = on_device(x), on_device(offsets)
            assert same_bits(interop.attention_varlen(own, own, own, e, e, **limits), expected)
    wide = normal((1, 2, 100, 64), (1, 2, 100, 64), "float32")
    for variant in ("fa", "fa_int8"):
        expected = ca.attention(*map(cupy.asarray, wide), variant=variant)
        for _ in range(2):  # fa_int8 converts V, torch the second time
            q, k, v = on_device(*wide)
            assert same_bits(interop.attention(q, k, v, variant=variant), expected)
            turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
            o = interop.attention(*turned, variant=variant, layout="BSHD")
            assert same_bits(o.transpose(1, 2), expected)


# ---- memory, streams, devices --------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["fa_tc", "fa_int8"])
def test_memory_is_torchs(rung: str) -> None:
    """Neither results nor scratch memory come from CuPy's pool, and scratch memory goes back."""
    q, k, v = on_device(*normal(*SHAPES))
    interop.attention(q, k, v, variant=rung)  # loads modules
    torch.cuda.synchronize()
    pool = cupy.get_default_memory_pool()
    in_pool, held = pool.total_bytes(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for options in ({}, {"return_lse": True}, {"causal": True}):  # planned, and found again
        for _ in range(2):
            interop.attention(q, k, v, variant=rung, **options)
    o = interop.attention(q, k, v, variant=rung)
    assert pool.total_bytes() == in_pool
    assert torch.cuda.memory_allocated() - held == o.untyped_storage().nbytes()
    if rung == "fa_int8":
        codes = q.numel() + k.numel()  # a byte each
        assert torch.cuda.max_memory_allocated() - held >= o.untyped_storage().nbytes() + codes
    a = bridge.as_array(o)
    assert a.data.ptr == o.data_ptr() and bridge.as_tensor(a).data_ptr() == o.data_ptr()


@pytest.mark.parametrize("rung", RUNGS)
def test_work_goes_to_torchs_stream(rung: str) -> None:
    """The inputs are made late, on that stream: run anywhere else, attention would see NaN."""
    sources = on_device(*normal(*SHAPES))
    expected = interop.attention(*sources, **of_rung(rung))
    inputs = [torch.full_like(x, float("nan")) for x in sources]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    recent.CALLS.clear()
    with torch.cuda.stream(stream):
        for _ in range(2):  # planned anew, then found again
            for x in inputs:
                x.fill_(float("nan"))
            torch.cuda._sleep(200_000_000)
            for x, source in zip(inputs, sources, strict=True):
                x.copy_(source)
            o = interop.attention(*inputs, **of_rung(rung))
            assert not stream.query(), "the call has waited for the stream"
            stream.synchronize()
            assert torch.equal(o, expected)


def test_a_thread_that_never_used_the_device() -> None:
    """A call that another thread has made is found again where nothing has run yet."""
    inputs = on_device(*normal(*SHAPES))
    expected = [interop.attention(*inputs, variant=variant) for variant in ("fa_tc", "fa_int8")]
    torch.cuda.synchronize()
    found: list[Any] = []

    def work() -> None:
        found.extend(interop.attention(*inputs, variant=v) for v in ("fa_tc", "fa_int8"))
        torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == 2 and all(map(torch.equal, found, expected))


def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    inputs = normal(*SHAPES)
    expected = ca.attention(*map(cupy.asarray, inputs), causal=True)
    q, k, v = (x.to("cuda:1") for x in on_device(*inputs))
    for _ in range(2):
        o = interop.attention(q, k, v, causal=True)
        assert o.device == q.device and torch.cuda.current_device() == 0
        assert same_bits(o, expected)
    with pytest.raises(RuntimeError, match="same device, but q is on cuda:1, k is on cuda:0"):
        interop.attention(q, k.to("cuda:0"), v)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_captures_a_call(rung: str) -> None:
    """The plain function and the operator; a replay reads what the tensors hold then."""
    inputs = on_device(*normal(*SHAPES))
    settings = calls.TensorSettings.of(**of_rung(rung, causal=True))
    ways: list[Callable[[], Any]] = [
        lambda: interop.attention(*inputs, **of_rung(rung, causal=True)),
        lambda: torch.ops.cupyattn.attention(
            *schema.ATTENTION.flat(dict(zip("qkv", inputs, strict=True)), settings)
        )[0],
    ]
    for way in ways:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            way()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = way()
        for seed in (1, 2):
            arrays = normal(*SHAPES, seed=seed)
            for x, y in zip(inputs, on_device(*arrays), strict=True):
                x.copy_(y)
            others = [torch.full((2**n,), 255, dtype=torch.uint8).cuda() for n in range(9, 22)]
            graph.replay()
            torch.cuda.synchronize()
            expected = ca.attention(*map(cupy.asarray, arrays), **of_rung(rung, causal=True))
            assert same_bits(o, expected) and all(bool((x == 255).all()) for x in others)


# ---- gradients and graphs of torch ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
def test_gradients(dtype: str, variant: str) -> None:
    inputs, arch = problem(dtype), arch_of("fa_tc")  # the bound is that of the portable form
    d_out = np.random.default_rng(1).standard_normal(inputs[0].shape).astype(inputs[0].dtype)
    q, k, v = on_device(*inputs, grad=True)
    o, lse = interop.attention(
        q, k, v, variant=variant, causal=True, return_lse=True, deterministic=True, arch=arch
    )
    o.backward(*on_device(d_out))
    received = [cupy.asarray(x) for x in (d_out, *inputs)]
    received += [cupy.from_dlpack(x.detach()) for x in (o, lse)]
    expected = ca.attention_backward(*received, causal=True, deterministic=True, arch=arch)
    assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), expected, strict=True))
    if variant == "fa_tc":
        own = [x.detach().double().requires_grad_() for x in (q, k, v)]
        mask = torch.ones(33, 70, dtype=torch.bool).tril(37).cuda()
        torch.nn.functional.scaled_dot_product_attention(
            *own, attn_mask=mask, enable_gqa=True
        ).backward(*(x.double() for x in on_device(d_out)))
        host = [bridge.as_array(x.detach().cpu()) for x in (o, lse)]
        bound = through_the_forward_pass(d_out, *inputs, *host, causal=True)
        for x, y, total in zip((q, k, v), own, bound.values(), strict=True):
            error = (x.grad.double() - y.grad).abs().cpu().numpy()
            assert (error <= total).all()


@pytest.mark.parametrize("added", ["", "block_mask", "packed"])
def test_gradients_that_come_again_are_launched_on_the_new_tensors(added: str) -> None:
    """The first pass is planned, the second found again, the third on another stream."""
    recent.CALLS.clear()
    for seed, stream in ((0, None), (1, None), (2, torch.cuda.Stream())):
        shape = (300, 2, 64) if added == "packed" else (1, 2, 300, 64)
        rng = np.random.default_rng(seed)
        arrays = rng.standard_normal((4, *shape)).astype(np.float16)
        (q, k, v), d_out = on_device(*arrays[:3], grad=True), on_device(arrays[3])[0]
        options: dict[str, Any] = {"deterministic": True}
        if added == "block_mask":
            options["block_mask"] = ca.BlockMask.from_window(300, 300, (64, 64))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            if added == "packed":
                ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
                limits = {"max_len_q": 200, "max_len_k": 200}
                o = interop.attention_varlen(q, k, v, ends, ends, **limits, **options)
            else:
                o = interop.attention(q, k, v, **options)
            found = torch.autograd.grad(o, (q, k, v), d_out)
        torch.cuda.synchronize()
        own = [cupy.asarray(x) for x in arrays]
        del options["deterministic"]
        if added == "packed":
            ends_ = cupy.asarray([0, 100, 300], dtype="int32")
            o_, lse = ca.attention_varlen(*own[:3], ends_, ends_, return_lse=True)
            expected = ca.attention_varlen_backward(
                own[3], *own[:3], o_, lse, ends_, ends_, deterministic=True
            )
        else:
            o_, lse = ca.attention(*own[:3], return_lse=True, **options)
            expected = ca.attention_backward(
                own[3], *own[:3], o_, lse, deterministic=True, **options
            )
        assert all(map(same_bits, found, expected))
    passes = [key for key in recent.CALLS._kept if key[1][0] == "attention_backward"]
    assert sum("torch" in str(forms) for *_, forms in passes) == 1


def test_operators_are_what_they_say() -> None:
    q, k, v = on_device(*problem("float16"), grad=True)
    settings = calls.TensorSettings.of(return_lse=True, deterministic=True, causal=True)
    given = {"q": q, "k": k, "v": v}
    for name, of in (("attention", schema.ATTENTION), ("attention_qkv", schema.ATTENTION_QKV)):
        torch.library.opcheck(getattr(torch.ops.cupyattn, name).default, of.flat(given, settings))
    layer = interop.Int8Attention(4, 16, num_timesteps=50)
    step = None, None, None, 3, None, False, True, layer._number
    torch.library.opcheck(
        torch.ops.cupyattn.int8_attention.default, (q, k, v, *step),
        test_utils=("test_schema", "test_faketensor"),  # dQ adds up in any order
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_function(mode: str) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return interop.attention(q * 2, k, v, causal=True, deterministic=True) + 1

    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, mode=mode)
    inputs = problem("bfloat16")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        q, k, v = on_device(*inputs, grad=True)
        o = function(q, k, v)
        o.sum().backward()
        own = on_device(*inputs, grad=True)
        expected = layer(*own)
        expected.sum().backward()
        assert torch.equal(o, expected)
        assert all(torch.equal(x.grad, y.grad) for x, y in zip((q, k, v), own, strict=True))


def test_the_drop_in_is_aligned_top_left() -> None:
    q, k, v = on_device(*problem("float16"))
    o = interop.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, arch=arch_of("fa_tc")
    )
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    bound = ca.bounds.attention(
        *problem("float16"), variant="fa_tc", causal=True, causal_align="top-left"
    )
    assert ((o.double() - exact).abs().cpu().numpy() <= bound.total).all()


# ---- modules -------------------------------------------------------------------------------------


def test_int8_attention_and_guidance() -> None:
    q, k, v = arrays = normal((1, 4, 100, 64), (1, 2, 200, 64))
    core = ca.Int8Attention(4, 64, num_timesteps=50)
    module = interop.Int8Attention(4, 64, num_timesteps=50)
    for step in (0, 25, 49):
        expected = core(*map(cupy.asarray, arrays), step)
        for _ in range(2):
            assert same_bits(module(*on_device(*arrays), step), expected)
    cond, uncond = module.fused_cfg(*on_device(q, -q, k, v), 3)
    expected = core.fused_cfg(*map(cupy.asarray, (q, -q, k, v)), 3)
    assert all(same_bits(x, y) for x, y in zip((cond, uncond), expected, strict=True))
    with pytest.raises(TypeError, match="got one on cuda:0"):
        module(*on_device(*arrays), torch.tensor(3).cuda())
    weights = np.random.default_rng(0).uniform(0.5, 2, (2, 64)).astype(np.float32)
    core = ca.Int8Attention(4, 64, num_timesteps=50, qk_norm=tuple(map(cupy.asarray, weights)))
    module = interop.Int8Attention(
        4, 64, num_timesteps=50, qk_norm=tuple(map(torch.from_numpy, weights))
    ).cuda()
    expected = core(*map(cupy.asarray, arrays), 3)
    assert same_bits(module(*on_device(*arrays), 3), expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_int8_layers(mode: str) -> None:
    """CUDA graphs take back what operators return: it has to be torch's own memory.

    The last layer's sum with x is part of its product.
    """
    torch.manual_seed(0)
    first, last = (torch.nn.Linear(256, 256, dtype=torch.float16).cuda() for _ in range(2))
    layers = [
        interop.Int8Linear.from_linear(layer).requires_grad_(False) for layer in (first, last)
    ]
    core = interop.Int8Attention(4, 64, num_timesteps=50)

    def attended(x: Any) -> Any:
        heads = layers[0](x * 2).unflatten(-1, (4, 64)).transpose(1, 2)
        return core(heads, heads, heads, 25).transpose(1, 2).flatten(2)

    def block(x: Any) -> Any:
        return layers[1](attended(x)) + x

    torch._dynamo.reset()
    function = torch.compile(block, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):  # warming up, recorded, replayed
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(1, 100, 256, dtype=torch.float16).cuda()
            assert same_bits(function(x), product_of(layers[1], attended(x), residual=x))
    x = torch.randn(1, 100, 256, dtype=torch.float16).cuda().requires_grad_()
    torch.compiler.cudagraph_mark_step_begin()
    function(x).sum().backward()
    assert x.grad.isfinite().all()


def product_of(layer: Any, x: Any, activation: str | None = None, **beside: Any) -> Any:
    """Return what a layer with an activation, a residual or a gate is, of arrays: CuPy's."""
    given = {"x": x, "weight": layer.weight_codes, "scale": layer.weight_scale, "bias": layer.bias}
    arrays = {
        name: cupy.from_dlpack(one.detach()) if isinstance(one, torch.Tensor) else one
        for name, one in {**given, **beside}.items()
    }
    torch.cuda.synchronize()
    codes, scales = ca.act_quant(arrays["x"], strategy=layer.strategy)
    y = ca.int8_gemm(
        codes, scales, arrays["weight"], arrays["scale"], arrays["x"].dtype.name,
        bias=arrays["bias"], activation=activation, residual=arrays.get("residual"),
        gate=arrays.get("gate"),
    )  # fmt: skip
    cupy.cuda.Device().synchronize()
    return y


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_a_call_adds_to_a_residual(strategy: str, rows: int) -> None:
    """To the bit `cupyattn.int8_gemm` with it, also when the call comes again."""
    torch.manual_seed(0)
    weight = torch.randn(384, 256, dtype=torch.bfloat16).cuda()
    layer = interop.Int8Linear.from_weight(weight, weight[:, 0].contiguous(), strategy=strategy)
    for _ in range(3):
        x, residual = (torch.randn(2, rows, n, dtype=torch.bfloat16).cuda() for n in (256, 384))
        for gate in (None, torch.randn(2, 384, dtype=torch.bfloat16).cuda()):
            y = layer(x, residual=residual, gate=gate)
            assert same_bits(y, product_of(layer, x, residual=residual, gate=gate))


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("kind", ["geglu", "swiglu", "gelu-approximate"])
def test_activations_of_diffusers_modules_are_part_of_the_product(
    kind: str, strategy: str, rows: int
) -> None:
    """To the bit `cupyattn.int8_gemm` with it, eager and compiled; halves end within a block."""
    attention = pytest.importorskip("diffusers.models.attention")
    torch.manual_seed(0)
    module = attention.FeedForward(256, inner_dim=712, activation_fn=kind)
    module = module.to(torch.bfloat16).cuda().requires_grad_(False)
    config = ca.Int8Config(strategy=strategy, min_elements_for_int8=0)
    interop.replace_linear_with_int8(module, config=config)
    unit, layer = module.net[0], module.net[2]
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warming up, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(1, rows, 256, dtype=torch.bfloat16).cuda()
        y = unit(x)
        assert y.shape == (1, rows, 712)
        assert same_bits(y, product_of(unit.proj, x, unit.activation))
        assert same_bits(module(x), product_of(layer, y))
        assert same_bits(compiled(x), product_of(layer, y))


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("gates", ["bfloat16", "float32"])
def test_what_follows_compiled_layers_is_part_of_their_products(
    gates: str, mode: str, strategy: str, rows: int
) -> None:
    """To the bit `cupyattn.int8_gemm` with it; gates are rows of a wider tensor. No waiting.

    Two of the layers have the same input: they are one call.
    """
    torch.manual_seed(0)
    up, down, other = (
        interop.Int8Linear.from_linear(
            torch.nn.Linear(*size, dtype=torch.bfloat16).cuda(), strategy=strategy
        ).requires_grad_(False)
        for size in ((256, 512), (512, 256), (256, 384))
    )

    def block(x: Any, modulation: Any) -> Any:
        gate = modulation.chunk(3, dim=-1)[1].unsqueeze(1)
        hidden = torch.nn.functional.gelu(up(x), approximate="tanh")
        return (x + gate * down(hidden)).type_as(x), other(x)

    torch._dynamo.reset()
    function = torch.compile(block, fullgraph=True, mode=mode)
    inputs = [torch.randn(2, rows, 256, dtype=torch.bfloat16).cuda() for _ in range(5)]
    factors = [torch.randn(2, 768, dtype=getattr(torch, gates)).cuda() for _ in range(5)]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for turn, (x, modulation) in enumerate(zip(inputs, factors, strict=True)):
            torch.compiler.cudagraph_mark_step_begin()
            torch.cuda.set_sync_debug_mode("error" if turn > 2 else "default")
            try:
                found, beside = (y.clone() for y in function(x, modulation))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            hidden = product_of(up, x, activation="gelu_tanh")
            gate = modulation[:, 256:512].contiguous()
            assert same_bits(found, product_of(down, hidden, residual=x, gate=gate))
            assert same_bits(beside, product_of(other, x))


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_what_a_compiled_layer_loads_was_begun(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Inductor's pass begins to compile the very modules of the call, for the same architecture."""
    begun: set[Any] = set()
    loaded: set[Any] = set()
    load, capability = compiler.load, int(cupy.cuda.Device().compute_capability)

    def noting(spec: Any, arch: str | None = None) -> Any:
        loaded.add((spec, compiler.architecture(spec, arch, capability)))
        return load(spec, arch)

    own = torch.nn.Linear(256, 640, dtype=torch.bfloat16).cuda()
    up, other = (
        interop.Int8Linear.from_linear(own, strategy=strategy).requires_grad_(False) for _ in "ab"
    )
    x, r = (torch.randn(2, 520, n, dtype=torch.bfloat16).cuda() for n in (256, 640))
    monkeypatch.setattr(precompile.ahead, "begin", begun.update)
    # Compiled by the call itself.
    monkeypatch.setattr(ready, "compile_side_by_side", lambda work, arch: None)
    monkeypatch.setattr(compiler, "load", noting)
    precompile._begin.cache_clear()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x, r: (r + up(x), torch.nn.functional.silu(other(x))))(x, r)
    assert loaded and loaded <= begun


def test_int8_forward_with_given_scales() -> None:
    """Scales that are copied beforehand are right every time, also where a call is known."""
    inputs = normal(*SHAPES)
    quant = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.03, 0.05))
    expected = ca.attention(*map(cupy.asarray, inputs), variant="fa_int8", quant=quant)
    for _ in range(3):
        assert same_bits(interop.int8_attention(*on_device(*inputs), quant=quant), expected)
    poisoned = [x.copy() for x in inputs]
    poisoned[0][0, 0, 0, 0] = np.nan  # writes NaN over the copy alone
    assert interop.int8_attention(*on_device(*poisoned), quant=quant).isnan().all()
    assert same_bits(interop.int8_attention(*on_device(*inputs), quant=quant), expected)


# ---- transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "window", "bias", "rope"])
def test_transforms_have_the_gradients_of_autograd(name: str) -> None:
    """`grad`, `vmap(grad)` and `jacrev` on the device;
    tests/interop/test_interop_torch_transforms.py."""
    options = tensors(options_of(9, 9, 16, 2)[name])
    several = torch.randn(3, 2, 2, 9, 16, device="cuda", dtype=torch.float16)

    def loss(x: Any) -> Any:
        own = interop.attention(x, x, 0.5 * x, deterministic=True, **options)
        return own.float().square().sum()

    expected = []
    for x in several:
        leaf = x.clone().requires_grad_()
        expected += torch.autograd.grad(loss(leaf), leaf)
    found = torch.func.vmap(torch.func.grad(loss))(several)
    for i, one in enumerate(expected):
        assert one.abs().sum() > 0 and torch.equal(torch.func.grad(loss)(several[i]), one)
        # A larger batch may split keys otherwise, and sum in another order.
        assert (found[i] - one).abs().max() <= 0.01 * one.abs().max()
    leaf = several[0].clone().requires_grad_()
    o = interop.attention(leaf, leaf, leaf, deterministic=True, **options)
    rows = torch.func.jacrev(
        lambda x: interop.attention(x, x, x, deterministic=True, **options)[0, 0, 0, :4]
    )(several[0])
    for i in range(4):
        (row,) = torch.autograd.grad(o[0, 0, 0, i], leaf, retain_graph=True)
        assert (rows[i] - row).abs().max() <= 0.01 * row.abs().max()


def test_a_mapped_layer_of_codes_is_that_of_its_rows() -> None:
    layer = interop.Int8Linear.from_linear(torch.nn.Linear(256, 40).half().cuda())
    x = torch.randn(3, 5, 256, device="cuda", dtype=torch.float16)
    y = torch.func.vmap(layer)(x)
    assert all(torch.equal(y[i], layer(x[i])) for i in range(3))
    loss = lambda x: layer(x).float().square().sum()  # noqa: E731
    leaf = x[1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(x[1]), expected)


def test_forward_mode_and_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 2, 9, 16, device="cuda", dtype=torch.float16)
    layer = interop.Int8Linear.from_linear(torch.nn.Linear(16, 16).half().cuda())
    ends = torch.tensor([0, 4, 9], device="cuda", dtype=torch.int32)
    for call in (
        lambda x: interop.attention(x, x, x), lambda x: interop.int8_attention(x, x, x),
        lambda x: interop.scaled_dot_product_attention(x, x, x), layer,
        lambda x: interop.attention_varlen(*[x[0].transpose(0, 1)] * 3, ends, ends),
    ):  # fmt: skip
        for refused in (
            lambda f=call: torch.func.jvp(f, (x,), (x,)), lambda f=call: torch.func.jacfwd(f)(x),
        ):  # fmt: skip
            with pytest.raises(ca.UnsupportedError, match="forward-mode derivatives"):
                refused()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            with pytest.raises(ca.UnsupportedError, match="forward-mode derivatives"):
                call(dual)
    inner = torch.func.grad(lambda x: interop.attention(x, x, x).float().sum())
    with pytest.raises(ca.UnsupportedError, match="attention has no second derivative"):
        torch.func.grad(lambda x: inner(x).float().sum())(x)
