"""Predicted codes of P: right outputs lie within the bound, and small faults do not."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributions
from cupyattn.bounds import codes
from cupyattn.bounds.codes import Prediction, rounded
from cupyattn.bounds.kernel import bound_kernel, predict_kernel
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.kernels.numerics import FP8_LEAST_NORMAL
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.attention import KernelCall, kernel_call
from cupyattn.problem.settings import Settings
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.rounding import codes_of_p
from experiments.accuracy import tensor_core_sums
from experiments.accuracy.predicted_codes import FORMS
from tests.quant import pv8_cases

LN2 = math.log(2.0)
INTEGERS = [name for name in FORMS if "e4m3" not in name and "fp8" not in name]
FLOATS = [name for name in FORMS if name not in INTEGERS]


class Call:
    """One call of a form on the mirror: its output, and the prediction."""

    def __init__(self, name: str, q: Any, k: Any, v: Any, **options: Any) -> None:
        form, quant, arch = FORMS[name]
        self.quantized = ca.quantize(q, k, v, quant=quant, arch=arch, backend="mirror")
        self.kernel = received(self.quantized, form, **options)
        o, self.steps = attention_mirror(
            self.quantized, variant="fa_int8", form=form, trace=True, **options
        )
        self.o = o.astype(np.float64)
        self.found = predict_kernel(self.kernel)


def received(quantized: Any, form: str, **options: Any) -> KernelCall:
    scores = {name: options.pop(name, None) for name in ("mask", "bias", "block_mask")}
    settings = Settings("fa_int8", **options)
    arrays = {"q": None, "k": None, "v": None, **scores}
    return kernel_call(settings, arrays, quantized=quantized, form=form)


def ratio(o: np.ndarray, found: Prediction) -> np.ndarray:
    return np.asarray(ratio_to_bound(o, found.o, found.bound).max(axis=-1))


def drawn(
    name: str, length: int = 300, head_dim: int = 32, dtype: str = "float16", seed: int = 0
) -> Any:
    return distributions.make(name, 1, 2, 96, length, head_dim, dtype, seed=seed)


@pytest.mark.parametrize("p_type", ["u8", "s8", "e4m3"])
def test_codes_round_as_kernels_round(p_type: str) -> None:
    w = np.random.default_rng(0).uniform(0, 128, 20_000) * np.exp2(-np.arange(20_000) % 30)
    w = np.concatenate([w, np.arange(255) / 2, np.exp2(-np.arange(40.0))]).astype(np.float32)
    w = np.minimum(w, np.float32(127))
    np.testing.assert_array_equal(rounded(w.astype(np.float64), p_type), codes_of_p(w, p_type))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("distribution", distributions.NAMES)
def test_right_outputs_lie_within_the_bound(distribution: str, name: str) -> None:
    for dtype, causal in (("float32", False), ("float16", True), ("bfloat16", False)):
        call = Call(name, *drawn(distribution, dtype=dtype), causal=causal)
        assert ratio(call.o, call.found).max() <= 1
        assert np.isfinite(call.found.bound).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_small_faults_are_seen_with_integers(name: str) -> None:
    call = Call(name, *drawn("normal", 256, 64))
    assert (ratio(call.o * 1.0005, call.found) > 1).mean() > 0.9
    old = bound_kernel(call.kernel).total
    assert np.median(call.found.bound / old) < 0.02
    assert call.found.in_doubt.sum() < 1e-3 * call.o.shape[1] * 96 * 256


@pytest.mark.parametrize("name", INTEGERS)
def test_stores_that_cut_off_are_seen(name: str) -> None:
    """In float16: what a kernel has before the store is the prediction, but for a few codes."""
    call = Call(name, *drawn("normal", 256, 64))
    nearest = call.found.o.astype(np.float16)
    outward = np.abs(nearest.astype(np.float64)) > np.abs(call.found.o)
    cut = np.where(outward, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float64)
    assert ratio(nearest.astype(np.float64), call.found).max() <= 1
    assert (ratio(cut, call.found) > 1).mean() > 0.9


@pytest.mark.parametrize("name", FLOATS)
def test_zeros_fail_with_8_bit_floats_at_4096_keys(name: str) -> None:
    q, k, v = distributions.make("normal", 1, 1, 64, 4096, 64, "float16")
    call = Call(name, q, k, v)
    assert ratio(call.o, call.found).max() <= 1
    assert (ratio(0 * call.o, call.found) > 1).all()
    assert (ratio(1.05 * call.o, call.found) > 1).mean() > 0.9


@pytest.mark.parametrize("name", FLOATS)
def test_a_hundredth_is_seen_with_8_bit_floats_at_1024_keys(name: str) -> None:
    call = Call(name, *distributions.make("normal", 1, 1, 64, 1024, 64, "float16"))
    assert ratio(call.o, call.found).max() <= 1
    assert (ratio(1.01 * call.o, call.found) > 1).mean() > 0.9


@pytest.mark.parametrize("name", FORMS)
def test_another_tile_predicts_other_codes(name: str) -> None:
    call = Call(name, *drawn("normal", 600))
    tiles = call.kernel.kernel.tiles
    other = replace(tiles, block_kv=tiles.block_kv - 32)
    kernel = replace(call.kernel, kernel=replace(call.kernel.kernel, tiles=other))
    assert (ratio(call.o, predict_kernel(kernel)) > 1).any()


@pytest.mark.parametrize("name", INTEGERS)
def test_a_key_that_a_row_loses_is_seen(name: str) -> None:
    """One key less, chosen by its weight: above 1e-3 the fault is seen in every row."""
    q, k, v = drawn("normal", 256, 64)
    call = Call(name, q, k, v)
    mask = np.ones((1, 2, 96, 256), bool)
    scores = np.einsum("bhid,bhjd->bhij", q.astype(float), k.astype(float)) / 8
    p = np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
    lost = np.argsort(np.abs(p - 2e-3), axis=-1)[..., :1]
    np.put_along_axis(mask, lost, False, axis=-1)
    form = FORMS[name][0]
    o = attention_mirror(call.quantized, variant="fa_int8", form=form, mask=mask)
    assert (ratio(o.astype(np.float64), call.found) > 1).mean() > 0.98


@given(
    name=st.sampled_from(list(FORMS)),
    seed=st.integers(0, 2**32 - 1),
    len_q=st.integers(1, 40),
    len_kv=st.integers(1, 420),
    causal=st.booleans(),
    dtype=st.sampled_from(["float16", "float32", "bfloat16"]),
    spread=st.sampled_from([0.0, 0.03, 1.0, 4.0, 30.0, 1000.0]),
    groups=st.sampled_from([1, 3, 64, 420]),
    offset=st.sampled_from([0.0, 3.0, 1000.0]),
)
def test_adversarial_rows(
    name: str,
    seed: int,
    len_q: int,
    len_kv: int,
    causal: bool,
    dtype: str,
    spread: float,
    groups: int,
    offset: float,
) -> None:
    """Equal keys, keys that lie together in groups of very different scores, values far from 0."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (len_q, len_kv, len_kv))
    levels = rng.integers(-3, 4, -(-len_kv // groups)).repeat(groups)[:len_kv]
    k = k * spread**0.5 + levels[None, None, :, None] * spread**0.5
    q, v = q * spread**0.5, v + offset
    arrays = (x.astype(ca.arrays.kinds.STORAGE[dtype]) for x in (q, k, v))
    call = Call(name, *arrays, causal=causal)
    assert ratio(call.o, call.found).max() <= 1


@pytest.mark.parametrize("name", ["pv8_whole", "sm90_pv8"])
def test_largest_scores_that_are_whole_numbers(name: str) -> None:
    """M is one of two for all that the judge knows: both are tried."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-6, 1, (32, 400)) + rng.integers(-2, 3, 4).repeat(100)
    v = rng.integers(-127, 128, (400, pv8_cases.HEAD_DIM))
    z = pv8_cases.codes_of(scores, v, np.asarray, p_type="u8")
    form = FORMS[name][0]
    found = predict_kernel(received(z, form, scale=LN2))
    o = attention_mirror(z, variant="fa_int8", form=form, scale=LN2).astype(np.float64)
    assert ratio(o, found).max() <= 1
    # M and M - 1 code whole powers of two alike: nothing but the shifts is in doubt.
    assert np.median(found.bound) < 0.02 * np.abs(o).max()


@pytest.mark.parametrize("name", ["pv8_whole", "sm90_pv8"])
@pytest.mark.parametrize("length", [2048, 4096])
def test_the_guard_of_whole_numbers(name: str, length: int) -> None:
    """Keys that weigh alike raise M before the last tiles, whose scores fall, are coded."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, n, 16)) for n in (8, length, length))
    q, k = np.abs(q), 0.01 * k
    k[:, :, length // 2 :] -= 1.0
    call = Call(name, *(x.astype(np.float32) for x in (q, k, v)))
    assert ratio(call.o, call.found).max() <= 1


@pytest.mark.parametrize("kind", ["normal", "one sign", "one sign of a channel", "spread"])
@pytest.mark.parametrize("name", FLOATS)
def test_sums_that_are_cut_off(name: str, kind: str) -> None:
    """Tensor cores add 8-bit floats 32 products at a time, in 13 bits, toward zero; or exactly."""
    q, k, v = drawn("normal", 600, dtype="float32")
    if kind == "one sign":
        v = np.abs(v)
    if kind == "one sign of a channel":
        v = np.abs(v) * np.where(np.arange(32) % 2, 1, -1).astype(np.float32)
    if kind == "spread":
        q, v = 3 * q, v * np.exp2(np.arange(600) % 12 - 6)[:, None].astype(np.float32)
    call = Call(name, q, k, v)
    assert ratio(call.o, call.found).max() <= 1
    assert ratio(*cut_off(call)).max() <= 1


@pytest.mark.parametrize("name", FLOATS)
def test_subnormal_values_are_cut_off_at_the_least_normal_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel whose large values are masked: all that is left of it lies below 2^-6.

    One key of 32 has the code 448 of P, the others 15/32: beside 448 2^-6 those lose 7/8 of a unit.
    """
    key, first = np.arange(320), np.eye(32)[0]
    q = np.broadcast_to(32**0.5 * first, (1, 2, 96, 32))
    scores = np.where(key % 32 == 0, 0.0, np.log(15 / 32 / 448))
    k = np.broadcast_to(scores[:, None] * first, (1, 2, 320, 32))
    large = np.where(key == 0, 1.0, -1.0)
    small = np.where(key < 128, -1.0, 1.0) * 2.0**-9 / 448  # their mean is small, too
    v = np.broadcast_to(np.where(key < 2, large, small)[:, None], (1, 2, 320, 32))
    q, k, v = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
    call = Call(name, q, k, v, mask=key >= 128)
    moved, found = cut_off(call)
    assert ratio(moved, found).max() <= 1
    monkeypatch.setattr(codes, "FP8_LEAST_NORMAL", 2.0**-20)
    assert ratio(*cut_off(replaced(call))).max() > 1


def replaced(call: Call) -> Call:
    """Return the call with its new prediction."""
    other = copy(call)
    other.found = predict_kernel(call.kernel)
    return other


def cut_off(call: Call) -> tuple[np.ndarray, Prediction]:
    """Return some rows of O as tensor cores sum them, and their prediction."""
    z, last, some = call.quantized, call.steps[-1], slice(None, None, 7)
    v = np.asarray(z.value_codes(), np.float64)
    moved = call.o[:, :, ::7].copy()
    for step in call.steps:
        codes = step.P[:, :, some].astype(np.float64) * 448
        # What the step counts in units of the last M: its own is the largest score's, code 448.
        top = step.S[:, :, some].max(axis=-1, keepdims=True).astype(np.float64)
        factor = np.exp2(top - last.m[:, :, some, None]) / 448 / last.l[:, :, some, None]
        here = v[:, :, step.kv0 : step.kv0 + codes.shape[-1]]
        for head in range(2):
            lost = cut_sums(codes[0, head], here[0, head]) - codes[0, head] @ here[0, head]
            moved[0, head] += factor[0, head] * lost * z.v_scale[0, head, 0]
    assert (np.abs(moved - call.o[:, :, ::7]) > 0).any()
    return moved, Prediction(call.found.o[:, :, some], call.found.bound[:, :, some], np.zeros(0))


def cut_sums(codes: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Codes (rows, keys) times v (keys, channels), from nothing, as `tensor_core_sums.model`."""
    rows, channels = len(codes), v.shape[1]
    found = np.zeros(rows * channels)
    for first in range(0, codes.shape[1], 32):
        keys = slice(first, first + 32)
        a = codes[:, keys].repeat(channels, axis=0)
        found = tensor_core_sums.model(
            a, np.tile(v[keys].T, (rows, 1)), found, 13, 13, FP8_LEAST_NORMAL
        )
    return found.reshape(rows, channels)


def test_a_kernel_without_codes_is_refused() -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    kernel = kernel_call(Settings("fa"), {"q": x, "k": x, "v": x})
    with pytest.raises(ValueError, match="float32"):
        predict_kernel(kernel)


def test_tiles_of_8_bit_floats_are_whole_instructions() -> None:
    call = Call("pv8, e4m3", *drawn("normal", 100))
    tiles = Tiles(128, 48, 4, 2)
    kernel = replace(call.kernel, kernel=replace(call.kernel.kernel, tiles=tiles))
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        predict_kernel(kernel)


#: Numbers that float32 hardly holds: a bias of padded rows, huge scores, tiny and huge values.
EDGES = {
    "padded row": {"bias": float(np.finfo(np.float32).min)},
    "huge scores": {"scale": 1e9},
    "huge queries": {"of_q": 1e5},
    "small values": {"of_v": 1e-34},
    "smallest values": {"of_v": 1e-38},
    "huge values": {"of_v": 2e35},
}


@pytest.mark.filterwarnings("error:.*encountered:RuntimeWarning:cupyattn.bounds")
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", FORMS)
def test_what_float32_hardly_holds_is_left_to_the_other_bound(name: str, edge: str) -> None:
    how = dict(EDGES[edge])
    if "bias" in how and name == "pv8_whole":
        pytest.skip("this form takes no bias")
    q, k, v = drawn("normal", 64, dtype="float32")
    q, v = (np.float32(how.pop(x, 1.0)) * y for x, y in (("of_q", q), ("of_v", v)))
    if "bias" in how:
        how["bias"] = np.where(np.arange(96)[:, None] == 1, how["bias"], np.zeros((1, 2, 1, 64)))
        how["bias"] = how["bias"].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of the mirror
        call = Call(name, q, k, v, **how)
    assert np.isfinite(call.found.o).all() and not np.isnan(call.found.bound).any()
    known = np.isfinite(call.found.bound)
    assert (ratio_to_bound(call.o, call.found.o, call.found.bound)[known] <= 1.0).all()
    assert (ratio_to_bound(call.o, call.found.o, call.found.bound)[~known] == 0).all()
    if edge == "padded row":
        assert known[:, :, 2:].all()
