"""Rows of Q and K in parts, text and image, before attention in Inductor's graphs.

Attention gets one pair of tables for all parts, in which parts that are not rotated are turned by
nothing. So these must have their rows, in the order of the parts. Two parts may have norms with
weights of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
attention = importlib.import_module("tests.interop.test_interop_torch_attention_rows")
fresh, run, rows = attention.fresh, attention.run, attention.rows  # `fresh` runs by itself
LENGTH, ROTATED = attention.LENGTH, 5


def around(x: Any, first: int, tables: Any) -> Any:
    """Rows of which some, from one on, are rotated."""
    end = first + ROTATED
    turned = attention.by_columns(-1)(x[:, first:end], *tables)
    return torch.cat((x[:, :first], turned, x[:, end:]), 1)


def wide_tables(length: int) -> list[Any]:
    return [attention.twice(x) for x in attention.angles(length)]


def test_parts_are_rotated_at_their_own_places() -> None:
    """Rotated rows begin elsewhere in the second call, and in k of the third."""
    places = (3, 3), (4, 4), (3, 4)

    def function(q: Any, k: Any, v: Any, *tables: Any) -> list[Any]:
        pairs = [(around(q, m, tables), around(k, n, tables)) for m, n in places]
        return [attention.attend(*pair, v) for pair in pairs]

    given = *rows(), *wide_tables(ROTATED)
    found, graphs = run(function, *given)
    assert attention.is_taken(graphs) == [(True, False), (True, False), (False, False)]
    assert all(map(torch.equal, found, function(*given)))


def test_widths_of_tables_may_be_symbols() -> None:
    """As of Wan, whose rotation takes every second column of its tables."""
    own, tables = rows(), attention.angles(ROTATED)
    given = *attention.flat(*own), *(attention.twice(x)[None, :, None] for x in tables)

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        q, k, v = attention.of_heads(q, k, v)
        ends = (torch.cat((attention.wan(x[:, :5], *tables), x[:, 5:]), 1) for x in (q, k))
        return attention.attend(*ends, v)

    for table in given[3:]:
        torch._dynamo.mark_dynamic(table, 3)
    found, graphs = run(function, *given)
    assert attention.is_taken(graphs) == [(True, False)]
    none = (torch.full((LENGTH - 5, attention.WIDTH // 2), n) for n in (1.0, 0.0))
    rope = tuple(torch.cat(pair) for pair in zip(tables, none, strict=True))
    assert torch.equal(found, attention.expected(*own, rope=rope, rope_interleaved=True))


def test_rows_of_one_head_may_be_permuted_between_norm_and_rotation() -> None:
    """Both orders of axes have the same strides, but positions are another axis."""
    q, k, v = (x[:, :, :1].contiguous() for x in rows())
    tables = wide_tables(LENGTH - 5)
    norms = [attention.norm(attention.normalization.RMSNorm, seed) for seed in (3, 4)]

    def end(x: Any, norm: Any, tables: Any) -> Any:
        x = norm(x).transpose(1, 2)
        turned = attention.embeddings.apply_rotary_emb(x[:, :, 5:], tables, sequence_dim=2)
        return torch.cat((x[:, :, :5], turned), 2).transpose(1, 2)

    def function(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return attention.attend(end(q, norms[0], tables), end(k, norms[1], tables), v)

    found, graphs = run(function, q, k, v, *tables)
    assert attention.is_taken(graphs) == [(True, True)]
    none = (torch.full((5, attention.WIDTH), n) for n in (1.0, 0.0))
    rope = tuple(torch.cat(pair) for pair in zip(none, tables, strict=True))
    own = {"qk_norm": tuple(one.weight for one in norms), "qk_norm_eps": 1e-5}
    wanted = attention.expected(q, k, v, rope=rope, rope_interleaved=True, **own)
    assert torch.equal(found, wanted)


# ---- norms of two parts --------------------------------------------------------------------------

NORMS = [attention.norm(attention.normalization.RMSNorm, seed) for seed in range(4)]
OF_Q, OF_K = NORMS[:2], NORMS[2:]


def cut(x: Any) -> tuple[Any, Any]:
    """Two parts, each as a layer returns it."""
    return x[:, :ROTATED].contiguous(), x[:, ROTATED:].contiguous()


def flux(parts: Any, norms: Any, rotate: Any) -> Any:
    """One rotation of both parts."""
    return rotate(torch.cat([n(x) for n, x in zip(norms, parts, strict=True)], 1))


def hunyuan(parts: Any, norms: Any, rotate: Any) -> Any:
    """A rotation of one part."""
    return torch.cat((rotate(norms[0](parts[0])), norms[1](parts[1])), 1)


def by_head(parts: Any, norms: Any, rotate: Any) -> Any:
    """As SD3, without a rotation."""
    found = (n(x.transpose(1, 2)) for n, x in zip(norms, parts, strict=True))
    return torch.cat([*found], 2).transpose(1, 2)


def weights_of(*parts: Any) -> Any:
    return tuple(torch.stack([one.weight for one in own]) for own in parts)


def normed(
    end: Callable[..., Any], of_q: Any = OF_Q, of_k: Any = OF_K
) -> Callable[..., Any]:
    def function(*given: Any) -> Any:
        q, k, v = (given[2 * i : 2 * i + 2] for i in range(3))
        rotate = attention.by_columns(-1)
        q, k = (
            end(x, own, lambda x: rotate(x, *given[6:])) for x, own in ((q, of_q), (k, of_k))
        )
        return attention.attend(q, k, torch.cat(v, 1))

    return function


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("end", [flux, hunyuan])
def test_norms_of_two_parts_are_part_of_attention(end: Callable[..., Any], batch: int) -> None:
    parts = [part[:batch] for x in rows() for part in cut(x)]
    tables = wide_tables(ROTATED if end is hunyuan else LENGTH)
    function = normed(end)
    found, graphs = run(function, *parts, *tables)
    assert attention.is_taken(graphs) == [(True, True)]
    assert not any("rsqrt" in name or "pow" in name for name in graphs.names())
    own: dict[str, Any] = {"qk_norm": weights_of(OF_Q, OF_K), "qk_norm_eps": 1e-5}
    if end is hunyuan:
        none = (torch.full((LENGTH - ROTATED, attention.WIDTH), n) for n in (1.0, 0.0))
        tables = [torch.cat(pair) for pair in zip(tables, none, strict=True)]
    own |= {"rope": tuple(tables), "rope_interleaved": True}
    q, k, v = (torch.cat(parts[i : i + 2], 1) for i in (0, 2, 4))
    wanted = attention.expected(q, k, v, qk_norm_split=ROTATED, **own)
    assert torch.equal(found, wanted)


def test_a_result_that_is_read_by_token_is_not_copied() -> None:
    """As the layer behind joint attention of SD3 reads it."""
    parts = [part[:1] for x in rows() for part in cut(x)]

    def function(*given: Any) -> Any:
        q, k, v = (given[i : i + 2] for i in (0, 2, 4))
        ends = (by_head(x, own, None) for x, own in ((q, OF_Q), (k, OF_K)))
        o = attention.attend(*ends, by_head(v, (lambda x: x,) * 2, None))
        return o.transpose(1, 2).flatten(2) * 2

    found, graphs = run(function, *parts)
    assert attention.is_taken(graphs) == [(False, True)]
    assert "aten.clone.default" not in graphs.names()
    q, k, v = (torch.cat(parts[i : i + 2], 1) for i in (0, 2, 4))
    own = {"qk_norm": weights_of(OF_Q, OF_K), "qk_norm_eps": 1e-5, "qk_norm_split": ROTATED}
    wanted = attention.expected(q, k, v, **own).transpose(1, 2).flatten(2) * 2
    assert torch.equal(found, wanted)


CLOSER = attention.norm(attention.normalization.RMSNorm, eps=1e-6)


def in_three(parts: Any, norms: Any, rotate: Any) -> Any:
    own = (parts[0], parts[1][:, :2], parts[1][:, 2:])
    return torch.cat([n(x) for n, x in zip((*norms, norms[0]), own, strict=True)], 1)


def of_one(parts: Any, norms: Any, rotate: Any) -> Any:
    return torch.cat((norms[0](parts[0]), parts[1]), 1)


def of_tokens(parts: Any, norms: Any, rotate: Any) -> Any:
    own = (attention.of_all_heads(x, attention.WEIGHTS[0]) for x in parts)
    return torch.cat([*own], 1)


#: Norms of parts that stay: the rows, and norms of q and of k.
STAY: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "three parts": (in_three, OF_Q, OF_K),
    "one part alone": (of_one, OF_Q, OF_K),
    "another eps for a part": (flux, (OF_Q[0], CLOSER), (OF_K[0], CLOSER)),
    "another eps for k": (flux, OF_Q, (CLOSER, CLOSER)),
    "of all heads": (of_tokens, OF_Q, OF_K),
    "a result that is read by head": (by_head, OF_Q, OF_K),
}


@pytest.mark.parametrize("name", STAY)
def test_norms_of_parts_that_attention_does_not_have_stay(name: str) -> None:
    function = normed(*STAY[name])
    parts = [part for x in rows() for part in cut(x)]
    given = *parts, *wide_tables(LENGTH)
    found, graphs = run(function, *given)
    assert attention.is_taken(graphs) == [(name.startswith("another"), False)]
    assert any("rsqrt" in one for one in graphs.names())
    eager = function(*given)
    if name.startswith("another"):  # with a rotation in float32
        assert (found - eager).norm() < 2e-2 * eager.norm()
    else:
        assert torch.equal(found, eager)


def test_parts_of_other_lengths_in_k_stay() -> None:
    q, k, v = rows()

    def function(q: Any, k: Any, v: Any) -> Any:
        of_k = (OF_K[0](k[:, :4]), OF_K[1](k[:, 4:]))
        return attention.attend(flux(cut(q), OF_Q, lambda x: x), torch.cat(of_k, 1), v)

    found, graphs = run(function, q, k, v)
    assert attention.is_taken(graphs) == [(False, False)]
    assert torch.equal(found, function(q, k, v))
