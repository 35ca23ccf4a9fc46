"""Attention in NumPy, as a library may offer it: docs/YOUR_KERNEL.md judges it."""

import numpy as np


def attention(q, k, v, *, scale=None, causal=False):
    """Return O for q, k, v of shape (batch, heads, length, head_dim)."""
    group = q.shape[1] // k.shape[1]
    scale = np.float32(scale or q.shape[-1] ** -0.5)
    keys, values = (np.repeat(np.float32(x), group, axis=1) for x in (k, v))
    scores = np.float32(q) @ keys.swapaxes(-1, -2) * scale
    if causal:
        shift = k.shape[2] - q.shape[2]
        admitted = np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + shift
        scores = np.where(admitted, scores, np.float32(-np.inf))
    top = np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(np.float32).min)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    o = np.float32(weights.astype(q.dtype)) @ values / np.maximum(total, np.float32(1e-30))
    return o.astype(q.dtype)
