"""The kernels of ``prims/instructions/mma_tiles.cuh``, ``prims/score/fragment_rows.cuh`` and
``prims/codes/head_scales.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import QUANT_PARAMS, pack
from cupyattn.reference.softmax_state import row_maximum
from tests.prims.prim import Arguments, Prim, defines, normal

#: Query rows of two packed sequences, of which a scale has four.
ENDS = np.array([0, 18, 30], np.int32)


def mma_tiles_expected(**_: Any) -> dict[str, np.ndarray]:
    return {"constants": np.array([80, 2, 6, 10, 96, 6, 8], np.int32)}


def fragment_rows_arguments() -> Arguments:
    x = normal(32, 3, 4)
    x[0, 0, 0], x[1, :, 2:] = np.nan, -np.inf
    x[2, 1, 2] = 2.0**27 - 8  # five times that is no number
    return {"x": x, "largest": np.zeros((32, 2), np.float32), "scaled": np.zeros_like(x)}


def fragment_rows_expected(x: np.ndarray, **_: Any) -> dict[str, np.ndarray]:
    scaled = x.copy()
    scaled[..., :2] *= np.float32(1.5)
    of_tiles = np.stack([np.fmax.reduce(x[..., h : h + 2], 2) for h in (0, 2)], 1)
    factors = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    return {"largest": np.fmax.reduce(row_maximum(of_tiles, factors), 2), "scaled": scaled}


def head_scales_arguments(varlen: bool) -> Callable[[], Arguments]:
    strides = {
        "Q_scale_stride_batch": 0 if varlen else 20, "Q_scale_stride_head": 9 if varlen else 5,
        "K_scale_stride_batch": 0 if varlen else 6, "K_scale_stride_head": 9 if varlen else 3,
    }  # fmt: skip

    def arguments() -> Arguments:
        return {
            "given": pack(QUANT_PARAMS, strides, {}),
            "Q_scale": normal(*((4, 9) if varlen else (2, 4, 5))),
            "K_scale": normal(*((2, 9) if varlen else (2, 2, 3))), "cu_seqlens": ENDS,
            "of_q": np.zeros((2, 4), np.float32), "of_k": np.zeros((2, 2), np.float32),
        }  # fmt: skip

    return arguments


def head_scales_expected(
    Q_scale: np.ndarray, K_scale: np.ndarray, **_: Any
) -> dict[str, np.ndarray]:
    if Q_scale.ndim == 3:
        return {"of_q": Q_scale[..., 0], "of_k": K_scale[..., 0]}
    first = [ENDS[batch] // 4 + batch for batch in range(2)]
    return {"of_q": Q_scale[:, first].T, "of_k": K_scale[:, first].T}


FRAGMENT_PRIMS = [
    Prim(
        "mma_tiles", "mma_tiles", "mma_tiles", 32, lambda: {"constants": np.zeros(7, np.int32)},
        mma_tiles_expected, defines=defines(Tiles(64, 48, 2, 2), Features("float16", 72, vec=8)),
    ),
    Prim(
        "fragment_rows", "fragment_rows", "fragment_rows", 32, fragment_rows_arguments,
        fragment_rows_expected,
        defines=defines(Tiles(16, 32, 1, 2), Features("float16", 24, vec=8)),
    ),
    *(
        Prim(
            f"head_scales{'_packed' * varlen}", "head_scales", "head_scales", 8,
            head_scales_arguments(varlen), head_scales_expected,
            defines=defines(
                Tiles(16, 32, 1, 2),
                Features("float16", 24, vec=8, group_q=4, group_kv=4, varlen=varlen),
            ),
        )
        for varlen in (False, True)
    ),
]  # fmt: skip
