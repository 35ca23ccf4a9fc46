"""Expand scales and zero points that a caller gives with codes to full shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays.kinds import Array
from cupyattn.errors import shown
from cupyattn.kernels.limits import as_float
from cupyattn.quant.config import GROUP_ALL
from cupyattn.quant.quantizers import group_count


def _as_array(xp: Any, name: str, scale: Any, axes: int) -> Any:
    """Return a given scale unchanged; a single float becomes an array of `ndim` axes."""
    if hasattr(scale, "shape"):
        return scale
    with np.errstate(over="ignore"):
        number = np.float32(as_float(scale)) if isinstance(scale, (int, float)) else np.float32(0)
    if not 0 < number < np.inf:
        raise ValueError(f"{name}_scale must be an array or a positive float, got {shown(scale)}")
    return xp.full((1,) * axes, number, np.float32)


def given_scale(
    xp: Any, name: str, scale: Any, group: int | None, thread: int
) -> tuple[Array, int, str]:
    """Return a given scale as an array, its rows per scale, and the granularity's name."""
    scale = _as_array(xp, name, scale, 3)
    if scale.ndim != 3:
        raise ValueError(
            f"{name}_scale must have shape (batch or 1, heads or 1, groups), "
            f"got {tuple(scale.shape)}"
        )
    if group is None:
        if scale.shape[2] != 1:
            raise ValueError(
                f"group_{'q' if name == 'q' else 'kv'}, the rows per {name}_scale, is needed for "
                f"{scale.shape[2]} groups"
            )
        group = GROUP_ALL
    if group == GROUP_ALL:
        return scale, group, "tensor" if scale.shape[:2] == (1, 1) else "head"
    return scale, group, {1: "token", thread: "thread"}.get(group, "block")


def given_zero(xp: Any, name: str, scale: Array, zero: Any) -> tuple[Array, Array]:
    """Return scales and zero points in one shape; zero points that are not given are 0."""
    zero = zero if hasattr(zero, "dtype") else xp.asarray(zero or 0)
    if zero.dtype.kind not in "iu":
        raise ValueError(f"{name}_zero must be integers, got {zero.dtype.name}")
    try:
        shape = np.broadcast_shapes(scale.shape, zero.shape)
    except ValueError:
        shape = ()
    if len(shape) != scale.ndim:
        raise ValueError(
            f"{name}_zero must broadcast with the shape of {name}_scale, {tuple(scale.shape)}, "
            f"got {tuple(zero.shape)}"
        )
    whole = (xp.ascontiguousarray(xp.broadcast_to(x, shape)) for x in (scale, zero))
    scale, zero = whole
    return scale, zero.astype(np.int32)


def given_value_scale(
    xp: Any, shape: tuple[int, ...], scale: Any, group: int | None
) -> tuple[Array, int]:
    """Return the given scales of V in full, and the keys per scale."""
    if scale is None:
        raise ValueError("v_scale is needed where v is 8-bit codes")
    scale = _as_array(xp, "v", scale, 4)
    batch, heads, length, head_dim = shape
    if group is None:
        group = GROUP_ALL
    full = batch, heads, group_count(length, group), head_dim
    fits = scale.ndim == 4 and all(
        have == want or (have == 1 and axis != 2)
        for axis, (have, want) in enumerate(zip(scale.shape, full, strict=True))
    )
    if not fits:
        raise ValueError(
            f"v_scale must have shape ({batch} or 1, {heads} or 1, {full[2]}, {head_dim} or 1) for "
            f"{length} keys in groups of {group}, got {tuple(scale.shape)}"
        )
    return xp.ascontiguousarray(xp.broadcast_to(scale, full)), group
