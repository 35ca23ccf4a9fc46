"""`Int8Attention`: what runs at which step, scales, guidance, pruning, sparsity, fallback."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.api import kernel_form, plans
from cupyattn.diffusion import MODES, VideoMask, block_order, guided, key_importance, top_cdf
from cupyattn.diffusion import pruning as prune
from cupyattn.diffusion.attention import SOFTMAX_EPS_MAX
from cupyattn.diffusion.guidance import split_branches, stack_queries
from cupyattn.diffusion.video import block_probabilities, window_3d
from cupyattn.distributions import make
from cupyattn.quant import QuantConfig
from cupyattn.request import Options, resolve
from cupyattn.tiles import Tiles
from tests import runs
from tests.runs import bits, rope_tables

HEADS, HEAD_DIM, STEPS = 4, 16, 50
#: One timestep of each mode, by the rule.
STEP_OF = {"aggressive": 0, "balanced": 25, "precision": 49}
#: The same arithmetic, as arguments of `attention`.
SAME: dict[str, dict[str, Any]] = {
    "aggressive": {"variant": "fa_int8", "quant": QuantConfig(pv="int8")},
    "balanced": {"variant": "fa_int8"},
    "precision": {},
}

#: Operands of a call: lengths, key heads, type, seed.
operands = st.builds(
    lambda len_q, len_kv, heads_kv, dtype, seed: make(
        "channel-bias", 2, HEADS, len_q, len_kv, HEAD_DIM, dtype, seed, heads_kv
    ),
    st.integers(1, 90),
    st.integers(1, 150),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["float16", "bfloat16"]),
    st.integers(0, 2**16),
)


def layer(**changed: Any) -> ca.Int8Attention:
    return ca.Int8Attention(HEADS, HEAD_DIM, STEPS, **changed)


def example(len_q: int = 70, len_kv: int = 130, seed: int = 0, **changed: Any) -> Any:
    return make("channel-bias", 1, HEADS, len_q, len_kv, HEAD_DIM, seed=seed, **changed)


def assert_same(a: Any, b: Any) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


# ---- steps and modes -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(qkv=operands)
def test_a_mode_is_a_call_of_attention(mode, qkv) -> None:
    attend = layer()
    o = attend(*qkv, STEP_OF[mode])
    assert attend.mode(STEP_OF[mode]) == mode
    assert_same(o, ca.attention(*qkv, **SAME[mode]))
    assert_same(o, attend(*qkv, sigma=attend.sigmas[STEP_OF[mode]]))
    assert_same(o, attend(*qkv, timestep=3, mode=mode))


def test_a_timestep_is_an_index_and_a_ratio_finds_the_next_one() -> None:
    attend = layer()
    for wrong in (-1, STEPS, STEPS + 100):
        with pytest.raises(ValueError, match=f"num_timesteps - 1 = 49, got {wrong}"):
            attend.step(wrong)
    for wrong in (3.0, True, np.array(3), "3"):
        with pytest.raises(TypeError, match="timestep must be an index"):
            attend.step(wrong)
    for both in ({}, {"timestep": 1, "sigma": 1.0}):
        with pytest.raises(TypeError, match="either timestep or sigma"):
            attend.step(**both)
    for wrong in (-1.0, np.nan):
        with pytest.raises(ValueError, match="sigma must be a noise-to-signal ratio"):
            attend.step(sigma=wrong)
    assert [attend.step(np.int64(t)).timestep for t in (0, 49)] == [0, 49]
    for t, sigma in enumerate(attend.sigmas):
        assert attend.step(sigma=sigma * 1.01).timestep == t
    assert attend.step(sigma=np.inf).timestep == 0 and attend.step(sigma=0.0).timestep == 49


def test_a_schedule_may_begin_without_signal_and_end_without_noise() -> None:
    attend = ca.Int8Attention(HEADS, HEAD_DIM, 4, sigmas=[np.inf, 3.0, 1.0, 0.0])
    assert [attend.mode(t) for t in range(4)] == ["aggressive", *["balanced"] * 2, "precision"]
    assert attend.step(sigma=0.0).timestep == 3 and attend.step(sigma=0.1).timestep == 2
    assert ca.Int8Attention(HEADS, HEAD_DIM, 8, sigmas="flow").mode(0) == "aggressive"


def test_a_policy_of_ones_own() -> None:
    class Odd:
        def mode(self, timestep: int, ratio: float) -> str:
            return ("precision", "balanced", "fp4")[timestep % 3]

    attend = layer(precision_policy=Odd())
    assert [attend.mode(t) for t in (0, 1)] == ["precision", "balanced"]
    with pytest.raises(ValueError, match="a precision mode must be one of .*, got 'fp4'"):
        attend(*example(), 2)
    assert layer(precision_policy=["balanced"] * STEPS).mode(0) == "balanced"


# ---- scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["aggressive", "balanced"])
def test_static_scales_are_multiplied_by_the_factor_of_the_step(mode) -> None:
    qkv = example()
    per_head = np.linspace(0.01, 0.04, HEADS, dtype=np.float32)[None, :, None]
    quant = QuantConfig("head", "tensor", scales=(per_head, 0.05))
    factors = np.geomspace(4, 0.25, STEPS).astype(np.float32)
    pv = SAME[mode].get("quant", QuantConfig()).pv
    for adaptive, table, factor in (
        (True, factors, factors[20]),
        (True, None, ca.compute_adaptive_scales(ca.compute_sigma_schedule(STEPS))[20]),
        (False, factors, np.float32(1)),
    ):
        attend = layer(quant=quant, timestep_scales=table, use_adaptive_scaling=adaptive)
        scales = per_head * factor, float(0.05 * float(factor))
        want = QuantConfig("head", "tensor", pv=pv, scales=scales)
        assert_same(attend(*qkv, 20, mode=mode), ca.attention(*qkv, variant="fa_int8", quant=want))


def test_factors_change_nothing_where_scales_are_dynamic(caplog) -> None:
    qkv = example()
    with caplog.at_level(logging.INFO, "cupyattn"):
        attend = layer(timestep_scales=np.linspace(9, 1, STEPS))
    assert "timestep_scales change nothing" in caplog.text
    assert_same(attend(*qkv, 25), layer()(*qkv, 25))


def calibrated(num_bins: int, **changed: Any) -> tuple[ca.Calibration, dict[int, Any]]:
    """Activations that fall with the noise, by timestep, and what they are calibrated to."""
    sigmas = ca.compute_sigma_schedule(STEPS)
    at = {}
    for t in (*range(0, STEPS, 5), STEPS - 1):
        q, k, v = make("normal", 1, HEADS, 33, 40, HEAD_DIM, "float32", t, heads_kv=2)
        size = np.float32(sigmas[t])
        at[t] = (q * size, k, v)
    batches = [(q, k, t) for t, (q, k, _) in at.items()]
    found = ca.calibrate_quantization_scales(
        batches, 100.0, sigmas=sigmas, num_bins=num_bins, **changed
    )
    return found, at


def test_a_calibration_gives_each_bin_its_scales() -> None:
    found, at = calibrated(4)
    attend, uniform = (
        layer(timestep_scales=found, use_adaptive_scaling=adaptive) for adaptive in (True, False)
    )
    quant = QuantConfig("head", "head", smooth_k=False)
    for t, qkv in at.items():
        row = int(found.bins.index(attend.sigmas[t]))
        rows = found.q_scale[row], found.k_scale[row]
        for one, pair in ((attend, rows), (uniform, [s[0] for s in found.uniform()])):
            scales = tuple(s[None, :, None] for s in pair)
            want = QuantConfig("head", "head", smooth_k=False, scales=scales)
            o = one(*qkv, t, mode="balanced")
            assert_same(o, ca.attention(*qkv, variant="fa_int8", quant=want))
        assert attend.calibration is found and quant.granularity_q == "head"


def test_adaptive_static_scales_keep_the_range_that_uniform_ones_lose() -> None:
    """Codes of late steps reach far with the scales of their bin, nowhere with one scale."""
    found, at = calibrated(8)
    reach = {}
    for adaptive in (True, False):
        attend = layer(timestep_scales=found, use_adaptive_scaling=adaptive)
        q, k, v = at[45]
        quant = attend.quant_config(q, k, 45)
        reach[adaptive] = int(np.abs(ca.quantize(q, k, v, quant=quant).q_codes).max())
    assert reach[False] <= 1 and reach[True] > 20


def test_the_static_path_reads_q_and_k_once() -> None:
    found, at = calibrated(1)
    q, k, v = at[0]
    attend = layer(timestep_scales=found)
    quant = attend.quant_config(q, k, 0)
    entries = [
        launch.entry
        for plan in plans(resolve(q, k, v, Options(variant="fa_int8", quant=quant)))
        for launch in plan.launches
    ]
    assert entries == ["encode_int8", "encode_int8", "attn_fa_int8"]
    assert attend.quant_config(q, k, 0) is quant  # plans are found again


@settings(max_examples=15)
@given(seed=st.integers(0, 999), mode=st.sampled_from(["aggressive", "balanced"]), t=st.data())
def test_static_scales_hold_the_bounds(seed, mode, t) -> None:
    """J2 and J3, saturated values among them."""
    found, at = calibrated(3)
    timestep = t.draw(st.sampled_from(sorted(at)))
    q, k, v = at[timestep]
    q = q * np.float32(1.5)
    attend = layer(timestep_scales=found)
    quant = attend.quant_config(q, k, timestep, mode=mode)
    z = ca.quantize(q, k, v, quant=quant)
    o = attend(q, k, v, timestep, mode=mode)
    report = ca.testing.judge(o, q, k, v, variant="fa_int8", quantized=z)
    assert report.passed, report


# ---- guidance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10)
@given(qkv=operands, kind=st.sampled_from(["dense", "local", "block_sparse", "mask", "rope"]))
def test_fused_guidance_equals_two_calls(mode, qkv, kind) -> None:
    q, k, v = qkv
    other = (q[::-1] * q.dtype.type(0.5)).copy()
    given: dict[str, Any] = {}
    if kind in ("local", "block_sparse"):
        given = {"attention_type": kind, "window_size": 60}
    elif kind == "mask":
        shape = (2, HEADS, q.shape[2], k.shape[2])
        given = {"mask": np.random.default_rng(0).random(shape) < 0.7}
    elif kind == "rope":
        given = {"rope": rope_tables(max(q.shape[2], k.shape[2]), HEAD_DIM)}
    attend = layer()
    fused = attend.fused_cfg(q, other, k, v, STEP_OF[mode], 7.5, **given)
    for o, one in zip(fused, (q, other), strict=True):
        assert_same(o, attend(one, k, v, STEP_OF[mode], **given))


def test_guidance_with_static_scales_masks_of_heads_and_own_keys() -> None:
    found, at = calibrated(3)
    attend = layer(timestep_scales=found)
    (q, k, v), (other, k2, v2) = at[0], at[5]
    fused = attend.fused_cfg(q, other, k, v, 0)
    assert_same(fused[0], attend(q, k, v, 0))
    assert_same(fused[1], attend(other, k, v, 0))
    both = attend.fused_cfg(q, other, np.concatenate([k, k2]), np.concatenate([v, v2]), 0)
    assert_same(both[0], attend(q, k, v, 0))
    assert_same(both[1], attend(other, k2, v2, 0))
    rng = np.random.default_rng(0)
    mask = ca.BlockMask(rng.random((1, HEADS, 1, 1)) < 0.5, 64, 64)
    sparse = layer(attention_type="block_sparse", block_mask=mask)
    fused = sparse.fused_cfg(q, other, k, v, 25)
    assert_same(fused[0], sparse(q, k, v, 25))
    assert_same(fused[1], sparse(other, k, v, 25))


def test_a_concatenated_batch_shares_keys_where_it_may() -> None:
    q, k, v = example()
    other = q[:, ::-1].copy()
    attend = layer(enable_cfg_fusion=True)
    o, kept = attend(np.concatenate([q, other]), k, v, 25, return_mask=True)
    assert_same(o, np.concatenate([attend(q, k, v, 25), attend(other, k, v, 25)]))
    assert kept.shape == (2, HEADS, k.shape[2]) and kept.all()
    with pytest.raises(ValueError, match="agree on batch"):
        layer()(np.concatenate([q, other]), k, v, 25)


def test_both_branches_run_in_one_launch_of_attention(monkeypatch) -> None:
    calls = []
    original = ca.diffusion.attention.attention

    def counted(q: Any, *rest: Any, **given: Any) -> Any:
        calls.append(q.shape)
        return original(q, *rest, **given)

    monkeypatch.setattr(ca.diffusion.attention, "attention", counted)
    q, k, v = example()
    layer().fused_cfg(q, q, k, v, 25)
    assert calls == [(1, 2 * HEADS, *q.shape[2:])]


def test_stacked_queries_come_apart_again() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 2, 3, 5, 4))
    assert all(map(np.array_equal, split_branches(stack_queries(a, b)), (a, b)))
    with pytest.raises(ValueError, match="one shape and dtype"):
        stack_queries(a, b[:, :1])
    assert guided(2.0, 1.0, 7.5) == 8.5
    with pytest.raises(ValueError, match="guidance_scale must be a finite number"):
        layer().fused_cfg(a, b, a, a, 0, np.nan)


# ---- pruning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(qkv=operands, ratio=st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_pruned_is_attention_over_the_keys_that_are_kept(mode, qkv, ratio) -> None:
    q, k, v = qkv
    attend = layer(enable_pruning=True, pruning_ratio=ratio)
    o, kept = attend(q, k, v, STEP_OF[mode], return_mask=True)
    batch, heads_kv, len_kv, _ = k.shape
    assert kept.shape == (batch, HEADS, len_kv) and kept.dtype == bool
    count = max(1, len_kv - int(ratio * len_kv + 1e-9))
    assert (kept.sum(axis=2) == count).all()
    by_kv = kept[:, :: HEADS // heads_kv]
    few = [x[by_kv].reshape(batch, heads_kv, count, HEAD_DIM) for x in (k, v)]
    assert_same(o, ca.attention(q, *few, **SAME[mode]))
    if mode == "precision":  # and dense attention with the dropped keys masked
        given = {"mask": kept[:, :, None], "variant": "fa_tc"}
        ca.testing.assert_within_bound(o, q, k, v, **given)
        if ratio == 0:
            assert_same(o, ca.attention(q, k, v))


def test_what_gets_least_attention_is_dropped() -> None:
    q, k, v = example(64, 100)
    q, k = q + np.float16(2), k.copy()
    k[:, :, 7] = 1  # a key that all rows like, and twenty that they do not
    k[:, :, 50:70] = -k[:, :, 7, None]
    for attend in (layer(enable_pruning=True), layer(enable_pruning=True, pruning_threshold=0.2)):
        o, kept = attend(q, k, v, 25, return_mask=True)
        assert kept[:, :, 7].all() and not kept[:, :, 50:70].any()


@given(
    seed=st.integers(0, 999),
    length=st.integers(1, 70),
    dropped=st.floats(0, 0.99),
    head_dim=st.integers(1, 9),
    dtype=st.sampled_from(["float16", "float32"]),
    layout=st.sampled_from(["plain", "BSHD", "shifted", "last axis apart"]),
)
def test_keys_move_together_whatever_lies_between_them(
    seed, length, dropped, head_dim, dtype, layout
) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, 3, length, head_dim)
    k, v = rng.standard_normal((2, *shape)).astype(dtype)
    if layout == "BSHD":
        k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (k, v))
    elif layout == "shifted":
        k, v = (runs.embedded(x, 3) for x in (k, v))
    elif layout == "last axis apart":
        k, v = (np.repeat(x, 2, axis=3)[..., ::2] for x in (k, v))
    importance = rng.choice(np.float32([0, 0.1, 0.1, 0.3, 1, np.nan]), shape[:3])
    count = prune.kept_count(length, dropped)
    few_k, few_v, kept = prune.compact(k, v, importance, count)
    rank = np.where(np.isnan(importance), np.inf, importance)
    order = np.argsort(rank, axis=2, kind="stable")[..., length - count :]
    want = np.zeros(shape[:3], bool)
    np.put_along_axis(want, order, True, axis=2)
    np.testing.assert_array_equal(kept, want)
    for few, x in ((few_k, k), (few_v, v)):
        assert_same(few, x[want].reshape(2, 3, count, head_dim))


def test_importance_is_the_mean_of_the_rows_that_it_looks_at() -> None:
    q, k, _ = example(40, 90, heads_kv=2)
    found = key_importance(q, k, rows=8)
    rows = q[:, :, 2::5].astype(np.float64)
    s = np.einsum("bhqd,bhkd->bhqk", rows, np.repeat(k.astype(np.float64), 2, axis=1)) / 4
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    want = p.reshape(1, 2, 2, 8, 90).mean(axis=(2, 3))
    np.testing.assert_allclose(found, want, rtol=0.05)  # the rows are rounded once more
    np.testing.assert_allclose(found.sum(axis=2), 1, rtol=1e-5)
    assert key_importance(q[:, :, :0], k).shape == (1, 2, 90)


def test_the_threshold_falls_with_the_noise() -> None:
    q, k, v = example()
    attend = layer(enable_pruning=True, pruning_threshold=0.9, precision_policy="balanced")
    counts = [
        attend(q, k, v, t, return_mask=True)[1].sum(axis=2).max() for t in (0, 25, 35, 42, 49)
    ]
    assert counts[0] == counts[1] < k.shape[2]  # at most that of the middle
    assert counts == sorted(counts) and counts[-1] == k.shape[2]
    importance = key_importance(q, k)
    assert counts[0] == (importance >= 0.9 / k.shape[2]).sum(axis=2).max()


def test_pruning_goes_with_plain_dense_attention() -> None:
    q, k, v = example()
    with pytest.raises(ca.UnsupportedError, match="attention_type='dense' alone, got 'local'"):
        layer(attention_type="local", window_size=8, enable_pruning=True)
    with pytest.raises(ca.UnsupportedError, match="no mask and no rope"):
        layer()(q, k, v, 0, enable_pruning=True, mask=np.ones(130, bool))
    nothing = k[:, :, :0]
    o, kept = layer(enable_pruning=True)(q, nothing, nothing, 49, return_mask=True)
    assert not o.any() and kept.shape == (1, HEADS, 0)
    assert prune.kept_count(4096, 0.2) == 3277


def test_guided_branches_are_pruned_alike() -> None:
    q, k, v = example()
    attend = layer(enable_pruning=True)
    o, o_uncond, kept = attend.fused_cfg(q, q[:, :, ::-1].copy(), k, v, 25, return_mask=True)
    assert kept.shape == (1, HEADS, 130) and (kept.sum(axis=2) == 104).all()
    few = [x[kept].reshape(1, HEADS, 104, HEAD_DIM) for x in (k, v)]
    assert_same(o, layer()(q, *few, 25))


# ---- sparsity ------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(qkv=operands, kind=st.sampled_from(["local", "block_sparse"]), width=st.integers(0, 200))
def test_sparse_equals_masked_dense(qkv, kind, width) -> None:
    q, k, v = qkv
    len_q, len_kv = q.shape[2], k.shape[2]
    attend = layer(attention_type=kind, window_size=width)
    limits = width // 2, width // 2
    if kind == "local":
        distance = np.arange(len_kv) - np.arange(len_q)[:, None] - (len_kv - len_q)
        dense, options = abs(distance) <= width // 2, {"window": limits}
    else:
        blocks = ca.BlockMask.from_window(len_q, len_kv, limits)
        dense, options = blocks.to_dense(len_q, len_kv)[0, 0], {"block_mask": blocks}
    for mode in MODES:
        assert_same(attend(q, k, v, STEP_OF[mode]), ca.attention(q, k, v, **SAME[mode], **options))
    form = kernel_form(q, k, v, variant="fa_tc", **options)
    ca.testing.assert_within_bound(
        attend(q, k, v, STEP_OF["precision"]), q, k, v, variant="fa_tc", mask=dense, **form
    )


def test_an_empty_row_of_blocks_gives_zeros() -> None:
    q, k, v = example(128, 128)
    mask = ca.BlockMask(np.array([[[[True, False], [False, False]]]]), 64, 64)
    for mode in MODES:
        attend = layer(attention_type="block_sparse", block_mask=mask)
        o = attend(q, k, v, STEP_OF[mode])
        assert o[:, :, :64].all() and not o[:, :, 64:].any()


def test_a_video_mask_joins_strong_blocks_with_near_ones() -> None:
    grid, window = (2, 2, 3), (1, 3, 1)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, 12 * 64, HEAD_DIM)).astype(np.float16)
    k = rng.standard_normal((1, 2, 12 * 64, HEAD_DIM)).astype(np.float16)
    q += np.repeat(4 * rng.standard_normal((1, HEADS, 12, HEAD_DIM)), 64, axis=2).astype(q.dtype)
    k += np.repeat(4 * rng.standard_normal((1, 2, 12, HEAD_DIM)), 64, axis=2).astype(q.dtype)
    build = VideoMask(grid, window, 0.6)
    found = build(q, k).mask
    near = window_3d(grid, window)
    share = block_probabilities(q, k, 64)
    assert found.shape == (1, HEADS, 12, 12) and found[..., near].all()
    for h in range(HEADS):
        for row in range(12):
            ranked = np.sort(share[0, h, row])[::-1]
            fewest = int((ranked.cumsum() < 0.6).sum()) + 1
            strongest = share[0, h, row] >= ranked[fewest - 1]
            np.testing.assert_array_equal(found[0, h, row], near[row] | strongest)
    o = layer(attention_type="block_sparse", block_mask=build)(q, k, k, 49)
    assert_same(o, ca.attention(q, k, k, block_mask=build(q, k)))
    alone = VideoMask(grid, window, 0.0)
    assert alone(q, k) is alone(q, k)
    np.testing.assert_array_equal(alone(q, k).mask[0, 0], near)
    with pytest.raises(ValueError, match="has 768, got"):
        build(q[:, :, 1:], k)
    for wrong in ({"grid": (2, 2)}, {"window": (1, -1, 1)}, {"mass": 1.5}, {"block_size": 32}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            VideoMask(**{"grid": grid, "window": window, **wrong})
    with pytest.raises(ValueError, match="mass=0 needs a window"):
        VideoMask(grid, (0, 0, 0), 0.0)


@given(seed=st.integers(0, 999), n=st.integers(1, 30), mass=st.floats(0.01, 1))
def test_the_fewest_that_reach_a_mass(seed, n, mass) -> None:
    p = np.random.default_rng(seed).dirichlet(np.full(n, 0.3), 4)
    kept = top_cdf(p, mass)
    total = (p * kept).sum(axis=1)
    assert (total >= mass - 1e-9).all()
    least = np.where(kept, p, np.inf).min(axis=1)
    assert (total - least < mass + 1e-9).all() and (np.where(kept, 0, p).max(axis=1) <= least).all()


def test_windows_in_three_directions_and_patches() -> None:
    grid = 3, 4, 5
    near = window_3d(grid, (1, 3, 5)).reshape(*grid, *grid)
    for a in np.ndindex(grid):
        for b in np.ndindex(grid):
            far = [abs(x - y) for x, y in zip(a, b, strict=True)]
            assert near[(*a, *b)] == (far[0] <= 0 and far[1] <= 1 and far[2] <= 2)
    order = block_order(2, 16, 24)
    assert sorted(order) == list(range(2 * 16 * 24))
    place = np.unravel_index(order.reshape(-1, 64), (2, 16, 24))
    for coordinate, size in zip(place, (1, 8, 8), strict=True):
        assert (np.ptp(coordinate, axis=1) == size - 1).all()
    with pytest.raises(ValueError, match="do not divide a video of"):
        block_order(2, 15, 24)


# ---- fallback, projection, arguments -------------------------------------------------------------


def test_what_int8_does_not_take_falls_back_counted_and_logged(monkeypatch, caplog) -> None:
    def refuses(*operands: Any, variant: str, **given: Any) -> Any:
        if variant == "fa_int8":
            raise ca.UnsupportedError("no such device")
        return ca.attention(*operands, variant=variant, **given)

    monkeypatch.setattr(ca.diffusion.attention, "attention", refuses)
    q, k, v = example()
    attend = layer()
    with caplog.at_level(logging.DEBUG, "cupyattn"):
        found = [attend(q, k, v, STEP_OF[mode]) for mode in MODES]
    for o in found:
        assert_same(o, ca.attention(q, k, v))
    assert attend.fallbacks == {"no such device": 2}
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "fell back" in r.getMessage()]
    assert [level for level, _ in said] == ["WARNING", "DEBUG"]
    assert said[0][1] == "mode 'aggressive' fell back to 16 bits (call 1): no such device"


@pytest.mark.slow
def test_eight_bit_floats_fall_back_where_the_architecture_has_none() -> None:
    q, k, v = example(20, 30)
    attend = layer(quant=QuantConfig(pv="fp8"), backend="interpret", arch="sm_80")
    o = attend(q, k, v, 0)
    (reason,) = attend.fallbacks
    assert "need compute capability 8.9" in reason
    assert_same(o, ca.attention(q, k, v, backend="interpret", arch="sm_80"))


def test_the_projection_takes_rows_of_all_heads() -> None:
    q, k, v = example()
    weights = np.random.default_rng(0).standard_normal((HEADS * HEAD_DIM, 24)).astype(np.float16)
    o = layer()(q, k, v, 25)
    rows = o.swapaxes(1, 2).reshape(1, 70, HEADS * HEAD_DIM)
    want = (rows.astype(np.float32) @ weights.astype(np.float32)).astype(np.float16)
    assert_same(layer(out_proj=weights)(q, k, v, 25), want)
    for one in layer(out_proj=weights).fused_cfg(q, q, k, v, 25):
        assert_same(one, want)
    assert layer(out_proj=lambda x: (x.shape, x.dtype))(q, k, v, 25) == (rows.shape, rows.dtype)
    for wrong in (weights.T, 3.0):
        with pytest.raises(ValueError, match=r"num_heads \* head_dim = 64"):
            layer(out_proj=wrong)


def test_block_sizes_reach_the_tiles() -> None:
    q, k, v = example()
    attend = layer(block_q=64, block_k=32)
    for mode, variant in (("balanced", "fa_int8"), ("precision", "fa_tc")):
        own = ca.registry.lookup(variant).default_tiles(HEAD_DIM, "portable")
        tiles = Tiles(64, 32, own.num_warps, own.num_stages)
        given = {"variant": variant, "tiles": tiles}
        assert_same(attend(q, k, v, STEP_OF[mode]), ca.attention(q, k, v, **given))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be 1 or more, got 0"),
        ({"head_dim": 1.5}, TypeError, "head_dim must be a whole number, got 1.5"),
        ({"sigmas": [1.0]}, ValueError, "num_timesteps=50 entries, got shape"),
        ({"sigmas": np.arange(50.0)}, ValueError, "sigmas must not rise"),
        ({"timestep_scales": np.ones(3)}, ValueError, "num_timesteps=50 entries"),
        ({"timestep_scales": np.zeros(50)}, ValueError, "positive and finite"),
        ({"quant": "int8"}, TypeError, "quant must be a cupyattn.QuantConfig"),
        ({"softmax_eps": 0.1}, ca.UnsupportedError, "softmax_eps beyond"),
        ({"softmax_eps": -1.0}, ValueError, "softmax_eps must be 0 or more"),
        ({"block_q": 0}, ValueError, "block_q must be 1 or more"),
        ({"attention_type": "sparse"}, ValueError, "attention_type must be one of"),
        ({"attention_type": "local"}, ValueError, "takes window_size of .*, got neither"),
        ({"window_size": 3}, ValueError, "takes neither of .*, got window_size"),
        ({"attention_type": "local", "window_size": 1.5}, TypeError, "window_size must be a num"),
        ({"attention_type": "local", "window_size": (-1, 3)}, ValueError, "must be 0 or more"),
        ({"attention_type": "block_sparse", "block_mask": 3}, TypeError, "block_mask must be a"),
        ({"block_size": 32}, ValueError, "block_size must be 64 or 128, got 32"),
        ({"pruning_ratio": 1.0}, ValueError, "pruning_ratio must be 0 to less than 1"),
        ({"pruning_rows": 0}, ValueError, "pruning_rows must be 1 or more"),
        ({"pruning_threshold": -1.0}, ValueError, "pruning_threshold must be 0 or more"),
        ({"scale": -1.0}, ValueError, "scale must be positive"),
    ],
)
def test_arguments_are_checked(given, error, said) -> None:
    with pytest.raises(error, match=said):
        ca.Int8Attention(**{"num_heads": 2, "head_dim": 16, "num_timesteps": 50, **given})
    assert layer(softmax_eps=SOFTMAX_EPS_MAX).num_heads == HEADS


def test_a_call_is_checked() -> None:
    q, k, v = example()
    with pytest.raises(ValueError, match=r"num_heads=4 and head_dim=16, got 2 heads of 16"):
        layer()(q[:, :2], k[:, :2], v[:, :2], 0)
    with pytest.raises(TypeError, match="a call may override .*, got 'pruning'"):
        layer()(q, k, v, 0, pruning=True)
    with pytest.raises(ValueError, match="a precision mode must be one of"):
        layer()(q, k, v, 0, mode="fp16")
    with pytest.raises(ValueError, match="'precision' quantises nothing"):
        layer().quant_config(q, k, 0, mode="precision")
    found, _ = calibrated(1)
    with pytest.raises(ValueError, match="is of 2 key heads, got 4"):
        layer(timestep_scales=found)(q, k, v, 0)
    before = [bits(x) for x in (q, k, v)]
    layer(enable_pruning=True).fused_cfg(q, q, k, v, 25)
    assert [bits(x) for x in (q, k, v)] == before


def test_arrays_of_other_libraries_go_back_as_they_came() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = example()
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    o, kept = layer(enable_pruning=True)(*tensors, 25, return_mask=True)
    assert isinstance(o, torch.Tensor) and isinstance(kept, torch.Tensor)
    assert_same(o.numpy(), layer(enable_pruning=True)(q, k, v, 25))
    a, b = layer(out_proj=torch.nn.Linear(64, 8, dtype=torch.float16)).fused_cfg(
        tensors[0], *tensors, 25
    )
    assert a.shape == (1, 70, 8) and torch.equal(a, b)


# ---- the kernels, interpreted --------------------------------------------------------------------


def test_the_kernels_give_two_branches_the_bits_of_two_calls() -> None:
    q, k, v = example(40, 70, heads_kv=2)
    attend = layer(backend="interpret")
    fused = attend.fused_cfg(q, q[:, ::-1].copy(), k, v, 25)
    assert_same(fused[0], attend(q, k, v, 25))
    z = ca.quantize(q, k, v, backend="interpret")
    assert ca.testing.judge(fused[0], q, k, v, variant="fa_int8", quantized=z).passed


def test_the_kernels_take_calibrated_scales_and_pruned_keys(tmp_path: Path) -> None:
    found, at = calibrated(3)
    found.save(tmp_path / "scales.safetensors")
    attend = layer(
        timestep_scales=tmp_path / "scales.safetensors", backend="interpret", enable_pruning=True
    )
    q, k, v = at[25]
    o, kept = attend(q, k, v, 25, return_mask=True)
    by_kv = kept[:, ::2]
    few = [x[by_kv].reshape(1, 2, -1, HEAD_DIM) for x in (k, v)]
    quant = attend.quant_config(q, k, 25)
    z = ca.quantize(q, *few, quant=quant)
    assert ca.testing.judge(o, q, *few, variant="fa_int8", quantized=z).passed
