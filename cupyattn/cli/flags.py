"""Check the numbers of flags: refuse values that are too small, and arrays that are too large."""

from __future__ import annotations

import argparse
import math

#: Largest number of elements of an array, so that its bytes are a 64-bit number in any type.
MOST_ELEMENTS = 2**59


def check_whole(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Raise ValueError if the number of a flag is too small.

    Parameters
    ----------
    args : argparse.Namespace
    *names : str
        Names of flags in `args`; absent flags (None) are ignored.
    least : int

    Examples
    --------
    >>> check_whole(argparse.Namespace(len_q=0), "len_q")
    Traceback (most recent call last):
    ValueError: --len-q must be at least 1, got 0
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def check_elements(*shape: int) -> None:
    """Raise ValueError for a shape of more elements than an array can have."""
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(
            f"batch, heads, length and head_dim = {', '.join(map(str, shape))} make an array of "
            f"more than {MOST_ELEMENTS} elements: give smaller sizes"
        )
