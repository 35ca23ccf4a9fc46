"""Layers of two streams that write their rows where joint attention reads them.

Graphs run as Inductor's passes leave them, as in `test_interop_torch_epilogues`. The pass changes
no number, so results have the bits of a graph that keeps the concatenations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import cupyattn as ca
from experiments._harness import whole_families

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
rows = importlib.import_module("tests.interop.test_interop_torch_attention_rows")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
the_pass = importlib.import_module("cupyattn.interop.torch.epilogues")
diffusers = importlib.import_module("cupyattn.interop.diffusers")
interop = importlib.import_module("cupyattn.interop.torch")
linear_parts = importlib.import_module("cupyattn.interop.torch.linear_parts")

fresh, run, tensors = epilogues.fresh, epilogues.run, rows.tensors  # `fresh` runs by itself
HEADS, WIDTH, TEXT, IMAGE = 2, 16, 5, 8
CHANNELS = HEADS * WIDTH
INTO, CAT = "cupyattn.int8_normed_layers_into.default", "aten.cat.default"


class Stream(torch.nn.Module):
    """Q, K and V of one stream, behind a LayerNorm: (batch, tokens, heads, head_dim)."""

    def __init__(
        self, names: str = "qkv", strategy: str = "channel", backend: str = "mirror", **options: Any
    ) -> None:
        super().__init__()
        for name in names:
            own = torch.nn.Linear(CHANNELS, CHANNELS, dtype=torch.bfloat16).requires_grad_(False)
            layer = interop.Int8Linear.from_linear(
                own, strategy=strategy, backend=backend, **options
            )
            setattr(self, name, layer)
        self.names = names

    def forward(self, x: Any) -> list[Any]:
        y = torch.nn.functional.layer_norm(x, (CHANNELS,), eps=1e-6)
        return [getattr(self, name)(y).unflatten(2, (HEADS, WIDTH)) for name in self.names]


def streams(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return Stream(**options), Stream(**options)


def inputs(batch: int = 1) -> list[Any]:
    return [tensors(batch, n, CHANNELS, seed=n) for n in (TEXT, IMAGE)]


def pairs(text: Any, image: Any, given: Any) -> Any:
    return zip(text(given[0]), image(given[1]), strict=True)


def by_token(text: Any, image: Any, *given: Any) -> Any:
    """As Flux, Qwen-Image and HunyuanVideo concatenate rows."""
    return rows.attend(*(torch.cat(pair, 1) for pair in pairs(text, image, given)))


def by_head(text: Any, image: Any, *given: Any) -> Any:
    """As SD3 does."""
    q, k, v = (
        torch.cat([x.transpose(1, 2) for x in pair], 2) for pair in pairs(text, image, given)
    )
    kept = torch.cat([k, k[:, :, :1]], 2)  # has the strides of the concatenation
    return rows.operator.attend({"q": q + 1, "k": kept[:, :, :-1], "v": v}, None, rows.TEXT)


def whole(text: Any, image: Any, *given: Any) -> Any:
    """Without heads, and image first."""
    return [torch.cat(pair[::-1], 1).flatten(2) + 1 for pair in pairs(text, image, given)]


def and_parts(text: Any, image: Any, *given: Any) -> Any:
    """The parts have other readers."""
    both = [*pairs(text, image, given)]
    return rows.attend(*(torch.cat(pair, 1) for pair in both)), *(x + 1 for x in both[0])


def keeping(monkeypatch: pytest.MonkeyPatch, function: Any, *given: Any) -> tuple[Any, Any]:
    """Return the result and the graphs, with the bits of graphs that keep concatenations."""
    found, graphs = run(function, *given)
    with monkeypatch.context() as patch:
        patch.setattr(the_pass, "join_rows", lambda graph: None)
        torch._dynamo.reset()
        kept, others = run(function, *given)
    assert INTO not in others.names() and CAT in others.names()
    for one, other in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (found, kept)),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other) and one.stride() == other.stride()
    return found, graphs


#: Functions of streams and inputs, and concatenations that are left.
JOINT: dict[str, tuple[Callable[..., Any], int]] = {
    "by token": (by_token, 0), "without heads": (whole, 0), "read elsewhere": (and_parts, 0),
    "by head, V alone": (by_head, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINT)
def test_layers_write_where_rows_lie_side_by_side(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, left = JOINT[name]
    both = streams()
    _, graphs = keeping(monkeypatch, lambda *given: function(*both, *given), *inputs())
    assert graphs.names().count(INTO) == 2 and graphs.names().count(CAT) == left
    assert not any(name.startswith("cupyattn.int8_normed_layers.") for name in graphs.names())


def test_joint_attention_copies_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms become part of attention, so layers write its operands."""
    text, image = streams()
    norms = [rows.norm(rows.normalization.RMSNorm, seed) for seed in range(4)]

    def function(*given: Any) -> Any:
        *ends, v = pairs(text, image, given)
        q, k = ([one(x) for one, x in zip(norms[i::2], ends[i], strict=True)] for i in (0, 1))
        return rows.attend(*(torch.cat([*own], 1) for own in (q, k, v)))

    found, graphs = keeping(monkeypatch, function, *inputs())
    assert rows.is_taken(graphs) == [(False, True)]
    joined = [n for n in graphs[-1].graph.nodes if str(n.target) == CAT]
    assert [n.meta["val"].shape for n in joined] == [(4 * WIDTH,)]  # weights alone
    eager = function(*inputs())
    assert (found - eager).norm() < 2e-2 * eager.norm()  # which rounds normalised rows


#: Graphs that keep their concatenations: functions, and options of streams and inputs.
OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "several entries of a batch": (by_token, {}, {"batch": 2}),
    "layers by block": (by_token, {"strategy": "block"}, {}),
    "another axis": (
        lambda text, image, x, y: [torch.cat(pair, 2) for pair in pairs(text, image, (x, x))], {},
        {},
    ),
    "a part that no layer makes": (
        lambda text, image, x, y: [torch.cat((own, own.abs()), 1) for own in text(x)], {}, {},
    ),
    "one part twice": (
        lambda text, image, x, y: [
            torch.cat((a, b, a), 1) for a, b in pairs(text, image, (x, y))
        ], {}, {},
    ),
    "parts in other orders of axes": (
        lambda text, image, x, y: [
            torch.cat((a.transpose(1, 2), b.transpose(1, 2)), 2).relu()
            for a, b in pairs(text, image, (x, y))
        ], {}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_concatenations_stay(name: str) -> None:
    function, of_streams, of_inputs = OTHERS[name]
    both = streams(**of_streams)
    _, graphs = run(lambda *given: function(*both, *given), *inputs(**of_inputs))
    assert INTO not in graphs.names() and graphs.names().count(CAT) == 3


def test_lengths_that_are_symbols_keep_their_concatenations() -> None:
    both, given = streams(), inputs()
    for x in given:
        torch._dynamo.mark_dynamic(x, 1)
    _, graphs = run(lambda *given: by_token(*both, *given), *given)
    assert INTO not in graphs.names() and graphs.names().count(CAT) == 3


@pytest.mark.slow
def test_inductor_runs_layers_that_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, twice; the other tests have its graph."""
    both, given = streams(), inputs()

    def function(*given: Any) -> Any:
        return and_parts(*both, *given)

    from torch._inductor.utils import run_and_get_code

    expected, _ = keeping(monkeypatch, function, *given)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True)
        found, [code] = run_and_get_code(compiled, *given)
        again = compiled(*given)
    assert code.count("cupyattn_place('int8_normed_layers_into'") == 2
    for results in (found, again):
        assert all(map(torch.equal, results, expected))


#: Calls of layers that write rows of joint attention in small models, and concatenations of heads'
#: rows that are left. Layers of SD3's last block read text that is modulated in float32.
MODELS = {
    "Flux": (4, 0), "Qwen-Image": (4, 0), "SD3.5 Large": (2, 3), "HunyuanVideo": (4, 0),
}  # fmt: skip


def is_of_rows(node: Any) -> bool:
    """Whether a node concatenates rows of heads, not tables of rotations."""
    like = node.meta.get("val")
    return str(node.target) == CAT and like.dim() == 4 and like.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_diffusers_copy_no_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = whole_families.small(name)
    latents, make = whole_families.inputs(family, "cpu", 0)
    given = make(latents, torch.tensor([700.0]))
    outputs, compiled = [], []
    for keeps in (False, True):
        model = whole_families.make(family, "cpu", 0)
        interop.replace_linear_with_int8(
            model, config=ca.Int8Config(strategy="channel"), backend="mirror"
        )
        diffusers.replace_attention_with_int8(
            model, policy="balanced", backend="mirror", min_length=16
        )
        torch._dynamo.reset()
        compiled.append(rows.Graphs())
        with torch.no_grad(), monkeypatch.context() as patch:
            if keeps:
                patch.setattr(the_pass, "join_rows", lambda graph: None)
            outputs.append(family.call(torch.compile(model, backend=compiled[-1]), given))
    assert torch.equal(*outputs)
    nodes = [node for one in compiled[0] for node in one.graph.nodes]
    counts = [
        sum(str(node.target) == INTO for node in nodes),
        sum(is_of_rows(node) for node in nodes),
    ]
    assert tuple(counts) == MODELS[name]


# ---- the operator --------------------------------------------------------------------------------


def arguments(**own: Any) -> list[Any]:
    torch.manual_seed(0)
    layers = [Stream("q").q, Stream("q").q]
    given = linear_parts.NormedLayers(
        tensors(1, 5, CHANNELS), None, None, None, None, "layer", 1e-6, "", None,
        [x.weight_codes for x in layers], [x.weight_scale for x in layers],
        [x.bias for x in layers], None, None, ["", ""], None, "mirror",
    )  # fmt: skip
    return [*given._replace(**own)]


def test_the_operator_writes_what_the_other_one_returns() -> None:
    own = arguments()
    wanted = linear_parts.normed_layers(*own)
    joint = torch.full((1, 9, CHANNELS), 7.0, dtype=torch.bfloat16)
    out = [joint[:, 2:7], torch.empty_like(wanted[1])]
    assert linear_parts.normed_layers_into(*own, out) is None
    assert all(map(torch.equal, out, wanted))
    assert (joint[:, :2] == 7).all() and (joint[:, 7:] == 7).all()
    torch.library.opcheck(linear_parts.normed_layers_into, (*own, out))


def test_the_operator_refuses_other_receivers_and_gradients() -> None:
    own, out = arguments(), [torch.empty(1, 5, CHANNELS, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(ValueError, match="a tensor for each of 2 layers, got 1"):
        linear_parts.normed_layers_into(*own, out[:1])
    with pytest.raises(ValueError, match="out must"):
        linear_parts.normed_layers_into(*own, [x[:, :4] for x in out])
    own[0].requires_grad_()
    with pytest.raises(linear_parts.UnsupportedError, match="several layers in one call"):
        linear_parts.normed_layers_into(*own, out)
