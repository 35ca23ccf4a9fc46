"""The kernel of ``shift_state.cuh``: M a whole number, and sums that are shifted with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.kernels.numerics import Shifts
from cupyattn.reference.softmax_state import ShiftState
from tests.prims.prim import Arguments, Prim, rng

STEPS, WATCHED, LANES = 6, 4, 4
BY = Shifts()


def shift_arguments() -> Arguments:
    rows, shape = 32 // LANES, (STEPS, 32)
    largest = rng().uniform(-60, 60, (STEPS, rows))
    largest[:, 0] = -np.inf  # a row without a key
    largest[:3, 1] = -np.inf  # one whose first keys come late
    largest[:, 2] = 5  # a maximum that comes back,
    largest[:, 3] = 40 - 3 * np.arange(STEPS)  # one that falls step by step,
    largest[:, 4] = [0, 100, -100, 100, -1000, -1000]  # and further than M follows
    codes = rng().integers(128, 2**17, (STEPS, rows)) * np.isfinite(largest)
    codes[:4, 3] = 2**21 - 1  # l where M is kept from falling
    weights = codes * rng().uniform(0.99, 1.01, codes.shape)
    weights[0, 5] = np.inf  # more than float32 sums
    by_lane = {"largest": largest, "codes": codes, "weights": weights}
    x = rng().integers(-(2**30), 2**30, shape).astype(np.int32) >> rng().integers(0, 30, shape)
    return {
        **{name: np.repeat(a, LANES, 1).astype(np.float32) for name, a in by_lane.items()},
        "x": x.astype(np.int32), "shift": np.zeros(shape, np.int32),
        "y": np.zeros(shape, np.int32), "M": np.zeros(shape, np.float32),
        **{name: np.zeros(32, np.float32) for name in ("l", "inverse_l", "lse")},
    }  # fmt: skip


def shift_expected(
    largest: np.ndarray, codes: np.ndarray, weights: np.ndarray, x: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    rows = slice(None, None, LANES)
    state = ShiftState((32 // LANES,))
    always = np.ones(32 // LANES, bool)
    shifts, whole = [], []
    for step in range(STEPS):
        state.l *= LANES  # the mirror has the whole sum of a row, of four lanes that hold alike
        shift = state.follow(largest[step, rows], BY, always, always & (step == WATCHED))
        state.l /= LANES
        shifts.append(np.repeat(shift, LANES).astype(np.int32))
        whole.append(np.repeat(state.M, LANES))
        state.l = state.l + codes[step, rows]
        state.exact_l = state.exact_l + weights[step, rows]
    shift = np.stack(shifts)
    # What is shifted to the left keeps its lower 32 bits: kernels shift nothing that would not fit.
    y = np.floor(x * np.exp2(shift.astype(float))).astype(np.int64).astype(np.int32)
    codes_l, exact = (np.repeat(a.astype(float), LANES) for a in (state.l, state.exact_l))
    total = np.where(np.isfinite(exact), exact, codes_l)
    with np.errstate(divide="ignore"):
        inverse = np.where(codes_l == 0, 0, 1 / np.where(codes_l == 0, 1, codes_l))
        lse = (whole[-1] + np.log2(total)) * math.log(2.0)
    return {
        "shift": shift, "y": y, "M": np.stack(whole), "l": codes_l, "inverse_l": inverse,
        "lse": lse,
    }  # fmt: skip


SHIFT_PRIMS = [
    Prim(
        "shift_state", "shift_state", "shift_state", 32, shift_arguments, shift_expected,
        relative=2.0**-20,
    )
]  # fmt: skip
