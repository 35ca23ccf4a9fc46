"""The header of a safetensors file: read strictly, written byte for byte the same every time.

A file is 8 bytes of header length, that many bytes of JSON, and the tensors' bytes without gaps:
https://github.com/huggingface/safetensors#format. Nothing here reads a tensor.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from cupyattn.files import open_regular

#: The types of the format that NumPy (with ml_dtypes) holds, by their names there.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
#: The types that hold weights at full width, by the names that `cupyattn.arrays.kinds.STORAGE` has.
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
#: The longest header that the format allows.
MAX_HEADER_BYTES = 100_000_000
#: The most axes that NumPy has: the product of a longer shape is a number to choke on.
MAX_AXES = 64
#: Key of the strings that belong to the whole file.
METADATA = "__metadata__"
#: Fields of a header for each tensor.
_ENTRY = {"dtype", "shape", "data_offsets"}
#: Bytes of the header's length, and the multiple that a header is padded to.
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts of one tensor in a header.

    Parameters
    ----------
    dtype : str
        A name of `DTYPES`.
    shape : tuple of int
    begin : int
        Offset of its bytes from the first byte of all tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.elements * int(DTYPES[self.dtype].itemsize)

    @property
    def end(self) -> int:
        """Offset past its bytes."""
        return self.begin + self.nbytes


@dataclass(frozen=True)
class Header:
    """Contents of a safetensors file.

    Parameters
    ----------
    tensors : dict
        `TensorInfo` by name, in the order of their bytes.
    metadata : dict of str to str
    data_start : int
        Offset of the tensors' bytes in the file.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int

    @functools.cached_property
    def file_size(self) -> int:
        """Number of bytes of the file."""
        return self.data_start + max((t.end for t in self.tensors.values()), default=0)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a safetensors file.

    Parameters
    ----------
    path : path

    Returns
    -------
    Header

    Raises
    ------
    OSError
        If it cannot be read, or is no regular file: pipes, sockets and devices are not opened.
    ValueError
        If it is no safetensors file, or is damaged or cut short: the message has its name and the
        place. Overlapping tensors, gaps, names that come twice and unknown types are damage.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        if len(start) < _LENGTH_BYTES:
            raise ValueError(f"{path} is cut short: {size} bytes, less than the header's length")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} has no safetensors header: its length at offset 0 is {length}, the "
                f"format ends at {MAX_HEADER_BYTES}"
            )
        if _LENGTH_BYTES + length > size:
            raise ValueError(f"{path} is cut short: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    with _without_collections():
        return parse_header(text, size, path)


def parse_header(text: bytes, file_size: int, path: str | os.PathLike[str]) -> Header:
    """Parse the JSON of a header, and hold it to the size of its file.

    Parameters
    ----------
    text : bytes
    file_size : int
        Bytes of the whole file.
    path : path
        Its name, for messages.

    Returns
    -------
    Header

    Raises
    ------
    ValueError
        As `read_header`.
    """
    if not text.startswith(b"{"):
        raise ValueError(f"{path} has no safetensors header: at offset 8 stands no '{{'")
    try:
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has no safetensors header: {error}") from error
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: {METADATA} must hold strings alone, got {metadata!r:.80}")
    tensors = {name: _tensor(path, name, entry) for name, entry in found.items()}
    data_start = _LENGTH_BYTES + len(text)
    in_order = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end, before = 0, "the header"
    for name, info in in_order:
        if info.begin != end:
            what = "overlaps" if info.begin < end else "leaves a gap after"
            raise ValueError(
                f"{path} is damaged: {name!r} at offset {data_start + info.begin} {what} "
                f"{before}, which ends at {data_start + end}"
            )
        end, before = info.end, repr(name)
    if data_start + end != file_size:
        what = "cut short or damaged" if data_start + end > file_size else "damaged"
        raise ValueError(
            f"{path} is {what}: {before} should end the file at offset {data_start + end}, "
            f"the file has {file_size} bytes"
        )
    return Header(dict(in_order), metadata, data_start)


def encode_header(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Return the bytes before the tensors, and where each tensor goes.

    Parameters
    ----------
    tensors : mapping of str to TensorInfo
        Types and shapes; where they begin is decided here.
    metadata : mapping of str to str

    Returns
    -------
    start : bytes
        Length and JSON, padded with spaces to a multiple of 8.
    placed : dict of str to TensorInfo
        Wide types first, so that every tensor is aligned, then by name.

    Examples
    --------
    >>> start, placed = encode_header({"x": TensorInfo("I8", (3,)), "y": TensorInfo("F32", ())}, {})
    >>> start[8:]
    b'{"y":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"x":{"dtype":"I8","shape":[3],...
    >>> placed["x"].begin
    4
    """
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    placed = {}
    end = 0
    for name, info in sorted(
        tensors.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0])
    ):
        placed[name] = TensorInfo(info.dtype, tuple(info.shape), end)
        end = placed[name].end
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [placed[name].begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, placed


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python's collector of cycles off: it would look at all tensors again and again.

    A header has no cycles, and with the collector its time grows faster than its tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object whose names are all different, and text."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} comes twice")
        name.encode("utf-8")  # NOTE: JSON can spell half a surrogate pair, files cannot hold it.
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _tensor(path: str | os.PathLike[str], name: str, entry: Any) -> TensorInfo:
    """Return the facts of a tensor in a header's entry."""
    if not isinstance(entry, dict) or entry.keys() != _ENTRY:
        raise ValueError(
            f"{path}: the entry of {name!r} is malformed: it must have dtype, shape and "
            f"data_offsets, got {entry!r:.80}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{path}: {name!r} has the unknown type {dtype!r:.40}, not one of {', '.join(DTYPES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{path}: {name!r} has a malformed shape or place: {shape!r:.80}, {offsets!r:.80}"
        )
    if len(shape) > MAX_AXES:
        raise ValueError(f"{path}: {name!r} has {len(shape)} axes, more than {MAX_AXES}")
    info = TensorInfo(dtype, tuple(shape), offsets[0])
    if offsets[0] + info.nbytes != offsets[1]:
        raise ValueError(
            f"{path} is damaged: {name!r}, {dtype} {shape!r:.80}, needs {info.nbytes} bytes and "
            f"has offsets {offsets[0]} to {offsets[1]}"
        )
    if math.prod(filter(None, shape)) * DTYPES[dtype].itemsize >= 2**63:  # an axis of 0 hides it
        raise ValueError(f"{path}: {name!r} has the shape {shape!r:.80}, which no array can have")
    return info


def _are_sizes(values: Any) -> bool:
    """Whether these are whole numbers that a size may be."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
