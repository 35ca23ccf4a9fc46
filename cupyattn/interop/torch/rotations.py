"""Recognise rotary embeddings in Inductor's graphs: rows, and the tables that rotate them.

Models write a rotation in four ways. They store sums of products of a pair's channels side by side
(Wan). They multiply rows and their swapped channels by tables of all channels (Flux, HunyuanVideo).
They multiply complex numbers (Qwen-Image, Z-Image). They multiply pairs by matrices (Kandinsky).

Offset and strides of a fake tensor say which channels a view has, whatever operators made it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cupyattn.interop.torch.concatenations import concatenated
from cupyattn.interop.torch.graph_nodes import CONVERT, insert, same, unconverted, value_of

_aten = torch.ops.aten
#: Operators that change the shape only. A reshape may copy; Inductor has it in place of views.
_RESHAPES = (
    _aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims,
)  # fmt: skip
_VIEWS = (*_RESHAPES, _aten.select.int, _aten.slice.Tensor, _aten.permute.default)
_SPLITS = (_aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default)


class Tables(NamedTuple):
    """Numbers that rotate rows, as nodes that broadcast over all axes except positions.

    Parameters
    ----------
    form : {"pairs", "columns", "complex", "matrices", "none"}
    nodes : tuple of Node
        For pairs cos and sin, (..., head_dim / 2). For columns the same, (..., head_dim). For
        complex numbers cos + i sin, (..., head_dim / 2). For matrices one node,
        (..., head_dim / 2, 2, 2). For none the rows themselves, which are not rotated.
    axis : int
        Of none: the rows' axis of positions.
    """

    form: str
    nodes: tuple[Node, ...]
    axis: int = 0

    @property
    def channels(self) -> int:
        """Number of channels that have one number of cos."""
        return 1 if self.form in ("columns", "matrices") else 2

    @property
    def key(self) -> tuple[Any, ...]:
        """The form, and which memory the nodes view, or how many rows none has.

        Equal for equal tables.
        """
        if self.form == "none":
            return self.form, str(value_of(self.nodes[0]).shape[self.axis])
        return self.form, *map(_memory_of, self.nodes)


class Rotation(NamedTuple):
    """Rows and the tables that rotate them.

    Parameters
    ----------
    x : Node
        (..., head_dim).
    tables : Tables
    interleaved : bool
        As for `cupyattn.attention`.
    """

    x: Node
    tables: Tables
    interleaved: bool


def rotation_of(end: Node, axis: int) -> Rotation | None:
    """Return the rotation that makes a node, or None.

    Parameters
    ----------
    end : Node
        (..., head_dim). It may be converted from float32.
    axis : int
        Its axis of positions.
    """
    made = unrounded(end)
    like = value_of(made)
    if not isinstance(like.shape[-1], int) or like.shape[-1] % 2 or like.shape[-1] < 4:
        return None
    for match in (_of_pairs, _of_columns, _of_complex, _of_matrices):
        found = match(made)
        if found is not None and same(value_of(found.x).shape, like.shape):
            nodes = found.tables.nodes
            if all(_are_of_positions(node, found.tables.form, like, axis) for node in nodes):
                return found
    return None


def insert_tables(graph: Graph, tables: Tables, head_dim: int) -> tuple[Node, Node]:
    """Insert cos and sin, (positions, head_dim / channels of a number), contiguous float32."""
    nodes, half = tables.nodes, head_dim // 2
    call = functools.partial(insert, graph)

    def flat(node: Node, *widths: int) -> Node:
        return call(_aten.reshape.default, node, [-1, *widths])

    if tables.form == "complex":
        parts = call(_aten.view_as_real.default, *nodes)
        found = [flat(call(_aten.select.int, parts, -1, i), half) for i in (0, 1)]
    elif tables.form == "matrices":
        entries = flat(*nodes, half, 4)
        four = [call(_aten.slice.Tensor, entries, -1, i, i + 1) for i in range(4)]
        four[1] = call(_aten.neg.default, four[1])
        pairs = [call(_aten.cat.default, four[own], -1) for own in (slice(0, 4, 3), slice(1, 3))]
        found = [flat(pair, head_dim) for pair in pairs]
    else:
        found = [flat(node, head_dim // tables.channels) for node in nodes]
    cos, sin = (
        x if value_of(x).is_contiguous()
        else call(_aten.clone.default, x, memory_format=torch.contiguous_format)
        for x in found
    )  # fmt: skip
    return cos, sin


def insert_tables_of_none(
    graph: Graph, tables: Tables, like: Node, width: int
) -> tuple[Node, Node]:
    """Insert cos and sin that rotate nothing, (positions, width), contiguous float32.

    Parameters
    ----------
    graph : Graph
    tables : Tables
        Rows that are not rotated.
    like : Node
        A table of other rows.
    width : int
        Columns of that table, whose fake tensor may have a symbol in its place.
    """
    [rows] = tables.nodes
    length = value_of(rows).shape[tables.axis]
    if not isinstance(length, int):
        length = insert(graph, _aten.sym_size.int, rows, tables.axis)
    shape = [length, width]
    options = {"dtype": torch.float32, "device": value_of(like).device, "pin_memory": False}
    # Not `new_full`, which is decomposed earlier: Inductor refuses it in a graph of this stage.
    cos, sin = (insert(graph, _aten.full.default, shape, x, **options) for x in (1.0, 0.0))
    return cos, sin


def unrounded(node: Node) -> Node:
    """Return the float32 node that a node rounds, or the node itself."""
    source = node.args[0] if node.target is CONVERT else None
    return source if isinstance(source, Node) and value_of(source).dtype == torch.float32 else node


def lies_at(x: Any) -> list[Any]:
    """Return offset and strides of a fake tensor, without axes of length 1."""
    strides = zip(x.shape, x.stride(), strict=True)
    return [x.storage_offset(), *(stride for n, stride in strides if not same([n], [1]))]


def _viewed(node: Node) -> Node | None:
    """Return the node of which a node is a view, or None."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in _SPLITS:
        return source.args[0]
    if node.target not in _VIEWS or (node.target is _aten.reshape.default and _copies(node)):
        return None
    return source


def _copies(reshape: Node) -> bool:
    try:
        value_of(reshape.args[0]).view(value_of(reshape).shape)
    except (RuntimeError, ValueError):
        return True
    return False


def _memory_of(node: Node) -> tuple[Node, str]:
    """Return the node whose memory a node views, and which of its numbers."""
    own = value_of(node)
    lengths = [n for n in own.shape if not same([n], [1])]
    while (source := _viewed(node)) is not None:
        node = source
    return node, f"{lengths} at {lies_at(own)}"


def _are_of_positions(node: Node, form: str, like: Any, axis: int) -> bool:
    """Whether numbers are the same for all rows of a position, and of the form's type."""
    table, head_dim = value_of(node), like.shape[-1]
    widths = {
        "pairs": (head_dim // 2,), "columns": (head_dim,), "complex": (head_dim // 2,),
        "matrices": (head_dim // 2, 2, 2),
    }[form]  # fmt: skip
    dtype = torch.complex64 if form == "complex" else torch.float32
    rows = tuple(table.shape[: -len(widths)])
    most = like.dim() - 1
    if table.dtype != dtype or len(rows) > most or not same(table.shape[-len(widths) :], widths):
        return False
    rows = (*[1] * (most - len(rows)), *rows)
    wanted = [like.shape[i] if i == axis else 1 for i in range(most)]
    return same(rows, wanted)


# ---- pairs of channels ---------------------------------------------------------------------------


class _Member(NamedTuple):
    """One channel of each pair of rows."""

    x: Node
    interleaved: bool
    number: int


def _member(node: Any) -> _Member | None:
    """Return of which rows a node is one channel of each pair, (..., head_dim / 2)."""
    if not isinstance(node, Node):
        return None
    node = x = unconverted(node)
    own = value_of(node)
    half = own.shape[-1]
    while (source := _viewed(x)) is not None:
        x, like = source, value_of(source)
        if same(like.shape, (*own.shape[:-1], 2 * half)):
            begin, *strides = lies_at(like)
            for interleaved in (True, False):
                for number in (0, 1):
                    step = strides[-1] * (1 + interleaved)
                    at = begin + number * strides[-1] * (1 if interleaved else half)
                    if same(lies_at(own), [at, *strides[:-1], step]):
                        return _Member(unconverted(x), interleaved, number)
            return None
    return None


def _stored_side_by_side(node: Node) -> tuple[bool, Node, Node] | None:
    """Return whether channels are interleaved, and the first and the second of each pair."""
    like = value_of(node)
    half = like.shape[-1] // 2
    if node.target is _aten.slice_scatter.default:
        found = _scattered(node)
        return None if found is None else (True, *found)
    if node.target in _RESHAPES:
        source: Any = node.args[0]
        parts = _concatenated(source, 1)
        if parts is None or not same(value_of(source).shape, (*like.shape[:-1], half, 2)):
            return None
        first, second = (x.args[0] if x.target in _RESHAPES else x for x in parts)
        form = (*like.shape[:-1], half)
        if same(value_of(first).shape, form) and same(value_of(second).shape, form):
            return True, first, second
        return None
    parts = _concatenated(node, half)
    return None if parts is None else (False, *parts)


def _scattered(node: Node) -> tuple[Node, Node] | None:
    """Return the nodes that are written into even and into odd channels."""
    found: dict[int, Node] = {}
    channels = value_of(node).shape[-1]
    last = (-1, value_of(node).dim() - 1)
    while node.target is _aten.slice_scatter.default and len(found) < 2:
        given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 2 :]]
        into, part, axis, begin, end, step = given
        whole = end is None or end >= channels
        if axis not in last or step != 2 or not whole or begin not in (None, 0, 1):
            return None
        found.setdefault(begin or 0, _copied(part))
        node = into
    return (found[0], found[1]) if len(found) == 2 else None


def _concatenated(node: Node, width: int) -> tuple[Node, Node] | None:
    """Return the two parts, so wide, of which a concatenation along the last axis consists."""
    parts, axis = concatenated(node)
    if len(parts) != 2 or axis != value_of(node).dim() - 1:
        return None
    first, second = parts
    return (first, second) if all(same(value_of(x).shape[-1:], [width]) for x in parts) else None


def _copied(node: Node) -> Node:
    """Return the float32 node that is stored, rounded or not."""
    if node.target is _aten.copy.default:
        node = node.args[1]
    return unrounded(node)


def _factors(node: Any) -> Iterator[tuple[Node, Node]]:
    """Yield both factors of a product, in both orders."""
    if isinstance(node, Node) and node.target is _aten.mul.Tensor and not node.kwargs:
        for x, y in (node.args, node.args[::-1]):
            if isinstance(x, Node) and isinstance(y, Node):
                yield x, y


def _summands(node: Node, *targets: Any) -> Iterator[Sequence[Any]]:
    """Yield both operands of a sum, in both orders, or of a difference."""
    if node.target in targets and len(node.args) == 2 and not node.kwargs:
        yield node.args
        if node.target is _aten.add.Tensor:
            yield node.args[::-1]


# ---- forms ---------------------------------------------------------------------------------------


def _of_pairs(node: Node) -> Rotation | None:
    """Match ``(x cos - y sin, y cos + x sin)`` of pairs (x, y), stored side by side."""
    stored = _stored_side_by_side(node)
    if stored is None:
        return None
    interleaved, first, second = stored
    found = _weighted(first, _aten.sub.Tensor, interleaved)
    other = _weighted(second, _aten.add.Tensor, interleaved, reverse=True)
    if found is None or other is None or found[0] is not other[0]:
        return None
    tables, others = (Tables("pairs", own[1:]) for own in (found, other))
    return Rotation(found[0], tables, interleaved) if tables.key == others.key else None


def _weighted(
    node: Node, target: Any, interleaved: bool, reverse: bool = False
) -> tuple[Node, Node, Node] | None:
    """Return x, cos and sin of ``x0 cos - x1 sin``, or reversed of ``x1 cos + x0 sin``."""
    for summands in _summands(node, target):
        for one, cos in _factors(summands[0]):
            for other, sin in _factors(summands[1]):
                members = [_member(one), _member(other)][:: -1 if reverse else 1]
                x = members[0].x if members[0] else None
                if x and members == [_Member(x, interleaved, number) for number in (0, 1)]:
                    return x, cos, sin
    return None


def _of_columns(node: Node) -> Rotation | None:
    """Match ``x cos + x' sin``, where x' has pairs (-y, x)."""
    for own, swapped in _summands(node, _aten.add.Tensor):
        for x, cos in _factors(own):
            for other, sin in _factors(swapped):
                found = _swapped(unconverted(other))
                if found is not None and found[0] is unconverted(x):
                    return Rotation(found[0], Tables("columns", (cos, sin)), found[1])
    return None


def _swapped(node: Node) -> tuple[Node, bool] | None:
    """Return the rows whose pairs (x, y) are (-y, x) in a node, and whether interleaved."""
    stored = _stored_side_by_side(node)
    if stored is None:
        return None
    interleaved, first, second = stored
    first = unconverted(first)
    if first.target is not _aten.neg.default:
        return None
    members = [_member(second), _member(first.args[0])]
    x = members[0].x if members[0] else None
    alike = x and members == [_Member(x, interleaved, number) for number in (0, 1)]
    return (x, interleaved) if x and alike else None


def _of_complex(node: Node) -> Rotation | None:
    """Match the product of complex numbers, of which x has pairs of channels."""
    like = value_of(node)
    pairs = (*like.shape[:-1], like.shape[-1] // 2, 2)
    real: Any = node.args[0] if node.target in _RESHAPES else None
    if real is None or real.target is not _aten.view_as_real.default:
        return None
    if not same(value_of(real).shape, pairs):
        return None
    for own, factors in _factors(real.args[0]):
        if own.target is _aten.view_as_complex.default:
            x = _rows_of(own.args[0], pairs, like.shape)
            if x is not None:
                return Rotation(x, Tables("complex", (factors,)), interleaved=True)
    return None


def _of_matrices(node: Node) -> Rotation | None:
    """Match the products of matrices and pairs of channels."""
    like = value_of(node)
    half = like.shape[-1] // 2
    total: Any = node.args[0] if node.target in _RESHAPES else None
    if total is None or total.target is not _aten.sum.dim_IntList or total.kwargs:
        return None
    if len(total.args) != 2 or not same(value_of(total).shape, (*like.shape[:-1], half, 2)):
        return None
    product, axes = total.args
    if [*axes] not in ([-1], [like.dim() + 1]):
        return None
    for own, matrices in _factors(product):
        x = _rows_of(own, (*like.shape[:-1], half, 1, 2), like.shape)
        if x is not None:
            return Rotation(x, Tables("matrices", (matrices,)), interleaved=True)
    return None


def _rows_of(node: Any, form: Sequence[Any], shape: Sequence[Any]) -> Node | None:
    """Return the rows of this shape that are reshaped to a form, and converted or not."""
    if not isinstance(node, Node) or not same(value_of(node).shape, form):
        return None
    node = unconverted(node)
    while node.target in _RESHAPES and not same(value_of(node).shape, shape):
        node = unconverted(node.args[0])
    return node if same(value_of(node).shape, shape) else None
