"""Bound of the error of the importance of keys (docs/MATH_REFERENCE.md [L52])."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays.kinds import Array, as_float64
from cupyattn.bounds.perturbation import gamma
from cupyattn.bounds.scores import products
from cupyattn.diffusion.key_passes import importance_tiles, sampled_rows
from cupyattn.kernels.numerics import HALF_SUBNORMAL, UNIT_ROUNDOFF

_U = UNIT_ROUNDOFF["float32"]
#: Relative error of the base-2 exponential.
_EX2 = 2.0**-22
#: Parts of a row's keys that are merged: warps of a block, then splits.
_MERGED = 4 + 32


def importance_bound(
    q: Array, k: Array, *, scale: float, rows: int, rounded_to: str = ""
) -> tuple[Array, Array]:
    """Return the exact importance of keys, and how far `key_importance` may lie from it [L52].

    Parameters
    ----------
    q : numpy.ndarray, (batch, heads, len_q, head_dim), float16 or bfloat16
    k : numpy.ndarray, (batch, heads_kv, len_kv, head_dim)
    scale : float
    rows : int
        As for `cupyattn.diffusion.key_importance`.
    rounded_to : {"", "float16", "bfloat16"}
        Type that the scaled rows are rounded to, as where NumPy or CuPy multiplies; "": none, as in
        the kernels.

    Returns
    -------
    importance, bound : numpy.ndarray, float64, (batch, heads_kv, len_kv)
        Nothing is promised where a product overflows.
    """
    batch, heads, len_q, head_dim = q.shape
    heads_kv, len_kv = k.shape[1:3]
    sampled = sampled_rows(len_q, rows)
    x = as_float64(q[:, :, sampled.start :: sampled.step]).reshape(batch, heads_kv, -1, head_dim)
    y = as_float64(k).swapaxes(2, 3)
    s, size = scale * (x @ y), abs(scale) * (np.abs(x) @ np.abs(y))
    top = s.max(axis=3, keepdims=True)
    p = np.exp(s - top)
    p /= p.sum(axis=3, keepdims=True)
    # Of a score, in natural units: R2, the factor and its product, the difference from the maximum,
    # whose own error the third rounding covers.
    error = products("tensor_core", head_dim) * size + 2 * head_dim * 2.0**-149
    error = error + gamma(3, _U) * (np.abs(s) + error) + _U * (top - s)
    if rounded_to:
        of_x = abs(scale) * UNIT_ROUNDOFF[rounded_to] * np.abs(x) + HALF_SUBNORMAL[rounded_to]
        error = error + of_x @ np.abs(y)
    seen = x.shape[2]
    steps = -(-len_kv // importance_tiles(head_dim).block_kv)
    factors = 2 + steps + _MERGED
    roundings = len_kv + seen + 2 * factors + 8
    moved = error + error.max(axis=3, keepdims=True) + gamma(factors, _EX2) + gamma(roundings, _U)
    bound = (p * np.expm1(moved)).mean(axis=2) + 2.0**-125
    return p.mean(axis=2), bound
