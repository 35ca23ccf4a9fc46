"""Gradients on several ranks: `parallel_attention_backward`, and the same of packed sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import interchange, memory
from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.kinds import NEG_INF, array_namespace
from cupyattn.distributed import tensors
from cupyattn.distributed.agreement import ShardedCall, ShardedSettings, resolve_sharded
from cupyattn.distributed.blocks import Block
from cupyattn.distributed.forward import Kinds, by_step, forms_of_keys
from cupyattn.distributed.group import Group, check_group
from cupyattn.distributed.mesh import Heads
from cupyattn.distributed.rank_calls import NO_SCORES, Scores
from cupyattn.distributed.ring import circulate, differentiate
from cupyattn.gradients.exact import Gradients, coarse_rows
from cupyattn.ops.backward import check_received
from cupyattn.ops.part_sums import added_sums, all_keys_sums
from cupyattn.plans.backward import GIVEN_SUMS
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.backward_form import check_backward
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.sequences import one_entry
from cupyattn.problem.settings import Settings, ShardedGradientOptions, Unpack, takes_options


@explains_foreign_arguments
@takes_options
def parallel_attention_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    group: Group,
    method: str = "auto",
    *,
    ulysses: int | None = None,
    partition: Any = "contiguous",
    layout: str = "BHSD",
    d_lse: Any = None,
    deterministic: bool = False,
    **options: Unpack[ShardedGradientOptions],
) -> Gradients:
    """Gradients of `parallel_attention` with respect to q, k and v.

    Every rank of the group calls it at the same time, with the rows that it holds.

    Parameters
    ----------
    d_out : array, (batch, heads, own rows, head_dim)
        The gradient with respect to O.
    q, k, v : array
        The operands of the forward pass, float16 or bfloat16.
    out, lse : array
        Results of `parallel_attention` with ``return_lse=True``, from any rung and method.
    group, method, ulysses, partition
        As for `parallel_attention`. The partition must be that of the forward pass; the method may
        differ.
    scale, causal, causal_align, window, softcap, layout
        As in the forward pass.
    d_lse : array, float32, (batch, heads, own rows), optional
        The gradient with respect to lse. Given on every rank or on none.
    deterministic, arch, backend
        As for `cupyattn.attention_backward`. With True, the same group returns the same bits on
        every run.

    Returns
    -------
    Gradients
        (dq, dk, dv) of this rank's rows and keys, of their dtype, kind and device.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention_backward`; the other ranks then raise `RankError`.
    RankError
        As `parallel_attention`.

    Notes
    -----
    If abs(lse) is at least 1024, float32 is too coarse to give P. If a rank has all keys of its
    heads (method "ulysses"), such rows are normalised again, as in `cupyattn.attention_backward`.
    In a ring their maxima and sums over the keys of each rank are merged, and keys go round once
    more if there are such rows.

    In a ring the gradients of keys and values follow these in float32, and come home with them.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import distributed
    >>> x = np.ones((1, 2, 8, 16), np.float16)
    >>> rows = distributed.Partition.zigzag(8, 2)
    >>> options = {"method": "ring", "partition": "zigzag", "causal": True}
    >>> def on_rank(group):
    ...     q = rows.take(x, group.rank)
    ...     o, lse = distributed.parallel_attention(q, q, q, group, return_lse=True, **options)
    ...     return distributed.parallel_attention_backward(q, q, q, q, o, lse, group, **options).dv
    >>> rows.join(distributed.run(on_rank, 2))[0, 0, :, 0].round(1).tolist()
    [2.69921875, 1.7001953125, 1.2001953125, 0.89990234375, 0.60009765625, ...]
    """
    settings = Settings(layout=layout, **options)
    asked = ShardedSettings(settings.without_rung, method, ulysses, partition, deterministic)
    arrays = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    return run_backward_of("parallel_attention_backward", asked, group, arrays)


@explains_foreign_arguments
@takes_options
def parallel_attention_varlen_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    group: Group,
    method: str = "auto",
    *,
    ulysses: int | None = None,
    partition: Any = "contiguous",
    d_lse: Any = None,
    deterministic: bool = False,
    **options: Unpack[ShardedGradientOptions],
) -> Gradients:
    """Gradients of `parallel_attention_varlen` with respect to q, k and v.

    Parameters
    ----------
    d_out, q, k, v, out : array, (own rows or keys, heads or heads_kv, head_dim)
        As for `parallel_attention_backward`, packed as the forward pass had them.
    lse : array, float32, (heads, own rows)
    cu_seqlens_q, cu_seqlens_k
        As for `parallel_attention_varlen`.
    group, method, ulysses, partition, scale, causal, causal_align, window, softcap
        As for `parallel_attention_varlen`.
    d_lse : array, float32, (heads, own rows), optional
        As for `parallel_attention_backward`.
    deterministic, arch, backend
        As for `cupyattn.attention_backward`.

    Returns
    -------
    Gradients
        (dq, dk, dv) of this rank's rows and keys.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, RankError
        As `parallel_attention_backward`.
    """
    settings = Settings(**options).without_rung
    asked = ShardedSettings(settings, method, ulysses, partition, deterministic)
    arrays = {
        "d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    return run_backward_of("parallel_attention_varlen_backward", asked, group, arrays)


def run_backward_of(
    what: str,
    settings: ShardedSettings,
    group: Group,
    arrays: Mapping[str, Any],
    scores: Scores = NO_SCORES,
    finish: bool = True,
) -> Gradients:
    """Return the gradients of a call of `what`, after all ranks have agreed on it.

    With `finish` the host waits until everything has been exchanged.
    """
    check_group(group)
    arrays = tensors.detached(arrays)
    taken: dict[str, Any] = {}

    def take_others(described: AttentionProblem) -> None:
        taken.update(_take(described, arrays))

    call, (q, k, v) = resolve_sharded(what, settings, group, arrays, take_others)
    with group.failing_together(what), memory.on_device_of(q):
        whole = array_namespace(q).ascontiguousarray
        operands = {name: whole(x) for name, x in {"q": q, "k": k, "v": v, **taken}.items()}
        how = _How(bool(settings.deterministic), scores, _coarse_anywhere(call, taken["lse"]))
        found = _compute(call, operands, how)
        if finish:
            group.finish()
    return Gradients(*map(call.restore, found))


def _take(described: AttentionProblem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return d_out, out, lse and a given d_lse in layout BHSD, checked against q."""
    received = ("d_out", "out", "lse", "d_lse")
    found = {n: interchange.take(n, arrays[n])[0] for n in received if n in arrays}
    q, k, v = described.rows.values()
    check_together(q=q, **{name: Described.of(name, x) for name, x in found.items()})
    packed = "cu_seqlens_q" in arrays
    check_received(described, found, packed=packed)
    if packed:
        found = {n: a[None] if n in _OF_LSE else one_entry(n, a) for n, a in found.items()}
    layout = described.settings.layout
    found = {n: a if n in _OF_LSE else to_bhsd(a, layout) for n, a in found.items()}
    check_backward(**found, q=q, k=k, v=v)
    return found


#: Arrays with one number per row.
_OF_LSE = ("lse", "d_lse")
#: Arrays of a backward pass whose heads are exchanged as keys; the others, as rows.
_KINDS = {"k": "kv", "v": "kv"}


class _How(NamedTuple):
    """Computes the gradients of one rank.

    Parameters
    ----------
    deterministic : bool
    scores : Scores
    coarse : bool
        Whether a ring first sums its coarse rows again, over the keys of all ranks.
    """

    deterministic: bool
    scores: Scores
    coarse: bool


def _coarse_anywhere(call: ShardedCall, lse: Any) -> bool:
    """Return whether some rank of a ring has a row whose lse is too coarse to give P.

    All ranks have to know: the keys then go round once more. The host waits for lse.
    """
    if call.mesh.ring == 1:
        return False
    return any(call.group.gather("coarse rows", bool(coarse_rows(lse).any())))


def _compute(call: ShardedCall, arrays: Mapping[str, Any], how: _How) -> tuple[Any, ...]:
    """Return the gradients of this rank's rows and keys."""
    if call.mesh.ulysses == 1:
        return _of_heads(call, arrays, how)
    q, k, v = (arrays[name] for name in "qkv")
    xp = array_namespace(q)
    dq = xp.empty(q.shape, q.dtype)
    sums = [xp.zeros(x.shape, np.float32) for x in (k, v)]
    coming: list[tuple[list[Heads], list[tuple[int, int]], list[Any]]] = []

    def receivers(step: list[Heads]) -> list[tuple[Any, str, list[tuple[int, int]]]]:
        # NOTE: a key head whose query heads are on several ranks comes from each of them.
        ends = accumulate((kv[1] - kv[0] for kv in (heads.kv for heads in step)), initial=0)
        stacked = list(pairwise(ends))
        shape = (k.shape[0], stacked[-1][1], *k.shape[2:])
        of_keys = [xp.empty(shape, k.dtype) for _ in "kv"]
        coming.append((step, stacked, of_keys))
        return [(dq, "q", [heads.q for heads in step]), *((x, "kv", stacked) for x in of_keys)]

    def work_on(heads: Heads, some: list[Any]) -> Kinds:
        found = _of_heads(call, dict(zip(arrays, some, strict=True)), how)
        return list(zip(found, ("q", "kv", "kv"), strict=True))

    operands = [(x, _KINDS.get(name, "q")) for name, x in arrays.items()]
    by_step(call, operands, work_on, receivers)
    for step, stacked, of_keys in coming:
        for heads, place in zip(step, stacked, strict=True):
            for total, gradient in zip(sums, of_keys, strict=True):
                total[:, slice(*heads.kv)] += gradient[:, slice(*place)].astype(np.float32)
    return dq, *(_stored(total, q.dtype) for total in sums)


def _of_heads(call: ShardedCall, arrays: Mapping[str, Any], how: _How) -> tuple[Any, ...]:
    """Return the gradients of some heads of the rows of this rank and its neighbours."""
    q, k, v, lse = (arrays[name] for name in ("q", "k", "v", "lse"))
    if call.mesh.ring == 1:
        return tuple(call.calls.whole_backward(arrays, how.deterministic, how.scores))
    forms = forms_of_keys(call, k)
    sums = _sums(call, q, k, lse, how.scores) if how.coarse else {}

    def gradients_of(owner: int, keys: Sequence[Any]) -> Iterator[tuple[Block, Any]]:
        some = {**arrays, **dict(zip("kv", keys, strict=True)), **sums}
        cut = how.scores.cut(call.rows, call.keys[owner])
        return call.calls.of_blocks_backward(some, call.blocks[owner], how.deterministic, cut)

    found = differentiate(call.group, call.circle, q, (k, v), forms, gradients_of, call.wide_sums)
    return tuple(_stored(x, q.dtype) for x in found)


def _sums(call: ShardedCall, q: Any, k: Any, lse: Any, scores: Scores) -> dict[str, Any]:
    """Return M and the factor of coarse rows over the keys of all ranks; K goes round once."""
    xp, forms = array_namespace(q), forms_of_keys(call, k)
    M, sums = xp.full(lse.shape, NEG_INF, np.float32), xp.zeros(lse.shape, np.float32)
    natural = bool(call.described.settings.softcap) or "bias" in scores.arrays
    for owner, (of_k,) in circulate(call.group, call.circle, (k,), lambda n: forms(n)[:1], q):
        cut = scores.cut(call.rows, call.keys[owner])
        for rows, part in call.calls.of_blocks_sums(q, of_k, lse, call.blocks[owner], cut):
            at = slice(None), slice(None), slice(*rows)
            M[at], sums[at] = added_sums((M[at], sums[at]), part, natural=natural)
    return dict(zip(GIVEN_SUMS, all_keys_sums(M, sums), strict=True))


def _stored(x: Any, dtype: Any) -> Any:
    """Round a gradient to its type."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)
