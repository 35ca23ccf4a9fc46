"""Token pruning: keys that get little attention are dropped before the kernel runs.

Importance is estimated from a few query rows. The keys that are kept are moved together, as many in
each head, so that the kernel sees shorter keys and values and the dropped ones cost nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.checks import data_address
from cupyattn.diffusion.arguments import check_count, check_number
from cupyattn.diffusion.products import product
from cupyattn.diffusion.ranking import largest_of_rows
from cupyattn.rounding import Array, array_namespace

#: Query rows of each head that importance is estimated from.
SAMPLE_ROWS = 32


def key_importance(
    q: Array, k: Array, *, scale: float | None = None, rows: int = SAMPLE_ROWS
) -> Array:
    """Estimate how much attention each key gets.

    Parameters
    ----------
    q : array, (batch, heads, len_q, head_dim)
        NumPy or CuPy.
    k : array, (batch, heads_kv, len_kv, head_dim)
    scale : float, optional
        Softmax scale; ``head_dim ** -0.5`` when omitted.
    rows : int
        Query rows to look at, at even distances, or fewer; all where there are no more.

    Returns
    -------
    array, float32, (batch, heads_kv, len_kv)
        Mean of the probabilities that those rows, in all query heads of a key head, give to the
        key: they sum to 1 over the keys.

    Notes
    -----
    The cost is ``rows / len_q`` of Q.K^T, and one pass over the keys.

    Examples
    --------
    >>> round(float(key_importance(np.ones((1, 2, 4, 8)), np.ones((1, 1, 5, 8)))[0, 0, 0]), 6)
    0.2
    """
    xp = array_namespace(q, k)
    batch, heads, len_q, head_dim = q.shape
    heads_kv, len_kv = k.shape[1:3]
    rows = check_count("pruning_rows", rows)
    if 0 in q.shape or 0 in k.shape:
        return xp.full((batch, heads_kv, len_kv), 1 / max(len_kv, 1), np.float32)
    step = -(-len_q // rows)
    sampled = q[:, :, (step - 1) // 2 :: step]
    factor = np.float32(head_dim**-0.5 if scale is None else scale)
    # NOTE: scaled before the product, which a device stores in 16 bits.
    sampled = (sampled.astype(np.float32) * factor).astype(q.dtype)
    sampled = sampled.reshape(batch, heads_kv, -1, head_dim).swapaxes(2, 3)
    weights = product(k, sampled).astype(np.float32)
    weights -= weights.max(axis=2, keepdims=True)
    xp.exp(weights, out=weights)
    rows_seen = weights.shape[3]
    share: Array = weights @ (1 / (rows_seen * weights.sum(axis=2)))[..., None]
    return share[..., 0]


def kept_count(len_kv: int, ratio: float) -> int:
    """Return how many of so many keys are kept when a share of them is dropped: at least one.

    Examples
    --------
    >>> kept_count(4096, 0.2), kept_count(3, 0.9), kept_count(0, 0.5)
    (3277, 1, 0)
    """
    return max(min(len_kv, 1), len_kv - math.floor(ratio * len_kv))


def count_above(importance: Array, threshold: float) -> int:
    """Return how many keys the head with most of them has at or above a threshold.

    Parameters
    ----------
    importance : array, (batch, heads_kv, len_kv)
    threshold : float
        In multiples of what every key would get if all got the same.

    Notes
    -----
    Heads keep equally many keys, so that one launch serves all of them: others keep some more.
    On a device this number is waited for.
    """
    len_kv = int(importance.shape[2])
    if not importance.size:
        return len_kv
    counts = (~(importance < threshold / len_kv)).sum(axis=2)  # a NaN counts as important
    return max(1, int(counts.max()))


def compact(k: Array, v: Array, importance: Array, count: int) -> tuple[Array, Array, Array]:
    """Move the most important keys together.

    Parameters
    ----------
    k, v : array, (batch, heads_kv, len_kv, head_dim)
    importance : array, (batch, heads_kv, len_kv)
    count : int
        Keys to keep in each head. Of equal ones the later.

    Returns
    -------
    k, v : array, (batch, heads_kv, count, head_dim)
        In the order that they had.
    kept : array, bool, (batch, heads_kv, len_kv)
    """
    array_namespace(k, v, importance)
    batch, heads_kv, len_kv = importance.shape
    order = largest_of_rows(importance, count)
    kept = array_namespace(k).zeros(batch * heads_kv * len_kv, bool)
    kept[order] = True

    def gathered(x: Array) -> Array:
        words = _as_words(x)
        rows = words.reshape(batch * heads_kv * len_kv, words.shape[3])
        return rows[order].view(x.dtype).reshape(batch, heads_kv, count, x.shape[3])

    return gathered(k), gathered(v), kept.reshape(importance.shape)


def _as_words(x: Array) -> Array:
    """Return rows as the widest integers that they consist of: fewer elements to move.

    A view where x is contiguous.
    """
    x = array_namespace(x).ascontiguousarray(x)
    places = data_address(x), x.shape[3] * x.dtype.itemsize
    width = next(w for w in (8, 4, 2) if not any(place % w for place in places))
    return x.view(np.dtype(f"u{width}"))


def check_ratio(ratio: Any) -> float:
    """Return the share of keys to drop."""
    return check_number("pruning_ratio", ratio, "0 to less than 1", lambda x: 0 <= x < 1)


def check_threshold(threshold: Any) -> float | None:
    """Return the threshold, None where there is none."""
    if threshold is None:
        return None
    said = "0 or more and finite, or None"
    return check_number("pruning_threshold", threshold, said, lambda x: 0 <= x < math.inf)
