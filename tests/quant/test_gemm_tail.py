"""Products of several waves, the tiles of the last of which are shared: bits, bound, faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import interpret
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.gemm_form import HOPPER_TILES, choose_tiles, tiles_alone, where_shared
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import planned, product
from tests.support.marks import slow_unless

#: Two blocks, and four, to a tile of the last wave.
TWO = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=2)
FOUR = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=4)
#: Two warpgroups, which both read all columns, of two chunks: as it is taken.
LARGE = GemmTiles(128, 256, num_warps=12, num_stages=3, tail_splits=2)
#: Six tiles of 64 x 64, so that four blocks take four, and then two in pairs; four slices.
SIX = (130, 100, 400)


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "blocks", "out_dtype"),
    [
        (SIX, TWO, 4, "float32"),
        pytest.param((130, 150, 656), FOUR, 4, "bfloat16", marks=pytest.mark.slow),
        pytest.param((300, 270, 272), LARGE, 4, "float16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_is_the_mirror_to_the_bit(shape, tiles, blocks, out_dtype) -> None:
    p = product(3, shape, out_dtype=out_dtype, bias=True)
    found = p.run_on(blocks, tiles)
    assert found.tobytes() == p.mirror_of(tiles, blocks).tobytes()
    shared = where_shared(*shape[:2], tiles, blocks)
    assert 0 < shared.sum() < shared.size
    # both orders of adding up do occur
    assert found[~shared].tobytes() == p.mirror()[~shared].tobytes()
    assert out_dtype != "float32" or found[shared].tobytes() != p.mirror()[shared].tobytes()


@pytest.mark.slow
def test_the_last_block_has_the_outliers() -> None:
    p = product(4, SIX, bias=True, activation="silu", outliers=72)
    found = p.run_on(4, TWO)
    assert p.share_of_bound(found) <= 1
    assert p.but(outliers=None).share_of_bound(found) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_order_of_warps_changes_a_bit(seed: int) -> None:
    p = product(5, SIX, bias=True)
    with interpret.schedule(seed):
        assert p.run_on(4, TWO).tobytes() == p.mirror_of(TWO, 4).tobytes()


def test_the_mirror_of_a_call_knows_the_last_wave() -> None:
    p, tiles = product(6, (1500, 600, 400)), GemmTiles(64, 64, 8, 2, tail_splits=2)  # 240 tiles
    assert tiles_alone(1500, 600, tiles) == 240  # 108 are too many for 66 pairs
    on_hopper = {"tiles": tiles, "arch": "sm_90a"}
    assert p.run(**on_hopper).tobytes() == p.mirror().tobytes()
    p = product(6, (1500, 400, 400))  # 168
    shared = p.run(**on_hopper).tobytes()
    assert shared == p.mirror_of(tiles).tobytes() != p.mirror().tobytes()


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(129, 700)),
    st.integers(0, 20),
    st.integers(2, 8),
)
def test_the_mirror_holds_its_bound(seed, shape, outliers, blocks) -> None:
    p = product(seed, shape, bias=bool(seed % 2), outliers=outliers)
    assert p.share_of_bound(p.mirror_of(TWO, blocks)) <= 1


# ---- the sources, robbed of a line ---------------------------------------------------------------

#: File, line, what comes in its place, and what must be found: a hazard, or "": a wrong result.
THEFTS = {
    "partial sums where slices are still read": (
        "linear/sm90/gemm_int8.cu", "named_barrier_sync(1, COMPUTING);", "", "race",
    ),
    "no barrier before the sums": (
        "prims/codes/gemm.cuh", "  cluster_sync();  // the partial", "  // the partial",
        "nothing orders that after the write by block|never written",
    ),
    "no barrier before the end": (
        "prims/codes/gemm.cuh", "  cluster_sync();  // all reads", "  // all reads",
        "a block ends|has ended",
    ),
    "every tile shared": (
        "prims/codes/gemm.cuh", "part >= p.alone);", "part >= 0);", "out of bounds",
    ),
    "parts counted from the first": (
        "prims/codes/gemm.cuh", "tiles_alone(p) + (part - tiles_alone(p)) / CLUSTER, rank",
        "part / CLUSTER, rank", "c is written, and nothing orders that",
    ),
    "a tile that nobody takes": (
        "prims/codes/gemm.cuh", "(num_tiles(p) - tiles_alone(p)) * CLUSTER;",
        "(num_tiles(p) - tiles_alone(p) - 1) * CLUSTER;", "",
    ),
    "all of k in every part": (
        "prims/codes/gemm.cuh", "if (!is_shared(p, part)) return", "return", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda number, _: number < 2, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    file, line, instead, finding = THEFTS[theft]
    put_a_line_in_place(file, line, instead, tmp_path, monkeypatch)
    p = product(8, SIX)
    p.check_theft(lambda: p.run_on(4, TWO), finding)


# ---- which tiles are shared ----------------------------------------------------------------------


def test_the_plan_says_which_tiles_are_shared() -> None:
    plan = planned(4608, 3072, 3072, arch="sm_90a")
    assert plan.tiles == HOPPER_TILES[1] and (plan.alone, plan.shared) == (396, 36)
    assert plan.launches[0].grid == HOPPER_BLOCKS and not plan.workspace
    assert "396 tiles of a block each, 36 that 2 blocks share" in str(plan)
    plan = planned(4608, 3072, 3072, arch="sm_90a", tiles=HOPPER_TILES[0])
    assert (plan.alone, plan.shared) == (432, 0)
    assert "432 tiles of a block each\n" in str(plan)
    plan = planned(4608, 3072, 3072, arch="sm_90a", tiles=HOPPER_TILES[1], blocks=79)
    assert (plan.alone, plan.shared) == (432, 0)  # 42 are past 39 pairs
    assert (plan.launches[0].grid, plan.tiles.tail_splits) == (79, 1)  # so no blocks lie in pairs
    odd = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=8)
    plan = planned(192, 448, 1024, arch="sm_90a", tiles=odd)  # 21 tiles fill no clusters of 8
    assert (plan.launches[0].grid, plan.tiles.tail_splits) == (21, 1)
    assert ("CFG_TAIL_SPLITS", 1) in plan.launches[0].module.defines
    plan = planned(64, 4096, 4096, arch="sm_90a")
    assert (plan.alone, plan.shared) == (0, 64) and plan.tiles.splits == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "tail_splits"),
    [
        (4608, 3072, 3072, 2), (4608, 12_288, 3072, 2), (4608, 3072, 15_360, 2),
        (16_384, 16_384, 4096, 1),  # half a wave of 63 is less than clusters cost the others
        (4096, 4096, 4096, 1),  # 116 tiles in the last wave
        (8192, 8192, 8192, 1),  # 68
        (16_384, 1792, 1792, 1), (4608, 3072, 128, 1),
    ],
)  # fmt: skip
def test_the_last_wave_is_shared_where_that_is_faster(m, n, k, tail_splits) -> None:
    tiles = choose_tiles(m, n, k, HOPPER_TILES)
    assert (tiles.block_m, tiles.block_n) == (128, 256) and tiles.tail_splits == tail_splits


@given(
    st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([TWO, FOUR, LARGE]),
    st.integers(8, 140),
)  # fmt: skip
def test_blocks_take_at_most_one_part_of_a_shared_tile(m, n, tiles, blocks) -> None:
    """And a cluster's blocks take parts of one tile, the last thing that they do."""
    count = -(-m // tiles.block_m) * -(-n // tiles.block_n)
    alone = tiles_alone(m, n, tiles, blocks)
    grid = blocks // tiles.cluster * tiles.cluster
    assert 0 <= count - alone <= grid // tiles.cluster or alone == count
    assert alone == count or alone % grid == 0


def test_elements_of_shared_tiles_are_those_of_the_last() -> None:
    """In the order in which the kernel counts, which its micro-kernel is held to."""
    tiles, m, n, blocks = TWO, 64 * 13, 64 * 3, 6  # 39 tiles, the last 3 shared
    order = [(row, col) for rows in (range(12), range(12, 13)) for col in range(3) for row in rows]
    expected = np.zeros((13, 3), bool)
    for row, col in order[36:]:
        expected[row, col] = True
    assert np.array_equal(where_shared(m, n, tiles, blocks)[::64, ::64], expected)
    assert where_shared(m - 63, n - 63, tiles, blocks).shape == (m - 63, n - 63)


def test_what_cannot_be_shared_is_said() -> None:
    with pytest.raises(ValueError, match=r"cannot both be more than 1: .* got 2 and 2"):
        GemmTiles(64, 64, 8, 2, splits=2, tail_splits=2)
    p = product(0, (8, 8, 128))
    with pytest.raises(ValueError, match=r"tail_splits must be 1 to 1: .* of k=128, got 2"):
        p.run(backend="interpret", tiles=TWO, arch="sm_90a")
    with pytest.raises(
        UnsupportedError, match=r"must be 1 in the portable form, .* got 2: use arch"
    ):
        product(0, (8, 8, 512)).run(backend="interpret", tiles=TWO, arch="sm_90")
