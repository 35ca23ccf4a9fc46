"""R6 of 16-bit P and V by the largest addend [L80]: chains of instructions, cut off as models say.

Weights are exact here and factors between steps are powers of two, so all that errs is the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from cupyattn.bounds import attention as bound_of
from cupyattn.bounds import tensor_core
from cupyattn.bounds.scores import products
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import LEAST_NORMAL, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.reference import attention_exact
from experiments.accuracy.tensor_core_sums import model
from tests.support.runs import normal

seeds = st.integers(0, 2**32 - 1)
CHANNELS = 8
KINDS = ("normal", "one sign", "cancelling", "one large", "small", "rising")


def chain(w: Any, v: Any, M: Any, step: int, first: int, rng: Any, **how: Any) -> Any:
    """Sum w v in steps of keys, from a key on and in any order within a step; in units of 2^M[-1].

    `M` has a whole number for each key, equal within a step.
    """
    acc = np.zeros(CHANNELS)
    last = M[first]
    for start in range(first, len(w), step):
        keys = rng.permutation(np.arange(start, min(start + step, len(w))))
        acc, last = acc * 2.0 ** (last - M[start]), M[start]
        for at in range(0, len(keys), 16):
            own = keys[at : at + 16]
            a, b = np.tile(w[own], (CHANNELS, 1)), v[own].T
            acc = model(a, b, acc, **how)
    return acc * 2.0 ** (last - M[-1])


def problem(kind: str, rng: Any, step: int) -> tuple[Any, Any, Any]:
    """Draw weights of a row, as the kernel multiplies them, values, and M of each key."""
    count = step * int(rng.integers(1, 9))
    w = rng.uniform(0, 1, count) ** int(rng.integers(1, 12))
    v = rng.standard_normal((count, CHANNELS))
    M = np.zeros(count)
    if kind == "one sign":
        v = np.abs(v)
    if kind == "cancelling":
        v = np.abs(v) * np.where(np.arange(count) % 2, 1.0, -1.0)[:, None]
    if kind == "one large":
        w, v[0] = w * 2.0**-9, 100 * v[0]
    if kind == "small":
        w, v = w * 2.0**-13, v * 2.0 ** rng.uniform(-16, 0, v.shape)
    w[-1] = 1.0
    if kind == "rising":
        M = np.repeat(np.sort(rng.integers(0, 30, count // step)), step).astype(float)
    as_16_bit = (x.astype(np.float16).astype(np.float64) for x in (w, v))
    return (*as_16_bit, M)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_sums_that_are_cut_off_lie_within(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = 16 * int(rng.integers(1, 17))
    w, v, M = problem(kind, rng, step)
    first = step * int(rng.integers(0, len(w) // step))
    least_normal = LEAST_NORMAL["float16"] if rng.random() < 0.5 else 0.0
    found = chain(w, v, M, step, first, rng, fraction_bits=23, least_normal=least_normal)
    weights = w * 2.0 ** (M - M[-1])
    weights[:first] = 0.0
    total = weights.sum()
    P = (weights / total)[None]
    error = np.abs(found / total - (P @ v)[0])
    rises, inverse_l = np.array([len(w) / step]), np.array([[1 / total]])
    bound = tensor_core.cut_off(
        P, v, np.zeros((1, CHANNELS)), P @ np.abs(v), rises, Tiles(64, step, 4)
    )
    if least_normal:
        n = numerics("tensor_core", "portable", "float16")
        count = np.array([(weights > 0).sum()])
        bound = bound + tensor_core.cut_off_beside_small(count, v, inverse_l, n)
    target(float((error / bound[0]).max()), label="error / bound")
    assert (error <= bound[0]).all()


@given(seeds)
def test_sums_of_any_keys_that_follow_one_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(1, 200))
    P, v = rng.uniform(0, 1, (3, keys)), rng.standard_normal((keys, 5)) * rng.uniform(0, 9, 5)
    if rng.random() < 0.5:
        v = np.abs(v)
    bound = tensor_core.partial_sums(P, v)
    for _ in range(20):
        first, last = np.sort(rng.integers(0, keys + 1, 2))
        assert (np.abs(P[:, first:last] @ v[first:last]) <= bound * (1 + 1e-12)).all()


def test_no_step_has_more_keys_than_the_bound_takes() -> None:
    for variant in VARIANTS.values():
        for form in variant.forms:
            for head_dim in range(8, variant.largest_head_dim(form) + 1, 8):
                tiles = variant.tiles_for(head_dim, form=form)
                assert tiles.block_kv <= tensor_core.LARGEST_STEP, (variant.name, form, head_dim)


def test_long_rows_are_charged_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4,096 keys less than a quarter of what all magnitudes would be; never more."""
    q, k, v = normal((1, 1, 32, 64), (1, 1, 4096, 64))
    rms = np.sqrt((attention_exact(q, k, v) ** 2).mean())
    narrow = bound_of(q, k, v, variant="fa_tc")
    monkeypatch.setattr(tensor_core, "cut_off", lambda *given: np.full(given[3].shape, np.inf))
    wide = bound_of(q, k, v, variant="fa_tc")
    assert (narrow.terms["R6"] <= wide.terms["R6"]).all()
    size = np.sqrt((narrow.terms["R6"] ** 2).mean()) / rms
    assert size < 0.25 * np.sqrt((wide.terms["R6"] ** 2).mean()) / rms and size < 0.004


def test_a_weight_below_the_least_normal_number_cuts_off_others() -> None:
    """It is aligned as if it were that number: a large value beside it costs a small one bits."""
    w, v = np.zeros(16), np.zeros((16, CHANNELS))
    w[:2], v[:2] = (2.0**-24, 1.0), np.array([[60000.0], [2.0**-13 + 2.0**-23]])
    M, rng = np.zeros(16), np.random.default_rng(0)
    how = {"fraction_bits": 23, "least_normal": LEAST_NORMAL["float16"]}
    error = np.abs(chain(w, v, M, 16, 0, rng, **how) - w @ v)
    count, inverse_l, P = np.array([2]), np.ones((1, 1)), w[None]
    magnitudes = P @ np.abs(v)
    without = products("tensor_core", 2) * magnitudes
    n = numerics("tensor_core", "portable", "float16")
    beside = tensor_core.cut_off_beside_small(count, v, inverse_l, n)
    assert (error > without[0]).all() and (error <= without[0] + beside[0]).all()
