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
from cupyattn.plans.assemble import (
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _named,
    _persistent,
    attn_params,
    check_grid,
    clear_padding,
    entry_of,
    features_of,
    module_spec,
    widest,
)
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.scored import ScorePlan, plan_scores, score_features
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, SPLIT_PARAMS
from cupyattn.problem import stacking
from cupyattn.problem.form import Kernel
from cupyattn.problem.operands import Operands

#: Kernels of the unfused rung, in order; each can be planned alone.
UNFUSED_STEPS = ("scores", "softmax", "weighted_sum")


@functools.lru_cache(maxsize=1024)
def plan_attention(kernel: Kernel, operands: Operands) -> Plan:
    """Plan a 16/32-bit rung, or the INT8 rung on such operands.

    Parameters
    ----------
    kernel : Kernel
        With codes, the form ``"fused"`` runs, which makes these codes of q and k itself.
    operands : Operands
        The buffers called ``"q"``, ``"k"``, ``"v"``, ``"o"`` (and ``"lse"``) when the plan runs,
        ``"mask"``, ``"bias"`` and ``"kept_blocks"`` where the call has them; with rope also
        ``"rope_cos"`` and ``"rope_sin"``, as `cupyattn.problem.rope.Rope` has them, and of a packed
        call ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, of a padded one ``"lengths_q"`` and
        ``"lengths_kv"``, int32.

    Returns
    -------
    Plan
        Without launches when the output is empty.

    Raises
    ------
    UnsupportedError
        For a dtype or size that the variant does not take.
    """
    variant, form, tiles, call = kernel.variant, kernel.form, kernel.tiles, kernel.launched
    variant.check_dtype(call.dtype)
    if call.qk_norm or (call.rope and not variant.turns_on_load):
        raise UnsupportedError(
            f"{variant.name} takes operands that are turned already: run plan_rotation on q and k"
        )
    if kernel.stacks:
        operands = stacking.stacked_operands(kernel.call, operands)
    if kernel.codes is not None:
        kernel.codes.check_fused(tiles)
    q, k, v, o = operands.rows.values()
    added_features = {} if kernel.codes is None else kernel.codes.features
    if kernel.row.on_hopper:
        added_features |= score_features(call, operands)
    features = features_of(call, widest(q, k, v, o), **added_features)
    spec = module_spec(variant, features, tiles, form)
    params = attn_params(call, *operands)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=kernel.note)
    if not kernel.own_tiles or variant.source is not None:
        check_tiles(spec, tiles, _named(variant, form, kernel.note))
    if kernel.row.takes.few_rows:
        return _plan_split(kernel, features, spec, params)
    if variant.family == "unfused":
        return _plan_unfused(kernel, features, spec, params, clear_padding(call, o, params))
    grid = check_grid(variant.name, -(-call.len_q // tiles.block_q), call.batch * call.heads)
    structs: tuple[Any, ...] = ((ATTN_PARAMS, params),)
    workspace: tuple[Workspace, ...] = ()
    merge: tuple[Launch, ...] = ()
    scores = ScorePlan()
    if kernel.row.on_hopper:
        boxes = (
            ("q", call.dtype, q, tiles.block_q), ("k", call.dtype, k, tiles.block_kv),
            ("v", call.dtype, v, tiles.block_kv), ("o", call.dtype, o, HOPPER_STORE_ROWS),
        )  # fmt: skip
        grid, added, workspace, cut = _persistent(call, grid, boxes, tiles, kernel.row, features)
        merge = _merge_pieces(spec, tiles, cut, (*structs, (QUANT_PARAMS, {})))
        scores = plan_scores(
            call, operands, features, tiles, spec, params, 1 / call.scale, added[0]
        )
        structs += added + scores.structs
        workspace += scores.workspace
    launch = Launch(spec, entry_of(variant, form), grid, tiles.num_threads, True, structs)
    launches = (*clear_padding(call, o, params), *scores.passes, launch, *merge)
    return Plan(variant.name, form, tiles, features, launches, workspace, kernel.note)


def _plan_split(
    kernel: Kernel, features: Features, spec: ModuleSpec, params: dict[str, Any]
) -> Plan:
    """Plan the slices of the keys and what brings them together."""
    variant, call, tiles, cut = kernel.variant, kernel.call, kernel.tiles, kernel.cut
    rows = splits.shared_rows(call.heads, call.heads_kv, call.len_q)
    reads, own = -(-rows // tiles.block_q), splits.MERGE_TILES
    grid = check_grid(variant.name, reads, cut.parts, call.batch * call.heads_kv)
    structs = ((ATTN_PARAMS, params), (SPLIT_PARAMS, cut.params(rows)))
    entry = entry_of(variant, kernel.form)
    launches = [Launch(spec, entry, grid, tiles.num_threads, True, structs)]
    if cut.parts > 1:
        merged = check_grid("merge_splits", cut.merge_blocks(math.prod(call.lse_shape)))
        merge = replace(module_spec(variant, features, own), source="merge/merge_splits.cu")
        launches.append(Launch(merge, "merge_splits", merged, own.num_threads, True, structs))
    workspace = tuple(Workspace(*one) for one in cut.buffers(call.lse_shape, call.head_dim))
    return Plan(
        variant.name, kernel.form, tiles, features, tuple(launches), workspace, kernel.note
    )


def _unfused_launch(
    step: str, kernel: Kernel, spec: ModuleSpec, params: Mapping[str, Any]
) -> tuple[Launch, ...]:
    """Return the launch of one step of the unfused rung; none where it has nothing to write."""
    variant, call, tiles = kernel.variant, kernel.call, kernel.tiles
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
    kernel: Kernel,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
    before: tuple[Launch, ...],
) -> Plan:
    variant, call, params = kernel.variant, kernel.call, {**params, "S": "S"}
    steps = (
        launch
        for step in UNFUSED_STEPS
        for launch in _unfused_launch(step, kernel, spec, params)
    )
    launches = (*before, *steps)
    scores = Workspace("S", (call.batch, call.heads, call.len_q, call.len_kv), "float32")
    return Plan(variant.name, kernel.form, kernel.tiles, features, launches, (scores,))


def plan_unfused_step(step: str, kernel: Kernel, operands: Mapping[str, Operand]) -> Plan:
    """Plan one kernel of the unfused rung by itself.

    Parameters
    ----------
    step : {"scores", "softmax", "weighted_sum"}
        S = scale Q K^T; P = softmax(S), in place; O = P V.
    kernel : Kernel
        Of a variant of the family ``"unfused"``.
    operands : mapping of str to Operand
        Those of ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"mask"``, ``"bias"``, ``"kept_blocks"`` that
        the step uses. It also uses a buffer ``"S"``, float32 ``(batch, heads, len_q, len_kv)`` in C
        order, and ``"lse"`` where the call asks for it.

    Returns
    -------
    Plan
        Without workspace: S is the caller's.
    """
    variant, tiles = kernel.variant, kernel.tiles
    rows = [x for name, x in operands.items() if name in "qkvo"]
    features = features_of(kernel.call, widest(*rows) if rows else 1)
    spec = module_spec(variant, features, tiles)
    check_tiles(spec, tiles, f"{variant.name} (portable)")
    absent = Operand((1, 1, 1, 1), (0, 0, 0, 0), 1, 0)
    q, k, v, o = (operands.get(name, absent) for name in "qkvo")
    of_scores = (operands.get(name) for name in ("mask", "bias", "kept_blocks"))
    params = attn_params(kernel.call, q, k, v, o, *of_scores)
    params["S"] = "S"
    params.update({name.upper(): None for name in "qkvo" if name not in operands})
    launches = _unfused_launch(step, kernel, spec, params)
    return Plan(variant.name, "portable", tiles, features, launches)
