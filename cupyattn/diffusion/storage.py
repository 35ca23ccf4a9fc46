"""Small safetensors files of NumPy arrays: written whole or not at all, checked when read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cupyattn.checkpoints.header import DTYPES, TensorInfo, encode_header, read_header
from cupyattn.files import replacing

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write arrays and their description; an existing file is replaced after everything is written.

    Parameters
    ----------
    path : path
    arrays : mapping of str to array
    metadata : mapping of str to str
    """
    tensors = {name: TensorInfo(_NAMES[a.dtype], a.shape) for name, a in arrays.items()}
    start, placed = encode_header(tensors, metadata)
    with replacing(path) as file:
        file.write(start)
        for name in placed:
            file.write(arrays[name].tobytes())


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a file of `write`.

    Returns
    -------
    arrays : dict of str to array
    metadata : dict of str to str

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is damaged; the message has its name and the place.
    """
    header = read_header(path)
    content = Path(path).read_bytes()[header.data_start :]
    arrays = {
        name: np.frombuffer(content[info.begin : info.end], DTYPES[info.dtype]).reshape(info.shape)
        for name, info in header.tensors.items()
    }
    return arrays, header.metadata


def check_kind(metadata: Mapping[str, str], kind: str, version: int) -> None:
    """Raise for a file of another kind, or of a later version.

    Raises
    ------
    ValueError
        For either.
    KeyError
        If the file names no version.
    """
    if metadata.get("kind") != kind:
        raise ValueError(f"its kind is {metadata.get('kind')!r}")
    if int(metadata["version"]) > version:
        raise ValueError(f"version {metadata['version']} is later than {version}")
