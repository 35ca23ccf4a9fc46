"""Answer the questions of Inductor passes about nodes: their values, and how shapes broadcast."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def value_of(x: Any) -> Any:
    """Return the fake tensor of a node; other objects unchanged."""
    return x.meta["val"] if isinstance(x, Node) else x


def same(shape: Any, other: Any) -> bool:
    """Whether lengths are known to be equal, without a guard of the graph."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(shape) == len(other) and all(
        statically_known_true(n == m) for n, m in zip(shape, other, strict=True)
    )


def is_row_of_factors(gate: Any, like: Any) -> bool:
    """Whether a tensor is a row of factors, for all rows of a result or for each group of them."""
    own, of = tuple(gate.shape), tuple(like.shape)
    if not 1 <= len(own) <= len(of) or not same(own[-1:], of[-1:]):
        return False
    own = (*[1] * (len(of) - len(own)), *own[:-1])
    groups = 0
    while groups < len(own) and same(own[groups : groups + 1], of[groups : groups + 1]):
        groups += 1
    return same(own[groups:], [1] * (len(own) - groups))
