"""The Hopper form of products of INT8 codes, on the interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyattn.arrays.operand import Operand
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import ProductOperands, plan_gemm
from cupyattn.plans.records import TensorMap
from cupyattn.problem import gemm_form
from cupyattn.problem.gemm_form import settle_gemm
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import Product, planned, product
from tests.support.marks import slow_unless

SMALL = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)
LARGE = GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=2)
THREE = GemmTiles(block_m=192, block_n=128, num_warps=16, num_stages=2)


def run(p: Product, tiles: GemmTiles) -> np.ndarray:
    return p.run(backend="interpret", tiles=tiles, arch="sm_90a")


@pytest.mark.parametrize(
    ("shape", "tiles", "out_dtype"),
    [
        ((130, 300, 272), LARGE, "float16"),
        pytest.param((70, 100, 400), SMALL, "float32", marks=pytest.mark.slow),
        pytest.param((200, 140, 144), THREE, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_is_the_mirror_to_the_bit(shape, tiles, out_dtype) -> None:
    p = product(3, shape, out_dtype=out_dtype, bias=True)
    assert planned(*shape, tiles=tiles, arch="sm_90a").form == "sm90"
    assert run(p, tiles).tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("slices", [1, 5, 6, 7, 8])
def test_a_pass_of_several_slices_leaves_a_remainder(slices: int, block_n: int) -> None:
    """Four slices of 64 columns to a pass, or two of 128; others follow one by one."""
    tiles = GemmTiles(64, block_n, num_warps=8, num_stages=6)
    p = product(5, (20, block_n, 128 * slices - 16), out_dtype="float32")
    assert run(p, tiles).tobytes() == p.mirror().tobytes()


def test_a_block_takes_one_tile_after_the_other(monkeypatch) -> None:
    """Its ring of stages continues where the last tile ended; each tile has its scales and columns.

    Outliers, too, are steps of the ring.
    """
    monkeypatch.setattr(gemm_form, "HOPPER_BLOCKS", 1)
    plan_gemm.cache_clear()
    try:
        p = product(4, (70, 190, 160), outliers=72, activation="silu")
        assert p.share_of_bound(run(p, SMALL)) <= 1
    finally:
        plan_gemm.cache_clear()


#: Line, what comes in its place, and what must be found: a hazard, or a result out of its bound.
THEFTS = {
    "no wait for the slices": (
        "    mbarrier_wait_parity(smem.full[stage], at.parity);  // both slices have arrived\n", "",
        "never written",
    ),
    "no wait for the products": (
        "      wgmma_wait_group<1>();  // this chunk's products are there\n", "", "in flight",
    ),
    "a stage given back twice": (
        "if (j == CHUNKS - 1 && lane_id() == 0)", "if (lane_id() == 0)", "deadlock",
    ),
    "scale of the slice before": (
        "    at += PASS, slices -= PASS;\n", "    slices -= PASS;\n", "",
    ),
    "chunk multiplied by the first columns": (
        "B_rows + (j + 1) % CHUNKS * CHUNK * SLICE", "B_rows", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda number, _: number % 2, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place("linear/sm90/gemm_int8.cu", line, instead, tmp_path, monkeypatch)
    p = product(8, (70, 260, 400))
    p.check_theft(lambda: run(p, LARGE), finding)


# ---- the plan ------------------------------------------------------------------------------------


def test_boxes_are_the_slices_of_a_tile() -> None:
    plan = planned(500, 300, 1008, arch="sm_90a", outliers="bfloat16", tiles=LARGE)
    (one,) = plan.launches
    assert one.grid == 8 and one.module.hopper
    boxes = {m.buffer: (m.dtype, m.box, m.strides[2]) for m in one.params
             if isinstance(m, TensorMap)}  # fmt: skip
    assert boxes == {
        "a": ("int8", (1, 1, 128, 128), 1008), "b": ("int8", (1, 1, 256, 128), 1008),
        "a_16": ("bfloat16", (1, 1, 128, 64), 128), "b_16": ("bfloat16", (1, 1, 256, 64), 128),
    }  # fmt: skip
    assert planned(9000, 9000, 128, arch="sm_90a").launches[0].grid == HOPPER_BLOCKS


def test_what_the_copy_engine_cannot_take_runs_in_the_portable_form() -> None:
    assert planned(64, 64, 4096, arch="sm_90a").note == ""
    plan = planned(64, 64, 100, arch="sm_90a")
    assert plan.form == "portable" and "with rows of 100 bytes" in plan.note
    empty = planned(64, 64, 0, arch="sm_90a")
    assert empty.form == "portable" and "a has nothing" in empty.note
    a, scales = Operand((4, 128), (128, 1), 1, 4), Operand.contiguous((4, 1), 4)
    operands = ProductOperands(a, scales, a, scales, Operand.contiguous((4, 4), 2))
    settled = settle_gemm({"a": a, "b": a}, arch="sm_90a")
    plan = plan_gemm(settled, operands, "float16")
    assert "got a at 16 n + 4" in plan.note
    with pytest.raises(UnsupportedError, match="Hopper form do not go with .* rows of 100 bytes"):
        planned(64, 64, 100, arch="sm_90a", tiles=SMALL)
    p = product(9, (5, 7, 30))
    assert p.run(backend="interpret", arch="sm_90a").tobytes() == p.mirror().tobytes()
