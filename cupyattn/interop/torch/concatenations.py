"""Recognise concatenations before INT8 layers and attention in Inductor's graphs.

The pass that quantises rows reads the channels of two tensors, so that their concatenation is not
stored. With a norm before, it reads the rows of two tensors, and so does a product that is added to
them. Slices that are concatenated in their order are the tensor of which they are slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from cupyattn.interop.torch import linear_parts
from cupyattn.interop.torch.graph_nodes import is_length, keep_strides, same, value_of

_aten = torch.ops.aten
#: Arguments of our operators that are rows, with the argument that takes further rows.
_BELOW = {"x": "below", "residual": "residual_below"}


def sides_of(node: Node) -> tuple[Node, Node] | None:
    """Return two tensors whose channels a node concatenates, or None.

    Parameters
    ----------
    node : Node
        The input of layers.

    Returns
    -------
    (Node, Node) or None
        Tensors of the node's type, whose rows the pass reads without a copy.
    """
    tensors, axis = concatenated(node)
    like = value_of(node)
    if len(tensors) != 2 or axis != like.dim() - 1:
        return None
    left, right = tensors
    return (left, right) if all(_goes_with(like, value_of(x)) for x in tensors) else None


def read_in_two(graph: Graph) -> None:
    """Let layers read rows of text and image in two tensors, not in their concatenation.

    It stays if anything else reads it.
    """
    for node in graph.nodes:
        parts, axis = concatenated(node)
        if len(parts) != 2:
            continue
        like = value_of(node)
        if like.dim() not in (2, 3) or axis != like.dim() - 2:
            continue
        readers = [user for user in node.users if not is_length(user)]
        calls = [_in_two(user, node, *parts) for user in readers]
        if all(_has_rows_of(like, value_of(part)) for part in parts) and None not in calls:
            for user, arguments in zip(readers, calls, strict=True):
                user.args = arguments
                keep_strides(user)


def _has_rows_of(like: Any, part: Any) -> bool:
    """Whether a tensor has the type and the axes of another, and rows that are contiguous."""
    alike = part.dtype == like.dtype and part.dim() == like.dim()
    return alike and same(part.stride()[-1:], [1])


def _in_two(reader: Node, rows: Node, first: Node, below: Node) -> tuple[Any, ...] | None:
    """Return the arguments of a call that reads two parts of its rows; None if it does not."""
    if reader.target not in linear_parts.CALLS or reader.kwargs:
        return None
    named = linear_parts.CALLS[reader.target](*reader.args)._asdict()
    for name, further in _BELOW.items():
        if named[name] is rows and further in named:
            named |= {name: first, further: below}
    left: list[Node] = []
    map_arg(tuple(named.values()), left.append)
    return None if rows in left else tuple(named.values())


def join_slices(layers: Iterable[Node]) -> None:
    """Let layers, and concatenations that they read, read tensors that are joined of slices.

    Parameters
    ----------
    layers : iterable of Node
        Their first argument is their input.
    """
    for layer in layers:
        _read_whole(layer, layer.args[0])
        x = layer.args[0]
        for side in concatenated(x)[0]:
            _read_whole(x, side)


def _read_whole(reader: Node, node: Node) -> None:
    whole = _joined(node)
    if whole is not None:
        reader.replace_input_with(node, whole)


def _joined(node: Node) -> Node | None:
    """Return the tensor of which a node joins all slices, if both have the same strides."""
    source = whole_of(*concatenated(node))
    if source is None:
        return None
    whole, like = value_of(source), value_of(node)
    return source if same((*whole.shape, *whole.stride()), (*like.shape, *like.stride())) else None


def whole_of(slices: Sequence[Node], axis: int) -> Node | None:
    """Return the node whose slices along an axis are these, in their order, or None."""
    sources = {one.args[0] if one.target is _aten.slice.Tensor else one for one in slices}
    if len(sources) != 1:
        return None
    (source,) = sources
    whole, place, length = value_of(source), value_of(source).storage_offset(), 0
    for one in map(value_of, slices):
        if not same((one.storage_offset(), *one.stride()), (place, *whole.stride())):
            return None
        place, length = place + one.shape[axis] * whole.stride(axis), length + one.shape[axis]
    alike = same((*one.shape[:axis], length, *one.shape[axis + 1 :]), whole.shape)
    return source if alike else None


def concatenated(node: Node) -> tuple[Sequence[Node], int]:
    """Return the tensors that a node concatenates, none if it does not, and their axis."""
    if node.target is not _aten.cat.default or node.kwargs:
        return (), 0
    tensors, axis = (*node.args, 0)[:2]  # graphs leave out axis 0
    return tensors, axis % value_of(node).dim()


def _goes_with(like: Any, side: Any) -> bool:
    """Whether a tensor has the rows and the type of another, all rows at one stride."""
    if side.dtype != like.dtype or not same(side.shape[:-1], like.shape[:-1]):
        return False
    width, (*strides, last) = side.shape[-1], side.stride()
    if not isinstance(width, int) or width == 0 or last != 1:
        return False
    axes = [(n, s) for n, s in zip(side.shape, strides, strict=False) if not same([n], [1])]
    return all(same([s], [m * t]) for (_, s), (m, t) in zip(axes, axes[1:], strict=False))
