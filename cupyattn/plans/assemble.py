"""Make a plan of a checked call. Only this file casts scalars for kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels import tile_pieces
from cupyattn.kernels.features import Features
from cupyattn.kernels.forms import Form
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.limits import HOPPER_BLOCKS, check_grid
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import Launch, TensorMap, Workspace
from cupyattn.plans.structs import (
    ATTN_PARAMS,
    PIECE_PARAMS,
    SCHEDULE_PARAMS,  # fmt: skip
)
from cupyattn.problem.checks import AttentionSpec

LOG2E = math.log2(math.e)

#: Rows of O that a warp of such a kernel stores at a time.
HOPPER_STORE_ROWS = 16
#: Rows of a block that clears padding: a few accesses for each of its threads at any head_dim.
_CLEARED = Tiles(block_q=64, block_kv=1, num_warps=4)


def entry_of(variant: Variant, form: str) -> str:
    """Return the name of a form's kernel in its source."""
    return variant.entry_point if variant.source else variant.forms[form].entry_point


def attn_params(
    call: AttentionSpec,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    mask: Operand | None,
    bias: Operand | None,
    kept_blocks: Operand | None,
) -> dict[str, Any]:
    """Return the fields of ``struct AttnParams``, buffers by their names."""
    present = mask is not None, bias is not None, kept_blocks is not None
    if present != (call.mask, bool(call.bias), call.block_mask != (0, 0)):
        raise ValueError(
            "mask, bias and kept_blocks must be given where the call has them, and only there"
        )
    absent, own, lengths = (0, 0, 0, 0), call.own_lengths, call.lengths_in
    total_q = call.len_q if call.padded else call.packed.total_q if call.packed else 0
    return {
        "Q": "q", "K": "k", "V": "v", "O": "o",
        "lse": "lse" if call.return_lse else None, "S": None,
        "Q_stride": q.row_strides, "K_stride": k.row_strides,
        "V_stride": v.row_strides, "O_stride": o.row_strides,
        "batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv,
        "len_q": call.len_q, "len_kv": call.len_kv, "causal_shift": call.causal_shift,
        "scale": call.scale, "scale_log2": call.scale * LOG2E,
        "mask": "mask" if mask else None, "bias": "bias" if bias else None,
        "mask_stride": mask.strides if mask else absent,
        "bias_stride": bias.strides if bias else absent,
        "window_shift": call.window_shift, "softcap": call.softcap,
        "softcap_inverse": 1 / call.softcap if call.softcap else 0.0,
        "kept_blocks": "kept_blocks" if kept_blocks else None,
        "kept_stride": kept_blocks.row_strides if kept_blocks else absent[:3],
        "rope_cos": "rope_cos" if call.rope else None,
        "rope_sin": "rope_sin" if call.rope else None, "rope_offset_q": call.rope_offset_q,
        "cu_seqlens_q": lengths["q"], "cu_seqlens_k": lengths["k"], "total_q": total_q,
        "bottom_right": own is not None and own.bottom_right, "stack": call.stack,
    }  # fmt: skip


def _persistent(
    call: AttentionSpec,
    count: int,
    boxes: Sequence[tuple[str, str, Operand, int]],
    tiles: Tiles,
    form: Form,
    features: Features,
) -> tuple[int, tuple[Any, ...], tuple[Workspace, ...], tile_pieces.Pieces]:
    """Return blocks, further parameters, workspace, and pieces of a form that takes `count` tiles.

    A box has the buffer, dtype, operand and rows of one copy of the copy engine.
    """
    uneven = (call.causal and not call.stack) or call.window
    uneven = uneven or call.own_lengths is not None or call.block_mask != (0, 0)
    uneven = uneven or bool(features.mask_kind) or features.bias_kind == "dense"
    cuts = form.pieces and not uneven
    steps = -(-call.len_kv // tiles.block_kv)
    sharing = HOPPER_BLOCKS if cuts else 1  # a single block cuts no tiles
    cut = tile_pieces.share_out(count, steps, sharing, tiles.block_kv)
    structs: tuple[Any, ...] = tuple(tensor_map_of(*box) for box in boxes)
    structs += ((SCHEDULE_PARAMS, {"next_tile": "next_tile" if uneven else None}),)
    structs += ((PIECE_PARAMS, cut.params),) if form.pieces else ()
    counter = (Workspace("next_tile", (1,), "int32", zeros=True),)
    partials = tuple(Workspace(*one) for one in cut.buffers(tiles, call.head_dim))
    blocks = HOPPER_BLOCKS if cut.cut else min(count, HOPPER_BLOCKS)
    return blocks, structs, counter if uneven else partials, cut


def _merge_pieces(
    spec: ModuleSpec, tiles: Tiles, cut: tile_pieces.Pieces, structs: tuple[Any, ...]
) -> tuple[Launch, ...]:
    """Plan the kernel that merges pieces of tiles, a warp for each query row; () without pieces."""
    if not cut.cut:
        return ()
    grid = -(-cut.cut * tiles.block_q // tiles.num_warps)
    # Wherever codes of Q are made, the pieces are alike: one module for both.
    defines = tuple(one for one in spec.defines if one[0] != "CFG_QUANTIZE_Q")
    merge = ModuleSpec("merge/sm90/merge_pieces.cu", defines)
    structs += ((PIECE_PARAMS, cut.params),)
    return (Launch(merge, "merge_pieces", grid, tiles.num_threads, False, structs),)


def clear_padding(
    call: AttentionSpec, o: Operand, params: Mapping[str, Any]
) -> tuple[Launch, ...]:
    """Plan the kernel that clears padded query rows; () without padding."""
    if call.padded is None or not call.padded.of_q:
        return ()
    features = Features(
        call.dtype, call.head_dim, lse=call.return_lse, vec=widest(o), padded=True
    )  # one module for all rungs
    spec = ModuleSpec.of("prepare/clear_padding.cu", _CLEARED.defines(), features.defines())
    blocks = -(-call.len_q // _CLEARED.block_q)
    grid = check_grid("clearing the padding", blocks, call.batch, call.heads)
    structs = ((ATTN_PARAMS, params),)
    return (Launch(spec, "clear_padding", grid, _CLEARED.num_threads, False, structs),)


def tensor_map_of(name: str, dtype: str, x: Operand, rows: int) -> TensorMap:
    """Describe an operand, copied `rows` rows and 128 bytes of columns at a time."""
    # NOTE: an axis of length 1 is never stepped along, but its stride must still be a legal one.
    strides = tuple(
        s * x.itemsize if n > 1 else 16 for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True)
    )
    return TensorMap(name, dtype, x.shape, strides, (1, 1, rows, 128 // x.itemsize))
