"""`parallel_attention` and `parallel_attention_varlen`: attention of a sequence on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cupyattn.arrays import memory
from cupyattn.arrays.interchange import check_untransformed, imported, unchanged
from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed import tensors
from cupyattn.distributed.agreement import ShardedCall, ShardedSettings, agree
from cupyattn.distributed.backward import run_backward_of
from cupyattn.distributed.forward import compute
from cupyattn.distributed.group import Group, check_group
from cupyattn.distributed.rank_calls import NO_SCORES, Scores
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.settings import Settings, ShardedOptions, Unpack, takes_options


@explains_foreign_arguments
@takes_options
def parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    group: Group,
    method: str = "auto",
    *,
    ulysses: int | None = None,
    partition: Any = "contiguous",
    layout: str = "BHSD",
    **options: Unpack[ShardedOptions],
) -> Any:
    """`cupyattn.attention` of a sequence whose rows and keys are on several ranks.

    Every rank of the group calls it at the same time with its rows of q, k and v. It gets the same
    rows of the result.

    Parameters
    ----------
    q : array, (batch, heads, own rows, head_dim)
        Kinds of arrays and dtypes as for `cupyattn.attention`; on the device of the group.
    k, v : array, (batch, heads_kv, own keys, head_dim)
        `heads_kv` divides `heads`.
    group : Group
        From `cupyattn.distributed.run`, `connect`, `from_mpi` or `from_torch`.
    method : {"auto", "ulysses", "ring", "mixed"}
        ``"ulysses"``: ranks exchange heads for rows, so each computes some heads of the whole
        sequence. ``"ring"``: keys and values circulate, and each rank computes its rows.
        ``"mixed"``: groups of `ulysses` neighbours exchange heads, and the groups form a ring.
        ``"auto"``: the method given to `from_torch`, otherwise the fastest method by
        `cupyattn.distributed.model`.
    ulysses : int, optional
        With ``"mixed"``: number of neighbours that exchange heads; divides the ranks.
    partition : {"contiguous", "zigzag"} or Partition or (Partition, Partition)
        Which rank has which rows. "contiguous": rank after rank, each with its number of rows.
        "zigzag": as in `Partition.zigzag`, which gives all ranks of a ring the same work under a
        causal mask. Otherwise a partition, or one for q and one for k and v.
    variant, accuracy, scale, softcap, layout, quant, tiles, arch, backend
        As for `cupyattn.attention`. In a ring of ``fa_int8``, codes and scales travel in place of
        keys and values, and each rank quantises its keys. Given scales belong to the whole call,
        for all heads, and must be the same on every rank; a ring supports granularity "tensor" and
        "head".
    causal, causal_align, window
        As for `cupyattn.attention` of the whole sequence.
    return_lse : bool
        Also return the log-sum-exp; gradients go through it, too.

    Returns
    -------
    o : array, (batch, heads, own rows, head_dim)
        Dtype and kind of q, on its device and the current stream.
    lse : array, float32, (batch, heads, own rows)
        With `return_lse`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `cupyattn.attention`; the other ranks then raise `RankError`.
    RankError
        If a rank has ended, does not come within the group's timeout, or calls with other shapes or
        options than the others; the message names rank and cause, and is the same on all ranks.

    Notes
    -----
    Returns when everything has been exchanged, so that an error of another rank is raised here.

    Tensors of torch that require gradients get them: autograd calls `parallel_attention_backward`,
    on all ranks in the same order.

    With ``"ulysses"`` every head is computed as in a separate call of `cupyattn.attention`. A ring
    rounds partial results, for some keys, to the type of q and merges them in float32;
    `cupyattn.distributed.verdict` has the bound. The same group returns the same bits on every run.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import distributed
    >>> x = np.ones((1, 2, 8, 16), np.float16)
    >>> rows = distributed.Partition.contiguous(8, 2)
    >>> def on_rank(group):
    ...     own = rows.take(x, group.rank)
    ...     return distributed.parallel_attention(own, own, own, group, "ring")
    >>> rows.join(distributed.run(on_rank, 2)).shape
    (1, 2, 8, 16)
    """
    asked = ShardedSettings(Settings(layout=layout, **options), method, ulysses, partition)
    return _run("parallel_attention", asked, group, {"q": q, "k": k, "v": v})


@explains_foreign_arguments
@takes_options
def parallel_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    group: Group,
    method: str = "auto",
    *,
    ulysses: int | None = None,
    partition: Any = "contiguous",
    **options: Unpack[ShardedOptions],
) -> Any:
    """`cupyattn.attention_varlen` of packed sequences whose rows are on several ranks.

    Parameters
    ----------
    q, k, v : array, (own rows or keys, heads or heads_kv, head_dim)
        This rank's part of the packed rows; a sequence may begin on one rank and end on another.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32 or int64
        Offsets of the sequences among the rows of all ranks, the same on every rank. Offsets on a
        device cause a synchronisation.
    group, method, ulysses
        As for `parallel_attention`.
    partition
        As for `parallel_attention`, of the packed rows; ``"zigzag"`` is
        `Partition.zigzag_varlen`.
    variant, accuracy, scale, causal, causal_align, window, softcap, quant, tiles, arch, backend
        As for `cupyattn.attention_varlen`. ``fa_int8`` runs with ``method="ulysses"``.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    o : array, (own rows, heads, head_dim)
    lse : array, float32, (heads, own rows)
        With `return_lse`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, RankError
        As `parallel_attention`.
    """
    asked = ShardedSettings(Settings(**options), method, ulysses, partition)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays = {"q": q, "k": k, "v": v, **offsets}
    return _run("parallel_attention_varlen", asked, group, arrays)


def _run(what: str, settings: ShardedSettings, group: Group, arrays: Mapping[str, Any]) -> Any:
    """Run the call and return the results that the caller requested."""
    # NOTE: the branch is in this frame, because torch traces functions called from here.
    call = tensors.untraced(on_ranks) if tensors.is_compiling() else on_ranks
    _, o, lse = call(what, settings, group, arrays)
    return (o, lse) if settings.of_call.return_lse else o


def on_ranks(
    what: str,
    settings: ShardedSettings,
    group: Group,
    arrays: Mapping[str, Any],
    scores: Scores = NO_SCORES,
    finish: bool = True,
) -> tuple[ShardedCall, Any, Any]:
    """Agree with the other ranks and compute, with autograd if tensors require it.

    Parameters
    ----------
    what : str
        Name of the called function, for messages.
    settings : ShardedSettings
    group : Group
    arrays : mapping
        This rank's arrays, by the names of `cupyattn.problem.settings.parse`.
    scores : Scores
        Options of scores for the rows and keys of all ranks, equally many on every rank.
    finish : bool
        Wait on the host until everything has been exchanged.

    Returns
    -------
    call : ShardedCall
        The call that ran.
    o, lse : array
        In the caller's kind; lse is None unless the settings have `return_lse`.
    """
    check_group(group)
    for name in "qkv":
        check_untransformed(name, arrays[name])
    if not tensors.need_gradients(arrays):
        return _on_ranks(what, settings, group, tensors.detached(arrays), scores, finish)
    others = {name: x for name, x in arrays.items() if name not in "qkv"}
    with_lse = settings._replace(
        of_call=settings.of_call._replace(return_lse=True), recorded=True
    )
    of_backward = settings._replace(of_call=settings.of_call.without_rung)
    found: list[ShardedCall] = []

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        own = {"q": q, "k": k, "v": v, **others}
        call, o, lse = _on_ranks(what, with_lse, group, own, scores, finish)
        found.append(call)
        return o, lse

    def backward(d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        given = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse, **others}
        if d_lse is not None:
            given["d_lse"] = d_lse
        return run_backward_of(f"{what}_backward", of_backward, group, given, scores, finish)

    o, lse = tensors.differentiable(
        forward, backward, *(arrays[name] for name in "qkv"),
        through_lse=bool(settings.of_call.return_lse),
    )  # fmt: skip
    return found[0], o, lse


def _on_ranks(
    what: str,
    settings: ShardedSettings,
    group: Group,
    arrays: Mapping[str, Any],
    scores: Scores,
    finish: bool,
) -> tuple[ShardedCall, Any, Any]:
    own, as_given = _as_arrays(arrays)
    call, operands = agree(what, settings, group, own)
    return_lse = settings.of_call.return_lse
    with group.failing_together(what), memory.on_device_of(operands[0]):
        q, k, v = map(array_namespace(*operands).ascontiguousarray, operands)
        o, lse = compute(call, q, k, v, return_lse, scores)
        if finish:
            group.finish()
    o = as_given(call.restore(o))
    if not return_lse:
        return call, o, None
    return call, o, as_given(call.as_given(lse[0] if call.calls.offsets else lse))


def _as_arrays(arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[Any], Any]]:
    """Return NumPy or CuPy arrays, which identify calls, and the converter of results."""
    try:
        own, as_given = imported({name: arrays[name] for name in "qkv"})
    except TypeError:  # which checks of the call say again, to all ranks
        return arrays, unchanged
    return {**arrays, **own}, as_given
