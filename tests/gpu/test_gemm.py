"""Products of INT8 codes on a device: the mirror's bits, the bound, whatever the shape."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.limits import HOPPER_BLOCKS
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.problem.gemm_form import (
    HOPPER_TILES,
    PORTABLE_TILES,
    choose_tiles,
    on_hopper,
    tiles_alone,
    where_shared,
)
from cupyattn.quant.activation import ACTIVATIONS
from cupyattn.quant.blocks import BLOCK_SIZE, STRATEGIES
from tests.gpu.support import Captured, arch_of, cupy, on_device
from tests.quant.gemm_cases import REGIMES, Product, product
from tests.quant.quant_inputs import operand

FORMS = ("portable", "sm90")
#: Tiles of the portable form, on devices that have clusters.
SHARED = (GemmTiles(32, 64, 4, 6, splits=2), GemmTiles(16, 128, 4, 6, splits=4))
#: Tiles of the Hopper form, with three warpgroups that compute.
THREE = tuple(GemmTiles(192, 128, 16, 5, tail_splits=s) for s in (1, 2))


def capability() -> int:
    return int(cupy.cuda.Device().compute_capability)


def run(p: Product, form: str, tiles: GemmTiles | None = None) -> Any:
    """Run a product of NumPy arrays on the device in one form; return NumPy's array."""
    arch = arch_of("gemm@sm90" if form == "sm90" else "gemm")
    moved = dict(zip(("a", "a_scales", "b", "b_scales"), on_device(*p.operands), strict=True))
    if p.bias is not None:
        (moved["bias"],) = on_device(p.bias)
    if p.outliers is not None:
        moved["outliers"] = on_device(*p.outliers)
    c = p.but(**moved).run(arch=arch, tiles=tiles)
    assert isinstance(c, cupy.ndarray)
    return c.get()


CELLS = [
    *(("portable", tiles) for tiles in PORTABLE_TILES),
    *(("sm90", tiles) for tiles in (*HOPPER_TILES, *THREE)),
    *(("portable", tiles) for tiles in SHARED),
]
#: By strategy. Tiles of three warpgroups are tried with scales of blocks.
CELLS_OF = {"block": CELLS, "channel": [cell for cell in CELLS if cell[1] not in THREE]}


@pytest.mark.parametrize(
    ("form", "tiles", "strategy"),
    [(*cell, strategy) for strategy, cells in CELLS_OF.items() for cell in cells],
    ids=str,
)
@pytest.mark.parametrize("shape", [(500, 700, 1040), (1, 300, 4096), (333, 64, 16)], ids=str)
def test_the_kernel_is_the_mirror_to_the_bit(
    form: str, tiles: GemmTiles, strategy: str, shape
) -> None:
    if form == "portable" and tiles.splits > 1 and capability() < 90:
        pytest.skip("needs clusters of blocks: compute capability 9.0 or later")
    if tiles.cluster > -(-shape[2] // BLOCK_SIZE):
        if strategy == "block":
            with pytest.raises(ValueError, match="one for every 128 codes"):
                run(product(0, shape), form, tiles)
        return
    for seed, out_dtype in enumerate(STORAGE):
        p = product(seed, shape, out_dtype=out_dtype, bias=seed > 0, strategy=strategy)
        assert run(p, form, tiles).tobytes() == p.mirror_of(tiles).tobytes()


@pytest.mark.parametrize("tiles", [t for t in HOPPER_TILES if t.splits > 1], ids=str)
def test_a_cluster_gives_the_same_bits_a_hundred_times(tiles: GemmTiles) -> None:
    """Whatever else runs: more clusters than fit, activations, outliers."""
    p = product(2, (150, 3000, 2048), out_dtype="float16", bias=True, activation="silu",
                outliers=72)  # fmt: skip
    first = run(p, "sm90", tiles)
    assert p.share_of_bound(first) <= 1
    plain = product(2, (150, 3000, 2048), out_dtype="float16")
    expected = plain.mirror(tiles.splits).tobytes()
    for _ in range(100):
        assert run(plain, "sm90", tiles).tobytes() == expected
    assert run(p, "sm90", tiles).tobytes() == first.tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_form_that_is_chosen(strategy: str) -> None:
    """For layers of Kandinsky 5 with few rows; and that somebody's own arrays stay."""
    for m in (1, 16, 33, 64, *([512] if strategy == "channel" else [])):
        for n, k in ((1792, 1792), (1792, 7168), (4096, 4096)):
            p = product(m, (m, n, k), out_dtype="float16", bias=True, strategy=strategy)
            arch, tiles = on_hopper(m, n, k) if capability() == 90 else (None, None)
            choices = HOPPER_TILES if arch else PORTABLE_TILES
            expected = p.mirror_of(tiles or choose_tiles(m, n, k, choices))
            moved = on_device(*p.operands, p.bias)
            c = ca.int8_gemm(*moved[:4], "float16", bias=moved[4])
            assert c.get().tobytes() == expected.tobytes()
            for mine, theirs in zip(moved, (*p.operands, p.bias), strict=True):
                assert mine.get().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_block_takes_many_tiles(form: str) -> None:
    """More tiles than SMs: the ring of stages goes on, and a block is at several places."""
    shape = 3000, 3200, 400
    tiles = choose_tiles(*shape, HOPPER_TILES if form == "sm90" else PORTABLE_TILES)
    p = product(1, shape, out_dtype="bfloat16")
    assert run(p, form).tobytes() == p.mirror_of(tiles).tobytes()


@pytest.mark.parametrize("tiles", [HOPPER_TILES[0], HOPPER_TILES[1], *THREE], ids=str)
def test_a_shared_last_wave_gives_the_same_bits_a_hundred_times(tiles: GemmTiles) -> None:
    """Products of several waves, with and without shared tiles; the bound, with outliers."""
    shape = 3000, 3200, 1104
    assert tiles_alone(*shape[:2], tiles) >= HOPPER_BLOCKS
    assert where_shared(*shape[:2], tiles).any() == (tiles.tail_splits > 1)
    p = product(5, shape, out_dtype="float16", bias=True)
    expected = p.mirror_of(tiles)
    operands = on_device(*p.operands, p.bias)
    for _ in range(100):
        c = ca.int8_gemm(
            *operands[:4], "float16", bias=operands[4], tiles=tiles, arch=arch_of("gemm@sm90")
        )
        assert c.get().tobytes() == expected.tobytes()
    p = product(6, shape, out_dtype="float32", activation="gelu", outliers=72)
    assert p.share_of_bound(run(p, "sm90", tiles)) <= 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outliers_and_activations(form: str, activation: str) -> None:
    for seed in (4, 5):
        p = product(
            seed, (300, 290, 512), out_dtype="float32", bias=True, activation=activation,
            outliers=72,
        )  # fmt: skip
        assert p.share_of_bound(run(p, form)) <= 1


@settings(max_examples=120)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 600)),
    st.sampled_from(REGIMES),
    st.sampled_from(tuple(STORAGE)),
    st.sampled_from(ACTIVATIONS),
    st.integers(0, 70),
    st.sampled_from(FORMS),
    st.sampled_from(STRATEGIES),
)
def test_any_shape_holds_its_bound(
    seed, shape, regime, out_dtype, activation, outliers, form, strategy
) -> None:
    p = product(
        seed, shape, regime, out_dtype=out_dtype, bias=bool(seed % 2), activation=activation,
        outliers=outliers if strategy == "block" else 0, strategy=strategy,
    )  # fmt: skip
    c = run(p, form)
    assert p.share_of_bound(c) <= 1
    if strategy == "channel" and not activation:
        assert c.tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", FORMS)
def test_operands_amid_others(form: str, strategy: str) -> None:
    """Rows that end within their stride, at odd addresses, NaN in the scales beside those read."""
    p = product(6, (290, 270, 500), strategy=strategy)
    blocks = p.a_scales.shape[1]
    for offset in (1, 4, 16):
        a, b = (cupy.full((x.shape[0], 560), 127, cupy.int8) for x in (p.a, p.b))
        a_scales, b_scales = (
            cupy.full((x.shape[0], 7), cupy.nan, cupy.float32) for x in (p.a, p.b_scales)
        )
        views = (a[:, offset : offset + 500], a_scales[:, 1 : 1 + blocks],
                 b[:, offset : offset + 500], b_scales[:, 2 : 2 + blocks])  # fmt: skip
        for view, x in zip(views, p.operands, strict=True):
            view[...] = cupy.asarray(x)
        arch = arch_of("gemm@sm90" if form == "sm90" else "gemm")
        c = ca.int8_gemm(*views, "float32", arch=arch)
        assert c.get().tobytes() == p.mirror().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kept", [0, 5])
def test_a_layer_holds_its_bound(dtype: str, kept: int) -> None:
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((300, 1000)) / 32).astype(STORAGE[dtype])
    x = operand(1, STORAGE[dtype], (1, 2, 150, 1000), "outlier channel")[0]
    bias = rng.standard_normal(300).astype(ml_dtypes.bfloat16)
    columns = list(range(kept))
    host = ca.Int8Linear.from_weight(w, bias, outlier_columns=columns)
    layer = ca.Int8Linear.from_weight(*on_device(w, bias), outlier_columns=columns)
    y = layer(*on_device(x)).get()
    exact = x.astype(np.float64) @ w.astype(np.float64).T + bias.astype(np.float64)
    assert (np.abs(y.astype(np.float64) - exact) <= host.error(x, w)).all()
    if not kept:
        assert y.tobytes() == host(x).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_activations_are_quantised_as_numpy_does(dtype: str) -> None:
    for shape in ((1000, 3072), (7, 129), (3, 5, 1000)):
        for regime in ("wide", "subnormal", "huge", "signed zeros"):
            lead = (1,) * (4 - len(shape))
            x = operand(2, STORAGE[dtype], (*lead, *shape), regime)[(0,) * len(lead)]
            for mine, theirs in zip(ca.act_quant(*on_device(x)), ca.act_quant(x), strict=True):
                assert mine.get().tobytes() == theirs.tobytes()


def test_a_product_goes_where_the_caller_says() -> None:
    p = product(4, (70, 256, 512), out_dtype="float16", bias=True)
    operands, (bias,) = on_device(*p.operands), on_device(p.bias)
    behind = cupy.full(70 * 256 + 8, cupy.nan, np.float16)
    for start in (0, 8, 8):  # the last is a call that came again
        behind.fill(cupy.nan)
        out = behind[start : start + 70 * 256].reshape(70, 256)
        assert ca.int8_gemm(*operands, "float16", bias=bias, out=out) is out
        assert out.get().tobytes() == p.mirror().tobytes()
        assert bool(cupy.isnan(behind).sum() == 8)
    codes = operands[0].reshape(-1).view(np.float16)[: 70 * 256].reshape(70, 256)
    for _ in range(2):
        with pytest.raises(ValueError, match="out must not share memory with a$"):
            ca.int8_gemm(*operands, "float16", bias=bias, out=codes)


def test_a_call_can_be_captured() -> None:
    """It does not wait for the device, and allocates from the pool alone."""
    p = product(3, (256, 256, 512))
    operands = on_device(*p.operands)
    c = Captured(lambda: ca.int8_gemm(*operands, "float32")).replay()
    assert c.get().tobytes() == p.mirror().tobytes()
