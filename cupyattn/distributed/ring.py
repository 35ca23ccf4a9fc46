"""Keys and values circulate in a ring; each rank attends to its keys while the next ones travel.

Partial results are merged by their lse in float32, in the order in which the keys come. In the
backward pass the gradients of the keys follow the keys one step later, and return to their rank at
the end. Their messages are enqueued after the step that they belong to, so the keys of the next
step do not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import array_namespace
from cupyattn.distributed.blocks import Block
from cupyattn.distributed.group import Group
from cupyattn.distributed.merging import Partial
from cupyattn.distributed.partition import Range

#: Shape and dtype of an array that is to come.
MessageForm = tuple[tuple[int, ...], Any]
#: Rows of a partial result, O and lse.
Part = tuple[Range, Any, Any]


def circulate(
    group: Group,
    circle: Sequence[int],
    own: Sequence[Any],
    forms: Callable[[int], Sequence[MessageForm]],
    like: Any,
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the arrays of every rank of a ring, this rank's first.

    The next arrays travel while the caller computes.

    Parameters
    ----------
    group : Group
    circle : sequence of int
        The ranks, in the order in which arrays are passed on.
    own : sequence of array, contiguous
        This rank's arrays; not modified.
    forms : callable
        Returns shape and dtype of the arrays of the rank at an index of the circle.
    like : array
        An array of the received kind, because this rank may have none.

    Yields
    ------
    owner : int
        Index in the circle.
    arrays : sequence of array
        Arrays of that rank.

    Notes
    -----
    There are two sets of arrays besides `own`: one is used in the computation, the other arrives.
    """
    size, index = len(circle), circle.index(group.rank)
    after, before = circle[(index + 1) % size], circle[index - 1]
    current = own
    for step in range(size):
        owner = (index - step) % size
        if step + 1 == size:
            yield owner, current
            return
        coming = empty_like_forms(like, forms((owner - 1) % size))
        work = group.prepare([(after, a) for a in current], [(before, a) for a in coming])
        yield owner, current
        work.wait()
        current = coming


def attend(
    q: Any,
    coming: Iterator[tuple[int, Sequence[Any]]],
    results_of: Callable[[int, Sequence[Any]], Iterator[Part]],
    backend: str,
    wide: bool = True,
) -> tuple[Any, Any]:
    """Return O and lse of local rows against the keys of all ranks of a ring.

    Parameters
    ----------
    q : array, (batch, heads, rows, head_dim)
        Shape, type and device of O.
    coming : iterator of (int, sequence of array)
        The arrays that `circulate` yields.
    results_of : callable
        Takes one item of `coming`; yields rows, O and lse of attention to only these keys.
    backend : {"cuda", "mirror", "interpret"}
    wide : bool
        Whether O is float32 until the last part has come.
    """
    partial = Partial(q, backend, wide)
    newest: Part | None = None  # added when the next one is launched: it may be the last
    for owner, arrays in coming:
        for part in results_of(owner, arrays):
            if newest is not None:
                partial.add(*newest)
            newest = part
    if newest is not None:
        partial.add(*newest, last=True)
    return partial.result()


def differentiate(
    group: Group,
    circle: Sequence[int],
    q: Any,
    keys: Sequence[Any],
    forms: Callable[[int], Sequence[MessageForm]],
    gradients_of: Callable[[int, Sequence[Any]], Iterator[tuple[Block, Any]]],
    wide: bool = True,
) -> tuple[Any, Any, Any]:
    """Return the gradients of local rows and of local keys and values, in the type of the sums.

    Parameters
    ----------
    group, circle, forms
        As for `circulate`.
    q : array, (batch, heads, rows, head_dim)
    keys : sequence of array
        K and V of this rank, (batch, heads_kv, keys, head_dim).
    gradients_of : callable
        Takes an item of `circulate`; yields blocks and their gradients (dq, dk, dv).
    wide : bool
        Whether gradients are added and sent in float32; otherwise in the type of q.
    """
    xp, dtype = array_namespace(q), np.dtype(np.float32) if wide else q.dtype
    size, index = len(circle), circle.index(group.rank)
    after, before = circle[(index + 1) % size], circle[index - 1]
    dq = xp.zeros(q.shape, dtype)
    sums: list[Any] = [xp.zeros(x.shape, dtype) for x in keys]
    for step, (owner, arrays) in enumerate(circulate(group, circle, keys, forms, q)):
        if step:  # the gradients of these keys have been on the rank before
            coming = empty_like_forms(sums[0], [(x.shape, dtype) for x in arrays])
            work = group.prepare([(after, a) for a in sums], [(before, a) for a in coming])
        found = list(gradients_of(owner, arrays))
        if step:
            work.wait()
            sums = coming
        for block, (of_q, of_k, of_v) in found:
            dq[:, :, slice(*block.q)] += of_q.astype(dtype)
            for total, gradient in zip(sums, (of_k, of_v), strict=True):
                total[:, :, slice(*block.kv)] += gradient.astype(dtype)
    if size > 1:
        home = [xp.empty(x.shape, dtype) for x in keys]
        group.exchange([(after, a) for a in sums], [(before, a) for a in home]).wait()
        sums = home
    return dq, *sums


def empty_like_forms(x: Any, forms: Sequence[MessageForm]) -> list[Any]:
    """Return arrays of these shapes and dtypes, of the kind of `x`, not filled."""
    xp = array_namespace(x)
    return [xp.empty(shape, dtype) for shape, dtype in forms]
