"""Plans softcap, bias and masks of the Hopper forms: parameters, the passes that pack a mask, and
the tensor map of a bias. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.kernels.softcap import LARGEST_Y, tanh_factors
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.assemble import tensor_map_of
from cupyattn.plans.records import Launch, TensorMap, Workspace
from cupyattn.plans.structs import ATTN_PARAMS, SCORE_PARAMS
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.operands import Operands

#: The passes, threads of a block of ``pack_keys``, and query rows of a warp of ``pack_mask``.
_SOURCE = "prepare/pack_mask.cu"
KEYS_THREADS, MASK_GROUP = 1024, 16
WARP = 32


class ScorePlan(NamedTuple):
    """Additions to a plan for softcap, bias and mask.

    Parameters
    ----------
    passes : tuple of Launch
        Launches before the kernel.
    structs : tuple
        Further parameters of the kernel, after all others.
    workspace : tuple of Workspace
    """

    passes: tuple[Launch, ...] = ()
    structs: tuple[Any, ...] = ()
    workspace: tuple[Workspace, ...] = ()


def plan_scores(
    call: AttentionSpec,
    operands: Operands,
    features: Features,
    tiles: Tiles,
    spec: ModuleSpec,
    params: Mapping[str, Any],
    unit: float,
    unread: TensorMap,
) -> ScorePlan:
    """Plan softcap, bias and mask of a call.

    Parameters
    ----------
    call : AttentionSpec
    operands : Operands
    features : Features
        Features of the kernel, including `score_features`.
    tiles : Tiles
        Tiles of the kernel, for which a mask is packed.
    spec : ModuleSpec
        Module of the kernel, whose macros the passes use.
    params : mapping
        Its ``struct AttnParams``.
    unit : float
        One natural unit of scores, in the units of the kernel's scores.
    unread : TensorMap
        Placeholder that is passed if no bias is copied.
    """
    if not features.scored:
        return ScorePlan()
    values: dict[str, Any] = {"bias_factor": unit}
    if call.softcap:
        cap = call.softcap * unit
        values |= {
            "tanh_factor": tanh_factors(cap), "largest_square": (LARGEST_Y * cap) ** 2,
            "tanh_exponent": 2 / math.log(2) / cap, "softcap_unit": cap,
        }  # fmt: skip
    bias_map = unread
    if operands.bias is not None:
        bias = narrowed(operands.bias)
        values |= {
            "bias_batch": int(bias.shape[0] > 1), "bias_head": int(bias.shape[1] > 1),
            "bias_once": int(bias.shape[:2] == (call.batch, call.heads)),
        }  # fmt: skip
        if features.bias_kind != "rows":
            rows = tiles.block_q if features.bias_kind == "dense" else 1
            bias_map = tensor_map_of("bias", call.bias, bias, rows)
    if operands.mask is None:
        return ScorePlan((), ((SCORE_PARAMS, values), bias_map))
    packed, workspace = _packed_mask(
        call, operands.mask, operands.kept_blocks, features.mask_kind, tiles
    )
    values |= packed
    structs = ((ATTN_PARAMS, params), (SCORE_PARAMS, values))
    passes = _passes(features, tiles, replace(spec, source=_SOURCE), structs, workspace)
    return ScorePlan(passes, (structs[1], bias_map), workspace)


def plan_transposed_mask(call: AttentionSpec, mask: Operand, tiles: Tiles) -> ScorePlan:
    """Plan the pass that packs a mask for a kernel of gradients whose rows are keys.

    Parameters
    ----------
    call : AttentionSpec
    mask : Operand
        The buffer ``"mask"``.
    tiles : Tiles
        Tiles of the kernel: keys of a block, and query rows of a step.

    Returns
    -------
    ScorePlan
        Its `structs` are fields of ``struct KeysParams<true>``.
    """
    turned = replace(call, len_q=call.len_kv, len_kv=call.len_q)
    (*front, rows, keys), (*steps, of_row, of_key) = mask.shape, mask.strides
    own = replace(mask, shape=(*front, keys, rows), strides=(*steps, of_key, of_row))
    return plan_mask(turned, own, Tiles(tiles.block_kv, tiles.block_q, 1), "")


def plan_mask(call: AttentionSpec, mask: Operand, tiles: Tiles, prefix: str) -> ScorePlan:
    """Plan the pass that packs a mask for a kernel of gradients.

    Parameters
    ----------
    call, mask
        As for `plan_transposed_mask`.
    tiles : Tiles
        Of the kernel: query rows of a block, and keys of a step.
    prefix : str
        What the names of its workspace begin with.

    Returns
    -------
    ScorePlan
        As from `plan_transposed_mask`.
    """
    tiles = Tiles(tiles.block_q, tiles.block_kv, tiles.block_q // MASK_GROUP)
    packed, workspace = _packed_mask(call, mask, None, "rows", tiles, prefix)
    # One module for all types and sizes of heads, none of which it reads.
    features = Features("float16", 64, mask=True, scored=True, mask_kind="rows")
    params = {
        "mask": "mask", "mask_stride": mask.strides, "len_q": call.len_q, "len_kv": call.len_kv
    }  # fmt: skip
    module = ModuleSpec.of(_SOURCE, tiles.defines(), features.defines())
    structs = ((ATTN_PARAMS, params), (SCORE_PARAMS, packed | {"tile_steps": None}))
    packing, _ = _passes(features, tiles, module, structs, workspace)
    fields = {name: packed[name] for name in ("mask_bits", "mask_batch", "mask_head")}
    return ScorePlan((packing,), ({**fields, "row_tiles": packed["key_tiles"]},), workspace[:2])


def narrowed(x: Operand) -> Operand:
    """Return a broadcast array as it is stored: one entry along each broadcast axis."""
    shape = tuple(1 if step == 0 else n for n, step in zip(x.shape, x.steps, strict=True))
    return replace(x, shape=shape)


def _packed_mask(
    call: AttentionSpec, mask: Operand, kept_blocks: Operand | None, kind: str, tiles: Tiles,
    prefix: str = "",
) -> tuple[dict[str, Any], tuple[Workspace, ...]]:
    """Return the layouts of a mask's bits and of the lists of its steps."""
    q_tiles, key_tiles = -(-call.len_q // tiles.block_q), -(-call.len_kv // tiles.block_kv)
    batches, heads = narrowed(mask).shape[:2]
    rows = q_tiles if kind == "rows" else 1
    list_batches, list_heads, list_rows = batches, heads, rows
    if kept_blocks is not None:
        kept = narrowed(kept_blocks).shape
        list_batches, list_heads = max(batches, kept[0]), max(heads, kept[1])
        list_rows = q_tiles
    aligned = mask.steps[3] == 1 and not any(s % 8 for s in mask.steps[:3])
    values = {
        **{name: prefix + name for name in ("mask_bits", "tile_classes", "tile_steps")},
        "mask_batch": heads * rows * (batches > 1), "mask_head": rows * (heads > 1),
        "mask_q": int(rows > 1), "mask_heads": heads, "mask_rows": rows,
        "list_batch": list_heads * list_rows * (list_batches > 1),
        "list_head": list_rows * (list_heads > 1), "list_q": int(list_rows > 1),
        "list_heads": list_heads, "list_rows": list_rows, "key_tiles": key_tiles,
        "mask_aligned": int(aligned and mask.misalignment % 8 == 0),
    }  # fmt: skip
    mask_tiles, words = batches * heads * rows, tiles.block_q * 4 if kind == "rows" else 4
    return values, (
        Workspace(f"{prefix}mask_bits", (mask_tiles, key_tiles, words), "uint32"),
        Workspace(f"{prefix}tile_classes", (mask_tiles, key_tiles), "uint8"),
        Workspace(
            f"{prefix}tile_steps", (list_batches * list_heads * list_rows, 2 + key_tiles), "int32"
        ),
    )


def _passes(
    features: Features,
    tiles: Tiles,
    module: ModuleSpec,
    structs: tuple[Any, ...],
    workspace: tuple[Workspace, ...],
) -> tuple[Launch, ...]:
    """Plan the passes that pack a mask and list its steps."""
    bits, _, lists = workspace
    listing = Launch(
        module, "list_steps", check_grid("listing", lists.shape[0]), WARP, False, structs
    )
    if features.mask_kind == "rows":
        grid = check_grid("packing the mask", *bits.shape[:2])
        threads = tiles.block_q // MASK_GROUP * WARP
        return Launch(module, "pack_mask", grid, threads, False, structs), listing
    grid = check_grid("packing the mask", bits.shape[0])
    packing = Launch(module, "pack_keys", grid, KEYS_THREADS, False, structs)
    return (packing, listing) if features.block_mask != (0, 0) else (packing,)
