"""Strided arrays as rows at a pitch: the copies move every element, once, and are few."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.distributed.pitched import as_rows


def copied(target: np.ndarray, source: np.ndarray, outer: int, **limits: Any) -> int:
    """Do as copy engines do; return how many copies that were."""
    count = 0
    for rows in as_rows(
        target.shape, target.itemsize, outer, target.strides, source.strides, **limits
    ):
        count += 1
        assert rows.height == 1 or rows.width <= min(rows.target_pitch, rows.source_pitch)
        for row in range(rows.height):
            ctypes.memmove(
                target.ctypes.data + rows.target + row * rows.target_pitch,
                source.ctypes.data + rows.source + row * rows.source_pitch,
                rows.width,
            )
    return count


@st.composite
def slabs(draw: Any) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Some heads and rows of an array of three or four axes."""
    batch, heads, rows = (draw(st.integers(1, 4)) for _ in range(3))
    inner = draw(st.sampled_from([(), (5,)]))
    lead = tuple(draw(st.integers(0, 3)) for _ in range(2))
    trail = tuple(draw(st.integers(0, 3)) for _ in range(2))
    shape = (batch, lead[0] + heads + trail[0], lead[1] + rows + trail[1], *inner)
    where = slice(None), slice(lead[0], lead[0] + heads), slice(lead[1], lead[1] + rows)
    return np.zeros(shape, np.int16), where


@given(slabs(), slabs(), st.sampled_from([2**31 - 1, 60, 1]))
def test_every_element_is_copied_once(one: Any, other: Any, max_pitch: int) -> None:
    (source, of), (target, to) = one, other
    source[...] = np.arange(1, source.size + 1).reshape(source.shape)
    if source[of].ndim != target[to].ndim:
        return
    some = tuple(slice(min(a, b)) for a, b in zip(source[of].shape, target[to].shape, strict=True))
    there, here = target[to][some], source[of][some]
    if not here.size:
        return
    count = copied(there, here, 2, max_pitch=max_pitch)
    np.testing.assert_array_equal(there, here)
    assert np.count_nonzero(target) == here.size
    if max_pitch > 60:  # one for every batch entry at most
        assert count <= here.shape[0]


def test_heads_of_one_entry_and_arrays_that_lie_together_are_one_copy() -> None:
    x, y = np.arange(2 * 6 * 8 * 4).reshape(2, 6, 8, 4), np.zeros((2, 3, 16, 4), int)
    assert copied(y[:1, :, 8:], x[:1, 2:5], 2) == 1
    np.testing.assert_array_equal(y[:1, :, 8:], x[:1, 2:5])
    assert copied(np.empty_like(x), x, 0) == copied(np.empty_like(x), x, 2) == 1
    assert copied(y[:, :, 8:], x[:, 2:5], 2) == 2  # entries lie elsewhere than heads say
    assert copied(y[:, :, 8:], x[:, :3], 2) == 2


def test_all_heads_of_several_entries_are_one_copy() -> None:
    x, y = np.arange(2 * 3 * 8 * 4).reshape(2, 3, 8, 4), np.zeros((2, 3, 16, 4), int)
    assert copied(y[:, :, 3:11], x, 2) == 1
    np.testing.assert_array_equal(y[:, :, 3:11], x)


@pytest.mark.parametrize("extent", [2**31, 2**33])
def test_heads_past_the_largest_pitch_are_copied_one_by_one(extent: int) -> None:
    """A head of 8 million rows of 128 channels in 16 bits."""
    strides = 4 * extent, extent, 2
    found = list(as_rows((1, 4, 2**20), 2, 2, strides, (2**23, 2**21, 2)))
    assert [(rows.target, rows.source) for rows in found] == [
        (i * extent, i * 2**21) for i in range(4)
    ]
    assert {(rows.height, rows.width) for rows in found} == {(1, 2**21)}
