"""Each distribution has the feature that it is named for, in every storage type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cupyattn import distributions
from cupyattn.arrays.kinds import FINITE_MAX, STORAGE, as_float64
from cupyattn.distributions import NAMES, make
from cupyattn.reference.exact import attention_exact, score_blocks, softmax_exact


def probabilities(name: str, head_dim: int = 64) -> tuple[Any, Any]:
    """Scores and probabilities of 4 heads of 128 queries and 256 keys."""
    q, k, v = make(name, 1, 4, 128, 256, head_dim, "float32", seed=2, heads_kv=2)
    (block,) = score_blocks(q, k, v)
    return block.S, softmax_exact(block.S)[0]


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(list(STORAGE)),
    sizes=st.tuples(*[st.integers(0, 5)] * 4, st.integers(1, 9)),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_shape_type_range_and_seed(
    name: str, dtype: str, sizes: tuple[int, ...], group: int, seed: int
) -> None:
    batch, heads_kv, len_q, len_kv, head_dim = sizes
    drawn = make(name, batch, heads_kv * group, len_q, len_kv, head_dim, dtype, seed, heads_kv)
    again = make(name, batch, heads_kv * group, len_q, len_kv, head_dim, dtype, seed, heads_kv)
    kv_shape = (batch, heads_kv, len_kv, head_dim)
    shapes = ((batch, heads_kv * group, len_q, head_dim), kv_shape, kv_shape)
    for x, y, shape in zip(drawn, again, shapes, strict=True):
        assert x.shape == shape and x.dtype == STORAGE[dtype]
        assert np.isfinite(as_float64(x)).all()
        assert_array_equal(x, y)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "constant"])
def test_another_seed_draws_other_numbers(name: str) -> None:
    for x, y in zip(make(name, 1, 1, 8, 8, 8), make(name, 1, 1, 8, 8, 8, seed=1), strict=True):
        assert (x != y).any()


def test_normal_is_standard() -> None:
    for x in make("normal", 1, 4, 256, 256, 64, "float32"):
        assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02


def test_outlier_has_few_large_entries() -> None:
    for x in make("outlier", 1, 8, 512, 512, 64, "float32"):
        # Beyond 6: nearly nothing of N(0, 1), and P(|N(0, 101)| > 6) = 0.55 of the 0.1 %.
        assert 0.4e-3 < np.mean(np.abs(x) > 6) < 0.7e-3
        assert abs(np.var(x) - 1.1) < 0.03


def test_channel_bias_goes_away_with_the_mean_of_the_keys() -> None:
    q, k, v = make("channel-bias", 1, 2, 64, 2048, 64, "float32")
    for x in (k, v):
        means = x.mean(axis=2)
        assert 1.5 < means.std() < 2.5
        assert abs((x - means[:, :, None]).std() - 1) < 0.02
    assert abs(q.mean(axis=2)).max() < 0.6


def test_peaky_spans_scores_up_to_ten_thousand_and_peaks_on_the_copied_key() -> None:
    S, P = probabilities("peaky")
    own = S[..., np.arange(128), np.arange(128)]
    assert 5e3 < own.max() < 1.1e4 and own.min() < 3
    assert np.abs(S).max() < 2e4
    hot = own > 1e3
    assert_array_equal(P.argmax(-1)[hot], np.broadcast_to(np.arange(128), hot.shape)[hot])
    assert (P.max(-1) > 0.999).mean() > 0.4 and (P.max(-1) < 0.9).any()


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_sink_takes_most_of_every_row(head_dim: int) -> None:
    _, P = probabilities("sink", head_dim)
    assert P[..., 0].mean() > 0.9
    assert np.median(P[..., 0]) < 1 - 1e-6


def test_constant_gives_ones() -> None:
    assert_array_equal(attention_exact(*make("constant", 1, 2, 8, 8, 4)), 1.0)


def test_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="distribution must be one of normal"):
        make("cauchy", 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="dtype must be one of"):
        make("normal", 1, 1, 1, 1, 1, "float64")
    with pytest.raises(ValueError, match="heads_kv must divide heads"):
        make("normal", 1, 3, 1, 1, 1, heads_kv=2)


@pytest.mark.parametrize("dtype", STORAGE)
def test_draws_past_the_finite_range_are_clipped(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(np.where(rng.random(shape) < 0.5, -1e300, 1e300) for shape in shapes)

    monkeypatch.setitem(distributions._MAKERS, "huge", huge)
    for x in make("huge", 1, 2, 8, 8, 4, dtype):
        assert_array_equal(np.unique(as_float64(x)), [-FINITE_MAX[dtype], FINITE_MAX[dtype]])
