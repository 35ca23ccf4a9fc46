"""Keys to which `Int8Attention` attends: token pruning, windows, block masks, masks for video."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.diffusion import MODES, VideoMask, block_order, key_importance, top_cdf
from cupyattn.diffusion import pruning as prune
from cupyattn.diffusion.video import block_probabilities, window_3d
from cupyattn.ops.explain import kernel_form
from tests.diffusion.diffusion_cases import (
    HEAD_DIM,
    HEADS,
    SAME,
    STEP_OF,
    assert_same,
    example,
    layer,
    operands,
)  # fmt: skip
from tests.support import runs

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
    for rows, every in ((40, 1), (39, 2), (1000, 1), (1, 40)):  # even, to the last rows
        few = q[:, :, (every - 1) // 2 :: every]
        assert_same(key_importance(q, k, rows=rows), key_importance(few, k, rows=few.shape[2]))


def test_importance_is_of_the_scale_of_the_call() -> None:
    q, k, v = example()
    _, kept = layer(scale=2.0, enable_pruning=True)(q, k, v, 25, return_mask=True)
    importance = key_importance(q, k, scale=2.0)
    np.testing.assert_array_equal(kept, prune.compact(k, v, importance, 104)[2])
    assert runs.bits(kept) != runs.bits(prune.compact(k, v, key_importance(q, k), 104)[2])


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
    with pytest.raises(ca.UnsupportedError, match="requires attention_type='dense', got 'local'"):
        layer(attention_type="local", window_size=8, enable_pruning=True)
    with pytest.raises(ca.UnsupportedError, match="no mask, no rope and no qk_norm"):
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
    assert (total >= mass - 1e-5).all()  # of 30 float32 numbers
    least = np.where(kept, p, np.inf).min(axis=1)
    assert (total - least < mass + 1e-5).all() and (np.where(kept, 0, p).max(axis=1) <= least).all()


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
