"""`Int8Attention` on the device: the bits of two calls, kept keys, static scales, no waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.diffusion import MODES, VideoMask, key_importance, pruning
from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.importance_bounds import importance_bound
from cupyattn.diffusion.key_passes import plan_key_importance, row_states_shape, sampled_rows
from cupyattn.diffusion.pruning import compact
from cupyattn.distributions import make
from cupyattn.kernels import ladder
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.runtime import ready
from tests.gpu.support import Captured, guarded
from tests.support.runs import bits

cupy = pytest.importorskip("cupy")

HEADS, STEPS = 4, 50
STEP_OF = {"aggressive": 0, "balanced": 25, "precision": 49}
DTYPES = ("float16", "bfloat16")


def operands(
    len_q: int = 200, len_kv: int = 333, head_dim: int = 64, dtype: str = "float16", seed: int = 0
) -> tuple[Any, ...]:
    found = make("channel-bias", 2, HEADS, len_q, len_kv, head_dim, dtype, seed, 2)
    return tuple(map(cupy.asarray, found))


def reads_once() -> bool:
    """Whether clusters weigh keys here, which read them once."""
    return int(cupy.cuda.Device().compute_capability) == 90


def layer(head_dim: int = 64, **changed: Any) -> Int8Attention:
    return ca.Int8Attention(HEADS, head_dim, STEPS, **changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dense", "local", "block_sparse"])
def test_fused_guidance_equals_two_calls(kind, mode, dtype) -> None:
    given = {} if kind == "dense" else {"attention_type": kind, "window_size": 100}
    attend = layer(**given)
    q, k, v = operands(dtype=dtype)
    other = q[:, ::-1].copy()
    fused = attend.fused_cfg(q, other, k, v, STEP_OF[mode])
    for o, one in zip(fused, (q, other), strict=True):
        assert bits(o) == bits(attend(one, k, v, STEP_OF[mode]))
    assert not attend.fallbacks


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_pruned_is_attention_over_the_keys_that_are_kept(mode, dtype, moved, monkeypatch) -> None:
    if not moved:  # but quantised from where they lie
        monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    attend = layer(enable_pruning=True, pruning_ratio=0.3)
    q, k, v = operands(dtype=dtype)
    o, kept = attend(q, k, v, STEP_OF[mode], return_mask=True)
    by_kv = kept[:, ::2].get()
    few = [cupy.asarray(x.get()[by_kv].reshape(2, 2, -1, 64)) for x in (k, v)]
    if moved or mode == "precision" or not reads_once():
        assert bits(o) == bits(layer()(q, *few, STEP_OF[mode]))
        return
    how = {"scale": None, "rows": pruning.SAMPLE_ROWS, "backend": None, "arch": None}
    importance, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
    few_v, _, places = pruning.compact_values(k, v, importance, few[0].shape[2], backend="cuda")
    quant = attend.quant_config(q, k, STEP_OF[mode], mode=mode)
    z = quantize_at(q, k, few_v, places, QuantizeSettings(quant), sums)
    assert bits(o) == bits(ca.attention(z))
    assert ca.testing.judge(o, q, *few, variant="fa_int8", quantized=z).passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "len_kv", "head_dim"),
    [
        (2, 1, 64), (3, 77, 7), (2, 513, 40), (2, 4096, 128), (3, 6000, 96), (2, 8192, 128),
        (2, 4095, 256), (602, 1000, 128), (301, 4000, 64),
    ],
)  # fmt: skip
def test_keys_are_summed_where_they_are_weighed(heads, len_kv, head_dim, dtype) -> None:
    """Whole numbers, whose sums have one value in any order, up to 9 * 8,192 of them."""
    if not reads_once():
        pytest.skip("keys are read once on compute capability 9.0 alone")
    rng = np.random.default_rng(len_kv)
    numbers = rng.integers(-8, 9, (heads, 1, len_kv, head_dim), dtype=np.int8)
    k = cupy.asarray(numbers.astype(STORAGE[dtype]))
    q = cupy.asarray(np.ones((heads, 2, 50, head_dim), STORAGE[dtype]))  # two chunks of rows
    how = {"scale": 0.01, "rows": 40, "backend": None, "arch": None}
    for _ in range(2):  # the second call is remembered
        importance, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
        np.testing.assert_array_equal(sums.sum(axis=2).get(), numbers.sum(axis=2, dtype=np.int32))
        alone, nothing = pruning.weigh_keys(q, k, **how)
        assert nothing is None and bits(alone) == bits(importance)


@pytest.mark.parametrize(
    "quant",
    [
        ca.QuantConfig(),
        ca.QuantConfig("token", "token", symmetric=False),
        ca.QuantConfig("tensor", "tensor"),
        ca.QuantConfig("block", "block", pv="int8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 128])
def test_codes_with_the_mean_of_all_keys_are_the_mirrors(head_dim, dtype, quant) -> None:
    if not reads_once():
        pytest.skip("keys are read once on compute capability 9.0 alone")
    q, k, v = operands(200, 2100, head_dim, dtype)
    how = {"scale": None, "rows": 32, "backend": None, "arch": None}
    importance, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
    few_v, kept, places = pruning.compact_values(k, v, importance, 1700, backend="cuda")
    tiles = ladder.lookup("fa_int8").default_tiles(head_dim, quant.form)
    given = {"quant": quant, "tiles": tiles}
    found = quantize_at(q, k, few_v, places, QuantizeSettings(**given), sums)
    of_all = k.get().astype(np.float64).mean(axis=2)
    reach = np.abs(k.get().astype(np.float64)).mean(axis=2)
    assert (np.abs(found.k_mean.get() - of_all) <= 2100 * 2.0**-22 * reach).all()
    few_k = k.get()[kept.get()].reshape(2, 2, 1700, head_dim)
    v_mean = None if found.v_mean is None else found.v_mean.get()
    want = quantize_mirror(
        q.get(), few_k, few_v.get(), quant, tiles, k_mean=found.k_mean.get(), v_mean=v_mean
    )
    for field in ("q_codes", "k_codes", "q_scale", "k_scale", "k_zero", "v_codes", "v_scale"):
        one, other = getattr(found, field), getattr(want, field)
        assert one is other is None or bits(one) == bits(other), field


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("len_q", "len_kv", "head_dim", "rows"),
    [
        (200, 333, 64, 32),
        (1, 1, 64, 32),
        (4096, 4096, 128, 32),
        (70, 9001, 80, 70),
        (8, 70, 256, 4),
    ],
)
def test_importance_is_within_its_bound(len_q, len_kv, head_dim, rows, dtype) -> None:
    q, k, _ = operands(len_q, len_kv, head_dim, dtype)
    exact, bound = importance_bound(q.get(), k.get(), scale=head_dim**-0.5, rows=rows)
    for _ in range(2):  # the second call is remembered
        found = key_importance(q, k, rows=rows)
        assert (np.abs(found.get() - exact) <= bound).all()
    assert bits(key_importance(q, k, rows=rows)) == bits(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("len_kv", "head_dim"),
    [
        (1, 64), (77, 128), (513, 7), (1000, 40), (2049, 256), (4095, 128), (4096, 128),
        (4096, 256), (4608, 128), (6000, 64), (8192, 128),
    ],
)  # fmt: skip
def test_keys_read_once_weigh_what_those_read_twice_do(len_kv, head_dim, dtype) -> None:
    """Over NaN and between guards, both within the bound, grouped heads, two chunks of rows."""
    if not reads_once():
        pytest.skip("keys are read once on compute capability 9.0 alone")
    q, k, _ = operands(301, len_kv, head_dim, dtype)
    exact, bound = importance_bound(q.get(), k.get(), scale=head_dim**-0.5, rows=40)
    of_q, of_k, sampled = Operand.of(q), Operand.of(k), sampled_rows(301, 40)
    found = []
    for arch in ("sm_90a", "sm_90a", "sm_90"):
        once = arch == "sm_90a"
        plan = plan_key_importance(of_q, of_k, dtype, head_dim**-0.5, sampled, once)
        assert len(plan.launches) == 2 - once
        result = guarded(k.shape[:3], "float32")
        states = row_states_shape(of_k, q.shape[1] // k.shape[1], len(sampled))
        rows = {name: guarded(states, "float32") for name in ("row_M", "row_l")}
        buffers = {"q": q, "k": k, "importance": result.array}
        ready.run(plan, buffers | {name: x.array for name, x in rows.items()}, arch)
        result.check()
        assert (np.abs(result.array.get() - exact) <= bound).all()
        found.append(bits(result.array))
    assert found[0] == found[1] == bits(key_importance(q, k, rows=40))


@pytest.mark.parametrize("heads", [3, 301, 602])
def test_importance_of_a_head_is_that_of_the_head_alone(heads) -> None:
    """However many heads a cluster takes in turn, and whichever comes after which."""
    q, k = (cupy.random.standard_normal((heads, 1, n, 64)).astype("float16") for n in (64, 4000))
    found = key_importance(q, k)
    assert bits(key_importance(q, k)) == bits(found)
    for head in {0, 1, heads // 2, heads - 2, heads - 1}:
        alone = key_importance(q[head : head + 1], k[head : head + 1])
        assert bits(alone) == bits(found[head : head + 1])
    apart = k.swapaxes(1, 2).copy().swapaxes(1, 2)
    assert bits(key_importance(q, apart)) == bits(found)


def test_float32_keys_are_weighed_by_the_library() -> None:
    q, k, _ = (x.astype(np.float32) for x in operands())
    np.testing.assert_allclose(
        key_importance(q, k).get(), key_importance(q.get(), k.get()), rtol=0.02
    )


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("head_dim", [128, 7, 36, 256])
@pytest.mark.parametrize("kind", ["ties", "close", "not finite"])
def test_keys_are_chosen_and_moved_to_the_bit(kind, head_dim, dtype) -> None:
    rng = np.random.default_rng(head_dim)
    for len_kv, count in ((1, 1), (333, 300), (4096, 3277), (9001, 7)):
        k, v = (
            rng.standard_normal((2, 3, len_kv, head_dim)).astype(np.float32).astype(STORAGE[dtype])
            for _ in range(2)
        )
        choices = np.float32([0, 0.25, 0.25, 1]) if kind == "ties" else rng.random(5000)
        importance = rng.choice(choices, (2, 3, len_kv)).astype(np.float32)
        if kind == "not finite":
            importance[:, 1, ::3], importance[:, 2] = np.inf, np.nan
        want = compact(k, v, importance, count)
        given = [cupy.asarray(x) for x in (k, v, importance)]
        for _ in range(2):  # the second call is remembered
            found = compact(*given, count)
            assert [bits(x) for x in found] == [bits(x) for x in want]
        apart = given[0].swapaxes(1, 2).copy().swapaxes(1, 2)
        assert [bits(x) for x in compact(apart, *given[1:], count)] == [bits(x) for x in want]


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_pruning_by_a_ratio_waits_for_nothing(mode, moved, monkeypatch) -> None:
    if not moved:
        monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    attend = layer(enable_pruning=True, pruning_ratio=0.3)
    q, k, v = operands()
    want = bits(attend(q, k, v, STEP_OF[mode]))
    assert bits(Captured(lambda: attend(q, k, v, STEP_OF[mode])).replay()) == want


@pytest.mark.parametrize("mode", ["aggressive", "balanced"])
def test_calibrated_scales_hold_the_bounds_and_are_the_hosts(mode) -> None:
    q, k, v = operands()
    found, same = (
        ca.calibrate_quantization_scales([(a, b)], of=of)
        for a, b, of in ((q, k, "values"), (q.get(), k.get(), "values"))
    )
    np.testing.assert_array_equal(found.q_scale, same.q_scale)
    assert found.source_hash == same.source_hash
    attend = layer(timestep_scales=found)
    o = attend(q, k, v, 25, mode=mode)
    quant = attend.quant_config(q, k, 25, mode=mode)
    z = ca.quantize(q, k, v, quant=quant)
    assert ca.testing.judge(o, q, k, v, variant="fa_int8", quantized=z).passed


def test_a_video_mask_is_made_on_the_device() -> None:
    rng = np.random.default_rng(0)
    shape = 1, HEADS, 8 * 64, 64
    q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for _ in range(3))
    build = VideoMask((2, 2, 2), (1, 3, 1), 0.7)
    mask = build(q, k)
    assert isinstance(mask.mask, cupy.ndarray)
    differ = mask.mask.get() != build(q.get(), k.get()).mask
    assert differ.mean() < 0.05  # ties and sums of another order
    attend = layer(attention_type="block_sparse", block_mask=mask)
    for mode in MODES:
        o = attend(q, k, v, STEP_OF[mode])
        given = {"block_mask": mask, "mask": None}
        if mode == "precision":
            ca.testing.assert_within_bound(o, q, k, v, variant="fa_tc", **given)
        assert bool(cupy.isfinite(o).all())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_device(mode) -> None:
    """A graph captures both branches of guidance; CuPy lets it capture no matrix product."""
    attend = layer()
    q, k, v = operands()
    want = [bits(o) for o in attend.fused_cfg(q, q[::-1], k, v, STEP_OF[mode])]
    captured = Captured(lambda: attend.fused_cfg(q, q[::-1], k, v, STEP_OF[mode]))
    assert [bits(o) for o in captured.replay()] == want
