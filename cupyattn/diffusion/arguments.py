"""Numbers that callers give, checked."""

from __future__ import annotations

import functools
import numbers
import operator
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cupyattn.errors import UnsupportedError, shown
from cupyattn.kernels.limits import as_float

#: Folder of this package's code.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep

P = ParamSpec("P")
R = TypeVar("R")


def needs_head_dim(method: Callable[P, R]) -> Callable[P, R]:
    """Let an ``__init__`` of (num_heads, head_dim, ...) report missing arguments.

    Code of the founding notes leaves head_dim out.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        required = ("num_heads", "head_dim")
        missing = [name for name in required[len(args) - 1 :] if name not in kwargs]
        if missing:
            raise TypeError(
                f"{type(args[0]).__name__} needs {' and '.join(missing)}, which q.shape = (batch, "
                "num_heads, len_q, head_dim) has: give Int8Attention(num_heads=32, head_dim=128) "
                "for heads of 128 numbers"
            )
        return method(*args, **kwargs)

    return called


def check_count(name: str, value: Any) -> int:
    """Return a positive whole number.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    count = check_whole(name, value)
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{name} must be 1 or more, got {value!r}")
    return count


def check_whole(name: str, value: Any) -> int:
    """Return a whole number; TypeError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {shown(value)}") from None


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
        If `value` is not a number, or not an allowed one.
    """
    if not isinstance(value, numbers.Real) or not allowed(as_float(value)):
        raise ValueError(f"{name} must be {said}, got {shown(value)}")
    return float(value)


def check_timestep(name: str, value: Any, count: int) -> int:
    """Return an index into a schedule of so many entries.

    Raises
    ------
    TypeError
        If it is not a number on the host, since reading a device would synchronise.
    ValueError
        For an index outside.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an index into the schedule, got {shown(value)}")
    index = int(value)
    if not 0 <= index < count:
        raise ValueError(f"{name} must be 0 to num_timesteps - 1 = {count - 1}, got {index}")
    return index


def check_percentile(percentile: Any) -> float:
    """Return a percentile, which is in per cent: above 1 and at most 100.

    Raises
    ------
    TypeError
        If it is not a number.
    ValueError
        For a number outside that range. One of at most 1 is a fraction in nearly every case.

    Examples
    --------
    >>> check_percentile(99.9)
    99.9
    """
    if isinstance(percentile, bool) or not isinstance(percentile, numbers.Real):
        raise TypeError(f"percentile must be a number of per cent, got {shown(percentile)}")
    value = as_float(percentile)
    if 0.01 < value <= 1:
        raise ValueError(
            f"percentile is in per cent, above 1 and at most 100, got {percentile!r}: "
            f"give {100 * value:.12g} for that"
        )
    if not 1 < value <= 100:
        raise ValueError(
            f"percentile is in per cent, above 1 and at most 100, got {shown(percentile)}: "
            "99 is the default"
        )
    return value


def check_softmax_eps(softmax_eps: Any) -> None:
    """Raise UnsupportedError unless it is 0."""
    if check_number("softmax_eps", softmax_eps, "0 or more", lambda x: x >= 0):
        raise UnsupportedError(
            f"softmax_eps={softmax_eps!r} is not supported: a sum of exponentials is relative to a "
            "maximum that each kernel keeps in its own way, so that it would mean something else "
            "in each; use 0, rows without keys are zeros anyway"
        )


def check_projection(out_proj: Any, channels: int) -> Any:
    """Return the output projection for a number of channels: a callable, an array or None."""
    if out_proj is None or (callable(out_proj) and not hasattr(out_proj, "shape")):
        return out_proj
    shape = getattr(out_proj, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != channels:
        raise ValueError(
            f"out_proj must be callable or an array of shape (num_heads * head_dim = {channels}, "
            f"channels), got {'no array' if shape is None else f'shape {tuple(shape)}'}"
        )
    return out_proj


def warn_without_effect(sentences: list[str]) -> None:
    """Warn of options without effect, at the line outside this package that gave them."""
    if not sentences:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    for sentence in sentences:
        warnings.warn(sentence, UserWarning, stacklevel=level)
