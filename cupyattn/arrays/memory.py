"""Positions of arrays in memory: address, extent, overlap and device."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that allocates new arrays and runs kernels on the device of `array`."""
    if isinstance(array, np.ndarray):
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = array.device
    return device


def wait_until_computed() -> bool:
    """Wait until the arrays of the current device are computed, so all streams may read them.

    Return False while a CUDA graph captures CuPy's current stream: replays compute the arrays.
    """
    import cupy

    runtime = cupy.cuda.runtime
    if runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr):
        return False
    runtime.deviceSynchronize()
    return True


def as_input(array: Any) -> Any:
    """Return an operand that a kernel may read only; the interpreter enforces this."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def is_aligned(array: Any) -> bool:
    """Whether every element of a NumPy or CuPy array is aligned to its size."""
    size = int(array.dtype.itemsize)
    if size == 1:
        return True
    odd = any(s % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    return not odd and data_address(array) % size == 0


def data_address(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    # NOTE: NumPy's .data is a buffer, which bfloat16 does not have.
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def fresh(shape: tuple[int, ...], dtype: Any, zeros: bool = False) -> np.ndarray[Any, Any]:
    """Return a NumPy array of zeros, or with all bits set: NaN, for memory that is undefined.

    Examples
    --------
    >>> fresh((2,), "float16"), fresh((2,), "int8", True)
    (array([nan, nan], dtype=float16), array([0, 0], dtype=int8))
    """
    array = np.zeros(shape, dtype)
    if not zeros:
        array.reshape(-1).view("u1").fill(0xFF)
    return array
