"""Gradients by blocks in pairs: ``python -m tests.gpu.pairs float16 causal``; a line a size.

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

#: Numbers of rows and keys: one pair and many, both blocks or one, tails of both.
SIZES = ((128, 128), (256, 256), (384, 269), (70, 320), (1000, 1000), (4096, 4096))


def poison(results: Sequence[Any]) -> None:
    """Fill the memory that the next results will have with NaN."""
    kept = [cupy.full(x.size, np.nan, np.float16) for x in results]
    del kept


def check(rows: int, keys: int, dtype: str, *, causal: bool) -> None:
    """Hold gradients to their bound; five times dK and dV with the same bits."""
    batch, heads = (1, 2) if rows > 1000 else (2, 4)
    shapes = (batch, heads, rows, 256), (batch, heads // 2, keys, 256)
    inputs = forward(*on_device(*normal(*shapes, dtype)), causal=causal)
    how = {**options_of("sm90_atomic"), "causal": causal}
    first = attention_backward(*inputs, **how)
    for _ in range(5):
        poison(first)
        again = attention_backward(*inputs, **how)
        assert bits(again.dk) == bits(first.dk) and bits(again.dv) == bits(first.dv)
        report = judge_backward(again, *inputs, causal=causal)
        assert report.passed, f"{rows} rows, {keys} keys: {report}"


def main() -> None:
    """Check every size."""
    dtype, mask = sys.argv[1:]
    for rows, keys in SIZES:
        check(rows, keys, dtype, causal=mask == "causal")
        print("within", rows, keys, flush=True)


if __name__ == "__main__":
    main()
