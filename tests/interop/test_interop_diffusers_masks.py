"""Masks of models of diffusers: as operands of INT8 attention, eager and in compiled code."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from cupyattn.interop import diffusers as interop  # noqa: E402 - imports diffusers
from cupyattn.interop.diffusers import layers, masks, steps  # noqa: E402
from cupyattn.interop.torch import bridge  # noqa: E402
from tests.interop.test_interop_diffusers import (  # noqa: E402
    SHORT,
    attention,
    calling,
    distance,
)
from tests.interop.test_interop_diffusers_compiled import NAME, WIDTH, fresh  # noqa: E402, F401

#: Calls of these tests are short, and run in INT8 wherever they run.
INT8 = {**SHORT, "quant": ca.QuantConfig()}


def masks_of_scores(length: int = 70) -> dict[str, Any]:
    """Masks of torch's function for (2, 4, length, length) scores, as models make them."""
    rng = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[length - 9], [length - 30]])
    kept = torch.arange(length) < lengths
    square = torch.rand(length, length, generator=rng) < 0.6
    return {
        "padding": kept[:, None, None],
        "expanded padding": kept[:, None, None].expand(2, 4, length, length),
        "square": square,
        "of an entry": (square & kept[:, None])[:, None],
        "infinite": torch.zeros(2, 1, 1, length).masked_fill(~kept[:, None, None], -torch.inf),
        "large": (kept.half() - 1)[:, None, None].repeat_interleave(4, dim=1) * 10000,
        "of heads": torch.randn(4, length, length, generator=rng).bfloat16(),
        "of queries": torch.randn(length, 1, generator=rng).half(),
    }


@pytest.mark.parametrize("name", masks_of_scores(1))
def test_masks_are_those_of_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bool says which keys, numbers are added; neither is written out for queries or heads."""
    attend = torch.nn.functional.scaled_dot_product_attention
    mask, read = masks_of_scores()[name], {}
    own = layers.calls.forward

    def forward(settings: Any, tensors: Any) -> Any:
        read.update(tensors)
        return own(settings, tensors)

    monkeypatch.setattr(layers.calls, "forward", forward)
    model, x = calling(lambda q: attend(q, q, q, mask)), torch.randn(2, 70, 32).half()
    if mask.dtype not in (torch.bool, torch.float16):  # torch takes the type of queries alone
        x = x.to(mask.dtype)
    native = model["attn"](x)
    with interop.replace_attention_with_int8(model, policy="balanced", **INT8) as handle:
        o = model["attn"](x)
    assert handle.report().modes == {"balanced": 1} and not handle.report().native
    argument = "mask" if mask.dtype == torch.bool else "bias"
    q = bridge.as_array(x.unflatten(-1, (4, 8)).transpose(1, 2))
    given = {argument: bridge.as_array(mask)}
    expected = bridge.as_tensor(ca.attention(q, q, q, variant="fa_int8", **given))
    assert torch.equal(o, expected) and 0 < distance(o, native) < 0.05 * native.double().norm()
    wide = {"expanded padding": (2, 1, 1, 70)}.get(name, tuple(mask.shape))
    assert tuple(read[argument].shape) == wide and set(read) == {"q", "k", "v", argument}
    if argument == "bias" and mask.dtype != torch.float32 and mask.shape[-1] > 1:
        starts = {s for n, s in zip(wide[:-1], read["bias"].stride()[:-1], strict=True) if n > 1}
        assert starts and all(s % 8 == 0 for s in starts)  # rows as Hopper forms read them


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(1, 64, 64, dtype=torch.uint8), "attention mask of dtype uint8"),
        (torch.ones(3, 1, 64, 64), "attention mask that does not broadcast to (batch, heads, "
                                   "len_q, len_kv)"),
        (torch.ones(64, device="meta"), "attention mask on device meta"),
        ("causal", "attention mask of type str"),
        (torch.ones(64, requires_grad=True), "gradients"),
        (torch.ones(64, dtype=torch.bool).as_subclass(type("Own", (torch.Tensor,), {})),
         "operands of type Own"),
    ],
    ids=["dtype", "shape", "device", "type", "gradient", "class"],
)  # fmt: skip
def test_a_mask_that_kernels_do_not_take_stays_native(mask: Any, reason: str) -> None:
    layer = layers.Layer("x", None, "balanced", steps.Step(), 0)
    q = torch.randn(1, 2, 64, 16)
    options = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": False}
    with torch.set_grad_enabled(reason == "gradients"):
        assert layer.attend(q, q, q, None, options) is None
    assert layer.report().native == {reason: 1}


def test_the_table_takes_a_mask_of_keys() -> None:
    """(batch, len_kv), as the table's own backends do: of two entries of one query length."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    class Processor:
        _attention_backend = "native"

        def __call__(
            self, attn: Any, x: Any, encoder_hidden_states: Any, attention_mask: Any
        ) -> Any:
            q = x.unflatten(-1, (4, 8))
            o = dispatch_attention_fn(
                q, q, q, attn_mask=attention_mask, backend=self._attention_backend
            )
            return o.flatten(2)

    model = torch.nn.ModuleDict({"attn": attention(processor=Processor())})
    x, mask = torch.randn(2, 70, 32), masks_of_scores()["padding"][:, 0, 0]
    native = model["attn"](x, attention_mask=mask)
    with interop.replace_attention_with_int8(model, policy="balanced", **INT8) as handle:
        o = model["attn"](x, attention_mask=mask)
    assert handle.report().modes == {"balanced": 1}
    assert 0 < distance(o, native) < 0.05 * native.double().norm()


def test_a_mask_is_not_looked_at() -> None:
    """Nothing waits for a device: the test has tensors without memory."""
    q = torch.empty(2, 4, 70, 8, device="meta")
    for mask in masks_of_scores().values():
        absent = mask.to("meta")
        assert masks.obstacle(absent, q, q) is None
        assert all(x is None or x.is_meta for x in masks.of_scores(absent))


class Masked(torch.nn.Module):
    """A module that is given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = attention()

    def forward(self, x: Any, mask: Any) -> Any:
        return self.attn(x, attention_mask=mask)


KINDS = ("padding", "expanded padding", "square", "infinite", "of heads")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_operands_of_the_operator(kind: str, dynamic: bool) -> None:
    """Other masks of one form need no other graph, and none is written out for queries."""
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.extend(node for node in graph.graph.nodes if NAME in str(node.target))
        return graph

    def made(length: int, seed: int) -> Any:
        torch.manual_seed(seed)
        kept = torch.rand(2, 1, 1, length) < 0.7
        return {
            "padding": kept, "expanded padding": kept.expand(2, 2, length, length),
            "square": torch.rand(length, length) < 0.7,
            "infinite": torch.zeros(kept.shape).masked_fill(~kept, -torch.inf),
            "of heads": torch.randn(2, length, length).bfloat16(),
        }[kind]  # fmt: skip

    dtype = torch.bfloat16 if kind == "of heads" else torch.float32
    model = Masked().to(dtype)
    model.attn.set_processor(Given())
    own = interop.replace_attention_with_int8(copy.deepcopy(model), policy="balanced", **INT8)
    handle = interop.replace_attention_with_int8(model, policy="balanced", **INT8)
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    lengths = (64, 64, 67, 67, 90) if dynamic else (67, 67)
    for seed, length in enumerate(lengths):
        x, mask = torch.randn(2, length, WIDTH, dtype=dtype), made(length, seed)
        assert torch.equal(call(x, mask), own(x, mask))
    report = handle.report()
    assert report.layers[0].compiled == ("balanced",) and not own.report().native
    assert own.report().modes == {"balanced": len(lengths)}
    assert 1 <= len(calls) <= (2 if dynamic else 1)  # rows of a bias may need a copy or not
    bias, mask = (calls[-1].args[n].meta["example_value"] if calls[-1].args[n] is not None else None
                  for n in (4, 3))  # fmt: skip
    assert (mask is None) == (bias is not None) == (kind in ("infinite", "of heads"))
    if kind == "expanded padding":
        assert tuple(mask.shape[1:3]) == (1, 1)


@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_a_causal_mask_of_torchs_own_stays_native_in_compiled_code(variant: str) -> None:
    model, x = Masked(), torch.randn(1, 64, WIDTH)
    model.attn.set_processor(Given())
    mask = getattr(torch.nn.attention.bias, variant)(64, 64)
    expected = model(x, mask)
    handle = interop.replace_attention_with_int8(model, policy="balanced", **INT8)
    assert torch.equal(model(x, mask), expected)
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x, mask)
    assert torch.allclose(found, expected, atol=1e-5) and not handle.report().modes
    assert handle.report().layers[0].compiled == ("native: attention mask of type CausalBias",)


class Given:
    """A processor that hands its mask over as it is."""

    def __call__(
        self, attn: Any, x: Any, encoder_hidden_states: Any, attention_mask: Any
    ) -> Any:
        q, k, v = (
            project(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return o.transpose(1, 2).flatten(2)
