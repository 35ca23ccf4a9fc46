"""Tensor maps, which describe the place of an array to the Hopper copy engine.

`cuTensorMapEncodeTiled` is a function of the driver, reached by ctypes; its result is 128 bytes
that a kernel takes by value.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from cupyattn.errors import KernelLaunchError

#: A kernel parameter of type ``TensorMap`` (kernels_cu/prims/instructions/tma.cuh).
TENSOR_MAP = np.dtype("V128")
NBYTES = TENSOR_MAP.itemsize

_DATA_TYPE = {"int8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
_ALIGNMENT = 128


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a type that the copy engine moves."""
    return {"int8": 1, "float32": 4}.get(dtype, 2)


@functools.cache
def _driver_function() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@functools.lru_cache(maxsize=4096)
def encode(
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> np.ndarray:
    """Describe an array of device memory to the copy engine.

    Parameters
    ----------
    address : int
        Address of its first element, a multiple of 16.
    dtype : {"float16", "bfloat16", "float32", "int8"}
    shape : tuple of int
        Extents, slowest axis first.
    strides : tuple of int
        Bytes, of every axis but the last, which is contiguous; multiples of 16.
    box : tuple of int
        Extents of one copy; the last axis spans 128 bytes.

    Returns
    -------
    numpy.ndarray
        Shape (1,) of dtype `TENSOR_MAP`, in memory aligned as the driver demands. The same array
        for the same arguments: do not write to it.

    Raises
    ------
    KernelLaunchError
        If the driver rejects it; the message gives the numbers.
    """
    rank = len(shape)
    raw = np.zeros(2 * _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    packed = raw[offset : offset + _ALIGNMENT]
    status = _driver_function()(
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_int(_DATA_TYPE[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * (rank - 1))(*strides[::-1]),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_L2_PROMOTION_256B),
        ctypes.c_int(0),  # elements outside the array arrive as zeros
    )
    if status != 0:
        raise KernelLaunchError(
            f"cuTensorMapEncodeTiled refused address {address:#x}, shape {shape}, "
            f"strides {strides}, box {box} of {dtype} (CUresult {status})"
        )
    return packed.view(TENSOR_MAP)
