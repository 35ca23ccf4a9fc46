"""Plan kernels_cu/prepare/rope.cu, normalise.cu or token_factors.cu for an operand: pure data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import NORM_PARAMS, ROPE_PARAMS, TOKEN_FACTOR_PARAMS
from cupyattn.problem.row_preparation import Preparation

#: Rows of a block: a few accesses for each of its threads at any head_dim.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)
#: Tokens of a block of ``token_factors.cu``, which its threads take in one pass at head_dim 128.
_TOKEN_TILES = Tiles(block_q=16, block_kv=1, num_warps=4)


@dataclass(frozen=True)
class Prepares:
    """Preparation of the rows of Q or of K by kernels, as in `Preparation`.

    Parameters
    ----------
    name : {"q", "k"}
        The operand, whose weights are the buffer ``"q_norm_weight"`` or ``"k_norm_weight"``.
    rope : str
        Which channels are rotated as a pair (`Features.rope`); "" for none.
    position : int
        Position of row 0.
    vectors : int
        Number of weight vectors: one for all heads, or one for each head; 0: rows are not
        normalised.
    eps : float
        Added to the mean square of a row.
    rotate : bool
        Rows are multiplied by a Hadamard matrix at the end.
    by_token : bool
        Rows are normalised by the root mean square of all heads of a token.
    split : int
        The first row that takes the second of two weight vectors, for all heads; 0: `vectors` are
        of heads.
    """

    name: str
    rope: str = ""
    position: int = 0
    vectors: int = 0
    eps: float = 0.0
    rotate: bool = False
    by_token: bool = False
    split: int = 0

    @property
    def norm(self) -> str:
        """The norm of rows (`Features.qk_norm`)."""
        if not self.vectors:
            return ""
        if self.split:
            return "part"
        return "token" if self.by_token else "head"

    @property
    def of_all_heads(self) -> bool:
        """Whether each row is normalised by itself, with weights that all heads share."""
        return self.norm == "part" or (self.norm == "head" and self.vectors == 1)

    @property
    def features(self) -> dict[str, Any]:
        """Its fields of `Features`."""
        return {"rope": self.rope, "qk_norm": self.norm, "qk_rotate": self.rotate}

    @property
    def token_factor(self) -> str | None:
        """The buffer of factors of tokens, which `token_factors` computes; None if not needed."""
        return f"{self.name}_token_factor" if self.by_token else None

    def params(self, head_dim: int) -> dict[str, Any]:
        """The fields `cupyattn.plans.structs.PREPARE_PARAMS`."""
        return {
            "cos": "rope_cos" if self.rope else None, "sin": "rope_sin" if self.rope else None,
            "weight": f"{self.name}_norm_weight" if self.vectors else None,
            "weight_step": self.split or (head_dim if self.vectors > 1 else 0),
            "token_factor": self.token_factor,
            "eps": self.eps, "position": self.position,
        }  # fmt: skip


def token_factors(
    x: Operand, dtype: str, how: Prepares, buffer: str
) -> tuple[tuple[Launch, ...], tuple[Workspace, ...]]:
    """Plan the factors that normalise the rows of all heads of a token.

    Parameters
    ----------
    x : Operand
        As for `plan_preparation`, not empty.
    dtype : {"float16", "bfloat16", "float32"}
    how : Prepares
    buffer : str
        The buffer of x.

    Returns
    -------
    launches : tuple of Launch
        None or one, which writes the buffer `Prepares.token_factor`.
    workspace : tuple of Workspace
        That buffer.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    if how.token_factor is None:
        return (), ()
    batch, heads, length, head_dim = x.shape
    features = Features(dtype, head_dim, vec=widest(x), qk_norm=how.norm)
    chunks = -(-length // _TOKEN_TILES.block_q)
    grid = check_grid(f"normalising {x.shape}", batch, chunks)
    spec = ModuleSpec.of(
        "prepare/token_factors.cu", _TOKEN_TILES.defines(), features.defines()
    )
    params = {
        "X": buffer, "factor": how.token_factor, "X_stride": x.row_strides, "heads": heads,
        "length": length, "eps": how.eps,
    }  # fmt: skip
    launch = Launch(
        spec, "token_factors", grid, _TOKEN_TILES.num_threads, False,
        ((TOKEN_FACTOR_PARAMS, params),),
    )  # fmt: skip
    return (launch,), (Workspace(how.token_factor, (batch, length), "float32"),)


@functools.lru_cache(maxsize=1024)
def plan_preparation(
    x: Operand, dtype: str, how: Prepares, packed: tuple[int, int] | None = None
) -> Plan:
    """Plan the pass that prepares one operand before a kernel that does not prepare rows itself.

    Parameters
    ----------
    x : Operand
        Shape (batch, heads, length, head_dim), contiguous last axis; the buffer ``"x"``.
    dtype : {"float16", "bfloat16", "float32"}
        Its storage type.
    how : Prepares
    packed : (int, int), optional
        Number of packed sequences in x, which is then one batch entry, and their largest length.
        The buffer ``"cu_seqlens"`` has their offsets. Positions start again in each sequence.

    Returns
    -------
    Plan
        Without launches where x is empty. It writes the buffer ``"turned"`` (x's shape and type,
        contiguous) by the tables ``"rope_cos"`` and ``"rope_sin"``, as
        `cupyattn.problem.row_preparation.Rope` has them, and by the weights that `how` names.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    name, struct, does = ("normalise", NORM_PARAMS, "normalising") if how.vectors else (
        "rope", ROPE_PARAMS, "turning"
    )  # fmt: skip
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    features = Features(
        dtype, head_dim, vec=widest(x), varlen=packed is not None, **how.features
    )
    if math.prod(x.shape) == 0:
        return Plan(name, "portable", _TILES, features, ())
    grid = check_grid(f"{does} {x.shape}", batch, heads, -(-length // _TILES.block_q))
    spec = ModuleSpec.of(f"prepare/{name}.cu", _TILES.defines(), features.defines())
    fields = struct.names or ()
    own = {name: value for name, value in how.params(head_dim).items() if name in fields}
    params = {
        **own, "X": "x", "Y": "turned", "X_stride": x.row_strides, "heads": heads,
        "length": length, "cu_seqlens": "cu_seqlens" if packed else None, "total": total,
    }  # fmt: skip
    first, workspace = token_factors(x, dtype, how, "x")
    launch = Launch(spec, name, grid, _TILES.num_threads, False, ((struct, params),))
    return Plan(name, "portable", _TILES, features, (*first, launch), workspace)


def prepares_of(preparation: Preparation | None) -> dict[str, Prepares]:
    """Return the preparation of Q and of K in a call, by name; empty without any."""
    if preparation is None:
        return {}
    rope, norm = preparation.rope, preparation.norm
    found = {}
    for i, name in enumerate("qk"):
        turning = ("", 0) if rope is None else (rope.pairs, 0 if i else rope.offset_q)
        normalising = (0, 0.0) if norm is None else (norm.vectors[i], norm.eps)
        of_rows = (False, 0) if norm is None else (norm.by_token, norm.split)
        found[name] = Prepares(name, *turning, *normalising, preparation.rotate, *of_rows)
    return found
