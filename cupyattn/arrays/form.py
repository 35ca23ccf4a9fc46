"""The forms of arrays: everything about them except their values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.arrays.memory import data_address

#: Name, shape, strides in bytes, dtype, address modulo 16 and device (-1: the host) of an array.
ArrayForm = tuple[str, tuple[int, ...], tuple[int, ...], Any, int, int]


def forms_of(arrays: Mapping[str, Any]) -> tuple[tuple[ArrayForm, ...] | None, dict[str, int]]:
    """Return what a call depends on of its arrays beside their values, and where they lie.

    Parameters
    ----------
    arrays : mapping of str to array

    Returns
    -------
    forms : tuple of ArrayForm
        None unless all are arrays of NumPy or CuPy.
    addresses : dict of str to int
    """
    cupy = sys.modules.get("cupy")
    on_device = () if cupy is None else cupy.ndarray
    forms: list[ArrayForm] = []
    addresses: dict[str, int] = {}
    for name, array in arrays.items():
        if isinstance(array, on_device):
            data = array.data  # a new object at each access
            address, device = data.ptr, data.device_id
        elif isinstance(array, np.ndarray):
            address, device = array.ctypes.data, -1
        else:
            return None, addresses
        addresses[name] = address
        forms.append((name, array.shape, array.strides, array.dtype, address % 16, device))
    return tuple(forms), addresses


def described(form: ArrayForm) -> str:
    """Return a form in words, for messages."""
    _, shape, strides, dtype, misalignment, device = form
    said = f"shape {shape}, strides {strides} bytes, dtype {dtype}, address 16 n + {misalignment}"
    return f"{said} on device {device}" if device >= 0 else said


def same_place(left: Any, right: Any) -> bool:
    """Whether two arrays start at one address."""
    return data_address(left) == data_address(right)
