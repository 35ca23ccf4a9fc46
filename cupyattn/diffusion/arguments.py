"""Numbers that callers give, checked."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any


def check_count(name: str, value: Any) -> int:
    """Return a positive whole number.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r:.60}") from None
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{name} must be 1 or more, got {value!r}")
    return count


def check_number(name: str, value: Any, said: str, allowed: Callable[[float], bool]) -> float:
    """Return a number as float.

    Parameters
    ----------
    name : str
    value : number
    said : str
        What is allowed, for the message.
    allowed : callable
        Whether a float is; NaN should not be.

    Raises
    ------
    ValueError
        For what is no number, and for others than those allowed.
    """
    if not isinstance(value, numbers.Real) or not allowed(float(value)):
        raise ValueError(f"{name} must be {said}, got {value!r:.60}")
    return float(value)


def check_timestep(name: str, value: Any, count: int) -> int:
    """Return an index into a schedule of so many entries.

    Raises
    ------
    TypeError
        For what is no number of the host: one on a device would be waited for.
    ValueError
        For an index outside.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an index into the schedule, got {value!r:.60}")
    index = int(value)
    if not 0 <= index < count:
        raise ValueError(f"{name} must be 0 to num_timesteps - 1 = {count - 1}, got {index}")
    return index
