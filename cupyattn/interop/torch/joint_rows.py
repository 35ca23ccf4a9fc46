"""A pass over Inductor's graph that lets layers write their rows where they lie side by side.

Joint attention concatenates tokens of two streams, text and image, each with separate layers. The
layers of both then write into one tensor (``int8_normed_layers_into``), and nothing is copied. A
batch of one is needed, so that the rows of a stream are adjacent. Lengths must not be symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cupyattn.interop.torch import linear_parts
from cupyattn.interop.torch.concatenations import concatenated
from cupyattn.interop.torch.graph_nodes import insert, insert_call, keep_strides, value_of

_aten = torch.ops.aten
_ATTENTION = "cupyattn.diffusers_attention.default"
#: Axis of tokens of a layer's result.
_TOKENS = 1


class _Joint(NamedTuple):
    """A concatenation of results of layers along their tokens.

    Parameters
    ----------
    end : Node
        The concatenation.
    parts : tuple of Node
        The layers' results, (1, tokens, channels).
    heads : tuple of int
        How each part's channels are split, (heads, head_dim), or (channels,).
    axes : tuple of int
        The permutation of axes behind that.
    """

    end: Node
    parts: tuple[Node, ...]
    heads: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows."""
        shapes = [value_of(x).shape for x in self.parts]
        return 1, sum(shape[_TOKENS] for shape in shapes), shapes[0][-1]


def join_rows(graph: Graph) -> None:
    """Let layers write into the concatenations of their results."""
    found: list[_Joint] = []
    taken: set[Node] = set()
    for node in graph.nodes:
        one = _joint(node)
        if one is not None and node.users and taken.isdisjoint(one.parts) and _can_be_replaced(one):
            taken.update(one.parts)
            found.append(one)
    into: dict[Node, Node] = {}
    order = {node: number for number, node in enumerate(graph.nodes)}
    for one in found:
        first = min((part.args[0] for part in one.parts), key=order.__getitem__)
        with graph.inserting_before(first):
            into |= _slices(graph, one)
        with graph.inserting_before(one.end):
            _replace(graph, one, into[one.parts[0]].args[0])
    for layers in dict.fromkeys(part.args[0] for part in into):
        _write_into(graph, layers, into)


def _joint(end: Node) -> _Joint | None:
    parts, axis = concatenated(end)
    seen = [_result(x) for x in parts]
    known = [one for one in seen if one is not None]
    if len(known) < 2 or len(known) < len(seen) or len({*known}) < len(known):
        return None
    if len({one[1:] for one in known}) > 1:
        return None
    _, heads, axes = known[0]
    results = tuple(one[0] for one in known)
    if axes[axis] != _TOKENS or len({value_of(x).dtype for x in results}) > 1:
        return None
    return _Joint(end, results, heads, axes)


def _result(node: Node) -> tuple[Node, tuple[int, ...], tuple[int, ...]] | None:
    """Return the result of layers that a node views, how its channels are split, and the axes."""
    axes = tuple(range(value_of(node).dim()))
    while node.target is _aten.permute.default:
        axes = tuple(node.args[1][i] for i in axes)
        node = node.args[0]
    heads = tuple(value_of(node).shape[2:])
    if node.target is _aten.reshape.default:
        rows = value_of(node).shape[:2]
        node = node.args[0]
        if value_of(node).shape[:2] != rows:
            return None
    if node.target is not operator.getitem or node.args[0].target != linear_parts.normed_layers:
        return None
    like = value_of(node)
    fixed = all(isinstance(n, int) for n in like.shape)
    return (node, heads, axes) if fixed and like.dim() == 3 and like.shape[0] == 1 else None


def _can_be_replaced(one: _Joint) -> bool:
    """Whether the concatenation has the strides of the new rows, or its readers take others."""
    like = torch.empty(one.shape, device="meta").reshape(*one.shape[:2], *one.heads)
    if like.permute(one.axes).stride() == value_of(one.end).stride():
        return True
    return all(_takes_any_strides(user, one.end) for user in one.end.users)


def _takes_any_strides(reader: Node, rows: Node) -> bool:
    """Whether a node is attention whose result has the same strides whatever these rows have."""
    return str(reader.target) == _ATTENTION and rows not in reader.args[:1]


# ---- the new nodes -------------------------------------------------------------------------------


def _slices(graph: Graph, one: _Joint) -> dict[Node, Node]:
    """Insert memory for all rows; return the rows of each part."""
    like = value_of(one.parts[0])
    rows = _insert_empty(graph, one.shape, like)
    found, begin = {}, 0
    for part in one.parts:
        end = begin + value_of(part).shape[_TOKENS]
        found[part] = insert(graph, _aten.slice.Tensor, rows, _TOKENS, begin, end)
        begin = end
    return found


def _insert_empty(graph: Graph, shape: Iterable[int], like: Any) -> Node:
    sizes = [*shape]
    strides = [*torch.empty(sizes, device="meta").stride()]
    return insert(
        graph, _aten.empty_strided.default, sizes, strides, dtype=like.dtype, device=like.device
    )


def _replace(graph: Graph, one: _Joint, rows: Node) -> None:
    """Let the readers of a concatenation read rows that all parts are written into."""
    new = insert(graph, _aten.reshape.default, rows, [*one.shape[:2], *one.heads])
    if one.axes != (*range(len(one.axes)),):
        new = insert(graph, _aten.permute.default, new, [*one.axes])
    if value_of(new).stride() == value_of(one.end).stride():
        one.end.replace_all_uses_with(new)
    for reader in list(one.end.users):
        reader.replace_input_with(one.end, new)
        keep_strides(reader)


def _write_into(graph: Graph, layers: Node, into: Mapping[Node, Node]) -> None:
    """Let layers write each result where it lies, or else into separate memory."""
    given = {part.args[1]: into[part] for part in layers.users if part in into}
    with graph.inserting_before(layers):
        out = [
            given.get(number) or _insert_empty(graph, like.shape, like)
            for number, like in enumerate(value_of(layers))
        ]
        insert_call(graph, linear_parts.normed_layers_into, (*layers.args, out), None)
    for part in list(layers.users):
        part.replace_all_uses_with(out[part.args[1]])
        graph.erase_node(part)
    graph.erase_node(layers)
