"""Gradients by blocks in pairs: ``python -m tests.gpu.pairs sm90_atomic float16 causal``.

It prints a line for each size.

It is a program, because blocks that wait for each other might do so for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn import attention_backward
from cupyattn.gradients import judge_backward
from tests.gpu.support import cupy, on_device
from tests.gpu.test_backward import forward, options_of
from tests.support.runs import bits, normal

#: head_dim, numbers of rows and keys: one pair and many, both blocks or one, tails of both.
SIZES = (
    (256, 128, 128), (256, 256, 256), (256, 384, 269), (256, 70, 320), (256, 1000, 1000),
    (256, 4096, 4096), (192, 1000, 1450), (136, 777, 600),
)  # fmt: skip
#: Calls with the same operands, and the gradients whose bits they share.
CALLS = {"sm90_atomic": 5, "sm90_deterministic": 10}
SAME = {"sm90_atomic": ("dk", "dv"), "sm90_deterministic": ("dq", "dk", "dv")}


def poison(results: Sequence[Any]) -> None:
    """Fill the memory that the next results will have with NaN."""
    kept = [cupy.full(x.size, np.nan, np.float16) for x in results]
    del kept


def check(form: str, head_dim: int, rows: int, keys: int, dtype: str, *, causal: bool) -> None:
    """Hold gradients to their bound, those of later calls too if their bits differ."""
    batch, heads = (1, 2) if rows > 1000 else (2, 4)
    shapes = (batch, heads, rows, head_dim), (batch, heads // 2, keys, head_dim)
    inputs = forward(*on_device(*normal(*shapes, dtype)), causal=causal)
    how = {**options_of(form), "causal": causal}
    first = attention_backward(*inputs, **how)
    judged = set()
    for _ in range(CALLS[form]):
        poison(first)
        again = attention_backward(*inputs, **how)
        for name in SAME[form]:
            assert bits(getattr(again, name)) == bits(getattr(first, name)), name
        if (of_dq := bits(again.dq)) not in judged:
            judged.add(of_dq)
            report = judge_backward(again, *inputs, causal=causal)
            assert report.passed, f"{rows} rows, {keys} keys of {head_dim}: {report}"


def main() -> None:
    """Check every size."""
    form, dtype, mask = sys.argv[1:]
    for size in SIZES:
        check(form, *size, dtype, causal=mask == "causal")
        print("within", *size, flush=True)


if __name__ == "__main__":
    main()
