"""Groups of rows that share a scale, and groups of query heads that share a key head."""

from __future__ import annotations

from cupyattn.arrays.kinds import Array


def scale_of_row(scale: Array, group: int, length: int) -> Array:
    """Return the scale of every row.

    Parameters
    ----------
    scale : array, (batch or 1, heads or 1, groups)
        NumPy or CuPy.
    group : int
        Rows per scale.
    length : int
        Rows.

    Returns
    -------
    array, (batch or 1, heads or 1, length)
    """
    return scale.repeat(max(1, min(group, length)), axis=-1)[..., :length]


def value_scale_of_key(scale: Array, group: int, length: int) -> Array:
    """Return V's scales by key, (..., length, head_dim), from its scales by group of keys."""
    return scale_of_row(scale.swapaxes(-1, -2), group, length).swapaxes(-1, -2)


def split_heads(x: Array, heads_kv: int) -> Array:
    """View (batch, heads, ...) as (batch, heads_kv, group, ...): query heads by their key head."""
    group = x.shape[1] // heads_kv if heads_kv else 0
    return x.reshape(x.shape[0], heads_kv, group, *x.shape[2:])


def merge_heads(x: Array) -> Array:
    """Undo `split_heads`."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
