"""Layers of few rows by channel in one launch: the bits of two, every epilogue, faults, choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import KernelFault
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.ops import layers
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.operation import problem_of, run
from cupyattn.plans.records import Work
from cupyattn.problem.gemm_form import FUSED_TILES, fitting_tiles, fuses_quantising, shared_bytes
from cupyattn.quant.activation import ACTIVATIONS, columns_of
from tests.faults.fault_patches import put_a_line_in_place
from tests.quant.gemm_cases import Product
from tests.quant.quant_inputs import DTYPES

SMALL = GemmTiles(16, 32, num_warps=2, num_stages=2)
#: Two parts of k to a block: of a warp's tiles of 16 x 8 each block adds up one.
TWO = GemmTiles(16, 32, num_warps=2, num_stages=3, splits=2)
FOUR = GemmTiles(32, 64, num_warps=4, num_stages=2, splits=4)
MOST = GemmTiles(64, 64, num_warps=4, num_stages=2, splits=8)


@dataclass(frozen=True)
class Layer:
    """A layer by channel and its activations."""

    x: Any
    codes: Any
    scales: Any
    out_dtype: str = "float32"
    activation: str = ""
    bias: Any = None
    residual: Any = None
    gate: Any = None

    def arrays(self) -> dict[str, Any]:
        shape = (*self.x.shape[:-1], columns_of(len(self.codes), self.activation))
        after = {"bias0": self.bias, "residual0": self.residual, "gate0": self.gate}
        return {
            "x": self.x, "b0": self.codes, "b_scales0": self.scales,
            **{name: array for name, array in after.items() if array is not None},
            "c0": np.full(shape, 7, STORAGE[self.out_dtype]),
        }  # fmt: skip

    def asked(self, tiles: GemmTiles | None, backend: str) -> LayersSettings:
        arch = None if backend == "mirror" else "sm_90"
        return LayersSettings(self.out_dtype, (self.activation,), arch, backend, tiles)

    def run(self, tiles: GemmTiles, backend: str = "interpret") -> np.ndarray:
        (c,) = run(LAYERS, self.asked(tiles, backend), self.arrays())
        return c

    def product(self) -> Product:
        """The same with codes that were made before."""
        return Product(
            *ca.act_quant(self.x, strategy="channel"), self.codes, self.scales, self.out_dtype,
            self.bias, self.activation, None, self.residual, self.gate,
        )  # fmt: skip


def layer(seed: int, shape: tuple[int, int, int], dtype: Any = np.float16, **more: Any) -> Layer:
    """Draw a layer of (rows, rows of the weight, channels); with bias where `bias` says so."""
    m, n, k = shape
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, 1)))).astype(dtype)
    w = (rng.standard_normal((n, k)) / np.sqrt(max(k, 1))).astype(np.float32)
    bias = rng.standard_normal(n).astype(ml_dtypes.bfloat16) if more.pop("bias", False) else None
    return Layer(x, *ca.weight_quant(w, strategy="channel"), bias=bias, **more)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "dtype", "out_dtype"),
    [
        ((1, 33, 200), SMALL, DTYPES[0], "float32"),
        ((5, 40, 300), TWO, DTYPES[1], "bfloat16"),
        ((16, 136, 1000), GemmTiles(16, 128, 4, 3, splits=4), DTYPES[2], "float16"),
        ((33, 45, 700), GemmTiles(64, 32, 2, 2, splits=2), DTYPES[1], "float32"),
        ((64, 70, 1296), MOST, DTYPES[0], "bfloat16"),
        ((20, 34, 640), FOUR, DTYPES[2], "float32"),
        ((3, 5, 0), SMALL, DTYPES[0], "float32"),
        ((18, 40, 3000), SMALL, DTYPES[1], "float16"),  # two tiles of rows, reads past those held
        pytest.param((64, 300, 1100), GemmTiles(64, 128, 8, 2, splits=4), DTYPES[1], "bfloat16",
                     marks=pytest.mark.slow),
        pytest.param((16, 300, 1100), GemmTiles(16, 256, 8, 2, splits=4), DTYPES[1], "bfloat16",
                     marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_one_launch_has_the_bits_of_two(shape, tiles, dtype, out_dtype) -> None:
    one = layer(1, shape, dtype, out_dtype=out_dtype, bias=True)
    c = one.run(tiles)
    assert c.tobytes() == one.product().mirror().tobytes() == one.run(tiles, "mirror").tobytes()


@pytest.mark.parametrize("tiles", [SMALL, TWO], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_no_plain_numbers(dtype: Any, tiles: GemmTiles) -> None:
    """Zeros and signed zeros, NaN and infinity in either part of k, subnormal and huge numbers."""
    one = layer(2, (10, 40, 300), dtype)
    x = one.x
    x[0], x[1] = 0, -0.0
    x[2, 3] = x[3, 299] = np.nan
    x[4, 290], x[5, 0] = np.inf, -np.inf
    largest = ml_dtypes.finfo(dtype).max
    x[6], x[7] = ml_dtypes.finfo(dtype).smallest_subnormal, largest
    x[8, ::2] = -largest
    expected = one.product().mirror()
    assert np.isnan(expected[2:6]).all() and not np.isnan(expected[[0, 1, 6, 9]]).any()
    np.testing.assert_array_equal(one.run(tiles), expected)


@pytest.mark.parametrize("tiles", [SMALL, TWO], ids=str)
def test_what_follows_the_product(tiles: GemmTiles) -> None:
    for seed, (activation, gates, out_dtype) in enumerate(
        (("", 2, "float16"), ("", None, "bfloat16"), ("silu", None, "float32"),
         ("gelu", 1, "float32"), ("swiglu", None, "float32"), ("geglu", 2, "float32"))
    ):  # fmt: skip
        one = layer(seed, (6, 48, 300), bias=True, activation=activation, out_dtype=out_dtype)
        rng, columns = np.random.default_rng(seed), columns_of(48, activation)
        if gates is not None:
            residual, gate = (
                rng.standard_normal((rows, columns)).astype(STORAGE[out_dtype])
                for rows in (6, gates)
            )
            one = replace(one, residual=residual, gate=gate)
        c, product = one.run(tiles), one.product()
        assert product.share_of_bound(c) <= 1
        if not activation:
            assert c.tobytes() == product.mirror().tobytes()


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_activations_amid_others(offset: int) -> None:
    """Rows at odd addresses and strides, between NaN; leading axes."""
    one = layer(3, (6, 34, 208), np.float16)
    wide = np.full((6, 240), np.nan, np.float16)
    view = wide[:, offset : offset + 208]
    view[...] = one.x
    expected = one.product().mirror()
    for tiles in (SMALL, TWO):
        assert replace(one, x=view).run(tiles).tobytes() == expected.tobytes()
        in_two = replace(one, x=view.reshape(2, 3, 208))
        assert in_two.run(tiles).tobytes() == expected.tobytes()


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(0, 600)),
    st.sampled_from(DTYPES),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([SMALL, TWO]),
)
def test_any_shape(seed, shape, dtype, out_dtype, activation, tiles) -> None:
    if shape[2] <= 128:
        tiles = SMALL
    m, n, k = shape
    if n == 1:
        return  # one row in one block: scales of a block have that shape, too
    n += n % 2 if activation else 0
    one = layer(seed, (m, n, k), dtype, out_dtype=out_dtype, activation=activation)
    c, product = one.run(tiles), one.product()
    assert product.share_of_bound(c) <= 1
    if not activation:
        assert c.tobytes() == product.mirror().tobytes()


# ---- the source, robbed of a line ----------------------------------------------------------------

OWN, STORE = "linear/gemm_int8_channel_fused.cu", "prims/codes/gemm_channel_mma.cuh"
#: File, line, what comes in its place, tiles, and what must be found: a hazard, or "": wrong bits.
THEFTS = {
    "maximum of this block's part alone": (
        OWN, "other < SPLITS; ++other", "other < 0; ++other", TWO, "",
    ),
    "blocks do not meet": (
        OWN, "    cluster_sync();  // the maxima", "    __syncthreads();  //", TWO, "race|never",
    ),
    "maximum of the next row": (
        OWN, "[0][0] + from.row(i + j), int32_t", "[0][0] + (from.row(i + j) ^ 1), int32_t", SMALL,
        "",
    ),
    "maxima that begin anywhere": (
        OWN, "  if (thread_id() < BLOCK_M) (&smem.absmax", "  if (false) (&smem.absmax", SMALL,
        "never written",
    ),
    "no barrier before maxima are raised": (
        OWN, "  __syncthreads();  // zeros are visible", "  //", SMALL, "race|never written",
    ),
    "no barrier before scales are made": (
        OWN, "    __syncthreads();  // all maxima", "    __syncwarp();  //", SMALL, "race",
    ),
    "no barrier before scales are read": (
        OWN, "  __syncthreads();  // scales", "  //", SMALL, "race|never written",
    ),
    "accesses past those held left out of the maximum": (
        OWN, "    raise(smem, from, i, [&](int j) { return y[j]; });", "", SMALL, "",
    ),
    "channels past the end": (
        OWN, "channel >= min(channels, coded)", "channel >= coded", SMALL, "out of bounds|between",
    ),
    "rows past the end": (OWN, "if (row >= rows || ", "if (", SMALL, "out of bounds|between"),
    "codes of the rows before": (OWN, "from.row(i), byte / 16)", "from.row(i) ^ 1, byte / 16)",
                                 SMALL, ""),
    "rows past the last left as they are": (
        OWN, "store_codes(smem, from, i, {});", "{}", SMALL, "never written",
    ),
    "a wait too few": (OWN, "group<NUM_STAGES - 2>", "group<NUM_STAGES - 1>", SMALL, "in flight"),
    "scale of another row": (
        OWN, "return smem.scale[row - m0];", "return smem.scale[(row - m0) ^ 1];", SMALL, "",
    ),
    "slices of the first part": (
        OWN, "p.B + n0 * p.B_stride + byte, p.B_stride,", "p.B + n0 * p.B_stride, p.B_stride,",
        TWO, "",
    ),
    "rows of a merged tile exchanged": (
        STORE, "A_scale(row + h * 8), B_scale", "A_scale(row + 8 - h * 8), B_scale", TWO, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch) -> None:
    source, line, instead, tiles, finding = THEFTS[theft]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    one = layer(4, (13, 33, 2300 if "held" in theft else 392), np.float16)
    rows, k = one.x.shape
    wide = np.full((rows, k + 8), np.nan, np.float16)
    wide[:, :k] = one.x
    wide[:, k - 1] = 50 * (1 + np.arange(rows))  # of the last part, and past those held
    one = replace(one, x=wide[:, :k])
    if finding:
        with pytest.raises(KernelFault, match=finding):
            one.run(tiles)
    else:
        assert one.run(tiles).tobytes() != one.product().mirror().tobytes()


# ---- what is chosen, and compiled ----------------------------------------------------------------


def work_of(one: Layer, tiles: GemmTiles | None, monkeypatch: Any, hopper: bool) -> Work:
    """Return the work of a layer, of a Hopper device or of another one."""
    monkeypatch.setattr(layers, "own_arch", lambda *_: "sm_90a" if hopper else None)
    asked = LayersSettings(one.out_dtype, (one.activation,), None, "interpret", tiles)
    return LAYERS.plan(problem_of(LAYERS, asked, one.arrays()))


def entries(work: Work) -> list[str]:
    return [launch.entry for plan in work.plans for launch in plan.launches]


def test_few_rows_on_hopper_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ["row_quant", "gemm_int8_channel"]
    for rows, hopper, expected in (
        (16, True, ["gemm_int8_channel_fused"]), (64, True, ["gemm_int8_channel_fused"]),
        (65, True, two), (16, False, two),
    ):  # fmt: skip
        one = layer(5, (rows, 144, 256), ml_dtypes.bfloat16)
        work = work_of(one, None, monkeypatch, hopper)
        assert entries(work) == expected
        assert [x.name for x in work.workspace] == ([] if len(expected) == 1 else ["a", "a_scales"])
    block = layer(5, (16, 144, 256))
    block = replace(block, scales=np.ones((2, 2), np.float32))
    assert entries(work_of(block, None, monkeypatch, True)) == ["act_quant", "gemm_int8"]


def test_layers_of_one_input_choose_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide layer takes codes, and the pass runs for it alone; both have the right bits."""
    monkeypatch.setattr(layers, "own_arch", lambda *_: "sm_90a")
    monkeypatch.setattr(layers, "fuses_quantising", lambda m, n, k: n < 50)
    one, other = layer(6, (5, 40, 256)), layer(7, (5, 72, 256))
    arrays = {**one.arrays(), **{f"{n[:-1]}1": x for n, x in other.arrays().items() if n != "x"}}
    asked = LayersSettings("float32", ("", "silu"), None, "interpret")
    work = LAYERS.plan(problem_of(LAYERS, asked, arrays))
    assert entries(work) == ["row_quant", "gemm_int8_channel_fused", "gemm_int8_channel"]
    found = run(LAYERS, asked, arrays)
    shared = replace(other, x=one.x, activation="silu")
    assert found[0].tobytes() == one.product().mirror().tobytes()
    assert shared.product().share_of_bound(found[1]) <= 1


def test_wide_layers_and_many_rows_are_not_fused() -> None:
    assert [fuses_quantising(m, 3072, 3072) for m in (1, 16, 32, 64, 65)] == [True] * 4 + [False]
    assert not fuses_quantising(64, 13_824, 5120) and fuses_quantising(16, 13_824, 5120)
    assert not any(fuses_quantising(*empty) for empty in ((0, 8, 8), (8, 0, 8), (8, 8, 0)))
    assert not fuses_quantising(64, 3072, 131_072)  # codes past shared memory


@pytest.mark.parametrize(
    ("tiles", "arch"),
    [
        pytest.param(
            tiles, arch, id=f"{tiles.block_m}x{tiles.block_n}-{tiles.splits}-{arch}",
            marks=[] if number % 3 == 0 else [pytest.mark.slow],
        )
        for number, (tiles, arch) in enumerate(
            (tiles, arch)
            for arch in ("sm_90", "sm_90a", "sm_80", "sm_120")
            for choices in FUSED_TILES.values() for tiles in choices
            if tiles.splits == 1 or arch != "sm_80"
        )
    ],
)  # fmt: skip
def test_tiles_spill_nothing(tiles: GemmTiles, arch: str) -> None:
    for k in (3072, 15_360):
        if tiles not in fitting_tiles(tiles.block_m, k):
            continue
        one = Layer(
            *(np.zeros(s, t) for s, t in (((tiles.block_m, k), ml_dtypes.bfloat16),
                                          ((256, k), np.int8), ((256, 1), np.float32))),
            "bfloat16", "gelu", np.zeros(256, ml_dtypes.bfloat16),
        )  # fmt: skip
        work = LAYERS.plan(problem_of(LAYERS, one.asked(tiles, "interpret"), one.arrays()))
        (launch,) = work.plans[0].launches
        binary = kc.build(launch.module, arch)
        taken = binary.kernels["gemm_int8_channel_fused"]
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
        assert binary.smem_bytes == shared_bytes(k, tiles)


def test_what_cannot_be_is_said() -> None:
    one = layer(8, (4, 33, 200))
    with pytest.raises(ValueError, match="block_m must be 16, 32 or 64"):
        one.run(GemmTiles(128, 64, num_warps=4, num_stages=2))
    with pytest.raises(ValueError, match="splits must be 1 to 2"):
        one.run(GemmTiles(16, 128, num_warps=4, num_stages=2, splits=4))
    with pytest.raises(UnsupportedError, match="need compute capability 9.0"):
        asked = one.asked(TWO, "interpret")._replace(arch="sm_80")
        run(LAYERS, asked, one.arrays())
