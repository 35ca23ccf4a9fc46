"""Plans attention of 16- and 32-bit operands: pure data."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.contracts import check_tiles
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.features import Features
from cupyattn.kernels.ladder import Variant
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import hopper, stacking
from cupyattn.plans.assemble import (
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _named,
    _persistent,
    attn_params,
    check_grid,
    entry_of,
    features_of,
    module_spec,
    widest,
)
from cupyattn.plans.codes import FusedCodes
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, SPLIT_PARAMS
from cupyattn.problem.call import AttentionSpec

#: Kernels of the unfused rung, in order; each can be planned alone.
UNFUSED_STEPS = ("scores", "softmax", "weighted_sum")


@functools.lru_cache(maxsize=1024)
def plan_attention(
    variant: Variant,
    call: AttentionSpec,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand,
    *,
    mask: Operand | None = None,
    bias: Operand | None = None,
    kept_blocks: Operand | None = None,
    fused: FusedCodes | None = None,
    tiles: Tiles | None = None,
    arch: str | None = None,
) -> Plan:
    """Plan a 16/32-bit rung, or the INT8 rung on such operands.

    Parameters
    ----------
    variant : Variant
    call : AttentionSpec
    q, k, v, o : Operand
        The buffers called ``"q"``, ``"k"``, ``"v"``, ``"o"`` (and ``"lse"``) when the plan runs;
        with rope also ``"rope_cos"`` and ``"rope_sin"``, as `cupyattn.problem.rope.Rope` has them,
        and of a packed call ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, int32.
    mask, bias : Operand, optional
        The buffers ``"mask"`` and ``"bias"``, of shape (batch, heads, len_q, len_kv), where the
        call has them; stride 0 where they are broadcast.
    kept_blocks : Operand, optional
        The buffer ``"kept_blocks"``, as `cupyattn.problem.block_mask.BlockMask.kept_blocks` makes
        it, where the call has a block mask.
    fused : FusedCodes, optional
        The form ``"fused"`` runs, on every architecture, and makes these codes of q and k itself.
    tiles : Tiles, optional
        The variant's own for this head_dim when omitted.
    arch : str, optional
        Architecture that it will run on: on ``"sm_90a"`` the Hopper form runs where there is one
        that takes the call; `Plan.note` says why where it does not. Few query rows and many keys
        take the split form on every architecture, unless there are `tiles`.

    Returns
    -------
    Plan
        Without launches when the output is empty.

    Raises
    ------
    UnsupportedError
        For a dtype or size that the variant does not take.
    """
    variant.check_dtype(call.dtype)
    if call.qk_norm or (call.rope and not variant.turns_on_load):
        raise UnsupportedError(
            f"{variant.name} takes operands that are turned already: run plan_rotation on q and k"
        )
    given = tiles
    changed, note = call.scores_changed or call.packed is not None, ""
    form = "fused" if fused else variant.form_for(call.len_q, call.len_kv, tiles, changed=changed)
    if form == "split" and arch == "sm_90a" and tiles is None:
        stacked = stacking.stacked(call, q, o)
        if stacked is not None and not hopper.obstacle(variant, stacked[0], stacked[1], k, v, o):
            form, note = "sm90", stacking.describe(call)
            call, q, o = stacked
    if form == "portable" and arch == "sm_90a" and "sm90" in variant.forms:
        note = hopper.obstacle(variant, call, q, k, v, o)
        form = "portable" if note else "sm90"
    tiles = variant.tiles_for(
        call.head_dim, tiles, form=form, lengths=call.mean_lengths, causal=call.causal,
        block_mask=call.block_mask,
        rows=splits.wanted_rows(call.batch, call.heads, call.heads_kv, call.len_q),
    )  # fmt: skip
    if fused is not None:
        fused.check(tiles)
    features = features_of(call, widest(q, k, v, o), **(fused.features if fused else {}))
    spec = module_spec(variant, features, tiles, form)
    params = attn_params(call, q, k, v, o, mask, bias, kept_blocks)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=note)
    if given is not None or variant.source is not None:
        check_tiles(spec, tiles, _named(variant, form, note))
    if form == "split":
        return _plan_split(variant, call, tiles, features, spec, params)
    if variant.family == "unfused":
        return _plan_unfused(variant, call, form, tiles, features, spec, params)
    grid = check_grid(variant.name, -(-call.len_q // tiles.block_q), call.batch * call.heads)
    structs: tuple[Any, ...] = ((ATTN_PARAMS, params),)
    workspace: tuple[Workspace, ...] = ()
    merge: tuple[Launch, ...] = ()
    if form == "sm90":
        boxes = (
            ("q", call.dtype, q, tiles.block_q), ("k", call.dtype, k, tiles.block_kv),
            ("v", call.dtype, v, tiles.block_kv), ("o", call.dtype, o, HOPPER_STORE_ROWS),
        )  # fmt: skip
        grid, added, workspace, cut = _persistent(call, grid, boxes, tiles)
        merge = _merge_pieces(spec, tiles, cut, (*structs, (QUANT_PARAMS, {})))
        structs += added
    launch = Launch(spec, entry_of(variant, form), grid, tiles.num_threads, True, structs)
    return Plan(variant.name, form, tiles, features, (launch, *merge), workspace, note)


def _plan_split(
    variant: Variant,
    call: AttentionSpec,
    tiles: Tiles,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
) -> Plan:
    """Plan the slices of the keys and what brings them together."""
    sizes = call.batch, call.heads, call.heads_kv, call.len_q, call.len_kv, call.head_dim
    cut = splits.split(sizes, call.limits, tiles)
    rows = splits.shared_rows(*sizes[1:4])
    reads, own = -(-rows // tiles.block_q), splits.MERGE_TILES
    grid = check_grid(variant.name, reads, cut.parts, call.batch * call.heads_kv)
    structs = ((ATTN_PARAMS, params), (SPLIT_PARAMS, cut.params(rows)))
    launches = [Launch(spec, entry_of(variant, "split"), grid, tiles.num_threads, True, structs)]
    if cut.parts > 1:
        merged = check_grid("merge_splits", cut.merge_blocks(math.prod(call.lse_shape)))
        merge = replace(module_spec(variant, features, own), source="merge/merge_splits.cu")
        launches.append(Launch(merge, "merge_splits", merged, own.num_threads, True, structs))
    workspace = tuple(Workspace(*one) for one in cut.buffers(call.lse_shape, call.head_dim))
    return Plan(
        variant.name, "split", tiles, features, tuple(launches), workspace,
        cut.describe(rows, reads),
    )  # fmt: skip


def _unfused_launch(
    step: str,
    variant: Variant,
    call: AttentionSpec,
    spec: ModuleSpec,
    tiles: Tiles,
    params: Mapping[str, Any],
) -> tuple[Launch, ...]:
    """Return the launch of one step of the unfused rung; none where it has nothing to write."""
    q_blocks, kv_blocks = -(-call.len_q // tiles.block_q), -(-call.len_kv // tiles.block_kv)
    batch_heads = call.batch * call.heads
    grids = {
        "scores": (kv_blocks, q_blocks, batch_heads),
        "softmax": (-(-call.len_q // tiles.num_warps), batch_heads),
        "weighted_sum": (q_blocks, batch_heads),
    }
    grid = check_grid(variant.name, *grids[step])
    if grid == 0:
        return ()
    entry = f"{variant.entry_point}_{step}"
    return (
        Launch(spec, entry, grid, tiles.num_threads, step != "softmax", ((ATTN_PARAMS, params),)),
    )


def _plan_unfused(
    variant: Variant,
    call: AttentionSpec,
    form: str,
    tiles: Tiles,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
) -> Plan:
    params = {**params, "S": "S"}
    launches = (
        launch
        for step in UNFUSED_STEPS
        for launch in _unfused_launch(step, variant, call, spec, tiles, params)
    )
    scores = Workspace("S", (call.batch, call.heads, call.len_q, call.len_kv), "float32")
    return Plan(variant.name, form, tiles, features, tuple(launches), (scores,))


def plan_unfused_step(
    step: str,
    variant: Variant,
    call: AttentionSpec,
    operands: Mapping[str, Operand],
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """Plan one kernel of the unfused rung by itself.

    Parameters
    ----------
    step : {"scores", "softmax", "weighted_sum"}
        S = scale Q K^T; P = softmax(S), in place; O = P V.
    variant : Variant
        Of family ``"unfused"``.
    call : AttentionSpec
    operands : mapping of str to Operand
        Those of ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"mask"``, ``"bias"``, ``"kept_blocks"`` that
        the step uses. It also uses a buffer ``"S"``, float32 ``(batch, heads, len_q, len_kv)`` in C
        order, and ``"lse"`` where the call asks for it.
    tiles : Tiles, optional
        The variant's own when omitted.

    Returns
    -------
    Plan
        Without workspace: S is the caller's.
    """
    tiles = variant.tiles_for(call.head_dim, tiles, block_mask=call.block_mask)
    rows = [x for name, x in operands.items() if name in "qkvo"]
    vec = widest(*rows) if rows else 1
    features = features_of(call, vec)
    spec = module_spec(variant, features, tiles)
    check_tiles(spec, tiles, f"{variant.name} (portable)")
    absent = Operand((1, 1, 1, 1), (0, 0, 0, 0), 1, 0)
    q, k, v, o = (operands.get(name, absent) for name in "qkvo")
    of_scores = (operands.get(name) for name in ("mask", "bias", "kept_blocks"))
    params = attn_params(call, q, k, v, o, *of_scores)
    params["S"] = "S"
    params.update({name.upper(): None for name in "qkvo" if name not in operands})
    launches = _unfused_launch(step, variant, call, spec, tiles, params)
    return Plan(variant.name, "portable", tiles, features, launches)
