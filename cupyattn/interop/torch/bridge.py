"""Tensors as arrays of the same memory, and calls on torch's device, stream and allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cupyattn.arrays.kinds import STORAGE


def as_array(tensor: Tensor) -> Any:
    """Return a tensor's memory as a NumPy or CuPy array, the latter by DLPack, without a copy.

    Parameters
    ----------
    tensor : Tensor
        On a CPU or a CUDA device; of the latter within `on_device_of`, so that no stream waits for
        another.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        bfloat16 as `ml_dtypes` has it.
    """
    tensor = tensor.detach().resolve_conj()  # complex numbers are refused, by their type
    if tensor.is_cuda:
        import cupy

        return cupy.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        return tensor.view(torch.int16).numpy().view(STORAGE["bfloat16"])
    return tensor.numpy()


def forms_of(
    tensors: Mapping[str, Tensor],
) -> tuple[tuple[tuple[Any, ...], ...] | None, dict[str, int]]:
    """Return what a call depends on of its tensors beside their values, and where they lie.

    Not by `cupyattn.arrays.form.forms_of`: to make an array of each tensor first takes longer than
    all that a known call does. The forms are None where one is no tensor.
    """
    forms: list[tuple[Any, ...]] = []
    addresses: dict[str, int] = {}
    try:
        for name, x in tensors.items():
            addresses[name] = address = x.data_ptr()
            forms.append((name, x.shape, x.stride(), x.dtype, address % 16, x.get_device()))
    except AttributeError:
        return None, addresses
    return tuple(forms), addresses


def as_tensor(array: Any) -> Tensor:
    """Return a NumPy or CuPy array's memory as a tensor, without a copy."""
    if isinstance(array, np.ndarray) and array.dtype == STORAGE["bfloat16"]:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_own_tensor(array: Any) -> Tensor:
    """Return a result as a tensor that torch may free by itself, a copy on a device.

    The CUDA graphs of ``torch.compile`` take back the memory of what an operator returns, and
    refuse what another library would have to be told of.
    """
    tensor = as_tensor(array)
    return tensor.clone() if tensor.is_cuda else tensor


def stream_handle(device: int) -> int:
    """Return the handle of torch's current stream on a device, as code of its compiler gets it.

    `torch.cuda.current_stream` makes an object of it, which takes the host 6 us.
    """
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Let CuPy use the tensor's device, torch's current stream there, and torch's allocator.

    What is allocated within comes from the pool that a CUDA graph under capture has, and is reused
    in the order of torch's stream.
    """
    if not tensor.is_cuda:
        yield
        return
    import cupy

    index = tensor.device.index
    handle = stream_handle(index)
    with (
        cupy.cuda.Device(index),
        cupy.cuda.ExternalStream(handle, index),
        cupy.cuda.using_allocator(_allocate),
    ):
        yield


def _allocate(nbytes: int) -> Any:
    """Return memory of the current device from torch's allocator, as CuPy has it."""
    import cupy

    index = cupy.cuda.runtime.getDevice()
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    owned = cupy.cuda.UnownedMemory(memory.data_ptr(), nbytes, memory, index)
    return cupy.cuda.MemoryPointer(owned, 0)
