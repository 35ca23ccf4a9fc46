"""Small calls in the interpreter, each judged: what notices a fault in the kernels' sources?

A call returns "" if every judgement holds, else what the judge said. The interpreter raises
KernelFault by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments._harness.small_attention import attention_calls
from experiments._harness.small_codes import code_calls
from experiments._harness.small_draws import draw_calls
from experiments._harness.small_gradients import gradient_calls
from experiments._harness.small_layers import layer_calls
from experiments._harness.small_shapes import shape_calls


def small_calls() -> dict[str, Callable[[], str]]:
    """Return all calls by name, one operation after the other."""
    attention = attention_calls() | shape_calls()
    return attention | code_calls() | gradient_calls() | layer_calls() | draw_calls()
