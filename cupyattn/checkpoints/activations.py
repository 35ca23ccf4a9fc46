"""Files of activations: plain safetensors of layers' inputs, or a recording of a model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from cupyattn.checkpoints.header import DTYPES, Header, read_header
from cupyattn.checkpoints.shards import Array, Source
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.measure.words import printable

#: Kind of file in the metadata of a recording.
RECORDING = "cupyattn.recording"
#: Prefixes of a recording's tensors that are not inputs of linear layers.
OF_ATTENTION = "attention:"


def mapped(path: str | os.PathLike[str], header: Header, name: str) -> Array:
    """Return a tensor of a safetensors file, read when its numbers are used."""
    info = header.tensors[name]
    dtype, start = DTYPES[info.dtype], header.data_start + info.begin
    if not info.elements:
        return np.zeros(info.shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", start, info.shape))


def read_activations(path: str | os.PathLike[str], source: Source) -> dict[str, Array]:
    """Return the inputs of a checkpoint's layers, for `analyze`.

    Parameters
    ----------
    path : path
        Safetensors of arrays (..., in) by names of layers, or what `Recording.save` wrote. Of the
        latter inputs of linear layers are taken that the checkpoint has, with or without the name
        of the pipeline's component before theirs.
    source : Source

    Returns
    -------
    dict of str to array

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is a recording of no layer of the checkpoint.
    """
    if not Path(path).is_file() or read_header(path).metadata.get("kind") != RECORDING:
        plain = open_checkpoint(path)
        return {name: plain.read(name) for name in plain.tensors}
    header, found = read_header(path), {}
    recorded = [name for name in header.tensors if not name.startswith(OF_ATTENTION)]
    for name in recorded:
        for layer in (name, name.partition(".")[2]):
            if f"{layer}.weight" in source.tensors:
                found[layer] = mapped(path, header, name)
                break
    if not found:
        some = ", ".join(map(printable, recorded[:3])) or "none"
        raise ValueError(
            f"{os.fspath(path)!r} has inputs of no linear layer of {source.path.name} (it has "
            f"{some}): record the model that the checkpoint is of, with its linear layers"
        )
    return found
