"""The rows and heads of a rank, and the calls for its part of a result."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.distributed.blocks import Span, blocks
from cupyattn.distributed.mesh import Mesh, shares_of_heads
from cupyattn.distributed.partition import Partition, places
from cupyattn.problem.checks import check_limits
from tests.distributed.distributed_cases import partitions

SIZES = st.integers(1, 8)
LENGTHS = st.integers(0, 40)


@given(LENGTHS, SIZES)
def test_rows_are_shared_evenly_and_come_back(length: int, size: int) -> None:
    x = np.arange(2 * length).reshape(1, length, 2)
    for rows in (Partition.contiguous(length, size), Partition.zigzag(length, size)):
        assert rows.size == size and rows.length == length
        assert max(rows.lengths) - min(rows.lengths) <= 2
        parts = [rows.take(x, rank) for rank in range(size)]
        assert [part.shape[1] for part in parts] == list(rows.lengths)
        np.testing.assert_array_equal(rows.join(parts), x)


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_gives_all_ranks_the_same_work_under_a_causal_mask(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    rows = Partition.zigzag(length, size)
    work = [sum(i + 1 for r in of_rank for i in range(*r)) for of_rank in rows.ranges]
    assert len(set(work)) == 1
    behind = Partition.contiguous(length, size)
    work = [sum(i + 1 for r in of_rank for i in range(*r)) for of_rank in behind.ranges]
    assert size == 1 or max(work) > 1.2 * min(work)


@given(st.data())
def test_neighbours_have_their_rows_in_order(data: Any) -> None:
    length, ring, ulysses = data.draw(LENGTHS), data.draw(SIZES), data.draw(st.integers(1, 3))
    mesh = Mesh(ring * ulysses, ulysses)
    rows = data.draw(partitions(mesh.size, length))
    joint = rows.merged(mesh.neighbours(first) for first in mesh.circle(0))
    for index, first in enumerate(mesh.circle(0)):
        found = []
        for rank in mesh.neighbours(first):
            there = places(rows.ranges[rank], joint.ranges[index])
            for own, place in zip(rows.ranges[rank], there, strict=True):
                found += zip(range(*place), range(*own), strict=True)
        expected = [i for r in joint.ranges[index] for i in range(*r)]
        assert sorted(found) == list(enumerate(expected)) and expected == sorted(expected)


@pytest.mark.parametrize(
    "ranges", [(((0, 2),), ((1, 4),)), (((0, 2),), ((3, 4),)), (((2, 4), (0, 2)),), (((1, 3),),)]
)
def test_a_partition_has_every_row_once(ranges: Any) -> None:
    with pytest.raises(ValueError, match="every row must lie on one rank"):
        Partition(ranges)


@st.composite
def problems(draw: Any) -> tuple[Partition, Partition, list[Span]]:
    """Sequences among rows and keys that ranks share, in any way."""
    size, count = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    ends = []
    for _ in range(2):
        length = draw(st.integers(0, 24))
        cuts = st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)
        ends.append([0, *sorted(draw(cuts)), length])
    rows, keys = (draw(partitions(size, e[-1], e)) for e in ends)
    causal, align = draw(st.booleans()), draw(st.sampled_from(["top-left", "bottom-right"]))
    side = st.sampled_from([-1, -1, 0, 1, 3, 9])
    window = draw(side), draw(side)
    spans = [
        Span(q, kv, check_limits(causal, align, window, q[1] - q[0], kv[1] - kv[0]))
        for q, kv in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True)
    ]
    return rows, keys, spans


@given(problems())
def test_blocks_hold_every_pair_once(problem: tuple[Partition, Partition, list[Span]]) -> None:
    rows, keys, spans = problem
    expected = np.zeros((rows.length, keys.length), int)
    for span in spans:
        first, last = span.limits
        i, j = (np.arange(b - a) for a, b in (span.q, span.kv))
        apart = j[None] - i[:, None]
        some = np.ones(apart.shape, bool)
        some &= True if first is None else apart >= first
        some &= True if last is None else apart <= last
        expected[slice(*span.q), slice(*span.kv)] = some
    found = np.zeros_like(expected)
    numbers = [[np.r_[tuple(np.arange(*r) for r in [(0, 0), *of])] for of in p.ranges]
               for p in (rows, keys)]  # fmt: skip
    for rank, of_rank in enumerate(rows.ranges):
        for owner, of_owner in enumerate(keys.ranges):
            for block in blocks(of_rank, of_owner, spans):
                i, j = numbers[0][rank][slice(*block.q)], numbers[1][owner][slice(*block.kv)]
                assert i.size and j.size
                apart = np.arange(j.size)[None] - np.arange(i.size)[:, None]
                left, right = block.window
                some = (left == -1) | (apart >= -left)
                some &= (right == -1) | (apart <= right)
                assert some.any(axis=1).all(), "no row without a key is computed"
                found[np.ix_(i, j)] += some
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_zigzag_rank_makes_one_call_for_the_keys_of_each_other(size: int) -> None:
    length = 4 * size
    rows = Partition.zigzag(length, size)
    causal = [Span((0, length), (0, length), (None, 0))]
    for of_rank in rows.ranges:
        work = [blocks(of_rank, other, causal) for other in rows.ranges]
        assert [len(found) for found in work] == [1] * size
        pairs = [(b.q[1] - b.q[0]) * (b.kv[1] - b.kv[0]) for (b,) in work if b.window == (-1, -1)]
        assert pairs == [8] * (size - 1)  # half of the 4 x 4


@given(st.integers(0, 6), st.integers(1, 6), SIZES, st.integers(1, 5))
def test_heads_are_shared_evenly_with_the_key_heads_that_they_use(
    heads_kv: int, group: int, size: int, chunks: int
) -> None:
    shares = shares_of_heads(heads_kv * group, heads_kv, size, chunks)
    assert len(shares) == size and len({len(of_rank) for of_rank in shares}) == 1
    seen: list[int] = []
    for of_rank in shares:
        for heads in of_rank:
            queries, keys = range(*heads.q), range(*heads.kv)
            seen += queries
            for i, head in enumerate(queries):
                assert keys[i // (len(queries) // len(keys))] == head // group
    counts = [sum(h.q[1] - h.q[0] for h in of_rank) for of_rank in shares]
    assert seen == list(range(heads_kv * group)) and max(counts) - min(counts) <= 1


def test_a_mesh_names_who_exchanges_with_whom() -> None:
    mesh = Mesh(8, 2)
    for rank in range(8):
        assert rank in mesh.neighbours(rank) and rank in mesh.circle(rank)
        assert len(set(mesh.neighbours(rank)) & set(mesh.circle(rank))) == 1
    with pytest.raises(ValueError, match="ulysses must divide the 8 ranks, got 3"):
        Mesh(8, 3)


@pytest.mark.parametrize("offsets", [[3, 1], [0, 5, 3], [1, 3], []])
def test_offsets_that_fall_share_no_rows(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens must rise from 0, got \["):
        Partition.zigzag_varlen(offsets, 2)
