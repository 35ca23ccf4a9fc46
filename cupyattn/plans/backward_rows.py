"""The stages of a backward pass whose rows of Q and K are prepared first: pure data."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.passes import packed_lengths
from cupyattn.plans.prepare_rows import Prepares, plan_preparation, prepares_of
from cupyattn.plans.records import Launch, Plan, Stage, Work, Workspace
from cupyattn.plans.structs import NORM_GRADIENT_PARAMS, WEIGHT_SUM_PARAMS
from cupyattn.problem.attention import AttentionProblem

#: The sines that rotate gradients back.
SIN_BACK = "rope_sin_back"
#: Rows and threads of a block of ``backward_normalise.cu``.
_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)
#: Warps of a block of ``backward_weights.cu``, and channels.
_SUM_TILES, _SUM_COLUMNS = Tiles(block_q=64, block_kv=1, num_warps=16), 32


def prepared_stages(forward: AttentionProblem, plan: Plan, weight_dtypes: tuple[str, str]) -> Work:
    """Plan the gradients of q and k as given, and of their weights.

    Parameters
    ----------
    forward : AttentionProblem
        The forward pass, which prepares rows.
    plan : Plan
        The gradients of the prepared rows.
    weight_dtypes : (str, str)
        Types of the weights of Q and of K, where rows are normalised; otherwise ignored.
    """
    call, stages, back, between = forward.call, [], [], []
    for number, (name, how) in enumerate(prepares_of(forward.preparation).items()):
        x, turned = forward.rows[name].place, f"{name}_turned"
        packed = packed_lengths(call, name)
        ends = {"cu_seqlens": f"cu_seqlens_{name}"}
        stages.append(Stage(
            plan_preparation(x, call.dtype, how, packed), {"x": name, "turned": turned, **ends}
        ))  # fmt: skip
        if how.vectors:
            names = {"x": name, "dy": f"d{turned}", "dx": f"d{name}", "dweight": f"d{name}_weight"}
            way = plan_norm_gradient(x, call.dtype, how, weight_dtypes[number], packed)
        else:
            own = Operand.contiguous(x.shape, x.itemsize)
            names = {"x": f"d{turned}", "turned": f"d{name}"}
            way = plan_preparation(own, call.dtype, how, packed)
        back.append(Stage(way, {**names, "rope_sin": SIN_BACK, **ends}))
        between += [Workspace(one, x.shape, call.dtype) for one in (turned, f"d{turned}")]
    names = {one: f"{one}_turned" for one in ("q", "k", "dq", "dk")}
    return Work((*stages, Stage(plan, names), *back), tuple(between))


@functools.lru_cache(maxsize=1024)
def plan_norm_gradient(
    x: Operand, dtype: str, how: Prepares, weight_dtype: str,
    packed: tuple[int, int] | None = None,
) -> Plan:  # fmt: skip
    """Plan the gradients of rows that were normalised, and of their weights.

    Parameters
    ----------
    x, dtype, packed
        As for `cupyattn.plans.prepare_rows.plan_preparation`.
    how : Prepares
    weight_dtype : str
        Type of the weights.

    Returns
    -------
    Plan
        It reads ``"dy"`` (x's shape and type, contiguous), the gradient of the prepared rows, with
        sines negated. It writes ``"dx"``, laid out as that, and ``"dweight"``. Without rows the
        latter is zero.

    Raises
    ------
    UnsupportedError
        If the grid would be too large.
    """
    _, heads, total, head_dim = x.shape
    batch, length = (x.shape[0], total) if packed is None else packed
    vec = widest(x, Operand.contiguous(x.shape, x.itemsize))
    features = Features(dtype, head_dim, vec=vec, varlen=packed is not None, **how.features)
    chunks = -(-length // _TILES.block_q) if math.prod(x.shape) else 0
    sums = Features(dtype, head_dim, bias=weight_dtype)
    grid = check_grid(f"gradients of normalised rows {x.shape}", batch, heads, chunks)
    rows = {
        **how.params(head_dim), "X": "x", "Y": "dx", "X_stride": x.row_strides, "heads": heads,
        "length": length, "cu_seqlens": "cu_seqlens" if packed else None, "total": total,
        "dY": "dy", "partial_dW": "partial_dW",
    }  # fmt: skip
    of_rows = _launch("backward_normalise", _TILES, features, grid, (NORM_GRADIENT_PARAMS, rows))
    own = {
        "partial_dW": "partial_dW", "dW": "dweight", "batch": batch, "heads": heads,
        "chunks": chunks, "vectors": how.vectors,
    }  # fmt: skip
    sum_grid = how.vectors * -(-head_dim // _SUM_COLUMNS)
    of_weights = _launch("backward_weights", _SUM_TILES, sums, sum_grid, (WEIGHT_SUM_PARAMS, own))
    launches = (of_rows, of_weights) if grid else (of_weights,)
    partial = Workspace("partial_dW", (batch, heads, chunks, head_dim), "float32")
    return Plan("backward_normalise", "portable", _TILES, features, launches, (partial,))


def _launch(
    name: str, tiles: Tiles, features: Features, grid: int, params: tuple[Any, Any]
) -> Launch:
    spec = ModuleSpec.of(f"backward/{name}.cu", tiles.defines(), features.defines())
    return Launch(spec, name, grid, tiles.num_threads, False, (params,))
