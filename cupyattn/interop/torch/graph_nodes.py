"""Answer the questions of Inductor passes about nodes: their values, and how shapes broadcast."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CONVERT = torch.ops.prims.convert_element_type.default


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


def is_length(node: Node) -> bool:
    """Whether a node computes a length, which reads no numbers of tensors."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def take_lengths_from_inputs(graph: Graph) -> None:
    """Let lengths that are symbols, or sums of them, be computed from the graph's inputs.

    Measured where they are used, they keep the tensor that they measure in the graph.
    """
    values = [(node, node.meta.get("val")) for node in graph.nodes]
    lengths = [(node, x.node.expr) for node, x in values if isinstance(x, torch.SymInt)]
    given = {expr: node for node, expr in lengths if node.op == "placeholder"}
    for node, expr in lengths:
        parts = expr.args if expr.is_Add else (expr,)
        if node.target is not torch.ops.aten.sym_size.int or not all(one in given for one in parts):
            continue
        found, *others = (given[one] for one in parts)
        with graph.inserting_before(node):
            for other in others:
                found = insert(graph, operator.add, found, other)
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def are_alone(nodes: set[Node], ends: Collection[Node]) -> bool:
    """Whether nodes have no readers but each other, except the ends."""
    inner = (node for node in nodes if node not in ends)
    return all(user in nodes or is_length(user) for node in inner for user in node.users)


def only_reader(node: Node | None) -> Any:
    """Return the only reader of a node, or None."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def other_operand(node: Node | None, target: Any, own: Node) -> Node | None:
    """Return the other operand of a product or sum of two tensors, or None."""
    if node is None or node.target is not target or node.kwargs:
        return None
    others = [x for x in node.args if x is not own]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def is_float(node: Any) -> bool:
    """Whether an object is a node whose value is a tensor of `FLOATS`."""
    return isinstance(node, Node) and getattr(value_of(node), "dtype", None) in FLOATS


def unconverted(x: Node) -> Node:
    """Return the node that was converted to float32, which has the same values."""
    source = x.args[0] if x.target is CONVERT and value_of(x).dtype == torch.float32 else None
    return source if isinstance(source, Node) and is_float(source) else x


def insert(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of an operator of torch, and compute its fake tensor."""
    from torch._inductor.virtualized import V

    node = graph.call_function(target, args, kwargs)
    with V.fake_mode:  # or an operator without operands would make a real tensor
        node.meta["val"] = target(*map_arg(args, value_of), **kwargs)
    return node


def wide(graph: Graph, x: Node) -> Node:
    """Return a node in float32, converted in the graph if necessary."""
    return x if value_of(x).dtype == torch.float32 else insert(graph, CONVERT, x, torch.float32)


def insert_call(graph: Graph, target: Any, args: tuple[Any, ...], val: Any) -> Node:
    """Insert a call whose operands keep their present strides; `val` is its fake result."""
    node = graph.call_function(target, args)
    node.meta["val"] = val
    if target is not operator.getitem:
        keep_strides(node)
    return node


def keep_strides(call: Node) -> None:
    """Let the operands of a call keep their present strides."""
    call.meta["eager_input_vals"] = map_arg(call.args, value_of), {}
