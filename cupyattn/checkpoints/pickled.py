"""Read checkpoints that torch pickled, by torch's loader that builds only tensors."""

from __future__ import annotations

import importlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.checkpoints.header import DTYPES, METADATA, TensorInfo
from cupyattn.checkpoints.shards import Array, files_by_name
from cupyattn.errors import UnsupportedError
from cupyattn.files import open_regular

#: Types of torch by the names that safetensors has for them.
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class PickledCheckpoint:
    """Tensors in files that torch pickled.

    Parameters
    ----------
    path : Path
        Path that the caller named.
    files : iterable of Path

    Raises
    ------
    UnsupportedError
        If torch is not installed: nothing else here unpickles anything.
    ValueError
        If a file holds anything but a dictionary of tensors; what it holds is not executed. Also
        where two files hold tensors of one name.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        self.path = path
        self.files = tuple(files)
        held = {file: _load(file) for file in self.files}
        self._file_of = files_by_name(held)
        self._values = {name: held[file][name] for name, file in self._file_of.items()}
        self.tensors: dict[str, TensorInfo] = {}
        for name, value in self._values.items():
            _check_storable(self._file_of[name], name, value)
            dtype = _NAMES.get(str(value.dtype).removeprefix("torch."))
            if dtype is None:
                raise ValueError(
                    f"{self._file_of[name]}: {name!r} has the unknown type {value.dtype}"
                )
            self.tensors[name] = TensorInfo(dtype, tuple(value.shape))

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def read(self, name: str) -> Array:
        """Return one tensor."""
        torch = importlib.import_module("torch")
        info = self.tensors[name]
        dtype = DTYPES[info.dtype]
        if not info.elements:
            return np.empty(info.shape, dtype)
        flat = self._values[name].detach().clone().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy()
        return content.view(dtype).reshape(info.shape)


def _check_storable(file: Path, name: str, value: Any) -> None:
    """Raise ValueError for a tensor that is not dense, or a name that no safetensors file has."""
    kind = str(value.layout).removeprefix("torch.")
    if value.is_meta or value.is_nested or kind != "strided":
        kind = "nested" if value.is_nested else "without numbers" if value.is_meta else kind
        raise ValueError(f"{file}: {name!r:.80} is {kind}, and only dense tensors are read")
    try:
        name.encode()
        fits = name != METADATA
    except UnicodeEncodeError:  # half a surrogate pair
        fits = False
    if not fits:
        raise ValueError(f"{file}: {name!r:.80} is no name of a tensor in safetensors: rename it")


def _load(path: Path) -> dict[str, Any]:
    """Return the contents of a file. Tensors stay on the disk if the kind of file allows it."""
    open_regular(path).close()  # torch would wait for the writer of a pipe
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            f"{path} was pickled by torch, which is not installed: install torch, or save the "
            "model as safetensors"
        ) from error
    try:
        with warnings.catch_warnings():  # what torch says of a file that it then refuses
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        # NOTE: torch's own message goes on to say how its protection is switched off.
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(
            f"{path} is damaged, or holds more than tensors; nothing in it was executed: "
            + (f"it asks for {asked[1]}" if asked else "torch reads no tensors from it")
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{path} must hold a dictionary of tensors by name")
    return found
