"""Plans the pass that quantises rows with a scale for each."""

from __future__ import annotations

import functools
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import INT32_MAX, MAX_LENGTH
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures, OneLaunch
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import ROW_PAIR_PARAMS, ROW_QUANT_PARAMS

#: Accesses that a lane keeps at most; the most warps that share a row, and of a thread block with
#: short ones.
_MOST_HELD, _MOST_WARPS, _WARPS = 16, 8, 4
#: Accesses of a lane to a row that does not fit in one warp. With at most `_FEW_ROWS` rows, latency
#: decides, so more lanes share a row. With more rows, idle lanes at the end of a row decide.
_FEW_ROWS, _ACCESSES, _ACCESSES_OF_MANY = 512, 4, 8


@functools.lru_cache(maxsize=1024)
def plan_row_quant(
    x: Operand, dtype: str, buffer: str = "x", right: Operand | None = None
) -> OneLaunch:
    """Plan the quantisation of rows with a scale for each.

    Parameters
    ----------
    x : Operand
        (rows, channels), contiguous last axis.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    buffer : str
        Its name.
    right : Operand, optional
        The further channels of these rows, (rows, others), contiguous last axis; the buffer
        ``"right"``.

    Returns
    -------
    OneLaunch
        It has no launches if there are no rows. Its other buffers are ``"codes"`` and ``"scales"``.

    Raises
    ------
    UnsupportedError
        For more rows or channels than the kernel counts.
    """
    sides = (x,) if right is None else (x, right)
    rows, channels = x.shape[0], sum(side.shape[1] for side in sides)
    vec = widest(*sides)
    features = GemmFeatures(dtype, 1, vec)
    if rows == 0:
        return OneLaunch(features=features)
    if channels > MAX_LENGTH or rows > INT32_MAX:
        raise UnsupportedError(
            f"{rows} rows of {channels} exceed {INT32_MAX} rows or 2^30 channels: split them"
        )
    accesses = max(1, -(-channels // vec))
    each = _ACCESSES if rows <= _FEW_ROWS else _ACCESSES_OF_MANY
    warps = 1
    while warps < _MOST_WARPS and warps * 32 * each < accesses:
        warps *= 2
    held = min(-(-accesses // (32 * warps)), _MOST_HELD)
    rows_of_block = max(1, _WARPS // warps)
    tiles = GemmTiles(rows_of_block, held * 32 * warps * vec, rows_of_block * warps, num_stages=1)
    own = {} if right is None else {"CFG_PAIRED": 1}
    spec = ModuleSpec.of("linear/row_quant.cu", tiles.defines(), features.defines(), own)
    params: dict[str, Any] = {
        "X": buffer, "codes": "codes", "scales": "scales", "X_stride": x.row_strides[0],
        "rows": rows, "channels": channels,
    }  # fmt: skip
    struct = ROW_QUANT_PARAMS
    if right is not None:
        struct = ROW_PAIR_PARAMS
        params |= {"right": "right", "right_stride": right.row_strides[0], "split": x.shape[1]}
    grid = -(-rows // rows_of_block)
    structs = ((struct, params),)
    launch = Launch(spec, "row_quant", grid, tiles.num_threads, False, structs)
    return OneLaunch(features=features, launches=(launch,))
