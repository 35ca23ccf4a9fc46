"""XLA's typed foreign-function interface, spoken from Python: handlers that need no compiler.

A handler is a C function with one argument, a pointer to a call frame of plain structs. jaxlib
describes them in ``xla/ffi/api/c_api.h``. This module describes the structs by ctypes, which also
makes the function. XLA calls Python with the addresses of its buffers, on the host or on a device,
and on a device with its stream. Nothing is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from cupyattn.errors import UnsupportedError

Shape: TypeAlias = tuple[int, ...]
#: Function of a target, with arguments (operands, results, attributes). It writes only results.
Target: TypeAlias = Callable[[Sequence[Any], Sequence[Any], dict[str, str]], None]

#: The interface's major version that these structs describe; minor versions only add to it.
MAJOR_VERSION = 0
_METADATA, _STRING = 1, 4
#: Element types by XLA's numbers.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(bool), 2: np.dtype(np.int8), 4: np.dtype(np.int32), 5: np.dtype(np.int64),
    10: np.dtype(np.float16), 11: np.dtype(np.float32), 12: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
#: XLA's status codes by exception; the first match decides.
_STATUS = (
    (NotImplementedError, 12),  # UNIMPLEMENTED
    ((ValueError, TypeError), 3),  # INVALID_ARGUMENT
    (MemoryError, 8),  # RESOURCE_EXHAUSTED
    (BaseException, 13),  # INTERNAL
)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
#: Seconds without a call after which an ending process expects no further call. Longest wait in
#: seconds, in case a thread never stops calling.
QUIET, LONGEST_WAIT = 0.1, 60.0


class _Version(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int),
    )  # fmt: skip


class _Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _Extension(Structure):
    """Extension of a call frame; a request for metadata has further fields after these."""

    _fields_ = (
        ("struct_size", c_size_t), ("type", c_int), ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),
    )  # fmt: skip


class _Api(Structure):
    """XLA's table of functions, up to the last one that is called here."""

    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", _Version),
        ("internal", c_void_p), ("error_create", c_void_p), ("error_message", c_void_p),
        ("error_destroy", c_void_p), ("register", c_void_p), ("stream_get", c_void_p),
    )  # fmt: skip


class _Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p),
        ("rank", c_int64), ("dims", POINTER(c_int64)),
    )  # fmt: skip


class _Buffers(Structure):
    """Operands or results."""

    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64),
        ("types", POINTER(c_int)), ("values", POINTER(POINTER(_Buffer))),
    )  # fmt: skip


class _Span(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t))

    def __str__(self) -> str:
        return ctypes.string_at(self.data, self.size).decode()


class _Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64),
        ("types", POINTER(c_int)), ("names", POINTER(POINTER(_Span))),
        ("values", POINTER(POINTER(_Span))),
    )  # fmt: skip


class _Frame(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", POINTER(_Extension)), ("api", POINTER(_Api)),
        ("context", c_void_p), ("stage", c_int), ("operands", _Buffers), ("results", _Buffers),
        ("attributes", _Attributes),
    )  # fmt: skip


class _ErrorArguments(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int),
    )  # fmt: skip


class _StreamArguments(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p),
        ("stream", c_void_p),
    )  # fmt: skip


_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))
_StreamGet = ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArguments))

#: Handlers that XLA may call until the process ends.
_kept: list[Any] = []
#: Threads that are in a handler, and when each left the last one.
_inside: dict[int, bool] = {}
_left: dict[int, float] = {}


def spoken_version(include: str | PathLike[str]) -> tuple[int, int]:
    """Return the version of the interface that a jaxlib speaks.

    Parameters
    ----------
    include : path
        Result of ``jax.ffi.include_dir()``.

    Raises
    ------
    UnsupportedError
        For another major version, because its structs differ.
    """
    header = Path(include, "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header, re.MULTILINE))
    version = int(found.get("MAJOR", -1)), int(found.get("MINOR", -1))
    if version[0] != MAJOR_VERSION:
        raise UnsupportedError(
            f"this jaxlib speaks version {version[0]}.{version[1]} of XLA's foreign functions, "
            f"{MAJOR_VERSION}.* is supported: install jax 0.6 to 0.10"
        )
    return version


def handler(target: Target, version: tuple[int, int], *, on_device: bool) -> Any:
    """Return a C function that runs a target on the buffers of a call.

    Parameters
    ----------
    target : callable
        Receives NumPy arrays, of which the operands are read-only; or CuPy arrays, with XLA's
        stream as the current one.
    version : (int, int)
        Result of `spoken_version`. XLA requires its own version; a minor version only adds fields
        after those that are read here.
    on_device : bool
        Whether the buffers are on a CUDA device.

    Returns
    -------
    ctypes function
        Argument for ``jax.ffi.pycapsule``. It exists as long as the process.

    Notes
    -----
    An exception of the target is the error of the call: ``TypeName: message``, with the status
    code that XLA has for its kind. ctypes takes Python's lock around the call.
    """
    view = _device_view if on_device else _host_view

    def call(frame_at: Any) -> int | None:
        frame = frame_at.contents
        if frame.extension and frame.extension.contents.type == _METADATA:
            _tell(frame.extension.contents.metadata.contents, version)
            return None
        inside = threading.get_ident()
        _inside[inside] = True
        try:
            around = _xla_stream(frame) if on_device else contextlib.nullcontext()
            with around:
                operands = [view(b, writeable=False) for b in _buffers(frame.operands)]
                results = [view(b, writeable=True) for b in _buffers(frame.results)]
                target(operands, results, _attributes(frame.attributes))
        except BaseException as error:  # noqa: BLE001 - no exception may pass through XLA's frames
            return _error(frame.api.contents, error)
        finally:
            del _inside[inside]
            _left[inside] = time.monotonic()
        return None

    function = _Handler(call)
    _kept.append(function)
    return function


def wait_for_calls() -> None:
    """Wait until no handler has run for `QUIET` seconds, at most `LONGEST_WAIT` seconds.

    Call it when the process ends. A thread of XLA that enters Python during its shutdown is
    stopped there, and XLA waits for it forever.
    """
    began = now = time.monotonic()
    while now - began < LONGEST_WAIT:
        if not _inside and now - max(began, *_left.copy().values(), 0.0) >= QUIET:
            return
        time.sleep(QUIET / 20)
        now = time.monotonic()


def _tell(metadata: Any, version: tuple[int, int]) -> None:
    """Answer XLA's request at registration of a handler: the version, and no traits.

    Without traits XLA does not capture the call in a command buffer.
    """
    metadata.version.major, metadata.version.minor = version
    metadata.traits = 0


def _error(api: Any, error: BaseException) -> int | None:
    """Return XLA's error object for an exception."""
    code = next(code for kinds, code in _STATUS if isinstance(error, kinds))
    message = f"{type(error).__name__}: {error}".encode()
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message, code)
    created = _ErrorCreate(api.error_create)(ctypes.byref(arguments))
    return None if created is None else int(created)


@dataclass(frozen=True)
class _Place:
    """Address, shape and type of a buffer."""

    address: int
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _buffers(arguments: Any) -> Iterator[_Place]:
    for index in range(arguments.size):
        buffer = arguments.values[index].contents
        if buffer.dtype not in _DTYPES:
            raise TypeError(f"no array has XLA's element type {buffer.dtype}")
        yield _Place(buffer.data or 0, tuple(buffer.dims[: buffer.rank]), _DTYPES[buffer.dtype])


def _attributes(attributes: Any) -> dict[str, str]:
    found = {}
    for index in range(attributes.size):
        if attributes.types[index] == _STRING:
            found[str(attributes.names[index].contents)] = str(attributes.values[index].contents)
    return found


def _host_view(place: _Place, *, writeable: bool) -> Any:
    """Return a NumPy array over a host buffer."""
    if not place.nbytes:
        return np.empty(place.shape, place.dtype)
    look = ctypes.pythonapi.PyMemoryView_FromMemory
    look.restype, look.argtypes = ctypes.py_object, (c_void_p, ctypes.c_ssize_t, c_int)
    memory = look(place.address, place.nbytes, _WRITE if writeable else _READ)
    return np.frombuffer(memory, place.dtype).reshape(place.shape)


def _device_view(place: _Place, *, writeable: bool) -> Any:
    """Return a CuPy array over a device buffer; CuPy asks the driver for its device."""
    import cupy

    if not place.nbytes:
        return cupy.empty(place.shape, place.dtype)
    memory = cupy.cuda.UnownedMemory(place.address, place.nbytes, None)
    return cupy.ndarray(place.shape, place.dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextlib.contextmanager
def _xla_stream(frame: Any) -> Iterator[None]:
    """Make the stream and the device of a call the current ones of CuPy."""
    import cupy

    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    if _StreamGet(frame.api.contents.stream_get)(ctypes.byref(arguments)):
        raise RuntimeError("XLA has no stream for this call")
    first = next((place for place in _buffers(frame.operands) if place.nbytes), None)
    if first is None:  # nothing to read: nothing is launched
        yield
        return
    device = int(cupy.cuda.UnownedMemory(first.address, 1, None).device_id)
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(arguments.stream or 0, device):
        yield
