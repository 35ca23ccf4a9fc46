"""The kernel of ``prims/score/softcap.cuh``: both of its branches, at every size of a score."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.softcap import LARGEST_Y, SOFTCAP_ERROR, tanh_factors
from cupyattn.plans.structs import SCORE_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, rng


def softcap_values(unit: float) -> dict[str, Any]:
    return {
        "tanh_factor": tanh_factors(unit), "largest_square": (LARGEST_Y * unit) ** 2,
        "tanh_exponent": 2 / math.log(2) / unit, "softcap_unit": unit,
    }  # fmt: skip


def softcap_arguments(unit: float) -> Arguments:
    y = np.empty((5, 128))
    y[0] = np.exp2(rng().uniform(-100, 0, 128))  # a warp whose scores are all small, tiny ones
    y[1] = np.linspace(0, LARGEST_Y * (1 - 2.0**-20), 128)  # and up to the largest of them
    y[2] = np.linspace(LARGEST_Y * (1 - 2.0**-20), 12, 128)  # others
    y[3] = np.linspace(0, LARGEST_Y, 128)  # a warp in which one score is large
    y[4] = np.exp2(rng().uniform(-100, 100, 128))
    y[1:4] *= np.resize([1, -1], 128)
    y[0, :64] *= -1
    x = (y * unit).astype(np.float32)
    x[:2, 5:7] = [0.0, -0.0]
    x[1, 9] = np.nan
    x[3, 77] = 1e30
    x[4, 1:8] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38]
    outputs = {name: np.full(x.shape, -7, np.float32) for name in ("y", "sign")}
    return {"s": pack(SCORE_PARAMS, softcap_values(unit), {}), "x": x, **outputs}


def softcap_expected(unit: float, /, x: np.ndarray, **_: Any) -> Results:
    sign = np.where(np.isnan(x), np.float32(0), np.copysign(np.float32(1), x))
    return {"y": unit * np.tanh(x.astype(np.float64) / unit), "sign": sign}


SOFTCAP_PRIMS = [
    Prim(
        f"softcap-{name}", "softcap", "capped", 32, partial(softcap_arguments, unit),
        partial(softcap_expected, unit), relative=SOFTCAP_ERROR, grid=5,
    )
    for name, unit in (("0.3", 0.3), ("50", 50 / math.log(2)))
]  # fmt: skip
