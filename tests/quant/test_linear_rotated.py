"""`Int8Linear` with a rotated weight, which spreads outlier channels of its input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.errors import UnsupportedError
from cupyattn.quant import rotation
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
