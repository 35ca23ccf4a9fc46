"""Plans the pass that quantises a weight matrix in blocks."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels.limits import INT32_MAX, MAX_LENGTH
from cupyattn.kernels.tiles import GemmTiles
from cupyattn.plans.gemm import GemmFeatures, OneLaunch
from cupyattn.plans.records import Launch
from cupyattn.plans.structs import WEIGHT_PARAMS

#: Numbers that a thread holds at most, and accesses that it takes to them.
_NUMBERS, _ACCESSES = 64, 16


@functools.lru_cache(maxsize=1024)
def plan_weight_blocks(
    entry: str, w: Operand, codes: Operand, scales: Operand, dtype: str, block_size: int
) -> OneLaunch:
    """Plan the kernel that converts a weight to codes and scales, or back.

    Parameters
    ----------
    entry : {"weight_quant", "weight_dequant"}
        The kernel.
    w, codes, scales : Operand
        The buffers of these names, with two axes and contiguous last ones.
    dtype : {"float16", "bfloat16", "float32"}
        Storage type of w.
    block_size : int
        At most `MOST_BLOCK`.

    Returns
    -------
    OneLaunch
        Without launches where w is empty.

    Raises
    ------
    UnsupportedError
        For more rows, columns or blocks than the kernel counts.
    """
    rows, columns = w.shape
    vec = math.gcd(widest(w, codes), block_size)
    features = GemmFeatures(dtype, 1, vec)
    grid = math.prod(scales.shape)
    if grid == 0:
        return OneLaunch(features=features)
    if max(rows, columns) > MAX_LENGTH or grid > INT32_MAX:
        raise UnsupportedError(
            f"a weight of {rows} x {columns} in blocks of {block_size} exceeds 2^30 rows or "
            f"columns, or {INT32_MAX} blocks: split it"
        )
    params: dict[str, Any] = {
        "W": "w", "codes": "codes", "scales": "scales", "W_stride": w.row_strides[0],
        "codes_stride": codes.row_strides[0], "scales_stride": scales.row_strides[0],
        "rows": rows, "columns": columns,
    }  # fmt: skip
    rows_at_a_time = -(-block_size // min(_ACCESSES, _NUMBERS // vec))
    num_warps = -(-rows_at_a_time * (block_size // vec) // 32)
    tiles = GemmTiles(block_m=block_size, block_n=block_size, num_warps=num_warps, num_stages=1)
    spec = ModuleSpec.of("linear/weight_blocks.cu", tiles.defines(), features.defines())
    structs = ((WEIGHT_PARAMS, params),)
    launch = Launch(spec, entry, grid, tiles.num_threads, False, structs)
    return OneLaunch(features=features, launches=(launch,))
