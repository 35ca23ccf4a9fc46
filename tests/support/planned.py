"""Plans of attention by hand: settled and planned from descriptions of operands."""

from __future__ import annotations

from typing import Any

from cupyattn.arrays.operand import Operand
from cupyattn.kernels.ladder import Variant, lookup
from cupyattn.plans import attention, attention_int8
from cupyattn.plans.codes import Scales
from cupyattn.plans.records import Plan
from cupyattn.problem.checks import AttentionSpec
from cupyattn.problem.form import check_kernel, settle
from cupyattn.problem.operands import Codes, Operands


def plan_attention(
    variant: Variant, call: AttentionSpec, *lie: Operand, added: Any = None, **options: Any
) -> Plan:
    """Plan a rung on q, k, v and o; `added` describes mask, bias and kept blocks by name.

    The options are as for `settle`.
    """
    operands = Operands(*lie, **(added or {}))
    kernel = settle(variant, call, operands, **options)
    check_kernel(kernel, operands)
    return attention.plan_attention(kernel, operands)


def plan_int8(
    call: AttentionSpec, operands: Operands, codes: Codes, scales: Scales, **options: Any
) -> Plan:
    """The same for quantised operands."""
    kernel = settle(lookup("fa_int8"), call, operands, codes=codes, **options)
    check_kernel(kernel, operands)
    return attention_int8.plan_int8(kernel, operands, scales)
