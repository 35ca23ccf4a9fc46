"""Functions that `experiments.accuracy.fuzz` calls. Their places in the table are part of seeds."""

from __future__ import annotations

from collections.abc import Callable

from experiments._harness import fuzz_calls as calls
from experiments._harness import fuzz_judge
from experiments._harness.fuzz_cases import Case

FUNCTIONS: dict[str, Callable[[Case], None]] = {
    "attention": calls.attention, "attention_varlen": calls.varlen,
    "attention_backward": calls.backward, "attention_varlen_backward": calls.varlen_backward,
    "plan": calls.plan, "quantize": calls.quantize, "act_quant": calls.act_quant,
    "weight_quant": calls.weight_quant, "weight_dequant": calls.weight_dequant,
    "int8_gemm": calls.int8_gemm, "Int8Linear": calls.int8_linear,
    "key_importance": calls.importance, "unfused": calls.steps,
    "BlockMask.from_dense": calls.block_mask, "judge": fuzz_judge.judge,
    "judge of packed sequences": fuzz_judge.judge_varlen,
}  # fmt: skip
