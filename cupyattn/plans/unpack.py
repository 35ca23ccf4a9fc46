"""Plans the pass that unpacks INT4 codes to a byte each."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import Launch, Plan
from cupyattn.plans.structs import UNPACK_PARAMS

#: Rows of a block: a few accesses for each of its threads at any head_dim.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


@functools.lru_cache(maxsize=1024)
def plan_unpack(x: Operand, head_dim: int) -> Plan:
    """Plan the unpacking of one operand.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, packed_bytes(head_dim)), contiguous last axis; the buffer
        ``"nibbles"``.
    head_dim : int

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"codes"``, INT8
        (batch, heads, length, padded_columns(head_dim)), contiguous.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    batch, heads, length, _ = x.shape
    features = Features("float16", head_dim, vec=8 if x.allows(4) and head_dim % 8 == 0 else 1)
    if math.prod(x.shape) == 0:
        return Plan("unpack", "portable", _TILES, features, ())
    grid = check_grid(f"unpacking {x.shape}", batch, heads, -(-length // _TILES.block_q))
    by_batch, by_head, by_row = x.row_strides
    params: dict[str, Any] = {
        "X": "nibbles", "Y": "codes", "X_stride_batch": by_batch, "X_stride_head": by_head,
        "X_stride_len": by_row, "heads": heads, "length": length,
    }  # fmt: skip
    spec = ModuleSpec.of("prepare/unpack.cu", _TILES.defines(), features.defines())
    structs = ((UNPACK_PARAMS, params),)
    launch = Launch(spec, "unpack", grid, _TILES.num_threads, False, structs)
    return Plan("unpack", "portable", _TILES, features, (launch,))
