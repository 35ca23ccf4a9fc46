"""Plans the pass that quantises activations in blocks."""

from __future__ import annotations

import functools
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import INT32_MAX
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures, OneLaunch
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import ACT_QUANT_PARAMS
from cupyattn.quant.blocks import BLOCK_SIZE

#: Warps of a block, and bytes that a lane holds.
_NUM_WARPS, _LANE_BYTES = 4, 64

#: Columns kept in 16 bits are padded with zeros to a multiple of this number, 16 bytes.
KEPT_PAD = 8


def padded(outliers: int) -> int:
    """Return the padded number of columns for a number of outliers.

    Examples
    --------
    >>> padded(0), padded(1), padded(8)
    (0, 8, 8)
    """
    return -(-outliers // KEPT_PAD) * KEPT_PAD


@functools.lru_cache(maxsize=1024)
def plan_act_quant(x: Operand, dtype: str, outliers: int = 0, kept: str = "") -> OneLaunch:
    """Plan the quantisation of rows.

    Parameters
    ----------
    x : Operand
        (rows, channels), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    outliers : int
        Number of channels kept in 16 bits, in the buffer ``"kept"``; ``"place"`` has their indices.
    kept : {"", "float16", "bfloat16"}
        Type that they are kept in; "" if none is kept.

    Returns
    -------
    OneLaunch
        Without launches where x is empty. It names the buffers ``"codes"`` and ``"scales"``, too.

    Raises
    ------
    UnsupportedError
        For more blocks of channels than 32 bits count.
    """
    rows, channels = x.shape
    vec = widest(x)
    features = GemmFeatures(dtype, 1, vec, outliers=kept)
    if rows * channels == 0:
        return OneLaunch(features=features)
    groups = rows * -(-channels // BLOCK_SIZE)
    if groups > INT32_MAX:
        raise UnsupportedError(f"{groups} blocks of activations exceed {INT32_MAX}: split the rows")
    lanes = min(32, BLOCK_SIZE // vec)
    passes = max(1, _LANE_BYTES * lanes // (BLOCK_SIZE * x.itemsize))
    params: dict[str, Any] = {
        "X": "x", "codes": "codes", "scales": "scales", "kept": "kept" if kept else None,
        "place": "place" if kept else None, "X_stride": x.row_strides[0], "rows": rows,
        "channels": channels, "outliers": outliers, "kept_stride": padded(outliers),
    }  # fmt: skip
    tiles = GemmTiles(block_m=1, block_n=BLOCK_SIZE, num_warps=_NUM_WARPS, num_stages=1)
    spec = ModuleSpec.of("linear/act_quant.cu", tiles.defines(), features.defines())
    grid = -(-groups // (passes * _NUM_WARPS * 32 // lanes))
    structs = ((ACT_QUANT_PARAMS, params),)
    launch = Launch(spec, "act_quant", grid, _NUM_WARPS * 32, False, structs)
    return OneLaunch(features=features, launches=(launch,))
