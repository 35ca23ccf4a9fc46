"""Where arrays lie in memory: address, extent, overlap and device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which new arrays lie, and kernels run, where `array` lies."""
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = array.device
    return device


def contiguous_stand_in(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array with the strides of a contiguous one and the memory of one row.

    Its shape, type and strides are valid, its values are not.
    """
    row = np.zeros(tuple(shape)[-1:], dtype)
    strides = [row.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(row, shape, strides, writeable=False)


def as_input(array: Any) -> Any:
    """Return an operand as a kernel gets it: the interpreter holds it to reading alone."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def check_receiver(out: Any, shape: Sequence[int], dtype: str, read: Mapping[str, Any]) -> None:
    """Raise ValueError unless `out` can receive a result made of the arrays in `read`.

    It has the shape and dtype of the result, aligned elements and a contiguous last axis, may be
    written to, and overlaps neither itself nor what is read.
    """
    if tuple(out.shape) != tuple(shape) or str(out.dtype) != dtype:
        raise ValueError(
            f"out must have shape {tuple(shape)} and dtype {dtype}, "
            f"got shape {tuple(out.shape)} and dtype {out.dtype}"
        )
    check_aligned("out", out)
    if not out.size:
        return  # strides of an array of nothing mean nothing, and it shares no memory
    if out.shape[-1] > 1 and out.strides[-1] != out.dtype.itemsize:
        raise ValueError(
            f"out must have a contiguous last axis, got strides {out.strides}: give an array in C "
            "order, or a view of whole rows"
        )
    if any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out must not be a broadcast view, got strides {out.strides}")
    if not getattr(out.flags, "writeable", True):  # CuPy's arrays have no such flag
        raise ValueError("out must be an array that may be written to, got a read-only one")
    check_apart(
        meetings(out, read), {n: data_address(a) for n, a in read.items()}, data_address(out)
    )


def meetings(out: Any, read: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, for each array that is read, between which distances behind it `out` meets it."""
    low, high = _reach(out)
    found = {}
    for name, array in read.items():
        first, last = _reach(array)
        if first < last and low < high:
            found[name] = first - high, last - low
    return found


def check_apart(
    meeting: Mapping[str, tuple[int, int]], addresses: Mapping[str, int], out: int
) -> None:
    """Raise ValueError where an `out` at an address shares memory with what is read.

    `meeting` is what `meetings` found for arrays of the same forms.
    """
    for name, (first, last) in meeting.items():
        if first < out - addresses[name] < last:
            raise ValueError(f"out must not share memory with {name}")


def _reach(array: Any) -> tuple[int, int]:
    """Return the bytes from an array's first element to its lowest and past its highest."""
    low, high = byte_range(array)
    address = data_address(array)
    return low - address, high - address


def byte_range(array: Any) -> tuple[int, int]:
    """Return the first address of an array and the one past its last byte; equal when empty."""
    address = data_address(array)
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    low = address + sum(r for r in reach if r < 0)
    return low, address + sum(r for r in reach if r > 0) + int(array.dtype.itemsize)


def is_aligned(array: Any) -> bool:
    """Whether every element of a NumPy or CuPy array lies at a multiple of its size."""
    size = int(array.dtype.itemsize)
    if size == 1:
        return True
    odd = any(s % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    return not odd and data_address(array) % size == 0


def check_aligned(name: str, array: Any) -> None:
    """Raise ValueError unless an array that receives a result has aligned elements."""
    if not is_aligned(array):
        size = int(array.dtype.itemsize)
        raise ValueError(
            f"{name} must have its elements at multiples of their {size} bytes, got address "
            f"{size} n + {data_address(array) % size} and strides {tuple(array.strides)}: pass an "
            "array of its own memory, as empty() returns, and copy the result"
        )


def data_address(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    # NOTE: NumPy's .data is a buffer, which bfloat16 does not have.
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def fresh(shape: tuple[int, ...], dtype: Any, zeros: bool = False) -> np.ndarray[Any, Any]:
    """Return a NumPy array of zeros, or with all bits set: NaN where a device has anything.

    Examples
    --------
    >>> fresh((2,), "float16"), fresh((2,), "int8", True)
    (array([nan, nan], dtype=float16), array([0, 0], dtype=int8))
    """
    array = np.zeros(shape, dtype)
    if not zeros:
        array.reshape(-1).view("u1").fill(0xFF)
    return array
