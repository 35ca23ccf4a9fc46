"""The kernel of ``step_scores.cuh``: scores as a warp has them, by scales and by masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, pack
from tests.prims.prim import Arguments, Prim, defines, rng

ROWS, KEYS, LEN_KV, SHIFT, WINDOW_SHIFT = 16, 64, 150, 60, -20


def arguments(place: tuple[int, int], group: int) -> Arguments:
    values = {"len_q": 200, "len_kv": LEN_KV, "causal_shift": SHIFT}
    groups = -(-LEN_KV // group)
    scales = np.exp2(rng().integers(-3, 4, groups)).astype(np.float32)
    return {
        "p": pack(ATTN_PARAMS, {**values, "window_shift": WINDOW_SHIFT}, {}),
        "place": np.array(place, np.int32),
        "X": rng().integers(-9999, 9999, (ROWS, KEYS)).astype(np.int32),
        "Q_scale": rng().uniform(0.5, 2, ROWS).astype(np.float32), "K_scale": scales,
        "S": np.zeros((ROWS, KEYS), np.float32),
        **{name: np.zeros((max(1, KEYS // group), 2, 32), np.int32)
           for name in ("largest", "admitted")},
    }  # fmt: skip


def expected(group: int, causal: bool, window: bool) -> Callable[..., dict[str, np.ndarray]]:
    def written(
        place: np.ndarray, X: np.ndarray, Q_scale: np.ndarray, K_scale: np.ndarray, **_: Any
    ) -> dict[str, np.ndarray]:
        row, key = place[0] + np.arange(ROWS)[:, None], place[1] + np.arange(KEYS)
        may = np.broadcast_to(key < LEN_KV, X.shape) & (~np.bool_(causal) | (key <= row + SHIFT))
        may = may & (~np.bool_(window) | (key >= row + WINDOW_SHIFT))
        factor = Q_scale[:, None] * K_scale[np.minimum(key, LEN_KV - 1) // group]
        scores = np.where(may, X.astype(np.float32) * factor, np.float32(-np.inf))
        most = {"largest": X, "admitted": np.where(may, X, np.iinfo(np.int32).min)}
        for name, x in most.items():
            # By scale, row of a lane, lane: a lane has two of every eight keys.
            parts = x.reshape(2, 8, max(1, KEYS // group), -1, 4, 2).max(axis=(3, 5))
            most[name] = parts.transpose(2, 0, 1, 3).reshape(-1, 2, 32)
        return {"S": scores, **most}

    return written


STEP_PRIMS = [
    Prim(
        f"step_scores-{group}-{causal:d}{window:d}-{place[1]}", "step_scores", "step_scores", 32,
        partial(arguments, place, group), expected(group, causal, window),
        defines=defines(
            Tiles(128, KEYS, 12),
            Features("float16", 64, causal, window=window, group_q=1, group_kv=group),
        ),
    )
    for place, group, causal, window in (
        ((0, 0), 64, False, False), ((0, 128), 16, False, False), ((80, 64), 16, True, True),
        ((64, 64), 64, True, False), ((64, 64), 32, False, True), ((24, 0), 16, True, True),
    )
]  # fmt: skip
