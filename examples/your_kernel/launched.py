"""A function that runs attention.cu without a GPU, for `cupyattn judge`: docs/YOUR_KERNEL.md."""

import os
from pathlib import Path

import numpy as np

from cupyattn import interpret

#: The kernel, or a mutant of it under `cupyattn mutate`.
SOURCE = Path(os.environ.get("CUPYATTN_MUTANT", Path(__file__).with_name("attention.cu")))
THREADS = 64


def attention(q, k, v, *, scale=None):
    """Return O for float16 arrays of shape (batch, heads, length, 64)."""
    batch, heads, length, head_dim = q.shape
    o = np.full_like(q, np.nan)
    args = {"q": q, "k": k, "v": v, "o": o, "length": np.int32(length)}
    args["scale"] = np.float32(scale or head_dim**-0.5)
    grid = (-(-length // THREADS), batch * heads)
    interpret.launch(SOURCE, "attention", grid, THREADS, args)
    return o
