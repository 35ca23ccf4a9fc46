"""Single roundings, against exact rational arithmetic and NumPy's own conversions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import FINITE_MAX, STORAGE, array_namespace, as_float64
from cupyattn.kernels.numerics import EX2_FLUSH, HALF_SUBNORMAL, UNIT_ROUNDOFF
from cupyattn.reference.rounding import ex2, fma32, round_to

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("fmt", STORAGE)
@given(x=floats32)
def test_round_to_is_nearest_and_idempotent(fmt: str, x: float) -> None:
    y = round_to(x, fmt)
    assert y.dtype == np.float32
    if abs(x) <= FINITE_MAX[fmt]:
        error = abs(Fraction(float(y)) - Fraction(x))
        assert error <= UNIT_ROUNDOFF[fmt] * abs(Fraction(x)) + Fraction(HALF_SUBNORMAL[fmt])
    assert_array_equal(round_to(y, fmt), y)
    assert_array_equal(y.astype(STORAGE[fmt]).astype(np.float32), y)


@pytest.mark.parametrize("fmt", STORAGE)
def test_finite_max_is_the_largest_number(fmt: str) -> None:
    assert FINITE_MAX[fmt] == float(ml_dtypes.finfo(STORAGE[fmt]).max)
    assert round_to(FINITE_MAX[fmt], fmt) == FINITE_MAX[fmt]
    assert np.isinf(round_to(2 * FINITE_MAX[fmt], fmt))


@given(a=floats32, b=floats32, c=floats32)
def test_fma32_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = float(fma32(np.float32(a), np.float32(b), np.float32(c)))
    if np.isinf(got):
        assert abs(exact) > FINITE_MAX["float32"]
        return
    half_ulp = max(abs(exact) * Fraction(2) ** -24, Fraction(2) ** -150)
    # float64 rounds first, by 2^-53 of the result at most (2^-1075 where that is subnormal).
    slack = abs(exact) * Fraction(2) ** -53 + Fraction(2) ** -1075
    assert abs(Fraction(got) - exact) <= half_ulp + slack


def test_fma32_keeps_what_a_product_rounded_first_would_lose() -> None:
    a, b = np.float32(1 + 2.0**-13), np.float32(1 - 2.0**-13)
    assert a * b - np.float32(1) == 0
    assert fma32(a, b, np.float32(-1)) == -(2.0**-26)


@given(x=st.floats(-130, 127, width=32))
def test_ex2_is_a_power_of_two_flushed_at_the_smallest_normal(x: float) -> None:
    y = float(ex2(x))
    if x < -126:
        assert y == 0.0
    else:
        assert y >= EX2_FLUSH
        assert y == pytest.approx(2.0**x, rel=2.0**-24)


def test_ex2_of_what_is_not_finite() -> None:
    assert_array_equal(ex2([-np.inf, np.inf, np.nan]), np.float32([0, np.inf, np.nan]))


def test_as_float64_is_exact() -> None:
    values = [1.0, 2.0**-133, 6e4, -0.0, 1 / 3]
    for kind in STORAGE.values():
        x = np.array(values).astype(kind)
        assert as_float64(x).dtype == np.float64
        assert_array_equal(as_float64(x).astype(kind), x)


def test_split_heads_puts_the_queries_of_a_key_head_together_without_a_copy() -> None:
    x = np.zeros((2, 7, 6, 5)).swapaxes(1, 2)  # strided as (batch, len, heads, head_dim)
    x += np.arange(6)[:, None, None]
    split = split_heads(x, 3)
    assert split.shape == (2, 3, 2, 7, 5) and np.shares_memory(split, x)
    assert_array_equal(split[0, :, :, 0, 0], [[0, 1], [2, 3], [4, 5]])
    assert_array_equal(merge_heads(split), x)
    assert split_heads(np.zeros((2, 0, 7, 5)), 0).shape == (2, 0, 0, 7, 5)


def test_array_namespace_takes_one_kind() -> None:
    x = np.zeros(2)
    assert array_namespace(x, x.astype(ml_dtypes.bfloat16)) is np
    foreign = type("Tensor", (), {"__module__": "torch"})()
    with pytest.raises(TypeError, match="torch.Tensor"):
        array_namespace(x, foreign)
