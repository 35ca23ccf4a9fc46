"""The forms of arrays: everything about them except their values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cupyattn.arrays.kinds import PLAIN

#: Facts of an array: name, shape, strides in bytes, dtype, address modulo 16, device (-1: the
#: host), writeable or not. They are arguments of `cupyattn.arrays.described.Described`.
ArrayForm = tuple[str, tuple[int, ...], tuple[int, ...], Any, int, int, bool]


def forms_of(arrays: Mapping[str, Any]) -> tuple[tuple[ArrayForm, ...] | None, dict[str, int]]:
    """Return the forms of a call's arrays, and their addresses.

    Parameters
    ----------
    arrays : mapping of str to array

    Returns
    -------
    forms : tuple of ArrayForm
        None unless all are NumPy or CuPy arrays that kernels support.
    addresses : dict of str to int
    """
    cupy = sys.modules.get("cupy")
    on_device = () if cupy is None else cupy.ndarray
    forms: list[ArrayForm] = []
    addresses: dict[str, int] = {}
    for name, array in arrays.items():
        if isinstance(array, on_device):
            data = array.data  # a new object at each access
            address, device, writeable = data.ptr, data.device_id, True
        elif type(array) in PLAIN and array.dtype.isnative:
            address, device, writeable = array.ctypes.data, -1, array.flags.writeable
        else:
            return None, addresses
        addresses[name] = address
        forms.append(
            (name, array.shape, array.strides, array.dtype, address % 16, device, writeable)
        )
    return tuple(forms), addresses


def form_of(name: str, array: Any) -> ArrayForm:
    """Return the form of a NumPy or CuPy array."""
    return checked_forms({name: array})[0]


def checked_forms(arrays: Mapping[str, Any]) -> tuple[ArrayForm, ...]:
    """Return the forms of NumPy or CuPy arrays; raise TypeError for any other array."""
    forms, known = forms_of(arrays)
    if forms is None:
        name, array = next((n, x) for n, x in arrays.items() if n not in known)
        raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
    return forms


def said(form: ArrayForm) -> str:
    """Describe a form in words, for messages."""
    _, shape, strides, dtype, misalignment, device, _ = form
    words = f"shape {shape}, strides {strides} bytes, dtype {dtype}, address 16 n + {misalignment}"
    return f"{words} on device {device}" if device >= 0 else words
