"""Which launch of kernels_cu/rope.cu turns an operand by its positions: pure data."""

from __future__ import annotations

import functools
import math

import numpy as np

from cupyattn.compile import ModuleSpec
from cupyattn.features import Features
from cupyattn.launch import Launch, Operand, Plan, check_grid
from cupyattn.tiles import Tiles

#: ``struct RopeParams`` of kernels_cu/prims/rope.cuh, field by field.
ROPE_PARAMS = np.dtype(
    [
        ("X", "u8"), ("Y", "u8"), ("cos", "u8"), ("sin", "u8"), ("X_stride", "i8", 3),
        ("heads", "i4"), ("length", "i4"), ("position", "i4"), ("cu_seqlens", "u8"),
        ("total", "i4"),
    ],
    align=True,
)  # fmt: skip

#: Rows of a block: a few accesses for each of its threads at any head_dim.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


@functools.lru_cache(maxsize=1024)
def plan_rotation(
    x: Operand, dtype: str, pairs: str, position: int, packed: tuple[int, int] | None = None
) -> Plan:
    """Plan the rotary embedding of one operand, for the rungs that do not turn on load.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, head_dim), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    pairs : {"half_split", "interleaved"}
        Which channels make a pair.
    position : int
        Of row 0.
    packed : (int, int), optional
        x is one batch entry of so many packed sequences, of at most so many rows, which begin and
        end where the buffer ``"cu_seqlens"`` says. Each has positions of its own.

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"turned"`` (x's shape and type,
        contiguous) by the tables ``"rope_cos"`` and ``"rope_sin"``, as `cupyattn.rope.Rope` has
        them.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    vec = max(width for width in (1, 2, 4, 8) if x.allows(width))
    features = Features(dtype, head_dim, vec=vec, rope=pairs, varlen=packed is not None)
    if math.prod(x.shape) == 0:
        return Plan("rope", "portable", _TILES, features, ())
    grid = check_grid(f"turning {x.shape}", batch, heads, -(-length // _TILES.block_q))
    spec = ModuleSpec("rope.cu", tuple(sorted({**_TILES.defines(), **features.defines()}.items())))
    params = {
        "X": "x", "Y": "turned", "cos": "rope_cos", "sin": "rope_sin", "X_stride": x.row_strides,
        "heads": heads, "length": length, "position": position,
        "cu_seqlens": "cu_seqlens" if packed else None, "total": total,
    }  # fmt: skip
    launch = Launch(spec, "rope", grid, _TILES.num_threads, False, ((ROPE_PARAMS, params),))
    return Plan("rope", "portable", _TILES, features, (launch,))
