"""A pass over Inductor's graph that gives norms and rotary embeddings of Q and K to attention.

Attention normalises and rotates rows as it quantises them, or in one pass (`qk_norm` and `rope` of
`cupyattn.attention`). It takes them if q and k are rotated by the same tables of positions, and if
nothing else reads the intermediate results. It computes them in float32, without the roundings of
the model in between. Parts of q may be rotated by tables of their own before they are concatenated.
Two parts, text and image of joint attention, may also have norms with weights of their own.
A norm of all heads stays if no codes are made, since a separate pass would read the rows twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cupyattn.compiler.architectures import capability_of
from cupyattn.interop.torch.bridge import device_capability
from cupyattn.interop.torch.concatenations import concatenated, whole_of
from cupyattn.interop.torch.graph_nodes import (
    are_alone,
    insert,
    insert_call,
    is_length,
    same,
    value_of,
    wide,
)
from cupyattn.interop.torch.prologues import Prologue, norm_of
from cupyattn.interop.torch.rotations import (
    Rotation,
    Tables,
    insert_tables,
    insert_tables_of_none,
    lies_at,
    rotation_of,
)
from cupyattn.interop.torch.schema import ATTENTION_OF_LAYER as SCHEMA
from cupyattn.problem.choose import choose

_aten = torch.ops.aten
_WEIGHTS = ("q_norm_weight", "k_norm_weight")
_OPERATOR = "cupyattn.diffusers_attention.default"
_RESHAPES = (_aten.view.default, _aten.reshape.default)
#: Axis of positions of q and k.
_POSITIONS = 2
#: Axes of rows that lie by token, in the order of q and k.
_TOKENS_FIRST = (0, 2, 1, 3)
#: Number of parts whose norms may have weights of their own.
_PARTS = 2
#: Inserted tables by what makes them.
_Made = dict[Any, tuple[Node, Node]]


class _Rows(NamedTuple):
    """Rows of q or k before they are normalised and rotated.

    Parameters
    ----------
    parts : tuple of Node
        Concatenated along `axis`, they are the rows.
    axes : tuple of int
        The permutation that makes q of them.
    tables : tuple of Tables
        Of each part; empty if nothing is rotated.
    interleaved : bool
    norms : tuple of Prologue
        The norms that are before the rotation: of each part, or none. They have one eps.
    split : Node or None
        The view that splits the channels of the part into heads, behind a norm of all channels.
    """

    parts: tuple[Node, ...]
    axes: tuple[int, ...]
    tables: tuple[Tables, ...] = ()
    interleaved: bool = False
    norms: tuple[Prologue, ...] = ()
    split: Node | None = None

    @property
    def axis(self) -> int:
        """The axis of positions."""
        return self.axes[_POSITIONS]

    @property
    def rotation(self) -> tuple[Any, ...]:
        """Equal for rows that are rotated in the same way."""
        return self.interleaved, *(x.key for x in self.tables)

    @property
    def norm_kind(self) -> tuple[Any, ...]:
        """Equal for rows with norms that differ in their weights alone."""
        first = self.first if len(self.norms) > 1 else 0
        return {norm.eps for norm in self.norms}, self.split is None, first

    @property
    def first(self) -> Any:
        """Number of rows of the first part."""
        return value_of(self.parts[0]).shape[self.axis]

    @property
    def leaves(self) -> set[Node]:
        """The nodes that stay."""
        own = [x for norm in self.norms for x in norm.vectors if x is not None]
        nodes = (node for x in self.tables if x.form != "none" for node in x.nodes)
        return {*self.parts, *nodes, *own}


def fold(graph: Graph) -> None:
    """Replace attention by attention that normalises and rotates rows of q and k."""
    made: _Made = {}
    for node in list(graph.nodes):
        if str(node.target) == _OPERATOR and "val" in node.meta and _takes_rows(node):
            found = _found(node)
            if found is not None:
                _replace(graph, node, found, made)


def _takes_rows(attention: Node) -> bool:
    own = SCHEMA.given(attention.args)
    q, k = own["q"], own["k"]
    alone = len(own.keys() - {"mask", "bias"}) == 3
    return alone and q is not k and all(set(x.users) == {attention} for x in (q, k))


def _found(attention: Node) -> tuple[_Rows, _Rows] | None:
    """Return the rows of q and k before the most operations that attention can take."""
    ends: Any = attention.args[:2]
    rotated = _pair(_rotated(x) for x in ends)
    if rotated is None or rotated[0].rotation != rotated[1].rotation:
        rotated = None
    found = rotated or _pair(_permuted(x) for x in ends)
    if found is None:
        return None
    both = _pair(map(_normed, found))
    if both is not None and both[0].norm_kind != both[1].norm_kind:
        both = None
    of_all_heads = both is not None and both[0].split is not None
    if of_all_heads and rotated is None and not _quantises(attention):
        both = None  # Inductor reads all heads of a token once
    for rows in (both, rotated):
        if rows is not None and all(map(_can_be_read, rows, ends)) and _are_alone(ends, rows):
            return rows
    return None


def _quantises(attention: Node) -> bool:
    """Whether attention makes codes of q and k; taken for granted where lengths are symbols."""
    own = SCHEMA.settings(attention.args).of_call
    if own.variant != "auto" or own.quant is not None:
        return own.variant in ("auto", "fa_int8")
    q, k = map(value_of, attention.args[:2])
    (_, _, len_q, head_dim), len_kv = q.shape, k.shape[_POSITIONS]
    if not isinstance(len_q, int) or not isinstance(len_kv, int):
        return True
    capability = device_capability(q.device) if own.arch is None else capability_of(own.arch)
    dtype = str(q.dtype).removeprefix("torch.")
    choice = choose(own.accuracy, dtype, head_dim, len_kv, own.causal, capability, len_q)
    return choice.variant == "fa_int8"


def _pair(found: Iterable[_Rows | None]) -> tuple[_Rows, _Rows] | None:
    q, k = found
    return None if q is None or k is None else (q, k)


# ---- rows ----------------------------------------------------------------------------------------


def _permuted(node: Node, axes: tuple[int, ...] = (0, 1, 2, 3)) -> _Rows:
    """Return the rows of which a node is a permutation of axes."""
    while node.target is _aten.permute.default:
        axes = tuple(node.args[1][i] for i in axes)
        node = node.args[0]
    return _Rows((node,), axes)


def _rotated(node: Node) -> _Rows | None:
    """Return the rows before the rotation that makes a node, or the parts of a node."""
    rows = _permuted(node)
    [end] = rows.parts
    found = rotation_of(end, rows.axis)
    if found is not None:
        return rows._replace(
            parts=(found.x,), tables=(found.tables,), interleaved=found.interleaved
        )
    parts, axis = concatenated(end)
    if not parts or axis != rows.axis:
        return None
    turned = [
        rotation_of(x, rows.axis) or Rotation(x, Tables("none", (x,), rows.axis), False)
        for x in parts
    ]
    widths = {(x.tables.channels, x.interleaved) for x in turned if x.tables.form != "none"}
    if len(widths) != 1:
        return None
    [(_, interleaved)] = widths
    tables = tuple(x.tables for x in turned)
    own = [x.x for x in turned]
    whole = whole_of(own, axis)
    return rows._replace(
        parts=tuple(own) if whole is None else (whole,), tables=tables, interleaved=interleaved
    )


def _normed(rows: _Rows) -> _Rows | None:
    """Return the rows before their norms, each with one vector of weights.

    The norm is that of each head, or of all heads of a token before they are split. Of two parts
    both have a norm of each head.
    """
    if len(rows.parts) > 1:
        return _normed_parts(rows, rows.parts)
    below = _permuted(rows.parts[0], rows.axes)
    parts, axis = concatenated(below.parts[0])
    if parts and axis == below.axis:
        return _normed_parts(rows._replace(axes=below.axes), parts)
    return _normed_part(rows, rows.parts[0])


def _normed_parts(rows: _Rows, parts: Sequence[Node]) -> _Rows | None:
    """Return the rows of two parts before their norms of each head."""
    found = [_normed_part(rows, part) for part in parts]
    normed = [one for one in found if one is not None and one.split is None]
    if len(found) != _PARTS or len(normed) != _PARTS:
        return None
    first, second = normed
    one, other = (_permuted(own.parts[0], own.axes) for own in normed)  # as they lie in memory
    if one.axes != other.axes or first.norm_kind != second.norm_kind:
        return None
    made = first._replace(
        parts=(*one.parts, *other.parts), axes=one.axes, norms=(*first.norms, *second.norms)
    )
    return made if isinstance(made.first, int) else None


def _normed_part(rows: _Rows, part: Node) -> _Rows | None:
    """Return the rows of one part before its norm."""
    below = _permuted(part, rows.axes)
    [end] = below.parts
    split = end if _splits_heads(end, below.axes) else None
    norm = norm_of(end if split is None else split.args[0])
    if norm is None or norm.norm != "rms" or norm.weight is None:
        return None
    if any(x is not None for x in norm.vectors[1:]):
        return None
    return rows._replace(parts=(norm.x,), axes=below.axes, norms=(norm,), split=split)


def _splits_heads(node: Node, axes: tuple[int, ...]) -> bool:
    """Whether a node splits the channels of each token into rows of heads.

    `axes` is the permutation that makes q or k of it.
    """
    if node.target not in _RESHAPES or axes != _TOKENS_FIRST:
        return False
    batch, tokens, heads, head_dim = value_of(node).shape
    return same(value_of(node.args[0]).shape, (batch, tokens, heads * head_dim))


def _can_be_read(rows: _Rows, end: Node) -> bool:
    """Whether attention can read the rows in the place of q or k."""
    parts = [value_of(x) for x in rows.parts]
    alike = all(x.dtype == value_of(end).dtype and x.stride(-1) == 1 for x in parts)
    return alike and rows.axes[-1] == len(rows.axes) - 1


def _are_alone(ends: Sequence[Node], rows: Sequence[_Rows]) -> bool:
    """Whether the nodes between rows and attention have no readers but each other."""
    leaves = {node for one in rows for node in one.leaves}
    inner: set[Node] = set()
    nodes = [*ends]
    while nodes:
        node = nodes.pop()
        if node not in inner and node not in leaves and not is_length(node):
            inner.add(node)
            nodes += node.all_input_nodes
    return are_alone(inner, ends)


# ---- the new call --------------------------------------------------------------------------------


def _replace(graph: Graph, attention: Node, found: tuple[_Rows, _Rows], made: _Made) -> None:
    arguments = SCHEMA.given(attention.args)
    settings = SCHEMA.settings(attention.args)
    of_call, old = settings.of_call, value_of(attention)
    with graph.inserting_before(attention):
        for name, rows in zip("qk", found, strict=True):
            arguments[name] = _insert_rows(graph, rows)
        if found[0].norms:
            weights = _insert_weights(graph, found)
            arguments |= dict(zip(_WEIGHTS, weights, strict=True))
            split = found[0].first if len(found[0].norms) > 1 else 0
            of_call = of_call._replace(qk_norm_eps=found[0].norms[0].eps, qk_norm_split=split)
        if found[0].tables:
            arguments["rope_cos"], arguments["rope_sin"] = _insert_tables(graph, found[0], made)
            of_call = of_call._replace(rope_interleaved=found[0].interleaved)
        args = SCHEMA.flat(arguments, settings._replace(of_call=of_call))
        val = attention.target(*map(value_of, args))
        alike = same(lies_at(val), lies_at(old))
        if alike or _is_read_by_token(attention, val):
            own = insert_call(graph, attention.target, args, val)
            attention.replace_all_uses_with(own)
            graph.erase_node(attention)
            if not alike:
                _drop_copies(graph, own)


def _is_read_by_token(attention: Node, val: Any) -> bool:
    """Whether all readers of a result take it token by token, and it now lies in this order."""
    by_token = all(
        one.target is _aten.permute.default and tuple(one.args[1]) == _TOKENS_FIRST
        for one in attention.users
    )
    return by_token and bool(val.permute(_TOKENS_FIRST).is_contiguous())


def _drop_copies(graph: Graph, attention: Node) -> None:
    """Let readers of a result that lies token by token do without a copy in this order."""
    for rows in attention.users:
        rows.meta["val"] = like = value_of(attention).permute(_TOKENS_FIRST)
        for copy in list(rows.users):
            if copy.target is _aten.clone.default and same(lies_at(value_of(copy)), lies_at(like)):
                copy.replace_all_uses_with(rows)
                graph.erase_node(copy)


def _insert_weights(graph: Graph, found: Sequence[_Rows]) -> list[Node]:
    """Return the weights of q and of k: (head_dim,), or (2, head_dim) of two parts."""
    own = [wide(graph, norm.weight) for rows in found for norm in rows.norms]
    if len(own) == len(found):
        return own
    one_by_one = insert(graph, _aten.cat.default, own)  # one kernel makes all of them
    every = insert(graph, _aten.reshape.default, one_by_one, [len(own), -1])
    return [
        insert(graph, _aten.slice.Tensor, every, 0, _PARTS * i, _PARTS * (i + 1))
        for i in range(len(found))
    ]


def _insert_rows(graph: Graph, rows: _Rows) -> Node:
    x, *others = rows.parts
    if others:
        x = insert(graph, _aten.cat.default, [*rows.parts], rows.axis)
    if rows.split is not None:
        x = insert(graph, _aten.reshape.default, x, rows.split.args[1])
    if rows.axes == (0, 1, 2, 3):
        return x
    return insert(graph, _aten.permute.default, x, [*rows.axes])


def _insert_tables(graph: Graph, rows: _Rows, made: _Made) -> tuple[Node, Node]:
    """Return cos and sin of all positions, which are inserted once for all calls."""
    key = rows.rotation
    if key not in made:
        head_dim = value_of(rows.split or rows.parts[0]).shape[-1]
        turning = {x: insert_tables(graph, x, head_dim) for x in rows.tables if x.form != "none"}
        other, (like, _) = next(iter(turning.items()))
        width = head_dim // other.channels
        pairs = [
            turning.get(x) or insert_tables_of_none(graph, x, like, width) for x in rows.tables
        ]
        made[key] = pairs[0]
        if len(pairs) > 1:
            cos, sin = ([pair[i] for pair in pairs] for i in (0, 1))
            made[key] = tuple(insert(graph, _aten.cat.default, own) for own in (cos, sin))
    return made[key]
