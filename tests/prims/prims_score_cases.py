"""The cases of ``score.cuh``: the keys to which a row may attend, and the scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import ATTN_PARAMS, pack
from tests.prims.prim import Arguments, Prim, Results, defines, rng


def places_arguments(shift: int, window_shift: int) -> Arguments:
    values = {"len_q": 12, "len_kv": 9, "causal_shift": shift, "window_shift": window_shift}
    return {
        "p": pack(ATTN_PARAMS, values, {}),
        "may": np.full((12, 17), -1, np.int32),
        "begin": np.full(12, -1, np.int32),
        "end": np.full(12, -1, np.int32),
        "unmasked": np.full((12, 9), -1, np.int32),
        "q_first": np.full(12, -1, np.int32),
        "q_last": np.full(12, -1, np.int32),
    }


def places_expected(
    causal: bool, window: bool, /, p: np.ndarray, may: np.ndarray, **_: Any
) -> Results:
    len_kv = int(p["len_kv"][0])
    row, key = np.arange(16)[:, None], np.arange(may.shape[1])
    allowed = (key < len_kv) & ((key <= row + p["causal_shift"][0]) | (not causal))
    allowed &= (key >= row + p["window_shift"][0]) | (not window)
    first = np.maximum(0, row[:12, 0] + p["window_shift"][0]) if window else np.zeros(12)
    last = row[:12, 0] + 3 + p["causal_shift"][0]
    return {
        "may": allowed[:12].astype(np.int32),
        "begin": first.astype(np.int32),
        "end": (np.clip(last + 1, 0, len_kv) if causal else np.full(12, len_kv)).astype(
            np.int32
        ),
        "unmasked": np.stack(
            [allowed[i : i + 4, :len_kv].all(axis=0) for i in range(12)]
        ).astype(np.int32),
        **attending(row[:12, 0], p, causal, window),
    }


def attending(key: np.ndarray, p: np.ndarray, causal: bool, window: bool) -> dict[str, np.ndarray]:
    """Rows, out of 12, between the first and the last that may attend to 4 keys by place."""
    row = np.arange(12)
    far = key[:, None] + np.arange(4)
    reached = np.ones((12, 12), bool)  # of a key and a row
    if causal:
        reached &= row >= far.min(axis=1)[:, None] - p["causal_shift"][0]
    if window:
        reached &= row <= far.max(axis=1)[:, None] - p["window_shift"][0]
    first = (np.maximum(0, key - p["causal_shift"][0]) if causal else 0 * key).astype(np.int32)
    last = np.where(window, np.clip(key + 4 - p["window_shift"][0], 0, 12), 12).astype(np.int32)
    inside = (row >= first[:, None]) & (row < last[:, None])
    assert (inside == reached).all()
    return {"q_first": first, "q_last": last}


def scores_arguments(features: Features) -> Arguments:
    """Mask and bias of one entry of a larger array, the bias with its rows across its keys."""
    random = rng()
    bias = random.normal(size=(2, 3, 9, 12)) * 3
    bias[random.random(bias.shape) < 0.2] = -np.inf
    values = {
        "len_q": 12, "len_kv": 9, "mask_stride": (324, 108, 9, 1),
        "bias_stride": (324, 108, 1, 12), "softcap": 2.5, "softcap_inverse": 0.4,
    }  # fmt: skip
    return {
        "given": pack(ATTN_PARAMS, values, {}),
        "mask": random.random((2, 3, 12, 9)) < 0.6,
        "bias": bias.astype(STORAGE[features.bias or "float16"]),
        "x": (random.normal(size=17) * 4).astype(np.float32),
        "S": np.full((16, 17), np.nan, np.float32),
        "whole": np.full(16, -1, np.int32),
        "slope": np.full(16, np.nan, np.float32),
    }


def scores_expected(
    features: Features, /, mask: Any, bias: Any, x: Any, whole: Any, **_: Any
) -> Results:
    S = np.full((16, 17), -np.inf, np.float32)
    score = np.broadcast_to(x[:9], (12, 9))
    if features.softcap:
        score = 2.5 * np.tanh(score.astype(np.float64) * 0.4)
    if features.bias:
        score = score + bias[1, 2].T.astype(np.float64)
    S[:12, :9] = score
    if features.mask:
        S[:12, :9][~mask[1, 2]] = -np.inf
    else:  # there is no limit on rows: those past the end are never stored
        S[12:, :9] = S[11, :9] if features.bias else S[0, :9]
    plain = not (features.softcap or features.mask or features.bias)
    slope = 1 - np.tanh(x[:16].astype(np.float64) * 0.4) ** 2 if features.softcap else 1.0
    return {
        "S": S,
        "whole": np.full_like(whole, plain),
        "slope": np.broadcast_to(slope, 16).astype(np.float32),
    }


#: Configurations for which the tests compile `Scores`.
SCORES = [
    Features("float16", 8),
    Features("float16", 8, softcap=True),
    Features("float16", 8, mask=True),
    *(Features("float16", 8, bias=dtype) for dtype in STORAGE),
    Features("float16", 8, softcap=True, mask=True, bias="bfloat16"),
]

SCORE_PRIMS = [
    *(
        Prim(
            f"places-{'causal' if causal else 'all'}{shift:+d}-{'window' if window else 'all'}"
            f"{window_shift:+d}", "score", "places", 12,
            partial(places_arguments, shift, window_shift),
            partial(places_expected, causal, window),
            defines=defines(Tiles(16, 16, 1), Features("float16", 8, causal, window=window)),
        )
        for causal, shift, window, window_shift in (
            (False, 0, False, 0), (True, 0, False, 0), (True, -3, False, 0), (True, 4, False, 0),
            (False, 0, True, -2), (True, 3, True, -1), (True, -2, True, -5), (False, 0, True, 6),
        )
    ),
    *(
        Prim(
            f"scores-{number}", "score", "scores", 16, partial(scores_arguments, features),
            partial(scores_expected, features), relative=2.0**-20, absolute=2.0**-20,
            defines=defines(Tiles(16, 16, 1), features),
        )
        for number, features in enumerate(SCORES)
    ),
]  # fmt: skip
