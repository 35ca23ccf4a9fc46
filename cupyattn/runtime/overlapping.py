"""Launches that may begin while the launch before them ends.

The driver calls it programmatic stream serialisation (``cuLaunchKernelEx``); CuPy's launcher does
not support its attribute. A kernel launched so waits by itself for its operands
(``kernels_cu/prims/instructions/griddepcontrol.cuh``).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

#: Compute capability from which on a device takes the attribute, times ten.
_LEAST_CAPABILITY = 90
#: ``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`` of cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: its value has 64 bytes, of which this one takes an int."""

    _fields_ = (
        ("id", ctypes.c_uint), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


_ATTRIBUTES = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=1))


def is_supported() -> bool:
    """Whether the current device lets launches overlap."""
    import cupy

    return int(cupy.cuda.Device().compute_capability) >= _LEAST_CAPABILITY


@functools.cache
def _launch() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.POINTER(_Config), *[ctypes.c_void_p] * 3)
    return function


def launch(
    function: int, grid: int, block: int, shared_bytes: int, stream: int, parameters: int
) -> int:
    """Launch a kernel that may begin before the previous work on the stream has ended.

    Parameters
    ----------
    function : int
        Handle of the kernel.
    grid, block : int
        Thread blocks, and threads in each.
    shared_bytes : int
        Dynamic shared memory of a block.
    stream : int
        Handle, of the current device.
    parameters : int
        Address of the pointers to the parameters.

    Returns
    -------
    int
        The driver's status; 0: it was launched.
    """
    config = _Config(grid, 1, 1, block, 1, 1, shared_bytes, stream, _ATTRIBUTES, 1)
    status: int = _launch()(config, function, parameters, None)
    return status
