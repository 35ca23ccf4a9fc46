"""Attention in a few lines of NumPy that rounds where it is told to, and has faults if asked."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyattn.arrays.kinds import STORAGE

TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": STORAGE["bfloat16"],
         "e4m3": ml_dtypes.float8_e4m3fn}  # fmt: skip


def admitted(len_q: int, len_kv: int, causal: bool, causal_align: str, further: int = 0) -> Any:
    """Return which keys each row may attend to, (len_q, len_kv)."""
    shift = (len_kv - len_q if causal_align == "bottom-right" else 0) + further
    return np.arange(len_kv) <= np.arange(len_q)[:, None] + (shift if causal else len_kv)


def attend(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False,
    causal_align: str = "bottom-right", softcap: float = 0.0, sinks: Any = None, p: str = "fp32",
    scores: str = "fp32", scaled_q: str | None = None, tanh_error: float = 0.0, mask: Any = True,
    further: int = 0, lost: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """Return O in q's type and lse, in float32 but for what the words say.

    A causal row attends to `further` keys more than it may, and all rows miss the last `lost` keys.
    """
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    scale = scale or q.shape[-1] ** -0.5
    q, k, v = np.float32(q), *(np.repeat(np.float32(x), group, axis=1) for x in (k, v))

    def stored(x: Any) -> Any:
        return np.float32(np.float32(x).astype(TYPES[scores]))

    if scaled_q is not None:
        q, scale = np.float32((q * np.float32(scale)).astype(TYPES[scaled_q])), 1.0
    s = stored(stored(q @ k.swapaxes(-1, -2)) * np.float32(scale))
    if softcap:
        capped = np.tanh(stored(s / np.float32(softcap))) * np.float32(1 + tanh_error)
        s = stored(stored(capped) * np.float32(softcap))
    of_row = admitted(q.shape[2], k.shape[2], causal, causal_align, further)
    mask = mask & of_row & (np.arange(k.shape[2]) < k.shape[2] - lost)
    s = np.where(mask, s, np.float32(-np.inf))
    low = np.full((*s.shape[:3], 1), -np.inf, np.float32)
    sink = low if sinks is None else np.broadcast_to(sinks[:, None, None], low.shape)
    m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, np.float32(0), m)
    weights = np.exp(s - m)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - m)
    o = np.float32(weights.astype(TYPES[p])) @ v / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return o.astype(dtype), (m + np.log(total))[..., 0]
