"""One call on several ranks: what each brings, checked by all against all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from cupyattn.arrays import interchange
from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.blocks import Block, Span, blocks
from cupyattn.distributed.calls import Calls
from cupyattn.distributed.choice import choose_mesh
from cupyattn.distributed.group import Group
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.partition import Partition, Range
from cupyattn.distributed.ulysses import Neighbours, merged_ranges
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import limits as kernels_limits
from cupyattn.ops.attention import resolved
from cupyattn.problem import checks
from cupyattn.problem.request import Request
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.sequences import one_entry

METHODS = ("auto", "ulysses", "ring", "mixed")
#: Names that `Partition` makes of lengths.
NAMED = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Asked:
    """What a caller says beside his arrays.

    Parameters
    ----------
    what : str
        The function that he calls.
    method : {"auto", "ulysses", "ring", "mixed"}
    ulysses : int or None
    partition : {"contiguous", "zigzag"}, Partition or (Partition, Partition)
    options : dict
        Keywords of `cupyattn.attention` that say nothing of places in a sequence.
    places : dict
        ``causal``, ``causal_align`` and ``window``.
    offsets : (array, array) or None
        ``cu_seqlens_q`` and ``cu_seqlens_k``.
    layout : {"BHSD", "BSHD"}
    """

    what: str
    method: str
    ulysses: int | None
    partition: Any
    options: dict[str, Any]
    places: dict[str, Any]
    offsets: tuple[Any, Any] | None = None
    layout: str = "BHSD"


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """One call, as a rank sees it after all ranks have agreed; its arrays are given beside it.

    Parameters
    ----------
    group : Group
    mesh : Mesh
    rows_q, rows_kv : Partition
        Which rank has which rows and keys.
    spans : tuple of Span
        The sequences.
    request : Request
        This rank's own arrays, resolved as if they were all: rung, backend, kind of array. Those
        of a later call of the same form may be others.
    calls : Calls
    digest : str
        Of what all ranks have said.
    """

    group: Group
    mesh: Mesh
    rows_q: Partition
    rows_kv: Partition
    spans: tuple[Span, ...]
    request: Request
    calls: Calls
    digest: str

    @cached_property
    def neighbours(self) -> tuple[Neighbours, Neighbours]:
        """The ranks that this one exchanges heads with: their rows, and their keys."""
        ranks = self.mesh.neighbours(self.group.rank)
        rows = (self.rows_q, self.rows_kv)
        found = (Neighbours.of(self.group, ranks, partition) for partition in rows)
        return next(found), next(found)

    @cached_property
    def circle(self) -> tuple[int, ...]:
        """The ranks that pass keys on."""
        return self.mesh.circle(self.group.rank)

    @cached_property
    def rows(self) -> tuple[Range, ...]:
        """The rows of this rank and its neighbours."""
        return merged_ranges(self.rows_q, self.mesh.neighbours(self.group.rank))

    @cached_property
    def keys(self) -> list[tuple[Range, ...]]:
        """The keys that come from each rank of the circle, by its index there."""
        return [merged_ranges(self.rows_kv, self.mesh.neighbours(rank)) for rank in self.circle]

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """The blocks of `rows` and of the keys of each rank of the circle."""
        return [blocks(self.rows, keys, self.spans) for keys in self.keys]

    def restore(self, o: Any) -> Any:
        """Return a result as the caller's q is: kind of array, layout, packed or not."""
        packed, layout = self.calls.packed, self.request.settings.layout
        return self.request.as_given(o[0].swapaxes(0, 1) if packed else to_bhsd(o, layout))


def resolve_sharded(
    asked: Asked, group: Group, q: Any, k: Any, v: Any, extra: Callable[[Request], dict[str, Any]]
) -> ShardedCall:
    """Check a call of this rank, agree with the others on it, and choose how it runs.

    Parameters
    ----------
    asked : Asked
    group : Group
    q, k, v : array
        This rank's.
    extra : callable
        Checks what else the caller brings, given this rank's request; returns what must be the
        same on all ranks.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        For what is wrong here.
    RankError
        For what is wrong on another rank, or differs from rank to rank.
    """
    found: list[tuple[Request, dict[str, Any]]] = []

    def facts() -> dict[str, Any]:
        request = _own_request(asked, group, q, k, v)
        packed = _offsets(asked)
        found.append((request, packed))
        call = request.call
        same = {
            "batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv,
            "head_dim": call.head_dim, "dtype": call.dtype, "variant": request.variant.name,
            "method": asked.method, "ulysses": asked.ulysses, "partition": _named(asked.partition),
            "layout": asked.layout, "scale": call.scale, "softcap": call.softcap,
            **{name: str(value) for name, value in asked.places.items()},
            **{n: str(asked.options.get(n)) for n in ("quant", "tiles", "arch", "accuracy")},
            **{n: _digest(packed[n].tolist()) for n in ("cu_seqlens_q", "cu_seqlens_k") if packed},
            **extra(request),
        }  # fmt: skip
        own = {"len_q": int(request.q.shape[2]), "len_kv": int(request.k.shape[2])}
        return {"same": same, "own": own}

    agreed = group.agree(asked.what, facts)
    said = [of_rank["own"] for of_rank in agreed]
    ((request, packed),) = found
    rows_q, rows_kv = _partitions(asked.partition, said, packed)
    spans = _spans(asked.places, rows_q, rows_kv, packed)
    call = checks.with_lengths(request.call, rows_q.length, rows_kv.length, **asked.places)
    int8 = request.variant.family == "int8"
    obstacle = _obstacle(request, packed, spans, rows_q == rows_kv) if int8 else ""
    mesh = choose_mesh(
        asked.method, asked.ulysses, call, request.variant.name, group.hosts,
        balanced=asked.partition != "contiguous", without_ring=bool(obstacle),
    )  # fmt: skip
    if mesh.ring > 1 and obstacle:
        raise UnsupportedError(
            f"a ring of fa_int8, round which codes go, takes no {obstacle}: use method='ulysses'"
        )
    given = {n: x for n, x in asked.options.items() if n not in ("accuracy", "variant", "quant")}
    options = {**given, "variant": request.variant.name, "quant": request.settings.quant}
    return ShardedCall(
        group, mesh, rows_q, rows_kv, spans, request, Calls(options, asked.places, packed),
        _digest(agreed),
    )  # fmt: skip


def _own_request(asked: Asked, group: Group, q: Any, k: Any, v: Any) -> Request:
    """Resolve this rank's arrays as if they were all."""
    if asked.method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {asked.method!r}")
    if (asked.ulysses is not None) != (asked.method == "mixed"):
        raise ValueError(
            f"ulysses, how many ranks exchange heads, goes with method='mixed' and must be given "
            f"there, got method={asked.method!r} ulysses={asked.ulysses!r}"
        )
    _named(asked.partition)
    layout = asked.layout
    if asked.offsets is not None:
        layout = "BSHD"
        taken = (interchange.take(n, a) for n, a in zip("qkv", (q, k, v), strict=True))
        (q, as_given), (k, _), (v, _) = taken
        q, k, v = (one_entry(n, a) for n, a in zip("qkv", (q, k, v), strict=True))
    request = resolved(q, k, v, **asked.options, **asked.places, layout=layout)
    kind = array_namespace(request.q).__name__
    if kind != group.namespace:
        raise TypeError(f"this group exchanges {group.namespace} arrays, got {kind} arrays")
    if asked.offsets is not None:
        request = replace(request, as_given=as_given)
    return request


def _offsets(asked: Asked) -> dict[str, Any]:
    """Return the offsets of packed sequences on the host, with the longest lengths."""
    if asked.offsets is None:
        return {}
    found: dict[str, Any] = {}
    for name, given in zip("qk", asked.offsets, strict=True):
        taken = interchange.on_host(interchange.take(f"cu_seqlens_{name}", given)[0])
        if taken.ndim != 1 or taken.size < 1 or taken.dtype.kind != "i":
            raise ValueError(
                f"cu_seqlens_{name} must be int32 or int64 of shape (batch + 1,), "
                f"got {taken.dtype} of shape {taken.shape}"
            )
        found[f"cu_seqlens_{name}"] = taken.astype(np.int32)
        found[f"max_len_{name}"] = int(np.diff(taken).max(initial=0))
    counts = {n: a.size - 1 for n, a in found.items() if n.startswith("cu_seqlens")}
    if len(set(counts.values())) != 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one length, got {counts}")
    return found


def _partitions(
    partition: Any, said: list[dict[str, int]], packed: dict[str, Any]
) -> tuple[Partition, Partition]:
    """Return which rank has which rows and which keys, checked against what they have."""
    lengths = [[of_rank[name] for of_rank in said] for name in ("len_q", "len_kv")]
    if partition == "contiguous":
        found = [Partition.contiguous(x) for x in lengths]
    elif partition == "zigzag" and packed:
        ends = packed["cu_seqlens_q"], packed["cu_seqlens_k"]
        found = [Partition.zigzag_varlen(x, len(said)) for x in ends]
    elif partition == "zigzag":
        found = [Partition.zigzag(sum(x), len(said)) for x in lengths]
    else:
        found = list(partition if isinstance(partition, tuple) else (partition, partition))
    for name, rows, have in zip(("q", "k"), found, lengths, strict=True):
        if rows.lengths != tuple(have):
            raise ValueError(
                f"the partition gives ranks {list(rows.lengths)} rows of {name}, they have {have}"
            )
        if packed:
            kernels_limits.check_cu_seqlens(
                name, packed[f"cu_seqlens_{name}"], sum(have), packed[f"max_len_{name}"]
            )
    return found[0], found[1]


def _spans(
    places: dict[str, Any], rows_q: Partition, rows_kv: Partition, packed: dict[str, Any]
) -> tuple[Span, ...]:
    """Return the sequences with the limits of each."""
    ends = [(0, rows_q.length), (0, rows_kv.length)]
    if packed:
        ends = [packed[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    found = []
    for q, kv in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        limits = checks.check_limits(**places, len_q=q[1] - q[0], len_kv=kv[1] - kv[0])
        found.append(Span(q, kv, limits))
    return tuple(found)


def _named(partition: Any) -> Any:
    """Return a partition as the ranks compare it."""
    if partition in NAMED:
        return partition
    pair = partition if isinstance(partition, tuple) else (partition, partition)
    if len(pair) != 2 or not all(isinstance(one, Partition) for one in pair):
        raise TypeError(
            "partition must be 'contiguous', 'zigzag', a Partition, or one of q and one of k, "
            f"got {partition!r:.80}"
        )
    return [_digest(one.ranges) for one in pair]


def _digest(numbers: Any) -> str:
    """Return few letters that stand for many numbers."""
    return hashlib.sha256(str(numbers).encode()).hexdigest()[:16]


def _obstacle(
    request: Request, packed: dict[str, Any], spans: tuple[Span, ...], alike: bool
) -> str:
    """Say what a ring of codes does not take of a call: what would cut them; empty where nothing.

    `alike` says whether ranks have the same rows as keys.
    """
    quant = request.settings.quant
    if packed:
        return "packed sequences"
    if quant is not None and quant.fused:
        return "QuantConfig(fused=True)"
    (span,) = spans
    first, last = span.limits
    if first is not None or last not in (None, 0):
        return "window, and no causal mask of rows and keys of two lengths"
    return "" if last is None or alike else "causal mask of rows and keys that are shared otherwise"
