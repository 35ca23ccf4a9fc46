"""Plans attention of 16- and 32-bit operands: pure data."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import splits
from cupyattn.kernels.features import Features
from cupyattn.kernels.limits import check_grid
from cupyattn.plans.assemble import (
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _persistent,
    attn_params,
    clear_padding,
    entry_of,
)
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.scored import ScorePlan, plan_scores
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, SPLIT_PARAMS
from cupyattn.plans.unfused import plan_unfused
from cupyattn.problem.form import Kernel, kernel_features, launched_operands, module_spec
from cupyattn.problem.operands import Operands


@functools.lru_cache(maxsize=1024)
def plan_attention(kernel: Kernel, operands: Operands) -> Plan:
    """Plan a 16/32-bit rung, or the INT8 rung on such operands.

    Parameters
    ----------
    kernel : Kernel
        A kernel that takes the operands (`cupyattn.problem.form.check_kernel`). With codes, the
        form ``"fused"`` runs, which makes the codes of q and k itself.
    operands : Operands
        The buffers called ``"q"``, ``"k"``, ``"v"``, ``"o"`` (and ``"lse"``) when the plan runs,
        ``"mask"``, ``"bias"`` and ``"kept_blocks"`` if the call has them. With rope also
        ``"rope_cos"`` and ``"rope_sin"`` (`cupyattn.problem.row_preparation.Rope`). A packed call
        also reads ``"cu_seqlens_q"`` and ``"cu_seqlens_k"``, a padded call ``"lengths_q"`` and
        ``"lengths_kv"``, int32.

    Returns
    -------
    Plan
        Without launches when the output is empty.

    Raises
    ------
    UnsupportedError
        For a dtype that the variant does not take, and where a pass has too many blocks.
    """
    variant, form, tiles, call = kernel.variant, kernel.form, kernel.tiles, kernel.launched
    variant.check_dtype(call.dtype)
    if call.qk_norm or (call.rope and not variant.turns_on_load):
        raise UnsupportedError(
            f"{variant.name} takes operands that are turned already: run plan_preparation first"
        )
    features = kernel_features(kernel, operands)
    spec = module_spec(variant, features, tiles, form)
    operands = launched_operands(kernel, operands)
    q, k, v, o = operands[:4]
    params = attn_params(call, *operands)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=kernel.note)
    if kernel.row.takes.few_rows:
        return _plan_split(kernel, features, spec, params)
    if variant.family == "unfused":
        return plan_unfused(kernel, features, spec, params, clear_padding(call, o, params))
    boxes = (
        ("q", call.dtype, q, tiles.block_q), ("k", call.dtype, k, tiles.block_kv),
        ("v", call.dtype, v, tiles.block_kv), ("o", call.dtype, o, HOPPER_STORE_ROWS),
    )  # fmt: skip
    structs: tuple[Any, ...] = ((ATTN_PARAMS, params), (QUANT_PARAMS, {}))
    return plan_fused(kernel, operands, features, spec, structs[:1], structs, boxes, 1 / call.scale)


def plan_fused(
    kernel: Kernel,
    operands: Operands,
    features: Features,
    spec: ModuleSpec,
    structs: tuple[Any, ...],
    merged: tuple[Any, ...],
    boxes: Sequence[tuple[str, str, Operand, int]],
    unit: float,
) -> Plan:
    """Plan the launch of a fused kernel, and the passes before and behind it.

    Parameters
    ----------
    kernel, features, spec
    operands : Operands
        Operands as the kernel is launched for them.
    structs : tuple
        Its parameter structs, the one of attention first.
    merged : tuple
        Parameter structs of the kernel that merges pieces of tiles.
    boxes : sequence of (buffer, dtype, operand, rows)
        Copies of the copy engine in a Hopper form.
    unit : float
        Factor by which a Hopper form multiplies a bias.
    """
    call, tiles, params = kernel.launched, kernel.tiles, structs[0][1]
    grid = math.prod(kernel.blocks["attention"])
    workspace: tuple[Workspace, ...] = ()
    merge: tuple[Launch, ...] = ()
    scores = ScorePlan()
    if kernel.row.on_hopper:
        grid, added, workspace, cut = _persistent(call, grid, boxes, tiles, kernel.row, features)
        merge = _merge_pieces(spec, tiles, cut, merged)
        scores = plan_scores(call, operands, features, tiles, spec, params, unit, added[0])
        structs += added + scores.structs
        workspace += scores.workspace
    entry = entry_of(kernel.variant, kernel.form)
    launch = Launch(spec, entry, grid, tiles.num_threads, True, structs)
    launches = (*clear_padding(call, operands.o, params), *scores.passes, launch, *merge)
    return Plan(
        kernel.variant.name, kernel.form, tiles, features, launches, workspace, kernel.note
    )


def _plan_split(
    kernel: Kernel, features: Features, spec: ModuleSpec, params: dict[str, Any]
) -> Plan:
    """Plan the slices of the keys, and the kernel that merges them."""
    variant, call, tiles, cut = kernel.variant, kernel.call, kernel.tiles, kernel.cut
    rows = splits.shared_rows(call.heads, call.heads_kv, call.len_q)
    own, grid = splits.MERGE_TILES, math.prod(kernel.blocks["attention"])
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
