"""Sums of tensor cores, cut off as models say: R6 of 16-bit P and V [L80], and any products [L3].

For R6, weights are exact and factors between steps are powers of two, so all that errs is the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from cupyattn.bounds import attention as bound_of
from cupyattn.bounds import tensor_core
from cupyattn.bounds.perturbation import gamma, softmax_perturbation, weight_shift
from cupyattn.bounds.scores import products
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import LEAST_NORMAL, numerics
from cupyattn.reference import attention_exact
from cupyattn.reference.exact import softmax_exact
from experiments.accuracy.tensor_core_sums import model
from tests.support.runs import normal

seeds = st.integers(0, 2**32 - 1)
CHANNELS = 8
KINDS = ("normal", "one sign", "cancelling", "one large", "small", "rising")


def chain(w: Any, v: Any, M: Any, starts: Any, depth: int, rng: Any, **how: Any) -> Any:
    """Sum w v, 16 keys at a time and `depth` of them at once, in any order; in units of 2^M[-1].

    `M` has a whole number for each key, equal within an instruction. At `starts` another
    accumulator begins, as in slices and pieces.
    """
    sums, acc, last = np.zeros(CHANNELS), np.zeros(CHANNELS), M[0]
    for start in range(0, len(w), 16):
        if start in starts:
            sums, acc = sums + acc * 2.0 ** (last - M[-1]), np.zeros(CHANNELS)
        acc, last = acc * 2.0 ** (last - M[start]), M[start]
        keys = start + rng.permutation(16)
        for own in keys.reshape(-1, depth):
            acc = model(np.tile(w[own], (CHANNELS, 1)), v[own].T, acc, **how)
    return sums + acc * 2.0 ** (last - M[-1])


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


@pytest.mark.parametrize("from_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_sums_that_are_cut_off_lie_within(kind: str, from_first: bool, seed: int) -> None:
    """Instructions add 16 products at once, or 8 and then 8 with a bit more."""
    rng = np.random.default_rng(seed)
    step = 16 * int(rng.integers(1, 17))
    w, v, M = problem(kind, rng, step)
    least_normal = LEAST_NORMAL["float16"] if rng.random() < 0.5 else 0.0
    depth = int(rng.choice([8, 16]))
    how = {"fraction_bits": 23 + (depth == 8), "least_normal": least_normal}
    starts = () if from_first else tuple(step * rng.integers(0, len(w) // step, 2))
    found = chain(w, v, M, starts, depth, rng, **how)
    weights = w * 2.0 ** (M - M[-1])
    total = weights.sum()
    P = (weights / total)[None]
    error = np.abs(found / total - (P @ v)[0])
    rises, inverse_l = np.array([len(w) / step]), np.array([[1 / total]])
    none = np.zeros((1, CHANNELS))
    bound = tensor_core.truncation(P, v, none, P @ np.abs(v), rises, from_first=from_first)
    if least_normal:
        n = numerics("tensor_core", "portable", "float16")
        count = np.array([(weights > 0).sum()])
        bound = bound + tensor_core.truncation_by_small_operands(count, v, inverse_l, n)
    target(float((error / bound[0]).max()), label="error / bound")
    assert (error <= bound[0]).all()


@given(seeds)
def test_accumulators_are_sums_of_the_keys_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(1, 700))
    P, v = rng.uniform(0, 1, (2, 3, keys)), rng.standard_normal((2, keys, 5))
    P[rng.random(P.shape) < rng.random()] = 0.0
    starts = range(0, keys, 16)
    begun = [np.abs(P[..., :i] @ v[..., :i, :]) for i in starts]
    anywhere = [
        np.max([np.abs(P[..., j:i] @ v[..., j:i, :]) for j in range(0, i + 1, 16)], axis=0)
        for i in starts
    ]
    some = [(P[..., i : i + 16] > 0).any(axis=-1) for i in starts]
    for from_first, each in ((True, begun), (False, anywhere)):
        sums, instructions = tensor_core.accumulators(P, v, from_first=from_first)
        expected = sum(x * has[..., None] for x, has in zip(each, some, strict=True))
        assert np.allclose(sums, expected, rtol=1e-12, atol=1e-12)
        assert (instructions == sum(some)).all()


def test_steps_are_whole_instructions() -> None:
    """So the keys from a multiple of 16 on belong to one instruction."""
    for variant in VARIANTS.values():
        for form in variant.forms:
            if numerics(variant.family, form, "float16").values != "tensor_core":
                continue
            for head_dim in range(8, variant.largest_head_dim(form) + 1, 8):
                tiles = variant.tiles_for(head_dim, form=form)
                assert tiles.block_kv % tensor_core.PRODUCTS == 0, (variant.name, form, head_dim)


@pytest.mark.parametrize(
    ("keys", "form", "share", "of_rms"),
    [(256, "portable", 0.25, 1e-4), (256, "sm90", 0.25, 1e-4), (4096, "portable", 0.1, 1.1e-3)],
)
def test_rows_are_charged_for_their_accumulators(
    keys: int, form: str, share: float, of_rms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6 is a small share of what all magnitudes would be, and of O; and never more."""
    q, k, v = normal((1, 1, 32, 64), (1, 1, keys, 64))
    rms = np.sqrt((attention_exact(q, k, v) ** 2).mean())
    narrow = bound_of(q, k, v, variant="fa_tc", form=form)
    everything = np.full(narrow.total.shape, np.inf)
    monkeypatch.setattr(tensor_core, "truncation", lambda *_, **__: everything[:, :, None])
    wide = bound_of(q, k, v, variant="fa_tc", form=form)
    assert (narrow.terms["R6"] <= wide.terms["R6"]).all()
    size = np.sqrt((narrow.terms["R6"] ** 2).mean()) / rms
    assert size < share * np.sqrt((wide.terms["R6"] ** 2).mean()) / rms and size < of_rms


@given(seeds)
def test_weights_move_no_farther(seed: int) -> None:
    """Neither up nor down, with perturbations of any size."""
    rng = np.random.default_rng(seed)
    keys = int(rng.integers(1, 9))
    S, d = (
        3 * rng.standard_normal((1, keys)),
        rng.uniform(0, 10.0 ** rng.integers(-6, 3), keys)[None],
    )
    P = softmax_exact(S)[0]
    v = np.zeros((keys, 1))
    _, P_plus, delta_lse, _ = softmax_perturbation(P, d, v, P @ v)
    bound = weight_shift(P, P_plus, d, delta_lse)
    for _ in range(20):
        moved = softmax_exact(S + d * rng.choice([-1.0, 1.0], d.shape))[0]
        assert (np.abs(moved - P) <= bound * (1 + 1e-9) + 1e-15).all()


def test_a_weight_below_the_least_normal_number_cuts_off_others() -> None:
    """It is aligned as if it were that number: a large value beside it costs a small one bits."""
    w, v = np.zeros(16), np.zeros((16, CHANNELS))
    w[:2], v[:2] = (2.0**-24, 1.0), np.array([[60000.0], [2.0**-13 + 2.0**-23]])
    M, rng = np.zeros(16), np.random.default_rng(0)
    how = {"fraction_bits": 23, "least_normal": LEAST_NORMAL["float16"]}
    error = np.abs(chain(w, v, M, (), 16, rng, **how) - w @ v)
    count, inverse_l, P = np.array([2]), np.ones((1, 1)), w[None]
    magnitudes = P @ np.abs(v)
    without = products("tensor_core", 2) * magnitudes
    n = numerics("tensor_core", "portable", "float16")
    beside = tensor_core.truncation_by_small_operands(count, v, inverse_l, n)
    assert (error > without[0]).all() and (error <= without[0] + beside[0]).all()


def tensor_core_sum(x: Any, acc: Any, depth: int, extra_bits: int) -> Any:
    """Add products to an accumulator as tensor cores do: align to the largest, cut, add, cut."""
    for first in range(0, x.shape[-1], depth):
        terms = np.concatenate([acc[..., None], x[..., first : first + depth]], axis=-1)
        _, exponent = np.frexp(np.abs(terms).max(axis=-1, keepdims=True))
        unit = np.ldexp(1.0, exponent - 24 - extra_bits)
        total = (np.trunc(terms / unit) * unit).sum(axis=-1)
        _, exponent = np.frexp(total)
        unit = np.ldexp(1.0, exponent - 24)
        acc = np.trunc(total / unit) * unit
    return acc


@pytest.mark.parametrize(("depth", "extra_bits"), [(16, 0), (16, 2), (8, 1)])
@given(seed=seeds)
def test_tensor_core_sums(depth: int, extra_bits: int, seed: int) -> None:
    """R2, R6: the model of 2^-23 and n + ceil(n/16) covers aligned, truncated sums."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 260))
    a, b = rng.standard_normal((2, 50, n)) * 2.0 ** rng.integers(-8, 9, (2, 50, n))
    if rng.random() < 0.5:
        a, b = np.abs(a), np.abs(b)
    x = a.astype(np.float16).astype(np.float64) * b.astype(np.float16).astype(np.float64)
    error = np.abs(tensor_core_sum(x, np.zeros(50), depth, extra_bits) - x.sum(axis=-1))
    bound = gamma(n + -(-n // 16), 2.0**-23) * np.abs(x).sum(axis=-1)
    target(float((error / bound).max()), label="error / bound")
    assert (error <= bound).all()


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20])
@given(seed=seeds)
def test_a_tensor_core_sum_may_begin_at_a_number(size: float, seed: int) -> None:
    """R10, where products of dP begin at a Delta of any size: Delta counts as a magnitude."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 129))
    x = rng.standard_normal((2, 50, n)).astype(np.float16).astype(np.float64).prod(axis=0)
    start = (size * rng.standard_normal(50)).astype(np.float32).astype(np.float64)
    error = np.abs(tensor_core_sum(x, start, 16, 0) - (start + x.sum(axis=-1)))
    relative = gamma(n + -(-n // 16), 2.0**-23)
    of_products = relative * np.abs(x).sum(axis=-1)
    assert (error <= of_products + relative * np.abs(start)).all()
    if size > 1:
        assert (error > of_products).any()
