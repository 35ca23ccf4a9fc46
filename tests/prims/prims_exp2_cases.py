"""The kernels of ``prims/instructions/exp2.cuh`` and ``rcp.cuh``: exponentials, whole numbers among
floats, reciprocals."""

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


def rcp_arguments() -> Arguments:
    """Numbers of every size; those below 2^-126 are subnormal, as is 1 / x past 2^126."""
    x = np.exp2(rng().uniform(-126, 126, 128)).astype(np.float32)
    x[::2] *= -1
    x[:9] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3, 2 - 2.0**-23]
    x[9:14] = [2.0**-126, -(2.0**-126), 2.0**-127, -(2.0**-127), 2.0**-149]
    x[14:19] = [2.0**126, -(2.0**126), 2.0**126 * 1.5, -(2.0**127), np.finfo(np.float32).max]
    return {"x": x, "y": np.full(128, -7, np.float32), "sign": np.full(128, -7, np.float32)}


def rcp_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    """Subnormal numbers count as zeros of their sign, and so do reciprocals."""
    smallest = 2.0**-126
    with np.errstate(divide="ignore"):
        y = 1 / np.where(np.abs(x) < smallest, np.copysign(0, x), x).astype(np.float64)
    y = np.where(np.abs(y) < smallest, np.copysign(0, y), y)
    sign = np.where(np.isnan(x), 0, np.copysign(1, x))
    return {"y": y, "sign": sign.astype(np.float32)}


EXP2_PRIMS = [
    Prim(
        "exp2", "exp2", "exponential", 64, exp2_arguments, lambda x, y: {"y": ex2(x)},
        relative=EX2_APPROX_ERROR + UNIT_ROUNDOFF["float32"],
    ),
    Prim("whole", "exp2", "whole_numbers", 64, whole_arguments, whole_expected),
]  # fmt: skip

RCP_PRIMS = [
    # 1 ulp is at most 2^-23 of a number.
    Prim("rcp", "rcp", "reciprocal", 128, rcp_arguments, rcp_expected, relative=2.0**-23),
]
