"""The cases of ``prims/io/prepare.cuh``: rows normalised and turned, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import NORM_PARAMS, pack
from cupyattn.problem.row_preparation import Norm, Preparation
from tests.prims.prim import Arguments, Prim, Results, defines, rng
from tests.prims.prims_rope_cases import tables, turning

ROWS, ROW0, POSITION, EPS = 11, 3, 5, 0.125


def prepared_arguments(dtype: str, head_dim: int, rope: str) -> Arguments:
    x = rng().normal(size=(ROWS, head_dim))
    params = {"weight_step": head_dim, "eps": EPS, "position": POSITION}
    return {
        "given": pack(NORM_PARAMS, params, {}),
        **tables(POSITION + ROW0 + ROWS, head_dim, rope),
        "weight": rng().uniform(0.5, 2, (2, head_dim)).astype(np.float32),
        "factor": rng().uniform(0.5, 2, ROW0 + ROWS).astype(np.float32),
        "X": x.astype(STORAGE[dtype]),
        "Y": np.zeros((ROWS, head_dim), STORAGE[dtype]),
    }


def prepared_expected(
    rope: str, qk_norm: str, /, cos: Any, sin: Any, weight: Any, factor: Any, X: Any, **_: Any
) -> Results:
    turn = turning(cos, sin, rope, POSITION + ROW0) if rope else None
    rows = X[None, None]
    if qk_norm == "token":  # whose factors are given
        y = X.astype(np.float32) * factor[ROW0:, None] * weight[1]
        y = y[None, None] if turn is None else turn.turned(y[None, None], y[None, None])[0]
        return {"Y": y[0, 0].astype(X.dtype)}
    norm = Norm(weight[1:], weight[1:], EPS) if qk_norm else None
    return {"Y": Preparation(turn, norm).stored(rows, rows[:, :, :0])[0][0, 0]}


def neighbours_arguments() -> Arguments:
    x = rng().normal(size=(32, 2)).astype(np.float32)
    return {"x": x, "sums": np.zeros(32, np.float32), "factor": np.zeros(1, np.float32)}


def neighbours_expected(x: Any, **_: Any) -> dict[str, np.ndarray]:
    sums = x.reshape(4, 16)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    factor = np.float32(1) / np.sqrt(np.float32(3.25))
    return {"sums": sums.repeat(8), "factor": np.array([factor])}


def prepare_prims() -> Iterator[Prim]:
    """Every width of access, rows of more lanes than a warp has, and omitted arguments."""
    for dtype, head_dim, vec, rope, qk_norm in (
        ("float16", 128, 8, "half_split", "head"), ("bfloat16", 24, 4, "interleaved", "head"),
        ("float32", 256, 1, "half_split", "head"), ("float16", 6, 1, "interleaved", "head"),
        ("float16", 64, 8, "", "head"), ("bfloat16", 80, 8, "half_split", ""),
        ("float32", 2, 1, "", "head"), ("float16", 128, 8, "half_split_by_column", "head"),
        ("bfloat16", 24, 4, "interleaved_by_column", "head"),
        ("bfloat16", 128, 8, "interleaved", "token"), ("float32", 24, 2, "", "token"),
    ):  # fmt: skip
        yield Prim(
            f"prepared-{rope or 'unturned'}-{dtype}-{head_dim}-{vec}-{qk_norm}", "prepare",
            "prepared", 64, partial(prepared_arguments, dtype, head_dim, rope),
            partial(prepared_expected, rope, qk_norm),
            defines=defines(
                Tiles(16, 16, 2), Features(dtype, head_dim, vec=vec, rope=rope, qk_norm=qk_norm)
            ),
        )  # fmt: skip
    yield Prim(
        "neighbours", "prepare", "neighbours", 32, neighbours_arguments, neighbours_expected,
        defines=defines(Tiles(16, 16, 1), Features("float32", 16, vec=4, qk_norm="head")),
    )  # fmt: skip
