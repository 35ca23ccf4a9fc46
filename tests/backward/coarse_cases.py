"""Rows whose float32 log-sum-exp is too coarse to give P, and their gradients by the definition.

Scores are exact in float32 except for the rounding of the bias, so the gradients are unambiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.backward.backward_cases import Received, received

LOWEST = float(np.finfo(np.float32).min)
#: Bias of every key of a row.
VALUES = (-1e4, -1e5, -1e6, -1e7, -1e9, LOWEST)
#: Relative Euclidean error: float16 operands P and dS cost about 3e-4.
TOLERANCE = 2e-3


def biased(value: float, kind: str = "even") -> tuple[Received, dict[str, Any]]:
    """Return operands whose rows all have a bias near `value`.

    kind: "even": the same for all keys; "steps": -1 and -2 for some; "masked": -inf for some, and
    for all keys of row 3; "padded": `value` for batch entry 1 and 0 for entry 0.
    """
    rng = np.random.default_rng(3)
    batch, len_q, len_kv = 2, 24, 40
    q = rng.integers(-1, 2, (batch, 2, len_q, 16)).astype(np.float16)
    k, v = (rng.integers(-1, 2, (batch, 1, len_kv, 16)).astype(np.float16) for _ in "kv")
    bias = np.full((batch, 1, len_q, len_kv), value, np.float32)
    if kind == "steps":
        bias[..., ::3] -= 1
        bias[..., 1::3] -= 2
    elif kind == "masked":
        bias[..., ::2] = -np.inf
        bias[:, :, 3] = -np.inf
    elif kind == "padded":
        bias[0] = 0
    return received(q, k, v, bias=bias), {"bias": bias}


def large_products(head_dim: int, len_q: int = 70, len_kv: int = 150) -> Received:
    """Return operands of which every other row has products of about 2^24, exact in float32."""
    rng = np.random.default_rng(4)
    size = 512 if head_dim <= 64 else 256
    q = np.full((1, 2, len_q, head_dim), size, np.float16)
    q[:, :, 1::2] = 0
    q[..., 0] = rng.integers(-3, 4, q.shape[:-1])
    k = np.full((1, 1, len_kv, head_dim), size, np.float16)
    k[..., 0] = rng.integers(-3, 4, k.shape[:-1])
    v = rng.standard_normal(k.shape).astype(np.float16)
    return received(q, k, v, scale=1 / 8)


def defined(inputs: Received, bias: Any = None, scale: float | None = None) -> list[np.ndarray]:
    """Return dq, dk and dv in float64, of the scores as float32 holds them."""
    d_out, q, k, v = (np.asarray(x, np.float64) for x in inputs[:4])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    S = np.float32(scale * (q @ k.swapaxes(-1, -2)))
    S = (S if bias is None else S + bias).astype(np.float64)
    top = S.max(axis=-1, keepdims=True)
    P = np.exp(S - np.where(np.isfinite(top), top, 0))
    total = P.sum(axis=-1, keepdims=True)
    P = P / np.where(total == 0, 1, total)
    dP = d_out @ v.swapaxes(-1, -2)
    dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    found = [scale * dS @ k, scale * dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ d_out]
    heads_kv = inputs[2].shape[1]
    shared = (x.reshape(x.shape[0], heads_kv, -1, *x.shape[2:]).sum(axis=2) for x in found[1:])
    return [found[0], *shared]


def check(found: Any, expected: list[np.ndarray], columns: int | None = None) -> None:
    """Raise unless gradients agree; `columns`: of dq only so many, the others cancel."""
    for name, x, exact in zip(("dq", "dk", "dv"), found, expected, strict=True):
        some = slice(columns if name == "dq" else None)
        x, exact = np.asarray(x, np.float64)[..., some], exact[..., some]
        error = np.linalg.norm(x - exact) / np.linalg.norm(exact)
        assert error < TOLERANCE, f"{name} is off by {error:.3g} of itself"
