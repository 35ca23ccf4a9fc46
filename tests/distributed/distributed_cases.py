"""Code that tests of several ranks share: a call on ranks that are threads, with joined results."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from cupyattn import distributed
from cupyattn.distributed import Mesh, Partition, Shared

#: Ranks, and how many of them exchange heads, in meshes of up to eight.
MESHES = [Mesh(n, u) for n in range(1, 9) for u in range(1, n + 1) if n % u == 0]
#: Each of these runs dozens of threads: a quarter of what the profile asks for.
fewer = settings(max_examples=max(1, settings().max_examples // 4))
#: The rows of one of two ranks, and how the two share them.
X = np.ones((1, 4, 8, 16), np.float16)
ROWS = Partition.contiguous(16, 2)


def asked_for(mesh: Mesh) -> dict[str, Any]:
    """The method that gives a mesh."""
    if mesh.ulysses in (1, mesh.size):
        return {"method": "ulysses" if mesh.ulysses > 1 else "ring"}
    return {"method": "mixed", "ulysses": mesh.ulysses}


def partitions(size: int, length: int, ends: Sequence[int] | None = None) -> Any:
    """Zigzag, even, and any other cuts of rows among ranks."""
    zigzag = Partition.zigzag_varlen(ends if ends is not None else (0, length), size)
    cut = st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1).map(sorted)
    uneven = cut.map(lambda cuts: Partition.contiguous(np.diff([0, *cuts, length]).tolist()))
    return st.one_of(st.just(Partition.contiguous(length, size)), st.just(zigzag), uneven)


def packed(x: np.ndarray) -> np.ndarray:
    """One entry (1, heads, total, head_dim) as packed sequences have it."""
    return np.ascontiguousarray(x[0].swapaxes(0, 1))


def entry(x: np.ndarray) -> np.ndarray:
    """Undo `packed`."""
    return x.swapaxes(0, 1)[None]


@dataclass(frozen=True)
class Joined:
    """The joined results of all ranks."""

    o: np.ndarray
    lse: np.ndarray
    bytes_sent: list[int]
    gradients: tuple[np.ndarray, ...] = ()


def on_ranks(
    operands: Sequence[np.ndarray],
    shared: Shared,
    d_out: np.ndarray | None = None,
    deterministic: bool = True,
    d_lse: np.ndarray | None = None,
    **options: Any,
) -> Joined:
    """Run the forward pass, and with `d_out` the backward pass, with rows shared so."""
    rows = shared.rows_q, shared.rows_kv, shared.rows_kv
    ends = shared.cu_seqlens_q, shared.cu_seqlens_k
    how = {**asked_for(shared.mesh), "partition": rows[:2]}
    backward = {n: x for n, x in options.items() if n not in ("variant", "quant")}

    def on_rank(group: distributed.Group) -> Any:
        own = [r.take(x, group.rank) for r, x in zip(rows, operands, strict=True)]
        given = [] if d_out is None else [rows[0].take(d_out, group.rank)]
        of_lse = None if d_lse is None else rows[0].take(d_lse, group.rank, 2)
        if ends[0] is None:
            o, lse = distributed.parallel_attention(*own, group, return_lse=True, **how, **options)
            sent, gradients = group.bytes_sent, ()
            if given:
                gradients = distributed.parallel_attention_backward(
                    *given, *own, o, lse, group, deterministic=deterministic, d_lse=of_lse,
                    **how, **backward,
                )  # fmt: skip
            return o, lse, sent, gradients
        own, given = [packed(x) for x in own], [packed(x) for x in given]
        o, lse = distributed.parallel_attention_varlen(
            *own, *ends, group, return_lse=True, **how, **options
        )
        sent, gradients = group.bytes_sent, ()
        if given:
            gradients = distributed.parallel_attention_varlen_backward(
                *given, *own, o, lse, *ends, group, deterministic=deterministic,
                d_lse=None if of_lse is None else of_lse[0], **how, **backward,
            )  # fmt: skip
        return entry(o), lse[None], sent, [entry(x) for x in gradients]

    found = distributed.run(on_rank, shared.mesh.size, timeout=30)
    joined = [
        r.join([of_rank[3][i] for of_rank in found])
        for i, r in enumerate(rows)
        if d_out is not None
    ]
    return Joined(
        rows[0].join([of_rank[0] for of_rank in found]),
        rows[0].join([of_rank[1] for of_rank in found], axis=-1),
        [of_rank[2] for of_rank in found],
        tuple(joined),
    )


def errors_of(size: int, function: Any, timeout: float = 20) -> list[BaseException | None]:
    """The exception of each rank."""
    found: list[BaseException | None] = [None] * size

    def on_rank(group: Any) -> None:
        try:
            function(group)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            found[group.rank] = error

    with contextlib.suppress(distributed.RankError):  # a group that has failed does not close
        distributed.run(on_rank, size, timeout=timeout)
    return found


def attend(own: distributed.Group, **options: Any) -> Any:
    """Attention of `X` on every rank, in a ring unless the options say otherwise."""
    return distributed.parallel_attention(X, X, X, own, **{"method": "ring", **options})
