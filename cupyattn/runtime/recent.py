"""The calls that were made last, of every operation, ready to run again: found by their keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cupyattn.compiler import modules as compiler

if TYPE_CHECKING:
    from cupyattn.runtime.ready import Ready

#: Calls that are kept.
MAX_RECENT = 1024
_recent: dict[Any, Ready] = {}


def key_of(facts: tuple[Any, ...], arrays: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
    """Return what a call depends on beside values, and where its arrays lie.

    Checking, planning and laying out parameters depend on settings and on the forms of the arrays
    alone: a call with a key that is known needs none of it again.

    Parameters
    ----------
    facts : tuple
        Name and settings of the operation, and what else it depends on.
    arrays : mapping of str to array
        By the buffers of its plan.

    Returns
    -------
    key : object
        None unless all arrays are CuPy's.
    addresses : dict of str to int
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None, {}
    key: list[Any] = [compiler.generation(), facts]
    addresses = {}
    for name, array in arrays.items():
        if not isinstance(array, cupy.ndarray):
            return None, {}
        data = array.data  # a new object at each access
        addresses[name] = address = data.ptr
        key += (name, array.shape, array.strides, array.dtype, address % 16, data.device_id)
    return tuple(key), addresses


def recall(key: Any) -> Ready | None:
    """Return the call that was remembered under a key; TypeError for settings that are none."""
    return _recent.get(key)


def remember(key: Any, ready: Ready) -> None:
    """Keep a call for `recall`; the oldest make room."""
    while len(_recent) >= MAX_RECENT:
        _recent.pop(next(iter(_recent)), None)
    _recent[key] = ready
