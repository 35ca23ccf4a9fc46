"""Activations in Inductor's graphs: the nodes that a function of torch becomes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from cupyattn.interop.torch.graph_nodes import only_reader, other_operand, same, value_of
from cupyattn.quant.activation import GATE_LAST, GLU

#: Functions that a product may end with, as models call them.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
#: Gated linear units by their activation, and by whether their gate is the second half.
_GATED = {(kind, name in GATE_LAST): name for name, kind in GLU.items()}
_aten = torch.ops.aten
#: Operators that split a result.
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)


#: Most nodes between an activation's result and its input, and most nodes that are looked at.
_FARTHEST, _MOST_NODES = 16, 64


@functools.cache
def pattern(activation: str, dtype: torch.dtype) -> tuple[Node, ...]:
    """Return the nodes of an activation, its input first, as Inductor decomposes the function."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    def function(x: Tensor) -> Tensor:
        return FUNCTIONS[activation](x)

    # Nodes of a transform that is under way, such as torch.func.grad, would be part of the pattern.
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        traced = make_fx(function, decomposition_table=select_decomp_table())
        graph = traced(torch.zeros(1, dtype=dtype)).graph
    return tuple(node for node in graph.nodes if node.op != "output")


def activated(start: Node, *, alone: bool = True) -> tuple[Node, str] | None:
    """Return the last node of an activation of a node, and which it is.

    Parameters
    ----------
    start : Node
    alone : bool
        Whether nothing else may read `start`.
    """
    for name in FUNCTIONS:
        found = _after(start, pattern(name, value_of(start).dtype), alone=alone)
        if found is not None:
            return found, name
    return None


def gated(layer: Node) -> tuple[Node, str] | None:
    """Return the product of one half of a layer's columns, activated, and the other half."""
    halves = _halves(layer)
    if len(halves) != 2:
        return None
    for gate, other in (halves, halves[::-1]):
        end, kind = activated(gate) or (gate, "")
        product = only_reader(end)
        own = other_operand(product, _aten.mul.Tensor, end) is other
        if kind and own and only_reader(other) is product:
            value = value_of(product)
            if same(value.stride(), value.new_empty(value.shape).stride()):
                return product, _GATED[kind, gate is halves[1]]
    return None


def _halves(layer: Node) -> list[Node]:
    """Return both halves of a layer's columns, in order, if nothing reads anything else of it."""
    like, users = value_of(layer), list(layer.users)
    if len(users) == 1 and users[0].target in _SPLITS:
        users = list(users[0].users)
    columns = like.shape[-1] if like.dim() else 0
    taken = all(user.target in (operator.getitem, _aten.slice.Tensor) for user in users)
    if not taken or len(users) != 2 or not isinstance(columns, int) or columns % 2:
        return []
    form = (*like.shape[:-1], columns // 2)

    def begins_at(user: Node, column: int) -> bool:
        half = value_of(user)
        lies = (half.storage_offset(), *half.stride())
        return same(half.shape, form) and same(lies, (column, *like.stride()))

    ends = (next((u for u in users if begins_at(u, at)), None) for at in (0, columns // 2))
    return [user for user in ends if user is not None]


def activation_before(end: Node) -> tuple[Node, str] | None:
    """Return the node of which another is the activation or gated linear unit, and which."""
    nodes, seen = [end], {end}
    for _ in range(_FARTHEST):
        nodes = [*dict.fromkeys(x for node in nodes for x in node.all_input_nodes)]
        nodes = [x for x in nodes if x not in seen]
        for start in nodes:
            like = start.meta.get("val")
            if not isinstance(like, Tensor) or not like.is_floating_point():
                continue
            found = activated(start, alone=False) or gated(start)
            if found is not None and found[0] is end:
                return start, found[1]
        seen.update(nodes)
        if len(seen) > _MOST_NODES:
            return None
    return None


def _after(start: Node, pattern: tuple[Node, ...], *, alone: bool) -> Node | None:
    """Return the last node of a pattern that begins at a node, and that nothing else reads."""
    found = {pattern[0]: start}
    for node in pattern[1:]:
        args = map_arg(node.args, found.__getitem__)
        readers: Iterator[Node] = iter(next(a for a in args if isinstance(a, Node)).users)
        same = (u for u in readers if u.target is node.target and u.args == args)
        match = next((u for u in same if u.kwargs == node.kwargs), None)
        if match is None:
            return None
        found[node] = match
    *inner, end = found.values()
    own = inner if alone else inner[1:]
    return end if all(set(node.users) <= {*inner, end} for node in own) else None
