"""Products with a scale for each row and column: bound, kernels, faults, quantising, layer."""

from __future__ import annotations

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.quant.activation import ACTIVATIONS
from cupyattn.quant.blocks import MOST_CHANNEL_CODES
from cupyattn.reference.gemm import activate
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.gemm_cases import Product, planned, product, run
from tests.quant.quant_inputs import DTYPES, operand, same_bytes
from tests.support.marks import slow, slow_unless

SMALL = GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=2)
HOPPER = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)
#: Tiles for many rows, except for the stages.
LARGE = GemmTiles(block_m=128, block_n=256, num_warps=12, num_stages=2)
#: Tiles that blocks share: all tiles, or the tiles of the last wave.
TWO = GemmTiles(32, 32, num_warps=2, num_stages=2, splits=2)
TAIL = GemmTiles(64, 64, num_warps=8, num_stages=2, tail_splits=2)


def by_channel(seed: int, shape: tuple[int, int, int], regime: str = "normal", **more) -> Product:  # type: ignore[no-untyped-def]
    return product(seed, shape, regime, strategy="channel", **more)


# ---- what it is ----------------------------------------------------------------------------------


def test_the_exact_product_is_that_of_the_numbers() -> None:
    p = by_channel(0, (9, 140, 300), bias=True)
    x, w = as_float64(p.a) * as_float64(p.a_scales), as_float64(p.b) * as_float64(p.b_scales)
    expected = x @ w.T + as_float64(p.bias)
    np.testing.assert_allclose(ca.quant.gemm_exact(*p.operands, **p.after), expected, rtol=1e-12)


def test_the_bound_is_not_wide() -> None:
    """It has three roundings of float32; in 16 bits the rounding of the store."""
    p = by_channel(1, (20, 140, 512))
    size = np.abs(ca.quant.gemm_exact(*p.operands)).mean()
    assert ca.quant.gemm_error(*p.operands, "float32").mean() < 4 * 2.0**-24 * size
    assert p.share_of_bound(p.mirror()) > 0.3
    assert p.but(out_dtype="float16").share_of_bound(p.mirror().astype("float16")) > 0.9


def test_sums_past_float32_are_exact() -> None:
    """The longest k that is taken, all codes as large as they are: int32 holds the sum."""
    a, b = (np.full((2, MOST_CHANNEL_CODES), c, np.int8) for c in (-128, 127))
    scales = np.ones((2, 1), np.float32)
    exact = -128 * 127 * MOST_CHANNEL_CODES
    for codes, expected in ((b, exact), (a, 128 * 128 * MOST_CHANNEL_CODES)):
        c = ca.int8_gemm(a, scales, codes, scales, "float32")
        assert (c == np.float32(expected)).all() and abs(expected) < 2**31
    longer = np.zeros((1, MOST_CHANNEL_CODES + 1), np.int8)
    with pytest.raises(UnsupportedError, match="int32 sums at most 131071 .* k=131072"):
        ca.int8_gemm(longer, scales[:1], longer, scales[:1], "float32")


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "out_dtype", "bias"),
    [
        ((37, 45, 200), SMALL, "float32", True),
        ((5, 136, 147), GemmTiles(16, 64, num_warps=4, num_stages=3), "bfloat16", True),
        ((130, 300, 272), LARGE, "float16", True),
        ((40, 34, 700), TWO, "float32", True),
        ((3, 5, 0), SMALL, "float32", True),
        pytest.param((16, 300, 96), GemmTiles(16, 256, 4, 2), "float16", False,
                     marks=pytest.mark.slow),
        pytest.param((130, 70, 130), GemmTiles(128, 64, 4, 2), "float32", False,
                     marks=pytest.mark.slow),
        pytest.param((70, 100, 400), HOPPER, "float32", False, marks=pytest.mark.slow),
        pytest.param((70, 100, 1296), GemmTiles(64, 64, 8, 2, splits=4), "bfloat16", True,
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernel_is_the_mirror_to_the_bit(shape, tiles, out_dtype, bias) -> None:
    p = by_channel(3, shape, out_dtype=out_dtype, bias=bias)
    c = run(p, tiles)
    assert c.tobytes() == p.mirror().tobytes()
    assert p.share_of_bound(c) <= 1


def test_a_shared_last_wave_has_the_same_bits() -> None:
    """Six tiles, four of a block each and two in pairs; a ring goes on from tile to tile."""
    p = by_channel(4, (130, 100, 400), bias=True)
    assert p.run_on(4, TAIL).tobytes() == p.mirror().tobytes()
    alone = GemmTiles(64, 64, num_warps=8, num_stages=2)
    assert p.run_on(1, alone).tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("activation", [ACTIVATIONS[1], *slow(ACTIVATIONS[2:])])
@pytest.mark.parametrize("tiles", [SMALL, pytest.param(HOPPER, marks=pytest.mark.slow)], ids=str)
def test_activations_of_the_kernel(activation: str, tiles: GemmTiles) -> None:
    p = by_channel(5, (33, 40, 160), out_dtype="float32", bias=True, activation=activation)
    assert p.share_of_bound(run(p, tiles)) <= 1


# ---- the sources, robbed of a line ---------------------------------------------------------------

OWN, HEADER = "linear/gemm_int8_channel.cu", "prims/codes/gemm_channel.cuh"
SM90, SHARED = "linear/sm90/gemm_int8_channel.cu", "prims/codes/gemm_mma.cuh"
#: File, line, what comes in its place, tiles, and what must be found: a hazard, or "": a wrong
#: result.
THEFTS = {
    "scale of the next row": (HEADER, "min(row, p.m - 1)", "min(row + 1, p.m - 1)", SMALL, ""),
    "scales of a pair exchanged": (
        HEADER, "A_scale, B_scale[0][i].v[j])", "A_scale, B_scale[0][i].v[1 - j])", SMALL, "",
    ),
    "scale of the column below": (
        HEADER, "col * p.B_scale_stride", "(col & ~1) * p.B_scale_stride", SMALL, "",
    ),
    "scale past the last row": (HEADER, "min(row, p.m - 1)", "row", SMALL, "out of bounds"),
    "sums in float16": (
        HEADER, "__int2float_rn(sum)", "__half2float(__int2half_rn(sum))", SMALL, "",
    ),
    "codes past the end": (SHARED, " && byte < bytes_valid", "", SMALL, "outside b"),
    "a wait too few": (OWN, "group<NUM_STAGES - 2>", "group<NUM_STAGES - 1>", SMALL, "in flight"),
    "rows exchanged": (
        OWN, "row_scale(p, row), B_scale, bias", "row_scale(p, row ^ 8), B_scale, bias", SMALL, "",
    ),
    "sums of the tile before": (SM90, "k > 0 || step > 0", "true", HOPPER, "never written"),
    "no wait for the slices": (
        SM90, "      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // both slices", "  //",
        HOPPER, "never written",
    ),
    "given back before it was read": (
        SM90, "wgmma_wait_group<1>();  // the products", "//", HOPPER, "in flight|race|still",
    ),
    "never given back": (
        SM90, "      if (step > 0 && lane_id() == 0) mbarrier_arrive", "      if (false) "
        "mbarrier_arrive", HOPPER, "deadlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda number, _: number % 3 == 0, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    source, line, instead, tiles, finding = THEFTS[theft]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    p = by_channel(8, (70, 33, 592) if tiles is HOPPER else (40, 33, 392))
    k = p.a.shape[1]
    a, b = (np.full((x.shape[0], k + 16), 127, np.int8) for x in (p.a, p.b))
    a[:, :k], b[:, :k] = p.a, p.b
    p = p.but(a=a[:, :k], b=b[:, :k])

    # Of the Hopper form, a block takes both tiles.
    p.check_theft(lambda: p.run_on(1, tiles) if tiles is HOPPER else run(p, tiles), finding)


# ---- what is compiled ----------------------------------------------------------------------------


def test_columns_whose_scales_lie_apart_are_read_one_by_one() -> None:
    """Pairs of them are read where rows of C are stored in pairs."""
    assert planned(64, 64, 128, strategy="channel").features.vec == 8
    p = by_channel(9, (4, 8, 32))
    apart = np.zeros((8, 2), np.float32)
    apart[:, :1] = p.b_scales
    odd = np.concatenate([p.b_scales[:1], p.b_scales])[1:]
    for scales in (apart[:, :1], odd):
        c = p.but(b_scales=scales).run(backend="interpret", tiles=SMALL)
        assert c.tobytes() == p.mirror().tobytes()


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (DTYPES[0], (7, 129)), (DTYPES[1], (3, 1000)), (DTYPES[2], (2, 9000)),
        (DTYPES[0], (5, 3072)), (DTYPES[1], (4, 0)),
        pytest.param(DTYPES[0], (2, 33_001), marks=pytest.mark.slow),
        pytest.param(DTYPES[0], (3, 40_000), marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernel_quantises_rows_as_numpy_does(dtype: np.dtype, shape: tuple[int, int]) -> None:
    """A weight, too: its output channels are rows."""
    rows, channels = shape
    wide = operand(3, dtype, (1, 1, 2 * rows, max(channels, 1) + 1), "wide")[0, 0].copy()
    wide[0], wide[2, 1] = 0, np.nan
    for x in (wide[::2, :channels], wide[:rows, 1 : channels + 1]):
        expected = ca.act_quant(x, strategy="channel")
        assert expected[0].shape == x.shape and expected[1].shape == (len(x), 1)
        for function in (ca.act_quant, ca.weight_quant):
            found = function(x, strategy="channel", backend="interpret")
            assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
        assert ca.weight_quant(x, strategy="channel")[0].tobytes() == expected[0].tobytes()


def test_codes_of_rows_hold_their_bound_there_and_back() -> None:
    w = operand(4, DTYPES[2], (1, 1, 40, 300), "wide")[0, 0]
    codes, scales = ca.weight_quant(w, strategy="channel")
    back = ca.weight_dequant(codes, scales, strategy="channel")
    assert (np.abs(as_float64(back) - w) <= ca.quant.weight_error(w, scales)).all()
    assert np.abs(codes).max(axis=1).tolist() == [127] * 40


ROW_THEFTS = {
    "maximum of half a warp": ("shfl_max<WARP_SIZE>", "shfl_max<WARP_SIZE / 2>", ""),
    "no barrier": ("    __syncthreads();", "    //", "race|never written"),
    "maximum of the first row": ("of_warp[first + warp]", "of_warp[warp]", ""),
    "channels past the end": ("if (channel < channels) x[a]", "if (channels) x[a]", "out of"),
    "the rest of a row left out": ("    reach.admit(reach_of(rest));", "", ""),
}


@pytest.mark.parametrize("theft", ROW_THEFTS)
def test_a_line_less_in_quantising_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    line, instead, finding = ROW_THEFTS[theft]
    put_a_line_in_place("linear/row_quant.cu", line, instead, tmp_path, monkeypatch)
    channels = 4501 if "rest" in theft else 199  # of odd rows 4,096 are kept
    x = operand(5, DTYPES[0], (1, 1, 9, channels), "normal")[0, 0].copy()
    x[0, -1] = 100
    found = functools.partial(ca.act_quant, x, strategy="channel")
    check_found(lambda: not same_bytes(found(backend="interpret"), found()), finding)


def test_quantising_rows_is_one_launch_without_spills() -> None:
    for dtype, channels in (("float16", 3072), ("bfloat16", 15_360), ("float32", 40_000)):
        plan = plan_row_quant(Operand.contiguous((4096, channels), STORAGE[dtype].itemsize), dtype)
        (one,) = plan.launches
        taken = kc.build(one.module, "sm_80").kernels["row_quant"]
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
    with pytest.raises(UnsupportedError, match="split them"):
        plan_row_quant(Operand.contiguous((2**32, 8), 2), "float16")


# ---- the layer -----------------------------------------------------------------------------------


def activations(kind: str, rows: int, channels: int, seed: int) -> np.ndarray:
    """Normal data, outlier channels (a thousandth, at least one, 50 times as large), and others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, channels)).astype(np.float32)
    if kind == "outlier":
        x[:, rng.permutation(channels)[: max(1, channels // 1000)]] *= 50
    if kind == "sparse":
        x[rng.random(x.shape) < 0.95] = 0
    return np.full_like(x, 0.7) if kind == "constant" else x


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(("normal", "outlier", "sparse", "constant")),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 9), st.integers(1, 140), st.integers(1, 300)),
    st.sampled_from(ACTIVATIONS),
)
def test_a_layer_holds_its_bound(seed, kind, dtype, shape, activation) -> None:
    rows, out, channels = shape
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((out, channels)) / np.sqrt(channels)).astype(dtype)
    x, bias = activations(kind, rows, channels, seed).astype(dtype), w[:, 0]
    layer = ca.Int8Linear.from_weight(w, bias, strategy="channel", activation=activation or None)
    exact = activate(as_float64(x) @ as_float64(w).T + as_float64(bias), activation)
    assert (np.abs(as_float64(layer(x)) - exact) <= layer.error(x, w)).all()


def test_the_kernels_of_a_layer_are_the_mirror() -> None:
    w, x = (activations("normal", *s, seed=1).astype(ml_dtypes.bfloat16)
            for s in ((40, 200), (6, 200)))  # fmt: skip
    layer = ca.Int8Linear.from_weight(w, w[:, 0], strategy="channel")
    assert layer.strategy == "channel" and layer.scales.shape == (40, 1)
    x = x.reshape(2, 3, 200)
    assert layer(x, backend="interpret").tobytes() == layer(x).tobytes()


# ---- arguments -----------------------------------------------------------------------------------

W = np.ones((6, 200), np.float16)
P = by_channel(0, (4, 6, 200))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: ca.act_quant(W, strategy="row"), ValueError, "'block' or 'channel', got 'row'"),
        (lambda: ca.act_quant(W, 64, strategy="channel"), ValueError, "leave it out"),
        (lambda: ca.weight_quant(W, 64, strategy="channel"), ValueError, "got 64 and"),
        (
            lambda: ca.weight_dequant(P.b, P.b_scales[:5], strategy="channel"), ValueError,
            r"by channel must have shape \(6, 1\), got \(5, 1\)",
        ),
        (
            lambda: ca.weight_dequant(P.b, P.b_scales, strategy="channel", backend="interpret"),
            UnsupportedError, "backend='mirror'",
        ),
        (lambda: ca.Int8Config(strategy="group"), ValueError, "strategy must be 'block' or"),
        (
            lambda: ca.Int8Linear.from_weight(W, strategy="channel", outlier_columns=[1]),
            UnsupportedError, "outlier_columns go with scales of blocks, got 1",
        ),
        (
            lambda: P.but(outliers=(W[:4, :2], W[:, :2])).run(), UnsupportedError,
            "outliers go with scales of blocks",
        ),
        (
            lambda: P.but(b_scales=ca.weight_quant(W)[1]).run(), ValueError,
            r"of channels a_scales must be \(4, 1\) and b_scales \(6, 1\), got .* \(1, 2\)$",
        ),
        (
            lambda: P.run(tiles=GemmTiles(192, 128, 16, 2), arch="sm_90a"), ValueError,
            "block_m must be 64 or 128",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(call, error, said) -> None:
    with pytest.raises(error, match=said):
        call()


# ---- any shape -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 70), st.integers(1, 140), st.integers(0, 300)),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([SMALL, HOPPER]),
)
def test_any_shape_holds_its_bound(seed, shape, out_dtype, activation, tiles) -> None:
    p = by_channel(seed, shape, out_dtype=out_dtype, bias=bool(seed % 2), activation=activation)
    rows, columns, k = shape
    if tiles is HOPPER and not (k and (k % 16 == 0 or rows == columns == 1)):
        tiles = SMALL  # the copy engine does not take such rows
    c = run(p, tiles)
    assert p.share_of_bound(c) <= 1
    if not activation:
        assert c.tobytes() == p.mirror().tobytes()
