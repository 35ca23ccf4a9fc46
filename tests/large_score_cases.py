"""Finite float16 inputs of any size, and what `fa_int8` owes them: a finite result, no black image.

Scores past 2^26 are ones whose differences float32 hardly holds; no bound is promised of them
(docs/MATH_REFERENCE.md, §9). But weights stay weights: every row is a mean of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn import attention
from cupyattn.quant import QuantConfig
from tests.runs import bits

HEAD_DIM, LEN_Q, LEN_KV = 64, 20, 140
LARGEST = 65504.0
Move = Callable[[Any], Any]

#: What keeps every row a mean of its values, by name: the architecture, and how to quantise.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "portable": ("sm_90", {}),
    "portable, scales by key": ("sm_90", {"granularity_k": "thread"}),
    "fused": ("sm_90", {"fused": True, "granularity_q": "block", "granularity_k": "block"}),
    "sm90": ("sm_90a", {}),
    "pv8": ("sm_90", {"pv": "int8"}),
    "pv8, s8": ("sm_90", {"pv": "int8", "p_type": "s8"}),
    "pv8_whole": ("sm_90", {"pv": "int8", "granularity_v": "channel"}),
    "sm90_pv8": ("sm_90a", {"pv": "int8", "granularity_v": "channel"}),
}
#: Where such rows may come out as 0, but never as what is not finite: 8-bit floats, whose weights
#: are summed as they are, and compute capability 8.0, where codes do not saturate.
FLUSHING: dict[str, tuple[str, dict[str, Any]]] = {
    "e4m3": ("sm_90", {"pv": "fp8"}),
    "sm90_fp8": ("sm_90a", {"pv": "fp8", "granularity_v": "channel"}),
    "pv8 of 8.0": ("sm_80", {"pv": "int8"}),
}
KINDS = ("normal", "constant", "opposed", "one key", "two levels", "spike", "sparse")


def operands(kind: str, size: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw Q and K of a kind, up to `size`, and V from 1 to 2."""
    rng = np.random.default_rng(seed)
    q, k = np.full((1, 1, LEN_Q, HEAD_DIM), size), np.full((1, 1, LEN_KV, HEAD_DIM), size)
    if kind == "normal":
        q, k = (rng.standard_normal(x.shape) * size / 4 for x in (q, k))
    elif kind == "opposed":
        k = -k * rng.uniform(0.9, 1, (LEN_KV, 1))
    elif kind == "one key":
        k = np.broadcast_to(rng.standard_normal(HEAD_DIM) * size / 4, k.shape)
    elif kind == "two levels":
        k[:, :, : LEN_KV // 4] *= -1
    elif kind == "spike":
        k *= 0
        k[..., rng.integers(LEN_KV), rng.integers(HEAD_DIM)] = size * rng.choice([-1, 1])
    elif kind == "sparse":
        q, k = (x * (rng.random(x.shape) < 0.02) * rng.choice([-1, 1], x.shape) for x in (q, k))
    q, k = (np.clip(x, -LARGEST, LARGEST).astype(np.float16) for x in (q, k))
    return q, k, rng.uniform(1, 2, k.shape).astype(np.float16)


def check(
    form: str, kind: str, size: float, seed: int, backend: str, move: Move, **options: Any
) -> None:
    """Hold results of finite inputs to be finite, and rows to be means of their values."""
    keeps = form in FORMS
    arch, config = (FORMS | FLUSHING)[form]
    smooth_k = options.pop("smooth_k") and not config.get("fused")
    quant = QuantConfig(**config, smooth_k=smooth_k)
    given = operands(kind, size, seed)
    moved = tuple(move(x) for x in given)
    o = attention(*moved, variant="fa_int8", quant=quant, arch=arch, backend=backend, **options)
    lse = None
    if options.get("return_lse"):
        o, lse = o
    o, lse = (x.get() if hasattr(x, "get") else x for x in (o, lse))
    assert np.isfinite(o).all()
    if keeps:
        assert lse is None or np.isfinite(lse).all()
        # Of codes of V an error of half a step in 127, of P of the like.
        assert o.min() >= 1 - 0.02 and o.max() <= 2 + 0.02
    for x, unmoved in zip(moved, given, strict=True):
        assert bits(x.get() if hasattr(x, "get") else x) == bits(unmoved)
