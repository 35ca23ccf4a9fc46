"""The quantiser's mirror: error, range, special values; one indexing for every group."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.arrays.groups import scale_of_row
from cupyattn.errors import DeviceMemoryError, UnsupportedError
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import GROUP_ALL, QuantConfig, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.quant.quantizers import (
    channel_mean,
    group_count,
    quantize_symmetric,
    scale_of_absmax,
)
from cupyattn.quant.static_scales import scale_shape
from cupyattn.reference.quantize import quantize_mirror
from tests.quant.quant_inputs import DTYPES, operand

TILES = Tiles(32, 16, 4)
REGIMES = (
    "normal", "outlier channel", "constant rows", "subnormal", "signed zeros", "huge", "wide",
)  # fmt: skip

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)
regimes = st.sampled_from(REGIMES)
groups = st.sampled_from((1, 2, 3, 16, 64, GROUP_ALL))
sizes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 40))


def as_float64(x: npt.NDArray) -> npt.NDArray[np.float64]:
    return x.astype(np.float32).astype(np.float64)


# ---- error and range -----------------------------------------------------------------------------


@given(seeds, regimes, dtypes, sizes, groups)
def test_error_is_at_most_half_a_scale(seed, regime, dtype, shape, group) -> None:
    x = operand(seed, dtype, shape, regime)
    codes, scale = quantize_symmetric(x, group)
    assert codes.dtype == np.int8 and scale.dtype == np.float32
    assert codes.min() >= -127 and codes.max() <= 127
    s = scale_of_row(scale, group, shape[2])[..., None].astype(np.float64)
    error = np.abs(as_float64(x) - s * codes)
    assert (error <= s / 2 * (1 + 2.0**-15)).all()


@given(seeds, dtypes, sizes, groups)
def test_error_reaches_half_a_scale(seed, dtype, shape, group) -> None:
    """The bound is no empty one: a value halfway between two codes uses it up."""
    x = operand(seed, dtype, shape, "signed zeros")
    x[...] = 127
    if shape[3] == 1:
        return
    x[..., 0] = 2.5
    codes, scale = quantize_symmetric(x, group)
    assert (codes[..., 0] == 2).all()  # ties to even
    assert (scale == 1).all()


@given(seeds, regimes, dtypes, sizes, groups)
def test_largest_of_a_group_gets_the_largest_code(seed, regime, dtype, shape, group) -> None:
    x = operand(seed, dtype, shape, regime)
    codes, scale = quantize_symmetric(x, group)
    for g in range(group_count(shape[2], group)):
        rows = slice(g * group, (g + 1) * group)
        members = np.abs(as_float64(x[:, :, rows])).max(axis=(2, 3))
        largest = np.abs(codes[:, :, rows].astype(int)).max(axis=(2, 3))
        raised = members < 127 * 2.0**-126
        assert (largest[~raised] == 127).all()
        assert (scale[:, :, g][members == 0] == 1).all()
        assert (scale[:, :, g][raised & (members > 0)] == np.float32(2.0**-126)).all()


@given(st.floats(2.0**-119, 2.0**127, width=32), st.floats(-1, 1, width=32))
def test_error_bound_at_any_maximum(absmax, fraction) -> None:
    """One group of two values: the derivation's worst cases are in the mantissa of the maximum."""
    x = np.float32([absmax, np.float32(absmax) * np.float32(fraction)]).reshape(1, 1, 1, 2)
    codes, scale = quantize_symmetric(x, 1)
    s = float(scale[0, 0, 0])
    error = np.abs(as_float64(x) - s * codes.astype(np.float64))
    assert (error <= s / 2 * (1 + 2.0**-15)).all()
    assert codes[0, 0, 0, 0] == 127


@given(seeds, regimes, dtypes, sizes, st.floats(2.0**-10, 10.0, width=32))
def test_static_scales_saturate_and_nothing_else(seed, regime, dtype, shape, s) -> None:
    x = operand(seed, dtype, shape, regime)
    static = np.full((1, 1, 1), s, np.float32)
    codes, scale = quantize_symmetric(x, GROUP_ALL, static_scale=static)
    assert (scale == np.float32(s)).all()
    s = float(np.float32(s))
    magnitude = np.abs(as_float64(x))
    error = np.abs(as_float64(x) - s * codes.astype(np.float64))
    assert (error <= np.maximum(s / 2 * (1 + 2.0**-15), magnitude - 127 * s)).all()
    assert (np.abs(codes.astype(int)) <= 127).all()


# ---- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 16, GROUP_ALL])
def test_a_non_finite_value_poisons_its_group_alone(value, dtype, group) -> None:
    x = operand(1, dtype, (2, 2, 40, 8))
    clean_codes, clean_scale = quantize_symmetric(x, group)
    x[1, 0, 21, 3] = value
    codes, scale = quantize_symmetric(x, group)
    hit = np.zeros(scale.shape, bool)
    hit[1, 0, 21 // group] = True
    assert np.array_equal(np.isnan(scale), hit)
    assert np.array_equal(scale[~hit], clean_scale[~hit])
    rows = scale_of_row(hit, group, 40)
    assert (codes[rows] == 0).all()
    assert np.array_equal(codes[~rows], clean_codes[~rows])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_poisons_its_static_scale(value) -> None:
    x = operand(1, DTYPES[0], (1, 1, 8, 8))
    x[0, 0, 5, 1] = value
    static = np.full((1, 1, 4), 0.02, np.float32)
    codes, scale = quantize_symmetric(x, 2, static_scale=static)
    assert np.isnan(scale[0, 0]).tolist() == [False, False, True, False]
    assert codes[0, 0, 5, 1] == (0 if np.isnan(value) else 127)


def test_an_unusable_static_scale_never_makes_finite_garbage() -> None:
    x = operand(1, DTYPES[2], (1, 1, 5, 8))
    static = np.float32([[[0.0, -1.0, np.nan, np.inf, 2.0**-130]]])
    codes, scale = quantize_symmetric(x, 1, static_scale=static)
    assert np.isnan(scale).all() and (codes == 0).all()


def test_scale_of_absmax_by_hand() -> None:
    absmax = np.float32([0, 2.0**-149, 127 * 2.0**-126, 127, 254, 3.4e38])
    scale, inverse = scale_of_absmax(absmax)
    assert scale[:5].tolist() == [1, 2.0**-126, 2.0**-126, 1, 2]
    assert inverse[1:5].tolist() == [2.0**126, 2.0**126, 1, 0.5]
    assert np.isfinite(inverse).all() and (inverse > 0).all()


def test_per_tensor_takes_one_maximum() -> None:
    x = operand(2, DTYPES[2], (2, 3, 9, 4), "wide")
    codes, scale = quantize_symmetric(x, GROUP_ALL, per_tensor=True)
    assert scale.shape == (1, 1, 1)
    assert scale[0, 0, 0] == np.abs(x).max() / np.float32(127)
    assert np.abs(codes.astype(int)).max() == 127


# ---- smoothing -----------------------------------------------------------------------------------


@given(seeds, dtypes, st.integers(1, 60), st.floats(0, 30, width=32))
def test_smoothing_leaves_the_softmax_as_it_is(seed, dtype, len_kv, bias) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 2, 5, 8))
    k = (rng.standard_normal((1, 2, len_kv, 8)) + bias).astype(dtype)
    mean = channel_mean(k)
    assert mean.shape == (1, 2, 8) and mean.dtype == np.float32

    def softmax(keys: npt.NDArray) -> npt.NDArray:
        s = q @ keys.swapaxes(-1, -2)
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True)

    exact = softmax(as_float64(k))
    shifted = softmax(as_float64(k) - mean[:, :, None, :].astype(np.float64))
    assert np.abs(exact - shifted).max() <= 1e-12


def test_smoothing_pays_on_a_channel_bias() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 64, 32)).astype(np.float32)
    k += 40 * rng.standard_normal((1, 1, 1, 32)).astype(np.float32)
    errors = {}
    for smooth in (False, True):
        _, k_hat, _ = quantize(q, k, v, quant=QuantConfig(smooth_k=smooth)).dequantize("float64")
        errors[smooth] = np.abs(k_hat - k).max()
    assert errors[True] < errors[False] / 4


def test_a_channel_that_is_not_finite_has_mean_zero() -> None:
    k = np.ones((1, 1, 20, 3), np.float32)
    k[0, 0, 18, 0], k[:, :, :, 1] = np.nan, 3e38
    assert channel_mean(k).tolist() == [[[0, 0, 1]]]
    x = quantize(k, k, np.ones_like(k), quant=QuantConfig(granularity_k="thread"))
    assert np.isnan(x.k_scale).tolist() == [[[False, True]]]


# ---- the call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_every_granularity(granularity, dtype) -> None:
    q = operand(3, dtype, (2, 4, 37, 24))
    k = operand(4, dtype, (2, 2, 53, 24), "outlier channel")
    v = operand(5, dtype, (2, 2, 53, 24))
    before = [a.copy() for a in (q, k, v)]
    quant = QuantConfig(granularity_q=granularity, granularity_k=granularity)
    x = quantize(q, k, v, quant=quant, tiles=TILES)
    assert all(np.array_equal(a, b) for a, b in zip((q, k, v), before, strict=True))
    rows_q = {"block": 32, "thread": 2, "token": 1}.get(granularity, GROUP_ALL)
    rows_k = {"block": 16, "thread": 16, "token": 1}.get(granularity, GROUP_ALL)
    assert (x.group_q, x.group_kv) == (rows_q, rows_k)
    assert x.q_scale.shape == scale_shape(q.shape, rows_q, granularity)
    assert x.out_dtype == dtype.name
    assert x.v.dtype == (np.float16 if dtype == np.float32 else dtype)
    assert dtype == np.float32 or x.v is v
    q_hat, k_hat, v_hat = x.dequantize("float64")
    for name, hat, array, scale, group in (
        ("q", q_hat, q, x.q_scale, x.group_q),
        ("k", k_hat, k, x.k_scale, x.group_kv),
    ):
        s = scale_of_row(scale, group, array.shape[2])[..., None].astype(np.float64)
        centred = np.abs(as_float64(array)) + (0 if name == "q" else np.abs(x.k_mean[:, :, None]))
        slack = s / 2 * (1 + 2.0**-15) + 2.0**-24 * centred + 2.0**-50
        assert (np.abs(hat - as_float64(array)) <= slack).all(), name
    assert np.array_equal(v_hat, as_float64(x.v))


def test_float32_dequantisation_rounds_once() -> None:
    q = operand(3, DTYPES[2], (1, 1, 8, 8))
    x = quantize(q, q, q, quant=QuantConfig(smooth_k=False))
    for single, double in zip(x.dequantize(), x.dequantize("float64"), strict=True):
        assert single.dtype == np.float32 and np.array_equal(single, double.astype(np.float32))
    with pytest.raises(ValueError, match="float16"):
        x.dequantize("float16")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 3), (3, 0), (0, 0)])
def test_empty_operands(granularity, len_q, len_kv) -> None:
    q, k = np.zeros((1, 2, len_q, 8), np.float16), np.zeros((1, 2, len_kv, 8), np.float16)
    quant = QuantConfig(granularity_q=granularity, granularity_k=granularity)
    x = quantize(q, k, k, quant=quant)
    assert x.q_codes.shape == q.shape and x.k_codes.shape == k.shape
    assert (x.q_scale == 1).all() and (x.k_scale == 1).all() and (x.k_mean == 0).all()
    assert [a.shape for a in x.dequantize()] == [q.shape, k.shape, k.shape]


def test_quantising_again_gives_the_same_codes() -> None:
    q = operand(7, DTYPES[2], (1, 2, 20, 16))
    quant = QuantConfig(granularity_q="token", granularity_k="token", smooth_k=False)
    first = quantize(q, q, q, quant=quant)
    again = quantize(*first.dequantize()[:2], q, quant=quant)
    assert np.array_equal(first.q_codes, again.q_codes)


def test_the_mirror_takes_a_mean_as_given() -> None:
    q, k, v = (operand(i, DTYPES[0], (1, 1, 9, 4)) for i in range(3))
    mean = np.full((1, 1, 4), 0.25, np.float32)
    x = quantize_mirror(q, k, v, QuantConfig(), TILES, k_mean=mean)
    assert x.k_mean is mean
    codes, _ = quantize_symmetric((k.astype(np.float32) - np.float32(0.25)), 16)
    assert np.array_equal(x.k_codes, codes)


def test_static_scales_of_every_shape() -> None:
    q = operand(8, DTYPES[0], (2, 3, 10, 4))
    arrays = np.full((1, 3, 1), 0.03, np.float32), np.full((2, 1, 1), 0.05, np.float32)
    head = QuantConfig(granularity_q="head", granularity_k="head", scales=arrays)
    x = quantize(q, q, q, quant=head)
    assert x.q_scale.shape == x.k_scale.shape == (2, 3, 1)
    assert (x.q_scale == np.float32(0.03)).all() and (x.k_scale == np.float32(0.05)).all()
    tensor = QuantConfig(granularity_q="tensor", granularity_k="tensor", scales=(0.03, 0.05))
    y = quantize(q, q, q, quant=tensor)
    assert np.array_equal(x.q_codes, y.q_codes) and y.q_scale.shape == (1, 1, 1)
    with pytest.raises(ValueError, match=r"q_scale must have shape \(2 or 1, 3 or 1, 10\)"):
        wrong = QuantConfig(granularity_q="token", granularity_k="head", scales=arrays)
        quantize(q, q, q, quant=wrong)
    with pytest.raises(ValueError, match="finite and at least"):
        bad = (np.zeros((1, 1, 1), np.float32), arrays[1])
        config = QuantConfig(granularity_q="head", granularity_k="head", scales=bad)
        quantize(q, q, q, quant=config)


def test_call_errors() -> None:
    q = np.zeros((1, 2, 4, 8), np.float16)
    with pytest.raises(TypeError, match="float64"):
        quantize(q.astype(np.float64), q, q)
    with pytest.raises(ValueError, match="length"):
        quantize(q, q, q[:, :, :3])
    with pytest.raises(ValueError, match="backend='cuda' takes CuPy arrays"):
        quantize(q, q, q, backend="cuda")
    with pytest.raises(TypeError, match="list"):
        quantize([1], q, q)


# ---- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("granularity_q", "row"),
        ("granularity_k", "channel"),
        ("granularity_v", "token"),
        ("symmetric", 1),
        ("smooth_k", "yes"),
        ("qk_bits", 16),
        ("pv", "float16"),
        ("scales", "static"),
        ("scales", (1.0,)),
        ("scales", (1.0, 2.0)),
        ("scales", (np.ones(3, np.float32), np.ones((1, 1, 1), np.float32))),
    ],
)
def test_config_refuses_what_does_not_exist(field, value) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        QuantConfig(**{field: value})


@pytest.mark.parametrize(
    ("given", "needed"),
    [({"symmetric": False}, "symmetric=True, got False"),
     ({"fused": True, "smooth_k": False}, "fused=False, got True")],
)  # fmt: skip
def test_config_says_what_four_bits_do_not_go_with(given, needed) -> None:
    with pytest.raises(UnsupportedError, match=f"qk_bits=4 needs quant.{needed}: use qk_bits=8"):
        QuantConfig(qk_bits=4, **given)


def test_config_equality() -> None:
    scales = np.ones((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    a, b = QuantConfig(scales=scales), QuantConfig(scales=scales)
    assert a == b and hash(a) == hash(b) and a != QuantConfig()
    assert a != QuantConfig(scales=(scales[0], 2 * scales[1]))
    one, other = (QuantConfig("tensor", "tensor", scales=(0.5, 2.0)) for _ in range(2))
    assert one == other != QuantConfig("tensor", "tensor")
    assert hash(QuantConfig()) == hash(QuantConfig()) and QuantConfig() != "thread"
    assert len({QuantConfig(g, h) for g, h in itertools.product(GRANULARITIES, repeat=2)}) == 25


def test_given_scales_are_a_copy_that_cannot_be_written() -> None:
    """A change in place would not be noticed by calls that are remembered."""
    given = np.ones((1, 1, 1), np.float32)
    config = QuantConfig("tensor", "tensor", scales=(given, 0.5))
    given[...] = 2
    for one in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one.scales[0] == 1 and one.scales[1] == 0.5
        with pytest.raises(ValueError, match="read-only"):
            one.scales[0][...] = 3
        assert one == config
    assert given.flags.writeable
    assert pickle.loads(pickle.dumps(QuantConfig(pv="int8"))) == QuantConfig(pv="int8")


def test_codes_that_do_not_fit_say_how_much_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    q = k = v = np.zeros((1, 2, 64, 16), np.float16)
    monkeypatch.setattr("cupyattn.interpret.run", full)
    message = "quantize needs .* 2,048 of them for 'q_codes', and more than can be had: split the"
    with pytest.raises(DeviceMemoryError, match=message):
        quantize(q, k, v, backend="interpret")
