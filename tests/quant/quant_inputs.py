"""Operands that are hard to quantise, by name and seed; and a check that results are means."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyattn.quant.quantizers import of_mean

DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


def operand(
    seed: int, dtype: np.dtype, shape: tuple[int, ...], regime: str = "normal"
) -> npt.NDArray:
    """Draw finite values of one regime; Hypothesis draws the seed, not 10^4 floats."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    largest = float(ml_dtypes.finfo(dtype).max)
    if regime == "channel bias":
        x += 30 * rng.standard_normal((1, shape[1], 1, shape[3]))
    elif regime == "outlier channel":
        x[..., rng.integers(shape[-1])] *= 100
    elif regime == "far outlier channel":
        x[..., rng.integers(shape[-1])] *= 1000
    elif regime == "constant rows":
        x[...] = rng.standard_normal((*shape[:-1], 1))
    elif regime == "subnormal":
        x *= 1e-7 if dtype == np.float16 else 1e-39
    elif regime == "zeros":
        x[...] = 0
    elif regime == "signed zeros":
        x[...] = 0
        x[..., : shape[2] // 2, :] = -0.0
    elif regime == "large":
        x *= 0.05 * largest
    elif regime == "huge":
        x *= 0.2 * largest
    elif regime == "wide":
        x *= 10.0 ** rng.uniform(-8, 4, (*shape[:-1], 1))
    elif regime != "normal":
        raise ValueError(f"no regime is called {regime!r}")
    return np.clip(x, -largest, largest).astype(dtype)


def assert_mean(found: npt.NDArray, x: npt.NDArray) -> None:
    """Assert that smoothing subtracts a mean of x: each float32 addition costs one rounding."""
    rows = of_mean(x).astype(np.float64)
    slack = (rows.shape[2] + 1) * 2.0**-24 * np.abs(rows).mean(axis=2) + 2.0**-149
    assert (np.abs(found - rows.mean(axis=2)) <= slack).all()


def same_bytes(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> bool:
    return [(a.shape, a.dtype, a.tobytes()) for a in found] == [
        (a.shape, a.dtype, a.tobytes()) for a in expected
    ]
