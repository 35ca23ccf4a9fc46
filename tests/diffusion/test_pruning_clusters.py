"""Importance of keys that are read once: bound, bits, faults, chosen keys, and the host's part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.diffusion import key_importance, key_passes, pruning
from cupyattn.diffusion.importance_bounds import importance_bound
from cupyattn.diffusion.key_passes import cluster_tiles, reads_keys_once
from cupyattn.diffusion.pruning import compact
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import KernelFault, Profile, observe
from cupyattn.kernels import ladder
from cupyattn.ops import quantize as operand_maker
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from cupyattn.plans import quantize
from cupyattn.reference.quantize import quantize_mirror
from tests.diffusion.test_pruning_kernels import BF16, F16, check_importance, operands
from tests.faults.fault_patches import put_a_line_in_place
from tests.support import runs
from tests.support.marks import slow_unless

ONCE: dict[str, Any] = {"backend": "interpret", "arch": "sm_90a"}
TWICE: dict[str, Any] = {"backend": "interpret"}


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clusters take several heads in turn, however few there are."""
    monkeypatch.setattr(key_passes, "_WAVES_OF_BLOCKS", 1)
    key_passes.plan_key_importance.cache_clear()
    yield
    key_passes.plan_key_importance.cache_clear()


#: Batch, query and key heads, lengths, head size, type, rows, scale, and the blocks of a cluster.
CASES: dict[str, tuple[Any, ...]] = {
    "one key": (2, (2, 2), (70, 1), 7, F16, 64, None, 1),
    "groups, odd lengths": (1, (6, 2), (33, 77), 40, BF16, 41, None, 1),
    "two blocks, five heads": (1, (5, 5), (9, 1000), 64, F16, 8, None, 2),
    "most of their places empty": (1, (1, 1), (5, 2049), 16, F16, 4, None, 8),
    "all places but one": (1, (1, 1), (64, 4095), 16, F16, 32, None, 8),
    "blocks of nine warps": (1, (1, 1), (5, 4608), 8, F16, 4, None, 8),
    "wide rows": (1, (2, 1), (5, 600), 160, BF16, 4, None, 2),
    "a scale below zero": (3, (1, 1), (1, 257), 24, F16, 1, -0.3, 1),
    "no scale": (1, (1, 1), (40, 129), 16, F16, 32, 0.0, 1),
    "peaks": (1, (2, 2), (64, 530), 16, F16, 16, 30.0, 2),
}
SLOW = ("blocks of nine warps", "wide rows", "no scale", "most of their places empty")


@pytest.mark.parametrize("case", slow_unless(lambda _, c: c not in SLOW, CASES))
def test_keys_that_are_read_once_are_within_the_bound(case: str, in_turn: None) -> None:
    batch, heads, lengths, head_dim, dtype, rows, scale, blocks = CASES[case]
    q, k = operands(heads, lengths, head_dim, dtype, batch)
    assert cluster_tiles(lengths[1], head_dim)[1] == blocks
    found, _, bound = check_importance(q, k, scale, rows, **ONCE)
    other = key_importance(q, k, scale=scale, rows=rows, **TWICE)
    assert (np.abs(found - other) <= 2 * bound).all()


def test_what_is_read() -> None:
    """K once and the rows in each block: the two kernels read both twice."""
    q, k = operands((1, 1), (32, 1024), 64)
    read = []
    for how in (ONCE, TWICE):
        profile = Profile()
        with observe(profile):
            key_importance(q, k, **how)
        read.append(profile.traffic["global", "load"])
    assert read[0] == k.nbytes + 2 * q.nbytes
    assert read[1] >= 2 * k.nbytes


def test_how_many_heads_come_in_turn_changes_no_bit(request: pytest.FixtureRequest) -> None:
    q, k = operands((6, 3), (40, 90), 16, batch=3)
    alone = key_importance(q, k, **ONCE)
    launch = planned(k, k).launches[0]
    assert (launch.grid, launch.params[0][1]["turns"]) == (9, 1)
    request.getfixturevalue("in_turn")
    launch = planned(k, k).launches[0]
    assert (launch.grid, launch.params[0][1]["turns"]) == (3, 4)  # 4, 4 and 1
    assert key_importance(q, k, **ONCE).tobytes() == alone.tobytes()


def planned(q: np.ndarray, k: np.ndarray, arch: str | None = "sm_90a") -> Any:
    sampled = key_passes.sampled_rows(q.shape[2], 32)
    of_q, of_k = Operand.of(q), Operand.of(k)
    once = reads_keys_once(of_k, arch)
    return key_passes.plan_key_importance(of_q, of_k, k.dtype.name, 0.25, sampled, once)


def test_any_strides_of_q_and_k() -> None:
    q, k = operands((2, 2), (20, 40), 16)
    want = key_importance(q, k, rows=8, **ONCE)
    for name, view in (
        ("embedded", lambda x: runs.embedded(x, 3)),
        ("BSHD", lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2)),
        ("backwards", lambda x: x[:, :, ::-1].copy()[:, :, ::-1]),
        ("last axis apart", lambda x: np.repeat(x, 2, axis=3)[..., ::2]),
    ):
        found = key_importance(view(q), view(k), rows=8, **ONCE)
        assert found.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_makes_its_head_important(value: float, in_turn: None) -> None:
    q, k = operands((4, 2), (10, 60), 16)
    k[0, 0, 7, 3] = value
    q[:, :2, :, 3] = 1
    with np.errstate(invalid="ignore"):
        found = key_importance(q, k, rows=8, **ONCE)
    assert np.isnan(found[0, 0]).all() and not np.isnan(found[0, 1]).any()


# ---- sums of keys --------------------------------------------------------------------------------


def whole_numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Numbers whose sums have one value in whatever order, about 2 in every other column."""
    rng = np.random.default_rng(5)
    return (rng.integers(-8, 9, shape) + np.arange(shape[3]) % 2 * 2).astype(dtype)


#: Batch, query and key heads, keys, head size, type and rows.
SUMS: dict[str, tuple[Any, ...]] = {
    "one key": (2, (2, 2), 1, 7, F16, 8),
    "groups, two chunks": (1, (4, 2), 77, 40, BF16, 41),
    "two blocks, three heads": (1, (3, 3), 1000, 128, F16, 8),
    "most places empty": (1, (1, 1), 2049, 16, F16, 4),
    "two fragments": (1, (1, 1), 600, 160, BF16, 4),
    "the widest": (1, (1, 1), 70, 256, F16, 4),
}


@pytest.mark.parametrize("case", slow_unless(lambda _, c: c not in list(SUMS)[3:5], SUMS))
def test_keys_are_summed_where_they_are_weighed(case: str, in_turn: None) -> None:
    batch, heads, len_kv, head_dim, dtype, rows = SUMS[case]
    q, _ = operands(heads, (60, 1), head_dim, dtype, batch)
    k = whole_numbers((batch, heads[1], len_kv, head_dim), dtype)
    how: dict[str, Any] = {"scale": 0.01, "rows": rows, **ONCE}
    importance, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
    assert sums is not None and sums.shape == key_passes.key_sums_shape(Operand.of(k))
    exact = k.astype(np.float32).sum(axis=2)
    np.testing.assert_array_equal(sums.sum(axis=2), exact)
    assert runs.bits(importance) == runs.bits(key_importance(q, k, **how))


def test_sums_of_a_block_are_those_of_its_keys() -> None:
    k = whole_numbers((1, 2, 1000, 24), F16)
    _, sums = pruning.weigh_keys(k, k, scale=0.01, rows=8, key_sums=True, **ONCE)
    assert sums is not None and cluster_tiles(1000, 24)[0].block_kv == 512
    for block, keys in enumerate((k[:, :, :512], k[:, :, 512:])):
        np.testing.assert_array_equal(sums[:, :, block], keys.astype(np.float32).sum(axis=2))


def test_keys_read_twice_are_not_summed() -> None:
    q, k = operands((1, 1), (8, 60), 16)
    for how in (TWICE, {"backend": "mirror"}):
        given: dict[str, Any] = {"scale": None, "rows": 4, "arch": None, **how}
        _, sums = pruning.weigh_keys(q, k, key_sums=True, **given)
        assert sums is None


@pytest.mark.parametrize(
    ("dtype", "quant", "spared"),
    [
        (F16, ca.QuantConfig(), True),
        (BF16, ca.QuantConfig("token", "token", symmetric=False), True),
        pytest.param(F16, ca.QuantConfig("tensor", "tensor"), True, marks=pytest.mark.slow),
        pytest.param(F16, ca.QuantConfig("head", "head"), False, marks=pytest.mark.slow),
        pytest.param(F16, ca.QuantConfig(smooth_k=False), False, marks=pytest.mark.slow),
        pytest.param(F16, ca.QuantConfig(pv="int8", smooth_v=True), True, marks=pytest.mark.slow),
        pytest.param(
            F16, ca.QuantConfig("head", "head", scales=(np.full((1, 1, 1), 0.2, np.float32),) * 2),
            True, marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_codes_with_the_mean_of_all_keys(dtype: Any, quant: Any, spared: bool) -> None:
    """They equal the mirror with the same mean bit for bit; attention is within its bound."""
    q, _ = operands((4, 2), (12, 1), 24, dtype)
    k, v = (whole_numbers((1, 2, 600, 24), dtype) for _ in range(2))
    how: dict[str, Any] = {"scale": 0.01, "rows": 8, **ONCE}
    importance, sums = pruning.weigh_keys(q, k, **how, key_sums=True)
    few_v, _, places = pruning.compact_values(k, v, importance, 470, backend="interpret")
    few_k, _, _ = compact(k, v, importance, 470)
    given: dict[str, Any] = {"quant": quant, "backend": "interpret"}
    found = quantize_at(q, k, few_v, places, QuantizeSettings(**given), sums)
    of_all = k.astype(np.float32).sum(axis=2) / np.float32(600)
    if quant.smooth_k:
        assert found.k_mean is not None
        assert (runs.bits(found.k_mean) == runs.bits(of_all)) == spared
    moved = ca.quantize(q, few_k, few_v, **given)
    want = quantize_mirror(
        q, few_k, few_v, quant, ladder.lookup("fa_int8").default_tiles(24, quant.form),
        k_mean=found.k_mean, v_mean=found.v_mean,
    )  # fmt: skip
    for field in ("q_codes", "k_codes", "q_scale", "k_scale", "k_zero", "k_mean", "v_codes"):
        one, other = getattr(found, field), getattr(want, field)
        assert one is other is None or runs.bits(one) == runs.bits(other), field
    if not spared:
        assert runs.bits(found.k_codes) == runs.bits(moved.k_codes)
    o = ca.attention(found, backend="interpret")
    judged = ca.testing.judge(o, q, few_k, few_v, variant="fa_int8", quantized=found)
    assert judged.passed, str(judged)


def test_a_sum_that_is_not_finite_takes_no_mean() -> None:
    """It affects the columns that share a row with its own; no other head is affected."""
    q, k = operands((2, 2), (8, 60), 40)
    k[0, 0, 7, 3] = np.inf
    with np.errstate(invalid="ignore"):
        _, sums = pruning.weigh_keys(q, k, scale=None, rows=4, key_sums=True, **ONCE)
    assert sums is not None
    finite = np.isfinite(sums[0, :, 0])
    assert finite[1].all()
    np.testing.assert_array_equal(~finite[0], np.arange(40) % 16 == 3)


@pytest.mark.parametrize("mode", ["balanced", pytest.param("precision", marks=pytest.mark.slow)])
def test_a_layer_reads_the_kept_keys_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = operands((4, 2), (12, 90), 16)
    entries: list[str] = []
    own = quantize.plan_quantize
    monkeypatch.setattr(
        operand_maker, "plan_quantize",
        lambda *given, **named: (
            plan := own(*given, **named), entries.extend(one.entry for one in plan.launches)
        )[0],
    )  # fmt: skip
    asked: list[bool] = []
    plan_weighing = pruning.plan_key_importance
    monkeypatch.setattr(
        pruning,
        "plan_key_importance",
        lambda *given: (asked.append(given[-1]), plan_weighing(*given))[1],
    )
    attend = ca.Int8Attention(4, 16, 50, enable_pruning=True, **ONCE)
    moved = attend(q, k, k, 25, mode=mode)
    monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    stayed = attend(q, k, k, 25, mode=mode)
    assert not attend.fallbacks
    if mode == "precision":
        assert runs.bits(moved) == runs.bits(stayed) and asked == [False, False] and not entries
        return
    assert asked == [False, True]
    assert entries == ["quantize"]  # and no launch for the mean
    importance, sums = pruning.weigh_keys(q, k, scale=None, rows=32, key_sums=True, **ONCE)
    few, _, places = pruning.compact_values(k, k, importance, 72, backend="interpret")
    quant = attend.quant_config(q, k, 25)
    z = quantize_at(q, k, few, places, QuantizeSettings(quant, **ONCE), sums)
    assert runs.bits(stayed) == runs.bits(ca.attention(z, **ONCE))
    assert ca.testing.judge(stayed, q, few, few, variant="fa_int8", quantized=z).passed
    assert runs.bits(moved) != runs.bits(stayed)  # another mean


# ---- which keys, and where -----------------------------------------------------------------------


def test_which_keys_are_read_once() -> None:
    for head_dim, most in ((7, 8192), (128, 8192), (136, 4096), (256, 4096)):
        fits, beyond = (Operand.contiguous((1, 2, n, head_dim), 2) for n in (most, most + 1))
        assert reads_keys_once(fits, "sm_90a") and not reads_keys_once(beyond, "sm_90a")
        for arch in (None, "sm_80", "sm_90", "sm_100"):
            assert not reads_keys_once(fits, arch)
    k = np.zeros((1, 2, 90, 16), F16)
    entries = [[one.entry for one in planned(k, k, arch).launches] for arch in ("sm_90a", "sm_90")]
    assert entries == [["key_importance"], ["row_statistics", "key_importance"]]


def test_a_cluster_has_room_for_every_key_and_no_block_too_many() -> None:
    for length in range(1, 8193):
        tiles, blocks = cluster_tiles(length, 64)
        assert (tiles.block_kv, blocks in (1, 2, 4, 8)) == (64 * tiles.num_warps, True)
        assert length <= blocks * tiles.block_kv and tiles.num_warps <= 16
        assert blocks == 1 or length > blocks // 2 * 512  # fewer would not do


def test_a_layer_passes_its_architecture_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    own = pruning.plan_key_importance
    monkeypatch.setattr(
        pruning, "plan_key_importance", lambda *given: (asked.append(given[5]), own(*given))[1]
    )
    q, k = operands((4, 2), (12, 40), 16)
    for arch in ("sm_90a", None):
        attend = ca.Int8Attention(4, 16, 50, backend="interpret", arch=arch, enable_pruning=True)
        _, kept = attend(q, k, k, 25, mode="precision", return_mask=True)
        assert kept.sum() == 4 * 32
    assert asked == [True, False]  # whether keys are read once


def test_more_heads_than_blocks_are_counted_are_refused() -> None:
    k = Operand((2**16, 2**15, 4096, 8), (0, 0, 0, 1), 2, 0)
    with pytest.raises(UnsupportedError, match="key_importance takes 17179869184 blocks"):
        key_passes.plan_key_importance(k, k, "float16", 1.0, range(8), once=True)


# ---- the tests are tested ------------------------------------------------------------------------

#: Line, what stands for it, and what the interpreter says: "" where the numbers are wrong.
THEFTS = {
    "barrier of the rows": ("__syncthreads();  // the rows that all warps", "; //", "race"),
    "barrier of the warps": ("__syncthreads();  // the states of all warps", "//", "race"),
    "release of the states": ("      cluster_arrive();", "      cluster_arrive_relaxed();", "race"),
    "barrier at the end": ("cluster_sync();  // no block reads this block's", "//", "race"),
    "one place for states": ("smem.of_block[turn][row]", "smem.of_block[0][row]", "race"),
    "keys that are not there": ("group<NUM_STAGES - 1>", "group<NUM_STAGES>", "in flight"),
    "rows that are not there": ("cp_async_wait_group<0>", "cp_async_wait_group<1>", "in flight"),
    "keys past the end": ("if (own_key + WARP_KV > p.len_kv)", "if (false)", ""),
    "rows past the end": ("row < item.rows(p)", "true", ""),
    "own block alone": ("load_from_block(of_block, rank)", "load_from_block(of_block, 0)", ""),
    "chunks not added": ("(item.chunk == 0 ? 0.0f : importance[key])", "0.0f", ""),
    "maximum of the warp": ("* ex2_approx_ftz(M_warp - all.M_finite())", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda i, _: not i % 3, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place("pruning/sm90/key_importance.cu", line, instead, tmp_path, monkeypatch)
    q, k = operands((2, 1), (40, 550), 16)
    exact, bound = importance_bound(q, k, scale=0.25, rows=40)
    try:
        found = key_importance(q, k, rows=40, **ONCE)
    except KernelFault as fault:
        assert finding and finding in str(fault)
    else:
        assert not finding and not (np.abs(found - exact) <= bound).all()


#: The same of sums.
SUM_THEFTS = {
    "ones in every column": ("lane_id() / 4 == n % 8 ?", "true ?", ""),
    "one warp alone": ("of_warp[warp][i][lane_id()]", "of_warp[0][i][lane_id()]", ""),
    "one place for blocks": ("* CLUSTER + blockIdx.x % CLUSTER)", "* CLUSTER)", "race"),
    "barrier of the warps": ("__syncthreads();  // the states of all warps", "//", "race"),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda i, _: not i, SUM_THEFTS))
def test_a_line_less_of_the_sums_is_found(
    theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, instead, finding = SUM_THEFTS[theft]
    put_a_line_in_place("pruning/sm90/key_importance.cu", line, instead, tmp_path, monkeypatch)
    k = whole_numbers((1, 1, 600, 40), F16)
    try:
        _, sums = pruning.weigh_keys(k, k, scale=0.01, rows=8, key_sums=True, **ONCE)
    except KernelFault as fault:
        assert finding and finding in str(fault)
    else:
        assert sums is not None and not finding
        assert (sums.sum(axis=2) != k.astype(np.float32).sum(axis=2)).any()


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "len_kv"),
    [(F16, 128, 4096), *(pytest.param(*c, marks=pytest.mark.slow) for c in (
        (BF16, 64, 4096), (F16, 256, 4096), (BF16, 128, 4608), (F16, 128, 8192), (F16, 7, 77)))],
    ids=str,
)  # fmt: skip
def test_no_launch_spills(dtype: Any, head_dim: int, len_kv: int) -> None:
    k = Operand.contiguous((16, 32, len_kv, head_dim), 2)
    sampled = key_passes.sampled_rows(len_kv, 32)
    given = k, k, dtype.name, 0.1, sampled, True
    for key_sums in (False, True):
        (one,) = key_passes.plan_key_importance(*given, key_sums).launches
        binary = kc.build(one.module, "sm_90a")
        taken = binary.kernels["key_importance"]
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), str(taken)
        devices.check_shared_memory(binary.smem_bytes, 227 * 1024, one.entry)
        if one.block <= 256 and head_dim <= 128:  # two blocks to a multiprocessor
            assert taken.registers <= 128 and binary.smem_bytes <= 113 * 1024
