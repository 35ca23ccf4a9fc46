"""Recognise concatenations before INT8 layers in Inductor's graphs.

The pass that quantises rows reads the channels of two tensors, so that their concatenation is not
stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from cupyattn.interop.torch.graph_nodes import same, value_of


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
    if node.target is not torch.ops.aten.cat.default or node.kwargs:
        return None
    tensors, axis = (*node.args, 0)[:2]  # graphs leave out axis 0
    like = value_of(node)
    if axis % like.dim() != like.dim() - 1 or len(tensors) != 2:
        return None
    left, right = tensors
    return (left, right) if all(_goes_with(like, value_of(x)) for x in tensors) else None


def _goes_with(like: Any, side: Any) -> bool:
    """Whether a tensor has the rows and the type of another, all rows at one stride."""
    if side.dtype != like.dtype or not same(side.shape[:-1], like.shape[:-1]):
        return False
    width, (*strides, last) = side.shape[-1], side.stride()
    if not isinstance(width, int) or width == 0 or last != 1:
        return False
    axes = [(n, s) for n, s in zip(side.shape, strides, strict=False) if not same([n], [1])]
    return all(same([s], [m * t]) for (_, s), (m, t) in zip(axes, axes[1:], strict=False))
