"""The kernels of ``prims/instructions/exp2.cuh``: exponentials, and whole numbers among floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.kernels.numerics import EX2_APPROX_ERROR, UNIT_ROUNDOFF
from cupyattn.reference.rounding import ex2
from tests.prims.prim import Arguments, Prim, rng


def exp2_arguments() -> Arguments:
    x = rng().uniform(-125.0, 125.0, 64).astype(np.float32)
    x[:9] = [0, 1, -1, 127, -126, -127, -200, -np.inf, 128]
    x[9] = np.nan
    return {"x": x, "y": np.zeros(64, np.float32)}


def whole_arguments() -> Arguments:
    x = rng().uniform(-(2.0**22), 2.0**22, 64).astype(np.float32)
    x[:10] = [0, -0.5, 0.5, -1, 1, -1e-30, 2.0**22, -(2.0**22), -np.inf, np.inf]
    return {"x": x, "floor": np.zeros(64, np.float32), "integer": np.zeros(64, np.int32)}


def whole_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    floor = np.floor(x) + np.float32(0)  # no zero has a sign
    finite = np.where(np.isfinite(floor), floor, np.float32(0))
    return {"floor": floor, "integer": finite.astype(np.int32)}


EXP2_PRIMS = [
    Prim(
        "exp2", "exp2", "exponential", 64, exp2_arguments, lambda x, y: {"y": ex2(x)},
        relative=EX2_APPROX_ERROR + UNIT_ROUNDOFF["float32"],
    ),
    Prim("whole", "exp2", "whole_numbers", 64, whole_arguments, whole_expected),
]  # fmt: skip
