"""Share tensors' memory as arrays, and run calls on torch's device, stream and allocator.

`Tensors` is torch's adapter of `cupyattn.ops.operation.run`. A known call makes no arrays of its
tensors, because that would take longer than the rest of the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cupyattn.arrays.described import Described
from cupyattn.arrays.form import forms_of
from cupyattn.arrays.kinds import STORAGE
from cupyattn.runtime.ready import Conversion, Ready

#: Types of tensors by types of arrays: numbers, and codes.
_TYPES = {dtype: getattr(torch, name) for name, dtype in STORAGE.items()}
_TYPES |= {np.dtype(np.int8): torch.int8, np.dtype(np.uint8): torch.uint8}


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
        bfloat16 has the type of `ml_dtypes`.

    Raises
    ------
    RuntimeError
        For a tensor on the meta device.
    """
    if tensor.is_meta:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} is on the meta device, where it holds no "
            "numbers: load it first"
        )
    tensor = tensor.detach().resolve_conj()  # complex numbers are refused, by their type
    if tensor.is_cuda:
        import cupy

        return cupy.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        return tensor.view(torch.int16).numpy().view(STORAGE["bfloat16"])
    return tensor.numpy()


def as_tensor(array: Any) -> Tensor:
    """Return a NumPy or CuPy array's memory as a tensor, without a copy."""
    if isinstance(array, np.ndarray) and array.dtype == STORAGE["bfloat16"]:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_own_tensor(array: Any) -> Tensor:
    """Return a result as a tensor whose memory torch may free; on a device, a copy.

    The CUDA graphs of ``torch.compile`` free the memory of an operator's results, and refuse memory
    that belongs to another library.
    """
    tensor = as_tensor(array)
    return tensor.clone() if tensor.is_cuda else tensor


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Let CuPy use the tensor's device, torch's current stream there, and torch's allocator.

    Memory allocated in this context is reused in the order of torch's stream. If a CUDA graph is
    being captured, the memory comes from its pool.
    """
    if not tensor.is_cuda:
        yield
        return
    import cupy

    index = tensor.device.index
    handle = torch._C._cuda_getCurrentRawStream(index)
    with (
        cupy.cuda.Device(index),
        cupy.cuda.ExternalStream(handle, index),
        cupy.cuda.using_allocator(_allocate),
    ):
        yield


def _allocate(nbytes: int) -> Any:
    """Return memory of the current device from torch's allocator, for CuPy."""
    import cupy

    index = cupy.cuda.runtime.getDevice()
    memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    owned = cupy.cuda.UnownedMemory(memory.data_ptr(), nbytes, memory, index)
    return cupy.cuda.MemoryPointer(owned, 0)


class Launched(NamedTuple):
    """A launched call: its `Ready` object, with operands and results by buffer."""

    ready: Ready
    tensors: Mapping[str, Any]


class _PerThread(threading.local):
    launched: list[Launched] | None = None


_per_thread = _PerThread()


@contextlib.contextmanager
def noting() -> Iterator[list[Launched]]:
    """Note which calls this thread launches within, on tensors of CUDA devices."""
    outer, _per_thread.launched = _per_thread.launched, []
    try:
        yield _per_thread.launched
    finally:
        _per_thread.launched = outer


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return those properties of a copied tensor on which a recorded graph depends."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


class Tensors:
    """The adapter for tensors on CUDA devices; other tensors are imported as host arrays.

    Lists of blocks and given scales are CuPy arrays among the tensors.

    Parameters
    ----------
    check : callable, optional
        Called with the tensors of an unknown call; raises if they are incompatible.
    """

    def __init__(self, check: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._check = check

    def forms_of(self, tensors: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
        """Return forms and addresses of tensors, with strides in elements."""
        forms: list[tuple[Any, ...]] = []
        addresses: dict[str, int] = {}
        held = {}
        try:
            for name, x in tensors.items():
                if name in _HELD:
                    held[name] = x
                    continue
                addresses[name] = address = x.data_ptr()
                forms.append((name, x.shape, x.stride(), x.dtype, address % 16, x.get_device()))
        except (AttributeError, RuntimeError):  # no tensor, or one without strides
            return None, addresses
        if forms[0][5] < 0:
            return None, addresses
        if held:
            of_held, places = forms_of(held)
            forms += of_held or ()
            addresses |= places
        return tuple(forms), addresses

    def described(self, tensors: Mapping[str, Any], forms: Any) -> dict[str, Described]:
        """Describe tensors of these forms."""
        if self._check is not None:
            self._check(tensors)
        return {form[0]: _described(*form) for form in forms}

    def imported(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """Return tensors as NumPy or CuPy arrays, and the function that converts results."""
        if self._check is not None:
            self._check(tensors)
        arrays = {n: x if n in _HELD else as_array(x) for n, x in tensors.items()}
        return arrays, as_tensor

    def beside(self, tensor: Tensor) -> Any:
        """Return an empty array on the device of a tensor."""
        return _nothing_on(tensor.get_device())

    def read(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors' values on the host, after torch's current stream has computed them."""
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"argument '{name}' must be Tensor, not {type(x).__name__}")
        return {name: as_array(x.cpu()) for name, x in tensors.items()}

    def on_device_of(self, tensor: Tensor) -> contextlib.AbstractContextManager[None]:
        """Return the context of `on_device_of`."""
        return on_device_of(tensor)

    def launch(
        self, ready: Ready, tensors: Mapping[str, Any], addresses: dict[str, int]
    ) -> dict[str, Any]:
        """Launch on torch's current stream, with results and scratch memory of its allocator.

        Memory that the launches read is freed in the order of that stream.
        """
        device = ready.device
        # NOTE: torch.cuda.current_device first asks whether CUDA is initialised: four functions.
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self.launch(ready, tensors, addresses)
        if ready.receiver is not None:
            ready.receiver.check(addresses)
        copies = _copied(ready, tensors, addresses) if ready.copies else {}
        made = {}
        for name, shape, dtype, _ in ready.results:
            made[name] = x = _empty(shape, strides_of(shape), _TYPES[dtype])
            addresses[name] = x.data_ptr()
        start, nbytes = 0, ready.layout.nbytes
        if nbytes:
            scratch = _empty((nbytes,), (1,), torch.uint8)
            start = scratch.data_ptr()
            for one in ready.conversions:
                copy = copies.get(one.buffer)
                convert(one, tensors[one.buffer] if copy is None else as_tensor(copy), scratch)
        # NOTE: torch.cuda.current_stream makes an object of the handle, which takes the host 6 us.
        ready.launch(addresses, start, torch._C._cuda_getCurrentRawStream(device))
        if _per_thread.launched is not None:
            _per_thread.launched.append(Launched(ready, {**tensors, **made}))
        return made


def _public_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of the current device from torch's allocator as a tensor."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


#: The same by the function of Inductor's code, in a third of the time.
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty)


def no_lse(o: Tensor) -> Tensor:
    """Return the placeholder for an absent lse, because a schema has no optional results."""
    return o.new_empty((0,), dtype=torch.float32)


def empty_lse_beside(o: Tensor) -> Tensor:
    """Return the same on the device of a tensor; on the current device, by Inductor's allocator."""
    if o.get_device() < 0 or o.get_device() != torch._C._cuda_getDevice():
        return no_lse(o)
    return _empty((0,), (1,), torch.float32)


@functools.lru_cache(4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    Examples
    --------
    >>> strides_of((2, 3, 4)), strides_of((2, 0, 4))
    ((12, 4, 1), (4, 4, 1))
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


#: CuPy arrays among the tensors of a call, made from the caller's objects.
_HELD = ("kept_blocks", "kept_rows", "q_static_scale", "k_static_scale")


def _described(
    name: str, shape: Sequence[int], strides: Sequence[int], dtype: Any, *place: Any
) -> Described:
    """Describe a tensor of a form, or an array."""
    if not isinstance(dtype, torch.dtype):
        return Described(name, tuple(shape), tuple(strides), dtype, *place)
    own = dtype_of(name, dtype)
    in_bytes = tuple(n * own.itemsize for n in strides)
    return Described(name, tuple(shape), in_bytes, own, *place)


def device_capability(device: torch.device) -> int | None:
    """Return the compute capability of a device times ten; None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)


def dtype_of(name: str, dtype: torch.dtype) -> np.dtype[Any]:
    """Return the array type that corresponds to a tensor type.

    Raises
    ------
    TypeError
        If there is none.
    """
    word = str(dtype).removeprefix("torch.")
    try:
        return STORAGE.get(word) or np.dtype(word)
    except TypeError:
        raise TypeError(f"{name} must be of a type that NumPy has, got {dtype}") from None


def _copied(
    ready: Ready, tensors: Mapping[str, Any], addresses: dict[str, int]
) -> dict[str, Any]:
    """Copy the operands of a call that need a copy, add the copies' addresses, and return the
    copies.

    They are made on torch's current stream, in whose order their memory is reused.
    """
    with on_device_of(next(iter(tensors.values()))):
        arrays, _ = Tensors().imported({x.name: tensors[x.name] for x in ready.copies.values()})
        own = {name: x.bound(arrays[x.name]) for name, x in ready.copies.items()}
    addresses |= {name: x.data.ptr for name, x in own.items()}
    return own


def convert(one: Conversion, source: Tensor, scratch: Tensor) -> None:
    """Convert an operand into scratch memory, on torch's current stream."""
    place = scratch[one.start : one.start + one.nbytes].view(getattr(torch, one.dtype))
    place.view(one.shape).copy_(source.detach().as_strided(one.shape, one.strides))


@functools.cache
def _nothing_on(device: int) -> Any:
    if device < 0:
        return np.empty(0)
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty(0)
