"""fa_int8 with P and V in 8 bits, on the mirror and in the interpreter: J1, exact fixtures, J2, J3.

Tests of whole calls that run every rung in every form (`tests.support.runs.RUNGS`) run this one,
too.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn import attention, attention_varlen, explain, plan, strategies
from cupyattn.arrays.groups import value_scale_of_key
from cupyattn.bounds.values import E4M3_RELATIVE
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.numerics import P_CODE_ONE
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import GROUP_ALL, QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.quantizers import group_count, numbers_of, quantize_values, values_by_key
from cupyattn.reference.exact import attention_exact
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing import verdict
from tests.quant import pv8_cases
from tests.quant.quant_inputs import DTYPES, assert_mean, operand
from tests.support.runs import ADDED, bits, check_each_alone, normal, packed

GRANULARITIES_V = ("channel", "block")
REGIMES = ("normal", "outlier channel", "constant rows", "subnormal", "signed zeros", "wide")
MODES = (("channel", "s8"), ("block", "u8"), ("block", "e4m3"), ("channel", "u8"))
TILES = Tiles(64, 32, 4, 2)
FP8_BY_ROW = QuantConfig("token", "block", pv="fp8", smooth_v=False)


def centred(v: np.ndarray, mean: np.ndarray | None) -> np.ndarray:
    v = v.astype(np.float32)
    return (v if mean is None else v - mean[:, :, None]).astype(np.float64)


# ---- the quantiser of V --------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    regime=st.sampled_from(REGIMES),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 150), st.integers(1, 40)),
    group=st.sampled_from((32, 64, 128, GROUP_ALL)),
)
def test_values_are_off_by_half_a_scale_at_most(seed, regime, dtype, shape, group) -> None:
    v = operand(seed, dtype, shape, regime)
    codes, scale = quantize_values(v, group)
    batch, heads, length, head_dim = shape
    assert codes.shape == (batch, heads, head_dim, -(-length // 128) * 128)
    assert scale.shape == (batch, heads, group_count(length, group), head_dim)
    codes = values_by_key(codes, codes.shape[3])
    assert np.abs(codes.astype(int)).max() <= 127 and not codes[..., length:].any()
    s = value_scale_of_key(scale.astype(np.float64), group, length)
    exact = centred(v, None)
    error = np.abs(exact - s * codes[..., :length].swapaxes(2, 3))
    assert (error <= s / 2 * (1 + 2.0**-15)).all()
    codes, scale = quantize_values(v, group, e4m3=True)
    s = value_scale_of_key(scale.astype(np.float64), group, length)
    found = numbers_of(values_by_key(codes, length).swapaxes(2, 3), True).astype(np.float64)
    least = s * 2.0**-10 * (1 + 2.0**-9)
    assert (np.abs(exact - s * found) <= np.maximum(np.abs(exact) * E4M3_RELATIVE, least)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("group", [32, GROUP_ALL])
def test_a_non_finite_value_poisons_its_channel_in_its_group(value, group) -> None:
    v = operand(1, DTYPES[0], (1, 2, 70, 8))
    clean, _ = quantize_values(v, group)
    v[0, 1, 40, 3] = value
    codes, scale = quantize_values(v, group)
    hit = np.zeros(scale.shape, bool)
    hit[0, 1, 40 // group, 3] = True
    assert np.array_equal(np.isnan(scale), hit)
    rows = value_scale_of_key(hit, group, 70).swapaxes(2, 3)
    codes, clean = (values_by_key(x, 70) for x in (codes, clean))
    assert not codes[rows].any()
    assert np.array_equal(codes[~rows], clean[~rows])


REGIMES_OF_V = [(64, "normal"), (36, "channel bias"), (7, "subnormal"), (64, "zeros")]


@pytest.mark.parametrize(
    ("head_dim", "regime", "granularity", "dtype"),
    [
        pytest.param(
            *sizes, granularity, dtype,
            marks=[pytest.mark.slow] if (i - j) % 3 or (i + n) % 4 else [],
        )
        for i, sizes in enumerate(REGIMES_OF_V)
        for n, granularity in enumerate(GRANULARITIES_V)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)  # fmt: skip
def test_codes_and_scales_equal_the_mirrors(head_dim, regime, granularity, dtype) -> None:
    """J1. The mean is a sum in another order: the mirror takes the kernel's."""
    for length, smooth, pv in ((300, True, "int8"), (31, False, "int8"), (131, True, "fp8")):
        q = operand(1, dtype, (1, 2, 9, head_dim), regime)
        k, v = (operand(i, dtype, (1, 2, length, head_dim), regime) for i in (2, 3))
        quant = QuantConfig(pv=pv, granularity_v=granularity, smooth_v=smooth)
        got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
        want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
        for name in ("q_codes", "k_codes", "q_scale", "k_scale", "v_codes", "v_scale"):
            assert bits(getattr(got, name)) == bits(getattr(want, name)), name
        assert got.v is None and want.v is None and (got.v_mean is not None) == smooth
        if smooth:
            assert_mean(got.v_mean, v)


@pytest.mark.parametrize("granularity", GRANULARITIES_V)
def test_views_and_empty_arrays_are_quantised_as_the_mirror_does(granularity: str) -> None:
    q, k, v = normal((1, 2, 5, 64), (2, 2, 40, 64))
    views = [v[:, ::-1, ::2], np.broadcast_to(v[:, :1], v.shape), v[:, :, :0], v[:0]]
    for view in views:
        keys, rows = np.ascontiguousarray(view), np.zeros((view.shape[0], 2, 5, 64), np.float16)
        quant = QuantConfig(pv="int8", granularity_v=granularity)
        got = quantize(rows, keys, view, quant=quant, tiles=TILES, backend="interpret")
        want = quantize_mirror(rows, keys, view, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
        assert bits(got.v_codes) == bits(want.v_codes) and bits(got.v_scale) == bits(want.v_scale)
        o = attention(got, tiles=TILES, backend="interpret")
        assert o.shape == rows.shape and (view.shape[2] or not o.any())


# ---- fixtures that need no bound -----------------------------------------------------------------


#: Checks that the interpreter also makes of the codes s8 among the quick tests.
OF_S8 = (
    pv8_cases.check_one_hot_values_show_p,
    pv8_cases.check_products_by_hand,
    pv8_cases.check_constant_codes_come_back,
)


@pytest.mark.parametrize(
    ("backend", "check", "p_type"),
    [
        pytest.param(
            backend, *one,
            marks=pytest.mark.slow
            if backend == "interpret" and one[1] == "s8" and one[0] not in OF_S8
            else [],
        )
        for backend in ("mirror", "interpret")
        for one in pv8_cases.CHECKS
    ],
)  # fmt: skip
def test_exactly(backend: str, check: Any, p_type: str) -> None:
    check(backend, p_type, np.asarray)


# ---- J2 and J3 -----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_problems_on_the_mirror(data) -> None:
    features = ("window", "softcap", "mask", "bias")
    drawn = strategies.attention_inputs(
        tiles=TILES, max_head_dim=80, max_scores=2**13, features=features
    )
    q, k, v, options = data.draw(drawn)
    options = {n: np.asarray(x) if n in ADDED else x for n, x in options.items()}
    p_type = data.draw(st.sampled_from(tuple(P_CODE_ONE)))
    quant = QuantConfig(
        pv=pv8_cases.pv_of(p_type),
        granularity_v=data.draw(st.sampled_from(GRANULARITIES_V)),
        smooth_k=not options.get("softcap"),
        smooth_v=data.draw(st.booleans()),
        p_type=p_type,
    )
    z = quantize(q, k, v, quant=quant, tiles=TILES)
    o, lse = attention(z, tiles=TILES, return_lse=True, **options)
    verdict.assert_within_bound(
        o, q, k, v, variant="fa_int8", lse=lse, quantized=z, tiles=TILES, **options
    )


@pytest.mark.parametrize(
    ("tiles", "granularity", "p_type"),
    [
        pytest.param(tiles, *mode, marks=[pytest.mark.slow] if i != j % 3 else [])
        for i, tiles in enumerate((TILES, Tiles(32, 64, 2, 2), Tiles(16, 128, 1, 2)))
        for j, mode in enumerate(MODES)
    ],
)
def test_modes_and_tiles_in_the_interpreter(tiles, granularity, p_type) -> None:
    pv = pv8_cases.pv_of(p_type)
    of_keys = "block" if granularity == "block" else "thread"
    quant = QuantConfig(
        granularity_k=of_keys, pv=pv, granularity_v=granularity, p_type=p_type, smooth_v=False
    )
    q, k, v = normal((1, 2, 40, 36), (1, 1, 150, 36), "float32")
    z = quantize(q, k, v + 1, quant=quant, tiles=tiles, backend="interpret")
    o, lse = attention(z, tiles=tiles, return_lse=True, causal=True, backend="interpret")
    verdict.assert_within_bound(
        o, q, k, v + 1, variant="fa_int8", lse=lse, quantized=z, tiles=tiles, causal=True
    )


def test_the_bound_is_a_tenth_of_the_output() -> None:
    """At len 256 zeros would leave it, and a key that counts for more than most."""
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64))
    z = quantize(q, k, v, quant=QuantConfig(pv="int8"))
    o = attention(z)
    report = verdict.judge(o, q, k, v, variant="fa_int8", quantized=z)
    assert report.passed and report.tightness <= 0.12
    assert not verdict.judge(0 * o, q, k, v, variant="fa_int8", quantized=z).passed
    k[:, :, -1] = 3 * q.mean(axis=2)
    shorter = attention(q, k[:, :, :-1], v[:, :, :-1], variant="fa_int8", quant=z.config)
    z = quantize(q, k, v, quant=z.config)
    assert not verdict.judge(shorter, q, k, v, variant="fa_int8", quantized=z).passed


def test_values_with_a_bias_need_their_mean() -> None:
    """A sum of codes is divided by its weights, so the bias itself is kept; V's steps are wide."""
    q, k, v = (x.astype(np.float32) for x in normal((1, 2, 32, 64), (1, 2, 256, 64)))
    v = v + np.float32(100)
    exact = attention_exact(q, k, v)
    error = {}
    for smooth in (False, True):
        quant = QuantConfig(pv="int8", smooth_v=smooth)
        o = attention(q, k, v, variant="fa_int8", quant=quant).astype(np.float64)
        error[smooth] = np.abs(o - exact).max()
    assert error[True] < error[False] / 4


#: The other two have each granularity.
SLOW_WITH_NAN = {("interpret", "channel", "block"), ("interpret", "block", "token")}


@pytest.mark.parametrize("granularity_v", GRANULARITIES_V)
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_a_nan_in_v_reaches_its_channel_alone(backend, granularity_v) -> None:
    q, k, v = normal((1, 1, 20, 64), (1, 1, 100, 64))
    v[0, 0, 70, 9] = np.nan
    quant = QuantConfig(pv="int8", granularity_v=granularity_v)
    o = attention(q, k, v, variant="fa_int8", quant=quant, backend=backend)
    assert np.isnan(o[..., 9]).all() and np.isfinite(np.delete(o, 9, axis=-1)).all()


@pytest.mark.parametrize(
    ("backend", "granularity_v", "granularity"),
    [
        pytest.param(*one, marks=pytest.mark.slow if one in SLOW_WITH_NAN else [])
        for one in itertools.product(("mirror", "interpret"), GRANULARITIES_V, ("token", "block"))
    ],
)
def test_a_nan_in_k_spares_rows_that_do_not_see_its_scale(
    backend, granularity_v, granularity
) -> None:
    """A scale of K for the whole tile goes into the factor of a row: so does its NaN."""
    q, k, v = normal((1, 1, 64, 64), (1, 1, 64, 64))
    k[0, 0, 40, 9] = np.nan
    quant = QuantConfig(
        "block", granularity, pv="int8", granularity_v=granularity_v, smooth_k=False
    )
    given: dict[str, Any] = {"tiles": TILES, "causal": True, "backend": backend}
    o = attention(q, k, v, variant="fa_int8", quant=quant, **given)
    first = 40 if granularity == "token" else 32
    assert np.isfinite(o[:, :, :first]).all() and np.isnan(o[:, :, 40:]).all()


@pytest.mark.parametrize("granularity_v", GRANULARITIES_V)
@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_rows_without_keys_are_0_whatever_stands_in_them(backend, granularity_v) -> None:
    q, k, v = normal((1, 1, 64, 64), (1, 1, 32, 64))
    q[0, 0, 3, 9] = np.nan
    mask = np.ones((64, 32), bool)
    mask[:32] = False
    quant = QuantConfig("block", "block", pv="int8", granularity_v=granularity_v)
    given: dict[str, Any] = {"tiles": TILES, "mask": mask, "backend": backend}
    o = attention(q, k, v, variant="fa_int8", quant=quant, **given)
    assert not o[:, :, :32].any()


# ---- the call and the record ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        *((dtype, "mirror") for dtype in ("float16", "bfloat16", "float32")),
        ("float16", "interpret"),
        *(
            pytest.param(dtype, "interpret", marks=pytest.mark.slow)
            for dtype in ("bfloat16", "float32")
        ),
    ],
)
def test_one_call_is_quantise_and_attend(dtype, backend) -> None:
    q, k, v = normal((1, 2, 20, 64), (1, 1, 70, 64), dtype)
    quant = QuantConfig(pv="int8")
    o = attention(q, k, v, variant="fa_int8", quant=quant, backend=backend)
    z = quantize(q, k, v, quant=quant, backend=backend)
    assert o.dtype == q.dtype and bits(o) == bits(attention(z, backend=backend))
    prepared = plan(q, k, v, variant="fa_int8", quant=quant, backend=backend)
    assert bits(prepared(q, k, v)) == bits(o)
    assert bits(plan(z, backend=backend)(z)) == bits(o)


def test_explain_names_the_form_and_its_passes() -> None:
    q, k, v = normal((1, 2, 20, 64), (1, 1, 70, 64))
    text = explain(q, k, v, variant="fa_int8", quant=QuantConfig(pv="int8"))
    assert (
        "fa_int8 (pv8)" in text and "attn_fa_int8_pv8<<<" in text and "v: sums, then values" in text
    )
    assert "pv8" not in explain(q, k, v, variant="fa_int8")


@pytest.mark.parametrize("granularity", GRANULARITIES_V)
def test_a_file_gives_back_what_was_saved(tmp_path: Path, granularity) -> None:
    q, k, v = normal((1, 2, 9, 8), (1, 2, 70, 8), "bfloat16")
    quant = QuantConfig(pv="int8", granularity_v=granularity, p_type="s8")
    x = quantize(q, k, v, quant=quant)
    x.save(tmp_path / "x.npz")
    y = QuantizedQKV.load(tmp_path / "x.npz")
    assert y.v is None and (y.config, y.group_v, y.out_dtype) == (x.config, x.group_v, "bfloat16")
    for name in ("v_codes", "v_scale", "v_mean", "q_codes", "k_mean"):
        assert bits(getattr(x, name)) == bits(getattr(y, name)), name
    assert bits(attention(x)) == bits(attention(y))


def test_dequantised_values_are_half_a_scale_from_the_callers() -> None:
    q, k, v = normal((1, 2, 9, 8), (1, 2, 70, 8))
    x = quantize(q, k, v, quant=QuantConfig(pv="int8"))
    back = x.dequantize("float64")[2]
    s = value_scale_of_key(x.v_scale.astype(np.float64), x.group_v, 70)
    assert (np.abs(back - v.astype(np.float64)) <= s / 2 * (1 + 2.0**-14)).all()
    assert np.array_equal(
        x.centred_values()[0, 1, 67, 3], x.v_codes[0, 1, 3, 69] * float(x.v_scale[0, 1, 1, 3])
    )  # key 67 = 64 + 2 t + j lies at 64 + 4 t + j


def test_codes_of_another_origin() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (3, 1, 2, 70, 8)).astype(np.int8)
    scale = np.full((1, 2, 2, 1), 0.5, np.float32)
    mean = np.full((1, 2, 8), 3, np.float32)
    x = QuantizedQKV.from_codes(
        *codes, 0.01, 0.02, v_scale=scale, group_v=64, v_mean=mean, out_dtype="bfloat16"
    )
    assert (x.group_v, x.config.granularity_v, x.config.p_type) == (64, "block", "u8")
    assert x.config.smooth_v and x.v_codes.shape == (1, 2, 8, 128)
    assert np.array_equal(x.dequantize("float64")[2], codes[2] * 0.5 + 3)
    o = attention(x)
    assert o.dtype == ml_dtypes.bfloat16
    verdict.assert_within_bound(o, None, None, None, variant="fa_int8", quantized=x)
    one = QuantizedQKV.from_codes(*codes, 0.01, 0.02, v_scale=0.5)
    assert (one.group_v, one.out_dtype, one.config.granularity_v) == (
        GROUP_ALL,
        "float16",
        "channel",
    )


def test_codes_of_8_bit_floats(tmp_path: Path) -> None:
    codes = np.zeros((3, 1, 2, 70, 8), np.int8)
    floats = np.random.default_rng(0).standard_normal((1, 2, 70, 8)).astype(pv8_cases.E4M3)
    x = QuantizedQKV.from_codes(*codes[:2], floats, 1.0, 1.0, v_scale=0.5)
    assert (x.config.pv, x.config.p_type) == ("fp8", "e4m3")
    assert np.array_equal(x.dequantize("float64")[2], 0.5 * floats.astype(np.float64))
    bits_alone = floats.view(np.int8)
    y = QuantizedQKV.from_codes(*codes[:2], bits_alone, 1.0, 1.0, v_scale=0.5, p_type="e4m3")
    y.save(tmp_path / "y.npz")
    assert bits(attention(QuantizedQKV.load(tmp_path / "y.npz"))) == bits(attention(x))


def test_8_bit_floats_need_their_instructions() -> None:
    q, k, v = normal((1, 1, 9, 64), (1, 1, 20, 64))
    quant = QuantConfig(pv="fp8")
    with pytest.raises(UnsupportedError, match=r"need compute capability 8.9 or later, got sm_86"):
        attention(q, k, v, variant="fa_int8", quant=quant, arch="sm_86", backend="interpret")


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("call", [attention, plan, explain])
def test_an_architecture_without_8_bit_floats_is_refused_by_every_way(
    call: Any, backend: str
) -> None:
    x = np.ones((1, 1, 8, 32), np.float16)
    options: dict[str, Any] = {"variant": "fa_int8", "quant": QuantConfig(pv="fp8")}
    with pytest.raises(UnsupportedError, match=r"need compute capability 8.9 or later, got sm_80"):
        call(x, x, x, arch="sm_80", backend=backend, **options)
    assert call(x, x, x, arch="sm_89", backend="mirror", **options) is not None



def test_codes_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((3, 1, 2, 70, 8), np.int8)
    with pytest.raises(ValueError, match="v_scale is needed where v is 8-bit"):
        QuantizedQKV.from_codes(*codes, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"v_scale must have shape \(1 or 1, 2 or 1, 2, 8 or 1\)"):
        wrong = np.ones((1, 2, 1, 8), np.float32)
        QuantizedQKV.from_codes(*codes, 1.0, 1.0, v_scale=wrong, group_v=64)
    with pytest.raises(ValueError, match="v_scale must be an array or a positive float, got -1"):
        QuantizedQKV.from_codes(*codes, 1.0, 1.0, v_scale=-1)
    with pytest.raises(ValueError, match="go with 8-bit codes of V, got float16"):
        QuantizedQKV.from_codes(*codes[:2], codes[2].astype(np.float16), 1.0, 1.0, p_type="u8")
    x = QuantizedQKV.from_codes(*codes, 1.0, 1.0, v_scale=1.0)
    fields = {name: getattr(x, name) for name in ("v_codes", "v_scale", "group_v")}
    rest = (x.q_scale, x.k_scale, x.group_q, x.group_kv, x.config, "float16")
    for change, message in (
        ({"v_codes": x.v_codes[..., :70]}, r"v_codes must have shape \(1, 2, 8, 128\)"),
        ({"v_scale": None}, "as v_codes with v_scale, got both or neither"),
        ({"group_v": 0}, r"keys per v_scale must be 1 to 2\*\*30, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedQKV(x.q_codes, x.k_codes, None, *rest, **{**fields, **change})
    with pytest.raises(ValueError, match="belong to v_codes"):
        v = codes[2].astype(np.float16)
        QuantizedQKV(x.q_codes, x.k_codes, v, *rest, group_v=64)


def test_tiles_that_do_not_fit_are_refused() -> None:
    q, k, v = normal((1, 1, 9, 8), (1, 1, 200, 8))
    for backend in ("mirror", "interpret"):
        with pytest.raises(ValueError, match="block_kv of 32, 64 or 128, .* got 48"):
            attention(
                q, k, v, variant="fa_int8", quant=QuantConfig(pv="int8"),
                tiles=Tiles(64, 48, 4, 2), backend=backend,
            )  # fmt: skip
    z = quantize(q, k, v, quant=QuantConfig(pv="int8"), tiles=TILES)
    for backend in ("mirror", "interpret"):
        with pytest.raises(UnsupportedError, match="a tile of 64 keys would meet several scales"):
            attention(z, tiles=Tiles(64, 64, 4, 2), backend=backend)


@pytest.mark.parametrize(
    ("quant", "backend"),
    [
        (QuantConfig(pv="int8", granularity_v="channel", symmetric=False), "mirror"),
        (FP8_BY_ROW, "mirror"),
        pytest.param(FP8_BY_ROW, "interpret", marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_have_codes_of_their_own(quant: QuantConfig, backend: str) -> None:
    """Empty ones, one that takes two lots of 128 codes, and one that begins amid such a lot."""
    inputs, ends = packed(((5, 38), (0, 9), (3, 0), (20, 150)), 1, 1, 16)
    given: dict[str, Any] = {
        "variant": "fa_int8", "quant": quant, "backend": backend, "tiles": TILES, "causal": True,
        "return_lse": True,
    }  # fmt: skip
    found = attention_varlen(*inputs, *ends, **given)
    check_each_alone(found, inputs, ends, functools.partial(attention, **given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pv": "int8", "granularity_v": "none"},
            "granularity_v must be 'tensor' or 'channel' or 'block' with",
        ),
        ({"granularity_v": "channel"}, "granularity_v must be 'none' with pv='16bit'"),
        ({"smooth_v": True}, "smooth_v must be False with pv='16bit'"),
        ({"pv": "int8", "p_type": "e4m3"}, "p_type must be 'u8' or 's8' or '16bit' with pv='int8'"),
        (
            {"pv": "int8", "p_type": "16bit", "granularity_v": "block"},
            "granularity_v must be 'tensor' or 'channel' with pv='int8' and p_type='16bit'",
        ),
        ({"p_type": "u8"}, "p_type must be '16bit' with pv='16bit'"),
    ],
)
def test_configurations_that_do_not_go_together(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        QuantConfig(**options)


def test_defaults_follow_pv() -> None:
    plain, codes = QuantConfig(), QuantConfig(pv="int8")
    assert (plain.granularity_v, plain.smooth_v, plain.p_type) == ("none", False, "16bit")
    assert (codes.granularity_v, codes.smooth_v, codes.p_type) == ("block", True, "u8")
    assert codes == QuantConfig(pv="int8", granularity_v="block", smooth_v=True, p_type="u8")
    assert codes.group_v(TILES) == 32 and plain.group_v(TILES) == 0
    of_codes = ("pv8", "pv8_whole", "sm90_pv8", "sm90_pv8_by_tile", "sm90_fp8")
    assert tuple(lookup("fa_int8").forms) == ("portable", "sm90", *of_codes, "v8", "fused")
