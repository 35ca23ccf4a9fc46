"""Products whose tiles are shared by a cluster of blocks: bits, bound, faults, choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.arrays.kinds import STORAGE
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.gemm_form import HOPPER_TILES, PORTABLE_TILES, choose_tiles, on_hopper
from cupyattn.quant.activation import ACTIVATIONS, MOST_SPLITS
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import REGIMES, planned, product, run
from tests.support.marks import slow_unless

TWO = GemmTiles(32, 32, num_warps=2, num_stages=2, splits=2)
FOUR = GemmTiles(16, 64, num_warps=2, num_stages=3, splits=4)
HOPPER = GemmTiles(64, 64, num_warps=8, num_stages=2, splits=4)
#: Two warpgroups of two chunks of columns, as no default has them.
WIDE = GemmTiles(128, 256, num_warps=12, num_stages=3, splits=2)
EIGHT = GemmTiles(64, 128, num_warps=8, num_stages=2, splits=8)


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "out_dtype", "bias"),
    [
        ((40, 33, 700), TWO, "float32", True),
        ((70, 100, 1296), HOPPER, "float16", False),
        pytest.param((5, 136, 640), FOUR, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param((64, 130, 1152), EIGHT, "float32", True, marks=pytest.mark.slow),
        pytest.param((130, 300, 400), WIDE, "float16", True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_is_the_mirror_to_the_bit(shape, tiles, out_dtype, bias) -> None:
    p = product(3, shape, out_dtype=out_dtype, bias=bias)
    assert run(p, tiles).tobytes() == p.mirror(tiles.splits).tobytes()


@pytest.mark.parametrize(
    ("tiles", "activation"), [(FOUR, "gelu"), pytest.param(HOPPER, "silu", marks=pytest.mark.slow)]
)
def test_the_last_block_has_the_outliers(tiles: GemmTiles, activation: str) -> None:
    p = product(4, (33, 40, 640), bias=True, activation=activation, outliers=72)
    assert p.share_of_bound(run(p, tiles)) <= 1
    assert p.but(outliers=None).share_of_bound(run(p, tiles)) > 10


def test_the_mirror_of_a_call_knows_its_tiles() -> None:
    p = product(5, (9, 70, 1500))
    split = p.run(tiles=TWO)
    assert split.tobytes() == p.mirror(2).tobytes() != p.run().tobytes()


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 5), st.integers(0, 140), st.integers(1, 1500)),
    st.sampled_from(REGIMES),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 20),
    st.integers(1, MOST_SPLITS),
)
def test_the_mirror_holds_its_bound(
    seed, shape, regime, out_dtype, activation, outliers, splits
) -> None:
    p = product(
        seed, shape, regime, out_dtype=out_dtype, bias=bool(seed % 2), activation=activation,
        outliers=outliers,
    )  # fmt: skip
    splits = min(splits, -(-shape[2] // 128))
    assert p.share_of_bound(p.mirror(splits)) <= 1


def test_no_term_meets_more_roundings_than_in_one_chain() -> None:
    """The basis of the bound of G2: a part's chain and the sums after it, first to last part."""
    for slices in range(1, 200):
        for splits in range(1, min(slices, MOST_SPLITS) + 1):
            ends = [rank * slices // splits for rank in range(splits + 1)]
            longest = max(np.diff(ends))
            assert min(np.diff(ends)) >= 1 and longest + splits - 1 <= slices


# ---- the sources, robbed of a line ---------------------------------------------------------------

#: File, line, what comes in its place, and what must be found: a hazard, or "": a wrong result.
THEFTS = {
    "no barrier before the sums": (
        "prims/codes/gemm.cuh", "  cluster_sync();  // the partial", "  // the partial",
        "nothing orders that after the write by block|never written",
    ),
    "no barrier before the end": (
        "prims/codes/gemm.cuh", "  cluster_sync();  // all reads", "  // all reads",
        "a block ends|has ended",
    ),
    "a part of all slices": (
        "prims/codes/gemm.cuh", "rank, first, end - first,", "rank, first, end,", "out of bounds",
    ),
    "slices overlap": ("prims/codes/gemm.cuh", "rank, first, end", "rank, 0, end", ""),
    "outliers of every block": ("prims/codes/gemm.cuh", "rank == CLUSTER - 1 ? ", "true ? ", ""),
    "one block left out": ("prims/codes/gemm.cuh", "other = 1; other", "other = 2; other", ""),
    "sums of the first": ("prims/instructions/cluster.cuh", '"r"(rank));', '"r"(0 * rank));', ""),
    "scales of the first block": ("linear/gemm_int8.cu", "A_scale_stride + slice;",
                                  "A_scale_stride + step;", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda number, _: number < 2, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    file, line, instead, finding = THEFTS[theft]
    put_a_line_in_place(file, line, instead, tmp_path, monkeypatch)
    p = product(8, (20, 33, 512), outliers=8)
    p.check_theft(lambda: run(p, FOUR), finding)


# ---- which tiles are split -----------------------------------------------------------------------


def test_the_blocks_of_a_split_tile_follow_each_other() -> None:
    plan = planned(64, 4096, 4096, arch="sm_90a")
    assert plan.tiles.splits == 2 and plan.launches[0].grid == 2 * 64 and not plan.workspace
    said = str(plan)
    assert "int8_gemm (sm90)\n  tiles     block_m=64" in said
    assert "splits=2, tail_splits=1\n" in said and "\n  blocks    0 tiles of a" in said
    assert "gemm_int8<<<128, 256>>> of linear/sm90/gemm_int8.cu\n  workspace 0 bytes" in said
    assert planned(64, 4096, 4096, arch="sm_90a", tiles=EIGHT).launches[0].grid == 8 * 32
    assert planned(900, 4096, 4096, arch="sm_90a", tiles=EIGHT).launches[0].grid == 8 * 32 * 15


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_many_tiles_are_not_split(m: int, n: int, k: int) -> None:
    tiles = choose_tiles(m, n, k, HOPPER_TILES)
    assert tiles.splits <= -(-k // 128)
    blocks = -(-m // tiles.block_m) * -(-n // tiles.block_n) * tiles.splits
    assert tiles.splits == 1 or blocks <= 8 * 128
    assert choose_tiles(m, n, k, PORTABLE_TILES).splits == 1
    if m > 64 and tiles.splits > 1:  # tiles of 128 rows, where that fills a device but once
        assert blocks <= 128 and k > (24 * tiles.splits - 1) * 128


@pytest.mark.parametrize(("n", "k"), [(1792, 7168), (3072, 12_288), (4096, 4096), (12_288, 3072)])
def test_few_rows_fill_the_device_with_what_was_the_fastest(n: int, k: int) -> None:
    """In experiments/results/gemm_few_rows.json, or as far as 3 % behind it."""
    raced = {
        (1, 4096): "16x32", (16, 4096): "16x32", (32, 4096): "32x64 2", (64, 4096): "64x64 2",
        (1, 1792): "16x128 4", (16, 1792): "16x128 4", (32, 1792): "32x64 4", (64, 1792): "64x64 4",
        (1, 12_288): "16x32", (16, 12_288): "16x32", (32, 12_288): "64x128", (64, 12_288): "64x128",
    }  # fmt: skip
    for m in (1, 16, 32, 64):
        arch, tiles = on_hopper(m, n, k)
        plan = planned(m, n, k, arch=arch, tiles=tiles)
        assert plan.launches[0].grid >= 56
        x = plan.tiles
        name = f"{x.block_m}x{x.block_n}" + (f" {x.splits}" if x.splits > 1 else "")
        assert raced.get((m, n), name) == name


def test_what_is_small_runs_in_the_portable_form() -> None:
    for n, k in ((128, 128), (512, 512), (1024, 900), (64, 500), (0, 128), (128, 0)):
        assert on_hopper(8, n, k) == (None, None)


def test_what_cannot_be_split_is_said() -> None:
    p = product(0, (8, 8, 300))
    with pytest.raises(ValueError, match=r"splits must be 1 to 3: .* of k=300, got 4"):
        p.run(backend="interpret", tiles=FOUR, arch="sm_90")
    with pytest.raises(ValueError, match=r"splits must be 1 to 8: .* of k=4096, got 16"):
        product(0, (8, 8, 4096)).run(tiles=GemmTiles(16, 256, 2, 2, splits=16))
    for backend in ("mirror", "interpret"):
        with pytest.raises(ValueError, match=r"splits must be 1 to 1: .* of k=0, got 4"):
            product(0, (8, 8, 0)).run(backend=backend, tiles=FOUR)
    with pytest.raises(UnsupportedError, match=r"share \(splits\) need .* 9.0 or later, got sm_80"):
        product(0, (8, 8, 512)).run(backend="interpret", tiles=FOUR, arch="sm_80")
