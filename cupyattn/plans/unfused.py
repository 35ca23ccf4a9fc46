"""Plans of the unfused rung: its three kernels in order, or one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cupyattn.arrays.operand import Operand, widest
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.plans.assemble import attn_params
from cupyattn.plans.records import Launch, Plan, Workspace
from cupyattn.plans.structs import ATTN_PARAMS
from cupyattn.problem.form import Kernel, features_of, module_spec

#: Kernels of the unfused rung, in order; each can be planned separately.
UNFUSED_STEPS = ("scores", "softmax", "weighted_sum")


def _unfused_launch(
    step: str, kernel: Kernel, spec: ModuleSpec, params: Mapping[str, Any]
) -> tuple[Launch, ...]:
    """Return the launch of one step of the unfused rung, or none if its result is empty."""
    grid, threads = math.prod(kernel.blocks[step]), kernel.tiles.num_threads
    if grid == 0:
        return ()
    entry = f"{kernel.variant.entry_point}_{step}"
    return (Launch(spec, entry, grid, threads, step != "softmax", ((ATTN_PARAMS, params),)),)


def plan_unfused(
    kernel: Kernel,
    features: Features,
    spec: ModuleSpec,
    params: dict[str, Any],
    before: tuple[Launch, ...],
) -> Plan:
    """Plan the three kernels, with S in scratch memory, after any passes before them."""
    variant, call, params = kernel.variant, kernel.call, {**params, "S": "S"}
    steps = (
        launch
        for step in UNFUSED_STEPS
        for launch in _unfused_launch(step, kernel, spec, params)
    )
    scores = Workspace("S", (call.batch, call.heads, call.len_q, call.len_kv), "float32")
    launches = (*before, *steps)
    return Plan(variant.name, kernel.form, kernel.tiles, features, launches, (scores,))


def plan_unfused_step(step: str, kernel: Kernel, operands: Mapping[str, Operand]) -> Plan:
    """Plan one kernel of the unfused rung.

    Parameters
    ----------
    step : {"scores", "softmax", "weighted_sum"}
        S = scale Q K^T; P = softmax(S), in place; O = P V.
    kernel : Kernel
        Kernel of a variant of the family ``"unfused"``.
    operands : mapping of str to Operand
        The operands of the step, from ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"mask"``, ``"bias"``
        and ``"kept_blocks"``. The step also uses a buffer ``"S"``, float32
        ``(batch, heads, len_q, len_kv)`` in C order, and ``"lse"`` if the call returns it.

    Returns
    -------
    Plan
        Without workspace: S is the caller's.
    """
    variant, tiles = kernel.variant, kernel.tiles
    rows = [x for name, x in operands.items() if name in "qkvo"]
    features = features_of(kernel.call, widest(*rows) if rows else 1)
    spec = module_spec(variant, features, tiles)
    absent = Operand((1, 1, 1, 1), (0, 0, 0, 0), 1, 0)
    q, k, v, o = (operands.get(name, absent) for name in "qkvo")
    of_scores = (operands.get(name) for name in ("mask", "bias", "kept_blocks"))
    params = attn_params(kernel.call, q, k, v, o, *of_scores)
    params["S"] = "S"
    params.update({name.upper(): None for name in "qkvo" if name not in operands})
    launches = _unfused_launch(step, kernel, spec, params)
    return Plan(variant.name, "portable", tiles, features, launches)
