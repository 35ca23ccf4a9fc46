"""The split form of fa_tc: a few query rows, many keys, slices of them and their merge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import BlockMask, Tiles, attention, attention_varlen, explain, interpret, plan
from cupyattn.arrays.kinds import as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.distributions import make
from cupyattn.interpret import executor
from cupyattn.kernels import splits  # fmt: skip
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.problem.checks import check_limits
from cupyattn.problem.form import module_spec
from cupyattn.problem.settings import check_attention
from cupyattn.reference.exact import attention_exact
from cupyattn.testing.verdict import judge
from tests.support import runs
from tests.support.planned import plan_attention
from tests.support.runs import SPILLED_SPLIT, Run, bits

BACKENDS = ("mirror", "interpret")
#: batch, heads, heads_kv, len_q, len_kv, head_dim, dtype, options
CELLS: tuple[tuple[Any, ...], ...] = (
    (1, 4, 1, 1, 530, 24, "float16", {}),
    (2, 6, 2, 7, 600, 40, "bfloat16", {"causal": True}),
    (1, 2, 2, 16, 513, 7, "float16", {"window": (300, 3), "causal_align": "top-left"}),
    (1, 2, 1, 3, 700, 128, "bfloat16", {"window": (130, 0)}),
    (1, 1, 1, 2, 512, 256, "float16", {"causal": True, "causal_align": "top-left"}),
    (1, 2, 1, 5, 520, 64, "float16", {"window": (200, 100), "causal_align": "top-left"}),
    (1, 40, 1, 1, 576, 64, "float16", {"causal": True}),
)
#: The same with more rows than a warp of 16 has: which tiles take them. Rows that fill no tile, an
#: odd number of slices for blocks of two, two tiles of rows.
WIDE_CELLS: tuple[tuple[tuple[Any, ...], Tiles], ...] = (
    ((1, 4, 2, 11, 530, 40, "float16", {"causal": True}), Tiles(32, 32, 4, 3)),
    ((1, 2, 1, 16, 512, 128, "bfloat16", {}), Tiles(32, 16, 4, 3)),
    ((1, 3, 1, 13, 600, 128, "float16", {"causal": True}), Tiles(64, 16, 4, 4)),
    ((1, 5, 1, 16, 520, 64, "bfloat16", {"window": (300, 3)}), Tiles(128, 64, 4, 4)),
    ((1, 8, 1, 15, 516, 128, "float16", {"window": (400, 0)}), Tiles(128, 16, 4, 8)),
    ((1, 9, 1, 15, 540, 24, "float16", {"causal": True}), Tiles(128, 64, 4, 4)),
    ((1, 3, 1, 7, 512, 256, "float16", {}), Tiles(32, 16, 2, 4)),
    ((1, 4, 1, 13, 520, 136, "float16", {"causal": True}), Tiles(64, 16, 4, 4)),
)
AT_ONCE = [
    pytest.param(*cell, marks=[] if number in (0, 2, 4) else pytest.mark.slow)
    for number, cell in enumerate(WIDE_CELLS)
]
SPLIT = VARIANTS["fa_tc"].forms["split"].tiles
ALL_TILES = [
    (head_dim, tiles)
    for head_dim, first in SPLIT.default.items()
    for tiles in (first, *SPLIT.more_rows[head_dim])
]


def inputs_of(
    batch: int, heads: int, heads_kv: int, len_q: int, len_kv: int, head_dim: int, dtype: str
) -> tuple[Any, Any, Any]:
    return make("normal", batch, heads, len_q, len_kv, head_dim, dtype, 0, heads_kv)


def run(cell: tuple[Any, ...], backend: str) -> Run:
    *sizes, options = cell
    one = runs.run("fa_tc", inputs_of(*sizes), backend=backend, **options)
    assert one.form == "split"
    return one


# ---- the slices ----------------------------------------------------------------------------------


@given(
    st.integers(1, 300), st.integers(1, 16), st.integers(1, 16), st.integers(1, 16),
    st.integers(1, 5000), st.integers(-1, 5000), st.integers(-1, 5000), st.booleans(),
    st.sampled_from(["bottom-right", "top-left"]),
    st.sampled_from(ALL_TILES),
)  # fmt: skip
def test_every_admitted_key_is_in_one_slice(
    batch: int, heads_kv: int, group: int, len_q: int, len_kv: int, left: int, right: int,
    causal: bool, align: str, of_head_dim: tuple[int, Tiles],
) -> None:  # fmt: skip
    head_dim, tiles = of_head_dim
    limits = check_limits(causal, align, (left, right), len_q, len_kv)
    cut = splits.split((batch, heads_kv * group, heads_kv, len_q, len_kv, head_dim), limits, tiles)
    ranges = list(cut.ranges())
    assert len(ranges) == cut.slices >= 1
    keys = np.concatenate([np.arange(*r) for r in ranges])
    assert (np.diff(keys) == 1).all() and keys.size <= len_kv
    first, last = limits
    begin = 0 if first is None else max(0, first)
    end = len_kv if last is None else min(len_kv, len_q + last)
    assert not keys.size or (keys[0] >= 0 and keys[-1] < len_kv)
    assert set(range(begin, end)) <= set(keys.tolist())
    assert all(begin % tiles.block_kv == 0 for begin, _ in ranges)
    assert all(end > begin for begin, end in ranges) or cut.slices == 1
    assert cut.slice_keys >= min(4 * tiles.block_q, 256)
    own = batch * heads_kv * -(-group * len_q // tiles.block_q)
    blocks = -(-cut.slices // splits.block_slices(tiles, head_dim)) * own
    assert blocks <= max(own, splits.BLOCKS)


def test_the_tiles_of_a_call_follow_from_its_rows() -> None:
    """Up to 16 rows they are what they were; no form but this one has an eye for rows."""
    variant = VARIANTS["fa_tc"]
    first = {64: Tiles(16, 32, 4, 3), 128: Tiles(16, 16, 4, 3), 256: Tiles(16, 16, 2, 3)}
    for head_dim, more in SPLIT.more_rows.items():
        rising = SPLIT.default[head_dim], *more
        assert rising[0] == first[head_dim] == variant.default_tiles(head_dim, "split")
        sizes = [tiles.block_q for tiles in rising]
        assert sizes == sorted(set(sizes))
        for rows in (*range(1, 130), 1000):
            found = variant.tiles_for(head_dim, form="split", rows=rows)
            fits = [size for size in sizes if size >= rows]
            assert found.block_q == (min(fits) if fits else max(sizes))
            assert variant.tiles_for(head_dim, rows=rows) == variant.default_tiles(head_dim)
        own = Tiles(32, 64, 4, 2)
        assert variant.tiles_for(head_dim, own, form="split", rows=99) == own


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        pytest.param(*cell, marks=[] if cell[1].block_q == 64 else pytest.mark.slow)
        for cell in ALL_TILES
    ],
)
def test_warps_share_slices_as_the_plan_says(head_dim: int, tiles: Tiles) -> None:
    """The kernel has stages for as many slices; what Q and O need is left in its registers."""
    for dtype, causal, arch in (("float16", True, "sm_90"), ("bfloat16", False, "sm_80")):
        features = Features(dtype, head_dim, causal, lse=True, vec=8, window=causal)
        binary = kc.build(module_spec(VARIANTS["fa_tc"], features, tiles, "split"), arch)
        at_once = splits.block_slices(tiles, head_dim)
        stages = at_once * tiles.num_stages * tiles.block_kv * head_dim * 2 * 2
        parts = at_once * tiles.block_q * (head_dim + 8 + 2) * 4
        assert binary.smem_bytes == -(-max(stages, parts) // 128) * 128
        (taken,) = binary.kernels.values()
        allowed = 0 if tiles.block_q == 16 else SPILLED_SPLIT
        assert max(taken.spill_stores, taken.spill_loads) <= allowed, taken


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_results_are_within_their_bound(cell: tuple[Any, ...], backend: str) -> None:
    one = run(cell, backend)
    report = one.check()
    assert report.tightness < 0.1, "the bound says little"
    assert report.lse_ratio is not None and report.lse_ratio <= 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("cell", "tiles"), AT_ONCE, ids=str)
def test_more_rows_are_within_their_bound(
    cell: tuple[Any, ...], tiles: Tiles, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "NARROW_BLOCKS", 0)  # these have few heads
    *sizes, options = cell
    inputs = inputs_of(*sizes)
    assert plan(*inputs, variant="fa_tc", backend=backend, **options).plans[-1].tiles == tiles
    report = run(cell, backend).check()
    assert report.lse_ratio is not None and report.lse_ratio <= 1


@pytest.mark.parametrize("cell", CELLS[:2], ids=str)
def test_the_bound_notices_a_lost_slice(cell: tuple[Any, ...]) -> None:
    *sizes, options = cell
    q, k, v = inputs_of(*sizes)
    o = attention_exact(q, k, v, **options)
    assert judge(o, q, k, v, variant="fa_tc", form="split", **options).passed
    keep = np.ones(k.shape[2], bool)
    keep[128:192] = False
    wrong = attention_exact(q, k, v, mask=keep, **options)
    assert not judge(wrong, q, k, v, variant="fa_tc", form="split", **options).passed


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_are_calls_of_their_own_merged_by_lse(backend: str) -> None:
    cell = (1, 4, 2, 2, 520, 32, "float16")
    inputs = q, k, v = inputs_of(*cell)
    whole = runs.run("fa_tc", inputs, backend=backend)
    cut = splits.split(cell[:6], (None, None), VARIANTS["fa_tc"].default_tiles(32, "split"))
    assert cut.slices > 4
    parts = [
        runs.run("fa_tc", (q, k[:, :, a:b], v[:, :, a:b]), backend=backend) for a, b in cut.ranges()
    ]
    lse = np.logaddexp.reduce([part.lse.astype(np.float64) for part in parts])
    o = sum(as_float64(p.o) * np.exp(p.lse.astype(np.float64) - lse)[..., None] for p in parts)
    np.testing.assert_allclose(whole.lse, lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(as_float64(whole.o), o, rtol=0, atol=2e-3 * np.abs(o).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_one_key(backend: str) -> None:
    """Its value comes out, to the bit; the keys of all other slices are not even looked at."""
    q, k, v = inputs_of(1, 2, 1, 5, 602, 16, "float16")
    k[:, :, :576] = v[:, :, :576] = np.nan
    one = runs.run("fa_tc", (q, k, v), backend=backend, window=(0, 0))
    assert one.form == "split"
    np.testing.assert_array_equal(one.o, np.repeat(v, 2, axis=1)[:, :, -5:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_shows_in_the_rows_that_attend_to_it(backend: str) -> None:
    q, k, v = inputs_of(1, 2, 1, 4, 520, 16, "float16")
    clean = runs.run("fa_tc", (q, k, v), backend=backend, causal=True)
    k[:, :, 518] = np.nan  # row 2 sees it, rows 0 and 1 do not
    dirty = runs.run("fa_tc", (q, k, v), backend=backend, causal=True)
    assert bits(dirty.o[:, :, :2]) == bits(clean.o[:, :, :2])
    assert np.isnan(as_float64(dirty.o[:, :, 2:])).all()


def test_what_lies_outside_the_arrays_has_no_influence() -> None:
    for head_dim, pad in ((32, 8), (20, 1)):
        inputs = inputs_of(2, 4, 2, 3, 521, head_dim, "float16")
        alone = runs.run("fa_tc", inputs, backend="interpret", causal=True)
        amid = tuple(runs.embedded(x, pad) for x in inputs)
        amid_nan = runs.run("fa_tc", amid, backend="interpret", causal=True)
        assert bits(alone.o) == bits(amid_nan.o) and bits(alone.lse) == bits(amid_nan.lse)


def test_one_result_whatever_the_order_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(1, 4, 2, 2, 700, 16, "float16")
    together = runs.run("fa_tc", inputs, backend="interpret")
    monkeypatch.setattr(executor, "MEMORY_BUDGET", 0)
    one_by_one = runs.run("fa_tc", inputs, backend="interpret")
    assert bits(together.o) == bits(one_by_one.o) and bits(together.lse) == bits(one_by_one.lse)


def test_keys_and_values_are_read_once_for_all_heads_that_share_them() -> None:
    def copied(heads: int, len_q: int, slices: int, rows: int) -> int:
        q, k, v = inputs_of(1, heads, 1, len_q, 576, 32, "float16")
        profile = interpret.attention(q, k, v, variant="fa_tc")[2]
        kernel = profile.kernels["attn_fa_tc"]
        assert set(profile.kernels) == {"attn_fa_tc", "merge_splits"}
        # Every slice reads Q, an empty one too, and of rows past the end the last one again.
        return kernel.traffic["global", "load"] - slices * rows * 32 * 2

    assert copied(1, 2, 12, 16) == copied(8, 2, 12, 16) == 2 * 576 * 32 * 2
    assert copied(8, 15, 3, 128) == 2 * 576 * 32 * 2
    assert copied(9, 15, 3, 256) == 2 * 2 * 576 * 32 * 2  # 135 rows are two tiles


@pytest.mark.parametrize(("heads", "len_q"), [(2, 4), (3, 13)])
def test_slices_without_keys_add_nothing(heads: int, len_q: int) -> None:
    """No call of today has one; warps that share one have no barrier to wait at."""
    q, k, v = inputs_of(1, heads, 1, len_q, 1600, 64, "float16")
    call = check_attention(q, k, v, return_lse=True, causal=True)
    o, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    planned = plan_attention(VARIANTS["fa_tc"], call, *map(Operand.of, (q, k, v, o)))
    (first, (struct, slices)) = planned.launches[0].params
    assert slices["parts"] > 3
    longer = (first, (struct, {**slices, "slice_keys": 320}))
    launches = tuple(replace(one, params=longer) for one in planned.launches)
    for x in (q, k, v):
        x.flags.writeable = False
    buffers = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    executor.run(replace(planned, launches=launches), buffers)
    found = runs.Run("fa_tc", "split", (q, k, v), {"causal": True}, None, o, lse)
    found.check()


@pytest.mark.parametrize(("heads", "options"), [(2, {}), (3, {"causal": True, "window": (90, 0)})])
def test_a_block_with_all_keys_of_a_head_has_the_result(
    heads: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "BLOCKS", 1)
    inputs = inputs_of(1, 2 * heads, heads, 5, 600, 40, "bfloat16")
    planned = plan(*inputs, variant="fa_tc", backend="interpret", **options)
    assert [one.entry for one in planned.plans[0].launches] == ["attn_fa_tc"]
    assert planned.workspace_bytes == 0
    report = runs.run("fa_tc", inputs, backend="interpret", **options).check()
    assert report.lse_ratio is not None and report.lse_ratio <= 1


# ---- when it is taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [None, "sm_80", "sm_90", "sm_90a"])
def test_few_rows_and_many_keys_take_it(arch: str | None) -> None:
    q, k, v = inputs_of(1, 8, 2, 4, 4096, 128, "float16")
    text = explain(q, k, v, arch=arch)
    assert "fa_tc (split)\n  tiles     block_q=16" in text
    assert "attn_fa_tc<<<" in text and "merge_splits<<<8, 512>>>" in text
    assert f"workspace {16 * 32 * (128 + 2) * 4:,} bytes" in text
    note = "16 query rows share each key head, whose K and V are read once, in 64 slices of 64 keys"
    assert f"{note}, 4 to a block" in text
    assert "fa_tc (split)" in explain(q, k, v, arch=arch, causal=True, window=(999, 0))


@pytest.mark.parametrize(
    ("len_q", "len_kv", "options"),
    [
        (17, 4096, {}),
        (16, 511, {}),
        (1, 600, {"softcap": 2.0}),
        (1, 600, {"mask": np.ones(600, bool)}),
        (1, 600, {"bias": np.zeros(600, np.float32)}),
        (1, 640, {"block_mask": BlockMask(np.ones((1, 1, 1, 10), bool), 64, 64)}),
        (1, 600, {"tiles": Tiles(64, 32, 4, 2)}),
        (1, 600, {"variant": "fa_warps"}),
    ],
)
def test_other_calls_do_not(len_q: int, len_kv: int, options: dict[str, Any]) -> None:
    inputs = inputs_of(1, 2, 1, len_q, len_kv, 64, "float16")
    assert "(portable)" in explain(*inputs, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_keep_to_the_portable_form(backend: str) -> None:
    """On the mirror, too: the bound of that form is judged, and its tiles give the same bits."""
    inputs, ends = runs.packed(((2, 600), (3, 40)), 4, 2, head_dim=32)
    tiles = VARIANTS["fa_tc"].default_tiles(32)
    found = attention_varlen(*inputs, *ends, variant="fa_tc", backend=backend)
    for rows, operands in runs.sequences(inputs, ends):
        alone = attention(*operands, variant="fa_tc", tiles=tiles, backend=backend)
        assert bits(found[rows].swapaxes(0, 1)) == bits(alone[0])


def test_a_prepared_call_and_other_layouts_give_the_same() -> None:
    q, k, v = inputs_of(1, 4, 2, 2, 600, 32, "float16")
    o = attention(q, k, v, variant="fa_tc", backend="interpret")
    prepared = plan(q, k, v, variant="fa_tc", backend="interpret")
    assert prepared.workspace_bytes > 0 and bits(prepared(q, k, v)) == bits(o)
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    found = attention(*turned, variant="fa_tc", backend="interpret", layout="BSHD")
    assert bits(found.swapaxes(1, 2)) == bits(o)


@pytest.mark.parametrize("head_dim", [7, 64, 128, 256])
def test_the_merge_compiles_without_spills(head_dim: int) -> None:
    dtype = "bfloat16"
    q, k, v = inputs_of(1, 1, 1, 1, 512, head_dim, dtype)
    prepared = plan(q, k, v, variant="fa_tc", backend="interpret")
    spec = prepared.plans[0].launches[1].module
    for arch in ("sm_80", "sm_90"):
        (taken,) = kc.build(spec, arch).kernels.values()
        assert (taken.spill_stores, taken.spill_loads) == (0, 0)
