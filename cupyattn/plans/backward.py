"""Plan the launches of kernels_cu/backward/ for the gradients of a call: pure data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.backward_tiles import SUMMED, bias_tiles
from cupyattn.kernels.features import BIAS_KINDS, Features
from cupyattn.kernels.limits import HOPPER_BLOCKS, check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.assemble import attn_params, tensor_map_of
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.scored import narrowed, plan_mask, plan_transposed_mask
from cupyattn.plans.structs import (
    ATTN_PARAMS,
    BACKWARD_PARAMS,
    BIAS_GRADIENT_PARAMS,
    COARSE_PARAMS,
    DELTA_PARAMS,
    KEYS_PARAMS,
    SUMMED_DELTA_PARAMS,
)
from cupyattn.problem.backward_form import (
    NO_DQ,
    SUMS_DQ_IN_ORDER,
    SUMS_DQ_PERSISTENT,
    BackwardKernel,
)
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.form import features_of, score_kind

#: ROW_PAD of kernels_cu/prims/score/gradient.cuh.
ROW_PAD = 128
#: COARSE_ROWS of ``backward_coarse.cu``: rows that share a flag.
COARSE_ROWS = 16
#: Tiles of the passes over query rows: ``backward_delta.cu``, ``backward_coarse.cu`` and
#: ``backward_sums.cu``.
_PASS_TILES = Tiles(block_q=64, block_kv=1, num_warps=4)
#: Blocks of the first of them for ROW_PAD rows.
_PAD_BLOCKS = ROW_PAD // _PASS_TILES.block_q
#: M of coarse rows, and the sum of their exponentials over some keys; the same over all keys, with
#: the inverse of the sum.
PART_SUMS, GIVEN_SUMS = ("part_M", "part_l"), ("given_M", "given_factor")
#: Note of a plan whose other kernels are of a Hopper form.
_PORTABLE_BIAS = "the gradient of the bias comes from a portable kernel"
#: Rows and columns of a contiguous patch in the Hopper form's sums of dQ.
SUM_ROWS = SUM_COLUMNS = 64


@dataclass(frozen=True)
class BackwardOperands:
    """Layouts of the arrays of a backward pass, which are the buffers of these names in a plan.

    Parameters
    ----------
    q, k, v, o, d_out, dq, dk, dv : Operand
    mask, bias, kept_blocks : Operand, optional
        As for `cupyattn.plans.attention.plan_attention`.
    kept_rows : Operand, optional
        As ``block_mask.transposed.kept_blocks`` makes it, where the call has a block mask.
    dbias : tuple of int, optional
        Shape of the gradient of the bias, four axes of which those that broadcast have length 1;
        None: it is not made. Its buffer is contiguous.
    """

    q: Operand
    k: Operand
    v: Operand
    o: Operand
    d_out: Operand
    dq: Operand
    dk: Operand
    dv: Operand
    mask: Operand | None = None
    bias: Operand | None = None
    kept_blocks: Operand | None = None
    kept_rows: Operand | None = None
    dbias: tuple[int, ...] | None = None


@functools.lru_cache(maxsize=1024)
def plan_backward(
    kernel: BackwardKernel,
    at: BackwardOperands,
    *,
    all_keys: bool = True,
    d_lse: bool = False,
    given_sums: bool = False,
) -> Plan:
    """Plan the gradients of a call.

    Parameters
    ----------
    kernel : BackwardKernel
    at : BackwardOperands
        The plan also reads the buffer ``"lse"``, contiguous, and for a packed call
        ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, int32.
    all_keys : bool
        Whether the rows attend only to these keys. True normalises rows again if their lse is too
        coarse to give P. False uses every lse unchanged.
    d_lse : bool
        Whether the plan also reads the buffer ``"d_lse"``, in the layout of ``"lse"``.
    given_sums : bool
        Whether the plan reads M and the factor of coarse rows, over all their keys, from the
        buffers ``"given_M"`` and ``"given_factor"``, in that layout.

    Returns
    -------
    Plan
        Its tiles are those of the kernel ``backward_keys``. It has no launches if all results are
        empty.

    Raises
    ------
    UnsupportedError
        If a grid would be too large.
    """
    call, form, dq_of_keys, kept_rows = kernel.call, kernel.form, kernel.dq, at.kept_rows
    features = features_of(call, widest(at.q, at.k, at.v, at.o, at.d_out, at.dq, at.dk, at.dv))
    in_order, persistent = (dq_of_keys == x for x in (SUMS_DQ_IN_ORDER, SUMS_DQ_PERSISTENT))
    row_blocks, (lists, rows), total = _padded_rows(call)
    gradients = {
        "dO": "d_out", "dQ": "dq", "dK": "dk", "dV": "dv",
        "dO_stride": at.d_out.row_strides, "dQ_stride": at.dq.row_strides,
        "dK_stride": at.dk.row_strides, "dV_stride": at.dv.row_strides,
        "row_M": "row_M", "row_factor": "row_factor", "coarse": "coarse", "delta": "delta",
        "dQ_sum": "dQ_sum" if dq_of_keys else None, "rows": rows,
        "kept_rows": "kept_rows" if kept_rows else None,
        "kept_rows_stride": kept_rows.row_strides if kept_rows else (0, 0, 0),
        "turns": "turns" if in_order else None,
        "next_block": "next_block" if in_order or persistent else None,
        "all_keys": int(all_keys or given_sums),
    }  # fmt: skip
    structs = (
        (ATTN_PARAMS, attn_params(call, at.q, at.k, at.v, at.o, at.mask, at.bias, at.kept_blocks)),
        (BACKWARD_PARAMS, gradients),
    )
    kernels = _Kernels(features, structs)
    workspace = [
        *(Workspace(name, (lists, rows), "float32") for name in ("row_M", "row_factor", "delta")),
        Workspace("coarse", (lists, rows // COARSE_ROWS), "int32"),
    ]
    heads, heads_kv = call.batch * call.heads, call.batch * call.heads_kv
    delta = kernels.with_d_lse() if d_lse else kernels
    delta = delta.with_sums(SUMMED_DELTA_PARAMS, *GIVEN_SUMS) if given_sums else delta
    launches = delta.launch(
        "delta", _PASS_TILES, row_blocks, _PAD_BLOCKS, heads, dq=dq_of_keys if in_order else None
    )
    if not given_sums:
        launches += kernels.launch("coarse", _PASS_TILES, row_blocks, _PAD_BLOCKS, heads)
    sums_tiles, sum_shape = _PASS_TILES, (lists, total, call.head_dim)
    keys_tiles, queries_tiles = kernel.keys_tiles, kernel.queries_tiles
    keys = queries = sums = kernels
    if kernel.on_hopper:
        block_keys = keys_tiles.block_kv // (2 if kernel.paired else 1)
        boxes_of = {
            "q": (at.q, keys_tiles.block_q), "k": (at.k, block_keys),
            "v": (at.v, block_keys), "d_out": (at.d_out, keys_tiles.block_q),
        }  # fmt: skip
        if at.mask is not None:
            packed = [plan_transposed_mask(call, at.mask, keys_tiles)]
            if dq_of_keys == NO_DQ:  # the kernel of dQ has query rows as rows
                packed.append(plan_mask(call, at.mask, queries_tiles, "row_"))
            for one in packed:
                launches, workspace = (*launches, *one.passes), [*workspace, *one.workspace]
            keys, queries = (kernels.masked(*packed[n].structs) for n in (0, -1))
        keys, queries = keys.with_maps(boxes_of), queries.with_maps(boxes_of)
        if at.bias is not None:
            keys = keys.biased(at.bias, call.bias, keys_tiles.block_q)
            queries = queries.biased(at.bias, call.bias, queries_tiles.block_q)
        sums = replace(kernels, folder="sm90/")
        boxes = -(-call.head_dim // SUM_COLUMNS)
        sums_tiles, sum_shape = Tiles(64, 1, 4 * boxes), (lists, rows, boxes * SUM_COLUMNS)
    key_blocks = -(-call.len_kv // keys_tiles.block_kv)
    next_block = Workspace("next_block", (1,), "int32", zeros=True)
    if kernel.paired:
        launches += keys.launch("keys_pair", keys_tiles, 2 * key_blocks, heads_kv, dq=dq_of_keys)
    elif persistent:
        blocks = min(key_blocks * heads_kv, HOPPER_BLOCKS)
        launches += keys.launch("keys", keys_tiles, blocks, dq=dq_of_keys)
        workspace.append(next_block)
    else:
        launches += keys.launch("keys", keys_tiles, key_blocks, heads_kv, dq=dq_of_keys)
    if dq_of_keys == NO_DQ:
        row_tiles = -(-call.len_q // queries_tiles.block_q)
        launches += queries.launch("queries", queries_tiles, row_tiles, heads)
    elif not in_order:
        row_tiles = -(-call.len_q // sums_tiles.block_q)
        launches += sums.launch("sums", sums_tiles, row_tiles, heads)
        workspace.append(Workspace("dQ_sum", sum_shape, "float32", zeros=True))
    else:  # the first block of keys writes sums, the last one stores dQ
        workspace.append(Workspace("dQ_sum", sum_shape, "float32"))
        counters = rows // SUM_ROWS * (2 if kernel.paired else 1)  # of each block of a pair
        workspace += [Workspace("turns", (lists, counters), "int32", zeros=True), next_block]
    note = kernel.note
    if at.dbias is not None:
        launches += kernels.of_bias(at.dbias)
        note = _PORTABLE_BIAS if kernel.on_hopper else note
    return Plan("backward", form, keys_tiles, features, launches, tuple(workspace), note)


def _padded_rows(call: AttentionSpec) -> tuple[int, tuple[int, int], int]:
    """Return blocks of ROW_PAD rows of an entry, the lists of padded rows, and the rows of all."""
    row_blocks = -(-call.len_q // ROW_PAD)
    if call.packed is None:
        return row_blocks, (call.batch * call.heads, row_blocks * ROW_PAD), call.len_q
    total = call.packed.total_q  # one entry, in which every sequence starts at a multiple
    return row_blocks, (call.heads, (total // ROW_PAD + call.batch) * ROW_PAD), total


@functools.lru_cache(maxsize=1024)
def plan_part_sums(
    call: AttentionSpec, q: Operand, k: Operand, mask: Operand | None, bias: Operand | None
) -> Plan:
    """Plan the maxima and sums of coarse rows over the keys of one rank.

    Parameters
    ----------
    call : AttentionSpec
    q, k, mask, bias : Operand
        Layouts of the buffers of these names. It also reads ``"lse"``, and for a packed call
        ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``.

    Returns
    -------
    Plan
        It writes `PART_SUMS` in the layout of lse, of coarse rows alone.
    """
    row_blocks, (_, rows), _ = _padded_rows(call)
    own = attn_params(call, q, k, k, q, mask, bias, None) | {"V": None, "O": None}
    grad = {"rows": rows, "all_keys": 1}
    features = features_of(call, widest(q, k))
    kernels = _Kernels(features, ((ATTN_PARAMS, own), (BACKWARD_PARAMS, grad)))
    kernels, heads = kernels.with_sums(COARSE_PARAMS, *PART_SUMS), call.batch * call.heads
    launches = kernels.launch("coarse", _PASS_TILES, row_blocks, _PAD_BLOCKS, heads)
    return Plan("part_sums", "portable", _PASS_TILES, features, launches)


@dataclass(frozen=True)
class _Kernels:
    """Parameters that the launches of a plan share."""

    features: Features
    structs: tuple[Any, ...]
    folder: str = ""
    options: Mapping[str, int] = field(default_factory=dict)

    def with_d_lse(self) -> _Kernels:
        """Return the kernels that read the gradient with respect to lse."""
        call, (_, grad) = self.structs
        structs = call, (DELTA_PARAMS, grad | {"d_lse": "d_lse"})
        return replace(self, structs=structs, options={"CFG_D_LSE": 1})

    def masked(self, fields: Mapping[str, Any]) -> _Kernels:
        """Return the Hopper kernel that reads a packed mask."""
        call, (_, grad) = self.structs
        return replace(self, structs=(call, (KEYS_PARAMS, grad | dict(fields))))

    def with_sums(self, struct: np.dtype[Any], *buffers: str) -> _Kernels:
        """Return the kernels that read or write sums of coarse rows, in buffers of these names."""
        call, (_, grad) = self.structs
        structs = call, (struct, grad | {name: name for name in buffers})
        return replace(self, structs=structs, options={**self.options, "CFG_PART_SUMS": 1})

    def with_maps(self, boxes: Mapping[str, tuple[Operand, int]]) -> _Kernels:
        """Return the Hopper kernels, with copies of so many rows of each operand."""
        call, grad = self.structs
        dtype = self.features.dtype
        maps = (tensor_map_of(name, dtype, x, rows) for name, (x, rows) in boxes.items())
        return replace(self, structs=(call, *maps, grad), folder="sm90/")

    def biased(self, bias: Operand, dtype: str, rows: int) -> _Kernels:
        """Return the Hopper kernel that adds a bias, copied so many rows at a time if dense."""
        kind, structs = score_kind(bias, "dense"), self.structs
        if kind == "dense" or self.features.head_dim > SUMMED:
            rows = rows if kind == "dense" else 1
            structs = *structs, tensor_map_of("bias", dtype, narrowed(bias), rows)
        options = {**self.options, "CFG_BIAS_KIND": BIAS_KINDS.index(kind)}
        return replace(self, structs=structs, options=options)

    def of_bias(self, shape: tuple[int, ...]) -> tuple[Launch, ...]:
        """Return the launch that makes the gradient of a bias of a shape."""
        batches, heads, rows, keys = shape
        tiles = bias_tiles(self.features.head_dim)
        own = {"dBias": "dbias", "batches": batches, "heads": heads, "rows": rows, "keys": keys}
        counts = batches, heads, -(-rows // tiles.block_q), -(-keys // tiles.block_kv)
        kernels = replace(self, structs=(*self.structs, (BIAS_GRADIENT_PARAMS, own)))
        return kernels.launch("bias", tiles, *counts)

    def launch(
        self, name: str, tiles: Tiles, *counts: int, dq: int | None = None
    ) -> tuple[Launch, ...]:
        """Return one launch, or none if there is no work.

        `dq` is that of `BackwardKernel`, for kernels with ``CFG_DQ``.
        """
        shared = name in ("keys", "keys_pair", "queries", "bias")
        wide = name in ("keys", "queries") and bool(self.folder) and self.features.head_dim > SUMMED
        entry = f"backward_{name}_wide" if wide else f"backward_{name}"
        grid = check_grid(entry, *counts)
        own = dict(self.options)
        if dq is not None:
            own["CFG_DQ"] = dq
        source = f"backward/{self.folder}{entry}.cu"
        spec = ModuleSpec.of(source, tiles.defines(), self.features.defines(), own)
        one = Launch(spec, entry, grid, tiles.num_threads, shared, self.structs)
        return (one,) if grid else ()
