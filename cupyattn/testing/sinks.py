"""Attention sinks as one more key: its score is the sink, its value is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.arrays.kinds import STORAGE, Array, array_namespace
from cupyattn.problem.checks import check_limits
from cupyattn.problem.settings import NO_WINDOW, Settings


def with_sinks(
    settings: Settings, arrays: Mapping[str, Any], sinks: Array, counts: Array | None
) -> tuple[Settings, dict[str, Any]]:
    """Return a call with sinks as a call without.

    The sum of a row's exponentials then has the exponential of its head's sink in it, and so has
    lse.

    Parameters
    ----------
    settings, arrays
        Settings and arrays of the call, in layout BHSD, as `cupyattn.problem.settings.parse` names
        them.
    sinks : (heads,) array
        A number for each query head, compared with scaled scores.
    counts : (batch,) array, optional
        Number of rows of each batch entry that count. Other rows attend to no key.

    Raises
    ------
    ValueError
        For another shape, or an option that depends on the places of keys.
    """
    q, k, v = (arrays[name] for name in "qkv")
    xp, heads = array_namespace(q), q.shape[1]
    if sinks.shape != (heads,) or sinks.dtype not in STORAGE.values():
        raise ValueError(
            f"sinks must be one number for each query head, shape ({heads},), in float16, bfloat16 "
            f"or float32, got {tuple(sinks.shape)} in {sinks.dtype}"
        )
    for name in ("rope", "qk_norm", "block_mask"):
        if arrays.get(name) is not None:
            raise ValueError(f"{name} cannot be judged together with sinks: leave one of them out")
    len_q, len_kv = q.shape[2], k.shape[2]
    places = settings.causal, settings.causal_align, settings.window
    first, last = check_limits(*places, len_q, len_kv)
    row, at = xp.arange(len_q)[:, None], xp.arange(len_kv) - xp.arange(len_q)[:, None]
    mask = xp.ones((1, 1, len_q, len_kv), bool)
    mask &= (at >= first) if first is not None else True
    mask &= (at <= last) if last is not None else True
    if arrays.get("mask") is not None:
        mask = mask & xp.asarray(arrays["mask"])
    counted = xp.ones((1, 1, len_q, 1), bool)
    if counts is not None:
        counted = row < xp.asarray(counts)[:, None, None, None]
    bias = arrays.get("bias")
    bias = xp.zeros((1, 1, 1, 1), np.float32) if bias is None else xp.asarray(bias)
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)).astype(np.float32)
    bias = xp.broadcast_to(bias, (bias.shape[0], heads, bias.shape[2], len_kv))
    sink = sinks.astype(np.float32)[None, :, None, None]
    changed = {
        "mask": _appended(mask, counted, axis=-1),
        "bias": _appended(bias, sink, axis=-1),
        "k": _appended(k, xp.zeros((1, 1, 1, 1), k.dtype), axis=2),
        "v": _appended(v, xp.zeros((1, 1, 1, 1), v.dtype), axis=2),
    }
    return settings._replace(causal=False, window=NO_WINDOW), {**arrays, **changed}


def _appended(x: Array, one: Array, axis: int) -> Array:
    """Append `one` (4-D) at the end of an axis; both are broadcast over the other axes."""
    xp, sides = array_namespace(x), []
    sizes = (x.shape[axis], one.shape[axis])
    shape = [max(a, b) if min(a, b) else 0 for a, b in zip(x.shape, one.shape, strict=True)]
    for side, size in zip((x, one), sizes, strict=True):
        shape[axis] = size
        sides.append(xp.broadcast_to(side, tuple(shape)))
    joined: Array = xp.concatenate(sides, axis=axis)
    return joined
