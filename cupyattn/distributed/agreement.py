"""One call on several ranks, whose arguments are compared between all ranks."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import interchange
from cupyattn.arrays.described import Described
from cupyattn.arrays.form import forms_of
from cupyattn.distributed.blocks import Block, Span, blocks
from cupyattn.distributed.choice import choose_mesh
from cupyattn.distributed.group import Group
from cupyattn.distributed.mesh import Heads, Mesh, shares_of_heads
from cupyattn.distributed.partition import Partition, Range
from cupyattn.distributed.rank_calls import Calls
from cupyattn.distributed.scales import (
    check_scales,
    compared_scales,
    scales_beside,
    tiles_of_scales,
)
from cupyattn.distributed.ulysses import Neighbours, merged_ranges
from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels import limits as kernels_limits
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import described as described_call
from cupyattn.ops.backward import check_offered
from cupyattn.ops.call_operands import arguments_of
from cupyattn.problem import checks
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.sequences import SEQUENCES, check_offsets, one_entry
from cupyattn.problem.settings import Settings
from cupyattn.quant.config import QuantConfig
from cupyattn.quant.quantized import QuantizedQKV

METHODS = ("auto", "ulysses", "ring", "mixed")
#: Names that `Partition` makes of lengths.
NAMED = ("contiguous", "zigzag")
#: Letters of a list of numbers that messages show.
_SHOWN = 40


class ShardedSettings(NamedTuple):
    """Arguments of a call on several ranks, except arrays.

    Parameters
    ----------
    of_call : Settings
        Settings of the whole sequence.
    method : {"auto", "ulysses", "ring", "mixed"}
    ulysses : int or None
    partition : {"contiguous", "zigzag"}, Partition or (Partition, Partition)
    deterministic : bool or None
        For a backward pass.
    wide_sums : bool
        Whether a ring adds in float32; otherwise in the type of q.
    recorded : bool
        Whether autograd of this rank records the call.
    """

    of_call: Settings
    method: str
    ulysses: int | None
    partition: Any
    deterministic: bool | None = None
    wide_sums: bool = True
    recorded: bool = False


def comparable(asked: ShardedSettings) -> ShardedSettings | None:
    """Return the settings of a call as built-in numbers and pairs, which ranks can compare.

    None if a value is not valid in any call. The checks of the call then refuse it.
    """
    of_call, scale = asked.of_call, asked.of_call.scale
    try:
        return ShardedSettings(
            of_call._replace(
                scale=None if scale is None else checks.check_scale(scale, 1),
                causal=_answer(of_call.causal), window=checks.check_window(of_call.window),
                softcap=checks.check_softcap(of_call.softcap),
                return_lse=_answer(of_call.return_lse),
            ),
            _check_method(asked.method), _check_ulysses(asked.ulysses),
            _check_partition(asked.partition),
            _answer(asked.deterministic), _answer(asked.wide_sums), asked.recorded,
        )  # fmt: skip
    except (TypeError, ValueError):
        return None


def _check_method(method: Any) -> str:
    """Return the name of a method."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {shown(method)}")
    return method


def _answer(value: Any) -> Any:
    """Return True or False of NumPy as Python's; None stays None."""
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"a switch must be True or False, got {shown(value)}")
    return None if value is None else bool(value)


def _check_ulysses(ulysses: Any) -> int | None:
    """Return how many ranks exchange heads as a Python number, or None."""
    try:
        if isinstance(ulysses, (bool, np.bool_)):
            raise TypeError
        return None if ulysses is None else operator.index(ulysses)
    except TypeError:
        raise TypeError(
            f"ulysses must be a whole number of ranks or None, got {shown(ulysses)}"
        ) from None


def _check_partition(partition: Any) -> Any:
    """Return a partition, a pair of two in a tuple."""
    if isinstance(partition, Partition) or (isinstance(partition, str) and partition in NAMED):
        return partition
    pair = tuple(partition) if isinstance(partition, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(one, Partition) for one in pair):
        raise TypeError(
            "partition must be 'contiguous', 'zigzag', a Partition, or one of q and one of k, "
            f"got {shown(partition)}"
        )
    return pair


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """One call, as a rank sees it after all ranks have agreed; its arrays are given beside it.

    Parameters
    ----------
    group : Group
    mesh : Mesh
    rows_q, rows_kv : Partition
        The partitions of rows and of keys.
    spans : tuple of Span
        The sequences.
    described : AttentionProblem
        A call of this rank's own arrays as if they were all: rung and backend.
    as_given : callable
        Turns a result into the kind of array that the caller's q is.
    calls : Calls
    digest : str
        Digest of the facts of all ranks.
    wide_sums : bool
        As in `ShardedSettings`.
    """

    group: Group
    mesh: Mesh
    rows_q: Partition
    rows_kv: Partition
    spans: tuple[Span, ...]
    described: AttentionProblem
    as_given: Callable[[Any], Any]
    calls: Calls
    digest: str
    wide_sums: bool = True

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
        return self.as_given(o[0].swapaxes(0, 1) if packed else to_bhsd(o, layout))


def agree(
    what: str, settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]
) -> tuple[ShardedCall, tuple[Any, Any, Any]]:
    """Agree with the other ranks on a forward pass, by one message if all have agreed on it before.

    A rank recognises its call as any call is recognised (`cupyattn.runtime.recent`). If every rank
    knows the call, and all calls are the same, nothing is checked or planned again.

    Parameters
    ----------
    what : str
        The function that is called, for messages.
    settings : ShardedSettings
    group : Group
    arrays : mapping
        This rank's arrays, as `cupyattn.problem.settings.parse` names them.

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
    known = comparable(settings)
    key, call = (None, None) if known is None else _find(what, known, group, arrays)
    said = group.gather(what, "" if call is None else call.digest)
    if call is not None and len(set(said)) == 1:
        q, k, v = (to_bhsd(arrays[name], settings.of_call.layout) for name in "qkv")
        return call, (q, k, v)
    call, rows = resolve_sharded(what, settings, group, arrays)
    group.agree(what, lambda: _check_kernels(call))
    if key is not None:
        group.agreed.remember(key, call)
    return call, rows


def _find(
    what: str, settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]
) -> tuple[Any, ShardedCall | None]:
    """Return the key of a call, and the call if this rank has agreed on it before."""
    try:
        _, own, facts = arguments_of(settings.of_call, arrays)
    except (TypeError, ValueError):  # checks of the call raise it again
        return None, None
    if facts is None:  # the numbers of offsets count
        return None, None
    forms, _ = forms_of(own)
    return group.agreed.find((what, settings, *facts), forms)


def resolve_sharded(
    what: str,
    settings: ShardedSettings,
    group: Group,
    arrays: Mapping[str, Any],
    take_others: Callable[[AttentionProblem], None] | None = None,
) -> tuple[ShardedCall, tuple[Any, Any, Any]]:
    """Check a call of this rank, agree with the others on it, and choose how it runs.

    Parameters
    ----------
    what, settings, group, arrays
        As for `agree`.
    take_others : callable, optional
        Takes and checks the arrays of a backward pass, given this rank's own call.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        For errors of this rank.
    RankError
        For errors of another rank, or values that differ between ranks.
    """
    settings = comparable(settings) or settings
    asked = settings.of_call
    found: list[tuple[AttentionProblem, tuple[Any, ...], dict[str, Any], _Coding | None]] = []

    def facts() -> dict[str, Any]:
        own_call, own_rows, own_way = _own_call(settings, group, arrays)
        packed = _offsets(arrays)
        if take_others is not None:
            take_others(own_call)
        coding = None
        if own_call.variant.family == "int8":
            coding = _Coding.of(own_call, own_rows[0], asked.quant)
        found.append((own_call, (own_rows, own_way), packed, coding))
        call = own_call.call
        same = {
            "batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv,
            "head_dim": call.head_dim, "dtype": call.dtype, "variant": own_call.variant.name,
            "method": settings.method, "ulysses": settings.ulysses,
            "partition": _named(settings.partition),
            "layout": asked.layout, "scale": call.scale, "softcap": call.softcap,
            **{name: str(value) for name, value in asked.places.items()},
            **{n: str(getattr(asked, n)) for n in ("tiles", "arch", "accuracy")},
            **({} if coding is None else coding.compared), "backend": own_call.backend,
            **{n: _in_words(packed[n].tolist()) for n in SEQUENCES if packed},
            "autograd": settings.recorded, "return_lse": asked.return_lse,
            "d_lse": "d_lse" in arrays,
            "deterministic": bool(settings.deterministic), "wide_sums": settings.wide_sums,
        }  # fmt: skip
        own = {"len_q": own_call.rows["q"].shape[2], "len_kv": own_call.rows["k"].shape[2]}
        return {"same": same, "own": own}

    agreed = group.agree(what, facts)
    said = [of_rank["own"] for of_rank in agreed]
    ((described, (rows, as_given), packed, coding),) = found
    rows_q, rows_kv = _partitions(settings.partition, said, packed)
    spans = _spans(asked.places, rows_q, rows_kv, packed)
    spec = checks.with_lengths(described.call, rows_q.length, rows_kv.length, **asked.places)
    obstacle = ""
    if coding is not None:
        check_scales(coding.quant, coding.scale_tiles, spec, packed)
        obstacle = _obstacle(coding.quant, packed, spans, rows_q == rows_kv)
    given = group.mesh if settings.method == "auto" else None
    mesh = given or choose_mesh(
        settings.method, settings.ulysses, spec, described.variant.name, group.hosts,
        balanced=settings.partition != "contiguous", without_ring=bool(obstacle),
        machine=group.machine,
    )  # fmt: skip
    if mesh.ring > 1 and obstacle:
        raise UnsupportedError(
            f"a ring of fa_int8, round which codes go, takes no {obstacle}: use method='ulysses'"
        )
    own = asked._replace(
        variant=described.variant.name, accuracy="full",
        quant=None if coding is None else coding.quant, layout="BHSD", return_lse=True,
        max_len_q=packed.get("max_len_q"), max_len_k=packed.get("max_len_k"),
    )  # fmt: skip
    offsets = {name: packed[name].astype(np.int32) for name in SEQUENCES if packed}
    calls = Calls(own, offsets)
    call = ShardedCall(
        group, mesh, rows_q, rows_kv, spans, described, as_given, calls, _digest(agreed),
        settings.wide_sums,
    )  # fmt: skip
    return call, rows


class _Coding(NamedTuple):
    """Quantisation by ``fa_int8`` on a rank, and the tiles for granularity "block"."""

    quant: QuantConfig
    scale_tiles: Tiles

    @classmethod
    def of(cls, described: AttentionProblem, q: Any, given: QuantConfig | None) -> _Coding:
        quant = described.settings.quant or QuantConfig()
        if given is not None and given.static:
            quant = scales_beside(replace(quant, scales=given.scales), q)
        return cls(quant, tiles_of_scales(described, quant))

    @property
    def compared(self) -> dict[str, str]:
        """Values that must be the same on all ranks."""
        own = {"quant": str(self.quant), "scale_tiles": str(self.scale_tiles)}
        return {**own, **compared_scales(self.quant)}


def _own_call(
    settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]
) -> tuple[AttentionProblem, tuple[Any, Any, Any], Callable[[Any], Any]]:
    """Check this rank's arrays as if they were all; return them in layout BHSD, and the way back to
    the kind of q.

    No kernel is chosen here: the actual calls have other rows and heads (`_check_kernels`).
    """
    method, ulysses, asked = settings.method, settings.ulysses, settings.of_call
    _check_method(method)
    if (ulysses is not None) != (method == "mixed"):
        raise ValueError(
            "ulysses, the number of ranks that exchange heads, is required by method='mixed' and "
            f"by no other, got method={method!r} ulysses={ulysses!r}"
        )
    _check_ulysses(ulysses)
    _check_partition(settings.partition)
    if "d_out" in arrays:
        check_offered(arrays["q"], settings.deterministic)
    if isinstance(arrays["q"], QuantizedQKV):
        raise UnsupportedError(
            "ranks quantise rows themselves, after heads were exchanged, and take no QuantizedQKV: "
            "give the arrays that were quantised, with variant='fa_int8' and quant="
        )
    own, as_given = interchange.imported({name: arrays[name] for name in "qkv"})
    if _is_packed(arrays):
        asked = asked._replace(layout="BSHD")
        own = {name: one_entry(name, x) for name, x in own.items()}
    if isinstance(asked.quant, QuantConfig):  # scales belong to the rows of all ranks
        asked = asked._replace(quant=replace(asked.quant, scales="dynamic"))
    described = described_call(asked, own)
    q, k, v = (x.bound(own[x.name]) for x in described.rows.values())
    group.check_array("q", q)
    return described, (q, k, v), as_given


def _check_kernels(call: ShardedCall) -> dict[str, Any]:
    """Raise for a call of this rank that the kernel refuses; there is nothing to compare.

    Once the ranks exchange arrays, a refusal would end the group.
    """
    own, mesh, rank = call.described, call.mesh, call.group.rank
    q, heads_kv = own.rows["q"], own.rows["k"].shape[1]
    batch, heads, _, head_dim = q.shape
    steps: Iterable[Heads] = [Heads((0, heads), (0, heads_kv))]
    if mesh.ulysses > 1:
        shares = shares_of_heads(heads, heads_kv, mesh.ulysses)
        steps = shares[mesh.neighbours(rank).index(rank)]

    def rows(name: str, heads: Range, ranges: Iterable[Range]) -> Described:
        length = sum(end - begin for begin, end in ranges)
        shape = batch, heads[1] - heads[0], length, head_dim
        return Described.contiguous(name, shape, q.dtype)

    for some in steps:
        of_heads = call.calls.of_heads(some)
        settings = of_heads.settings._replace(arch=own.architecture, backend="mirror")
        calls = Calls(settings, of_heads.offsets)
        for owner, keys in enumerate(call.keys):
            blocks_of = None if mesh.ring == 1 else call.blocks[owner]
            calls.check(
                blocks_of, rows("q", some.q, call.rows), rows("k", some.kv, keys),
                rows("v", some.kv, keys),
            )  # fmt: skip
        if mesh.ring > 1 and own.variant.family == "int8":  # which makes codes of no rows, too
            calls.check_codes(
                rows("q", some.q, []), rows("k", some.kv, []), rows("v", some.kv, [])
            )
    return {"same": {}}


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
        check_offsets(f"cu_seqlens_{name}", taken)
        found[f"cu_seqlens_{name}"] = taken.astype(np.int64)  # checked before 32 bits cut them
        found[f"max_len_{name}"] = int(np.diff(taken).max(initial=0))
    counts = {n: a.size - 1 for n, a in found.items() if n.startswith("cu_seqlens")}
    if len(set(counts.values())) != 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must be of one length, got {counts}")
    return found


def _partitions(
    partition: Any, said: list[dict[str, int]], packed: dict[str, Any]
) -> tuple[Partition, Partition]:
    """Return the partitions of rows and of keys, checked against the lengths of the arrays."""
    lengths = [[of_rank[name] for of_rank in said] for name in ("len_q", "len_kv")]
    if packed:
        for name, have in zip("qk", lengths, strict=True):
            ends, longest = packed[f"cu_seqlens_{name}"], packed[f"max_len_{name}"]
            kernels_limits.check_cu_seqlens(name, ends, sum(have), longest)
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
    return [_in_words(one.ranges) for one in pair]


def _in_words(numbers: Any) -> str:
    """Return numbers as ranks compare them and messages show them."""
    text = str(numbers)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..., sha256 {_digest(numbers)}"


def _digest(numbers: Any) -> str:
    """Return a short digest of many numbers."""
    return hashlib.sha256(str(numbers).encode()).hexdigest()[:16]


def _obstacle(
    quant: QuantConfig, packed: dict[str, Any], spans: tuple[Span, ...], alike: bool
) -> str:
    """Return the part of a call that a ring of codes does not take, in words; empty if none.

    `alike` is whether ranks have the same rows as keys.
    """
    if packed:
        return "packed sequences"
    if quant.fused:
        return "QuantConfig(fused=True)"
    if quant.static:
        of_rows = {"q": quant.granularity_q, "k": quant.granularity_k}
        for name, granularity in of_rows.items():
            if granularity not in ("tensor", "head"):
                return f"given scales of granularity_{name}={granularity!r}"
    (span,) = spans
    first, last = span.limits
    if first is not None or last not in (None, 0):
        return "window, and no causal mask of rows and keys of two lengths"
    return "" if last is None or alike else "causal mask of rows and keys that are shared otherwise"
