"""The kernel of ``joint_rows.cuh``: rows of two tensors, and of one without a second."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures
from cupyattn.plans.structs import JOINT_ROWS_PARAMS, pack
from tests.prims.prim import Arguments, Prim

#: Batch, rows of each entry in the first tensor and in the second, and distances of rows.
BATCH, ROWS, STRIDES = 3, (2, 5), (7, 4)
COUNT = BATCH * sum(ROWS)


def arguments() -> Arguments:
    first, below = (
        np.arange(BATCH * n * stride, dtype=np.float32).reshape(BATCH, n, stride)
        for n, stride in zip(ROWS, STRIDES, strict=True)
    )
    given = {
        "batch_stride": first[0].size, "below_batch_stride": below[0].size,
        "below_stride": STRIDES[1], "split": ROWS[0], "joint_rows": sum(ROWS),
    }  # fmt: skip
    return {
        "given": pack(JOINT_ROWS_PARAMS, given, {}), "first": np.append(first, np.zeros(999, "f4")),
        "below": -1 - below, "stride": np.int32(STRIDES[:1]), "found": np.zeros(COUNT, np.float32),
    }  # fmt: skip


def expected(
    first: np.ndarray, below: np.ndarray, *, joint: bool, **_: Any
) -> dict[str, np.ndarray]:
    of_first = first[: below.shape[0] * ROWS[0] * STRIDES[0]].reshape(BATCH, ROWS[0], -1)
    both = np.concatenate((of_first[..., :1], below[..., :1]), axis=1).ravel()
    return {"found": both if joint else first[:: STRIDES[0]][:COUNT]}


def defined(features: GemmFeatures) -> tuple[tuple[str, int], ...]:
    tiles = GemmTiles(16, 32, num_warps=2, num_stages=2)
    return tuple(sorted({**tiles.defines(), **features.defines()}.items()))


JOINT_ROWS_PRIMS = [
    Prim(
        f"joint-rows-{'two' if joint else 'one'}", "joint_rows", "first_elements", COUNT, arguments,
        partial(expected, joint=joint),
        defines=defined(GemmFeatures("float32", 16, 4, joint_rows=joint)),
    )
    for joint in (True, False)
]  # fmt: skip
