"""J1 on the device: codes and scales of quantize*.cu equal the mirror's, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import plan
from cupyattn.kernels.features import BY_COLUMN, ROPE_PAIRS
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.row_preparation import Preparation
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.quant.rotation import GROUPS
from cupyattn.reference.quantize import quantize_mirror
from tests.quant.quant_inputs import DTYPES, assert_mean, operand
from tests.support import runs
from tests.support.runs import bits, normal

cupy = pytest.importorskip("cupy")

TILES = Tiles(64, 32, 4)
REGIMES = (
    "normal", "channel bias", "constant rows", "subnormal", "zeros", "large", "far outlier channel",
)  # fmt: skip


def on_device(x: npt.NDArray) -> Any:
    return cupy.asarray(x)


def assert_equal_to_mirror(
    got: QuantizedQKV, q: npt.NDArray, k: npt.NDArray, v: npt.NDArray, tiles: Tiles = TILES
) -> None:
    """Compare with the mirror, which takes the kernel's mean as given."""
    mean = None if got.k_mean is None else got.k_mean.get()
    want = quantize_mirror(q, k, v, got.config, tiles, k_mean=mean)
    assert (got.group_q, got.group_kv, got.out_dtype) == (
        want.group_q, want.group_kv, want.out_dtype,
    )  # fmt: skip
    for name in ("q_codes", "k_codes", "q_scale", "k_scale", "v"):
        a, b = getattr(got, name).get(), getattr(want, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
        wrong = np.argwhere(
            np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
        )
        assert not len(wrong), (
            f"{name} differs at {len(wrong)} of {a.size} places, first {wrong[0].tolist()}: "
            f"kernel {a[tuple(wrong[0])]}, mirror {b[tuple(wrong[0])]}"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 7, 1, 255])
def test_kernel_equals_mirror(head_dim: int, granularity: str, dtype: np.dtype) -> None:
    q = operand(1, dtype, (2, 4, 133, head_dim))
    k = operand(2, dtype, (2, 2, 301, head_dim), "channel bias")
    v = operand(3, dtype, (2, 2, 301, head_dim))
    quant = QuantConfig(granularity_q=granularity, granularity_k=granularity)
    arrays = [on_device(x) for x in (q, k, v)]
    got = quantize(*arrays, quant=quant, tiles=TILES)
    assert_equal_to_mirror(got, q, k, v)
    assert_mean(got.k_mean.get(), k)
    for array, x in zip(arrays, (q, k, v), strict=True):
        assert array.get().tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("smooth", [False, True])
def test_value_regimes(smooth: bool, regime: str, dtype: np.dtype) -> None:
    q, k, v = (operand(i, dtype, (1, 2, 97, 64), regime) for i in range(3))
    for granularity in ("thread", "head"):
        quant = QuantConfig(granularity, granularity, smooth_k=smooth)
        got = quantize(*map(on_device, (q, k, np.zeros_like(v))), quant=quant, tiles=TILES)
        assert_equal_to_mirror(got, q, k, np.zeros_like(v))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_tails(length: int) -> None:
    q, k, v = (operand(i, DTYPES[0], (1, 2, length, 64)) for i in range(3))
    for granularity in GRANULARITIES:
        got = quantize(
            *map(on_device, (q, k, v)), quant=QuantConfig(granularity, granularity), tiles=TILES
        )
        assert_equal_to_mirror(got, q, k, v)


@pytest.mark.parametrize("blocks", [(16, 16), (48, 112), (256, 512)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_blocks_of_any_size(head_dim: int, blocks: tuple[int, int]) -> None:
    tiles = Tiles(*blocks, 1)
    q, k, v = (operand(i, DTYPES[2], (1, 2, 1100, head_dim)) for i in range(3))
    quant = QuantConfig("block", "block")
    got = quantize(*map(on_device, (q, k, v)), quant=quant, tiles=tiles)
    assert_equal_to_mirror(got, q, k, v, tiles)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_non_finite_values(granularity: str, value: float) -> None:
    for dtype in DTYPES:
        q, k, v = (operand(i, dtype, (2, 2, 150, 64)) for i in range(3))
        q[1, 0, 77, 5] = k[0, 1, 149, 63] = k[0, 1, 3, 0] = value
        default = lookup("fa_int8").default_tiles(64)
        quant = QuantConfig(granularity, granularity)
        got = quantize(*map(on_device, (q, k, v)), quant=quant, tiles=default)
        assert_equal_to_mirror(got, q, k, v, default)
        assert np.isnan(got.q_scale.get()).any() and np.isfinite(got.k_mean.get()).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_static_scales(granularity: str) -> None:
    q, k, v = (operand(i, DTYPES[0], (2, 3, 100, 64), "far outlier channel") for i in range(3))
    q[1, 2, 40, 3], k[0, 0, 99, 63] = np.nan, np.inf
    tensor = granularity == "tensor"
    groups = {"tensor": (1, 1), "head": (1, 1), "block": (2, 4), "thread": (50, 7)}
    shapes = [(1, 1 if tensor else 3, n) for n in groups.get(granularity, (100, 100))]
    scales = tuple(np.random.default_rng(0).uniform(0.01, 0.03, s).astype("f4") for s in shapes)
    quant = QuantConfig(granularity, granularity, scales=scales)
    got = quantize(*map(on_device, (q, k, v)), quant=quant, tiles=TILES)
    assert_equal_to_mirror(got, q, k, v)
    on_the_device = QuantConfig(granularity, granularity, scales=tuple(map(on_device, scales)))
    same = quantize(*map(on_device, (q, k, v)), quant=on_the_device, tiles=TILES)
    assert same.q_codes.get().tobytes() == got.q_codes.get().tobytes()
    for scale, given in zip(on_the_device.scales, scales, strict=True):
        assert scale.get().tobytes() == given.tobytes()  # the caller's array keeps its numbers


def test_an_unusable_static_scale_on_the_device_gives_nan() -> None:
    q = operand(0, DTYPES[0], (1, 1, 4, 64))
    scale = on_device(np.float32([[[0.02, 0.0, -1.0, np.nan]]]))
    quant = QuantConfig("token", "token", smooth_k=False, scales=(scale, scale))
    got = quantize(*[on_device(q)] * 3, quant=quant)
    assert np.isnan(got.q_scale.get()).tolist() == [[[False, True, True, True]]]
    assert (got.q_codes.get()[0, 0, 1:] == 0).all() and got.q_codes.get()[0, 0, 0].any()


@pytest.mark.parametrize("head_dim", [64, 40])
def test_strided_operands(head_dim: int) -> None:
    """A view of a (batch, len, heads, head_dim) array, one shifted by a row, one transposed."""
    base = operand(1, DTYPES[0], (2, 90, 6, head_dim + 2))
    shifted = base[:, 1:, ::2, 1 : head_dim + 1].swapaxes(1, 2)
    transposed = operand(2, DTYPES[0], (2, 3, head_dim, 89)).swapaxes(2, 3)
    device_base = on_device(base)
    device_shifted = device_base[:, 1:, ::2, 1 : head_dim + 1].swapaxes(1, 2)
    device_transposed = on_device(transposed.swapaxes(2, 3).copy()).swapaxes(2, 3)
    got = quantize(device_shifted, device_transposed, device_shifted, tiles=TILES)
    assert_equal_to_mirror(got, shifted, transposed, shifted)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_operands(granularity: str) -> None:
    q, k = np.zeros((1, 2, 0, 64), np.float16), np.zeros((1, 2, 5, 64), np.float16)
    quant = QuantConfig(granularity, granularity)
    got = quantize(*map(on_device, (q, k, k)), quant=quant, tiles=TILES)
    assert_equal_to_mirror(got, q, k, k)
    got = quantize(*map(on_device, (k, q, q)), quant=quant, tiles=TILES)
    assert_equal_to_mirror(got, k, q, q)
    assert not got.k_mean.get().any()


def test_the_same_bits_every_time() -> None:
    q, k, v = (
        on_device(operand(i, DTYPES[1], (4, 8, 1000, 128), "far outlier channel")) for i in range(3)
    )
    for granularity in ("thread", "head", "tensor"):
        quant = QuantConfig(granularity, granularity)
        first = quantize(q, k, v, quant=quant)
        for _ in range(20):
            again = quantize(q, k, v, quant=quant)
            for name in ("q_codes", "k_codes", "q_scale", "k_scale", "k_mean"):
                assert bool((getattr(first, name) == getattr(again, name)).all()), name


def test_more_than_65535_heads() -> None:
    q = operand(1, DTYPES[0], (70000, 1, 3, 8))
    for granularity in ("token", "head", "tensor"):
        got = quantize(*[on_device(q)] * 3, quant=QuantConfig(granularity, granularity))
        assert_equal_to_mirror(got, q, q, q, Tiles(128, 64, 4, 2))


def test_offsets_past_two_to_the_31() -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 6 * 2**30:
        pytest.skip(f"needs 6 GB of device memory, {free / 2**30:.1f} are free")
    rows = operand(1, DTYPES[0], (1, 2, 40, 64))
    base = cupy.zeros(2**31 + 40 * 64, np.float16)
    far = cupy.lib.stride_tricks.as_strided(
        base, (1, 2, 40, 64), tuple(2 * s for s in (0, 2**31, 64, 1))
    )
    far[...] = on_device(rows)
    got = quantize(far, far, far, tiles=TILES)
    assert_equal_to_mirror(got, rows, rows, rows)


def test_other_stream() -> None:
    q, k, v = (operand(i, DTYPES[0], (2, 4, 500, 64)) for i in range(3))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = quantize(*map(on_device, (q, k, v)), tiles=TILES)
        stream.synchronize()
    assert_equal_to_mirror(got, q, k, v)


def test_dequantize_and_files_on_the_device(tmp_path) -> None:
    q, k, v = (operand(i, DTYPES[1], (1, 2, 50, 64)) for i in range(3))
    got = quantize(*map(on_device, (q, k, v)))
    own = lookup("fa_int8").default_tiles(64)
    want = quantize_mirror(q, k, v, got.config, own, k_mean=got.k_mean.get())
    for dtype in ("float32", "float64"):
        for a, b in zip(got.dequantize(dtype), want.dequantize(dtype), strict=True):
            assert isinstance(a, cupy.ndarray) and np.array_equal(a.get(), b)
    got.save(tmp_path / "x.npz")
    again = QuantizedQKV.load(tmp_path / "x.npz", namespace=cupy)
    assert isinstance(again.v, cupy.ndarray) and again.v.dtype == got.v.dtype
    assert bool((again.k_codes == got.k_codes).all()) and again.config == got.config


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 7])
def test_four_bits(head_dim: int, dtype: np.dtype) -> None:
    """Packed on the device, unpacked by a kernel, by words and by bytes, before every form."""
    host = normal((2, 4, 130, head_dim), (2, 2, 200, head_dim), dtype.name)
    inputs = tuple(map(on_device, host))
    quant = QuantConfig(qk_bits=4)
    got = quantize(*inputs, quant=quant, tiles=TILES)
    assert got.has_nibbles and got.q_codes.shape[3] == -(-head_dim // 2)
    assert_equal_to_mirror(got.unpacked(), *host)
    capability = int(cupy.cuda.Device().compute_capability)
    for pv in ("16bit", "int8", "fp8")[: 3 if capability >= 89 else 2]:
        of_v = {} if pv == "16bit" else {"pv": pv, "granularity_v": "channel"}
        one = runs.run("fa_int8", inputs, quant=QuantConfig(qk_bits=4, **of_v), causal=True)
        one.check()
        prepared = plan(one.quantized, causal=True)
        assert runs.bits(prepared(one.quantized)) == runs.bits(one.o)


@pytest.mark.parametrize("pairs", ROPE_PAIRS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["head", "token", "part"])
def test_rows_are_normalised_and_turned_as_they_are_quantised(
    norm: str, dtype: np.dtype, head_dim: int, pairs: str
) -> None:
    """J1 of the prepared rows, many blocks of them, and J2 and J3 of attention on them."""
    inputs = normal((2, 4, 300, head_dim), (2, 2, 1100, head_dim), dtype.name)
    rng = np.random.default_rng(7)
    vectors = (2, 2) if norm == "part" else (4, 2)
    weights = tuple(rng.uniform(0.5, 2, (n, head_dim)).astype(np.float32) for n in vectors)
    weights = tuple(w.reshape(-1) if norm == "token" else w for w in weights)
    by_column = pairs.endswith(BY_COLUMN)
    tables = (runs.column_tables if by_column else runs.rope_tables)(1100, head_dim)
    interleaved = pairs.startswith("interleaved")
    options: dict[str, Any] = {"rope_interleaved": interleaved, "rope_offset_q": 800}
    options |= {"qk_norm_split": 77} if norm == "part" else {}
    moved = tuple(map(on_device, inputs))
    given = {"rope": tuple(map(on_device, tables)), "qk_norm": tuple(map(on_device, weights))}
    quants = [QuantConfig(), QuantConfig("head", "token", symmetric=False)]
    if head_dim in GROUPS:
        quants += [replace(quant, rotate="hadamard") for quant in quants]
    for quant in quants:
        got = quantize(*moved, quant=quant, tiles=TILES, **options, **given)
        how = Preparation.of_arrays(
            {**options, "rope": tables, "qk_norm": weights, "qk_norm_eps": 1e-6},
            (4, 2, 300, 1100, head_dim), quant.rotate,
        )  # fmt: skip
        want = quantize_mirror(*inputs, quant, TILES, k_mean=got.k_mean.get(), preparation=how)
        for name in ("q_codes", "k_codes", "q_scale", "k_scale", "q_zero", "k_zero"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None) and (a is None or bits(a) == bits(b)), name
        runs.run("fa_int8", moved, quant=quant, **options, **given).check()
    for rung in ("fa",) if dtype == np.float32 else ("fa", "fa_tc"):
        runs.run(rung, moved, **options, **given).check()
