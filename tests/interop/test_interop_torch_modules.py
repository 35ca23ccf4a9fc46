"""Attention as modules of torch: the bits of arrays, trained, compiled, copied."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import BlockMask, QuantConfig, UnsupportedError
from tests.interop.torch_cases import compiled, same_bits
from tests.support.runs import normal

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
bridge, calls, schema = (
    importlib.import_module(f"cupyattn.interop.torch.{n}") for n in ("bridge", "calls", "schema")
)

STEPS = (0, 25, 49)  # aggressive, balanced, precision


def inputs(dtype: str = "float16", len_q: int = 40, len_kv: int = 70) -> list[np.ndarray]:
    return list(normal((1, 4, len_q, 16), (1, 2, len_kv, 16), dtype))


def tensors(arrays: list[np.ndarray], *, grad: bool = False) -> list[Any]:
    return [bridge.as_tensor(x.copy()).requires_grad_(grad) for x in arrays]


def rope_tables(length: int = 73) -> tuple[np.ndarray, np.ndarray]:
    angles = np.random.default_rng(3).uniform(0, 6, (length, 8))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def layer(**options: Any) -> Any:
    return interop.Int8Attention(4, 16, num_timesteps=50, backend="mirror", **options)


# ---- Attention -----------------------------------------------------------------------------------


def test_modules_of_equal_settings_share_their_calls() -> None:
    """Calls on a device are known by settings, and a model has a module for each layer."""
    quant = QuantConfig("tensor", "tensor", scales=(0.125, 0.5))
    one, same = (interop.Attention(causal=True, softcap=2.5, quant=quant) for _ in range(2))
    copied = copy.deepcopy(one)
    assert one.settings.of_call is same.settings.of_call is copied.settings.of_call
    assert interop.Attention(causal=False).settings.of_call is not one.settings.of_call


@pytest.mark.parametrize(
    "options", [{"scale": "1"}, {"scale": torch.ones(())}, {"softcap": -1}, {"window": {1, 2}}],
    ids=str,
)  # fmt: skip
def test_attention_refuses_numbers_when_it_is_made(options: Any) -> None:
    x = np.ones((1, 1, 4, 8), np.float16)
    with pytest.raises((TypeError, ValueError)) as alone:
        ca.attention(x, x, x, **options)
    with pytest.raises(alone.type) as made:
        interop.Attention(**options)
    assert str(made.value) == str(alone.value)


def test_attention_keeps_its_settings() -> None:
    arrays = inputs()
    q, k, v = tensors(arrays)
    module = interop.Attention(causal=True, variant="fa_int8", quant=QuantConfig(pv="int8"))
    options: dict[str, Any] = {"causal": True, "quant": QuantConfig(pv="int8")}
    assert same_bits(module(q, k, v), ca.attention(*arrays, variant="fa_int8", **options))
    cos, sin = rope_tables()
    mask = np.random.default_rng(0).random((40, 70)) < 0.5
    found = module(
        q, k, v, mask=torch.from_numpy(mask), rope=(torch.from_numpy(cos), torch.from_numpy(sin))
    )
    options |= {"mask": mask, "rope": (cos, sin)}
    assert same_bits(found, ca.attention(*arrays, variant="fa_int8", **options))
    assert not list(module.parameters()) and not module.state_dict()
    assert "causal=True" in repr(module) and "softcap" not in repr(module)
    with pytest.raises(TypeError, match="block_mask must be a cupyattn.BlockMask"):
        interop.Attention(block_mask="local")


def test_attention_takes_a_block_mask_into_a_graph_and_copies_it() -> None:
    near = BlockMask.from_window(130, 200, (64, 0))
    arrays = inputs(len_q=130, len_kv=200)
    expected = ca.attention(*arrays, block_mask=near)
    module = interop.Attention(block_mask=near, backend="mirror")
    twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    del near
    for one in (module, *twins):
        q, k, v = tensors(arrays, grad=True)
        o = compiled(one)(q, k, v)
        o.sum().backward()
        assert same_bits(o.detach(), expected) and q.grad.abs().sum() > 0
    assert twins[0].settings.block_mask is not module.settings.block_mask


# ---- Int8Attention -------------------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "local": ({"attention_type": "local", "window_size": 30}, {}),
    "sparse": ({"attention_type": "block_sparse", "window_size": 64}, {}),
    "masked": ({"scale": 0.2}, {"mask": np.random.default_rng(0).random((40, 70)) < 0.5}),
    "turned": ({}, {"rope": rope_tables(), "rope_interleaved": True}),
}


def given(call: dict[str, Any]) -> dict[str, Any]:
    found = dict(call)
    for name in ("mask", "rope"):
        x = found.get(name)
        if x is not None:
            found[name] = tuple(map(torch.from_numpy, x)) if name == "rope" else torch.from_numpy(x)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_int8_attention_is_that_of_arrays(name: str) -> None:
    options, call = CALLS[name]
    arrays, core = inputs(), ca.Int8Attention(4, 16, num_timesteps=50, **options)
    module = layer(**options)
    for step in STEPS:
        found = module(*tensors(arrays), step, **given(call))
        assert same_bits(found, core(*arrays, step, **call)) and not found.requires_grad
        assert module.mode(step) == core.mode(step)
    found = module(*tensors(arrays), sigma=1.5, **given(call))
    assert same_bits(found, core(*arrays, sigma=1.5, **call))
    assert same_bits(module(*tensors(arrays), torch.tensor(3), **given(call)),
                     core(*arrays, 3, **call))  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_straight_through(name: str) -> None:
    """They equal the backward kernels' gradients for the O and lse of the mode that ran."""
    options, call = CALLS[name]
    module, arrays = layer(**options), inputs()
    rng = np.random.default_rng(1)
    for step in STEPS:
        q, k, v = tensors(arrays, grad=True)
        o = module(q, k, v, step, **given(call))
        d_out = rng.standard_normal(o.shape).astype(np.float16)
        o.backward(bridge.as_tensor(d_out))
        _, lse = torch.ops.cupyattn.int8_attention(
            q, k, v, given(call).get("mask"), *given(call).get("rope", (None, None)), step, None,
            "rope" in call, True, module._number,
        )  # fmt: skip
        scores = {n: x for n, x in call.items() if n != "rope_interleaved"}
        if "rope" in call:
            scores["rope_interleaved"] = True
        if name == "local":
            scores["window"] = 15, 15
        if name == "sparse":
            scores["block_mask"] = BlockMask.from_window(40, 70, (32, 32))
        expected = ca.attention_backward(
            d_out, *arrays, bridge.as_array(o), bridge.as_array(lse), scale=options.get("scale"),
            **scores,
        )  # fmt: skip
        assert all(same_bits(x.grad, y) for x, y in zip((q, k, v), expected, strict=True))


def test_one_graph_serves_all_timesteps() -> None:
    module = layer()
    counter = importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend(
        "aot_eager"
    )
    function = compiled(lambda q, k, v, t: module(q, k, v, t) + 1, counter)
    q, k, v = tensors(inputs(), grad=True)
    for step in range(0, 50, 5):
        assert torch.equal(function(q, k, v, step), module(q, k, v, step) + 1)
    assert counter.frame_count <= 2  # the first, and one whose timestep is a symbol
    function(q, k, v, 7).sum().backward()
    assert q.grad.abs().sum() > 0


def test_the_operator_is_what_it_says() -> None:
    module = layer()
    q, k, v = tensors(inputs(), grad=True)
    operator = torch.ops.cupyattn.int8_attention.default
    torch.library.opcheck(
        operator, (q, k, v, None, None, None, 3, None, False, True, module._number)
    )
    with torch.no_grad():
        o, lse = operator(q, k, v, None, None, None, 3, None, False, True, module._number)
    backward = torch.ops.cupyattn.int8_attention_backward.default
    rest = (None, None, None, False, module._number)
    own = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(backward, (o, o, lse, None, *own, *rest))
    torch.library.opcheck(backward, (o, o, lse, lse, *own, *rest))


def test_a_graph_outlives_no_module() -> None:
    q, k, v = tensors(inputs())
    with pytest.raises(RuntimeError, match="the Int8Attention of this graph no longer exists"):
        torch.ops.cupyattn.int8_attention(q, k, v, None, None, None, 3, None, False, False, -1)
    with pytest.raises(RuntimeError, match="the block mask of this graph no longer exists"):
        torch.ops.cupyattn.attention(q, k, v, *[None] * 8, None, 0, False, "block_mask=-1")


def test_a_graph_finds_nothing_that_was_made_where_its_object_was() -> None:
    layers, masks = set(), set()
    for _ in range(20):  # at the address of the one before, as a rule
        layers.add(interop.Int8Attention(2, 16, num_timesteps=10)._number)
        masks.add(schema.number_of(BlockMask(np.ones((1, 1, 1, 1), bool), 64, 64)))
    assert len(layers) == len(masks) == 20



def test_pruning_guidance_and_projections() -> None:
    arrays = inputs()
    core = ca.Int8Attention(4, 16, num_timesteps=50, enable_pruning=True, pruning_ratio=0.5)
    pruning = layer(enable_pruning=True, pruning_ratio=0.5)
    o, kept = pruning(*tensors(arrays), 3, return_mask=True)
    expected, expected_kept = core(*arrays, 3, return_mask=True)
    assert same_bits(o, expected) and same_bits(kept, expected_kept)
    weight = torch.randn(64, 10).half()
    for projection in (torch.nn.Linear(64, 10).half(), weight, torch.nn.Parameter(weight)):
        module = layer(out_proj=projection)
        q, k, v = tensors(arrays, grad=True)
        plain = layer()(q, k, v, 3).transpose(1, 2).flatten(2)
        wanted = plain @ projection if isinstance(projection, torch.Tensor) else projection(plain)
        found = module(q, k, v, 3)
        assert torch.equal(found, wanted)
        found.sum().backward()
        trained = [x.grad is not None for x in module.parameters()]
        assert all(trained) and len(list(module.state_dict())) >= 1
    q, k, v = tensors(arrays)
    cond, uncond = module.fused_cfg(q, torch._neg_view(q), k, v, 3)
    assert torch.equal(cond, module(q, k, v, 3)) and torch.equal(uncond, module(-q, k, v, 3))


def test_normalisation_moves_and_copies_with_the_module() -> None:
    arrays = inputs("bfloat16")
    weights = [np.random.default_rng(i).uniform(0.5, 2, 16).astype(np.float32) for i in range(2)]
    core = ca.Int8Attention(4, 16, num_timesteps=50, qk_norm=tuple(weights))
    module = layer(qk_norm=tuple(map(torch.from_numpy, weights)))
    expected = core(*arrays, 3)
    for one in (
        module,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        module.to("cpu"),
    ):
        assert same_bits(one(*tensors(arrays), 3), expected)
    rounded = tuple(bridge.as_array(torch.from_numpy(w).bfloat16()) for w in weights)
    core = ca.Int8Attention(4, 16, num_timesteps=50, qk_norm=rounded)
    assert same_bits(module.bfloat16()(*tensors(arrays), 3), core(*arrays, 3))
    with pytest.raises(UnsupportedError, match="through qk_norm of a layer is not implemented"):
        module(*tensors(arrays, grad=True), 3)


def test_autocast_and_fallbacks() -> None:
    x = torch.randn(1, 4, 9, 16, requires_grad=True)
    module = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = module(x, x, x, 3)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert x.grad.dtype == torch.float32
    fused = QuantConfig(granularity_k="block", smooth_k=False, fused=True)
    module, y = layer(quant=fused), torch.randn(1, 4, 9, 16).half()
    core = ca.Int8Attention(4, 16, num_timesteps=50, quant=fused)
    module(y, y, y, 3)
    core(*[y.numpy()] * 3, 3)
    assert module.fallbacks == core.fallbacks


def test_what_is_refused() -> None:
    q, k, v = tensors(inputs(), grad=True)
    cases: list[tuple[type[Exception], str, Any]] = [
        (UnsupportedError, "token pruning has no derivative",
         lambda: layer(enable_pruning=True)(q, k, v, 3)),
        (UnsupportedError, "return_mask: not supported where torch traces or differentiates",
         lambda: layer()(q, k, v, 3, return_mask=True)),
        (UnsupportedError, "mode: not supported where",
         lambda: layer()(q, k, v, 3, mode="balanced")),
        (UnsupportedError, "fused_cfg is not supported where torch traces",
         lambda: layer().fused_cfg(q, q, k, v, 3)),
        (UnsupportedError, "not implemented for torch.float32",
         lambda: layer()(*(x.float() for x in (q, k, v)), 3)),
        (ValueError, "50", lambda: layer()(q, k, v, 50)),
        (ValueError, r"timestep must be one step for the whole batch, got shape \(2,\)",
         lambda: layer()(q, k, v, torch.tensor([3, 3]))),
        (TypeError, "argument 'q_uncond' must be Tensor, not NoneType",
         lambda: layer().fused_cfg(q, None, k, v, 3)),
        (ValueError, "q_cond and q_uncond must have one shape and dtype",
         lambda: layer().fused_cfg(*(x.detach() for x in (q, q.bfloat16(), k, v)), 3)),
        (TypeError, "give either timestep or sigma", lambda: layer()(q, k, v)),
        (TypeError, "timestep must be an int, or a tensor on the CPU, got one on meta",
         lambda: layer()(q, k, v, torch.tensor(3, device="meta"))),
        (RuntimeError, "q and k|Expected q, k and v to have the same dtype",
         lambda: layer()(q, k.bfloat16(), v, 3)),
        (ValueError, "num_heads=4", lambda: layer()(k, k, v, 3)),
    ]  # fmt: skip
    for error, message, function in cases:
        with pytest.raises(error, match=message):
            function()


class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Notes which operators of ours it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("cupyattn::"):
            self.seen.append(func.name().removeprefix("cupyattn::"))
        return func(*args, **(kwargs or {}))


def test_the_operator_of_q_k_and_v_alone_is_what_it_says() -> None:
    """It has fewer arguments, and is what a call without others becomes."""
    own = [torch.randn(2, 5, 5, 8, dtype=torch.float16, requires_grad=True) for _ in "qkv"]
    settings = calls.TensorSettings.of(return_lse=True, backend="mirror")
    arguments = schema.ATTENTION_QKV.flat(dict(zip("qkv", own, strict=True)), settings)
    torch.library.opcheck(torch.ops.cupyattn.attention_qkv.default, arguments)
    x = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    with Watch() as watch:
        interop.attention(x, x, x, causal=True)
        interop.attention(x, x, x, bias=torch.zeros(4, 4))
    assert watch.seen == ["attention_qkv", "attention"]


def test_what_watches_either_pass_sees_operators_and_gradients_are_the_same_bits() -> None:
    """Where nothing does, autograd alone is told of a call."""
    arrays = inputs()
    found, seen = [], []
    for in_forward, in_backward in ((False, False), (True, False), (False, True), (True, True)):
        own = tensors(arrays, grad=True)
        with Watch() as watch:
            o = interop.attention(*own, causal=True) if in_forward else None
        if o is None:
            o = interop.attention(*own, causal=True)
        if in_backward:
            with watch:
                o.sum().backward()
        else:
            o.sum().backward()
        found.append([o.detach(), *(x.grad for x in own)])
        seen.append(watch.seen)
    forward, backward = ["attention_qkv"], ["attention_qkv_backward"]
    assert seen == [[], forward, backward, forward + backward]
    assert all(all(map(torch.equal, one, found[0])) for one in found)


def test_scales_that_are_arrays_pass_gradients_but_go_into_no_graph() -> None:
    arrays = inputs()
    found = []
    for scales in ((0.02, 0.03), (np.full((1, 1, 1), 0.02, "f4"), np.full((1, 1, 1), 0.03, "f4"))):
        own = tensors(arrays, grad=True)
        quant = QuantConfig("tensor", "tensor", smooth_k=False, scales=scales)
        interop.int8_attention(*own, quant=quant).sum().backward()
        found.append([x.grad for x in own])
    assert all(map(torch.equal, *found))
    with Watch(), pytest.raises(UnsupportedError, match=r"quant\.scales that are arrays"):
        interop.int8_attention(*own, quant=quant)
