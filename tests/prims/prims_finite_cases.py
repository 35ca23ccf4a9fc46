"""The kernels of ``finite.cuh``: sums to float16, of which those that are finite stay so."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.reference.rounding import from_sum
from tests.prims.prim import Arguments, Prim, rng

THREADS = 32


def arguments() -> Arguments:
    x = rng().uniform(-9e4, 9e4, (THREADS, 8)).astype(np.float32)
    x[::2] *= np.float32(0.5)  # every other thread has none to bring back
    x[0] = [65504, 65519, 65520, -65520, 65536, -3e38, 6e-8, 0]
    x[1] = [np.inf, 1, -np.inf, 65519.9, np.nan, 7e4, -1e30, -65536]
    x[2], x[4, 3] = np.inf, np.nan
    return {
        "x": x, "alone": np.zeros((THREADS, 8), np.float16),
        "packed": np.zeros((THREADS, 8), np.float16),  # a word has two
    }  # fmt: skip


def expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    alone = from_sum(x, "float16").astype(np.float16)
    return {"alone": alone, "packed": alone}


FINITE_PRIMS = [Prim("finite", "finite", "sums", THREADS, arguments, expected)]
