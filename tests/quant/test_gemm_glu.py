"""Gated linear units of products of INT8 codes: bound, kernels, faults, the layer, arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops.gemm import GEMM, GemmSettings
from cupyattn.ops.operation import problem_of
from cupyattn.problem.gemm_form import settle_gemm
from cupyattn.quant.activation import GLU
from cupyattn.quant.blocks import STRATEGIES, scale_shape
from cupyattn.reference.gemm import activate
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import REGIMES, product, run

SMALL = GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=2)
#: Tiles with enough columns that all lanes of a warp store together.
WIDE = GemmTiles(32, 128, num_warps=2, num_stages=2)
TWO = GemmTiles(32, 32, num_warps=2, num_stages=2, splits=2)
#: Blocks that share a tile add up single fragments: rows g of both halves, or rows g + 8.
FOUR = GemmTiles(16, 64, num_warps=2, num_stages=2, splits=4)
HOPPER = GemmTiles(64, 64, num_warps=8, num_stages=2)
LARGE = GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=2)
HOPPER_TWO = GemmTiles(64, 64, num_warps=8, num_stages=3, splits=2)


# ---- what it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("activation", GLU)
def test_the_exact_result_is_that_of_two_products(activation: str, strategy: str) -> None:
    p = product(0, (8, 40, 300), bias=True, activation=activation, strategy=strategy)
    both = ca.quant.gemm_exact(*p.operands, bias=p.bias)
    halves = both[:, :20], both[:, 20:]
    gate, other = halves[::-1] if activation.endswith("_gate_last") else halves
    expected = activate(gate, GLU[activation]) * other
    np.testing.assert_allclose(ca.quant.gemm_exact(*p.operands, **p.after), expected, rtol=1e-12)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 5), st.integers(0, 150), st.integers(0, 400)),
    st.sampled_from(REGIMES),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(tuple(GLU)),
    st.sampled_from(STRATEGIES),
    st.booleans(),
)
def test_the_mirror_holds_its_bound(
    seed, shape, regime, out_dtype, activation, strategy, summed
) -> None:
    m, n, k = shape
    p = product(
        seed, (m, 2 * n, k), regime, out_dtype=out_dtype, bias=bool(seed % 2),
        activation=activation, strategy=strategy, gates=1 if summed else None,
    )  # fmt: skip
    c = p.run()
    assert c.shape == (m, n) and p.share_of_bound(c) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_breaks_the_bound(strategy: str) -> None:
    p = product(2, (20, 256, 300), bias=True, activation="swiglu", strategy=strategy)
    lines = len(p.b_scales) // 2
    exchanged = p.but(
        b=np.roll(p.b, 128, axis=0), b_scales=np.roll(p.b_scales, lines, axis=0),
        bias=np.roll(p.bias, 128),
    )  # fmt: skip
    neighbour = p.but(b=np.concatenate([np.roll(p.b[:128], 1, axis=0), p.b[128:]]))
    for wrong in (exchanged, neighbour, p.but(bias=None)):
        assert p.share_of_bound(wrong.mirror()) > 10


# ---- the kernels ---------------------------------------------------------------------------------


#: Shape of the product, tiles, type of the result, activation.
CASES = [
    ((37, 2 * 45, 200), SMALL, "float32", "swiglu"),
    ((33, 2 * 136, 256), WIDE, "float16", "geglu"),
    ((33, 2 * 256, 147), WIDE, "bfloat16", "geglu_tanh"),
    ((20, 2 * 45, 700), TWO, "float32", "swiglu"),
    ((20, 2 * 80, 700), FOUR, "float16", "swiglu"),
    ((70, 2 * 45, 272), HOPPER, "float32", "swiglu"),
    ((70, 2 * 136, 272), HOPPER, "bfloat16", "geglu"),
    ((70, 2 * 45, 512), HOPPER_TWO, "float32", "swiglu"),
    ((130, 2 * 200, 272), LARGE, "float16", "swiglu"),
    ((3, 10, 0), SMALL, "float32", "swiglu"),
    ((37, 2 * 45, 200), SMALL, "float32", "swiglu_gate_last"),
    ((20, 2 * 80, 700), FOUR, "float16", "geglu_gate_last"),
    ((70, 2 * 136, 272), HOPPER, "bfloat16", "geglu_tanh_gate_last"),
    ((70, 2 * 45, 512), HOPPER_TWO, "float32", "swiglu_gate_last"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tiles", "out_dtype", "activation", "strategy"),
    [
        pytest.param(*case, strategy, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, case in enumerate(CASES)
        for j, strategy in enumerate(STRATEGIES)
    ],
    ids=str,
)
def test_the_kernel_holds_its_bound(shape, tiles, out_dtype, activation, strategy) -> None:
    p = product(
        3, shape, out_dtype=out_dtype, bias=True, activation=activation, strategy=strategy
    )
    c = run(p, tiles)
    assert c.shape == (shape[0], shape[1] // 2)
    assert p.share_of_bound(c) <= 1


@pytest.mark.parametrize("tiles", [SMALL, HOPPER], ids=["portable", "hopper"])
def test_outliers_and_a_sum(tiles: GemmTiles) -> None:
    p = product(5, (40, 2 * 40, 256), bias=True, activation="swiglu", outliers=64, gates=2)
    assert p.share_of_bound(run(p, tiles)) <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tiles", [SMALL, HOPPER], ids=["portable", "hopper"])
def test_a_result_amid_others(tiles: GemmTiles, strategy: str) -> None:
    """Only half as many columns as the weight has rows are written, and all of them."""
    p = product(
        7, (34, 2 * 45, 256), out_dtype="float16", bias=True, activation="geglu",
        strategy=strategy, gates=2,
    )  # fmt: skip
    arch = "sm_90a" if tiles == HOPPER else "sm_90"
    assert p.share_of_bound(p.run_guarded(backend="interpret", tiles=tiles, arch=arch)) <= 1


EPILOGUE, MMA = "prims/codes/gemm.cuh", "prims/codes/gemm_mma.cuh"
#: File, line, and what comes in its place: each gives a wrong result.
THEFTS = {
    "gate and other half exchanged": (
        EPILOGUE, "activated<ACTIVATION>(gate), up", "activated<ACTIVATION>(up), gate",
    ),
    "gate of the neighbour": (
        MMA, "row / 16 * 8 + row % 8", "row / 16 * 8 + (row % 8 ^ row / 8 % 2)",
    ),
    "bias of the gate for both": (EPILOGUE, "x.second += bias[1]", "x.second += bias[0]"),
    "bias after the activation": (
        EPILOGUE, "if constexpr (BIAS) x.first += bias[0][i].v[j], x.second += bias[1][i].v[j];",
        "return activated<ACTIVATION>(x.first) * x.second + bias[0][i].v[j];",
    ),
    "scale of the gate for both": ("linear/gemm_int8.cu", "factor[n % HALVES]", "factor[0]"),
    "scale of the next block left out": (
        EPILOGUE, "round_up(p.n + n0 + 1, SCALE_ROWS) - p.n", "p.n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    put_a_line_in_place(*THEFTS[theft], tmp_path, monkeypatch)
    p = product(8, (40, 2 * 136, 256), out_dtype="float32", bias=True, activation="swiglu")
    assert p.share_of_bound(run(p, SMALL)) > 10


def test_tiles_of_256_columns_are_not_chosen_for_three_scales() -> None:
    def chosen(half: int, strategy: str, activation: str) -> int:
        a, b = (Operand.contiguous((rows, 4096), 1) for rows in (4096, 2 * half))
        settled = settle_gemm({"a": a, "b": b}, strategy, activation=activation, arch="sm_90a")
        return settled.tiles.block_n

    assert chosen(4064, "block", "swiglu") == 128
    for half, strategy, activation in (
        (4096, "block", "swiglu"), (4064, "channel", "swiglu"), (4064, "block", "silu"),
    ):  # fmt: skip
        assert chosen(half, strategy, activation) == 256


def test_a_call_settles_tiles_for_its_activation() -> None:
    a, b = np.zeros((4096, 128), np.int8), np.zeros((2 * 4064, 128), np.int8)
    scales = np.zeros((4096, 1), np.float32), np.zeros(scale_shape(b.shape, 128), np.float32)
    arrays = {"a": a, "a_scales": scales[0], "b": b, "b_scales": scales[1]}
    widths = {}
    for activation in ("silu", "swiglu"):
        how = GemmSettings("float16", activation, None, "sm_90a", "interpret")
        widths[activation] = problem_of(GEMM, how, arrays).settled[1].tiles.block_n
    assert widths == {"silu": 256, "swiglu": 128}


# ---- the layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("activation", GLU)
def test_a_layer_holds_its_bound(strategy: str, activation: str) -> None:
    rng = np.random.default_rng(5)
    w, x = (rng.standard_normal(s).astype(np.float16) for s in ((80, 300), (2, 6, 300)))
    layer = ca.Int8Linear.from_weight(w / 16, w[:, 0], strategy=strategy, activation=activation)
    y = layer(x)
    exact = activate(as_float64(x) @ as_float64(w / 16).T + as_float64(w[:, 0]), activation)
    error = layer.error(x, w / 16)
    assert y.shape == (2, 6, 40) and (np.abs(as_float64(y) - exact) <= error).all()


# ---- arguments -----------------------------------------------------------------------------------


def test_an_odd_number_of_rows_is_refused() -> None:
    said = "activation='swiglu' takes a weight with an even number of rows.*got 5: use 'silu'"
    p = product(0, (4, 5, 200)).but(activation="swiglu")
    with pytest.raises(ValueError, match=said):
        p.run()
    with pytest.raises(ValueError, match=said):
        ca.Int8Linear.from_weight(np.ones((5, 128), np.float32), activation="swiglu")
