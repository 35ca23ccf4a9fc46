"""The kernels of ``quantize_rows.cuh``, ``quantize_heads.cuh``, sums and turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.quantize import STEPS
from cupyattn.plans.structs import (
    PREPARED_QUANTIZE_PARAMS,
    QUANTIZE_PARAMS,
    TURN_PARAMS,
    pack,
)
from cupyattn.problem.row_preparation import Norm, Preparation
from cupyattn.quant.quantizers import padded_columns
from tests.prims.prim import Arguments, Prim, Results, defines, rng
from tests.prims.prims_rope_cases import tables, turning

HEAD_DIM = 24
#: Two heads of so many rows, in slices of so many.
ROWS, SLICE_ROWS, SLICES = 70, 24, 3
#: Blocks for codes of a head: of Q and of K.
Q_BLOCKS, K_BLOCKS = 5, 3


def quantize_params(**given: Any) -> np.ndarray:
    return pack(QUANTIZE_PARAMS, dict.fromkeys(QUANTIZE_PARAMS.names, 0) | given, {})


def slices_of(**given: Any) -> np.ndarray:
    return quantize_params(
        X_stride=(0, ROWS * HEAD_DIM, HEAD_DIM), heads=2, length=ROWS, splits=SLICES,
        split_rows=SLICE_ROWS, **given,
    )  # fmt: skip


def rows_arguments(zero_points: bool) -> Arguments:
    given = {"X_stride": (0, 29 * 40, 40), "heads": 2, "length": 29, "sum_stride_head": 29}
    numbers = rng()
    return {
        "given": pack(QUANTIZE_PARAMS, dict.fromkeys(QUANTIZE_PARAMS.names, 0) | given, {}),
        "X": numbers.integers(-60, 60, (2, 29, 40)).astype(np.float16),
        "mean": numbers.integers(-60, 60, (2, HEAD_DIM)).astype(np.float32),
        "codes": np.full((2, 29, padded_columns(HEAD_DIM)), 127, np.int8),
        "code_sum": np.full((2, 29), 9999, np.int32),
        "reach": np.zeros((29, 1 + zero_points), np.uint32),
        "group_reach": np.zeros((2, 1 + zero_points), np.uint32),
    }


def rows_expected(zero_points: bool) -> Callable[..., dict[str, np.ndarray]]:
    def expected(
        X: np.ndarray, mean: np.ndarray, codes: np.ndarray, code_sum: np.ndarray, **_: Any
    ) -> dict[str, np.ndarray]:
        x = X[1, :, :HEAD_DIM].astype(np.float32) - mean[1]
        sides = [x.max(axis=1), -x.min(axis=1)] if zero_points else [np.abs(x).max(axis=1)]
        codes[1, :, :HEAD_DIM] = x
        if zero_points:
            code_sum[1] = x.sum(axis=1)
        reach = np.stack(sides, axis=1).clip(0).astype(np.float32).view(np.uint32)
        of_groups = np.stack([reach[:16].max(axis=0), reach[16:].max(axis=0)])
        return {"codes": codes, "code_sum": code_sum, "reach": reach, "group_reach": of_groups}

    return expected


def heads_arguments(rope: str) -> Arguments:
    fields = {"X_stride": (0, 20 * 64, 64), "heads": 2, "length": 20, "eps": 0.125}
    names = PREPARED_QUANTIZE_PARAMS.names
    return {
        "given": pack(PREPARED_QUANTIZE_PARAMS, dict.fromkeys(names, 0) | fields, {}),
        **tables(20, 64, rope),
        "weight": rng().uniform(0.5, 2, 64).astype(np.float32),
        "X": rng().normal(size=(2, 20, 64)).astype(np.float16),
        "codes": np.full((2, 20, 64), 127, np.int8),
        "group_reach": np.zeros((2, 3), np.uint32),
    }


def heads_expected(rope: str, /, cos: Any, sin: Any, weight: Any, X: Any, **_: Any) -> Results:
    norm = Norm(weight[None], weight[None], 0.125)
    how = Preparation(turning(cos, sin, rope, 0), norm)
    y = how.in_float32(X[None], X[None, :, :0])[0][0]
    groups = [np.abs(y[:, i : i + 8]).max(axis=(1, 2)) for i in (0, 8, 16)]
    return {"codes": np.rint(8 * y), "group_reach": np.stack(groups, axis=1).view(np.uint32)}


def slices_arguments() -> Arguments:
    return {
        "given": slices_of(),
        "X": rng().integers(-60, 60, (2, ROWS, HEAD_DIM)).astype(np.float16),
        "partial_sum": np.zeros((2, SLICES, HEAD_DIM), np.float32),
        "extrema": np.zeros((2, SLICES, 2, HEAD_DIM), np.uint32),
        **counted(),
    }


def counted() -> Arguments:
    return {"summed": np.zeros(2, np.int32), "head_sum": np.zeros((2, HEAD_DIM), np.uint64)}


def published(x: np.ndarray) -> np.ndarray:
    """Return the words of published numbers."""
    return x.astype(np.float32).view(np.uint32) + (np.uint64(1) << np.uint64(32))


def ordered(x: np.ndarray) -> np.ndarray:
    """Return numbers as integers of the same order."""
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(x < 0, ~bits, bits | 0x80000000)


def slices_expected(first: bool, /, X: np.ndarray, **_: Any) -> Results:
    slices = [X[:, i : i + SLICE_ROWS].astype(np.float32) for i in range(0, ROWS, SLICE_ROWS)]
    sums = np.stack([x.sum(axis=1) for x in slices], axis=1)
    ends = np.stack([np.stack([x.min(axis=1), x.max(axis=1)], axis=1) for x in slices], axis=1)
    head_sum = np.zeros((2, HEAD_DIM), np.uint64)
    if first:  # the extrema of all lie where the first did
        head_sum = published(sums.sum(axis=1))
        ends[:, 0] = np.stack([ends[:, :, 0].min(axis=1), ends[:, :, 1].max(axis=1)], axis=1)
    summed = np.full(2, SLICES if first else 0, np.int32)
    return {
        "partial_sum": sums, "extrema": ordered(ends), "summed": summed, "head_sum": head_sum,
    }  # fmt: skip


def turns_arguments() -> Arguments:
    return {
        "of_q": quantize_params(blocks=Q_BLOCKS),
        "of_k": slices_of(blocks=K_BLOCKS, first_blocks=SLICES),
        "given": pack(TURN_PARAMS, {"next": 0, "rounds": 2, "lag": 1}, {}),
        **{name: x for name, x in slices_arguments().items() if name in ("X", "partial_sum")},
        **counted(),
        "next": np.zeros(1, np.int32),
        "q_done": np.zeros(2 * Q_BLOCKS, np.int32),
        "k_done": np.zeros(2 * K_BLOCKS, np.int32),
    }


def turns_expected(
    X: np.ndarray, q_done: np.ndarray, k_done: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    """Every piece of work is done once."""
    sums = slices_expected(True, X)
    return {
        **{name: sums[name] for name in ("partial_sum", "head_sum")},
        "summed": np.full(2, SLICES, np.int32),
        "next": np.array([TURNS], np.int32),
        "q_done": np.ones_like(q_done),
        "k_done": np.ones_like(k_done),
    }


TURNS = (2 + 1) * (SLICES + K_BLOCKS + Q_BLOCKS)


def steps(**of: str) -> tuple[tuple[str, int], ...]:
    """Return the macros that name a step, by what they are of; the others do nothing."""
    named = dict.fromkeys(("FIRST_Q", "FIRST_K", "FIRST_V", "STEP_Q", "STEP_K", "STEP_V"), "none")
    return tuple((f"CFG_{name}", STEPS.index(step)) for name, step in (named | of).items())


TILES = Tiles(32, 32, 2)
FEATURES = Features("float16", HEAD_DIM, vec=8, group_q=16, group_kv=16)
#: Numbers of columns of V that a block transposes, for named steps.
COLS = (("CFG_BLOCK_COLS", 64),)

QUANTIZE_PRIMS = [
    *(
        Prim(
            f"quantize_rows-{zero_points}", "quantize_rows", "quantize_rows", 64,
            partial(rows_arguments, zero_points), rows_expected(zero_points),
            defines=defines(
                Tiles(32, 1, 2),
                Features("float16", HEAD_DIM, vec=8, group_q=16, zero_points=zero_points),
            ),
        )
        for zero_points in (False, True)
    ),
    *(
        Prim(
            f"quantize_heads-{rope}", "quantize_heads", "quantize_heads", 32,
            partial(heads_arguments, rope), partial(heads_expected, rope),
            defines=(
                *defines(
                    Tiles(1, 2 * 24, 1),
                    Features(
                        "float16", 64, vec=8, group_q=1, group_kv=8, rope=rope, qk_norm="head"
                    ),
                ),
                ("CFG_HEADS_Q", 1), ("CFG_HEADS_K", 2), *COLS,
            ),
        )
        for rope in ("interleaved_by_column", "half_split_by_column")
    ),
    *(
        Prim(
            f"quantize_sums-{name}", "quantize_sums", "slices", 64, slices_arguments,
            partial(slices_expected, name == "first"), grid=2 * SLICES,
            defines=(*defines(TILES, FEATURES), *steps(**of), *COLS),
        )
        for name, of in (("alone", {"STEP_K": "extrema"}), ("first", {"FIRST_K": "extrema"}))
    ),
    Prim(
        "quantize_turns", "quantize_turns", "turns", 64, turns_arguments, turns_expected,
        grid=TURNS,
        defines=(
            *defines(TILES, FEATURES), *steps(STEP_Q="rows", FIRST_K="sums", STEP_K="rows"), *COLS,
        ),
    ),
]  # fmt: skip
