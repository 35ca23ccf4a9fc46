"""The definition itself, against SciPy, explicit loops and properties that attention must have."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp, softmax

from cupyattn import distributions
from cupyattn.arrays.groups import split_heads
from cupyattn.errors import UnsupportedError
from cupyattn.reference import exact
from cupyattn.reference.exact import attention_exact, score_blocks, softmax_exact
from tests.support.problems import Problem, problems

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def with_scipy(problem: Problem) -> tuple[Any, Any]:
    """Attention and lse by einsum and SciPy, heads repeated; empty rows by definition."""
    q, k, v = (x.astype(np.float64) for x in problem.arrays())
    k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    S = scale * np.einsum("bhid,bhjd->bhij", q, k)
    S[..., ~problem.admitted()] = -np.inf
    empty = ~problem.admitted().any(axis=1)
    P, lse = np.zeros_like(S), np.full(S.shape[:3], -np.inf)
    if not empty.all():
        P[:, :, ~empty] = softmax(S[:, :, ~empty], axis=-1)
        lse[:, :, ~empty] = logsumexp(S[:, :, ~empty], axis=-1)
    return np.einsum("bhij,bhjd->bhid", P, v), lse


@given(problem=problems())
def test_equals_softmax_and_einsum(problem: Problem) -> None:
    q, k, v = problem.arrays()
    o, lse = attention_exact(q, k, v, **problem.options, return_lse=True)
    o_scipy, lse_scipy = with_scipy(problem)
    assert o.dtype == lse.dtype == np.float64
    assert_allclose(o, o_scipy, **CLOSE)
    assert_allclose(lse, lse_scipy, **CLOSE)


@pytest.mark.parametrize("causal_align", ["bottom-right", "top-left"])
def test_causal_is_its_definition_at_every_small_length(causal_align: str) -> None:
    rng = np.random.default_rng(5)
    for len_q, len_kv in itertools.product(range(7), repeat=2):
        q, k, v = (rng.standard_normal((1, 1, n, 3)) for n in (len_q, len_kv, len_kv))
        o, lse = attention_exact(
            q, k, v, scale=1.0, causal=True, causal_align=causal_align, return_lse=True
        )
        shift = len_kv - len_q if causal_align == "bottom-right" else 0
        for i in range(len_q):
            weights = {
                j: math.exp(q[0, 0, i] @ k[0, 0, j]) for j in range(len_kv) if j <= i + shift
            }
            total = sum(weights.values())
            expected = sum((w * v[0, 0, j] for j, w in weights.items()), np.zeros(3))
            assert_allclose(o[0, 0, i], expected / total if weights else 0.0, **CLOSE)
            assert_allclose(lse[0, 0, i], math.log(total) if weights else -np.inf, **CLOSE)


@given(problem=problems(min_len=1))
def test_values_of_one_give_one(problem: Problem) -> None:
    q, k, v = problem.arrays()
    o = attention_exact(q, k, np.ones_like(v), **problem.options)
    nonempty = problem.admitted().any(axis=1)
    assert_allclose(o[:, :, nonempty], 1.0, rtol=1e-14)
    assert_array_equal(o[:, :, ~nonempty], 0.0)


@given(problem=problems(min_len=1))
def test_one_key_gives_its_value_exactly(problem: Problem) -> None:
    q, k, v = (x.astype(np.float64) for x in problem.arrays())
    o, lse = attention_exact(q, k[:, :, :1], v[:, :, :1], scale=1.0, return_lse=True)
    assert_array_equal(o, np.broadcast_to(np.repeat(v[:, :, :1], problem.group, 1), o.shape))
    S = np.einsum("bhid,bhd->bhi", q, np.repeat(k[:, :, 0], problem.group, 1))
    assert_allclose(lse, S, **CLOSE)


@given(problem=problems(min_len=1))
def test_order_of_keys_does_not_matter(problem: Problem) -> None:
    q, k, v = problem.arrays()
    order = np.random.default_rng(problem.seed).permutation(problem.len_kv)
    o, lse = attention_exact(q, k, v, scale=problem.scale, return_lse=True)
    o2, lse2 = attention_exact(
        q, k[:, :, order], v[:, :, order], scale=problem.scale, return_lse=True
    )
    assert_allclose(o2, o, **CLOSE)
    assert_allclose(lse2, lse, **CLOSE)


@given(problem=problems(names=("normal", "channel-bias", "sink")))
def test_a_vector_common_to_all_keys_moves_only_lse(problem: Problem) -> None:
    q, k, v = (x.astype(np.float64) for x in problem.arrays())
    mean = np.random.default_rng(problem.seed).standard_normal((*k.shape[:2], 1, k.shape[3]))
    o, lse = attention_exact(q, k, v, **problem.options, return_lse=True)
    o2, lse2 = attention_exact(q, k + mean, v, **problem.options, return_lse=True)
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    assert_allclose(o2, o, **CLOSE)
    assert_allclose(
        lse2, lse + scale * (q * np.repeat(mean, problem.group, 1)).sum(-1), rtol=1e-10, atol=1e-10
    )


@given(problem=problems(min_len=1), share=st.floats(0, 1))
def test_two_halves_of_the_keys_merge_by_lse(problem: Problem, share: float) -> None:
    q, k, v = problem.arrays()
    cut = round(share * problem.len_kv)
    (o1, lse1), (o2, lse2) = (
        attention_exact(q, k[:, :, part], v[:, :, part], scale=problem.scale, return_lse=True)
        for part in (slice(cut), slice(cut, None))
    )
    o, lse = attention_exact(q, k, v, scale=problem.scale, return_lse=True)
    assert_allclose(np.logaddexp(lse1, lse2), lse, **CLOSE)
    shares = (np.exp(part - lse)[..., None] for part in (lse1, lse2))
    assert_allclose(o1 * next(shares) + o2 * next(shares), o, **CLOSE)


@given(problem=problems())
def test_grouped_heads_are_repeated_heads(problem: Problem) -> None:
    q, k, v = problem.arrays()
    repeated = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    grouped = attention_exact(q, k, v, **problem.options)
    assert_allclose(attention_exact(q, *repeated, **problem.options), grouped, **CLOSE)


@given(problem=problems(min_len=1), data=st.data())
def test_rows_select_rows(problem: Problem, data: st.DataObject) -> None:
    q, k, v = problem.arrays()
    rows = np.array(data.draw(st.lists(st.integers(0, problem.len_q - 1), max_size=9)), np.int64)
    o, lse = attention_exact(q, k, v, **problem.options, return_lse=True)
    o_rows, lse_rows = attention_exact(q, k, v, **problem.options, rows=rows, return_lse=True)
    assert_allclose(o_rows, o[:, :, rows], **CLOSE)
    assert_allclose(lse_rows, lse[:, :, rows], **CLOSE)


@given(problem=problems(), room=st.integers(1, 400))
def test_score_blocks_cover_every_score_once(problem: Problem, room: int) -> None:
    q, k, v = problem.arrays()
    whole = attention_exact(q, k, v, **problem.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "BLOCK_ELEMENTS", room)
        visits = np.zeros((*split_heads(q, problem.heads_kv).shape[:4], problem.len_kv), int)
        for block in score_blocks(q, k, v, **problem.options):
            visits[block.index] += 1
            least = max(problem.len_kv, problem.head_dim, 1)
            assert block.S.size <= max(room, least)
            assert_array_equal(
                block.admitted,
                np.broadcast_to(problem.admitted()[block.index[3]], block.S.shape),
            )
        assert_array_equal(visits, 1)
        assert_allclose(attention_exact(q, k, v, **problem.options), whole, **CLOSE)


def test_memory_is_bounded() -> None:
    q, k, v = distributions.make("normal", 1, 2, 4096, 4096, 16)
    tracemalloc.start()
    try:
        attention_exact(q, k, v)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256e6  # S alone would take 268 MB, its softmax the same again


def test_masked_keys_have_no_influence_whatever_they_hold() -> None:
    q, k, v = distributions.make("normal", 1, 2, 6, 6, 8, "float32", seed=3)
    o, lse = attention_exact(q, k, v, causal=True, return_lse=True)
    for poison in (np.nan, np.inf, -np.inf):
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, :, 4:, 1] = poison
        v_bad[:, :, 4:, 2] = poison
        o_bad, lse_bad = attention_exact(q, k_bad, v_bad, causal=True, return_lse=True)
        assert_allclose(o_bad[:, :, :4], o[:, :, :4], rtol=1e-14)
        assert_allclose(lse_bad[:, :, :4], lse[:, :, :4], rtol=1e-14)


def test_nan_in_a_key_or_query_poisons_the_rows_that_meet_it() -> None:
    q, k, v = distributions.make("normal", 1, 1, 6, 6, 8, "float32", seed=3)
    k[0, 0, 2, 5] = np.nan
    o, lse = attention_exact(q, k, v, causal=True, return_lse=True)
    poisoned = np.arange(6) >= 2
    assert_array_equal(np.isnan(o[0, 0]), np.repeat(poisoned[:, None], 8, axis=1))
    assert_array_equal(np.isnan(lse[0, 0]), poisoned)
    q, k, v = distributions.make("normal", 1, 1, 6, 6, 8, "float32", seed=3)
    q[0, 0, 4, 0] = np.nan
    assert_array_equal(np.isnan(attention_exact(q, k, v)).any(axis=-1)[0, 0], np.arange(6) == 4)


def test_values_that_are_not_finite_decide_their_channel() -> None:
    q = k = np.zeros((1, 1, 4, 5))
    v = np.ones((1, 1, 4, 5))
    v[0, 0, 1, 0], v[0, 0, 1, 1], v[0, 0, 1, 2] = np.nan, np.inf, -np.inf
    v[0, 0, 1, 3], v[0, 0, 2, 3] = np.inf, -np.inf
    o = attention_exact(q, k, v, causal=True)[0, 0]
    assert_array_equal(o[0], np.ones(5))
    assert_array_equal(o[1], [np.nan, np.inf, -np.inf, np.inf, 1.0])
    assert_array_equal(o[2:], [[np.nan, np.inf, -np.inf, np.nan, 1.0]] * 2)


def test_an_infinite_value_counts_even_where_its_probability_underflows() -> None:
    q, k = np.array([[[[1.0]]]]), np.array([[[[0.0], [-1e4]]]])
    assert_array_equal(attention_exact(q, k, np.array([[[[1.0], [np.inf]]]])), [[[[np.inf]]]])


def test_a_score_of_minus_infinity_is_a_masked_key() -> None:
    q = np.ones((1, 1, 2, 1))
    k = np.array([0.0, -np.inf, 1.0]).reshape(1, 1, 3, 1)
    v = np.array([2.0, np.nan, 4.0]).reshape(1, 1, 3, 1)
    o, lse = attention_exact(q, k, v, return_lse=True)
    kept = [0, 2]
    o2, lse2 = attention_exact(q, k[:, :, kept], v[:, :, kept], return_lse=True)
    assert_allclose(o, o2, **CLOSE)
    assert_allclose(lse, lse2, **CLOSE)
    o, lse = attention_exact(q, np.full_like(k, -np.inf), v, return_lse=True)
    assert_array_equal(o, 0.0)
    assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("batch, heads, len_q, len_kv", [(1, 1, 3, 0), (1, 2, 0, 3), (0, 1, 2, 2)])
def test_empty_axes(batch: int, heads: int, len_q: int, len_kv: int) -> None:
    q, k, v = distributions.make("normal", batch, heads, len_q, len_kv, 4)
    o, lse = attention_exact(q, k, v, return_lse=True)
    assert o.shape == (batch, heads, len_q, 4) and lse.shape == (batch, heads, len_q)
    assert not o.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "bfloat16"])
def test_takes_any_real_dtype_and_strides_and_leaves_inputs_alone(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(1)
    q, k, v = (rng.integers(-3, 4, (2, 5, 3, 8)).astype(kind).swapaxes(1, 2) for _ in range(3))
    copies = [x.copy() for x in (q, k, v)]
    o = attention_exact(q, k, v)
    assert_allclose(o, attention_exact(*(x.astype(np.float64) for x in copies)), **CLOSE)
    for x, copy in zip((q, k, v), copies, strict=True):
        assert_array_equal(x, copy)


def test_says_what_is_wrong() -> None:
    x = np.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match="four axes"):
        attention_exact(x[0], x, x)
    with pytest.raises(ValueError, match="agree on length"):
        attention_exact(x, x, x[:, :, :2])
    with pytest.raises(UnsupportedError, match="another head_dim than k"):
        attention_exact(x, x, x[..., :2])
    with pytest.raises(ValueError, match="must divide the heads"):
        attention_exact(x[:, :1], x, x)
    with pytest.raises(ValueError, match="scale must be positive"):
        attention_exact(x, x, x, scale=0.0)
    with pytest.raises(ValueError, match="causal_align"):
        attention_exact(x, x, x, causal=True, causal_align="middle")
    for rows in ([3], [-1]):
        with pytest.raises(ValueError, match=r"rows must lie in \[0, 3\)"):
            attention_exact(x, x, x, rows=np.array(rows))
    with pytest.raises(ValueError, match="1-D integer"):
        attention_exact(x, x, x, rows=np.array([0.5]))
    with pytest.raises(TypeError, match="got .*list"):
        attention_exact(x.tolist(), x, x)


def test_softmax_exact_of_a_row_without_keys() -> None:
    P, lse = softmax_exact(np.full((2, 3), -np.inf))
    assert_array_equal(P, 0.0)
    assert_array_equal(lse, -np.inf)
