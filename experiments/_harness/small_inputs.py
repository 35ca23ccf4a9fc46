"""Shapes and arrays of the small calls: tails, strides, grouped heads, scores that rise."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE

#: Lengths of queries and keys: tails, several blocks of queries, several tiles of keys. With a mask
#: and a bias, which are slow, fewer. Packed sequences have others again.
LENGTHS, FEWER, PACKED = (140, 330), (70, 150), ((5, 9), (135, 140), (64, 33))
BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 4, 2, 64


def normal(rng: Any, shape: tuple[int, ...]) -> Any:
    """Return N(0, 1) with rows of all heads side by side, as models have them: (b, h, l, d)."""
    batch, heads, length, head_dim = shape
    return rng.standard_normal((batch, length, heads, head_dim)).swapaxes(1, 2)


def arrays(
    len_q: int, len_kv: int, dtype: str, seed: int, head_dim: int = HEAD_DIM, *,
    heads: tuple[int, int] = (HEADS, HEADS_KV), batch: int = BATCH,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return q, k and v.

    Scores of the first batch entry rise along the keys, so that the maximum of a row rises often
    and far.
    """
    rng = np.random.default_rng(seed)
    q = normal(rng, (batch, heads[0], len_q, head_dim))
    k, v = (normal(rng, (batch, heads[1], len_kv, head_dim)) for _ in range(2))
    k = 1.5 * k + 0.5
    k[0] *= np.linspace(0.1, 4, len_kv)[:, None]
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))  # type: ignore[return-value]


def added(len_q: int, len_kv: int, batch: int = BATCH) -> dict[str, Any]:
    """Return a mask and a bias with keys before rows in memory, and what else changes scores."""
    rng = np.random.default_rng(5)
    shape = batch, HEADS, len_kv, len_q
    bias = 2 * rng.standard_normal(shape)
    bias[..., : len_kv // 3, :] = -1e9
    found = {"mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32)}
    found = {name: x.swapaxes(2, 3) for name, x in found.items()}
    return {"softcap": 1.5, "window": (60, 9), **found}


def aligned_bias(dtype: str, *shape: int, masked: float = 0.0) -> Any:
    """Return a bias that the copy engine can move: rows begin at multiples of 16 bytes.

    It is -inf in a share of places, `masked`.
    """
    rng = np.random.default_rng(17)
    wide = np.zeros((*shape[:-1], shape[-1] + -shape[-1] % 8), STORAGE[dtype])
    found = wide[..., : shape[-1]]
    found[...] = rng.standard_normal(shape)
    found[rng.random(shape) < masked] = -np.inf
    return found


def rope_tables(positions: int, head_dim: int) -> tuple[Any, Any]:
    """Return cosines and sines of the usual angles: (positions, head_dim // 2) each, float32."""
    rates = 10000.0 ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angles = np.arange(positions)[:, None] * rates
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
