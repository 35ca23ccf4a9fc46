"""Rows of Q and K of which only parts are rotated, before attention in Inductor's graphs.

Attention gets one pair of tables for all parts, in which the other parts are turned by nothing. So
these must have their rows, in the order of the parts.
"""

from __future__ import annotations

import importlib
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
