"""One call on several ranks: what each brings, checked by all against all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import interchange
from cupyattn.arrays.form import forms_of
from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.blocks import Block, Span, blocks
from cupyattn.distributed.choice import choose_mesh
from cupyattn.distributed.group import Group
from cupyattn.distributed.mesh import Mesh
from cupyattn.distributed.partition import Partition, Range
from cupyattn.distributed.rank_calls import Calls
from cupyattn.distributed.ulysses import Neighbours, merged_ranges
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import limits as kernels_limits
from cupyattn.ops.call_operands import known_call
from cupyattn.problem import checks
from cupyattn.problem.request import SEQUENCES, Request
from cupyattn.problem.resolve import describe_call, to_bhsd
from cupyattn.problem.sequences import one_entry
from cupyattn.problem.settings import Settings

METHODS = ("auto", "ulysses", "ring", "mixed")
#: Names that `Partition` makes of lengths.
NAMED = ("contiguous", "zigzag")


class ShardedSettings(NamedTuple):
    """What a call on several ranks asks for, beside arrays.

    Parameters
    ----------
    of_call : Settings
        Those of the whole sequence.
    method : {"auto", "ulysses", "ring", "mixed"}
    ulysses : int or None
    partition : {"contiguous", "zigzag"}, Partition or (Partition, Partition)
    """

    of_call: Settings
    method: str
    ulysses: int | None
    partition: Any


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
    described : Request
        A call of this rank's own arrays as if they were all: rung, backend, kind of array. Those
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
    described: Request
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
        packed, layout = self.calls.offsets, self.described.settings.layout
        return self.described.as_given(o[0].swapaxes(0, 1) if packed else to_bhsd(o, layout))


def agree(
    what: str, settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]
) -> tuple[ShardedCall, tuple[Any, Any, Any]]:
    """Agree with the other ranks on a forward pass: by a word, where all have agreed on it before.

    What a rank asks for is known as any call is (`cupyattn.runtime.recent`). Where every rank knows
    the call, and all mean the same one, nothing is checked or planned again.

    Parameters
    ----------
    what : str
        The function that is called, for messages.
    settings : ShardedSettings
    group : Group
    arrays : mapping
        This rank's, as `cupyattn.problem.settings.parse` names them.

    Returns
    -------
    call : ShardedCall
    q, k, v : array
        In layout BHSD.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, RankError
        As `resolve_sharded`.
    """
    key, call = _find(what, settings, group, arrays)
    said = group.gather(what, "" if call is None else call.digest)
    if call is not None and len(set(said)) == 1:
        q, k, v = (to_bhsd(arrays[name], settings.of_call.layout) for name in "qkv")
        return call, (q, k, v)
    call = resolve_sharded(what, settings, group, arrays)
    own = call.described
    if key is not None:  # what is kept holds no array of the caller's
        kept = replace(own, given={}, q=None, k=None, v=None)
        group.agreed.remember(key, replace(call, described=kept))
    return call, (own.q, own.k, own.v)


def _find(
    what: str, settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]
) -> tuple[Any, ShardedCall | None]:
    """Return the key of a call, and the call if this rank has agreed on it before."""
    known = known_call(settings.of_call, arrays)
    if known is None:  # the numbers of offsets count
        return None, None
    forms, _ = forms_of(known.arrays)
    kinds = tuple(map(type, known.arrays.values()))
    return group.agreed.find((what, settings, kinds, *known.facts), forms)


def _nothing_else(_: Request) -> dict[str, Any]:
    return {}


def resolve_sharded(
    what: str,
    settings: ShardedSettings,
    group: Group,
    arrays: Mapping[str, Any],
    extra: Callable[[Request], dict[str, Any]] = _nothing_else,
) -> ShardedCall:
    """Check a call of this rank, agree with the others on it, and choose how it runs.

    Parameters
    ----------
    what, settings, group, arrays
        As for `agree`.
    extra : callable
        Checks what else the caller brings, given this rank's own call; returns what must be the
        same on all ranks.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        For what is wrong here.
    RankError
        For what is wrong on another rank, or differs from rank to rank.
    """
    asked = settings.of_call
    found: list[tuple[Request, dict[str, Any]]] = []

    def facts() -> dict[str, Any]:
        own_call = _own_call(settings, group, arrays)
        packed = _offsets(arrays)
        found.append((own_call, packed))
        call = own_call.call
        same = {
            "batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv,
            "head_dim": call.head_dim, "dtype": call.dtype, "variant": own_call.variant.name,
            "method": settings.method, "ulysses": settings.ulysses,
            "partition": _named(settings.partition),
            "layout": asked.layout, "scale": call.scale, "softcap": call.softcap,
            **{name: str(value) for name, value in asked.places.items()},
            **{n: str(getattr(asked, n)) for n in ("quant", "tiles", "arch", "accuracy")},
            **{n: _digest(packed[n].tolist()) for n in SEQUENCES if packed},
            "return_lse": asked.return_lse, **extra(own_call),
        }  # fmt: skip
        own = {"len_q": int(own_call.q.shape[2]), "len_kv": int(own_call.k.shape[2])}
        return {"same": same, "own": own}

    agreed = group.agree(what, facts)
    said = [of_rank["own"] for of_rank in agreed]
    ((described, packed),) = found
    rows_q, rows_kv = _partitions(settings.partition, said, packed)
    spans = _spans(asked.places, rows_q, rows_kv, packed)
    call = checks.with_lengths(described.call, rows_q.length, rows_kv.length, **asked.places)
    int8 = described.variant.family == "int8"
    obstacle = _obstacle(described, packed, spans, rows_q == rows_kv) if int8 else ""
    mesh = choose_mesh(
        settings.method, settings.ulysses, call, described.variant.name, group.hosts,
        balanced=settings.partition != "contiguous", without_ring=bool(obstacle),
    )  # fmt: skip
    if mesh.ring > 1 and obstacle:
        raise UnsupportedError(
            f"a ring of fa_int8, round which codes go, takes no {obstacle}: use method='ulysses'"
        )
    own = asked._replace(
        variant=described.variant.name, accuracy="full", quant=described.settings.quant,
        layout="BHSD", return_lse=True, max_len_q=packed.get("max_len_q"),
        max_len_k=packed.get("max_len_k"),
    )  # fmt: skip
    offsets = {name: packed[name] for name in SEQUENCES if packed}
    calls = Calls(own, offsets)
    return ShardedCall(
        group, mesh, rows_q, rows_kv, spans, described, calls, _digest(agreed),
    )  # fmt: skip


def _own_call(settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]) -> Request:
    """Check this rank's arrays as if they were all.

    Nothing is resolved: what runs are calls of other rows and heads, after ranks have exchanged.
    """
    method, ulysses, asked = settings.method, settings.ulysses, settings.of_call
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if (ulysses is not None) != (method == "mixed"):
        raise ValueError(
            f"ulysses, how many ranks exchange heads, goes with method='mixed' and must be given "
            f"there, got method={method!r} ulysses={ulysses!r}"
        )
    _named(settings.partition)
    own, packed = {name: arrays[name] for name in "qkv"}, _is_packed(arrays)
    if packed:
        asked = asked._replace(layout="BSHD")
        taken = {name: interchange.take(name, array) for name, array in own.items()}
        own = {name: one_entry(name, array) for name, (array, _) in taken.items()}
    described = describe_call(asked, own)
    kind = array_namespace(described.q).__name__
    if kind != group.namespace:
        raise TypeError(f"this group exchanges {group.namespace} arrays, got {kind} arrays")
    if packed:
        described = replace(described, as_given=taken["q"][1])
    return described


def _is_packed(arrays: Mapping[str, Any]) -> bool:
    return "cu_seqlens_q" in arrays


def _offsets(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offsets of packed sequences on the host, with the longest lengths."""
    if not _is_packed(arrays):
        return {}
    found: dict[str, Any] = {}
    for name in "qk":
        given = arrays[f"cu_seqlens_{name}"]
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
        ends = [packed[name] for name in SEQUENCES]
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
        ends = [packed[name].tolist() for name in SEQUENCES]
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
    described: Request, packed: dict[str, Any], spans: tuple[Span, ...], alike: bool
) -> str:
    """Say what a ring of codes does not take of a call: what would cut them; empty where nothing.

    `alike` says whether ranks have the same rows as keys.
    """
    quant = described.settings.quant
    if packed:
        return "packed sequences"
    if quant is not None and quant.fused:
        return "QuantConfig(fused=True)"
    (span,) = spans
    first, last = span.limits
    if first is not None or last not in (None, 0):
        return "window, and no causal mask of rows and keys of two lengths"
    return "" if last is None or alike else "causal mask of rows and keys that are shared otherwise"
