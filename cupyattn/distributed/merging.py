"""Partial results of a ring: attention to some of the keys, brought together by their lse in
float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cupyattn import backends
from cupyattn.compile import ModuleSpec
from cupyattn.distributed.partition import Range
from cupyattn.features import Features
from cupyattn.launch import Launch, Operand, Plan, check_grid
from cupyattn.rounding import NEG_INF, STORAGE, array_namespace
from cupyattn.tiles import Tiles

#: ``struct MergeParams`` of kernels_cu/merge_partials.cu, field by field.
MERGE_PARAMS = np.dtype(
    [
        ("O", "u8"), ("lse", "u8"), ("part_O", "u8"), ("part_lse", "u8"), ("O_stride", "i8", 3),
        ("part_O_stride", "i8", 3), ("lse_stride", "i8", 2), ("part_lse_stride", "i8", 2),
        ("heads", "i4"), ("length", "i4"),
    ],
    align=True,
)  # fmt: skip
#: Rows of a block, whose weights lie in shared memory.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


class Partial:
    """Attention of some rows to the keys that have come so far.

    Parameters
    ----------
    o : array, (batch, heads, len_q, head_dim)
        Shape, type and place of the result.
    backend : {"cuda", "mirror", "interpret"}

    Attributes
    ----------
    o : array, (batch, heads, len_q, head_dim), float32, or None
        So far; 0 of a row that attended to nothing. None before any keys have come.
    lse : array, (batch, heads, len_q), float32, or None
        So far; -inf of such a row.
    """

    def __init__(self, o: Any, backend: str) -> None:
        self.backend, self._like = backend, o
        self.o: Any = None
        self.lse: Any = None

    def add(self, rows: Range, o: Any, lse: Any) -> None:
        """Bring in attention of some rows to further keys.

        Parameters
        ----------
        rows : (int, int)
            Which, from one up to another.
        o : array, (batch, heads, rows, head_dim)
        lse : array, (batch, heads, rows), float32
            Natural logarithm; rows contiguous.
        """
        first = self.o is None
        if first and rows == (0, self._like.shape[2]):
            self.o, self.lse = o.astype(np.float32), lse.copy()
            return
        if first:
            self._begin()
        some = slice(*rows)
        to_o, to_lse = self.o[:, :, some], self.lse[:, :, some]
        if first:
            to_o[...], to_lse[...] = o, lse
        elif self.backend == "mirror":
            merge_mirror(to_o, to_lse, o, lse)
        else:
            operands = tuple(Operand.of(x) for x in (to_o, to_lse, o, lse))
            plan = plan_merge(*operands, self._like.dtype.name)
            buffers = {"O": to_o, "lse": to_lse}
            read = {"part_O": backends.as_input(o), "part_lse": backends.as_input(lse)}
            backends.run(self.backend, plan, {**buffers, **read})

    def result(self) -> Any:
        """Return O, rounded to its type."""
        if self.o is None:
            self._begin()
        with np.errstate(over="ignore"):
            return self.o.astype(STORAGE[self._like.dtype.name], copy=False)

    def _begin(self) -> None:
        """Make room for rows that have attended to nothing yet."""
        xp = array_namespace(self._like)
        with backends.on_device_of(self._like):
            self.o = xp.zeros(self._like.shape, np.float32)
            self.lse = xp.full(self._like.shape[:3], NEG_INF, np.float32)


def merge_mirror(o: Any, lse: Any, part_o: Any, part_lse: Any) -> None:
    """Do what kernels_cu/merge_partials.cu does, in place, on NumPy arrays.

    Parameters
    ----------
    o : array, (batch, heads, rows, head_dim), float32
    lse : array, (batch, heads, rows), float32
        So far.
    part_o, part_lse : array
        What comes in, `part_o` in 16 or 32 bits.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        largest = np.fmax(lse, part_lse)
        top = np.where(largest == NEG_INF, np.float32(0), largest)
        w0, w1 = np.exp(lse - top), np.exp(part_lse - top)
        total = w0 + w1
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / total)
        incoming = (w1 * inverse)[..., None] * part_o.astype(np.float32)
        o[...] = (w0 * inverse)[..., None] * o + incoming
        lse[...] = top + np.log(total)


@functools.lru_cache(maxsize=1024)
def plan_merge(o: Operand, lse: Operand, part_o: Operand, part_lse: Operand, dtype: str) -> Plan:
    """Plan how partial results of some rows are brought together.

    Parameters
    ----------
    o, lse : Operand
        The buffers ``"O"`` and ``"lse"``, float32, read and written.
    part_o, part_lse : Operand
        The buffers ``"part_O"``, of type `dtype`, and ``"part_lse"``, float32.
    dtype : {"float16", "bfloat16", "float32"}

    Returns
    -------
    Plan
        Without launches where there is nothing.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    batch, heads, length, head_dim = part_o.shape
    widths = (w for w in (1, 2, 4, 8) if part_o.allows(w) and o.allows(min(w, 4)))
    features = Features(dtype, head_dim, vec=max(widths))
    if math.prod(part_o.shape) == 0:
        return Plan("merge_partials", "portable", _TILES, features, ())
    grid = check_grid(f"merging {part_o.shape}", batch, heads, -(-length // _TILES.block_q))
    defines = {**_TILES.defines(), **features.defines()}
    spec = ModuleSpec("merge_partials.cu", tuple(sorted(defines.items())))
    params = {
        "O": "O", "lse": "lse", "part_O": "part_O", "part_lse": "part_lse",
        "O_stride": o.row_strides, "part_O_stride": part_o.row_strides,
        "lse_stride": lse.row_strides, "part_lse_stride": part_lse.row_strides,
        "heads": heads, "length": length,
    }  # fmt: skip
    struct = ((MERGE_PARAMS, params),)
    launch = Launch(spec, "merge_partials", grid, _TILES.num_threads, True, struct)
    return Plan("merge_partials", "portable", _TILES, features, (launch,))
