"""A pass over Inductor's graph that moves operations into products of INT8 codes.

GELU and SiLU after a layer, gated or not, and ``residual + gate * y`` become part of its product
if nothing else reads the intermediate result. The product computes them in float32 before it
rounds. Layers with the same input that add nothing become one call, which quantises it once
(`cupyattn.interop.torch.linear_parts`).
"""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from cupyattn.interop.torch import attention_rows, inductor_calls, linear_parts, precompile
from cupyattn.interop.torch.activation_nodes import activated, gated, pattern
from cupyattn.interop.torch.concatenations import join_slices, read_in_two, sides_of
from cupyattn.interop.torch.graph_nodes import (
    CONVERT,
    insert_call,
    is_row_of_factors,
    only_reader,
    other_operand,
    same,
    take_lengths_from_inputs,
    value_of,
)
from cupyattn.interop.torch.joint_rows import join_rows
from cupyattn.interop.torch.prologues import Prologue, prologue_of, smoothed
from cupyattn.quant.blocks import strategy_of_weight
from cupyattn.version import __version__

_aten = torch.ops.aten

#: Operations of nodes that precede all others.
_GIVEN = ("placeholder", "get_attr")
#: Number of other layers between two layers of a group, because models alternate two streams.
_NEAR = 2

#: Reason if this version of torch fuses nothing; "" if it does, or if nothing was compiled yet.
obstacle = ""
_registered = False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def register() -> bool:
    """Let Inductor run the pass, while torch traces a layer; return True.

    It stays until the process ends, beside the caller's passes, and is part of Inductor's cache
    key. Other compilers get layers as one operator.
    """
    global obstacle, _registered
    if "torch._inductor.config" in sys.modules and not _registered:
        try:
            _register()
        except (ImportError, AttributeError, TypeError, RuntimeError) as error:
            obstacle = f"torch {torch.__version__} has other passes ({error})"
            inductor_calls.obstacle = obstacle
        else:
            inductor_calls.register()  # whose text the pass tells from that of other versions
        _registered = True
    return True


def _register() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Epilogues(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fuse(graph)

        def uuid(self) -> str:
            return _uuid()

    pattern("gelu", torch.float32)  # what the pass needs of this version
    others = config.post_grad_custom_post_pass
    if others is None:
        config.post_grad_custom_post_pass = Epilogues()
        return
    from torch._inductor.custom_graph_pass import get_custom_graph_passes  # of several passes

    config.post_grad_custom_post_pass = [*get_custom_graph_passes(others), Epilogues()]


@functools.cache
def _uuid() -> str:
    """Return a key that differs between versions of this pass."""
    here = Path(__file__)
    names = (
        here.name, "prologues.py", "activation_nodes.py", "graph_nodes.py", "linear_parts.py",
        "inductor_calls.py", "places.py", "attention_rows.py", "rotations.py", "schema.py",
        "concatenations.py", "joint_rows.py",
    )  # fmt: skip
    sources = [here.with_name(name).read_bytes() for name in names]
    return f"cupyattn {__version__} {hashlib.sha256(b''.join(sources)).hexdigest()}"


# ---- the pass ------------------------------------------------------------------------------------


class _Epilogue(NamedTuple):
    """Operations after a layer that become part of its product, and their last node.

    The node's value is the product's result, with the same type and strides.
    """

    end: Node
    activation: str
    residual: Node | None = None
    gate: Node | None = None


def fuse(graph: Graph) -> None:
    """Replace layers by layers with their epilogues, and by calls of several layers.

    Attention gets the norms and rotary embeddings of q and k.
    """
    take_lengths_from_inputs(graph)
    attention_rows.fold(graph)
    join_slices([node for node in graph.nodes if _is_layer(node)])
    graph.eliminate_dead_code()  # slices without readers count as readers
    rest = []
    for node in list(graph.nodes):
        if not _is_layer(node):
            continue
        found = _epilogue(node)
        if found.residual is None:
            rest.append(node)
        elif (normed := _prologue([node])) is not None:
            _replace_by_normed(graph, {node: found}, normed)
        else:
            _replace_by_layer(graph, node, found)
    for group in list(_groups(rest)):
        found_of = {node: _epilogue(node) for node in group}
        if (normed := _prologue(group)) is not None:
            _replace_by_normed(graph, found_of, normed)
        elif len(group) == 1:
            _replace_by_layer(graph, *found_of.popitem())
        else:
            _replace_by_layers(graph, found_of)
    graph.eliminate_dead_code()  # the steps that layers have taken over
    read_in_two(graph)
    _begin_to_compile(graph)
    join_rows(graph)
    graph.eliminate_dead_code()


def _is_layer(node: Node) -> bool:
    return node.target is torch.ops.cupyattn.int8_linear.default and "val" in node.meta


def _arguments(layer: Node) -> tuple[Any, ...]:
    """Return all arguments of a layer; graphs leave out defaults at the end."""
    return *layer.args, *[None] * (len(layer.target._schema.arguments) - len(layer.args))


def _groups(layers: Sequence[Node]) -> Iterator[list[Node]]:
    """Return groups of layers that one call may run: they read one input and are near each other.

    Each group runs in the place of its first layer. Layers far apart are not grouped, because a
    result that is computed long before its use takes memory. An example are all blocks' layers of
    a prompt.
    """
    groups: dict[Any, tuple[int, list[Node]]] = {}  # by what they share: number of the last, all
    for number, node in enumerate(layers):
        x, weight, weight_scale, bias, _, *where = _arguments(node)
        shapes = (tuple(value_of(one).shape) for one in (weight, weight_scale))
        key = x, strategy_of_weight(*shapes), *where
        own = weight, weight_scale, bias, where[-1]
        if not all(one is None or one.op in _GIVEN for one in own):
            yield [node]
            continue
        last, group = groups.get(key, (number, []))
        if number - last - 1 > _NEAR:
            yield group
            group = []
        groups[key] = number, [*group, node]
    yield from (group for _, group in groups.values())


def _replace_by_layer(graph: Graph, node: Node, found: _Epilogue) -> None:
    _, weight, weight_scale, bias, _, *where = _arguments(node)
    x, right = _sides([node])
    where += [right, None]
    beside = found.residual, found.gate, found.activation
    args = x, weight, weight_scale, bias, *beside, *where
    with graph.inserting_before(found.end):
        made = insert_call(graph, linear_parts.layer, args, value_of(found.end))
    found.end.replace_all_uses_with(made)


def _replace_by_layers(graph: Graph, found: Mapping[Node, _Epilogue]) -> None:
    first = next(iter(found))
    where = [*_arguments(first)[5:]]
    x, right = _sides([*found])
    where.append(right)
    operands = [[node.args[place] for node in found] for place in (1, 2, 3)]
    activations = [one.activation for one in found.values()]
    vals = [value_of(one.end) for one in found.values()]
    args = x, *operands, activations, *where
    with graph.inserting_before(first):
        made = insert_call(graph, linear_parts.layers, args, vals)
        parts = [insert_call(graph, operator.getitem, (made, i), x) for i, x in enumerate(vals)]
    for one, part in zip(found.values(), parts, strict=True):
        one.end.replace_all_uses_with(part)


def _prologue(group: Sequence[Node]) -> Prologue | None:
    """Return the steps on the rows of layers by channel, if nothing else reads these rows."""
    found = prologue_of(group[0].args[0]) if _have_own_rows(group) else None
    smooth = _arguments(group[0])[-1]
    # Factors of channels would be behind an activation, where the pass has none.
    return None if found is not None and found.activation and smooth is not None else found


def _sides(group: Sequence[Node]) -> tuple[Node, Node | None]:
    """Return the input of layers, or the two tensors of which it is the concatenation."""
    x, *_, rotate, smooth = _arguments(group[0])
    found = sides_of(x) if rotate is None and smooth is None and _have_own_rows(group) else None
    return found or (x, None)


def _have_own_rows(group: Sequence[Node]) -> bool:
    """Whether layers are by channel, and nothing else reads their input."""
    x = group[0].args[0]
    if not isinstance(x, Node) or set(x.users) != {*group}:
        return False
    strategies = {strategy_of_weight(*(tuple(value_of(node.args[i]).shape) for i in (1, 2)))
                  for node in group}  # fmt: skip
    return strategies == {"channel"}


def _replace_by_normed(
    graph: Graph, found: Mapping[Node, _Epilogue], normed: Prologue
) -> None:
    """Replace layers and the steps on their rows; only a single layer may have a residual."""
    first, one = next(iter(found.items()))
    arch, backend, rotate, smooth = _arguments(first)[5:]
    place = one.end if one.residual is not None else first
    if smooth is not None:
        with graph.inserting_before(place):
            normed = smoothed(graph, normed, smooth)
    weights, scales, biases = ([node.args[place] for node in found] for place in (1, 2, 3))
    call = linear_parts.NormedLayers(
        normed.x, *normed.vectors, normed.norm, normed.eps, normed.activation, rotate, weights,
        scales, biases,
        one.residual, one.gate, [each.activation for each in found.values()], arch, backend,
    )  # fmt: skip
    vals = [value_of(each.end) for each in found.values()]
    with graph.inserting_before(place):
        made = insert_call(graph, linear_parts.normed_layers, tuple(call), vals)
        parts = [insert_call(graph, operator.getitem, (made, i), x) for i, x in enumerate(vals)]
    for each, part in zip(found.values(), parts, strict=True):
        each.end.replace_all_uses_with(part)


def _begin_to_compile(graph: Graph) -> None:
    for node in graph.nodes:
        call = linear_parts.CALLS.get(node.target)
        if call is not None:
            given, named = call(*map_arg(node.args, value_of)).multiplied
            precompile.begin(*given, **named)


def _epilogue(layer: Node) -> _Epilogue:
    end, activation = layer, str(layer.args[4])
    if not activation:
        end, activation = activated(layer) or gated(layer) or (layer, "")
    return _sum(end, value_of(end), activation) or _Epilogue(end, activation)


# ---- sums ----------------------------------------------------------------------------------------


def _sum(end: Node, like: Any, activation: str) -> _Epilogue | None:
    """Return the sum ``residual + gate * y`` or ``residual + y`` of which a result is part.

    The sum has the result's type, or is float32 and converted to it. A gate may be float32.
    """
    at, gate, reader = end, None, only_reader(end)
    if like.dtype != torch.float32 and _is_conversion(reader, torch.float32):
        at, reader = reader, only_reader(reader)
    other = other_operand(reader, _aten.mul.Tensor, at)
    if other is not None:
        gate = _narrow(other, like.dtype)
        if value_of(gate).dtype not in (like.dtype, torch.float32):
            return None
        if not is_row_of_factors(value_of(gate), like):
            return None
        at, reader = reader, only_reader(reader)
    other = other_operand(reader, _aten.add.Tensor, at)
    if other is None:
        return None
    residual = _narrow(other, like.dtype)
    if value_of(residual).dtype != like.dtype or not same(value_of(residual).shape, like.shape):
        return None
    if value_of(reader).dtype != like.dtype:
        reader = only_reader(reader)
        if not _is_conversion(reader, like.dtype):
            return None
    if not same(value_of(reader).stride(), like.stride()):
        return None
    return _Epilogue(reader, activation, residual, gate)


def _is_conversion(node: Node | None, dtype: torch.dtype) -> bool:
    return node is not None and node.target is CONVERT and node.args[1] == dtype


def _narrow(node: Node, dtype: torch.dtype) -> Node:
    """Return the node that is converted from a type to float32; other nodes unchanged."""
    source = node.args[0] if _is_conversion(node, torch.float32) else None
    return source if isinstance(source, Node) and value_of(source).dtype == dtype else node
