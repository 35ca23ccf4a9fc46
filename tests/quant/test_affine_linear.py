"""Linear layers whose weight has zero points: codes, product, bounds, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds.products import affine_error
from cupyattn.ops.act_quant import act_quant
from cupyattn.quant.quantizers import quantize_affine
from tests.support.foreign import ForeignWithNamespace

DTYPES = ("float16", "bfloat16", "float32")


def drawn(seed: int, dtype: str, offset: float, columns: int = 130) -> tuple[np.ndarray, ...]:
    """Return x, a weight whose channels lie about an offset each, and a bias."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((9, columns)) * rng.uniform(0.1, 2, (9, 1))
    w += offset * rng.standard_normal((9, 1))
    x, bias = rng.standard_normal((5, columns)) + 0.5, rng.standard_normal(9)
    x, w, bias = (array.astype(STORAGE[dtype]) for array in (x, w, bias))
    return x, w, bias


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, 30.0]), st.integers(1, 300), st.booleans(),
)  # fmt: skip
def test_a_layer_holds_its_bounds(
    seed: int, dtype: str, out_dtype: str, offset: float, columns: int, biased: bool
) -> None:
    """The bounds are of the weight, and of the codes alone, which is the product's rounding."""
    x, w, bias = drawn(seed, dtype, offset, columns)
    layer = ca.AffineInt8Linear.from_weight(w, bias if biased else None)
    y = layer(x, out_dtype=out_dtype).astype(np.float64)
    add = bias.astype(np.float64) if biased else 0.0
    exact = x.astype(np.float64) @ w.astype(np.float64).T + add
    assert (np.abs(y - exact) <= layer.error(x, w, out_dtype)).all()
    codes, scales = act_quant(x, strategy="channel")
    numbers = layer.codes.astype(np.float64) - layer.zeros
    of_codes = (codes * scales.astype(np.float64)) @ (numbers * layer.scales).T + add
    bound = affine_error(
        codes, scales, layer.codes, layer.scales, layer.zeros, out_dtype,
        bias=bias if biased else None,
    )  # fmt: skip
    ratio = (np.abs(y - of_codes) / bound).max()
    target(ratio, label="error / bound")
    assert ratio <= 1


def test_codes_fill_the_range_of_each_channel() -> None:
    _, w, _ = drawn(0, "float32", 30.0)
    layer = ca.AffineInt8Linear.from_weight(w)
    codes, scales, zeros = quantize_affine(w[None, None], 1)
    np.testing.assert_array_equal(layer.codes, codes[0, 0])
    np.testing.assert_array_equal(layer.scales[:, 0], scales[0, 0])
    np.testing.assert_array_equal(layer.zeros[:, 0], zeros[0, 0])
    assert layer.zeros.dtype == np.int32 and {-128, 127} & {*layer.zeros.ravel().tolist()}


@pytest.mark.parametrize(("offset", "least", "most"), [(30.0, 1.5, 3.0), (0.0, 0.8, 1.3)])
def test_zero_points_gain_where_weights_lie_on_one_side(
    offset: float, least: float, most: float
) -> None:
    x, w, _ = drawn(1, "float32", offset, 1024)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    layer = ca.AffineInt8Linear.from_weight(w)
    numbers = (layer.codes.astype(np.float32) - layer.zeros) * layer.scales
    symmetric = ca.weight_dequant(*ca.weight_quant(w, strategy="channel"), strategy="channel")
    assert least <= np.linalg.norm(symmetric - w) / np.linalg.norm(numbers - w) <= most
    y = layer(x)
    assert np.linalg.norm(y - exact) < 0.02 * np.linalg.norm(exact)


def test_without_its_correction_the_product_misses_the_bound() -> None:
    x, w, _ = drawn(2, "float16", 30.0)
    layer = ca.AffineInt8Linear.from_weight(w)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    layer.zeros = layer.zeros * 0
    assert (np.abs(layer(x) - exact) > ca.AffineInt8Linear.from_weight(w).error(x, w)).any()


def test_kernels_give_the_bits_of_the_mirror() -> None:
    x, w, bias = drawn(3, "float16", 1.0)
    layer = ca.AffineInt8Linear.from_weight(w, bias)
    assert (layer(x, backend="interpret") == layer(x)).all()


def test_arrays_of_any_library_are_taken() -> None:
    x, w, bias = drawn(4, "float16", 1.0)
    own = ca.AffineInt8Linear.from_weight(*map(ForeignWithNamespace, (w, bias)))
    y = own(ForeignWithNamespace(x))
    assert isinstance(y, ForeignWithNamespace)
    np.testing.assert_array_equal(y.array, ca.AffineInt8Linear.from_weight(w, bias)(x))


def test_numbers_that_are_not_finite_spoil_their_own_row_or_channel() -> None:
    x, w, _ = drawn(5, "float16", 1.0)
    x[1, 3], w[2, 4] = np.nan, np.inf
    y = ca.AffineInt8Linear.from_weight(w)(x)
    spoilt = np.isnan(y)
    assert spoilt[1].all() and spoilt[:, 2].all() and spoilt.sum() == 9 + 5 - 1


def test_what_it_refuses() -> None:
    x, w, _ = drawn(6, "float16", 1.0)
    layer = ca.AffineInt8Linear.from_weight(w)
    arrays: tuple[Any, ...] = layer.codes, layer.scales, layer.zeros
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: layer(x[:, :7]), ValueError, r"x must have shape \(..., 130\), got \(5, 7\)"),
        (lambda: layer(x, out_dtype="int8"), ValueError, "out_dtype must be"),
        (lambda: layer.error(x, w, "int8"), ValueError, "out_dtype must be"),
        (lambda: layer.error(x, w[:3]), ValueError, r"weight of this layer, \(9, 130\), got \(3,"),
        (lambda: ca.AffineInt8Linear.from_weight(w[0]), ValueError, "weight must have 2 or more"),
        (lambda: ca.AffineInt8Linear(*arrays[:2], arrays[2][:3]), ValueError,
         r"zeros must be int32 of shape \(9, 1\), one for each channel, got int32 of shape \(3, 1"),
        (lambda: ca.AffineInt8Linear(*arrays, np.zeros(3, np.float16)), ValueError,
         r"bias must have shape \(9,\), got \(3,\)"),
        (lambda: ca.AffineInt8Linear(3, *arrays[1:]), TypeError, "codes must be an array, got 3"),
        (lambda: ca.Int8Config(symmetric=False), ca.UnsupportedError,
         "scales alone: use symmetric=True, or cupyattn.AffineInt8Linear for one layer"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
