"""The backend that made an array, for the judge's report.

Only host arrays are noted. The record of an array goes with the array.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from cupyattn.arrays.memory import data_address

#: Names in reports, by backend.
WORDS = {"cuda": "device", "interpret": "interpreter", "mirror": "mirror"}

#: Owners of memory that is still held, by its address. For each, the end and the backend of every
#: part that a backend wrote, by the part's address.
_made: dict[int, tuple[weakref.ref[Any], dict[int, tuple[int, str]]]] = {}


def note(arrays: Iterable[Any], backend: str) -> None:
    """Remember that a backend wrote NumPy arrays."""
    for array in arrays:
        if isinstance(array, np.ndarray) and array.size:
            owner = _owner(array)
            address, first = data_address(owner), data_address(array)
            if address not in _made or _made[address][0]() is not owner:
                _made[address] = weakref.ref(owner, functools.partial(_forget, address)), {}
            parts = _made[address][1]
            parts.pop(first, None)
            parts[first] = first + array.nbytes, backend  # the last of all


def _forget(address: int, reference: weakref.ref[Any]) -> None:
    if address in _made and _made[address][0] is reference:
        del _made[address]


def origin(array: Any) -> str:
    """Return the backend that made an array, one of the values of `WORDS`; "" if unknown.

    Parameters
    ----------
    array : array
        NumPy or CuPy. A view, and memory that another library handed back, count as what was made.

    Examples
    --------
    >>> x = np.zeros((2, 3))
    >>> note([x], "mirror")
    >>> origin(x.T), origin(x + 1)
    ('mirror', '')
    """
    if not isinstance(array, np.ndarray):
        return WORDS["cuda"]
    _, parts = _made.get(data_address(_owner(array)), (None, {}))
    address = data_address(array)
    found = [backend for first, (end, backend) in parts.items() if first <= address < end]
    return WORDS[found[-1]] if found else ""


def _owner(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that holds the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
