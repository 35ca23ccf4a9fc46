"""Block-wise INT8 of weights and activations: error, range, blocks, special values, memory."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.errors import UnsupportedError
from cupyattn.quant import weight_error
from cupyattn.quant.quantizers import quantize_symmetric
from tests.quant.quant_inputs import DTYPES, operand

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)
regimes = st.sampled_from(
    ("normal", "outlier channel", "constant rows", "subnormal", "signed zeros", "huge", "wide")
)
sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))
blocks = st.sampled_from((1, 3, 8, 16, 128))


def weight(seed: int, dtype: np.dtype, shape: tuple[int, ...], regime: str) -> npt.NDArray:
    return operand(seed, dtype, (1, 1, *shape), regime)[0, 0]


def bits(x: npt.NDArray) -> bytes:
    return x.tobytes()


# ---- codes and scales ----------------------------------------------------------------------------


@given(seeds, regimes, dtypes, sizes, blocks)
def test_every_block_is_quantised_by_itself(seed, regime, dtype, shape, block) -> None:
    w = weight(seed, dtype, shape, regime)
    before = bits(w)
    codes, scales = ca.weight_quant(w, block)
    assert codes.dtype == np.int8 and scales.dtype == np.float32 and bits(w) == before
    assert scales.shape == (-(-shape[0] // block), -(-shape[1] // block))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            alone = np.ascontiguousarray(w[here])[None, None]
            one_codes, one_scale = quantize_symmetric(alone, 1, per_tensor=True)
            assert bits(np.ascontiguousarray(codes[here])) == bits(one_codes)
            assert bits(scales[i, j]) == bits(one_scale)


@given(seeds, regimes, dtypes, st.integers(1, 60), blocks)
def test_every_block_of_a_row_is_quantised_by_itself(seed, regime, dtype, channels, block) -> None:
    x = operand(seed, dtype, (2, 1, 3, channels), regime)
    before = bits(x)
    codes, scales = ca.act_quant(x, block)
    assert bits(x) == before and scales.shape == (2, 1, 3, -(-channels // block))
    for j in range(scales.shape[-1]):
        here = np.s_[..., j * block : (j + 1) * block]
        one_codes, one_scale = quantize_symmetric(np.ascontiguousarray(x[here]), 1)
        assert bits(np.ascontiguousarray(codes[here])) == bits(one_codes)
        assert bits(np.ascontiguousarray(scales[..., j])) == bits(one_scale)


@given(seeds, dtypes)
def test_a_convolution_is_the_matrix_of_its_rows(seed, dtype) -> None:
    w = weight(seed, dtype, (10, 45), "normal")
    codes, scales = ca.weight_quant(w.reshape(10, 5, 3, 3), 16)
    flat_codes, flat_scales = ca.weight_quant(w, 16)
    assert codes.shape == (10, 5, 3, 3) and bits(codes) == bits(flat_codes)
    assert bits(scales) == bits(flat_scales)
    assert bits(ca.weight_dequant(codes, scales, 16)) == bits(
        ca.weight_dequant(flat_codes, flat_scales, 16)
    )


# ---- error ---------------------------------------------------------------------------------------


@given(seeds, regimes, dtypes, sizes, blocks, st.sampled_from(tuple(STORAGE)))
def test_the_way_there_and_back_holds_its_bound(seed, regime, dtype, shape, block, out) -> None:
    if out == "float16" and dtype != np.float16:
        out = "float32"  # numbers past 65504
    w = weight(seed, dtype, shape, regime)
    codes, scales = ca.weight_quant(w, block)
    back = ca.weight_dequant(codes, scales, block, out)
    assert back.dtype == STORAGE[out] and back.shape == w.shape
    error = np.abs(as_float64(back) - as_float64(w))
    assert (error <= weight_error(w, scales, block, out)).all()


@pytest.mark.parametrize("out", STORAGE)
def test_the_bound_is_used_up(out: str) -> None:
    """Numbers halfway between two codes, and a product halfway between two of the type."""
    w = np.float32([[127, 2.5, 3.5, 100.5]]) * np.float32(1 + 2.0**-7)
    _, scales = ca.weight_quant(w)
    back = ca.weight_dequant(*ca.weight_quant(w), out_dtype=out)
    error = np.abs(as_float64(back) - as_float64(w))
    assert 0.75 < (error / weight_error(w, scales, out_dtype=out)).max() <= 1


@pytest.mark.parametrize("fault", ["scale of the next block", "transposed", "codes off by one"])
def test_a_fault_breaks_the_bound(fault: str) -> None:
    w = weight(0, DTYPES[2], (40, 40), "wide")
    codes, scales = ca.weight_quant(w, 16)
    bound = weight_error(w, scales, 16)
    if fault == "scale of the next block":
        scales = np.roll(scales, 1, axis=1)
    elif fault == "transposed":
        scales = np.ascontiguousarray(scales.T)
    else:
        codes = np.where(codes < 127, codes + np.int8(1), codes)
    error = np.abs(ca.weight_dequant(codes, scales, 16).astype(np.float64) - w)
    assert (error > bound).any()


# ---- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_non_finite_value_poisons_its_block_alone(value: float, dtype: np.dtype) -> None:
    w = weight(1, dtype, (40, 40), "normal")
    clean_codes, clean_scales = ca.weight_quant(w, 16)
    w[17, 3] = value
    codes, scales = ca.weight_quant(w, 16)
    assert np.isnan(scales[1, 0]) and np.isnan(scales).sum() == 1
    assert not codes[16:32, :16].any()
    codes[16:32, :16] = clean_codes[16:32, :16]
    scales[1, 0] = clean_scales[1, 0]
    assert bits(codes) == bits(clean_codes) and bits(scales) == bits(clean_scales)


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (1, 1)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    codes, scales = ca.weight_quant(np.zeros(shape, np.float16))
    assert codes.shape == shape and ca.weight_dequant(codes, scales).shape == shape
    assert ca.act_quant(np.zeros(shape, np.float16))[0].shape == shape
    assert (scales == 1).all() and not codes.any()


def test_strided_and_reversed_weights() -> None:
    w = weight(3, DTYPES[1], (50, 60), "normal")
    view = w[::-2, ::3].T
    codes, scales = ca.weight_quant(view, 8)
    whole_codes, whole_scales = ca.weight_quant(np.ascontiguousarray(view), 8)
    assert bits(codes) == bits(whole_codes) and bits(scales) == bits(whole_scales)


def test_beside_codes_only_a_part_is_held() -> None:
    w = np.ones((4096, 1024), ml_dtypes.bfloat16)
    tracemalloc.start()
    codes, scales = ca.weight_quant(w, 128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < codes.nbytes + scales.nbytes + 6 * 2**20 < w.nbytes + codes.nbytes


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: ca.weight_quant(np.zeros((2, 2))), TypeError, "got float64"),
        (lambda: ca.weight_quant([[1.0]]), TypeError, "w must be a NumPy or CuPy array"),
        (lambda: ca.weight_quant(np.zeros(3, np.float32)), ValueError, r"2 or more axes.*\(3,\)"),
        (lambda: ca.act_quant(np.float32(1)), ValueError, r"1 or more axes.*\(\)"),
        (lambda: ca.act_quant(np.zeros((2, 2), np.float32), 0), ValueError, "at least 1, got 0"),
        (lambda: ca.act_quant(np.zeros((2, 2), np.float32), True), ValueError, "got True"),
        (
            lambda: ca.weight_dequant(np.zeros((9, 9), np.int8), np.ones((1, 2), np.float32)),
            ValueError,
            r"\(1, 1\), got \(1, 2\)",
        ),
        (
            lambda: ca.weight_dequant(np.zeros((9, 9), np.int16), np.ones((1, 1), np.float32)),
            TypeError,
            "int16",
        ),
        (
            lambda: ca.weight_dequant(
                np.zeros((9, 9), np.int8), np.ones((1, 1), np.float32), out_dtype="float64"
            ),
            ValueError,
            "float64",
        ),
        (lambda: ca.Int8Config(symmetric=False), UnsupportedError, "symmetric=True"),
        (lambda: ca.Int8Config(fallback_dtype="int4"), ValueError, "'bf16' or 'fp16'"),
        (lambda: ca.Int8Config(block_size=0), ValueError, "block_size"),
        (
            lambda: ca.Int8Config(block_size=100),
            UnsupportedError,
            "block_size must be 128, got 100",
        ),
        (lambda: ca.Int8Config(block_size=64), UnsupportedError, "block_size must be 128, got 64"),
        (lambda: ca.Int8Config(block_size=256), UnsupportedError, "in blocks of 128 x 128 only"),
        (
            lambda: ca.Int8Config(max_outlier_ratio=2),
            ValueError,
            r"\(--max-outliers\) must be a fraction from 0 to 1, got 2: write 0.02 for 2 %",
        ),
        (
            lambda: ca.Int8Config(max_outlier_ratio=1.01),
            ValueError,
            "a fraction from 0 to 1, got 1.0",
        ),
        (
            lambda: ca.Int8Config(max_outlier_ratio=True),
            ValueError,
            "a fraction from 0 to 1, got Tru",
        ),
        (lambda: ca.Int8Config(min_sqnr_db=float("inf")), ValueError, "finite number of decibels"),
        (lambda: ca.Int8Config(min_elements_for_int8=-1), ValueError, "min_elements_for_int8"),
        (lambda: ca.Int8Config(max_outlier_ratio=-0.5), ValueError, "max_outlier_ratio"),
        (lambda: ca.Int8Config(max_outlier_ratio=float("nan")), ValueError, "max_outlier_ratio"),
        (lambda: ca.Int8Config(fp32_patterns="blocks.*"), ValueError, "sequence of str"),
    ],
)
def test_what_cannot_be_is_said(call, error, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=said):
        call()


def test_patterns_become_a_tuple() -> None:
    assert ca.Int8Config(fp32_patterns=["a.*"]).fp32_patterns == ("a.*",)
