"""INT8 products whose weight the copy engine orders so that a lane has eight columns of C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn.arrays.operand import Operand
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import ProductOperands, plan_gemm
from cupyattn.plans.records import TensorMap
from cupyattn.problem.gemm_form import settle_gemm
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import STRATEGIES
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import Product, product

SMALL = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)
WIDE = GemmTiles(block_m=64, block_n=256, num_warps=8, num_stages=2)
SPLIT = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2, splits=2)
CASES: dict[str, tuple[tuple[int, int, int], GemmTiles, dict[str, Any]]] = {
    "bias": ((70, 96, 272), SMALL, {"bias": True}),
    "columns past the end": ((40, 288, 144), WIDE, {"bias": True, "activation": "silu"}),
    "a residual and a gate": ((40, 96, 144), SMALL, {"bias": True, "gates": 2}),
    "both halves": ((40, 2 * 96, 144), SMALL, {"bias": True, "activation": "swiglu"}),
    "gate's rows last": ((40, 2 * 64, 144), SMALL, {"activation": "geglu_gate_last", "gates": 0}),
    "a tile that blocks share": ((40, 96, 272), SPLIT, {"bias": True, "gates": 1}),
    "halves that blocks share": ((40, 2 * 64, 272), SPLIT, {"bias": True, "activation": "swiglu"}),
}  # fmt: skip


def planned(p: Product, tiles: GemmTiles) -> Any:
    """Return the plan of the Hopper form, for operands that lie as these do."""
    beside = {
        name: Operand.of(x)
        for name in ("bias", "residual", "gate")
        if (x := getattr(p, name)) is not None
    }
    of = [Operand.of(x) for x in p.operands]
    c = Operand.contiguous((len(p.a), columns_of(len(p.b), p.activation)), 2)
    at = ProductOperands(*of, c, **beside)
    kernel = settle_gemm(
        {"a": of[0], "b": of[2]}, at.strategy, activation=p.activation, tiles=tiles, arch="sm_90a"
    )
    return plan_gemm(
        kernel, at, "float16", bias="" if p.bias is None else p.bias.dtype.name,
        activation=p.activation,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_every_way_to_store_holds_its_bound(case: str, strategy: str) -> None:
    shape, tiles, options = CASES[case]
    p = product(3, shape, out_dtype="float16", strategy=strategy, **options)
    straddles = strategy == "block" and shape[1] // 2 % 128 and "swiglu" in str(options)
    if not straddles and "geglu" not in str(options):
        assert planned(p, tiles).features.neighbours
    c = p.run_guarded(backend="interpret", tiles=tiles, arch="sm_90a")
    assert p.share_of_bound(c) <= 1


def test_outliers_come_in_the_same_order() -> None:
    p = product(3, (40, 96, 144), out_dtype="float16", outliers=72, bias=True)
    c = p.run_guarded(backend="interpret", tiles=SMALL, arch="sm_90a")
    assert p.share_of_bound(c) <= 1


def test_the_bits_are_those_of_rows_as_they_lie() -> None:
    """Only where a lane finds a sum differs: 97 columns more make the plan keep their order."""
    p = product(5, (40, 96, 272), out_dtype="bfloat16", bias=True, strategy="channel")
    more = product(6, (40, 97, 272), out_dtype="bfloat16", bias=True, strategy="channel")
    both = p.but(
        b=np.concatenate([p.b, more.b]), b_scales=np.concatenate([p.b_scales, more.b_scales]),
        bias=np.concatenate([p.bias, more.bias]),
    )  # fmt: skip
    assert planned(p, SMALL).features.neighbours
    assert not planned(both, SMALL).features.neighbours
    options = {"backend": "interpret", "tiles": SMALL, "arch": "sm_90a"}
    assert p.run(**options).tobytes() == both.run(**options)[:, :96].tobytes()


def test_the_map_of_a_weight_has_its_rows_in_that_order() -> None:
    p = product(1, (40, 2 * 64, 272), out_dtype="float16", activation="swiglu", strategy="channel")
    (launch,) = planned(p, SMALL).launches
    (weight,) = (x for x in launch.params if isinstance(x, TensorMap) and x.buffer == "b")
    assert (weight.shape, weight.box) == ((4, 4, 4, 2, 272), (1, 4, 4, 2, 128))
    rows = np.arange(len(p.b))[:, None] * 272
    walk = sum(
        np.arange(n).reshape(-1, *[1] * (3 - axis)) * weight.strides[axis]
        for axis, n in enumerate(weight.shape[:4])
    ).reshape(-1, 1)  # fmt: skip
    order = [32 * q + 8 * t + 2 * f + e
             for q in range(4) for f in range(4) for t in range(4) for e in range(2)]  # fmt: skip
    np.testing.assert_array_equal(walk, rows[order])


def odd(x: np.ndarray) -> np.ndarray:
    """Return an array whose address is a multiple of its items alone."""
    room = np.empty(x.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + x.itemsize
    return room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ((40, 80, 144), {}),
        ((40, 96, 144), {"bias": odd}),
        ((40, 96, 144), {"gate": odd}),
        ((40, 96, 144), {"b_scales": odd}),
        ((40, 96, 144), {"residual": odd}),
    ],
    ids=["no multiple of 32", "bias", "gate", "scales of columns", "residual"],
)
def test_what_cannot_be_read_eight_at_a_time_comes_as_it_lies(shape, changed) -> None:
    p = product(7, shape, out_dtype="float16", bias=True, gates=1, strategy="channel")
    moved = {}
    for name, move in changed.items():
        moved[name] = move(getattr(p, name))
        moved[name][...] = getattr(p, name)
    p = p.but(**moved)
    assert not planned(p, SMALL).features.neighbours
    c = p.run(backend="interpret", tiles=SMALL, arch="sm_90a")
    assert p.share_of_bound(c) <= 1


#: File, line, and what comes in its place: each gives a wrong result.
THEFTS = {
    "columns of the neighbouring lane": (
        "prims/codes/gemm.cuh", "(i / 4 * 4 + t) * 8", "(i / 4 * 4 + (t ^ 1)) * 8",
    ),
    "the second half is the first": (
        "linear/sm90/gemm_block.cuh", "(half * p.n + n0) / 32", "n0 / 32",
    ),
    "numbers turned between lanes": (
        "prims/codes/gemm.cuh", "if constexpr (NEIGHBOURS) {\n        const",
        "if constexpr (false) {\n        const",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    put_a_line_in_place(*THEFTS[theft], tmp_path, monkeypatch)
    p = product(
        8, (40, 2 * 64, 144), out_dtype="float16", bias=True, activation="swiglu",
        strategy="channel",
    )  # fmt: skip
    c = p.run(backend="interpret", tiles=GemmTiles(64, 256, 8, 2), arch="sm_90a")
    assert p.share_of_bound(c) > 10


def test_types_of_a_bias_are_read_whole() -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        p = product(9, (40, 96, 144), out_dtype="float16", bias=True, strategy="channel")
        p = p.but(bias=p.bias.astype(dtype))
        assert planned(p, SMALL).features.neighbours
        c = p.run(backend="interpret", tiles=SMALL, arch="sm_90a")
        assert p.share_of_bound(c) <= 1
