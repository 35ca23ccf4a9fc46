"""Fixtures that need no bound: the result is known to the bit, or follows from another result.

With ``scale = ln 2`` a score in log2 units is the product Q K^T itself. Where that is a small whole
number, every exponential is a power of two and every sum is exact in any order: what comes out is
one division and one rounding away from whole-number arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds import kernel, quantised
from cupyattn.quant import QuantizedQKV
from cupyattn.reference import exact as reference
from cupyattn.reference.rounding import round_to
from tests.gpu.support import attend, on_device, run
from tests.hopper import hopper_pv8_cases
from tests.support.runs import CELLS, PLAIN, bits, host_copy, normal, on_host, variant_of

cupy = pytest.importorskip("cupy")

LN2 = math.log(2.0)
LEN_Q, LEN_KV, HEAD_DIM = 70, 150, 32
#: Rungs whose scores are in log2 units; the unfused rung rounds natural scores.
FUSED = [(name, dtype) for name, dtype in CELLS if variant_of(name).family != "unfused"]
#: Rungs that use V as given, in 16 or 32 bits; fixtures of 8-bit V are in test_pv8.py and
#: test_hopper_pv8.py.
WHOLE_V = [(name, dtype) for name, dtype in CELLS if "@pv8" not in name]
#: All, the Hopper forms of 8-bit V among them.
ALL = [*CELLS, *hopper_pv8_cases.CELLS]


def attend_whole(rung: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """Run a rung on whole-number scores; the INT8 rung takes them as codes of scale 1."""
    if variant_of(rung).family != "int8":
        return attend(rung, *on_device(q, k, v), **options)
    codes = on_device(q.astype(np.int8), k.astype(np.int8))
    v16 = v.astype(np.float16) if v.dtype == np.float32 else v
    operands = QuantizedQKV.from_codes(*codes, *on_device(v16), 1.0, 1.0, out_dtype=v.dtype.name)
    return attend(rung, operands, **options)


def whole_numbers(dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores -4 to 4 (q reads channel 0 of k), values -8 to 8."""
    rng = np.random.default_rng(seed)
    q = np.zeros((2, 2, LEN_Q, HEAD_DIM))
    q[..., 0] = 1
    k = np.zeros((2, 2, LEN_KV, HEAD_DIM))
    k[..., 0] = rng.integers(-4, 5, k.shape[:3])
    k[..., 1:] = rng.integers(-8, 9, (*k.shape[:3], HEAD_DIM - 1))  # seen by no query
    v = rng.integers(-8, 9, k.shape)
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))


def by_whole_numbers(q: Any, k: Any, v: Any, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """O as every fused rung must store it, and the exact log-sum-exp."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3)
    keys, rows = np.arange(LEN_KV), np.arange(LEN_Q)[:, None]
    if causal:
        scores = np.where(keys <= rows + LEN_KV - LEN_Q, scores, -np.inf)
    m = scores.max(axis=-1, keepdims=True)
    p = np.exp2(scores - m)
    l = p.sum(axis=-1, keepdims=True)  # noqa: E741
    o = (p @ v).astype(np.float32) * (np.float32(1) / l.astype(np.float32))
    return o, ((m + np.log2(l)) * LN2)[..., 0]


@pytest.mark.parametrize(("variant", "dtype"), FUSED)
@pytest.mark.parametrize("causal", [False, True])
def test_powers_of_two_come_out_to_the_bit(variant: str, dtype: str, causal: bool) -> None:
    q, k, v = whole_numbers(dtype)
    o, lse = attend_whole(variant, q, k, v, scale=LN2, causal=causal, return_lse=True)
    expected, expected_lse = by_whole_numbers(q, k, v, causal)
    np.testing.assert_array_equal(on_host(o).astype(np.float32), round_to(expected, dtype))
    np.testing.assert_allclose(on_host(lse), expected_lse, rtol=2.0**-21, atol=2.0**-21)


@pytest.mark.parametrize(("variant", "dtype"), FUSED)
def test_keys_in_another_order_change_nothing(variant: str, dtype: str) -> None:
    q, k, v = whole_numbers(dtype)
    order = np.random.default_rng(1).permutation(LEN_KV)
    o = attend_whole(variant, q, k, v, scale=LN2)
    shuffled = attend_whole(variant, q, k[:, :, order], v[:, :, order], scale=LN2)
    assert bits(o) == bits(shuffled)


@pytest.mark.parametrize(("variant", "dtype"), FUSED)
def test_shifted_scores_change_only_the_log_sum_exp(variant: str, dtype: str) -> None:
    q, k, v = whole_numbers(dtype)
    shifted = k.copy()
    shifted[..., 0] += 64
    o, lse = attend_whole(variant, q, k, v, scale=LN2, return_lse=True)
    o_shifted, lse_shifted = attend_whole(variant, q, shifted, v, scale=LN2, return_lse=True)
    assert bits(o) == bits(o_shifted)
    np.testing.assert_allclose(on_host(lse_shifted) - on_host(lse), 64 * LN2, rtol=2.0**-20)


@pytest.mark.parametrize(("variant", "dtype"), WHOLE_V)
def test_one_key_gives_its_value(variant: str, dtype: str) -> None:
    """To the bit, but for float32: there M's own rounding shows, and p / l is two roundings."""
    q, k, v = normal((2, 4, 70, 64), (2, 2, 70, 64), dtype)
    of_int8 = variant_of(variant).family == "int8"
    stored = v.astype(np.float16).astype(v.dtype) if of_int8 else v
    of_group = stored[:, [0, 0, 1, 1], :1]
    alone = attend(variant, *on_device(q, k[:, :, :1], v[:, :, :1]))
    causal = attend(variant, *on_device(q, k, v), causal=True)
    for found in (alone, causal[:, :, :1]):
        expected = np.broadcast_to(of_group, found.shape)
        if dtype == "float32" and variant in PLAIN:
            np.testing.assert_allclose(on_host(found), expected, rtol=2.0**-22)
        else:
            assert bits(found) == bits(expected)


@pytest.mark.parametrize(("variant", "dtype"), WHOLE_V)
def test_scores_of_zero_and_minus_infinity(variant: str, dtype: str) -> None:
    """Q = 0 and a causal mask: row i is the mean of the first values, l a whole number."""
    q, k, v = whole_numbers(dtype)
    q = np.zeros_like(q)
    o, lse = attend(variant, *on_device(q, k, v), causal=True, return_lse=True)
    count = (np.arange(LEN_Q) + LEN_KV - LEN_Q + 1).astype(np.float32)
    total = v.astype(np.float32).cumsum(axis=2)[:, :, LEN_KV - LEN_Q :]
    expected = total * (np.float32(1) / count)[:, None]
    # The unfused rung divides before it sums: exact where l is a power of two.
    rows = count == 128 if variant_of(variant).family == "unfused" else count > 0
    assert rows.any()
    found = on_host(o).astype(np.float32)[:, :, rows]
    np.testing.assert_array_equal(found, round_to(expected[:, :, rows], dtype))
    np.testing.assert_allclose(on_host(lse), np.broadcast_to(np.log(count), lse.shape), rtol=1e-6)


@pytest.mark.parametrize("variant", PLAIN)
def test_minus_infinity_in_a_key_masks_it(variant: str) -> None:
    q, k, v = normal((1, 2, 70, 64), (1, 2, 150, 64))
    q = np.abs(q) + np.float16(0.5)
    keep = np.random.default_rng(2).random(150) < 0.5
    masked = k.copy()
    masked[:, :, ~keep, 3] = -np.inf
    report = run(variant, on_device(q, masked, v)).check()
    assert report.ratio > 0 and np.isfinite(report.bound), "the bound promises something here"
    kept = reference.attention_exact(q, k[:, :, keep], v[:, :, keep])
    np.testing.assert_allclose(reference.attention_exact(q, masked, v), kept, rtol=1e-9)


@pytest.mark.parametrize(("variant", "dtype"), ALL)
def test_equal_keys_and_values_of_one(variant: str, dtype: str) -> None:
    """Weights sum to one: with V = 1 so does the output, up to l and the division in float32."""
    q, k, _ = normal((2, 2, 70, 64), (2, 2, 1, 64), dtype)
    ones = np.ones((2, 2, 150, 64), k.dtype)
    equal = np.broadcast_to(k, ones.shape).copy()
    o = on_host(attend(variant, *on_device(q, equal, ones))).astype(np.float64)
    assert np.abs(o - 1).max() <= (2.0**-20 if dtype == "float32" else 0.0)


@pytest.mark.parametrize(("variant", "dtype"), WHOLE_V)
def test_one_hot_values_show_the_probabilities(variant: str, dtype: str) -> None:
    q, k, _ = normal((2, 2, 70, 64), (2, 2, 64, 64), dtype)
    v = np.broadcast_to(np.eye(64, dtype=k.dtype), k.shape).copy()
    found = run(variant, on_device(q, k, v), causal=True)
    found.check()
    P = on_host(found.o).astype(np.float64)
    row, key = np.indices((70, 64))
    assert (P >= 0).all() and (P[:, :, key > row - 6] == 0).all()
    attends = np.arange(70) >= 6
    # each of at most 64 probabilities was rounded to 8, 11 or 24 bits
    rounding = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    stored = "float16" if variant_of(variant).family == "int8" and dtype == "float32" else dtype
    limit = rounding[stored]
    np.testing.assert_allclose(P.sum(axis=-1)[:, :, attends], 1.0, atol=limit)


@pytest.mark.parametrize(("variant", "dtype"), ALL)
def test_parts_merge_by_their_log_sum_exp(variant: str, dtype: str) -> None:
    q, k, v = normal((2, 4, 70, 64), (2, 2, 200, 64), dtype)
    parts = [slice(0, 77), slice(77, 200)]
    runs = [run(variant, on_device(q, k[:, :, part], v[:, :, part])) for part in parts]
    reports_lse = np.stack([on_host(r.lse).astype(np.float64) for r in runs])
    outputs = np.stack([on_host(r.o).astype(np.float64) for r in runs])
    lse = np.logaddexp.reduce(reports_lse)
    weights = np.exp(reports_lse - lse)[..., None]
    merged = (weights * outputs).sum(axis=0)
    # |merged - exact| <= sum of w |o - exact o| + what errors of lse do to the weights
    error, error_lse = [], []
    for part, r in zip(parts, runs, strict=True):
        z = r.quantized
        bound = kernel.attention(
            *((q, k[:, :, part], v[:, :, part]) if z is None else (None,) * 3),
            variant=variant_of(variant).name, quantized=None if z is None else host_copy(z),
            form=r.form,
        )  # fmt: skip
        more = 0.0, 0.0
        if z is not None:
            cost = quantised.quantisation(q, k[:, :, part], v[:, :, part], host_copy(z))
            more = cost.total, cost.lse
        error.append(bound.total + more[0])
        error_lse.append(bound.lse + more[1])
    drift = np.expm1(2 * np.max(error_lse, axis=0))[..., None]
    spread = (weights * (np.abs(outputs) + np.stack(error))).sum(axis=0)
    limit = (weights * np.stack(error)).sum(axis=0) * (1 + drift) + drift * spread
    exact = reference.attention_exact(q, k, v)
    assert (np.abs(merged - exact) <= limit).all()
