"""Zero points of INT8 codes: quantiser (J1), exact fixtures, J2 and J3, the record, the call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn import attention, attention_varlen, explain, plan, strategies
from cupyattn.arrays.groups import scale_of_row, value_scale_of_key
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem import form as kernel_form_module
from cupyattn.quant import GROUP_ALL, QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.quant.quantizers import (
    group_count,
    quantize_affine,
    quantize_symmetric,
    quantize_values_affine,
    values_by_key,
)
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing import verdict
from tests.kernels.test_kernels_compile import LATE
from tests.quant.quant_inputs import DTYPES, operand
from tests.support.runs import ADDED, bits, check_each_alone, normal, packed

TILES = Tiles(64, 32, 4, 2)
REGIMES = (
    "normal", "outlier channel", "constant rows", "subnormal", "signed zeros", "huge", "wide",
)  # fmt: skip
#: Positions of the numbers relative to 0.
SHAPES = ("both sides", "above", "below", "spike", "far above")
#: docs/MATH_REFERENCE.md [L15].
HALF_STEP = 0.5 * (1 + 2.0**-12)
#: Arrays of the record that J1 is about.
CODED = (
    "q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale", "q_zero", "k_zero", "v_zero",
    "q_code_sum", "k_code_sum",
)  # fmt: skip

seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 70), st.integers(1, 40))


def as_float64(x: npt.NDArray) -> npt.NDArray[np.float64]:
    return x.astype(np.float32).astype(np.float64)


def shaped(x: npt.NDArray, shape: str) -> npt.NDArray:
    """Put numbers to one side of 0, or one of them far to one side."""
    if shape == "spike":
        x[..., -1, 0] = min(7 * np.abs(as_float64(x)).max(), float(ml_dtypes.finfo(x.dtype).max))
        return x
    if shape == "far above":
        return (np.abs(as_float64(x)) / 64 + np.abs(as_float64(x)).max() / 2).astype(x.dtype)
    return {"both sides": x, "above": np.abs(x), "below": -np.abs(x)}[shape]


# ---- the quantiser -------------------------------------------------------------------------------


@given(
    seeds, st.sampled_from(REGIMES), st.sampled_from(SHAPES), st.sampled_from(DTYPES), sizes,
    st.sampled_from((1, 2, 3, 16, 64, GROUP_ALL)),
)  # fmt: skip
def test_error_is_at_most_half_a_step_and_zero_is_exact(
    seed, regime, shape, dtype, size, group
) -> None:
    x = shaped(operand(seed, dtype, size, regime), shape)
    x[..., ::3] = np.where(
        np.random.default_rng(seed).random(x[..., ::3].shape) < 0.2, 0, x[..., ::3]
    )
    codes, scale, zero = quantize_affine(x, group)
    assert codes.dtype == np.int8 and scale.dtype == np.float32 and zero.dtype == np.int32
    assert zero.shape == scale.shape == (*size[:2], group_count(size[2], group))
    assert zero.min() >= -128 and zero.max() <= 127
    s = scale_of_row(scale, group, size[2])[..., None].astype(np.float64)
    z = scale_of_row(zero, group, size[2])[..., None]
    assert (np.abs(as_float64(x) - s * (codes - z)) <= HALF_STEP * s).all()
    assert (codes == z)[as_float64(x) == 0].all()


@given(st.floats(-1, 0, width=32), st.floats(0, 1, width=32), st.floats(2.0**-118, 2.0**127), seeds)
def test_error_at_any_range(least, largest, size, seed) -> None:
    """Both ends, where codes may saturate, and what lies halfway between two codes."""
    ends = np.float32(size) * np.float32([least, largest])
    s = (float(ends[1]) - float(ends[0])) / 255
    between = s * (np.random.default_rng(seed).integers(-256, 256, 500) + 0.5)
    inside = between[(between > ends[0]) & (between < ends[1])].astype(np.float32)
    x = np.concatenate([ends, np.nextafter(ends, np.float32(0)), inside]).reshape(1, 1, 1, -1)
    codes, scale, zero = quantize_affine(x, 1)
    step = float(scale[0, 0, 0])
    assert (np.abs(as_float64(x) - step * (codes - zero[..., None])) <= HALF_STEP * step).all()


def test_ends_get_the_outermost_codes_by_hand() -> None:
    x = np.float32([[-10, 245], [-255, 0], [0, 127.5], [0, 0], [3, 510], [-1e-40, 0]])[None, None]
    codes, scale, zero = quantize_affine(x, 1)
    assert scale[0, 0].tolist() == [1, 1, 0.5, 1, 2, 2.0**-126]
    assert zero[0, 0].tolist() == [-118, 127, -128, -128, -128, -128]
    assert codes[0, 0].tolist() == [
        [-128, 127], [-128, 127], [-128, 127], [-128, -128], [-126, 127], [-128, -128],
    ]  # fmt: skip


@given(seeds, st.sampled_from(("above", "below")), st.sampled_from(DTYPES))
def test_numbers_on_one_side_get_twice_the_codes(seed, shape, dtype) -> None:
    x = shaped(operand(seed, dtype, (1, 2, 30, 16)), shape)
    _, narrow, zero = quantize_affine(x, 2)
    _, wide = quantize_symmetric(x, 2)
    assert np.allclose(wide / narrow, 255 / 127, rtol=1e-6)
    assert (zero == (-128 if shape == "above" else 127)).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group", [1, 16, GROUP_ALL])
def test_a_non_finite_value_poisons_its_group_alone(value, group) -> None:
    x = operand(1, DTYPES[0], (2, 2, 40, 8)) + np.float16(1)
    clean = quantize_affine(x, group)
    x[1, 0, 21, 3] = value
    found = quantize_affine(x, group)
    hit = np.zeros(clean[1].shape, bool)
    hit[1, 0, 21 // group] = True
    rows = scale_of_row(hit, group, 40)
    for a, b, places in zip(found, clean, (rows, hit, hit), strict=True):
        assert np.array_equal(a[~places], b[~places])
    assert np.isnan(found[1][hit]).all() and not found[2][hit].any() and not found[0][rows].any()


@given(
    seeds, st.sampled_from(REGIMES), st.sampled_from(SHAPES), st.sampled_from(DTYPES),
    st.sampled_from((32, 64, GROUP_ALL)), st.integers(1, 150),
)  # fmt: skip
def test_values_are_off_by_half_a_step_at_most(seed, regime, shape, dtype, group, length) -> None:
    v = shaped(operand(seed, dtype, (1, 2, length, 5), regime), shape)
    codes, scale, zero = quantize_values_affine(v, group)
    assert codes.shape == (1, 2, 5, -(-length // 128) * 128)
    codes = values_by_key(codes, codes.shape[3])
    assert not codes[..., length:].any()
    assert scale.shape == zero.shape == (1, 2, group_count(length, group), 5)
    s = value_scale_of_key(scale.astype(np.float64), group, length)
    z = value_scale_of_key(zero, group, length)
    error = np.abs(as_float64(v) - s * (codes[..., :length].swapaxes(2, 3) - z))
    assert (error <= HALF_STEP * s).all()


#: head_dim, regime, on which side of 0, arithmetic of P.V.
OPERANDS = (
    (64, "normal", "both sides", "16bit"),
    (36, "channel bias", "above", "int8"),
    (7, "subnormal", "below", "fp8"),
    (64, "zeros", "above", "int8"),
)


@pytest.mark.parametrize(
    ("head_dim", "regime", "shape", "pv", "granularity"),
    [
        pytest.param(*one, granularity, marks=[pytest.mark.slow] if (i + j) % 4 else [])
        for i, one in enumerate(OPERANDS)
        for j, granularity in enumerate(GRANULARITIES)
    ],
)
def test_codes_scales_and_zero_points_equal_the_mirrors(
    head_dim, regime, shape, pv, granularity
) -> None:
    """J1. The mean is a sum in another order: the mirror takes the kernel's."""
    number = GRANULARITIES.index(granularity) + head_dim
    dtype = DTYPES[number % 3]
    q = operand(1, dtype, (1, 2, 75, head_dim), regime)
    k, v = (shaped(operand(i, dtype, (1, 2, 131, head_dim), regime), shape) for i in (2, 3))
    quant = QuantConfig(
        granularity, granularity, symmetric=False, pv=pv, smooth_k=shape == "both sides",
        granularity_v="channel" if pv == "int8" and number % 2 else None,
    )  # fmt: skip
    got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
    want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
    for name in CODED:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and bits(a) == bits(b)), name
    assert (got.v_zero is None) == (pv != "int8")
    for name in ("q", "k"):
        sums = getattr(got, f"{name}_codes").sum(axis=-1)
        assert np.array_equal(getattr(got, f"{name}_code_sum"), sums)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("granularity", ["thread", pytest.param("head", marks=pytest.mark.slow)])
def test_the_kernel_poisons_what_the_mirror_does(granularity, value) -> None:
    q, k, v = (operand(i, DTYPES[0], (1, 2, 70, 64)) for i in range(3))
    q[0, 1, 7, 5] = k[0, 0, 69, 63] = v[0, 1, 3, 2] = value
    quant = QuantConfig(granularity, granularity, symmetric=False, pv="int8")
    got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
    want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
    for name in CODED:
        assert np.array_equal(getattr(got, name), getattr(want, name), equal_nan=True), name
    assert np.isnan(got.q_scale).any() and np.isnan(got.v_scale).any()


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("pv", ["16bit", "int8"])
def test_empty_operands(len_q, len_kv, pv) -> None:
    q, k = np.ones((1, 2, len_q, 8), np.float16), np.ones((1, 2, len_kv, 8), np.float16)
    quant = QuantConfig(symmetric=False, pv=pv)
    got, want = (quantize(q, k, k, quant=quant, backend=b) for b in ("interpret", "mirror"))
    for name in CODED:
        assert getattr(got, name) is None or bits(getattr(got, name)) == bits(getattr(want, name))
    o, lse = attention(
        q, k, k, variant="fa_int8", quant=quant, backend="interpret", return_lse=True
    )
    assert o.shape == q.shape and not o.any() and np.isneginf(lse).all()


# ---- fixtures that need no bound -----------------------------------------------------------------


def moved(
    codes: npt.NDArray[np.int8], group: int, seed: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Codes with zero points, of which the codes given are the differences."""
    batch, heads, length, _ = codes.shape
    shape = batch, heads, group_count(length, group)
    zero = np.random.default_rng(seed).integers(-60, 61, shape).astype(np.int32)
    return (codes + scale_of_row(zero, group, length)[..., None]).astype(np.int8), zero


def pairs(pv: str, lengths: tuple[int, int]) -> Iterator[tuple[QuantizedQKV, QuantizedQKV]]:
    """Symmetric operands, and the same with all codes moved by zero points."""
    rng = np.random.default_rng(0)
    for head_dim, *groups in ((64, 1, 16), (36, 2, 1), (256, GROUP_ALL, 16)):
        shapes = [(1, h, n, head_dim) for h, n in zip((4, 2), lengths, strict=True)]
        q, k, v = (rng.integers(-60, 61, shapes[i > 0]).astype(np.int8) for i in range(3))
        counts = [group_count(n, g) for n, g in zip(lengths, groups, strict=True)]
        scales = [
            rng.uniform(0.01, 0.02, (1, h, g)).astype(np.float32)
            for h, g in zip((4, 2), counts, strict=True)
        ]
        given: dict[str, Any] = {
            "group_q": groups[0], "group_kv": groups[1],
            "k_mean": rng.standard_normal((1, 2, head_dim)).astype(np.float32),
        }  # fmt: skip
        q_moved, q_zero = moved(q, groups[0], 1)
        k_moved, k_zero = moved(k, groups[1], 2)
        zeros: dict[str, Any] = {"q_zero": q_zero, "k_zero": k_zero}
        v_moved = v = v if pv == "int8" else v.astype(np.float16)
        if pv == "int8":
            tiles = group_count(lengths[1], 64)
            v_zero = rng.integers(-60, 61, (1, 2, tiles, head_dim)).astype(np.int32)
            v_moved = (v + value_scale_of_key(v_zero, 64, lengths[1])).astype(np.int8)
            v_scale = np.full((1, 1, tiles, 1), 0.5, np.float32)
            given |= {"v_scale": v_scale, "group_v": 64, "out_dtype": "float32"}
            zeros["v_zero"] = v_zero
        plain = QuantizedQKV.from_codes(q, k, v, *scales, **given)
        yield plain, QuantizedQKV.from_codes(q_moved, k_moved, v_moved, *scales, **given, **zeros)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("pv", ["16bit", "int8"])
def test_codes_moved_by_their_zero_points_change_no_bit(pv, backend) -> None:
    """Products less zero points are the whole numbers that they were: every term, every group."""
    for plain, shifted in pairs(pv, (40, 150)):
        given = {"backend": backend, "return_lse": True, "causal": True}
        for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
            assert bits(a) == bits(b)
        operands = zip(plain.dequantize("float64"), shifted.dequantize("float64"), strict=True)
        assert all(np.array_equal(a, b) for a, b in operands)


def check_the_largest_products(**how: Any) -> None:
    """256 times 256^2 is 2^24: exact in int32 and in float32."""
    q = np.full((1, 1, 3, 256), -128, np.int8)
    k = q.copy()
    k[0, 0, 1], k[0, 0, 2, :100] = 127, 5
    v = np.zeros((1, 1, 3, 256), np.float16)
    for zero in (128, 127, -128):
        z = QuantizedQKV.from_codes(q, k, v, 1.0, 1.0, zero, zero)
        exact = ((q.astype(int) - zero) @ (k.astype(int) - zero).swapaxes(-1, -2))[0, 0, 0]
        scale = 2.0**-26
        _, lse = attention(z, scale=scale, return_lse=True, **how)
        np.testing.assert_allclose(lse, np.log(np.exp(exact * scale).sum()), rtol=2.0**-21)
        assert np.abs(exact).max() <= 2**24


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_the_largest_products_there_are(backend) -> None:
    check_the_largest_products(backend=backend)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_constant_values_come_back(backend) -> None:
    """All of a channel is one number: its code is an end of the range, whatever it is."""
    q, k, _ = normal((1, 1, 9, 64), (1, 1, 130, 64), "float32")
    v = np.broadcast_to(np.linspace(-3, 9, 64, dtype=np.float32), k.shape)
    quant = QuantConfig(symmetric=False, pv="int8", p_type="s8", smooth_v=False)
    z = quantize(q, k, v, quant=quant, backend=backend)
    assert np.abs(z.centred_values() - v).max() <= 9 * 2.0**-21
    o = attention(z, backend=backend)
    verdict.assert_within_bound(o, q, k, v, variant="fa_int8", quantized=z)


# ---- J2 and J3 -----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_problems_on_the_mirror(data) -> None:
    features = ("window", "softcap", "mask", "bias")
    drawn = strategies.attention_inputs(
        tiles=TILES, max_head_dim=80, max_scores=2**13, features=features
    )
    q, k, v, options = data.draw(drawn)
    options = {n: np.asarray(x) if n in ADDED else x for n, x in options.items()}
    offset = data.draw(st.sampled_from((0.0, 2.0, -40.0)))
    q, k, v = ((a.astype(np.float32) + offset).astype(a.dtype) for a in (q, k, v))
    pv = data.draw(st.sampled_from(("16bit", "int8", "fp8")))
    quant = QuantConfig(
        data.draw(st.sampled_from(GRANULARITIES)),
        data.draw(st.sampled_from(GRANULARITIES)),
        symmetric=False,
        pv=pv,
        smooth_k=not options.get("softcap") and data.draw(st.booleans()),
        smooth_v=pv != "16bit" and data.draw(st.booleans()),
    )
    z = quantize(q, k, v, quant=quant, tiles=TILES)
    o, lse = attention(z, tiles=TILES, return_lse=True, **options)
    verdict.assert_within_bound(
        o, q, k, v, variant="fa_int8", lse=lse, quantized=z, tiles=TILES, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pv", "dtype"), [("16bit", "bfloat16"), ("int8", "float32"), ("fp8", "float16")]
)
def test_features_in_the_interpreter(pv, dtype) -> None:
    q, k, v = normal((1, 4, 40, 36), (1, 2, 90, 36), dtype)
    q, k, v = (a + a.dtype.type(1.5) for a in (q, k, v))
    rng = np.random.default_rng(0)
    mask, bias = rng.random((1, 4, 40, 90)) < 0.8, rng.standard_normal((1, 1, 40, 90))
    for options, tiles in (
        ({"causal": True}, TILES),
        ({"window": (9, 30), "softcap": 1.5}, Tiles(32, 64, 2, 2)),
        ({"mask": mask, "bias": bias.astype(np.float32)}, Tiles(16, 32, 1, 3)),
    ):
        quant = QuantConfig(symmetric=False, pv=pv, smooth_k="softcap" not in options)
        given = {"tiles": tiles, **options}
        z = quantize(q, k, v, quant=quant, tiles=tiles, backend="interpret")
        o, lse = attention(z, return_lse=True, backend="interpret", **given)
        verdict.assert_within_bound(o, q, k, v, variant="fa_int8", lse=lse, quantized=z, **given)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["token", "thread", "head", "tensor"])
def test_packed_sequences_have_zero_points_of_their_own(granularity) -> None:
    inputs, ends = packed(((5, 9), (0, 7), (35, 40)), 4, 2)
    inputs = tuple(a + np.float16(1) for a in inputs)
    quant = QuantConfig(granularity, granularity, symmetric=False, smooth_k=False)
    given = {
        "variant": "fa_int8", "quant": quant, "return_lse": True, "causal": True,
        "backend": "interpret",
    }  # fmt: skip
    found = attention_varlen(*inputs, *ends, **given)
    check_each_alone(found, inputs, ends, functools.partial(attention, **given))


def test_numbers_on_one_side_cost_half_as_much() -> None:
    """Zero points halve the error of V if all of its numbers are above 0."""
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64), "float32")
    v = np.abs(v)
    error = {}
    for symmetric in (True, False):
        quant = QuantConfig("token", "token", symmetric=symmetric, pv="int8", smooth_v=False)
        z = quantize(q, k, v, quant=quant)
        error[symmetric] = np.abs(z.dequantize("float64")[2] - v).mean()
    assert error[False] < 0.55 * error[True]


def test_the_bound_notices_a_zero_point_off_by_one() -> None:
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64))
    z = quantize(q + np.float16(1), k, v, quant=QuantConfig(symmetric=False))
    o = attention(z)
    assert verdict.judge(o, None, None, None, variant="fa_int8", quantized=z).passed
    k_zero = z.k_zero.copy()
    k_zero[0, 1, 3] += 1
    wrong = replace(z, k_zero=k_zero)
    assert not verdict.judge(o, None, None, None, variant="fa_int8", quantized=wrong).passed


# ---- the call and the record ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pv", ["16bit", "int8", "fp8"])
def test_one_call_is_quantise_and_attend(pv, backend) -> None:
    q, k, v = normal((1, 2, 20, 64), (1, 1, 70, 64), "float32")
    quant = QuantConfig(symmetric=False, pv=pv)
    o = attention(q, k, v, variant="fa_int8", quant=quant, backend=backend)
    z = quantize(q, k, v, quant=quant, backend=backend)
    assert bits(o) == bits(attention(z, backend=backend))
    assert bits(plan(q, k, v, variant="fa_int8", quant=quant, backend=backend)(q, k, v)) == bits(o)
    assert bits(plan(z, backend=backend)(z)) == bits(o)
    assert "zero_points=True" in explain(q, k, v, variant="fa_int8", quant=quant)
    assert "zero_points" not in explain(q, k, v, variant="fa_int8")


def test_views_of_scales_and_zero_points() -> None:
    """They share their strides in the kernel, wherever they came from."""
    q, k, v = normal((1, 2, 20, 64), (1, 2, 70, 64))
    z = quantize(q, k, v, quant=QuantConfig("token", "token", symmetric=False))
    wide = np.zeros((1, 2, 2 * z.k_scale.shape[2]), np.float32)
    wide[..., ::2] = z.k_scale
    fields = {name: getattr(z, name) for name in ("q_scale", "q_zero", "k_zero")}
    y = QuantizedQKV.from_codes(
        z.q_codes, z.k_codes, z.v, fields["q_scale"], wide[..., ::2], fields["q_zero"],
        fields["k_zero"], group_q=1, group_kv=1, k_mean=z.k_mean,
    )  # fmt: skip
    assert bits(attention(y, backend="interpret")) == bits(attention(z, backend="interpret"))


@pytest.mark.parametrize("config", [{}, {"pv": "int8"}, {"pv": "fp8"}, {"smooth_k": False}])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, config) -> None:
    q, k, v = normal((1, 2, 9, 8), (1, 2, 70, 8), "bfloat16")
    x = quantize(q, k, v, quant=QuantConfig(symmetric=False, **config))
    x.save(tmp_path / "x.npz")
    y = QuantizedQKV.load(tmp_path / "x.npz")
    assert (y.config, y.nbytes) == (x.config, x.nbytes) and not y.config.symmetric
    for name in CODED:
        a, b = getattr(x, name), getattr(y, name)
        assert (a is None and b is None) or (a.dtype == b.dtype and bits(a) == bits(b)), name
    assert bits(attention(x)) == bits(attention(y))


def test_codes_of_another_origin() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (3, 1, 2, 70, 8)).astype(np.int8)
    x = QuantizedQKV.from_codes(*codes, 0.01, 0.02, 3, np.int8(-7), v_scale=0.5, v_zero=100)
    assert not x.config.symmetric and x.q_zero.shape == x.q_scale.shape
    by_hand = zip(codes, (0.01, 0.02, 0.5), (3, -7, 100), strict=True)
    for hat, (code, s, z) in zip(x.dequantize("float64"), by_hand, strict=True):
        assert np.array_equal(hat, float(np.float32(s)) * (code.astype(float) - z))
    o, lse = attention(x, return_lse=True, backend="interpret")
    verdict.assert_within_bound(o, None, None, None, variant="fa_int8", quantized=x, lse=lse)
    # One zero point a head, a scale for all: both get the shape of the zero points.
    by_head = np.array([[[5], [9]]], np.int64)
    y = QuantizedQKV.from_codes(*codes[:2], codes[2].astype(np.float16), 0.01, 0.02, k_zero=by_head)
    assert y.k_scale.shape == y.k_zero.shape == (1, 2, 1) and y.k_zero.dtype == np.int32
    assert not y.q_zero.any() and y.q_zero.shape == (1, 1, 1)
    assert np.array_equal(y.k_code_sum, codes[1].sum(axis=-1))
    o = attention(y, backend="interpret")
    verdict.assert_within_bound(o, None, None, None, variant="fa_int8", quantized=y)


def test_zero_points_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((3, 1, 2, 70, 8), np.int8)
    v = codes[2].astype(np.float16)
    with pytest.raises(ValueError, match="k_zero must be integers, got float64"):
        QuantizedQKV.from_codes(*codes[:2], v, 1.0, 1.0, 0, 0.5)
    with pytest.raises(
        ValueError, match=r"q_zero must broadcast .* \(1, 1, 1\), got \(2, 1, 1, 1\)"
    ):
        QuantizedQKV.from_codes(*codes[:2], v, 1.0, 1.0, np.zeros((2, 1, 1, 1), int))
    with pytest.raises(ValueError, match="q_zero must be -128 to 128, got up to 129"):
        QuantizedQKV.from_codes(*codes[:2], v, 1.0, 1.0, -129)
    with pytest.raises(ValueError, match="p_type and v_zero go with 8-bit codes of V, got float16"):
        QuantizedQKV.from_codes(*codes[:2], v, 1.0, 1.0, v_zero=1)
    with pytest.raises(ValueError, match="INT8 codes of V and of P, got 8-bit floats"):
        QuantizedQKV.from_codes(*codes, 1.0, 1.0, v_scale=1.0, p_type="e4m3", v_zero=1)
    x = QuantizedQKV.from_codes(*codes, 1.0, 1.0, 1, 1, v_scale=1.0, v_zero=1)
    for change, message in (
        ({"q_zero": None}, "for q, k and INT8 codes of V together"),
        ({"v_zero": None}, "for q, k and INT8 codes of V together"),
        ({"k_zero": x.k_zero[0]}, r"k_zero must have shape \(1, 1, 1\)"),
        ({"k_zero": x.k_zero.astype(np.int8)}, "k_zero must be int32, got int8"),
        ({"k_code_sum": x.k_code_sum[..., :3]}, r"k_code_sum must have shape \(1, 2, 70\)"),
        (dict.fromkeys(("q_zero", "k_zero", "v_zero")), "belongs to zero points, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(x, **change)


def test_given_scales_have_no_zero_points() -> None:
    q, k, v = normal((1, 2, 9, 8), (1, 2, 70, 8))
    quant = QuantConfig("tensor", "tensor", symmetric=False, scales=(0.1, 0.1))
    for call in (
        lambda: quantize(q, k, v, quant=quant),
        lambda: quantize(q, k, v, quant=quant, backend="interpret"),
        lambda: attention(q, k, v, variant="fa_int8", quant=quant, backend="interpret"),
    ):
        with pytest.raises(UnsupportedError, match="given scales quantise without zero points"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("form", lookup("fa_int8").forms)
@pytest.mark.parametrize("head_dim", [*LATE, 128])
def test_default_tiles_spill_next_to_nothing(head_dim, form) -> None:
    """Where the plain kernels have no register left, a few bytes go to local memory.

    That is at head_dim 128, and with P and V in 8 bits where three blocks share an SM.
    """
    if form.startswith("sm90") or form in ("fused", "pv8_whole"):
        pytest.skip("test_hopper_zero_points.py has the Hopper form, test_fused.py the fused one")
    variant = lookup("fa_int8")
    values = {
        "pv8": {"group_v": 128, "p_type": "u8"}, "v8": {"group_v": GROUP_ALL, "p_type": "16bit"},
    }.get(form, {})
    for causal, varlen in itertools.product((False, True), (False, form == "portable")):
        features = Features(
            "float16", head_dim, causal, True, 8, group_q=2, group_kv=16, varlen=varlen,
            zero_points=True, **values,
        )  # fmt: skip
        tiles = variant.default_tiles(head_dim, form)
        spec = kernel_form_module.module_spec(variant, features, tiles, form)
        binary = kc.build(spec, "sm_80")
        for taken in binary.kernels.values():
            full = head_dim == 128 or (form, head_dim) == ("pv8", 64)
            assert taken.spill_stores <= (48 if full else 0), (spec, taken)
        devices.check_shared_memory(binary.smem_bytes, 99 * 1024, str(spec))
