"""Errors of a weight's codes in one pass: codes, figures and outliers, by one thread or several."""

from __future__ import annotations

import time

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays import threads
from cupyattn.checkpoints import weight_errors as module
from cupyattn.checkpoints.weight_errors import made_for, outlier_limit, weight_errors
from tests.checkpoints.checkpoint_files import BF16

DTYPES = (np.float32, np.float16, BF16)


def weight(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    w.flat[:: w.size // 7] *= 12
    return w.astype(dtype)


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 200), (128, 2000), (5, 130), (130, 1)], ids=str)
def test_codes_are_those_of_quantising(shape, dtype, strategy) -> None:  # type: ignore[no-untyped-def]
    w = weight(shape, dtype)
    made = made_for(shape, 128, strategy)
    weight_errors(w, 128, strategy, made)
    for found, expected in zip(made, ca.weight_quant(w, strategy=strategy), strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_codes_of_blocks_that_are_not_finite_are_those_of_quantising() -> None:
    w = weight((300, 200), np.float32)
    w[3, 5], w[150, 150], w[151, 151] = np.nan, np.inf, -np.inf
    for strategy in ("block", "channel"):
        made = made_for(w.shape, 128, strategy)
        errors = weight_errors(w, 128, strategy, made)
        for found, expected in zip(made, ca.weight_quant(w, strategy=strategy), strict=True):
            assert np.array_equal(found, expected, equal_nan=found.dtype == np.float32)
        assert errors.nonfinite == 3
        assert errors.largest == np.abs(w[np.isfinite(w)]).max()


@pytest.mark.parametrize("strategy", ["block", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25], ids=str)
def test_sums_are_those_of_float64(scale: float, dtype, strategy: str) -> None:  # type: ignore[no-untyped-def]
    if dtype == np.float16 and scale != 1.0:
        pytest.skip("float16 has no such numbers")
    w = (weight((300, 200), np.float32) * np.float32(scale)).astype(dtype)
    found = weight_errors(w, 128, strategy)
    back = ca.weight_dequant(*ca.weight_quant(w, strategy=strategy), strategy=strategy)
    x, error = w.astype(np.float64), (w.astype(np.float32) - back).astype(np.float64)
    outliers, outlier_power = 0, 0.0
    for i in range(0, 300, 128):
        for j in range(0, 200, 128):
            block = x[i : i + 128, j : j + 128] ** 2
            far = block > 16 * block.mean()
            outliers, outlier_power = outliers + far.sum(), outlier_power + block[far].sum()
    assert found.outliers == outliers > 0
    exact = (np.abs(error).sum(), (error**2).sum(), (x**2).sum(), outlier_power)
    sums = (found.total_error, found.noise, found.signal, found.outlier_power)
    assert sums == pytest.approx(exact, rel=1e-6, abs=0)
    assert (found.max_error, found.largest) == (np.abs(error).max(), np.abs(x).max())


def test_the_limit_of_outliers_is_exact() -> None:
    rng = np.random.default_rng(0)
    means = np.concatenate([rng.random(2000) * 10.0 ** rng.integers(-70, 70, 2000), [0.0, 1 / 16]])
    limit = outlier_limit(means)
    above = np.nextafter(limit, np.float32(np.inf)).astype(np.float64)
    bound = 16 * means
    assert (limit.astype(np.float64) ** 2 <= bound).all() and (above**2 > bound).all()


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    w, found = weight((500, 300), BF16), []
    monkeypatch.setattr(module, "PART_ELEMENTS", 2**14)
    for count in (1, 3):
        monkeypatch.setattr(module, "thread_count", lambda elements, n=count: n)
        made = made_for(w.shape, 128, "channel")
        found.append((weight_errors(w, 128, "channel", made), *(x.tobytes() for x in made)))
    assert found[0] == found[1]


def test_quantising_in_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyattn.reference import weights

    w = weight((1100, 1100), BF16)  # past THREADED_ELEMENTS
    assert w.size > threads.THREADED_ELEMENTS
    for strategy in ("block", "channel"):
        monkeypatch.setattr(weights, "thread_count", lambda elements: 3)
        several = ca.weight_quant(w, strategy=strategy)
        monkeypatch.setattr(weights, "thread_count", lambda elements: 1)
        one = ca.weight_quant(w, strategy=strategy)
        assert all(np.array_equal(a, b) for a, b in zip(several, one, strict=True))


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        threads.in_threads(lambda run: [1 // x for x in run], [1, 2, 0, 4], 2)
    assert threads.in_threads(sum, [], 2) == []


@pytest.mark.slow
def test_processor_time_of_codes_and_verdicts() -> None:
    """A part of 1.2 billion weights in Flux's shapes, which may take 4 s and 8 s on two cores."""
    layers = [weight(shape, BF16) for shape in ((3072, 3072), (12288, 3072), (3072, 15360))]
    billions = sum(w.size for w in layers) / 1.2e9
    for limit, work in ((4, ca.weight_quant), (8, _with_verdicts)):
        spent = time.process_time()
        for w in layers:
            work(w)
        assert time.process_time() - spent < 2 * limit * billions


def _with_verdicts(w: np.ndarray) -> None:
    weight_errors(w, 128, "block", made_for(w.shape, 128, "block"))
