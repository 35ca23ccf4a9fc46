"""`Int8Linear` with a rotated weight, which spreads outlier channels of its input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.errors import UnsupportedError
from cupyattn.quant import rotation, smoothing_factors
from cupyattn.quant.activation import ACTIVATIONS
from cupyattn.reference.gemm import activate
from tests.quant.quant_inputs import DTYPES, operand

ROTATIONS = rotation.LAYER_ROTATIONS[1:]


def made(seed: int, shape: tuple[int, int, int], dtype: np.dtype, regime: str = "normal"):
    """Draw activations and a weight."""
    rows, out, channels = shape
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((out, channels)) / np.sqrt(channels)).astype(dtype)
    return operand(seed, dtype, (1, 1, rows, channels), regime)[0, 0], w


def away(layer: ca.Int8Linear, x: np.ndarray, w: np.ndarray) -> float:
    """Return the relative L2 error of a layer."""
    exact = as_float64(x) @ as_float64(w).T
    return float(np.linalg.norm(layer(x, out_dtype="float32") - exact) / np.linalg.norm(exact))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(("normal", "outlier channel", "far outlier channel", "wide", "zeros")),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 9), st.integers(1, 140), st.sampled_from((64, 128, 192, 256, 512))),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.sampled_from(ROTATIONS),
    st.sampled_from(tuple(STORAGE)),
)
def test_a_rotated_layer_holds_its_bound(
    seed, regime, dtype, shape, activation, biased, rotate, out_dtype
) -> None:
    x, w = made(seed, shape, dtype, regime)
    bias = np.random.default_rng(seed).standard_normal(shape[1]).astype(dtype) if biased else None
    before = w.tobytes(), x.tobytes()
    layer = ca.Int8Linear.from_weight(
        w, bias, strategy="channel", rotate=rotate, activation=activation or None
    )
    y = layer(x, out_dtype=out_dtype)
    assert layer.rotate == rotate and y.dtype == STORAGE[out_dtype]
    assert (w.tobytes(), x.tobytes()) == before
    exact = as_float64(x) @ as_float64(w).T + (0 if bias is None else as_float64(bias))
    error = np.abs(as_float64(y) - activate(exact, activation))
    assert (error <= layer.error(x, w, out_dtype)).all()


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_the_bound_is_of_the_rotated_layer(rotate: str) -> None:
    """It knows that an outlier is spread: it is well below the bound of a layer without."""
    x, w = made(0, (4, 16, 512), DTYPES[0], "outlier channel")
    bounds = [
        ca.Int8Linear.from_weight(w, strategy="channel", rotate=one).error(x, w, "float32")
        for one in (rotate, None)
    ]
    assert (bounds[0] < bounds[1]).all()


@pytest.mark.parametrize("rotate", ROTATIONS)
@pytest.mark.parametrize("channels", [64, 384])
def test_the_kernels_have_the_mirrors_bits(rotate: str, channels: int) -> None:
    x, w = made(1, (5, 24, channels), DTYPES[0], "outlier channel")
    layer = ca.Int8Linear.from_weight(w, w[:, 0], strategy="channel", rotate=rotate)
    y, residual = layer(x), np.ones((5, 24), np.float16)
    assert layer(x, backend="interpret").tobytes() == y.tobytes()
    kernels = layer(x, residual=residual, gate=residual[:1], backend="interpret")
    assert kernels.tobytes() == layer(x, residual=residual, gate=residual[:1]).tobytes()


@pytest.mark.parametrize(
    ("outliers", "channels", "most"),
    [("0.5 % x 30", 3072, 0.013), ("one head x 10", 3072, 0.014), ("GELU", 3072, 0.0165)],
)
def test_outlier_channels_are_spread(outliers: str, channels: int, most: float) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, channels))
    if outliers == "0.5 % x 30":
        x[:, rng.permutation(channels)[: channels // 200]] *= 30
    elif outliers == "GELU":
        x = activate(x, "gelu")
    else:
        x[:, 384:512] *= 10
    w = (rng.standard_normal((64, channels)) / np.sqrt(channels)).astype(np.float32)
    x = x.astype(np.float32)
    errors = {
        rotate: away(ca.Int8Linear.from_weight(w, strategy="channel", rotate=rotate), x, w)
        for rotate in (None, "hadamard")
    }
    assert errors["hadamard"] <= most and errors["hadamard"] < errors[None]


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_rotation_is_undone(rotate: str) -> None:
    for channels in (64, 192, 384, 768):
        w = np.random.default_rng(channels).standard_normal((3, channels))
        turned = rotation.rotated(w, rotate)
        signs = rotation.matrix(np.arange(rotation.group_of(channels)))
        assert np.abs(rotation.unrotated(turned, rotate, signs) - w).max() < 1e-14
        assert np.abs(np.linalg.norm(turned, axis=1) / np.linalg.norm(w, axis=1) - 1).max() < 1e-14
        assert (rotation.gathered(rotation.spread(w)) == w).all()


def test_contiguous_groups_are_neighbours() -> None:
    """One channel reaches its 256 neighbours, and with spread groups the whole row."""
    one = np.zeros((1, 1024))
    one[0, 300] = 16.0
    near = rotation.gathered(rotation.rotated(one, rotation.CONTIGUOUS))
    assert (np.flatnonzero(near) == np.arange(256, 512)).all() and (abs(near[near != 0]) == 1).all()
    far = np.flatnonzero(rotation.rotated(one))
    assert len(far) == 256 and np.ptp(far) > 900


@pytest.mark.parametrize("channels", [64, 256])
def test_sums_of_a_group_beyond_float32_give_nan(channels: int) -> None:
    """The signs of a row of the matrix make them all add up."""
    signs = np.sign(rotation.rotated(np.eye(channels))[:, 3]).astype(np.float32)
    layer = ca.Int8Linear.from_weight(
        np.eye(channels, dtype=np.float32), strategy="channel", rotate="hadamard"
    )
    assert np.isfinite(layer(np.float32(1e36) * signs[None], out_dtype="float32")).all()
    assert np.isnan(layer(np.float32(3e38) * signs[None], out_dtype="float32")).all()


# ---- factors of channels -------------------------------------------------------------------------


def smoothed(seed: int, shape: tuple[int, int, int], dtype: np.dtype, regime: str, **options):
    """Draw activations and a weight, and make a layer with factors of their channels."""
    x, w = made(seed, shape, dtype, regime)
    smooth = smoothing_factors(x, w)
    return x, w, ca.Int8Linear.from_weight(w, strategy="channel", smooth=smooth, **options)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(("normal", "outlier channel", "far outlier channel", "zeros")),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 9), st.integers(1, 40), st.sampled_from((64, 192, 256))),
    st.sampled_from(rotation.LAYER_ROTATIONS),
)
def test_a_smoothed_layer_holds_its_bound(seed, regime, dtype, shape, rotate) -> None:
    x, w, layer = smoothed(seed, shape, dtype, regime, rotate=rotate)
    bias = np.random.default_rng(seed).standard_normal(shape[1]).astype(np.float32)
    layer.bias = bias
    exact = as_float64(x) @ as_float64(w).T + bias
    off = np.abs(layer(x, out_dtype="float32") - exact)
    assert (off <= layer.error(x, w, "float32")).all()


@pytest.mark.parametrize("rotate", rotation.LAYER_ROTATIONS)
def test_the_kernels_multiply_by_the_factors(rotate: str | None) -> None:
    x, _, layer = smoothed(3, (5, 16, 192), DTYPES[0], "outlier channel", rotate=rotate)
    y = layer(x, backend="interpret")
    assert y.tobytes() == layer(x).tobytes()
    assert y.tobytes() != layer(x * np.float16(layer.smooth)).tobytes()


def test_the_weight_takes_over_some_of_the_range_of_outliers() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 1024), np.float32), rng.standard_normal((64, 1024), np.float32)
    x[:, [5, 700]] *= 100
    found = {}
    for smooth in (None, smoothing_factors(x, w)):
        for rotate in (None, "hadamard"):
            layer = ca.Int8Linear.from_weight(w, strategy="channel", smooth=smooth, rotate=rotate)
            found[smooth is not None, rotate] = away(layer, x, w)
    assert found[True, None] < 0.4 * found[False, None]
    assert found[True, "hadamard"] < 0.4 * found[False, "hadamard"] < 0.01


def test_factors_are_powers_of_two_of_the_formula() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 64)) * np.exp(rng.standard_normal(64))
    several = [rng.standard_normal((n, 64)) for n in (5, 8)]
    x[:, 7] = 0
    found = smoothing_factors(x, several, strength=0.75)
    others = np.arange(64) != 7
    tops = np.abs(x[:, others]).max(axis=0), np.abs(np.vstack(several)[:, others]).max(axis=0)
    exact = tops[0] ** -0.75 * tops[1] ** 0.25
    exact /= np.median(exact)
    assert found.dtype == np.float32 and found[7] == 1
    assert (np.abs(np.log2(found[others] / exact)) <= 0.5 + 1e-9).all()
    assert (np.frexp(found)[0] == 0.5).all()
    assert smoothing_factors(0 * x, several).tolist() == [1.0] * 64


def test_refusals_say_what_factors_must_be() -> None:
    x, w = np.ones((3, 64), np.float32), np.ones((8, 64), np.float32)
    ones = np.ones(64, np.float32)
    for smooth, error, said in (
        (ones[:5], ValueError, r"smooth must be \(64,\), a factor for each channel, got \(5,\)"),
        (ones.astype(np.float16), TypeError, "smooth must be float32, got float16"),
        (3 * ones, ValueError, "smooth must be powers of two"),
        (0 * ones, ValueError, "smooth must be powers of two"),
    ):
        with np.errstate(divide="ignore"), pytest.raises(error, match=said):
            ca.Int8Linear.from_weight(w, strategy="channel", smooth=smooth)
    with pytest.raises(UnsupportedError, match="smooth goes with strategy='channel'"):
        ca.Int8Linear.from_weight(w, smooth=ones)
    with pytest.raises(ValueError, match="strength must be from 0 to 1, got 2"):
        smoothing_factors(x, w, 2)
    with pytest.raises(ValueError, match=r"weights must be \(out, 64\).*got \(64, 8\)"):
        smoothing_factors(x, w.T)
    with pytest.raises(ValueError, match="must be finite"):
        smoothing_factors(x * np.nan, w)


def test_refusals_say_what_goes_with_a_rotation() -> None:
    w = np.ones((8, 192), np.float32)
    with pytest.raises(UnsupportedError, match="rotate='hadamard' goes with strategy='channel'"):
        ca.Int8Linear.from_weight(w, rotate="hadamard")
    with pytest.raises(UnsupportedError, match="takes a multiple of 64 channels, got 100"):
        ca.Int8Linear.from_weight(w[:, :100], strategy="channel", rotate="hadamard")
    with pytest.raises(ValueError, match="rotate must be None or 'hadamard' or .* got 'random'"):
        ca.Int8Linear.from_weight(w, strategy="channel", rotate="random")
    with pytest.raises(UnsupportedError, match="outlier_columns go with scales of blocks"):
        ca.Int8Linear.from_weight(w, strategy="channel", rotate="hadamard", outlier_columns=[3])
    codes, scales = ca.quant.weight_quant(w)
    with pytest.raises(UnsupportedError, match="got strategy='block'"):
        ca.Int8Linear(codes, scales, rotate="hadamard")
