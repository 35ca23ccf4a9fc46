"""Sums, codes of P and stores: each inequality on random and on adversarial numbers.

Each test also limits how far the worst error may stay below its bound, so that a bound that
becomes too wide is noticed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from cupyattn import distributions
from cupyattn.bounds import kernel, rows, scores, values
from cupyattn.bounds.bound import exact as exact_of_block
from cupyattn.bounds.perturbation import rounding_of_mean, softmax_perturbation, sum_of_operand
from cupyattn.kernels.numerics import P_CODE_ONE, Shifts, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import score_blocks
from cupyattn.reference.rounding import round_to
from cupyattn.testing.verdict import judge

Array = npt.NDArray[Any]

U = 2.0**-24
TILES = Tiles(16, 8, 1)
seeds = st.integers(0, 2**32 - 1)


def probabilities(rng: np.random.Generator, keys: int, spread: float) -> Array:
    s = spread * rng.standard_normal(keys)
    P: Array = np.exp(s - s.max())
    return P / P.sum()


# 16-bit P, l and its flushed weights.


def test_flushed_weights_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L29]: a weight of 2^-126.5 becomes 0, and its value of 2^120 is missed; the bound knows."""
    q = np.full((1, 1, 1, 1), -126.5 * math.log(2.0), np.float32)
    k = np.array([0.0, 1.0], np.float32).reshape(1, 1, 2, 1)
    v = np.array([1.0, 2.0**120], np.float32).reshape(1, 1, 2, 1)
    o = attention_mirror(q, k, v, variant="fa", scale=1.0)
    assert o[0, 0, 0, 0] == 1.0  # what is missed is 2^-6.5
    assert judge(o, q, k, v, variant="fa", scale=1.0).ratio <= 1
    monkeypatch.setattr(rows, "FLUSHED_WEIGHT", 2.0**-10 * rows.FLUSHED_WEIGHT)
    assert judge(o, q, k, v, variant="fa", scale=1.0).ratio > 1


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("equal", [False, True])
def test_the_sum_is_no_less_than_its_lower_bound(size: float, equal: bool) -> None:
    """[L33]: l of the kernel, in units of its last M, and within a twentieth of the bound."""
    q, k, v = distributions.make("normal", 1, 1, 32, 200, 16, "float32", seed=3)
    q = (size * q).astype(np.float32)
    if equal:
        k[:] = k[:, :, :1]
    n = numerics("float32", "portable", "float32")
    _, steps = attention_mirror(q, k, v, variant="fa", tiles=TILES, trace=True)
    l = steps[-1].l.astype(np.float64)[0, 0]  # noqa: E741
    (block,) = score_blocks(q, k, v)
    scaling = scores.scaling_errors(n, 0.25, None)
    score = scores.perturb(block, n, TILES, 0.25, scaling)
    P, lse, v64, o, _ = exact_of_block(block)
    Z_minus = softmax_perturbation(P, score.d, v64, o)[3]
    least = rows.least_sum(score, lse, Z_minus)[0, 0, 0]
    assert (least <= l).all() and (l <= 1.05 * least).all()


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [0.3, 3.0, 12.0])
def test_rounding_of_probabilities_is_within_its_bound(fmt: str, size: float) -> None:
    """[L34]: of the terms of O, with values that single out one key at a time."""
    rng = np.random.default_rng(7)
    q, k = (size**0.5 * rng.standard_normal((2, 1, 1, 6, 16))).astype(np.float32)
    q, k = round_to(q, fmt), round_to(k, fmt)
    stored = {"float16": np.float16, "bfloat16": distributions.make(
        "normal", 1, 1, 1, 1, 1, "bfloat16", seed=0)[0].dtype}[fmt]  # fmt: skip
    unit = np.eye(6, 16, dtype=np.float32)[None, None]
    operands = [x.astype(stored) for x in (q, k, unit)]
    # The split form: M does not lag, so the place of P in its binade is known.
    for form in ("portable", "split"):
        n = numerics("tensor_core", form, fmt)
        bound = kernel.attention(*operands, variant="fa_tc", numerics=n, form=form).terms["R5"]
        S = (q.astype(np.float64) @ k.swapaxes(-1, -2)) / 4
        p = np.exp(S - S.max(axis=-1, keepdims=True)).astype(np.float32)
        total = p.sum(axis=-1, dtype=np.float64, keepdims=True)
        error = np.abs(round_to(p, fmt).astype(np.float64) - p) / total
        assert (error <= bound[..., :6]).all()
        assert (error > 0.5 * bound[..., :6]).any()


@given(seeds, st.floats(0.1, 8))
def test_a_sum_of_rounded_weights_is_within_its_bound(seed: int, spread: float) -> None:
    """[L36]: any rounding of the weights, up or down together, an error of the sum and a loss."""
    rng = np.random.default_rng(seed)
    P = probabilities(rng, 20, spread)
    rho, theta, lost = P * rng.random(20) * 0.01, 10.0 ** rng.uniform(-7, -2), 1e-6
    bound = sum_of_operand(P[None], rho[None], np.array([theta]), np.array([lost]))[0]
    worst = 0.0
    for sign in (rng.choice([-1.0, 1.0], 20), np.ones(20), -np.ones(20)):
        for up in (-1.0, 1.0):
            l = ((P + sign * rho) * (1 + up * theta)).sum() + up * lost  # noqa: E741
            worst = max(worst, abs(l - 1))
    target(worst / bound)
    assert 0.9 * bound <= worst <= bound * (1 + 1e-12)


# 8-bit P and V.


@pytest.mark.parametrize("p_type", ["u8", "s8", "e4m3"])
@given(seed=seeds, spread=st.floats(0.1, 12))
def test_codes_of_p_are_within_their_bound(p_type: str, seed: int, spread: float) -> None:
    """[L55]: codes against the largest of each tile, whose M is rounded up by any share."""
    rng = np.random.default_rng(seed)
    keys, one = 40, P_CODE_ONE[p_type]
    P = probabilities(rng, keys, spread)
    n = numerics("int8", "pv8", "float16", QuantConfig(
        pv="fp8" if p_type == "e4m3" else "int8", p_type=p_type))  # fmt: skip
    slack = 10.0 ** rng.uniform(-7, -1)
    bound = values.code_rounding(P[None], n, TILES, np.array([slack]))[0]
    worst = 0.0
    for first in range(0, keys, TILES.block_kv):
        tile = slice(first, first + TILES.block_kv)
        for lower in (0.0, slack * rng.random(), slack):
            unit = P[tile].max() / (one * 2.0**-lower)
            codes = values_of(P[tile] / unit, p_type)
            error = np.abs(codes * unit - P[tile])
            assert (error <= bound[tile] * (1 + 1e-12)).all()
            worst = max(worst, float((error / bound[tile]).max()))
    assert worst > 0.3


def values_of(weights: Array, p_type: str) -> Array:
    """Codes of weights as numbers: whole ones, or rounded to e4m3 (3 bits behind the point)."""
    if p_type != "e4m3":
        return np.rint(weights)
    _, exponent = np.frexp(weights)
    unit = 2.0 ** np.maximum(exponent - 4, -9)
    return np.rint(weights / unit) * unit


@given(seeds, st.floats(0.1, 8), st.floats(-4, -0.5))
def test_a_mean_of_rounded_weights_is_within_its_bound(
    seed: int, spread: float, log_size: float
) -> None:
    """[L56]: weights rounded toward one side of the mean, and divided by what they then sum to."""
    rng = np.random.default_rng(seed)
    P, v = probabilities(rng, 12, spread), rng.standard_normal((12, 3)) + 100.0
    rho = P * rng.random(12) * 10.0**log_size
    moved = P * np.exp(1e-3 * rng.uniform(-1, 1, 12))
    moved /= moved.sum()
    o = P @ v
    delta = np.abs(moved @ v - o)
    r5, share = rounding_of_mean(rho[None], v, o[None], delta[None])
    worst = np.zeros(3)
    for channel in range(3):
        for threshold in v[:, channel]:
            sign = np.where(v[:, channel] > threshold, 1.0, -1.0)
            for rounded in (moved + sign * rho, moved - sign * rho, moved - rho):
                assert rounded.sum() >= share[0] * (1 - 1e-12)
                off = abs(rounded @ v[:, channel] / rounded.sum() - moved @ v[:, channel])
                worst[channel] = max(worst[channel], off)
    assert (worst <= r5[0] * (1 + 1e-9) + 1e-11).all()
    assert (worst >= 0.2 * r5[0]).any()
    same = np.full_like(v, 7.0)  # a V that all keys share is not off at all
    assert rounding_of_mean(rho[None], same, same[:1], 0 * delta[None])[0].max() < 1e-13


@given(seeds, st.integers(1, 40))
def test_sums_of_tiles_are_within_their_bound(seed: int, tiles: int) -> None:
    """[L57]: alpha, beta times the scale, the product and the sum, each rounded to float32."""
    rng = np.random.default_rng(seed)
    n = numerics("int8", "pv8", "float16")
    channels, keys = 200, tiles * TILES.block_kv
    out = np.zeros(channels, np.float32)
    exact, size, rescalings = np.zeros(channels), np.zeros(channels), 0
    for _ in range(tiles):
        dots = rng.integers(-(2**23), 2**23, channels).astype(np.float32)
        beta, scale = np.float32(rng.random()), rng.random(channels).astype(np.float32)
        alpha = np.float32(rng.random() if rng.random() < 0.5 else 1.0)
        rescalings += int(alpha != 1)
        out = out * alpha + dots * (beta * scale)
        term = dots.astype(np.float64) * float(beta) * scale
        exact, size = exact * float(alpha) + term, size * float(alpha) + np.abs(term)
    theta = values.accumulation(np.array([float(keys)]), keys, n, TILES)[0]
    theta = (1 + theta) * (1 + rows.gamma(rescalings, U)) - 1
    ratio = np.abs(out - exact) / (theta * size)
    target(float(ratio.max()))
    assert ratio.max() <= 1
    assert tiles > 1 or ratio.max() > 0.25


def test_8_bit_floats_have_a_sum_of_their_own() -> None:
    """[L57]: 13 bits of the fraction are kept within a tile, which float32 sums would not need."""
    rng = np.random.default_rng(0)
    count = np.array([64.0])
    tiles = Tiles(16, 64, 1)
    fp8 = numerics("int8", "pv8", "float16", QuantConfig(pv="fp8", p_type="e4m3"))
    theta = values.accumulation(count, 64, fp8, tiles)[0]
    worst = 0.0
    for _ in range(200):
        x = values_of(448 * rng.random(64), "e4m3") * values_of(448 * rng.random(64), "e4m3")
        total = 0.0
        for first in range(0, 64, 32):
            terms = np.append(x[first : first + 32], total)
            unit = 2.0 ** (np.frexp(terms.max())[1] - 14)
            total = (np.trunc(terms / unit) * unit).sum()
            unit = 2.0 ** (np.frexp(total)[1] - 14)
            total = np.trunc(total / unit) * unit
        worst = max(worst, abs(total / x.sum() - 1) / theta)
    assert 0.02 < worst <= 1


@pytest.mark.parametrize("pieces", [0, 17])
@given(seed=seeds)
def test_the_mean_of_v_comes_back_within_its_bound(pieces: int, seed: int) -> None:
    """[L58]: fl(O), the scale, 1/l, their product and the mean, in float32; in pieces l means."""
    rng = np.random.default_rng(seed)
    count = 400
    out = rng.integers(-(2**30), 2**30, count)
    l = np.float32(rng.uniform(2**7, 2**23))  # noqa: E741
    scale = rng.uniform(1e-3, 1, count).astype(np.float32)
    mean = (10.0 ** rng.uniform(-3, 6) * rng.standard_normal(count)).astype(np.float32)
    exact_sum = out.astype(np.float64) * scale / float(l)
    cost, size = values.with_mean(np.abs(exact_sum), mean.astype(np.float64), pieces)
    if pieces:
        parts = np.float32(0.5) * l  # two pieces of one M, each with half of everything
        piece = out.astype(np.float32) * np.float32(0.5) * scale + parts * mean
        found = (piece + piece) * (np.float32(1) / l)
    else:
        found = out.astype(np.float32) * (scale * (np.float32(1) / l)) + mean
    exact = exact_sum + mean
    error = np.abs(found.astype(np.float64) - exact)
    target(float((error / cost).max()))
    assert (error <= cost).all() and (np.abs(exact) + error <= size * (1 + 1e-12)).all()
    assert (error / cost).max() > (0.02 if pieces else 0.2)


def shifted(P: Array, by: Shifts, block: int) -> tuple[Array, list[Array], list[int]]:
    """Return M of each step, the weights of its keys in units of 2^M, and l's range, in float64."""
    highest, M, l, Ms, codes, seen = -1e9, 0.0, 0.0, [], [], []  # noqa: E741
    for step, first in enumerate(range(0, len(P), block)):
        tile = P[first : first + block]
        if by.guards(len(P)) and step % by.watch_steps == 0 and l > 0:
            exponent = math.frexp(l)[1] - 1
            highest = max(highest, M + exponent + 3 - by.sum_bits + by.lower_bits)
        target_M = math.floor(math.log2(tile.max())) + 1 - by.code_bits
        highest = max(highest, target_M)
        new = max(target_M, highest - by.lower_bits)
        l = l * 2.0 ** (M - new) if step else 0.0  # noqa: E741
        M = new
        weights = tile * 2.0**-M
        l += np.minimum(np.rint(weights), 255).sum()  # noqa: E741
        Ms.append(M)
        codes.append(weights)
        seen.append(l)
    return np.array(Ms), codes, seen


@given(seeds, st.sampled_from([200, 5000]), st.floats(0.1, 12))
def test_units_of_shifted_codes_are_within_their_bound(seed: int, keys: int, spread: float) -> None:
    """[L59], [L60]: l stays below 2^23, 2^M below its bound, codes within half of one or 1/255."""
    rng = np.random.default_rng(seed)
    P = probabilities(rng, keys, spread)
    if rng.random() < 0.3:
        P = np.sort(P)[:: rng.choice([-1, 1])]
    by = Shifts()
    Ms, weights, seen = shifted(P, by, TILES.block_kv)
    unit = values.units(P[None], by, TILES)[0]
    assert max(seen) < 2.0**by.sum_bits
    assert (2.0**Ms <= unit).all() and (2.0**Ms > 0.24 * unit).any()
    bound = values.shifted_rounding(P[None], unit[None], TILES)[0]
    codes = [np.minimum(np.rint(w), 255) * 2.0**M for w, M in zip(weights, Ms, strict=True)]
    error = np.abs(np.concatenate(codes) - P)
    assert (error <= bound).all() and (error > 0.2 * bound).any()


@pytest.mark.parametrize("rise", [0.0, 1e-4])
def test_the_guard_of_l_raises_units_within_their_bound(rise: float) -> None:
    """[L60]: 60,000 equal or slowly rising keys, whose codes would add up past 2^23."""
    by, tiles = Shifts(), Tiles(16, 64, 1)
    P = np.exp(rise * np.arange(60_000))
    P /= P.sum()
    Ms, _, seen = shifted(P, by, tiles.block_kv)
    unit = values.units(P[None], by, tiles)[0]
    assert 2.0 ** (by.sum_bits - 3) < max(seen) < 2.0**by.sum_bits
    assert (2.0**Ms <= unit).all() and (2.0**Ms > 0.24 * unit).any()
    if rise == 0:  # M is above the largest score less code_bits
        assert (2.0**Ms > 2.0 ** (1 - by.code_bits) * P.max()).any()


@given(seeds, st.floats(0.6, 3.5))
def test_shifts_drop_less_than_their_bound(seed: int, rise: float) -> None:
    """[L61]: the floors of O at its shifts, against sums that no shift has cut."""
    rng = np.random.default_rng(seed)
    keys = 400
    s = math.log(2) * (rise * (np.arange(keys) // TILES.block_kv) + 0.3 * rng.random(keys))
    P = np.exp(s - s.max()) / np.exp(s - s.max()).sum()  # M rises by `rise` at every tile
    by = Shifts(l_bits=7)
    Ms, weights, _ = shifted(P, by, TILES.block_kv)
    V = rng.integers(-127, 128, (keys, 6))
    out, exact, lane, exact_lane = np.zeros(6), np.zeros(6), 0.0, 0.0
    for step, (M, weight) in enumerate(zip(Ms, weights, strict=True)):
        codes = np.minimum(np.rint(weight), 255)
        added = codes @ V[step * TILES.block_kv :][: len(codes)]
        shift = 2.0 ** (Ms[step - 1] - M) if step else 1.0
        out, exact = np.floor(out * shift) + added, exact + added * 2.0**M
        lane = math.floor(lane * shift * 2.0**by.l_bits) * 2.0**-by.l_bits + codes.sum()
        exact_lane += codes.sum() * 2.0**M
    unit = values.units(P[None], by, TILES)
    bound = values.dropped_by_shifts(unit, np.full((1, 6), 0.5))[0]
    lost = 0.5 * (exact - out * 2.0 ** Ms[-1])
    assert (lost >= -1e-12).all() and (lost <= bound).all() and (lost > 0.02 * bound).any()
    of_l = values.dropped_of_l(unit, by)[0] / 4  # one lane of the four
    assert -1e-12 <= exact_lane - lane * 2.0 ** Ms[-1] <= of_l


def test_the_lse_bound_knows_how_far_a_whole_M_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """[L38]: with a log2f that errs by all of its result the bound is no less than |ln l|."""
    q, k, v = distributions.make("normal", 1, 1, 8, 3, 16, "float16", seed=0)
    quant = QuantConfig(pv="int8", granularity_v="channel")
    monkeypatch.setattr(rows, "LOG2F_ERROR", 1.0)
    for form, arch in (("pv8_whole", "sm_80"), ("sm90_pv8", "sm_90a"), ("pv8", "sm_80")):
        z = quantize(q, k, v, quant=quant, arch=arch)
        _, steps = attention_mirror(z, variant="fa_int8", form=form, scale=1.0, trace=True)
        l = steps[-1].l.astype(np.float64)  # noqa: E741
        assert (l > 100).all()
        bound = kernel.attention(
            None, None, None, variant="fa_int8", quantized=z, form=form, scale=1.0
        )
        assert (bound.lse >= np.log(l) - 0.02).all(), form  # l of codes, not of exponentials
