"""Two tensors that INT8 layers by channel read in place of their concatenation, side by side or one
below the other, and slices that are joined again.

Graphs run as Inductor's passes leave them, as in `test_interop_torch_epilogues`. The pass changes
no number, so results have the bits of a graph that keeps the concatenation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import cupyattn as ca

torch = pytest.importorskip("torch")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
prologues = importlib.import_module("tests.interop.test_interop_torch_prologues")
the_pass = importlib.import_module("cupyattn.interop.torch.epilogues")
interop = importlib.import_module("cupyattn.interop.torch")
linear_parts = importlib.import_module("cupyattn.interop.torch.linear_parts")

fresh, Graphs = epilogues.fresh, epilogues.Graphs  # `fresh` runs by itself
tensors, HALF = prologues.tensors, torch.float16
LAYER, LAYERS, NORMED = (f"cupyattn.int8_{n}.default" for n in ("layer", "layers", "normed_layers"))
CAT = "aten.cat.default"
LEFT, RIGHT, OUT = 64, 128, 48


def layer(out: int = OUT, channels: int = LEFT + RIGHT, **options: Any) -> Any:
    own = torch.nn.Linear(channels, out, dtype=HALF).requires_grad_(False)
    options = {"strategy": "channel", "backend": "mirror", **options}
    return interop.Int8Linear.from_linear(own, **options)


def run(
    function: Any, *given: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, Any]:
    """Return the result and the graphs; the bits are of graphs that keep concatenations."""
    found = []
    for keeps in (False, True):
        with monkeypatch.context() as patch:
            if keeps:
                patch.setattr(the_pass, "sides_of", lambda node: None)
                patch.setattr(the_pass, "read_in_two", lambda graph: None)
            torch._dynamo.reset()
            found.append(epilogues.run(function, *given, **options))
    (y, graphs), (kept, whole) = found
    results = zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (y, kept)), strict=True)
    assert all(torch.equal(one, other) for one, other in results)
    assert CAT in whole.names()
    return y, graphs


#: Ways to make both sides of x (2, 5, 256), whose rows lie at one stride.
SIDES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "two tensors": lambda x: (x[..., :LEFT].contiguous(), x[..., :RIGHT].contiguous()),
    "parts of wider rows": lambda x: (x[..., 8 : 8 + LEFT], x[..., -RIGHT:]),
    "part of a split": lambda x: tuple(x.split((LEFT, 64, RIGHT), -1)[::2]),
    "heads that are joined": lambda x: (
        x[..., :LEFT].unflatten(-1, (4, 16)).flatten(2), x[..., -RIGHT:]
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SIDES)
def test_a_layer_reads_both_sides(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    own, x = layer(), tensors(2, 5, 256)

    def function(x: Any) -> Any:
        return own(torch.cat(SIDES[name](x), -1))

    y, graphs = run(function, x, dynamic=dynamic, monkeypatch=monkeypatch)
    assert LAYER in graphs.names() and CAT not in graphs.names()
    assert torch.equal(y, function(x))
    (product,) = graphs.products()
    assert product["right"].meta["val"].shape[-1] == RIGHT


def test_epilogues_stay_on_both_sides_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right side is a layer with GELU, the layer that reads it has a gated residual."""
    torch.manual_seed(0)
    up, down = layer(RIGHT, LEFT), layer(LEFT)
    x, gate = tensors(2, 5, LEFT), tensors(2, 1, LEFT, seed=1)

    def function(x: Any, gate: Any) -> Any:
        y = torch.nn.functional.gelu(up(x), approximate="tanh")
        return x + gate * down(torch.cat([x, y], dim=2))

    _, graphs = run(function, x, gate, monkeypatch=monkeypatch)
    assert graphs.names() == [LAYER] * 2
    first, second = graphs.products()
    assert first["activation"] == "gelu_tanh" and second["gate"] is not None
    assert second["right"].target is linear_parts.layer


def test_layers_of_one_concatenation_share_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    own, x, right = [layer(), layer(16)], tensors(10, LEFT), tensors(10, RIGHT, seed=1)

    def function(x: Any, right: Any) -> Any:
        both = torch.cat([x, right], 1)
        return [one(both) for one in own]

    _, graphs = run(function, x, right, monkeypatch=monkeypatch)
    assert graphs.names() == [LAYERS]
    assert graphs.products()[0]["right"] is not None


def read_twice(own: Any, x: Any, right: Any) -> Any:
    both = torch.cat([x, right], -1)
    return own(both), both.sum()


def kept_rows(x: Any) -> Any:
    """Rows of all but the last token: no two strides of batch and length are one."""
    return x[:, :-1]


#: Concatenations that stay: options of the layer, and the function of it and both sides.
OTHERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "three tensors": ({}, lambda own, x, r: own(torch.cat([x, r[..., :40], r[..., 40:]], -1))),
    "another reader": ({}, read_twice),
    "another axis": (
        {"channels": LEFT}, lambda own, x, r: own(torch.cat([x, r[..., :LEFT]], 1)),
    ),
    "another type": ({}, lambda own, x, r: own(torch.cat([x, r.float()], -1)).half()),
    "rows that are columns": (
        {}, lambda own, x, r: own(torch.cat([x, r.mT.contiguous().mT], -1))
    ),
    "rows at two strides": ({}, lambda own, x, r: own(torch.cat([kept_rows(x), kept_rows(r)], -1))),
    "layers by block": ({"strategy": "block"}, lambda own, x, r: own(torch.cat([x, r], -1))),
    "a rotation": ({"rotate": "hadamard"}, lambda own, x, r: own(torch.cat([x, r], -1))),
    "factors of channels": (
        {"smooth": torch.full((LEFT + RIGHT,), 2.0)}, lambda own, x, r: own(torch.cat([x, r], -1))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_concatenations_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options, function = OTHERS[name]
    own, x, right = layer(**options), tensors(2, 5, LEFT), tensors(2, 5, RIGHT, seed=1)
    _, graphs = run(lambda x, r: function(own, x, r), x, right, monkeypatch=monkeypatch)
    assert CAT in graphs.names()
    assert all(one["right"] is None for one in graphs.products())


#: Slices of x (2, 5, 256) that are joined: the tensor, or another.
JOINED: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "rows": (True, lambda x: torch.cat([x[:, :2], x[:, 2:]], 1)),
    "three": (True, lambda x: torch.cat([x[:, :1], x[:, 1:3], x[:, 3:]], 1)),
    "channels": (True, lambda x: torch.cat([x[..., :192], x[..., 192:]], -1)),
    "in another order": (False, lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)),
    "one left out": (False, lambda x: torch.cat([x[:, :2], x[:, 3:], x[:, :1]], 1)),
    "of two tensors": (False, lambda x: torch.cat([x[:, :2], (x + 1)[:, 2:]], 1)),
    "of other strides": (
        False, lambda x: (y := x.mT.contiguous().mT) is None or torch.cat([y[:, :2], y[:, 2:]], 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("name", JOINED)
def test_slices_that_are_joined_are_their_tensor(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    whole, join = JOINED[name]
    own, x = layer(channels=256, strategy=strategy), tensors(2, 5, 256)
    y, graphs = epilogues.run(lambda x: own(join(x)), x)
    assert torch.equal(y, own(join(x)))
    (product,) = graphs.products()
    assert whole == (product["x"].op == "placeholder") and (not whole or graphs.names() == [LAYER])


def test_a_norm_whose_slices_are_joined_is_part_of_the_pass() -> None:
    """As in HunyuanVideo, whose attention gets tokens of the image and of the text."""
    torch.manual_seed(0)
    one, other, norm = layer(channels=128), layer(channels=128), torch.nn.RMSNorm(128, dtype=HALF)
    norm.requires_grad_(False)

    def function(x: Any) -> Any:
        y = norm(x)
        return one(y), other(torch.cat([y[:, :2], y[:, 2:]], 1))

    found, graphs = epilogues.run(function, tensors(2, 5, 128))
    assert graphs.names() == [NORMED]
    assert all((y - z).norm() < 0.01 * z.norm()
               for y, z in zip(found, function(tensors(2, 5, 128)), strict=True))  # fmt: skip


# ---- rows of two tensors -------------------------------------------------------------------------


def normed(x: Any, scale: Any) -> Any:
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], None, None, 1e-6)
    return y * (1 + scale)


def block(own: Any, text: Any, image: Any, scale: Any) -> Any:
    """What is added to is what is normalised, as in a block of one stream."""
    x = torch.cat([text, image], 1)
    return x + scale * own[1](torch.nn.functional.silu(own[0](normed(x, scale))))


#: How the rows lie: the function of whole (3, 12, 64), and the shape of a modulation.
ROWS: dict[str, tuple[Callable[[Any], tuple[Any, Any]], tuple[int, ...]]] = {
    "two tensors": (lambda x: (x[:, :5].contiguous(), x[:, 5:].contiguous()), (3, 1, LEFT)),
    "slices of one": (lambda x: (x[:, :5], x[:, 5:]), (3, 1, LEFT)),
    "image in front": (lambda x: (x[:, 7:], x[:, :7]), (3, 1, LEFT)),
    "rows that all entries share": (
        lambda x: (x[:1, :5].expand(3, -1, -1), x[:, 5:]), (3, 1, LEFT)
    ),
    "as many of each": (lambda x: (x[:, :6], x[:, :6] * 2), (LEFT,)),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_read_in_two(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    part, shape = ROWS[name]
    own = [layer(RIGHT, LEFT), layer(LEFT, RIGHT)]
    x, scale = tensors(3, 12, LEFT), tensors(*shape, seed=1)
    before = x.clone()
    _, graphs = run(
        lambda x, scale: block(own, *part(x), scale), x, scale, dynamic=dynamic,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert NORMED in graphs.names() and CAT not in graphs.names()
    assert graphs.products()[-1]["residual_below"] is not None
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_other_types_are_read_in_two(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    own = [
        interop.Int8Linear.from_linear(
            torch.nn.Linear(n, m, dtype=dtype).requires_grad_(False), strategy="channel",
            backend="mirror",
        )
        for n, m in ((LEFT, RIGHT), (RIGHT, LEFT))
    ]  # fmt: skip
    text, image = (tensors(2, n, LEFT, dtype=dtype, seed=n) for n in (5, 7))
    scale = tensors(2, 1, LEFT, dtype=dtype)
    _, graphs = run(
        lambda *given: block(own, *given), text, image, scale, monkeypatch=monkeypatch
    )
    assert CAT not in graphs.names()


#: Functions whose concatenation stays: something else reads it, or reads its numbers otherwise.
KEPT_ROWS: dict[str, Callable[..., Any]] = {
    "it is a result": lambda own, t, i, s: (own[0](normed(x := torch.cat([t, i], 1), s)), x),
    "layers without a norm": lambda own, t, i, s: own[0](torch.cat([t, i], 1)),
    "three tensors": lambda own, t, i, s: own[0](normed(torch.cat([t, i, t], 1), s)),
    "entries": lambda own, t, i, s: own[0](normed(torch.cat([t, t + 1], 0), s[:1])),
    "another type": lambda own, t, i, s: own[0](normed(torch.cat([t, i.float()], 1).half(), s)),
    "columns that are rows": lambda own, t, i, s: own[0](
        normed(torch.cat([t.mT.contiguous().mT, i], 1), s)
    ),
    "the norm stays": lambda own, t, i, s: own[0](normed(torch.cat([t, i], 1), s).sin()),
}


@pytest.mark.parametrize("name", KEPT_ROWS)
def test_rows_that_others_read_stay_concatenated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    own = [layer(RIGHT, LEFT)]
    text, image, scale = tensors(2, 5, LEFT), tensors(2, 7, LEFT, seed=1), tensors(2, 1, LEFT)
    _, graphs = run(
        lambda *given: KEPT_ROWS[name](own, *given), text, image, scale, monkeypatch=monkeypatch
    )
    assert CAT in graphs.names()


# ---- blocks of diffusers -------------------------------------------------------------------------


def hunyuan_single() -> tuple[Any, dict[str, Any]]:
    from diffusers.models.transformers import transformer_hunyuan_video as own

    block = own.HunyuanVideoSingleTransformerBlock(2, 64, mlp_ratio=2.0)
    return block, prologues.flux()[1]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "made", [prologues.flux_single, pytest.param(hunyuan_single, marks=pytest.mark.slow)]
)
def test_single_blocks_store_no_concatenation(
    made: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    block, given = made()
    block = block.to(HALF).requires_grad_(False)
    model = torch.nn.ModuleDict({"single_transformer_blocks": torch.nn.ModuleList([block])})
    config = ca.Int8Config(strategy="channel", min_elements_for_int8=1024, max_outlier_ratio=1.0)
    interop.replace_linear_with_int8(model, config=config, backend="mirror")
    _, graphs = run(
        lambda *given_: block(**dict(zip(given, given_, strict=True))), *given.values(),
        dynamic=dynamic, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert graphs.products()[-1]["right"] is not None
    assert graphs.products()[-1]["residual_below"] is not None
    assert NORMED in graphs.names() and CAT not in graphs.names()
    assert not any("tanh" in name for name in graphs.names())


# ---- the operators -------------------------------------------------------------------------------


def test_the_operators_keep_the_rules_of_operators() -> None:
    torch.manual_seed(0)
    own, x, right = layer(), tensors(2, 5, LEFT), tensors(2, 5, RIGHT, seed=1)
    weight = own.weight_codes, own.weight_scale, own.bias
    how = None, "mirror", None, None, right
    torch.library.opcheck(linear_parts.layer, (x, *weight, None, None, "silu", *how))
    lists = [[one] for one in weight]
    torch.library.opcheck(linear_parts.layers, (x, *lists, [""], *how))
    y = linear_parts.layer(x, *weight, None, None, "", *how)
    assert torch.equal(y, own(torch.cat([x, right], -1)))
    with pytest.raises(ca.UnsupportedError, match="right goes with rows that are"):
        linear_parts.layer(x, *weight, None, None, "", None, "mirror", "hadamard", None, right)
