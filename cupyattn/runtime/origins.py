"""Which backend made an array: what the judge reads to say what ran.

Only host arrays are noted. The record of an array goes with the array.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

#: In reports, by the names of backends.
WORDS = {"cuda": "device", "interpret": "interpreter", "mirror": "mirror"}

_made: dict[int, tuple[weakref.ref[Any], str]] = {}


def note(arrays: Iterable[Any], backend: str) -> None:
    """Remember that a backend wrote NumPy arrays."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            owner = _owner(array)
            _made[id(owner)] = weakref.ref(owner, functools.partial(_forget, id(owner))), backend


def _forget(key: int, _: weakref.ref[Any]) -> None:
    _made.pop(key, None)


def origin(array: Any) -> str:
    """Return what made an array, of the values of `WORDS`; "" where that is not known.

    Parameters
    ----------
    array : array
        A view counts as the array whose memory it shows.

    Examples
    --------
    >>> x = np.zeros((2, 3))
    >>> note([x], "mirror")
    >>> origin(x.T), origin(x + 1)
    ('mirror', '')
    """
    if not isinstance(array, np.ndarray):
        return WORDS["cuda"]
    owner = _owner(array)
    reference, backend = _made.get(id(owner), (None, ""))
    return WORDS[backend] if reference is not None and reference() is owner else ""


def _owner(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that holds the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
