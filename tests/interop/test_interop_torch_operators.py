"""The operators of attention in torch: checks, graphs, transforms, autocast."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn import BlockMask, QuantConfig, Tiles
from cupyattn.arrays.kinds import STORAGE
from cupyattn.problem.settings import Settings
from tests.interop.torch_cases import (
    compiled,
    leaves,
    options_of,
    problem,
    same_bits,
    tensor,
    tensors,
)

torch = pytest.importorskip("torch")
interop = importlib.import_module("cupyattn.interop.torch")
calls = importlib.import_module("cupyattn.interop.torch.calls")
functional = importlib.import_module("cupyattn.interop.torch.functional")
ops = importlib.import_module("cupyattn.interop.torch.ops")
schema = importlib.import_module("cupyattn.interop.torch.schema")

OPTIONS = options_of(33, 70, 16, 4)
SAMPLES = {
    "plain": {}, "lse": {"return_lse": True, "causal": True},
    "int8": {"variant": "fa_int8", "quant": QuantConfig(pv="int8"), "window": (9, 3)},
    "fa": {"variant": "fa", "tiles": Tiles(64, 32, 4), "layout": "BSHD", "return_lse": True},
    "scores": {"softcap": 3.0, "mask": True, "bias": True, "scale": 0.2},
}  # fmt: skip


def sample(name: str, *, grad: bool = True) -> tuple[Any, ...]:
    options = dict(SAMPLES[name])
    names = {n: torch.ones(5, 5, dtype=torch.bool if n == "mask" else torch.float32)
             for n in ("mask", "bias") if options.pop(n, False)}  # fmt: skip
    own = [torch.randn(2, 5, 5, 8, dtype=torch.float16, requires_grad=grad) for _ in "qkv"]
    settings = calls.TensorSettings.of(**{"return_lse": grad, **options, "backend": "mirror"})
    return schema.ATTENTION.flat({**dict(zip("qkv", own, strict=True)), **names}, settings)


@pytest.mark.parametrize("name", SAMPLES)
def test_operators_are_what_they_say(name: str) -> None:
    operator = torch.ops.cupyattn.attention.default
    torch.library.opcheck(operator, sample(name))
    without = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, sample(name, grad=False), test_utils=without)


def test_the_operator_of_packed_sequences_is_what_it_says() -> None:
    own = [torch.randn(9, 2, 16, dtype=torch.float16, requires_grad=True) for _ in "qkv"]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    named = {**dict(zip("qkv", own, strict=True)), "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    settings = calls.TensorSettings.of(return_lse=True, max_len_q=5, max_len_k=5)
    arguments = schema.ATTENTION_VARLEN.flat(named, settings)
    torch.library.opcheck(torch.ops.cupyattn.attention_varlen.default, arguments)


def test_the_operator_of_the_backward_pass_is_what_it_says() -> None:
    arguments = sample("lse", grad=False)
    o, lse = torch.ops.cupyattn.attention(*arguments)
    backward = torch.ops.cupyattn.attention_backward.default
    torch.library.opcheck(backward, (o, o, lse, None, *arguments, False))
    torch.library.opcheck(backward, (o, o, lse, lse, *arguments, False))
    arguments = sample("scores", grad=False)
    torch.library.opcheck(backward, (o, o, lse, None, *arguments, True))


def test_operators_get_the_strides_that_were_traced() -> None:
    """Inductor pads rows otherwise: another call for us, and a result of other strides."""
    names = ("attention", "attention_qkv", "attention_varlen", "int8_attention", "int8_linear")
    parts = ("int8_layer", "int8_layers")
    for name in (*names, *parts, "attention_backward", "int8_attention_backward"):
        tags = getattr(torch.ops.cupyattn, name).default.tags
        assert torch.Tag.needs_exact_strides in tags, name


def test_an_operator_itself_copies_no_operand() -> None:
    q, k, v = (tensor(x) for x in problem("float16"))
    message = r"Expected v to have a contiguous last dimension, .* give v.contiguous\(\)"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.cupyattn.attention_qkv(q, k, v.mT.contiguous().mT, None, 0, False, "")


@pytest.mark.parametrize(
    "quant",
    [
        QuantConfig(), QuantConfig(pv="int8"), QuantConfig(pv="fp8", granularity_v="tensor"),
        QuantConfig(pv="int8", smooth_v=False), QuantConfig(pv="int8", p_type="16bit"),
        QuantConfig("token", "head", pv="int8", p_type="16bit", granularity_v="tensor"),
        QuantConfig(pv="int8", p_type="s8", granularity_v="channel", symmetric=False),
        QuantConfig("tensor", "tensor", scales=(0.5, 0.25)), QuantConfig(qk_bits=4),
        QuantConfig(pv="int8", rotate="hadamard"),
    ],
)  # fmt: skip
def test_a_way_to_quantise_survives_a_schema(quant: QuantConfig) -> None:
    """A field that is as in general may be another than the rest implies: smooth_v, p_type."""
    again = QuantConfig(**schema._quant_fields(quant))
    assert again == quant


def test_settings_survive_a_schema() -> None:
    near = BlockMask.from_window(64, 64, (5, 0))
    quant = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.1, 2.0), pv="fp8")
    settings = calls.TensorSettings.of(
        window=(3, 4), quant=quant, tiles=Tiles(64, 32, 4), block_mask=near, max_len_q=5,
        softcap=np.float32(0.1), causal=np.bool_(True), backend="mirror",
    )  # fmt: skip
    arguments = schema.ATTENTION_VARLEN.flat({}, settings)
    assert schema.ATTENTION_VARLEN.settings(arguments) == settings
    plain = schema.ATTENTION.flat({}, calls.TensorSettings.of())
    assert schema.ATTENTION.settings(plain) == calls.TensorSettings.of() and plain[-1] == ""
    int8 = calls.TensorSettings.of(causal=True, quant=QuantConfig(pv="int8"))
    text = schema.ATTENTION.flat({}, int8)[-1]
    assert text == "causal=True, quant={'pv': 'int8'}"


ODD: list[dict[str, Any]] = [
    {"causal": 0}, {"check_finite": 0.0}, {"rope_interleaved": 0}, {"window": (-1.0, -1)},
    {"softcap": 0j}, {"return_lse": 0}, {"return_lse": 1}, {"variant": b"auto"},
]  # fmt: skip


@pytest.mark.parametrize("options", ODD, ids=str)
def test_a_setting_is_refused_as_eager_refuses_it(options: dict[str, Any]) -> None:
    """Where a compiler or a transform sees an operator, whose settings are text."""
    x = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    run = functools.partial(interop.attention, backend="mirror", **options)
    with pytest.raises((TypeError, ValueError)) as eager:
        run(x, x, x)
    several, wanted, text = x[None], x.clone().requires_grad_(), re.escape(str(eager.value))
    for call, given in (
        (compiled(lambda x: run(x, x, x)), x),
        (torch.func.vmap(lambda x: run(x, x, x)), several),
        (lambda x: run(x, x, x), wanted),
    ):
        # NOTE: Dynamo wraps what is raised while it traces.
        with pytest.raises((eager.type, torch._dynamo.exc.Unsupported), match=text):
            call(given)


@pytest.mark.parametrize("name", ["rope", "rope by column", "window", "bias"])
def test_a_compiled_function_is_one_graph(name: str) -> None:
    """With fullgraph=True a break in the graph is an error."""
    inputs, options, quant = problem("bfloat16"), tensors(OPTIONS[name]), QuantConfig(pv="int8")

    def layer(q: Any, k: Any, v: Any) -> Any:
        o, lse = interop.attention(q * 2, k, v, return_lse=True, **options)
        return interop.int8_attention(o, k, v, quant=quant) + 1, lse

    q, k, v = leaves(*inputs)
    o, lse = compiled(layer)(q, k, v)
    o.sum().backward()
    own = leaves(*inputs)
    expected, expected_lse = layer(*own)
    expected.sum().backward()
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    assert all(torch.equal(x.grad, y.grad) for x, y in zip((q, k, v), own, strict=True))


def test_a_compiled_function_takes_other_lengths() -> None:
    function = compiled(lambda q, k, v: interop.attention(q, k, v, causal=True), dynamic=True)
    for lengths in ((33, 70), (5, 9), (64, 128)):
        inputs = problem("float16", len_q=lengths[0], len_kv=lengths[1])
        found = function(*(tensor(x) for x in inputs))
        assert same_bits(found, ca.attention(*inputs, causal=True))
    x, ends = torch.randn(9, 2, 16, dtype=torch.float16), torch.tensor([0, 4, 9])
    packed = compiled(lambda x, e: interop.attention_varlen(x, x, x, e, e, return_lse=True))
    expected = interop.attention_varlen(x, x, x, ends, ends, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(packed(x, ends), expected, strict=True))


def test_a_compiled_function_takes_settings_that_are_symbols() -> None:
    """torch makes symbols of numbers that changed, and of lengths; the graph keeps their values."""

    def layer(q: Any, k: Any, left: int, softcap: float) -> Any:
        window = left, q.shape[2] // 2
        return interop.attention(q, k, k, window=window, causal=q.shape[2] > 1, softcap=softcap)

    function, k = compiled(layer, dynamic=True), torch.randn(1, 2, 40, 16).half()
    for length, left, softcap in ((9, 3, 0.5), (9, 4, 2.0), (1, 4, 2.0)):
        given = k[:, :, :length], k, left, softcap
        assert torch.equal(function(*given), layer(*given))


@pytest.mark.parametrize(
    ("variant", "bias"), [("fa_tc", "float16"), ("fa_int8", "bfloat16"), ("fa_int8", "float32")]
)
def test_a_compiled_function_takes_mask_bias_and_softcap(
    variant: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all masks of keys, whatever the lengths; none is written out for queries."""
    masks: list[Any] = []
    own = ops.forward

    def forward(settings: Any, tensors: Any) -> Any:
        masks.append(tensors["mask"])
        return own(settings, tensors)

    monkeypatch.setattr(ops, "forward", forward)

    def layer(q: Any, k: Any, v: Any, ends: Any, added: Any) -> Any:
        kept = torch.arange(k.shape[2]) < ends[:, None]
        mask = kept[:, None, None].expand(2, 4, q.shape[2], k.shape[2])
        return interop.attention(q, k, v, mask=mask, bias=added, softcap=5.0, variant=variant)

    function = compiled(layer, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(((33, 70), (40, 96), (17, 65))):
            inputs = problem("float16", len_q=lengths[0], len_kv=lengths[1])
            ends = np.array([lengths[1] - seed, 9])
            rng = np.random.default_rng(seed)
            scores = rng.standard_normal((4, 1, lengths[1])).astype(STORAGE[bias])
            found = function(*(tensor(x) for x in (*inputs, ends, scores)))
            given = {"mask": (np.arange(lengths[1]) < ends[:, None])[:, None, None], "bias": scores}
            expected = ca.attention(*inputs, softcap=5.0, variant=variant, **given)
            assert same_bits(found, expected)
    assert all(mask.stride()[1:] == (0, 0, 1) for mask in masks) and len(masks) == 3


def test_a_compiled_function_takes_no_block_mask() -> None:
    near, x = BlockMask.from_window(64, 64, (5, 0)), torch.randn(1, 1, 64, 16).half()
    with pytest.raises(Exception, match="a block_mask cannot go into a graph"):
        compiled(lambda x: interop.attention(x, x, x, block_mask=near))(x)


@pytest.mark.slow
def test_a_compiled_function_runs_under_inductor() -> None:
    inputs = problem("float16")
    torch._dynamo.reset()
    function = torch.compile(lambda *x: interop.attention(*x, causal=True) * 2, fullgraph=True)
    q, k, v = leaves(*inputs)
    o = function(q, k, v)
    assert torch.equal(o, interop.attention(q, k, v, causal=True) * 2)
    o.sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, v))


def test_an_exported_program_has_the_operator() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return interop.attention(x, x, x, causal=True)

    x = torch.randn(1, 2, 5, 16, dtype=torch.float16)
    program = torch.export.export(Layer(), (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert "cupyattn.attention_qkv.default" in targets
    assert torch.equal(program.module()(x), interop.attention(x, x, x, causal=True))


def test_autocast_chooses_the_type() -> None:
    x = torch.randn(1, 2, 9, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = interop.attention(x, x.half(), x)
        assert o.dtype == torch.bfloat16
        function = compiled(lambda x: interop.attention(x, x, x))
        assert function(x).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="float64"):
            interop.attention(*[x.detach().double()] * 3)
    o.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0
    assert interop.attention(*[x.detach()] * 3).dtype == torch.float32


def test_transforms_and_modes() -> None:
    x = torch.randn(3, 1, 2, 9, 16).half()
    mapped = torch.func.vmap(lambda a: interop.attention(a, a, a))(x)
    assert torch.equal(mapped[1], interop.attention(*[x[1]] * 3))
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode()
    with fake:
        y = torch.empty(2, 7, 3, 16, dtype=torch.bfloat16)
        o, lse = interop.attention(y, y, y, layout="BSHD", return_lse=True)
    assert o.shape == (2, 7, 3, 16) and lse.shape == (2, 3, 7) and o.dtype == torch.bfloat16


def test_an_operator_is_seen_by_autograd_and_by_those_who_watch_alone() -> None:
    ops = importlib.import_module("cupyattn.interop.torch.ops")

    class Own(torch.Tensor):
        pass

    x = torch.zeros(2)
    leaf = x.clone().requires_grad_()
    frozen = torch.nn.Parameter(x, requires_grad=False)
    assert not any(ops.autograd_state((x, None, "text", frozen)))
    assert any(ops.autograd_state((x, leaf))) and any(ops.autograd_state((x.as_subclass(Own),)))
    with torch.no_grad():
        assert not any(ops.autograd_state((leaf,)))
    with importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode():
        assert any(ops.autograd_state((x,)))


def test_a_compiler_traces_no_look_up_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch traces through a cache, and warns of it; without a compiler settings are looked up."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(functional, "interned", lambda *x: seen.append(x) or Settings(*x))
    x = torch.ones(1, 1, 4, 8, dtype=torch.float16)

    def call(x: Any) -> Any:
        return interop.attention(x, x, x, causal=True, backend="mirror")

    compiled = torch.compile(call, backend="eager", fullgraph=True)(x)
    assert not seen and torch.equal(compiled, call(x)) and len(seen) == 1
