"""quantize*.cu in the interpreter, with its search for races: the mirror's bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import KERNELS
from cupyattn.interpret import KernelFault
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.packed import split
from cupyattn.quant.quantizers import of_mean, rows_of_mean
from cupyattn.reference.quantize import quantize_mirror
from tests.quant.quant_inputs import DTYPES, assert_mean, operand
from tests.support.marks import slow_unless

TILES = Tiles(64, 64, 4, 2)
#: One case for each step of a launch, and cases that share its code in another way.
CONFIGS = (
    QuantConfig(pv="int8"),
    QuantConfig("head", "head", "channel", pv="int8"),
    QuantConfig("tensor", "head", "channel", symmetric=False, pv="int8"),
    QuantConfig("token", "tensor", symmetric=False, pv="fp8"),
    QuantConfig("block", "block", smooth_k=False, smooth_v=False, pv="int8"),
)


def assert_equal(got: QuantizedQKV, want: QuantizedQKV) -> None:
    for name, array in vars(want).items():
        if isinstance(array, np.ndarray):
            found = getattr(got, name)
            assert found.dtype == array.dtype and found.shape == array.shape, name
            assert found.tobytes() == np.ascontiguousarray(array).tobytes(), name


def assert_means(got: QuantizedQKV, k: npt.NDArray, v: npt.NDArray) -> None:
    for mean, x in ((got.k_mean, k), (got.v_mean, v)):
        if mean is not None:
            assert_mean(mean, x)


def drawn(dtype: np.dtype, head_dim: int, len_q: int, len_kv: int) -> list[npt.NDArray[Any]]:
    lengths = (len_q, len_kv, len_kv)
    regimes = ("normal", "channel bias", "normal")
    return [
        operand(i, dtype, (1, 2, n, head_dim), regime)
        for i, (n, regime) in enumerate(zip(lengths, regimes, strict=True))
    ]


@pytest.mark.parametrize("quant", slow_unless(lambda i, _: not i % 3, CONFIGS), ids=str)
def test_the_interpreter_gives_the_bits_of_the_mirror(quant: QuantConfig) -> None:
    """Head size 7 cuts 300 keys into two slices, and 20 has columns that no lane holds."""
    for dtype, head_dim in ((DTYPES[0], 7), (DTYPES[2], 20)):
        q, k, v = drawn(dtype, head_dim, 37, 300 if head_dim == 7 else 150)
        got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
        assert_means(got, k, v)
        means = {"k_mean": got.k_mean, "v_mean": got.v_mean}
        assert_equal(got, quantize_mirror(q, k, v, quant, TILES, **means))


@pytest.mark.parametrize("group", ["thread", pytest.param("head", marks=pytest.mark.slow)])
def test_the_mean_of_many_rows_is_that_of_a_quarter(group: str) -> None:
    """The other rows, which no sum may touch, are 64; of 1,023 rows all are summed."""
    for length in (1023, 1024, 1100):
        rows = of_mean(np.arange(length).reshape(1, 1, length, 1)).ravel()
        assert len(rows) == rows_of_mean(length)
        assert len(rows) == (1023 if length == 1023 else length // 128 * 32 + min(length % 128, 32))
        k = np.full((1, 1, length, 4), 64, np.float16)
        k[:, :, rows] = np.arange(len(rows))[:, None] % 3
        quant = QuantConfig(granularity_k=group)
        got = quantize(k[:, :, :1], k, k, quant=quant, tiles=TILES, backend="interpret")
        exact = np.float32(k[:, :, rows].sum(axis=2, dtype=np.float32) / np.float32(len(rows)))
        assert got.k_mean.tobytes() == exact.tobytes()  # whole numbers: no sum rounds


def test_packed_sequences_of_few_and_of_many_rows() -> None:
    """A sequence of 1,023 rows has more of them in its mean than one of 1,100."""
    ends = np.array([0, 1023, 2123], np.int32)
    x = np.random.default_rng(0).standard_normal((2123, 1, 4)).astype(np.float16) + 1
    got = quantize(
        x, x, x, quant=QuantConfig(), tiles=TILES, backend="interpret", cu_seqlens_q=ends,
        cu_seqlens_k=ends,
    )  # fmt: skip
    for number, one in enumerate(split(got)):
        own = x[None, slice(*ends[number : number + 2])].swapaxes(1, 2)
        assert_means(one, own, own)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_its_scale_alone(value: float) -> None:
    """Through extrema as through maxima: a NaN of either sign lies beyond both ends."""
    for quant in CONFIGS[1:4]:
        q, k, v = drawn(DTYPES[0], 16, 20, 90)
        q[0, 0, 3, 0] = k[0, 1, 70, 15] = v[0, 0, 89, 0] = v[0, 1, 2, 15] = value
        got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
        means = {"k_mean": got.k_mean, "v_mean": got.v_mean}
        assert_equal(got, quantize_mirror(q, k, v, quant, TILES, **means))
        assert np.isnan(got.v_scale[0, 0, -1, 0]) and np.isnan(got.v_scale[0, 1, 0, 15])
        assert np.isnan(got.v_scale).sum() == 2


@pytest.mark.slow
def test_packed_sequences_without_rows_and_of_several_slices() -> None:
    ends = np.array([0, 0, 300, 305, 305], np.int32)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((305, 2, 7)).astype(np.float16) + 1 for _ in "qkv")
    for quant in CONFIGS[:3]:
        got = quantize(
            q, k, v, quant=quant, tiles=TILES, backend="interpret", cu_seqlens_q=ends,
            cu_seqlens_k=ends,
        )  # fmt: skip
        assert not got.k_mean[[0, 3]].any() and got.k_mean[[1, 2]].all()
        for number, one in enumerate(split(got)):
            rows = slice(*ends[number : number + 2])
            own = (x[None, rows].swapaxes(1, 2) for x in (q, k, v))
            if one.q_codes.shape[2]:
                means = {"k_mean": one.k_mean, "v_mean": one.v_mean}
                want = quantize_mirror(*own, quant.of_entry(number), TILES, **means)
                assert_equal(one, want)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "prims/codes/quantize_rows.cuh",
            "  await_count(p.summed_slices + at.batch_head, p.splits);",
        ),
        ("prims/codes/quantize_sums.cuh", "      await_count(summed, at.slice);"),
        ("prims/codes/quantize_sums.cuh", "  __syncthreads();  // every thread has stored before"),
    ],
    ids=["codes do not wait", "the last slice does not wait", "counted before all is stored"],
)
def test_codes_before_the_sums_of_their_head_are_a_race(
    file: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is necessary: without it the interpreter has a finding."""
    changed = Path(shutil.copytree(KERNELS, tmp_path / "kernels")) / file
    lines = changed.read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines) if text.startswith(line))
    changed.write_text("\n".join(lines[:number] + lines[number + 1 :]) + "\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path / "kernels")
    q, k, v = drawn(DTYPES[0], 128, 20, 300)  # in three slices
    with pytest.raises(KernelFault) as caught:
        quantize(q, k, v, quant=CONFIGS[1], tiles=TILES, backend="interpret")
    assert caught.value.finding.kind == "race"
