"""Which launches of kernels_cu/backward_*.cu make the gradients of a call: pure data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.backward_tiles import backward_tiles
from cupyattn.checks import AttentionCall
from cupyattn.compile import ModuleSpec
from cupyattn.features import Features
from cupyattn.launch import (
    Launch,
    Operand,
    Plan,
    Workspace,
    attn_params,
    check_grid,
    features_of,
    widest,
)
from cupyattn.params import ATTN_PARAMS
from cupyattn.tiles import Tiles

#: ``struct BackwardParams`` of kernels_cu/prims/params.cuh, field by field.
BACKWARD_PARAMS = np.dtype(
    [
        ("dO", "u8"), ("dQ", "u8"), ("dK", "u8"), ("dV", "u8"),
        ("dO_stride", "i8", 3), ("dQ_stride", "i8", 3), ("dK_stride", "i8", 3),
        ("dV_stride", "i8", 3), ("row_M", "u8"), ("delta", "u8"), ("dQ_sum", "u8"), ("rows", "i8"),
        ("kept_rows", "u8"), ("kept_rows_stride", "i8", 3),
    ],
    align=True,
)  # fmt: skip

#: ROW_PAD of kernels_cu/prims/gradient.cuh.
ROW_PAD = 128
#: Of the passes over query rows, ``backward_delta.cu`` and ``backward_sums.cu``.
_PASS_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)


@functools.lru_cache(maxsize=1024)
def plan_backward(
    call: AttentionCall,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    d_out: Operand,
    dq: Operand,
    dk: Operand,
    dv: Operand,
    *,
    deterministic: bool,
    mask: Operand | None = None,
    bias: Operand | None = None,
    kept_blocks: Operand | None = None,
    kept_rows: Operand | None = None,
) -> Plan:
    """Plan the gradients of a call.

    Parameters
    ----------
    call : AttentionCall
        With ``return_lse``.
    q, k, v, o, d_out, dq, dk, dv : Operand
        The buffers of these names when the plan runs; it also reads ``"lse"``, contiguous, and of a
        packed call ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, int32.
    deterministic : bool
        The form: ``"deterministic"`` has a kernel for dQ, with the same bits on every run; in
        ``"atomic"`` blocks of keys add up dQ in float32 in memory.
    mask, bias, kept_blocks : Operand, optional
        As for `cupyattn.launch.plan_attention`.
    kept_rows : Operand, optional
        The buffer ``"kept_rows"``, as ``block_mask.transposed.kept_blocks`` makes it, where the
        call has a block mask.

    Returns
    -------
    Plan
        Its tiles are those of ``backward_keys.cu``. Without launches where all results are empty.

    Raises
    ------
    UnsupportedError
        If a grid would be too large.
    """
    keys_tiles, queries_tiles = backward_tiles(call.head_dim, call.block_mask)
    features = features_of(call, widest(q, k, v, o, d_out, dq, dk, dv))
    form = "deterministic" if deterministic else "atomic"
    row_blocks = -(-call.len_q // ROW_PAD)
    lists, rows, total = call.batch * call.heads, row_blocks * ROW_PAD, call.len_q
    if call.packed is not None:  # one entry, in which every sequence begins at a multiple
        total = call.packed.total_q
        lists, rows = call.heads, (total // ROW_PAD + call.batch) * ROW_PAD
    gradients = {
        "dO": "d_out", "dQ": "dq", "dK": "dk", "dV": "dv",
        "dO_stride": d_out.row_strides, "dQ_stride": dq.row_strides, "dK_stride": dk.row_strides,
        "dV_stride": dv.row_strides, "row_M": "row_M", "delta": "delta",
        "dQ_sum": None if deterministic else "dQ_sum", "rows": rows,
        "kept_rows": "kept_rows" if kept_rows else None,
        "kept_rows_stride": kept_rows.row_strides if kept_rows else (0, 0, 0),
    }  # fmt: skip
    params = attn_params(call, q, k, v, o, mask, bias, kept_blocks)
    structs = ((ATTN_PARAMS, params), (BACKWARD_PARAMS, gradients))

    def launch(name: str, tiles: Tiles, *counts: int) -> tuple[Launch, ...]:
        """Return one launch, none where it has nothing to do."""
        grid = check_grid(f"backward_{name}", *counts)
        spec = _module_spec(name, features, tiles, sums_dq=not deterministic)
        shared = name in ("keys", "queries")
        one = Launch(spec, f"backward_{name}", grid, tiles.num_threads, shared, structs)
        return (one,) if grid else ()

    heads, heads_kv = call.batch * call.heads, call.batch * call.heads_kv
    passes = -(-call.len_q // _PASS_TILES.block_q)
    delta = launch("delta", _PASS_TILES, row_blocks, ROW_PAD // _PASS_TILES.block_q, heads)
    keys = launch("keys", keys_tiles, -(-call.len_kv // keys_tiles.block_kv), heads_kv)
    if deterministic:
        last = launch("queries", queries_tiles, -(-call.len_q // queries_tiles.block_q), heads)
    else:
        last = launch("sums", _PASS_TILES, passes, heads)
    workspace = [Workspace(name, (lists, rows), "float32") for name in ("row_M", "delta")]
    if not deterministic:
        shape = (lists, total, call.head_dim)
        workspace.append(Workspace("dQ_sum", shape, "float32", zeros=True))
    launches = (*delta, *keys, *last)
    return Plan("backward", form, keys_tiles, features, launches, tuple(workspace))


def _module_spec(name: str, features: Features, tiles: Tiles, *, sums_dq: bool) -> ModuleSpec:
    """Return what to compile for one kernel; only that of the keys asks who makes dQ."""
    defines: Mapping[str, Any] = {**tiles.defines(), **features.defines()}
    if name == "keys":
        defines = {**defines, "CFG_SUMS_DQ": int(sums_dq)}
    return ModuleSpec(f"backward_{name}.cu", tuple(sorted(defines.items())))
