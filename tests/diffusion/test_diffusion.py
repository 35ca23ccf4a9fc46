"""`Int8Attention`: the mode of each step, scales, guidance, pruning, sparsity, fallback."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.diffusion import MODES, guided
from cupyattn.diffusion.guidance import split_branches, stack_queries
from cupyattn.distributions import make
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from cupyattn.quant import QuantConfig
from tests.diffusion.diffusion_cases import (
    HEAD_DIM,
    HEADS,
    SAME,
    STEP_OF,
    STEPS,
    assert_same,
    example,
    layer,
    operands,
)  # fmt: skip
from tests.support.runs import bits, normal, rope_tables

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


@pytest.mark.parametrize("mode", MODES)
def test_scale_mask_and_rope_reach_attention(mode) -> None:
    q, k, v = example()
    rng = np.random.default_rng(0)
    tables = rope_tables(130, HEAD_DIM)
    for options in (
        {"mask": rng.random((HEADS, 70, 130)) < 0.6},
        {"rope": tables},
        {"rope": tables, "rope_interleaved": True},
    ):
        want = ca.attention(q, k, v, scale=0.4, **SAME[mode], **options)
        assert_same(layer(scale=0.4)(q, k, v, STEP_OF[mode], **options), want)
        assert bits(want) != bits(ca.attention(q, k, v, scale=0.4, **SAME[mode]))


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
        (False, None, np.float32(1)),
    ):
        attend = layer(quant=quant, timestep_scales=table, use_adaptive_scaling=adaptive)
        scales = per_head * factor, float(0.05 * float(factor))
        of_values = None if pv == "16bit" else "channel"
        want = QuantConfig("head", "tensor", of_values, pv=pv, scales=scales)
        assert_same(attend(*qkv, 20, mode=mode), ca.attention(*qkv, variant="fa_int8", quant=want))


def test_factors_change_nothing_where_scales_are_dynamic() -> None:
    qkv = example()
    with pytest.warns(UserWarning, match="timestep_scales has no effect"):
        attend = layer(timestep_scales=np.linspace(9, 1, STEPS))
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
        for plan in plans(resolved(q, k, v, variant="fa_int8", quant=quant))
        for launch in plan.launches
    ]
    assert entries == ["quantize", "attn_fa_int8"]
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
        own = lookup(variant).default_tiles(HEAD_DIM, "portable")
        tiles = Tiles(64, 32, own.num_warps, own.num_stages)
        given = {"variant": variant, "tiles": tiles}
        assert_same(attend(q, k, v, STEP_OF[mode]), ca.attention(q, k, v, **given))


def test_tiles_of_few_rows_have_few_warps() -> None:
    q, k, v = example()
    o = layer(block_q=32)(q, k, v, STEP_OF["precision"])
    own = lookup("fa_tc").default_tiles(HEAD_DIM, "portable")
    tiles = Tiles(32, own.block_kv, 2, own.num_stages)
    assert_same(o, ca.attention(q, k, v, variant="fa_tc", tiles=tiles))
    with pytest.raises(ValueError, match="multiple of 16"):
        layer(block_q=24)


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
        ({"softmax_eps": 1e-6}, ca.UnsupportedError, "softmax_eps=1e-06 is not supported: a sum"),
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
    assert layer(softmax_eps=0).num_heads == HEADS


def test_a_call_is_checked() -> None:
    q, k, v = example()
    with pytest.raises(ValueError, match=r"num_heads=4 and head_dim=16, got 2 heads of 16"):
        layer()(q[:, :2], k[:, :2], v[:, :2], 0)
    with pytest.raises(TypeError, match="argument 'pruning': a call may override "):
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


@pytest.mark.frameworks
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


# ---- norms and positions -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_the_layer_normalise_in_every_mode(mode: str) -> None:
    """The bits of the call that a mode is, guidance branches with weights by head included."""
    q, k, v = normal((1, HEADS, 40, HEAD_DIM), (1, 2, 50, HEAD_DIM))
    rng = np.random.default_rng(3)
    weights = tuple(rng.uniform(0.5, 2, (n, HEAD_DIM)).astype(np.float32) for n in (HEADS, 2))
    own = {"qk_norm": weights, "qk_norm_eps": 1e-3}
    attend = ca.Int8Attention(HEADS, HEAD_DIM, 50, **own)
    tables = rope_tables(50, HEAD_DIM)
    o = attend(q, k, v, 0, mode=mode, rope=tables)
    assert not attend.fallbacks
    if mode == "precision":
        expected = ca.attention(q, k, v, rope=tables, **own)
    else:
        quant = attend.quant_config(q, k, 0, mode=mode)
        expected = ca.attention(q, k, v, variant="fa_int8", quant=quant, rope=tables, **own)
    assert bits(o) == bits(expected)
    both = attend.fused_cfg(q, q[:, ::-1], k, v, 0, mode=mode, rope=tables)
    other = attend(np.ascontiguousarray(q[:, ::-1]), k, v, 0, mode=mode, rope=tables)
    assert bits(both[0]) == bits(o) and bits(both[1]) == bits(other)
    assert bits(o) != bits(attend(q, k, v, 0, mode=mode))
    with pytest.raises(ca.UnsupportedError, match="no mask, no rope and no qk_norm: normalise"):
        attend(q, k, v, 0, enable_pruning=True)


def test_a_norm_of_all_heads_goes_with_keys_of_each_branch() -> None:
    q, k, v = normal((1, HEADS, 40, HEAD_DIM), (1, 2, 50, HEAD_DIM))
    rng = np.random.default_rng(3)
    weights = tuple(rng.uniform(0.5, 2, n * HEAD_DIM).astype(np.float32) for n in (HEADS, 2))
    attend = ca.Int8Attention(HEADS, HEAD_DIM, 50, qk_norm=weights)
    o = attend(q, k, v, 0, mode="balanced")
    quant = attend.quant_config(q, k, 0, mode="balanced")
    expected = ca.attention(q, k, v, variant="fa_int8", quant=quant, qk_norm=weights)
    assert bits(o) == bits(expected) and not attend.fallbacks
    of_each = (np.concatenate((x, x)) for x in (k, v))
    both = attend.fused_cfg(q, q, *of_each, 0, mode="balanced")
    assert bits(both[0]) == bits(both[1]) == bits(o)
    with pytest.raises(ca.UnsupportedError, match=r"got \(64,\): give k and v of both branches"):
        attend.fused_cfg(q, q, k, v, 0, mode="balanced")


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "call", "message"),
    [
        (
            "guidance.stack_queries", lambda a, q, k, v: a.fused_cfg(q, q, k, v, 3),
            r"fused_cfg needs 10,240 bytes beside its operands, 10,240 of them for 'q of both bra",
        ),
        (
            "pruning.compact", lambda a, q, k, v: a(q, k, v, 3, enable_pruning=True),
            r"token pruning needs 19,200 bytes .* 12,800 of them for 'weights of the keys', and mo",
        ),
    ],
)  # fmt: skip
def test_copies_that_do_not_fit_say_how_much_they_need(place, call, message, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    q, k, v = normal((1, 2, 40, 32), (1, 1, 50, 32))
    monkeypatch.setattr(f"cupyattn.diffusion.{place}", full)
    with pytest.raises(ca.DeviceMemoryError, match=message):
        call(ca.Int8Attention(2, 32, 50), q, k, v)


def test_a_call_within_says_more(monkeypatch) -> None:
    """Memory that the call of attention itself lacks is not attributed to the moved keys."""

    def full(*_: object, **__: object) -> None:
        raise ca.DeviceMemoryError("more")

    monkeypatch.setattr("cupyattn.diffusion.kept_keys.attention", full)
    with pytest.raises(ca.DeviceMemoryError, match="^more$"):
        ca.Int8Attention(2, 32, 50)(*normal((1, 2, 40, 32), (1, 1, 50, 32)), 3, enable_pruning=True)
