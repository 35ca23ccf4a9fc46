"""`Int8Linear` and the kernel that quantises its activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops.act_quant import act_quant_except, places
from cupyattn.ops.linear import outlier_columns
from cupyattn.plans.act_quant import padded, plan_act_quant
from cupyattn.problem import gemm_form
from cupyattn.quant.activation import ACTIVATIONS
from cupyattn.quant.smoothing import smoothing_factors
from cupyattn.reference.gemm import activate
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.quant_inputs import DTYPES, operand, same_bytes
from tests.support.foreign import ForeignWithNamespace
from tests.support.marks import slow

SMALL = GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=2)
seeds = st.integers(0, 2**32 - 1)


def activations(seed: int, dtype: np.dtype, rows: int, channels: int, regime: str) -> np.ndarray:
    return operand(seed, dtype, (1, 1, rows, channels), regime)[0, 0]


# ---- the layer -----------------------------------------------------------------------------------


@given(
    seeds,
    st.sampled_from(("normal", "outlier channel", "far outlier channel", "wide", "zeros")),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 9), st.integers(1, 140), st.integers(1, 300)),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(tuple(STORAGE)),
)
def test_a_layer_holds_its_bound(
    seed, regime, dtype, shape, activation, biased, kept, out_dtype
) -> None:
    rows, out, channels = shape
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((out, channels)) / np.sqrt(channels)).astype(dtype)
    x = activations(seed, dtype, rows, channels, regime)
    bias = rng.standard_normal(out).astype(dtype) if biased else None
    columns = rng.permutation(channels)[:kept]
    before = w.tobytes(), x.tobytes()
    layer = ca.Int8Linear.from_weight(
        w, bias, activation=activation or None, outlier_columns=columns
    )
    y = layer(x, out_dtype=out_dtype)
    assert y.dtype == STORAGE[out_dtype] and (w.tobytes(), x.tobytes()) == before
    exact = as_float64(x) @ as_float64(w).T + (0 if bias is None else as_float64(bias))
    error = np.abs(as_float64(y) - activate(exact, activation))
    assert (error <= layer.error(x, w, out_dtype)).all()


def test_kept_columns_take_the_outliers_out_of_the_error() -> None:
    """A column 1000 times as large: its blocks' other codes are worth nothing unless it is kept."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 256)).astype(np.float32)
    x = activations(0, DTYPES[0], 40, 256, "far outlier channel")
    exact = as_float64(x) @ w.T
    columns = outlier_columns(x)
    assert len(columns) == 1

    def error(columns: list[int]) -> tuple[float, float]:
        kept = "float16" if columns else None
        layer = ca.Int8Linear.from_weight(w, outlier_columns=columns, outlier_dtype=kept)
        y = layer(x, out_dtype="float32")
        return np.abs(y - exact).mean(), layer.error(x, w, "float32").mean()

    (found, bound), (plain, plain_bound) = error(columns), error([])
    assert found < plain / 10 and bound < plain_bound / 10


@pytest.mark.parametrize("kept", [0, 9])
def test_the_kernels_are_the_mirror(kept: int, monkeypatch) -> None:
    monkeypatch.setattr(gemm_form, "PORTABLE_TILES", (SMALL,))
    rng = np.random.default_rng(1)
    w = rng.standard_normal((40, 200)).astype(np.float16)
    x = activations(2, DTYPES[0], 6, 200, "outlier channel").reshape(2, 3, 200)
    layer = ca.Int8Linear.from_weight(
        w, w[:, 0], activation="gelu" if kept else None, outlier_columns=range(kept)
    )
    y = layer(x, backend="interpret")
    assert y.shape == (2, 3, 40) and y.dtype == np.float16
    if kept:
        exact = activate(as_float64(x) @ as_float64(w).T + as_float64(w[:, 0]), "gelu")
        assert (np.abs(y - exact) <= layer.error(x, w)).all()
    else:
        assert y.tobytes() == layer(x).tobytes()


def test_a_value_that_is_not_finite_poisons_its_row() -> None:
    w = np.ones((5, 130), np.float16)
    for column, value in ((3, np.nan), (129, np.inf), (0, np.nan)):
        x = np.ones((4, 130), np.float16)
        x[2, column] = value
        y = ca.Int8Linear.from_weight(w, outlier_columns=[0])(x)
        assert not np.isfinite(y[2]).any() and np.isfinite(y[[0, 1, 3]]).all()


# ---- its activations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "channels", "step"),
    [(DTYPES[0], 260, 1), (DTYPES[1], 200, 2), (DTYPES[2], 256, 1), (DTYPES[0], 7, 3)],
    ids=str,
)
def test_the_kernel_quantises_as_numpy_does(dtype: np.dtype, channels: int, step: int) -> None:
    wide = activations(3, dtype, 37 * step, channels + 1, "wide")
    wide[5 * step, 1] = np.nan
    for x in (wide[::step, :channels], wide[::step, 1:]):
        found, expected = ca.act_quant(x, backend="interpret"), ca.act_quant(x)
        assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


@pytest.mark.parametrize("dtype", [DTYPES[2], *slow(DTYPES[:2])], ids=str)
def test_the_kernel_keeps_columns(dtype: np.dtype) -> None:
    x = activations(4, dtype, 21, 200, "outlier channel")
    columns = np.int32([150, 3, 127, 128])
    kept = "bfloat16" if dtype == DTYPES[1] else "float16"
    given = columns, places(columns, 200), kept
    found, expected = act_quant_except(x, *given, backend="interpret"), act_quant_except(x, *given)
    assert expected[2].shape == (21, padded(4)) and not as_float64(expected[2])[:, 4:].any()
    assert not expected[0][:, columns].any()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()


THEFTS = {
    "maximum of half a group": ("shfl_max<LANES>", "shfl_max<LANES / 2>", ""),
    "channels past the end": (
        "if (row[pass] < p.rows && channel < p.channels)\n        x",
        "if (row[pass] < p.rows)\n        x", "out of",
    ),
    "scale of the first group": (" * row_groups + group[pass]]", " * row_groups]", "race"),
    "scale of another pass": ("own.inverse, pass, LANES", "own.inverse, 0, LANES", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place("linear/act_quant.cu", line, instead, tmp_path, monkeypatch)
    x = activations(5, DTYPES[0], 9, 200, "normal")
    check_found(
        lambda: not same_bytes(ca.act_quant(x, backend="interpret"), ca.act_quant(x)), finding
    )


@pytest.mark.parametrize("dtype", [DTYPES[0], *slow(DTYPES[1:])], ids=str)
def test_quantising_activations_is_one_launch_without_spills(dtype: np.dtype) -> None:
    for outliers in (0, 8):
        plan = plan_act_quant(
            Operand.contiguous((4096, 3072), dtype.itemsize), dtype.name, outliers,
            "bfloat16" if outliers else "",
        )  # fmt: skip
        (one,) = plan.launches
        assert one.grid == 4096 * 24 * 128 * dtype.itemsize // (128 * 64)
        taken = kc.build(one.module, "sm_80").kernels["act_quant"]
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)


def test_more_blocks_than_32_bits_count_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="split the rows"):
        plan_act_quant(Operand.contiguous((2**28, 1024), 2), "float16")


# ---- documents -----------------------------------------------------------------------------------


# ---- arguments -----------------------------------------------------------------------------------

W = np.ones((6, 200), np.float16)
CODES, SCALES = ca.weight_quant(W)
LAYER = ca.Int8Linear.from_weight(W, outlier_columns=[1])


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: LAYER(W[:, :199]), ValueError, r"x must have shape \(..., 200\), got \(6, 199\)"),
        (lambda: LAYER(np.float16(1)), ValueError, r"got \(\)"),
        (lambda: LAYER(1.0), TypeError, "x must be a NumPy or CuPy array, .* got float"),
        (lambda: LAYER(W.astype("bfloat16")), TypeError, "kept in float16, got bfloat16"),
        (lambda: ca.Int8Linear(CODES, SCALES[:, :1]), ValueError, r"\(1, 2\), got \(1, 1\)"),
        (lambda: ca.Int8Linear(W, SCALES), TypeError, "codes must be int8"),
        (lambda: ca.Int8Linear(CODES, SCALES, block_size=64), UnsupportedError, "blocks of 128"),
        (lambda: ca.Int8Linear(CODES, SCALES, W[0]), ValueError, r"bias must have shape \(6,\)"),
        (lambda: ca.Int8Linear(CODES, SCALES, activation="relu"), ValueError, "got 'relu'"),
        (lambda: ca.Int8Linear(CODES, SCALES, outlier_columns=[1]), ValueError, "go together"),
        (
            lambda: ca.Int8Linear(CODES, SCALES, outlier_columns=[1], outlier_weight=W),
            ValueError,
            r"of shape \(6, 1\), got float16 \(6, 200\)",
        ),
        (lambda: ca.Int8Linear.from_weight(W, outlier_columns=[200]), ValueError, "0 to 199"),
        (lambda: ca.Int8Linear.from_weight(W, outlier_columns=[2, 2]), ValueError, "once"),
        (lambda: ca.Int8Linear.from_weight(W[0]), ValueError, "two axes"),
        (lambda: ca.Int8Linear.from_weight(CODES), TypeError, "must be float16.* got int8"),
        (
            lambda: ca.Int8Linear.from_weight(W, outlier_dtype="float32"),
            ValueError,
            "outlier_dtype must be",
        ),
        (lambda: ca.act_quant(W, 64, backend="interpret"), UnsupportedError, "blocks of 128"),
        (lambda: LAYER.error(W, W[:5]), ValueError, r"weight of this layer, \(6, 200\), got"),
        (lambda: LAYER.error(W[:, :9], W), ValueError, r"x must have shape \(..., 200\)"),
        (lambda: LAYER.error(W, W, "int8"), ValueError, "out_dtype must be .* got 'int8'"),
        (lambda: outlier_columns(np.float32(3)), ValueError, r"x must be \(..., in\), got"),
        (lambda: outlier_columns(W, np.nan), ValueError, "threshold must be a number, got nan"),
        (lambda: smoothing_factors(W, W, "a"), ValueError, "strength must be .* got 'a'"),
        (lambda: smoothing_factors(W[0, 0], W), ValueError, r"x must be \(..., in\), got"),
    ],
)
def test_what_cannot_be_is_said(call, error, said) -> None:
    with pytest.raises(error, match=said):
        call()


def test_no_samples_have_no_outliers() -> None:
    assert outlier_columns(W[:0]) == [] and outlier_columns(W[:, :0]) == []
    assert smoothing_factors(W[:, :0], W[:, :0]).shape == (0,)


@pytest.mark.parametrize("kept", [[], [3]])
def test_a_bound_is_an_array_of_the_callers_kind(kept: list[int]) -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float16) for s in ((40, 200), (2, 3, 200)))
    residual, gate = (rng.standard_normal(s).astype(np.float16) for s in ((2, 3, 40), (40,)))
    layer = ca.Int8Linear.from_weight(w, outlier_columns=kept)
    expected = layer.error(x, w, residual=residual, gate=gate)
    assert isinstance(expected, np.ndarray) and expected.dtype == np.float64
    foreign = (ForeignWithNamespace(a) for a in (w, residual, gate))
    beside = dict(zip(("weight", "residual", "gate"), foreign, strict=True))
    of = ca.Int8Linear.from_weight(ForeignWithNamespace(w), outlier_columns=kept)
    found = of.error(ForeignWithNamespace(x), **beside)
    assert isinstance(found, ForeignWithNamespace)
    np.testing.assert_array_equal(found.array, expected)
