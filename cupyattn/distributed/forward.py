"""The forward pass of a rank.

Heads are exchanged step by step during the computation; within a step, keys and values circulate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import NEG_INF, STORAGE, array_namespace
from cupyattn.distributed.agreement import ShardedCall
from cupyattn.distributed.codes import TravellingCodes
from cupyattn.distributed.group import Message, Work
from cupyattn.distributed.mesh import Heads, shares_of_heads
from cupyattn.distributed.partition import Range
from cupyattn.distributed.rank_calls import NO_SCORES, Calls, Scores
from cupyattn.distributed.ring import MessageForm, Part, attend, circulate
from cupyattn.distributed.ulysses import Neighbours

#: Arrays, and which of rows and keys, query heads and key heads they have.
Kinds = Sequence[tuple[Any, str]]
#: The same, with the positions of each neighbour's heads.
Receivers = Sequence[tuple[Any, str, Sequence[Range]]]


def compute(
    call: ShardedCall, q: Any, k: Any, v: Any, return_lse: bool, scores: Scores = NO_SCORES
) -> tuple[Any, Any]:
    """Return O and lse of this rank's rows, from contiguous arrays; messages may still travel.

    Without `return_lse` lse need not be right. `scores` are of all rows and keys.
    """
    if call.mesh.ulysses == 1:
        return _of_heads(call, call.calls, q, k, v, scores)
    xp = array_namespace(q)
    o = xp.empty(q.shape, STORAGE[call.described.call.dtype])
    lse = xp.full(q.shape[:3], NEG_INF, np.float32)
    wanted = (o, lse) if return_lse else (o,)

    def work_on(heads: Heads, arrays: list[Any]) -> Kinds:
        q, k, v = arrays
        found = _of_heads(call, call.calls.of_heads(heads), q, k, v, scores)
        return [(x, "q") for x in found[: len(wanted)]]

    by_step(
        call,
        [(q, "q"), (k, "kv"), (v, "kv")],
        work_on,
        lambda step: [(x, "q", [heads.q for heads in step]) for x in wanted],
    )
    return o, lse


def by_step(
    call: ShardedCall,
    operands: Kinds,
    work_on: Callable[[Heads, list[Any]], Kinds],
    receivers: Callable[[list[Heads]], Receivers],
) -> None:
    """Exchange heads for rows in steps, compute, and return the results to their ranks.

    Parameters
    ----------
    call : ShardedCall
    operands : sequence of (array, {"q", "kv"})
        All heads of this rank's rows, or keys.
    work_on : callable
        Takes this rank's heads and the arrays with all their rows; returns one result for each
        receiver.
    receivers : callable
        Takes the heads of all neighbours; returns arrays that receive the results for this rank's
        rows or keys, and the positions of each neighbour's heads in them.

    Notes
    -----
    While a step is computed, the operands of the next step and the results of the previous step
    travel.
    """
    rows, keys = call.neighbours
    of_kind = {"q": rows, "kv": keys}
    sizes = call.described.call.heads, call.described.call.heads_kv
    heads_of_ranks = shares_of_heads(*sizes, call.mesh.ulysses)
    steps = [list(step) for step in zip(*heads_of_ranks, strict=True)]
    own = call.mesh.neighbours(call.group.rank).index(call.group.rank)

    def scatter(step: list[Heads]) -> tuple[Work, list[Any]]:
        sends: list[Message] = []
        receives: list[Message] = []
        arrays = [
            of_kind[kind].scatter(x, _of(step, kind), sends, receives) for x, kind in operands
        ]
        return call.group.prepare(sends, receives), arrays

    homeward: deque[Work] = deque()
    work, arrays = scatter(steps[0]) if steps else (None, [])
    if work is not None:  # no computation overlaps the first heads
        work.begin()
    for index, step in enumerate(steps):
        # NOTE: in this order. Arrays for the next heads are allocated before this step computes
        # (see `Group.prepare`). Messages start after its launch, because they take host time in
        # which the device would be idle.
        coming = scatter(steps[index + 1]) if index + 1 < len(steps) else (None, [])
        if work is not None:
            work.wait()
        if len(homeward) > 1:  # it left before these heads did; its arrays hold the next results
            homeward.popleft().wait()
        results = work_on(step[own], arrays)
        work, arrays = coming  # frees this step's memory before a later step allocates as much
        if work is not None:
            work.begin()
        homeward.append(_bring_home(call, of_kind, results, receivers(step)))
    for work in homeward:
        work.wait()


def _bring_home(
    call: ShardedCall,
    of_kind: dict[str, Neighbours],
    results: Kinds,
    receivers: Receivers,
) -> Work:
    sends: list[Message] = []
    receives: list[Message] = []
    for (part, kind), (whole, _, heads) in zip(results, receivers, strict=True):
        contiguous = array_namespace(part).ascontiguousarray(part)
        of_kind[kind].gather(contiguous, whole, heads, sends, receives)
    return call.group.exchange(sends, receives)


def _of(step: list[Heads], kind: str) -> list[tuple[int, int]]:
    return [getattr(heads, kind) for heads in step]


def _of_heads(
    call: ShardedCall, calls: Calls, q: Any, k: Any, v: Any, scores: Scores
) -> tuple[Any, Any]:
    """Return O and lse of some heads of the rows of this rank and its neighbours.

    `calls` are the calls of these heads.
    """
    # NOTE: without heads, too: all ranks exchange equally often.
    if call.mesh.ring == 1:
        return calls.whole(q, k, v, scores)
    backend = call.described.backend
    if call.described.variant.family == "int8":
        all_keys = [(0, call.rows_kv.length)]
        codes = TravellingCodes(call, calls, q, k, v, scores.cut(call.rows, all_keys))
        coming = circulate(call.group, call.circle, codes.own, codes.forms, q)
        return attend(q, coming, codes.results_of, backend, call.wide_sums)

    def results_of(owner: int, arrays: Sequence[Any]) -> Iterator[Part]:
        of_k, of_v = arrays
        some = scores.cut(call.rows, call.keys[owner])
        return calls.of_blocks(q, of_k, of_v, call.blocks[owner], some)

    coming = circulate(call.group, call.circle, (k, v), forms_of_keys(call, k), q)
    return attend(q, coming, results_of, backend, call.wide_sums)


def forms_of_keys(call: ShardedCall, k: Any) -> Callable[[int], list[MessageForm]]:
    """Return a function of shape and dtype of K and V of the rank at an index of the circle."""

    def forms(owner: int) -> list[MessageForm]:
        length = sum(end - begin for begin, end in call.keys[owner])
        return [((*k.shape[:2], length, k.shape[3]), k.dtype)] * 2

    return forms
