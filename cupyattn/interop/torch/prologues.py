"""Recognise norms, modulation and activations before INT8 layers in Inductor's graphs.

They become part of the pass that quantises rows, which computes them in float32. A norm is a
``LayerNorm`` or ``RMSNorm`` of the last axis, with its weight and bias. Modulation is
``y (1 + scale) + shift``. GELU or SiLU may follow them or stand alone. A gated linear unit of the
halves of a row stands alone. An activation of a layer's result belongs to that layer's product.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cupyattn.interop.torch.activation_nodes import activated, activation_before
from cupyattn.interop.torch.graph_nodes import (
    CONVERT,
    FLOATS,
    are_alone,
    insert,
    is_float,
    is_row_of_factors,
    only_reader,
    same,
    unconverted,
    value_of,
    wide,
)
from cupyattn.kernels.row_teams import MOST_CHANNELS
from cupyattn.problem.row_preparation import EPS, EPS_MAX, EPS_MIN
from cupyattn.quant.activation import GLU

_aten = torch.ops.aten
_ADD = (_aten.add.Tensor, _aten.add.Scalar)
#: Vectors of the sums and products after a norm: weight, bias, scale and shift.
_STEPS = 4


Vectors = tuple[Node | None, Node | None, Node | None, Node | None]


class Prologue(NamedTuple):
    """Operations on the rows of a node, as arguments of `cupyattn.norm_quant`."""

    x: Node
    norm: str | None
    eps: float
    weight: Node | None
    bias: Node | None
    scale: Node | None
    shift: Node | None
    activation: str = ""

    @property
    def vectors(self) -> Vectors:
        """The tensors over the channels, in the order of `cupyattn.plans.norm_quant.VECTORS`."""
        return self.weight, self.bias, self.scale, self.shift


class _Core(NamedTuple):
    """A norm without weight and bias, and its nodes."""

    x: Node
    norm: str
    eps: float
    inner: set[Node]


def prologue_of(end: Node) -> Prologue | None:
    """Return the norm, the modulation and the activation that make a node, or None.

    Parameters
    ----------
    end : Node
        The input of layers. Nodes between it and the norm's input must have no other reader.
    """
    found = activation_before(end)
    if found is None and end.target is CONVERT and only_reader(source := end.args[0]) is end:
        found = activation_before(source)
    if found is None:
        return norm_of(end)
    start, activation = found
    if activated(start) is not None and (normed := norm_of(start, end)) is not None:
        return normed._replace(activation=activation)
    x, halves = unconverted(start), 1 + (activation in GLU)
    ours = start.target is torch.ops.cupyattn.int8_linear.default
    if ours or not _is_of_rows(x, halves) or value_of(x).dtype != value_of(end).dtype:
        return None
    return Prologue(x, None, EPS, None, None, None, None, activation)


def smoothed(graph: Graph, found: Prologue, factors: Node) -> Prologue:
    """Return a prologue whose results are multiplied by factors of channels.

    Its vectors are multiplied in float32 instead, where the graph inserts nodes.

    Parameters
    ----------
    graph : Graph
    found : Prologue
        Without activation.
    factors : Node
        (channels,), float32, powers of two.
    """

    def times(x: Node | None) -> Node | None:
        return None if x is None else insert(graph, _aten.mul.Tensor, wide(graph, x), factors)

    scale = found.scale
    if scale is not None and found.shift is not None:
        scale = wide(graph, scale)
    return found._replace(
        weight=times(found.weight) or factors, bias=times(found.bias), scale=scale,
        shift=times(found.shift),
    )  # fmt: skip


def norm_of(node: Node, end: Node | None = None) -> Prologue | None:
    """Return the norm and the modulation that make a node, for rows of the type of `end`.

    Parameters
    ----------
    node : Node
        Nodes between it and the norm's input must have no other reader.
    end : Node, optional
        The node itself, unless something follows.
    """
    found = _chain(node)
    if found is None:
        return None
    core, steps, between = found
    inner = core.inner | between
    if not are_alone(inner, [node]) or value_of(core.x).dtype != value_of(end or node).dtype:
        return None
    vectors = _vectors(steps)
    return None if vectors is None else Prologue(core.x, core.norm, core.eps, *vectors)


def _chain(
    node: Node, most: int = _STEPS
) -> tuple[_Core, list[tuple[str, Node]], set[Node]] | None:
    """Return the norm `most` steps or less before a node, the steps, and the nodes between."""
    core = _core(node)
    if core is not None:
        return core, [], {node}
    for own, step in _before(node):
        found = _chain(own, most - len(step)) if len(step) <= most else None
        if found is not None:
            core, steps, between = found
            return core, [*steps, *step], {*between, node}
    return None


def _before(node: Node) -> Iterator[tuple[Node, list[tuple[str, Node]]]]:
    """Yield the possible inputs of a conversion, or of a sum or product with a row of factors."""
    if node.target is CONVERT and isinstance(node.args[0], Node):
        yield node.args[0], []
    kind = {_aten.add.Tensor: "add", _aten.mul.Tensor: "mul"}.get(node.target)
    if kind is None or node.kwargs:
        return
    for own, other in (node.args, node.args[::-1]):
        if isinstance(other, Node) and isinstance(own, Node):
            like, row = value_of(own), value_of(other)
            if same(like.shape, value_of(node).shape) and is_row_of_factors(row, like):
                yield own, [(kind, other)]


def _vectors(steps: Iterable[tuple[str, Node]]) -> Vectors | None:
    """Return weight, bias, scale and shift of sums and products in their order."""
    found: dict[str, Node] = {}
    for kind, node in steps:
        factor = _one_more(node) if kind == "mul" else None
        flat = len(value_of(node).shape) == 1
        if kind == "mul" and factor is not None and "scale" not in found and "shift" not in found:
            found["scale"] = factor
        elif kind == "mul" and flat and not found:
            found["weight"] = node
        elif kind == "add" and flat and found.keys() == {"weight"}:
            found["bias"] = node
        elif kind == "add" and "shift" not in found:
            found["shift"] = node
        else:
            return None
    for pair in (("weight", "bias"), ("scale", "shift")):
        names = [name for name in pair if name in found]
        sources: dict[str, Node] = {name: unconverted(found[name]) for name in names}
        if len({value_of(one).dtype for one in sources.values()}) == 1:
            found |= sources
        values = [value_of(found[name]) for name in names]
        if any(x.dtype not in FLOATS or x.dtype != values[0].dtype for x in values):
            return None
        if not all(same(x.shape, values[0].shape) for x in values):
            return None
    return found.get("weight"), found.get("bias"), found.get("scale"), found.get("shift")


def _one_more(node: Node) -> Node | None:
    """Return s of a node ``1 + s``, converted or not."""
    while node.target is CONVERT and isinstance(source := node.args[0], Node):
        node = source
    if node.target not in _ADD or node.kwargs or len(node.args) != 2:
        return None
    s, one = node.args
    return s if isinstance(s, Node) and not isinstance(one, Node) and one == 1 else None


# ---- norms ---------------------------------------------------------------------------------------


def _core(node: Node) -> _Core | None:
    """Return the norm whose result is a node, in Inductor's decomposition."""
    if node.target is not _aten.mul.Tensor or node.kwargs:
        return None
    for numbers, factor in (node.args, node.args[::-1]):
        if not isinstance(numbers, Node) or not isinstance(factor, Node):
            continue
        if factor.target is not _aten.rsqrt.default:
            continue
        found = _layer_norm(numbers, factor) or _rms_norm(numbers, factor)
        if found is not None and _is_of_rows(found.x):
            return found
    return None


def _layer_norm(difference: Node, factor: Node) -> _Core | None:
    """Match ``(x - mean) rsqrt(variance + eps)``."""
    variance, eps = _sum_with_number(factor.args[0])
    if variance is None or difference.target is not _aten.sub.Tensor or difference.kwargs:
        return None
    x, mean = difference.args
    if not isinstance(mean, Node) or not isinstance(x, Node):
        return None
    both = _item(variance, 0)
    if both is None or both != _item(mean, 1) or both.target is not _aten.var_mean.correction:
        return None
    if both.args[0] is not x or not _over_last_axis(x, both.args[1]):
        return None
    if dict(both.kwargs) != {"correction": 0, "keepdim": True}:
        return None
    inner = {difference, factor, *factor.all_input_nodes, variance, mean, both}
    return _Core(unconverted(x), "layer", eps, inner)


def _rms_norm(numbers: Node, factor: Node) -> _Core | None:
    """Match ``x rsqrt(mean(x^2) + eps)``."""
    mean, eps = _sum_with_number(factor.args[0])
    if mean is None or mean.target is not _aten.mean.dim or len(mean.args) != 3:
        return None
    square, axes, keepdim = mean.args
    if not isinstance(square, Node) or square.target is not _aten.pow.Tensor_Scalar:
        return None
    x, power = square.args
    if not isinstance(x, Node) or not keepdim or power != 2 or not _over_last_axis(x, axes):
        return None
    if unconverted(x) is not unconverted(numbers):
        return None
    return _Core(unconverted(x), "rms", eps, {factor, *factor.all_input_nodes, mean, square})


def _is_of_rows(x: Node, halves: int = 1) -> bool:
    """Whether the pass supports the rows of a tensor, each with so many rows of codes."""
    like = value_of(x)
    width = like.shape[-1] if like.dim() else 0
    return isinstance(width, int) and 0 < width <= halves * MOST_CHANNELS and is_float(x)


def _sum_with_number(node: Any) -> tuple[Node | None, float]:
    """Return the operands of a sum of a tensor and a number that `norm_quant` takes as `eps`."""
    if isinstance(node, Node) and node.target in _ADD and len(node.args) == 2 and not node.kwargs:
        x, number = node.args
        if isinstance(x, Node) and isinstance(number, float) and EPS_MIN <= number <= EPS_MAX:
            return x, number
    return None, 0.0


def _item(node: Any, number: int) -> Node | None:
    """Return the node whose result of that number is this node."""
    if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == number:
        found = node.args[0]
        return found if isinstance(found, Node) else None
    return None


def _over_last_axis(x: Node, axes: Any) -> bool:
    return [*axes] in ([value_of(x).dim() - 1], [-1])
