"""Merging partial results of a ring, attention to some of the keys, by their lse in float32.

The first part is stored unchanged. The last merge writes the type of the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays import memory
from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import NEG_INF, STORAGE, array_namespace
from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.distributed.partition import Range
from cupyattn.kernels.features import DTYPES, Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.operation import Operation, run
from cupyattn.plans.records import Launch, Plan, Work
from cupyattn.plans.structs import MERGE_PARAMS
from cupyattn.problem.problem import Problem

#: Rows of a thread block, whose weights are in shared memory.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


@dataclass
class _Piece:
    """Current O and lse of contiguous rows."""

    o: Any
    lse: Any


class Partial:
    """Attention of some rows to the keys that have come so far.

    Parameters
    ----------
    like : array, (batch, heads, len_q, head_dim)
        Shape, type and device of the result.
    backend : {"cuda", "mirror", "interpret"}
    wide : bool
        Whether O is float32 between the first part and the last; otherwise it keeps its type.

    Notes
    -----
    Rows that arrive together are a separate piece until rows arrive that overlap them in part. A
    piece with a single part is unchanged. With `wide`, it is float32 from the second part to the
    last.
    """

    def __init__(self, like: Any, backend: str, wide: bool = True) -> None:
        self.backend, self._like, self._wide = backend, like, wide
        self._pieces: dict[Range, _Piece] = {}

    def add(self, rows: Range, o: Any, lse: Any, last: bool = False) -> None:
        """Bring in attention of some rows to further keys.

        Parameters
        ----------
        rows : (int, int)
            First row and end.
        o : array, (batch, heads, rows, head_dim)
            In the type of the result. The first part may be modified later.
        lse : array, (batch, heads, rows), float32
            Natural logarithm; rows contiguous. It may be modified, too.
        last : bool
            Whether no further part comes: these rows then get the type of the result.
        """
        met = [of for of in self._pieces if of[0] < rows[1] and rows[0] < of[1]]
        if not met:
            self._pieces[rows] = _Piece(o, lse)
            return
        whole = min(rows[0], *(of[0] for of in met)), max(rows[1], *(of[1] for of in met))
        if met != [whole]:
            is_wide = any(self._pieces[of].o.dtype == np.float32 for of in met)
            joined = self._joined(whole, np.float32 if is_wide else self._stored_dtype)
            self._pieces = {of: x for of, x in self._pieces.items() if of not in met}
            self._pieces[whole] = joined
        piece, some = self._pieces[whole], slice(rows[0] - whole[0], rows[1] - whole[0])
        before, after = piece.o, piece.o
        wanted = np.dtype(self._stored_dtype if last or not self._wide else np.float32)
        if after.dtype != wanted:
            after = array_namespace(o).empty(before.shape, wanted)
            for outside in (slice(some.start), slice(some.stop, None)):
                after[:, :, outside] = _stored(before[:, :, outside], wanted)
        self._merge(before[:, :, some], piece.lse[:, :, some], o, lse, after[:, :, some])
        piece.o = after

    def result(self) -> tuple[Any, Any]:
        """Return O, rounded to its type, and lse; 0 and -inf for rows without unmasked keys."""
        whole = 0, self._like.shape[2]
        piece = self._pieces.get(whole)
        if piece is None:
            piece = self._joined(whole, self._stored_dtype)
        return _stored(piece.o, self._stored_dtype), piece.lse

    @property
    def _stored_dtype(self) -> Any:
        return STORAGE[self._like.dtype.name]

    def _joined(self, rows: Range, dtype: Any) -> _Piece:
        """Return pieces as one piece of a type, without the rows between them."""
        like, xp, (begin, end) = self._like, array_namespace(self._like), rows
        within = {of: x for of, x in self._pieces.items() if begin <= of[0] and of[1] <= end}
        with memory.on_device_of(like):
            shape = *like.shape[:2], end - begin
            made = _Piece(xp.empty((*shape, like.shape[3]), dtype), xp.empty(shape, np.float32))
        at = begin
        for of in [*sorted(within), (end, end)]:
            made.o[:, :, at - begin : of[0] - begin] = 0
            made.lse[:, :, at - begin : of[0] - begin] = NEG_INF
            if of in within:
                where = slice(of[0] - begin, of[1] - begin)
                made.o[:, :, where] = _stored(within[of].o, dtype)
                made.lse[:, :, where] = within[of].lse
            at = of[1]
        return made

    def _merge(self, before: Any, lse: Any, part_o: Any, part_lse: Any, after: Any) -> None:
        arrays = {
            "part_O": part_o, "part_lse": part_lse, "O": after, "lse": lse, "before_O": before,
        }  # fmt: skip
        run(MERGE, (self.backend, self._like.dtype.name), arrays)


def merge_mirror(before: Any, lse: Any, part_o: Any, part_lse: Any, o: Any) -> None:
    """Mirror kernels_cu/merge/merge_partials.cu on NumPy arrays.

    Parameters
    ----------
    before : array, (batch, heads, rows, head_dim)
        Current O, in 16 or 32 bits.
    lse : array, (batch, heads, rows), float32
        Current lse, updated in place.
    part_o, part_lse : array
        The new part, `part_o` in 16 or 32 bits.
    o : array, (batch, heads, rows, head_dim)
        Receives the result, in its type; may be `before`.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        largest = np.fmax(lse, part_lse)
        top = np.where(largest == NEG_INF, np.float32(0), largest)
        w0, w1 = np.exp(lse - top), np.exp(part_lse - top)
        total = w0 + w1
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / total)
        incoming = (w1 * inverse)[..., None] * part_o.astype(np.float32)
        o[...] = (w0 * inverse)[..., None] * before.astype(np.float32) + incoming
        lse[...] = top + np.log(total)


def _stored(x: Any, dtype: Any) -> Any:
    """Return an array in a type: rounded, widened, or unchanged."""
    with np.errstate(over="ignore"):
        return x.astype(dtype, copy=False)


@functools.lru_cache(maxsize=1024)
class _Merge(Operation):
    """Merging a part into O and lse in place, as an operation of (backend, dtype)."""

    name = "merge_partials"
    receives = ("O", "lse")

    def resolve(self, settings: tuple[str, str], arrays: Mapping[str, Described]) -> Problem:
        """Settle the operands: the current O is O itself if its type stays."""
        backend, _ = settings
        kept = arrays["before_O"].dtype == arrays["O"].dtype  # then they are one array
        names = ("part_O", "part_lse") if kept else ("part_O", "part_lse", "before_O")
        return Problem(
            what=self.name, backend=backend, operands={name: arrays[name] for name in names},
            results={}, received={name: arrays[name] for name in ("O", "lse")},
            settled=(settings, kept),
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the launch."""
        (_, dtype), kept = problem.settled
        arrays = _with_before({**problem.operands, **problem.received})
        names = ("before_O", "O", "lse", "part_O", "part_lse")
        before_o, o, lse, part_o, part_lse = (arrays[name].place for name in names)
        before, after = (str(arrays[name].dtype) for name in ("before_O", "O"))
        plan = plan_merge(before_o, o, lse, part_o, part_lse, dtype, before, after, kept)
        return Work.of(plan)

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Merge on NumPy."""
        arrays = _with_before(arrays)
        names = ("before_O", "lse", "part_O", "part_lse", "O")
        merge_mirror(*(arrays[name] for name in names))
        return {}


MERGE = _Merge()


def _with_before(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arrays by buffer; if the type stays, O is also the current O."""
    return {"before_O": arrays["O"], **arrays}


def plan_merge(
    before_o: Operand,
    o: Operand,
    lse: Operand,
    part_o: Operand,
    part_lse: Operand,
    dtype: str,
    before: str,
    after: str,
    in_place: bool,
) -> Plan:
    """Plan the kernel that merges partial results of some rows.

    Parameters
    ----------
    before_o, o, lse : Operand
        The buffers ``"before_O"``, of type `before`, read; ``"O"``, of type `after`, written; and
        ``"lse"``, float32, read and written.
    part_o, part_lse : Operand
        The buffers ``"part_O"``, of type `dtype`, and ``"part_lse"``, float32.
    dtype, before, after : {"float16", "bfloat16", "float32"}
    in_place : bool
        Whether the current O is in the buffer ``"O"``.

    Returns
    -------
    Plan
        It has no launches if there are no rows.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    batch, heads, length, head_dim = part_o.shape
    of_o = before_o, o, part_o
    widths = (
        w for w in (1, 2, 4, 8)
        if w * part_o.itemsize <= 16 and all(x.allows(min(w, 16 // x.itemsize)) for x in of_o)
        and head_dim % w == 0
    )  # fmt: skip
    features = Features(dtype, head_dim, vec=max(widths))
    if math.prod(part_o.shape) == 0:
        return Plan("merge_partials", "portable", _TILES, features, ())
    grid = check_grid(f"merging {part_o.shape}", batch, heads, -(-length // _TILES.block_q))
    types = {"CFG_BEFORE": DTYPES.index(before), "CFG_AFTER": DTYPES.index(after)}
    spec = ModuleSpec.of("merge/merge_partials.cu", _TILES.defines(), features.defines(), types)
    params = {
        "before_O": "O" if in_place else "before_O", "O": "O", "lse": "lse",
        "part_O": "part_O", "part_lse": "part_lse",
        "before_O_stride": before_o.row_strides, "O_stride": o.row_strides,
        "part_O_stride": part_o.row_strides,
        "lse_stride": lse.row_strides, "part_lse_stride": part_lse.row_strides,
        "heads": heads, "length": length,
    }  # fmt: skip
    struct = ((MERGE_PARAMS, params),)
    launch = Launch(spec, "merge_partials", grid, _TILES.num_threads, True, struct)
    return Plan("merge_partials", "portable", _TILES, features, (launch,))
