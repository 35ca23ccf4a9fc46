"""Plan the launch of kernels_cu/prepare/rope.cu or normalise.cu for an operand: pure data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import Launch, Plan
from cupyattn.plans.structs import NORM_PARAMS, ROPE_PARAMS
from cupyattn.problem.row_preparation import Preparation

#: Rows of a block: a few accesses for each of its threads at any head_dim.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)
#: Names of the kernels' work, for messages.
_DOES = {"rope": "turning", "normalise": "normalising"}


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
        Position of row 0.
    packed : (int, int), optional
        Number of packed sequences in x, which is then one batch entry, and their largest length.
        The buffer ``"cu_seqlens"`` has their offsets. Positions start again in each sequence.

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"turned"`` (x's shape and type,
        contiguous) by the tables ``"rope_cos"`` and ``"rope_sin"``, as
        `cupyattn.problem.row_preparation.Rope` has them.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    own = {"cos": "rope_cos", "sin": "rope_sin", "position": position}
    return _plan_pass("rope", ROPE_PARAMS, x, dtype, {"rope": pairs}, own, packed)


def _plan_pass(
    name: str,
    struct: np.dtype[Any],
    x: Operand,
    dtype: str,
    asked: dict[str, Any],
    own: dict[str, Any],
    packed: tuple[int, int] | None,
) -> Plan:
    """Plan the kernel of that name, whose struct has further fields beside the fields of the rows.

    `asked` are its fields of `Features`.
    """
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    vec = max(width for width in (1, 2, 4, 8) if x.allows(width))
    features = Features(dtype, head_dim, vec=vec, varlen=packed is not None, **asked)
    if math.prod(x.shape) == 0:
        return Plan(name, "portable", _TILES, features, ())
    grid = check_grid(f"{_DOES[name]} {x.shape}", batch, heads, -(-length // _TILES.block_q))
    defines = {**_TILES.defines(), **features.defines()}
    spec = ModuleSpec(f"prepare/{name}.cu", tuple(sorted(defines.items())))
    params = {
        **own, "X": "x", "Y": "turned", "X_stride": x.row_strides, "heads": heads,
        "length": length, "cu_seqlens": "cu_seqlens" if packed else None, "total": total,
    }  # fmt: skip
    launch = Launch(spec, name, grid, _TILES.num_threads, False, ((struct, params),))
    return Plan(name, "portable", _TILES, features, (launch,))


@dataclass(frozen=True)
class Prepares:
    """Preparation of the rows of Q or of K by kernels, as in `Preparation`.

    Parameters
    ----------
    name : {"q", "k"}
        The operand, whose weights are the buffer ``"q_norm_weight"`` or ``"k_norm_weight"``.
    rope : {"", "half_split", "interleaved"}
        Which channels are rotated as a pair; "" for none.
    position : int
        Position of row 0.
    vectors : int
        Number of weight vectors: one for all heads, or one for each head; 0: rows are not
        normalised.
    eps : float
        Added to the mean square of a row.
    """

    name: str
    rope: str = ""
    position: int = 0
    vectors: int = 0
    eps: float = 0.0

    @property
    def features(self) -> dict[str, Any]:
        """Its fields of `Features`."""
        return {"rope": self.rope, "qk_norm": self.vectors > 0}

    def params(self, head_dim: int) -> dict[str, Any]:
        """The fields `cupyattn.plans.structs.PREPARE_PARAMS`."""
        return {
            "cos": "rope_cos" if self.rope else None, "sin": "rope_sin" if self.rope else None,
            "weight": f"{self.name}_norm_weight" if self.vectors else None,
            "weight_stride_head": head_dim if self.vectors > 1 else 0,
            "eps": self.eps, "position": self.position,
        }  # fmt: skip


def plan_preparation(
    x: Operand, dtype: str, how: Prepares, packed: tuple[int, int] | None = None
) -> Plan:
    """Plan the pass that prepares one operand: `plan_normalising`, or `plan_rotation` alone."""
    if how.vectors:
        return plan_normalising(x, dtype, how, packed)
    return plan_rotation(x, dtype, how.rope, how.position, packed)


def prepares_of(preparation: Preparation | None) -> dict[str, Prepares]:
    """Return the preparation of Q and of K in a call, by name; empty without any."""
    if preparation is None:
        return {}
    rope, norm = preparation.rope, preparation.norm
    found = {}
    for i, name in enumerate("qk"):
        turning = ("", 0) if rope is None else (rope.pairs, 0 if i else rope.offset_q)
        normalising = (0, 0.0) if norm is None else (norm.vectors[i], norm.eps)
        found[name] = Prepares(name, *turning, *normalising)
    return found


@functools.lru_cache(maxsize=1024)
def plan_normalising(
    x: Operand, dtype: str, how: Prepares, packed: tuple[int, int] | None = None
) -> Plan:
    """Plan the RMS-normalisation of one operand, which is then turned where `how` says so.

    Parameters
    ----------
    x, dtype, packed
        As for `plan_rotation`.
    how : Prepares

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"turned"`` as `plan_rotation`
        does, by its tables and the weights that `Prepares` names.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    own = how.params(x.shape[3])
    return _plan_pass("normalise", NORM_PARAMS, x, dtype, how.features, own, packed)
