"""Products of INT8 codes: bound, mirror, kernel on the interpreter, faults, arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.gemm_form import PORTABLE_TILES, choose_tiles
from cupyattn.quant.activation import ACTIVATION_SLOPE, ACTIVATIONS
from cupyattn.quant.blocks import BLOCK_SIZE, STRATEGIES
from cupyattn.reference.gemm import activate
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import REGIMES, Product, planned, product

SMALL = GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=2)
#: Tiles of other shapes: one row of warps, several, columns of two groups of scales.
SHAPES = (
    GemmTiles(block_m=16, block_n=64, num_warps=4, num_stages=3),
    GemmTiles(block_m=128, block_n=64, num_warps=4, num_stages=2),
    GemmTiles(block_m=16, block_n=256, num_warps=4, num_stages=2),
)

#: Tiles of the Hopper form.
HOPPER = GemmTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)

# ---- what it is ----------------------------------------------------------------------------------


def test_the_exact_product_is_that_of_the_numbers() -> None:
    p = product(0, (9, 140, 300), bias=True, outliers=3)
    x = as_float64(p.a) * as_float64(p.a_scales).repeat(BLOCK_SIZE, 1)[:, :300]
    w = (
        as_float64(p.b)
        * as_float64(p.b_scales).repeat(BLOCK_SIZE, 1)[:, :300].repeat(BLOCK_SIZE, 0)[:140]
    )
    kept = as_float64(p.outliers[0]) @ as_float64(p.outliers[1]).T
    expected = x @ w.T + kept + as_float64(p.bias)
    np.testing.assert_allclose(ca.quant.gemm_exact(*p.operands, **p.after), expected, rtol=1e-12)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 9), st.integers(0, 140), st.integers(0, 400)),
    st.sampled_from(REGIMES),
    st.sampled_from(tuple(STORAGE)),
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 20),
    st.sampled_from(STRATEGIES),
)
def test_the_mirror_holds_its_bound(
    seed, shape, regime, out_dtype, bias, activation, outliers, strategy
) -> None:
    p = product(
        seed, shape, regime, out_dtype=out_dtype, bias=bias, activation=activation,
        outliers=outliers if strategy == "block" else 0, strategy=strategy,
    )  # fmt: skip
    c = p.run()
    assert c.dtype == STORAGE[out_dtype] and c.shape == shape[:2]
    assert p.share_of_bound(c) <= 1


def test_the_bound_is_not_wide() -> None:
    """In float32 a hundredth of a thousandth of the result, in 16 bits a rounding of it."""
    p = product(1, (20, 140, 512))
    size = np.abs(ca.quant.gemm_exact(*p.operands)).mean()
    assert ca.quant.gemm_error(*p.operands, "float32").mean() < 2e-6 * size
    for out_dtype, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        assert ca.quant.gemm_error(*p.operands, out_dtype).mean() < 1.1 * unit * size
        assert p.but(out_dtype=out_dtype).share_of_bound(p.mirror().astype(out_dtype)) > 0.9


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_no_activation_is_steeper_than_its_bound_says(activation: str) -> None:
    x = np.linspace(-12, 12, 400_001)
    steepest = np.abs(np.diff(activate(x, activation)) / np.diff(x)).max()
    assert 0.99 * ACTIVATION_SLOPE[activation] < steepest < ACTIVATION_SLOPE[activation]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_breaks_the_bound(strategy: str) -> None:
    p = product(2, (20, 140, 300), bias=True, activation="gelu", strategy=strategy)
    wrong = {
        "scale of the next row": p.but(a_scales=np.roll(p.a_scales, 1, axis=0)),
        "last slice left out": p.but(a=np.where(np.arange(300) < 256, p.a, np.int8(0))),
        "no bias": p.but(bias=None),
    }
    wrong |= {
        "scale of the next slice": p.but(a_scales=np.roll(p.a_scales, 1, axis=1)),
        "B scale of the first rows": p.but(b_scales=p.b_scales[[0, 0]]),
        "other GELU": p.but(activation="gelu_tanh"),
    } if strategy == "block" else {
        "scale of the next column": p.but(b_scales=np.roll(p.b_scales, 1, axis=0)),
    }  # fmt: skip
    for fault, other in wrong.items():
        assert p.share_of_bound(other.mirror()) > 10, fault


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "out_dtype", "bias"),
    [
        ((37, 45, 200), SMALL, "float32", True),
        ((33, 64, 256), SMALL, "float16", False),
        ((5, 136, 147), SHAPES[0], "bfloat16", True),
        ((130, 70, 130), SHAPES[1], "float32", False),
        ((16, 300, 96), SHAPES[2], "float16", True),
        ((3, 5, 0), SMALL, "float32", True),
    ],
    ids=str,
)
def test_the_kernel_is_the_mirror_to_the_bit(shape, tiles, out_dtype, bias) -> None:
    p = product(3, shape, out_dtype=out_dtype, bias=bias)
    c = p.run(backend="interpret", tiles=tiles)
    assert c.tobytes() == p.mirror().tobytes()
    assert p.share_of_bound(c) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outliers_and_activations_of_the_kernel(activation: str) -> None:
    p = product(
        4 + len(activation) % 2, (33, 40, 160), out_dtype="float32", bias=True,
        activation=activation, outliers=70,
    )  # fmt: skip
    assert p.share_of_bound(p.run(backend="interpret", tiles=SMALL)) <= 1


def amid_others(p: Product, offset: int, **more: Any) -> Product:
    """The same with odd addresses and strides, leading axes, and NaN beside used scales."""
    views = []
    for x, first in zip(p.operands, (offset, 1, offset, 2), strict=True):
        other = 127 if x.dtype == np.int8 else np.nan
        views.append(np.full((len(x), x.shape[1] + 30), other, x.dtype)[:, first:][:, : x.shape[1]])
        views[-1][...] = x
    q = Product(*views, **more)
    return q.but(**{n: getattr(q, n).reshape(2, 17, -1) for n in ("a", "a_scales")})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("offset", [1, 4])
def test_operands_amid_others(offset: int, strategy: str) -> None:
    n, outliers = (33, 8) if strategy == "block" else (36, 0)
    p = product(6, (34, n, 200), outliers=outliers, strategy=strategy)
    pair = p.outliers and (p.outliers[0].reshape(2, 17, 8), p.outliers[1])
    c = amid_others(p, offset, outliers=pair).run(backend="interpret", tiles=SMALL)
    assert c.shape == (2, 17, n) and p.share_of_bound(c.reshape(34, n)) <= 1
    assert outliers or c.tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scale_that_is_nan_poisons_what_it_belongs_to(strategy: str) -> None:
    p = product(7, (33, 140, 256), strategy=strategy)
    a_scales, b_scales = p.a_scales.copy(), p.b_scales.copy()
    line, columns = (1, slice(128, None)) if strategy == "block" else (77, 77)
    a_scales[3, -1] = b_scales[line, 0] = np.nan
    q = p.but(a_scales=a_scales, b_scales=b_scales)
    expected = p.mirror()
    expected[3], expected[:, columns] = np.nan, np.nan
    for backend in ("mirror", "interpret"):
        tiles = SMALL if backend == "interpret" else None
        np.testing.assert_array_equal(q.run(backend=backend, tiles=tiles), expected)


# ---- the source, robbed of a line ----------------------------------------------------------------

#: File, line, what comes in its place, and what must be found: a hazard, or "": a wrong result.
OWN, SHARED = "linear/gemm_int8.cu", "prims/codes/gemm_mma.cuh"
THEFTS = {
    "no barrier": (OWN, "    __syncthreads();  // this step's", "    // this step's", "race"),
    "a wait too few": (OWN, "group<NUM_STAGES - 2>", "group<NUM_STAGES - 1>", "in flight"),
    "rows past the end": (SHARED, "from < rows_valid && ", "", "out of bounds"),
    "codes past the end": (SHARED, " && byte < bytes_valid", "", "between the rows of a"),
    "scale of the first slice": (OWN, "* p.A_scale_stride + slice;", "* p.A_scale_stride;", ""),
    "rows exchanged": (
        OWN, "A_scale[stage][row0 + r * 16 + g + h * 8]", "A_scale[stage][row0 + r * 16 + g]", "",
    ),
    "scale past the end": (OWN, "min(m0 + i, p.m - 1)", "(m0 + i)", "out of bounds"),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    source, line, instead, finding = THEFTS[theft]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    p = product(8, (40, 33, 392))
    a, b = (np.full((x.shape[0], 400), 127, np.int8) for x in (p.a, p.b))
    a[:, :392], b[:, :392] = p.a, p.b
    p = p.but(a=a[:, :392], b=b[:, :392])
    p.check_theft(lambda: p.run(backend="interpret", tiles=SMALL), finding)


# ---- what is compiled ----------------------------------------------------------------------------


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_tiles_fit_the_product(m: int, n: int) -> None:
    tiles = choose_tiles(m, n, 128, PORTABLE_TILES)
    (one,) = planned(m, n, 128).launches
    assert one.grid == -(-m // tiles.block_m) * -(-n // tiles.block_n)
    if m <= 16:
        assert tiles.block_m == 16
    if min(m, n) >= 4096:
        assert tiles is PORTABLE_TILES[0]


def test_accesses_are_as_wide_as_rows_allow() -> None:
    for k, access_bytes in ((4096, 16), (4104, 8), (36, 4), (7, 1)):
        assert planned(64, 64, k).features.access_bytes == access_bytes
    assert [planned(64, n, 128).features.vec for n in (64, 36, 7)] == [8, 4, 1]
    assert planned(64, 64, 128, "float32").features.vec == 4


def test_more_tiles_than_an_int_counts_are_refused() -> None:
    for arch in (None, "sm_90a"):
        with pytest.raises(UnsupportedError, match="tiles: split its rows"):
            planned(2**24, 2**30, 128, arch=arch)
        assert planned(2**20, 2**18, 128, arch=arch).launches


def test_tiles_that_cannot_be_are_refused() -> None:
    wrong = GemmTiles(block_m=32, block_n=32, num_warps=4, num_stages=2)
    for backend in ("mirror", "interpret"):
        with pytest.raises(ValueError, match="multiple of 16 columns"):
            product(0, (8, 8, 8)).run(backend=backend, tiles=wrong)
    with pytest.raises(ValueError, match="num_stages must be a positive integer up to .*, got 0"):
        GemmTiles(block_m=32, block_n=32, num_warps=2, num_stages=0)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("shape", [(0, 5, 8), (5, 0, 8), (0, 0, 0)])
def test_empty_products(shape, backend: str) -> None:
    assert product(0, shape).run(backend=backend).shape == shape[:2]


P = product(0, (4, 6, 200), bias=True, outliers=2)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (P.but(a=P.a.astype(np.int16)), TypeError, "a must be int8, got int16"),
        (P.but(b_scales=P.b_scales.astype(float)), TypeError, "b_scales must be float32"),
        (P.but(a=P.a[:, :199]), ValueError, r"a.shape=\(4, 199\) and b.shape=\(6, 200\)"),
        (P.but(b=P.b[None]), ValueError, r"b \(n, k\)"),
        (P.but(a_scales=P.a_scales[:, :1]), ValueError, r"a_scales must have shape \(4, 2\)"),
        (P.but(bias=P.bias[:5]), ValueError, r"bias must have shape \(6,\).*got \(5,\)"),
        (P.but(bias=P.bias.astype(float)), TypeError, "bias must be .* got float64"),
        (P.but(out_dtype="int8"), ValueError, "out_dtype must be .* got 'int8'"),
        (P.but(activation="relu"), ValueError, "activation must be 'gelu'.* got 'relu'"),
        (P.but(outliers=(P.outliers[0], P.outliers[1][:, :1])), ValueError, "b_16 must have"),
        (P.but(outliers=(P.outliers[0].astype(np.float32),) * 2), TypeError, "both be float16"),
    ],
)
def test_what_cannot_be_is_said(wrong: Product, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        wrong.run()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_the_result_goes_where_the_caller_says(backend: str) -> None:
    p = product(5, (3, 40, 130), out_dtype="float16", bias=True)
    behind = np.full(3 * 40 + 8, np.nan, np.float16)
    out = behind[8:].reshape(1, 3, 40)
    wide = p.but(a=p.a[None], a_scales=p.a_scales[None])
    assert wide.run(backend=backend, out=out) is out
    assert out[0].tobytes() == p.mirror().tobytes() and np.isnan(behind[:8]).all()


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize(
    ("out", "said"),
    [
        (np.zeros((4, 5), np.float32), r"shape \(4, 6\) and dtype float32, got shape \(4, 5\)"),
        (np.zeros((4, 6), np.float16), "got shape .* and dtype float16"),
        (np.zeros((6, 4), np.float32).T, "contiguous last axis"),
        (np.zeros((8, 6), np.float32)[::2], "must lie in C order"),
        (np.broadcast_to(np.zeros(6, np.float32), (4, 6)), "broadcast view"),
        (P.b.reshape(-1)[:96].view(np.float32).reshape(4, 6), "must not share memory with b"),
    ],
)
def test_what_cannot_receive_is_said(backend: str, out: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        P.but(out_dtype="float32").run(backend=backend, out=out)


def test_inputs_stay_as_they_are() -> None:
    before = [x.copy() for x in (*P.operands, P.bias, *P.outliers)]
    P.run(), P.run(backend="interpret", tiles=SMALL)
    for x, y in zip(before, (*P.operands, P.bias, *P.outliers), strict=True):
        assert x.tobytes() == y.tobytes()


# ---- any shape -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 70), st.integers(1, 140), st.integers(0, 300)),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 70),
    st.sampled_from([(SMALL, None), (SHAPES[0], None), (HOPPER, "sm_90a")]),
)
def test_any_shape_holds_its_bound(seed, shape, out_dtype, activation, outliers, kernel) -> None:
    p = product(
        seed, shape, out_dtype=out_dtype, bias=bool(seed % 2), activation=activation,
        outliers=outliers,
    )  # fmt: skip
    tiles, arch = kernel
    aligned = all(x == 1 or n % 16 == 0 for x in shape[:2] for n in (shape[2], 2 * outliers))
    if arch and not (aligned and shape[2]):
        tiles, arch = SMALL, None  # the copy engine does not take such rows
    c = p.run(backend="interpret", tiles=tiles, arch=arch)
    assert p.share_of_bound(c) <= 1
    if not activation and not outliers:
        assert c.tobytes() == p.mirror().tobytes()
