"""Rows of two arrays that are read as their concatenation along the axis before the last.

It is never stored. The second array is `below` the first.
"""

from __future__ import annotations

from dataclasses import replace

from cupyattn.arrays.described import Described


def check_below(name: str, x: Described, below_name: str, below: Described) -> None:
    """Raise ValueError unless rows of a second array go with the rows of x."""
    alike = x.ndim == below.ndim and x.dtype == below.dtype
    fits = alike and (*x.shape[:-2], x.shape[-1]) == (*below.shape[:-2], below.shape[-1])
    if x.ndim not in (2, 3) or not fits:
        wanted = f"{x.dtype} of shape {(*x.shape[:-2], '*', *x.shape[-1:])}"
        raise ValueError(
            f"{below_name} must be further rows of {name}, (rows, channels) or (batch, rows, "
            f"channels), {wanted}, got {below.dtype} of shape {below.shape}: concatenate them "
            "otherwise"
        )


def joined(x: Described, below: Described | None) -> Described:
    """Describe an array with the type and the shape of the concatenation."""
    if below is None:
        return x
    rows = x.shape[-2] + below.shape[-2]
    return replace(x, shape=(*x.shape[:-2], rows, x.shape[-1]))


def in_batches(x: Described) -> Described:
    """Describe the view (batch, rows, channels)."""
    return x.front() if x.ndim == 2 else x
