"""The kernel of ``prims/cluster.cuh``: blocks that read the shared memory of one another."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.prim import Arguments, Prim, normal

SPLITS = 4


def arguments() -> Arguments:
    return {"x": normal(2, SPLITS, 64, 4), "y": np.zeros((2, SPLITS, SPLITS, 64, 4), np.float32)}


def expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    return {"y": np.repeat(x[:, None, :, ::-1], SPLITS, axis=1)}


CLUSTER_PRIMS = [
    Prim(
        "cluster", "cluster", "rows_of_others", 64, arguments, expected, grid=2 * SPLITS,
        defines=(("CFG_SPLITS", SPLITS),), since=90,
    )
]  # fmt: skip
