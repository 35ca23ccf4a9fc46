"""The kernels of ``cluster.cuh`` and ``griddepcontrol.cuh``: blocks that read the shared memory of
one another, and what a launch that overlaps with none does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.prims.prim import Arguments, Prim, normal

SPLITS = 4


def arguments(width: int) -> Arguments:
    y = np.zeros((2, SPLITS, SPLITS, 64, width), np.float32)
    return {"x": normal(2, SPLITS, 64, width), "y": y}


def expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    return {"y": np.repeat(x[:, None, :, ::-1], SPLITS, axis=1)}


def passed_arguments() -> Arguments:
    x = normal(2, SPLITS, 3, 64)
    return {"x": x, "y": np.zeros_like(x)}


def copied() -> Arguments:
    return {"x": normal(64), "y": np.zeros(64, np.float32)}


#: Kernel, and floats that are read at a time.
WIDTHS = {"rows_of_others": 4, "pairs_of_others": 2}
CLUSTER_PRIMS = [
    Prim(
        f"cluster_{width}", "cluster", entry, 64, functools.partial(arguments, width), expected,
        grid=2 * SPLITS, defines=(("CFG_SPLITS", SPLITS),), since=90,
    )
    for entry, width in WIDTHS.items()
]  # fmt: skip
CLUSTER_PRIMS.append(
    Prim(
        "cluster_rows_passed_on", "cluster", "rows_passed_on", 64, passed_arguments,
        lambda x, y: {"y": np.roll(x, 1, axis=1)[..., ::-1]}, grid=2 * SPLITS,
        defines=(("CFG_SPLITS", SPLITS),), since=90,
    )
)  # fmt: skip
CLUSTER_PRIMS.append(
    Prim("dependents", "griddepcontrol", "dependents", 64, copied, lambda x, y: {"y": x})
)
