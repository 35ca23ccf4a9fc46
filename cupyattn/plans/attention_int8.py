"""Plans attention of INT8 operands: pure data."""

from __future__ import annotations

import functools
import math
from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.plans.assemble import (
    HOPPER_STORE_ROWS,
    LOG2E,
    attn_params,
)
from cupyattn.plans.attention import plan_fused
from cupyattn.plans.codes import Scales, value_box, value_params
from cupyattn.plans.records import Plan
from cupyattn.plans.structs import ATTN_PARAMS, QUANT_PARAMS, VALUE_PARAMS
from cupyattn.problem import support
from cupyattn.problem.form import Kernel, kernel_features, module_spec
from cupyattn.problem.operands import Codes, Operands

#: Limits of Hopper forms that make the codes of Q: rows that may share a scale, and the largest
#: head_dim that fits in shared memory.
QUANTIZED_ROWS, QUANTIZED_HEAD_DIM = 2, 192


@functools.lru_cache(maxsize=1024)
def plan_int8(kernel: Kernel, operands: Operands, scales: Scales) -> Plan:
    """Plan the INT8 rung on quantised operands.

    Parameters
    ----------
    kernel : Kernel
        With codes; as for `cupyattn.plans.attention.plan_attention`.
    operands : Operands
        Codes of Q and K, the buffers ``"q_codes"`` and ``"k_codes"``. v is 16-bit, or the buffer
        ``"v_codes"`` if the codes have `Codes.values`. The other operands are as for
        `cupyattn.plans.attention.plan_attention`.
    scales : Scales
        If its `numbers` have 16 bits and a Hopper form runs with its default tiles, the kernel
        itself makes the codes of Q. ``features.quantize_q`` of the plan is then True, and
        ``"q_codes"`` and ``"q_scale"`` are not read.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError
        For a kernel without codes.
    """
    variant, call, form, tiles = kernel.variant, kernel.call, kernel.form, kernel.tiles
    codes = kernel.codes
    if codes is None:
        raise TypeError("plan_int8 takes a kernel that was settled with codes=...")
    values = codes.values
    q_codes, k_codes, v, o = operands[:4]
    numbers = _numbers(kernel, codes, scales)
    features = kernel_features(kernel, operands, quantize_q=numbers is not None)
    spec = module_spec(variant, features, tiles, form)
    if math.prod(call.output_shape) == 0:
        return Plan(variant.name, form, tiles, features, (), note=kernel.note)
    params = attn_params(call, *operands)
    params |= {"Q": "q_codes", "K": "k_codes"}
    quant = scales.params
    of_q = "q_codes", "int8", q_codes, tiles.block_q
    if numbers is not None:
        params["Q"] = quant["Q_scale"] = None
        of_q = "q", call.dtype, numbers, tiles.block_q
    merged: tuple[Any, ...] = ((ATTN_PARAMS, params), (QUANT_PARAMS, quant))
    structs = merged
    if values is not None:
        params["V"] = "v_codes"
        structs += ((VALUE_PARAMS, value_params(values)),)
    value = "bfloat16" if call.dtype == "bfloat16" else "float16"
    of_v = value_box(v, call.head_dim) if values else ("v", value, v, tiles.block_kv)
    boxes = (
        of_q, ("k_codes", "int8", k_codes, tiles.block_kv), of_v,
        ("o", call.dtype, o, HOPPER_STORE_ROWS),
    )  # fmt: skip
    # Scores are in log2 units when a bias meets them.
    return plan_fused(kernel, operands, features, spec, structs, merged, boxes, LOG2E)


def _numbers(kernel: Kernel, codes: Codes, scales: Scales) -> Operand | None:
    """Return the numbers of Q that the kernel quantises itself; None if it reads codes."""
    call, numbers = kernel.call, scales.numbers
    # NOTE: the log-sum-exp takes a product of codes of Q with the mean of the keys, and zero points
    # take the sums of codes.
    inside = kernel.row.on_hopper and kernel.own_tiles
    inside = inside and codes.group_q <= QUANTIZED_ROWS and call.head_dim <= QUANTIZED_HEAD_DIM
    inside = inside and not call.return_lse and not codes.zero_points
    if numbers is None or not inside or numbers.itemsize != 2:
        return None
    return numbers if support.reach({"q": numbers}).supported else None
