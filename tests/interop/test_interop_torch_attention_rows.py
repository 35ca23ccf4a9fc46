"""Norms and rotary embeddings of Q and K that become part of attention in Inductor's graphs.

Graphs run as Inductor's passes leave them, as in `test_interop_torch_epilogues`. Attention then has
the raw rows, weights and tables, so results have the bits of `attention` with `qk_norm` and `rope`.
Its error is compared with that of the model's own operations, in float64.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.marks import slow

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
epilogues = importlib.import_module("tests.interop.test_interop_torch_epilogues")
interop = importlib.import_module("cupyattn.interop.torch")
operator = importlib.import_module("cupyattn.interop.diffusers.operator")
calls = importlib.import_module("cupyattn.interop.torch.calls")
embeddings = importlib.import_module("diffusers.models.embeddings")
normalization = importlib.import_module("diffusers.models.normalization")

fresh, run, Graphs = epilogues.fresh, epilogues.run, epilogues.Graphs  # `fresh` runs by itself
BATCH, LENGTH, HEADS, WIDTH = 2, 12, 2, 16
TEXT = operator.text_of(calls.TensorSettings.of(backend="mirror"))
NAME = "diffusers_attention"


def tensors(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(made).to(dtype)


def rows(count: int = 3) -> list[Any]:
    return [tensors(BATCH, LENGTH, HEADS, WIDTH, seed=n) for n in range(count)]


def flat(*given: Any) -> list[Any]:
    """Rows as a layer returns them, (batch, len, heads x head_dim)."""
    return [x.flatten(2) for x in given]


def of_any_length(length: int, *given: Any) -> None:
    """Let graphs not depend on a number of positions."""
    for x in given:
        torch._dynamo.mark_dynamic(x, x.shape.index(length))


def of_heads(*given: Any) -> list[Any]:
    return [x.unflatten(2, (HEADS, WIDTH)) for x in given]


def angles(length: int = LENGTH, seed: int = 9) -> tuple[Any, Any]:
    """Cosines and sines of a random angle for each pair, (length, WIDTH / 2), float32."""
    found = tensors(length, WIDTH // 2, dtype=torch.float64, seed=seed)
    return found.cos().float(), found.sin().float()


def attend(q: Any, k: Any, v: Any, text: str = TEXT) -> Any:
    """Attention of a layer, of (batch, len, heads, head_dim)."""
    given = dict(zip("qkv", (x.permute(0, 2, 1, 3) for x in (q, k, v)), strict=True))
    return operator.attend(given, None, text)


def expected(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return interop.attention(*(x.transpose(1, 2) for x in (q, k, v)), backend="mirror", **options)


def arguments(graphs: Any) -> list[dict[str, Any]]:
    """The arguments of attention in the last graph, by name."""
    nodes = [n for n in graphs[-1].graph.nodes if NAME in str(n.target)]
    names = [one.name for one in torch.ops.cupyattn.diffusers_attention.default._schema.arguments]
    return [dict(zip(names, n.args, strict=True)) for n in nodes]


def is_taken(graphs: Any) -> list[tuple[bool, bool]]:
    """Whether each attention rotates rows, and whether it normalises them."""
    wanted = ("rope_cos", "q_norm_weight")
    return [tuple(one[name] is not None for name in wanted) for one in arguments(graphs)]


# ---- rotations as models write them --------------------------------------------------------------


def wan(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out.type_as(x)


def kandinsky(x: Any, matrices: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2).to(torch.float32)
    return (matrices * pairs).sum(dim=-1).reshape(*x.shape).to(x.dtype)


def halves(x: Any, cos: Any, sin: Any) -> Any:
    """As language models write it."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def by_columns(dim: int) -> Callable[..., Any]:
    return lambda x, cos, sin: embeddings.apply_rotary_emb(
        x, (cos, sin), use_real_unbind_dim=dim, sequence_dim=1
    )


def complex_numbers(x: Any, factors: Any) -> Any:
    return embeddings.apply_rotary_emb(x, factors, use_real=False)


def twice(x: Any) -> Any:
    return x.repeat_interleave(2, -1)


def behind(x: Any) -> Any:
    return torch.cat((x, x), -1)


def matrices_of(cos: Any, sin: Any) -> Any:
    return torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))


#: The rotation of rows, its tables from cosines and sines of pairs, the tables that attention
#: should get of these, and whether pairs are interleaved.
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any], bool]] = {
    "Wan": (wan, lambda c, s: [twice(x)[None, :, None] for x in (c, s)], lambda x: x, True),
    "Flux": (by_columns(-1), lambda c, s: [twice(c), twice(s)], twice, True),
    "CogView": (by_columns(-2), lambda c, s: [behind(c), behind(s)], behind, False),
    "LLaMA": (halves, lambda c, s: [behind(x)[None, :, None] for x in (c, s)], behind, False),
    "Z-Image": (complex_numbers, lambda c, s: [torch.complex(c, s)[None]], lambda x: x, True),
    "Kandinsky": (kandinsky, lambda c, s: [matrices_of(c, s)[None, :, None]], twice, True),
}


def exact(q: Any, k: Any, v: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Attention of rotated rows in float64."""

    def turned(x: Any) -> Any:
        x = x.double()
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        c, s = (t.double()[:, None] for t in (cos, sin))
        pair = first * c - second * s, second * c + first * s
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    q, k, v = (x.transpose(1, 2) for x in (turned(q), turned(k), v.double()))
    return (q @ k.mT / math.sqrt(WIDTH)).softmax(-1) @ v


@pytest.mark.parametrize("name", FORMS)
def test_a_rotation_is_part_of_attention(name: str) -> None:
    rotate, tables_of, given_of, interleaved = FORMS[name]
    q, k, v = rows()
    cos, sin = angles()

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attend(rotate(q, *tables), rotate(k, *tables), v)

    found, graphs = run(function, q, k, v, *tables_of(cos, sin))
    assert is_taken(graphs) == [(True, False)]
    own = {"rope": (given_of(cos), given_of(sin)), "rope_interleaved": interleaved}
    assert torch.equal(found, expected(q, k, v, **own))
    wanted = exact(q, k, v, cos, sin, interleaved)
    eager = function(q, k, v, *tables_of(cos, sin))
    assert (found - wanted).norm() <= (eager - wanted).norm()  # which rounds q and k


def test_tables_of_columns_may_differ_within_a_pair() -> None:
    rotate, *_ = FORMS["Flux"]
    q, k, v = rows()
    tables = [tensors(LENGTH, WIDTH, dtype=torch.float32, seed=n) for n in (5, 6)]
    found, graphs = run(
        lambda q, k, v, *t: attend(rotate(q, *t), rotate(k, *t), v), q, k, v, *tables
    )
    assert is_taken(graphs) == [(True, False)]
    assert torch.equal(found, expected(q, k, v, rope=tuple(tables), rope_interleaved=True))


@pytest.mark.parametrize("name", ["Flux", *slow(["Wan", "Z-Image"])])
def test_lengths_may_be_dynamic(name: str) -> None:
    rotate, tables_of, given_of, interleaved = FORMS[name]
    q, k, v = rows()
    cos, sin = angles()

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k, v = of_heads(q, k, v)
        return attend(rotate(q, *tables), rotate(k, *tables), v)

    arrays = *flat(q, k, v), *tables_of(cos, sin)
    of_any_length(LENGTH, *arrays)
    found, graphs = run(function, *arrays)
    assert is_taken(graphs) == [(True, False)]
    own = {"rope": (given_of(cos), given_of(sin)), "rope_interleaved": interleaved}
    assert torch.equal(found, expected(q, k, v, **own))


# ---- norms ---------------------------------------------------------------------------------------


def norm(kind: Any, seed: int = 3, eps: float = 1e-5) -> Any:
    made = kind(WIDTH, eps=eps).to(torch.bfloat16).requires_grad_(False)
    made.weight.data = tensors(WIDTH, seed=seed)
    return made


KINDS = {"torch": torch.nn.RMSNorm, "diffusers": normalization.RMSNorm}


@pytest.mark.parametrize("turned", ["rotated", "not rotated"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_each_head_is_part_of_attention(kind: str, turned: str) -> None:
    rotate, tables_of, given_of, interleaved = FORMS["Flux"]
    q, k, v = rows()
    cos, sin = angles()
    norms = [norm(KINDS[kind], seed) for seed in (3, 4)]
    rope = turned == "rotated"

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k = norms[0](q), norms[1](k)
        return attend(*(rotate(x, *tables) if rope else x for x in (q, k)), v)

    found, graphs = run(function, q, k, v, *tables_of(cos, sin))
    assert is_taken(graphs) == [(rope, True)]
    assert not any("rsqrt" in name or "pow" in name for name in graphs.names())
    own = {"rope": (given_of(cos), given_of(sin)), "rope_interleaved": interleaved} if rope else {}
    weights = tuple(one.weight for one in norms)
    assert torch.equal(found, expected(q, k, v, qk_norm=weights, qk_norm_eps=1e-5, **own))


#: Of the channels of all heads.
WEIGHTS = tuple(tensors(HEADS * WIDTH, seed=seed) for seed in (5, 6))


def of_all_heads(x: Any, weight: Any) -> Any:
    """As Wan normalises rows before it splits heads."""
    y = torch.nn.functional.rms_norm(x.flatten(2), weight.shape, weight, eps=1e-5)
    return y.unflatten(2, (HEADS, WIDTH))


@pytest.mark.parametrize("dynamic", [False, *slow([True])])
@pytest.mark.parametrize("name", ["Wan", "not rotated"])
def test_a_norm_of_all_heads_is_part_of_attention(name: str, dynamic: bool) -> None:
    rope = name in FORMS
    options = {"accuracy": "full" if rope else "balanced", "backend": "mirror"}
    text = operator.text_of(calls.TensorSettings.of(**options))
    rotate, tables_of, given_of, interleaved = FORMS["Wan"]
    q, k, v = rows()
    cos, sin = angles()

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k = (of_all_heads(x, w) for x, w in zip((q, k), WEIGHTS, strict=True))
        q, k = (rotate(x, *tables) if rope else x for x in (q, k))
        return attend(q, k, v.unflatten(2, (HEADS, WIDTH)), text)

    arrays = *flat(q, k, v), *tables_of(cos, sin)
    if dynamic:
        of_any_length(LENGTH, *arrays)
    found, graphs = run(function, *arrays)
    assert is_taken(graphs) == [(rope, True)]
    assert not any("rsqrt" in name or "pow" in name for name in graphs.names())
    own = {"accuracy": options["accuracy"]}
    if rope:
        own |= {"rope": (given_of(cos), given_of(sin)), "rope_interleaved": interleaved}
    assert torch.equal(found, expected(q, k, v, qk_norm=WEIGHTS, qk_norm_eps=1e-5, **own))
    wide = [of_all_heads(x.double(), w.double()) for x, w in zip((q, k), WEIGHTS, strict=True)]
    if rope:
        wanted, eager = exact(*wide, v, cos, sin, interleaved), function(*arrays)
        assert (found - wanted).norm() < (eager - wanted).norm()  # which rounds normalised rows


#: Settings of attention, and whether it makes codes of q and k.
CODED: dict[str, tuple[dict[str, Any], bool]] = {
    "a class on the host": ({"accuracy": "balanced"}, True),
    "a class on Hopper, of few keys": ({"accuracy": "balanced", "arch": "sm_90a"}, False),
    "16 bits": ({"accuracy": "full"}, False),
    "a rung of codes": ({"variant": "fa_int8"}, True),
}


@pytest.mark.parametrize("dynamic", [False, *slow([True])])
@pytest.mark.parametrize("name", CODED)
def test_a_norm_of_all_heads_stays_if_no_codes_are_made(name: str, dynamic: bool) -> None:
    """As in cross attention to a prompt. Where lengths are not known, attention takes it."""
    own, coded = CODED[name]
    text = operator.text_of(calls.TensorSettings.of(backend="mirror", **own))
    given = flat(*rows())

    def function(q: Any, k: Any, v: Any) -> Any:
        q, k = (of_all_heads(x, w) for x, w in zip(of_heads(q, k), WEIGHTS, strict=True))
        return attend(q, k, v.unflatten(2, (HEADS, WIDTH)), text)

    if dynamic:
        of_any_length(LENGTH, *given)
    _, graphs = run(function, *given)
    assert is_taken(graphs) == [(False, dynamic or coded)]
    assert any("rsqrt" in node for node in graphs.names()) != (dynamic or coded)


def in_float64(kind: Any, x: Any, weight: Any) -> Any:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def test_a_norm_and_a_rotation_err_less_than_the_models() -> None:
    """Nothing is rounded between them."""
    rotate, tables_of, *_ = FORMS["Z-Image"]
    q, k, v = rows()
    cos, sin = angles()
    norms = [norm(normalization.RMSNorm, seed) for seed in (3, 4)]

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attend(*(rotate(n(x), *tables) for n, x in zip(norms, (q, k), strict=True)), v)

    found, graphs = run(function, q, k, v, *tables_of(cos, sin))
    assert is_taken(graphs) == [(True, True)]
    wide = [in_float64(n, x, n.weight) for n, x in zip(norms, (q, k), strict=True)]
    wanted = exact(*wide, v, cos, sin, interleaved=True)
    eager = function(q, k, v, *tables_of(cos, sin))
    assert (found - wanted).norm() < (eager - wanted).norm()


def test_views_of_a_fused_product_are_read_in_place() -> None:
    rotate, tables_of, given_of, interleaved = FORMS["Flux"]
    fused, tables = tensors(BATCH, LENGTH, 3, HEADS, WIDTH), angles()
    norms = [norm(torch.nn.RMSNorm, seed) for seed in (3, 4)]

    def function(fused: Any, *tables: Any) -> Any:
        q, k, v = fused.unbind(2)
        return attend(rotate(norms[0](q), *tables), rotate(norms[1](k), *tables), v)

    found, graphs = run(function, fused, *tables_of(*tables))
    [own] = arguments(graphs)
    for name in "qkv":
        assert own[name].meta["val"].stride() == fused.unbind(2)[0].transpose(1, 2).stride()
    copies = ("clone", "cat", "contiguous", "copy")
    assert not any(word in name for name in graphs.names() for word in copies)
    assert found.stride() == (LENGTH * HEADS * WIDTH, WIDTH, HEADS * WIDTH, 1)
    assert torch.equal(found, expected(
        *fused.unbind(2), qk_norm=tuple(one.weight for one in norms), qk_norm_eps=1e-5,
        rope=tuple(map(given_of, tables)), rope_interleaved=interleaved,
    ))  # fmt: skip


# ---- text and image ------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, *slow([True])])
def test_parts_with_tables_of_their_own_are_rotated_together(dynamic: bool) -> None:
    """As text and image of Qwen-Image, whose norms have other weights.

    Norms stay where the length of a part is a symbol.
    """
    rotate, tables_of, *_ = FORMS["Z-Image"]
    text, image = ([tensors(1, n, HEADS, WIDTH, seed=n + i) for i in range(3)] for n in (5, 8))
    angle = [angles(n, seed=n) for n in (5, 8)]
    norms = [norm(normalization.RMSNorm, seed) for seed in range(4)]

    def function(text: Any, image: Any, *tables: Any) -> Any:
        text, image = of_heads(*text), of_heads(*image)
        parts = [
            [rotate(norms[2 * of + i](x), table) for i, x in enumerate(own[:2])]
            for of, (own, table) in enumerate(zip((text, image), tables, strict=True))
        ]
        q, k = (torch.cat(pair, 1) for pair in zip(*parts, strict=True))
        return attend(q, k, torch.cat((text[2], image[2]), 1))

    tables = [tables_of(*own)[0] for own in angle]
    parts = [flat(*own) for own in (text, image)]
    for length, own, table in zip((5, 8), parts, tables, strict=True) if dynamic else ():
        of_any_length(length, *own, table)
    found, graphs = run(function, *parts, *tables)
    assert is_taken(graphs) == [(True, not dynamic)]
    assert graphs.names().count("aten.rsqrt.default") == 4 * dynamic
    q, k, v = (torch.cat(pair, 1) for pair in zip(text, image, strict=True))
    options: Any = {"rope": tuple(torch.cat([own[i] for own in angle]) for i in (0, 1))}
    if dynamic:
        q, k = (
            torch.cat([norms[2 * of + i](own[i]) for of, own in enumerate((text, image))], 1)
            for i in (0, 1)
        )
    else:
        weights = (torch.stack([norms[2 * of + i].weight for of in (0, 1)]) for i in (0, 1))
        options |= {"qk_norm": tuple(weights), "qk_norm_eps": 1e-5, "qk_norm_split": 5}
    assert torch.equal(found, expected(q, k, v, rope_interleaved=True, **options))


@pytest.mark.parametrize("dynamic", [False, *slow([True])])
@pytest.mark.parametrize("one_norm", [False, True])
def test_a_part_that_is_not_rotated_is_turned_by_nothing(one_norm: bool, dynamic: bool) -> None:
    """As the text of HunyuanVideo, in single blocks behind the norm of both."""
    rotate, tables_of, given_of, _ = FORMS["Flux"]
    q, k, v = rows()
    cos, sin = angles(LENGTH - 5)
    norms = [norm(normalization.RMSNorm, seed) for seed in (3, 4)]

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k, v = of_heads(q, k, v)
        if one_norm:
            q, k = norms[0](q), norms[1](k)
        parts = ((rotate(x[:, :-5], *tables), x[:, -5:]) for x in (q, k))
        return attend(*(torch.cat(pair, 1) for pair in parts), v)

    packed, tables = flat(q, k, v), tables_of(cos, sin)
    if dynamic:
        of_any_length(LENGTH, *packed)
        of_any_length(LENGTH - 5, *tables)
    found, graphs = run(function, *packed, *tables)
    assert is_taken(graphs) == [(True, one_norm)]
    joined = [n for n in graphs[-1].graph.nodes if n.target is torch.ops.aten.cat.default]
    assert {n.meta["val"].dtype for n in joined} == {torch.float32}  # tables alone
    whole = (torch.cat([given_of(x), torch.full((5, WIDTH), n)]) for x, n in ((cos, 1), (sin, 0)))
    options: Any = {"rope": tuple(whole), "rope_interleaved": True}
    if one_norm:
        options |= {"qk_norm": tuple(one.weight for one in norms), "qk_norm_eps": 1e-5}
    assert torch.equal(found, expected(q, k, v, **options))


def test_slices_in_another_order_are_concatenated() -> None:
    rotate, tables_of, given_of, _ = FORMS["Flux"]
    q, k, v = rows()
    cos, sin = angles(5)

    def exchanged(x: Any, *tables: Any) -> Any:
        return torch.cat((x[:, 5:], rotate(x[:, :5], *tables) if tables else x[:, :5]), -3)

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attend(exchanged(q, *tables), exchanged(k, *tables), v)

    found, graphs = run(function, q, k, v, *tables_of(cos, sin))
    assert is_taken(graphs) == [(True, False)]
    none = (torch.full((LENGTH - 5, WIDTH), n) for n in (1, 0))
    rope = tuple(torch.cat((x, given_of(y))) for x, y in zip(none, (cos, sin), strict=True))
    own = {"rope": rope, "rope_interleaved": True}
    assert torch.equal(found, expected(exchanged(q), exchanged(k), v, **own))


# ---- what stays ----------------------------------------------------------------------------------


def plain(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    rotate = by_columns(-1)
    return attend(rotate(q, cos, sin), rotate(k, cos, sin), v)


def reads_rotated_rows(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    q = by_columns(-1)(q, cos, sin)
    return attend(q, by_columns(-1)(k, cos, sin), v), q


def reads_products(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    product = q.float() * cos[None, :, None]
    first, second = q.unflatten(-1, (-1, 2)).unbind(-1)
    swapped = torch.stack((-second, first), -1).flatten(3)
    turned = (product + swapped.float() * sin[None, :, None]).to(q.dtype)
    return attend(turned, by_columns(-1)(k, cos, sin), v), product


def of_each_head(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    """As LTX, whose tables go over all heads."""

    def rotate(x: Any) -> Any:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        swapped = torch.stack((-second, first), -1).flatten(3)
        heads = [torch.stack((t, t.flip(0)), 1)[None] for t in (cos, sin)]
        return (x.float() * heads[0] + swapped.float() * heads[1]).to(x.dtype)

    return attend(rotate(q), rotate(k), v)


def turned_back(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    def rotate(x: Any) -> Any:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        swapped = torch.stack((second, -first), -1).flatten(3)
        return (x.float() * cos[:, None] + swapped.float() * sin[:, None]).to(x.dtype)

    return attend(rotate(q), rotate(k), v)


def without_sign(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        swapped = torch.cat((second, first), -1)
        return (x.float() * cos[:, None] + swapped.float() * sin[:, None]).to(x.dtype)

    return attend(rotate(q), rotate(k), v)


#: Calls that stay as they are.
OTHERS: dict[str, Callable[..., Any]] = {
    "the rotated rows have another reader": reads_rotated_rows,
    "a product has another reader": reads_products,
    "tables of each head": of_each_head,
    "tables of each sample": lambda q, k, v, cos, sin: attend(
        *(halves(x, *(torch.stack((t, -t))[:, :, None] for t in (cos, sin))) for x in (q, k)), v
    ),
    "other tables for k": lambda q, k, v, cos, sin: attend(
        by_columns(-1)(q, cos, sin), by_columns(-1)(k, sin, cos), v
    ),
    "other pairs for k": lambda q, k, v, cos, sin: attend(
        by_columns(-1)(q, cos, sin), by_columns(-2)(k, cos, sin), v
    ),
    "q alone": lambda q, k, v, cos, sin: attend(by_columns(-1)(q, cos, sin), k, v),
    "turned the other way": turned_back,
    "halves without a sign": without_sign,
    "tables of 16 bits": lambda q, k, v, cos, sin: attend(
        *(halves(x, cos[:, None].bfloat16(), sin[:, None].bfloat16()) for x in (q, k)), v
    ),
    "tables of float64": lambda q, k, v, cos, sin: attend(
        *(halves(x, cos[:, None].double(), sin[:, None].double()) for x in (q, k)), v
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rotation_that_attention_does_not_have_stays(name: str) -> None:
    q, k, v = rows()
    tables = [twice(x) for x in angles()]
    found, graphs = run(OTHERS[name], q, k, v, *tables)
    assert is_taken(graphs) == [(False, False)]
    eager = OTHERS[name](q, k, v, *tables)
    for one, other in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (found, eager)), strict=True
    ):
        assert torch.equal(one, other)
    _, graphs = run(plain, q, k, v, *tables)
    assert is_taken(graphs) == [(True, False)]


FIRST, SECOND = (norm(torch.nn.RMSNorm, seed) for seed in (3, 4))
CLOSER = norm(torch.nn.RMSNorm, eps=1e-6)


def read_elsewhere(q: Any, k: Any) -> Any:
    q = FIRST(q)
    return q, SECOND(k), q


#: Norms that stay in front of attention: q, k and further results.
OTHER_NORMS: dict[str, Callable[..., Any]] = {
    "the normalised rows have another reader": read_elsewhere,
    "q alone": lambda q, k: (FIRST(q), k),
    "another eps for k": lambda q, k: (FIRST(q), CLOSER(k)),
    "no weights": lambda q, k: [
        torch.nn.functional.rms_norm(x, (WIDTH,), eps=1e-5) for x in (q, k)
    ],
    "of all heads for k": lambda q, k: (FIRST(q), of_all_heads(k, WEIGHTS[1])),
    "LayerNorm": lambda q, k: [
        torch.nn.functional.layer_norm(x, (WIDTH,), FIRST.weight, eps=1e-5) for x in (q, k)
    ],
}


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_a_norm_that_attention_does_not_have_stays(name: str, rope: bool) -> None:
    """The rotation behind it is part of attention."""
    q, k, v = rows()
    tables = [twice(x) for x in angles()]

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k, *more = OTHER_NORMS[name](q, k)
        return (plain(q, k, v, *tables) if rope else attend(q, k, v)), *more

    (found, *more), graphs = run(function, q, k, v, *tables)
    assert is_taken(graphs) == [(rope, False)]
    q, k, *_ = OTHER_NORMS[name](q, k)
    options: Any = {"rope": tuple(tables), "rope_interleaved": True} if rope else {}
    assert torch.equal(found, expected(q, k, v, **options))
    assert not more or torch.equal(more[0], q)


# ---- the operator --------------------------------------------------------------------------------


def test_the_operator_with_raw_rows_keeps_the_rules_of_operators() -> None:
    q, k, v = (x.transpose(1, 2) for x in rows())
    weights = [torch.ones(WIDTH), torch.ones(WIDTH)]
    settings = calls.TensorSettings.of(backend="mirror", rope_interleaved=True)
    args = (q, k, v, None, None, *angles(), *weights, None, 0, False, operator.text_of(settings))
    torch.library.opcheck(torch.ops.cupyattn.diffusers_attention.default, args)


def test_raw_rows_fall_back_to_16_bits() -> None:
    """With the same tables."""
    q, k, v = (x.transpose(1, 2) for x in rows())
    cos, sin = angles()
    settings = calls.TensorSettings.of(backend="mirror", rope_interleaved=True, variant="fa_int8")
    own = torch.ops.cupyattn.diffusers_attention
    args = q, k, v, None, None, cos, sin, None, None, None, 0, False, operator.text_of(settings)
    real, refused = operator.forward, []

    def forward(settings: Any, tensors: Any) -> Any:
        if settings.of_call.variant == "fa_int8":
            refused.append(settings)
            raise operator.UnsupportedError("not here")
        return real(settings, tensors)

    with mock.patch.multiple(operator, forward=forward, fallbacks=Counter()):
        found = own(*args)
        assert operator.fallbacks == {"not here": 1} and len(refused) == 1
    assert torch.equal(found, interop.attention(
        q, k, v, rope=(cos, sin), rope_interleaved=True, backend="mirror"
    ))  # fmt: skip


# ---- Inductor's code -----------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_runs_attention_of_raw_rows() -> None:
    """Its code, too; the other tests have its graph."""
    rotate, tables_of, *_ = FORMS["Wan"]
    q, k, v = rows()
    norms = [norm(torch.nn.RMSNorm, seed) for seed in (3, 4)]
    cos, sin = angles()

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attend(rotate(norms[0](q), *tables), rotate(norms[1](k), *tables), v)

    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True)
        found, [code] = run_and_get_code(compiled, q, k, v, *tables_of(cos, sin))
    assert "qk_norm_eps=9.99999" in code and "rope_interleaved=True" in code
    assert torch.equal(found, expected(
        q, k, v, qk_norm=tuple(one.weight for one in norms), qk_norm_eps=1e-5,
        rope=(cos, sin), rope_interleaved=True,
    ))  # fmt: skip
