"""Checkpoints as they lie on a disk: one file, several, or an index of shards.

Tensors are read one at a time, each as a separate copy, so only the current tensor is in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cupyattn.checkpoints.header import DTYPES, Header, read_header
from cupyattn.checkpoints.shards import Array, Source, files_by_name
from cupyattn.files import open_regular

SAFETENSORS = ".safetensors"
#: Endings of files that torch pickles.
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: The file of a pipeline of diffusers, and how the folders of its denoisers begin.
PIPELINE = "model_index.json"
DENOISERS = ("transformer", "unet", "prior")
INDEX = ".index.json"
#: End of a shard's name without its ending: its number, and how many there are.
SHARD_NUMBER = re.compile(r"-(\d{1,9})-of-(\d{1,9})$")


def folder_of(source: Source) -> Path | None:
    """Return the folder of a model that is a folder or an index, None for a single file."""
    if source.path.is_dir():
        return source.path
    return source.path.parent if source.path.name.endswith(INDEX) else None


class SafetensorsCheckpoint:
    """Tensors in safetensors files.

    Parameters
    ----------
    path : Path
        Path that the caller named.
    files : iterable of Path

    Raises
    ------
    OSError, ValueError
        As `read_header`; also where two files hold tensors of one name.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        self.path = path
        self.files = tuple(files)
        self.headers: dict[Path, Header] = {file: read_header(file) for file in self.files}
        held = {file: header.tensors for file, header in self.headers.items()}
        self._file_of = files_by_name(held)
        self.tensors = {name: held[file][name] for name, file in self._file_of.items()}

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def read(self, name: str) -> Array:
        """Return one tensor.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it has changed since its header was read.
        """
        info, path = self.tensors[name], self._file_of[name]
        header = self.headers[path]
        content = np.empty(info.nbytes, np.uint8)
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(header.data_start + info.begin)
            count = file.readinto(content.data)
        if size != header.file_size or count != info.nbytes:
            raise ValueError(
                f"{path} has changed while it was read: {size} bytes, its header says "
                f"{header.file_size}"
            )
        return content.view(DTYPES[info.dtype]).reshape(info.shape)


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Find the tensors of a model, without reading any.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file, an ``.index.json``, a folder that holds one or the other, or the
        same of files that torch pickled, which torch itself then reads, without running code.

    Returns
    -------
    Source

    Raises
    ------
    OSError
        If something cannot be read.
    ValueError
        If there is no checkpoint, more than one, or a damaged one; the message has its name.
    UnsupportedError
        For files that torch pickled where torch is not installed.
    """
    if not os.fspath(path):  # as of an unset variable of the shell, and Path("") is this folder
        raise ValueError("the model must be a path, got '': give its file, its folder or its index")
    found = Path(path)
    found.stat()  # describes the error of a missing path
    if found.is_dir():
        return _open_folder(found)
    if found.name.endswith(INDEX):
        return _open_index(found, found)
    if found.suffix == SAFETENSORS or found.suffix in PICKLES:
        return _open_files(found, [found])
    raise ValueError(
        f"{found} is no checkpoint: its name must end in {SAFETENSORS}, {', '.join(PICKLES)} or "
        f"{INDEX}"
    )


def _open_folder(folder: Path) -> Source:
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    for endings in ((SAFETENSORS,), PICKLES):
        indices = [n for n in names if n.endswith(tuple(end + INDEX for end in endings))]
        files = [folder / n for n in names if n.endswith(endings)]
        if len(indices) > 1:
            raise ValueError(f"{folder} has several checkpoints, {', '.join(indices)}: name one")
        if indices:
            return _open_index(folder, folder / indices[0])
        if files:
            _check_shards(files)
            return _open_files(folder, files)
    parts = [n for n in names if (folder / n).is_dir() and _holds_checkpoint(folder / n)]
    denoisers = [n for n in parts if n.startswith(DENOISERS)]
    if denoisers and (folder / PIPELINE).is_file():
        models = " or ".join(str(folder / n) for n in denoisers)
        others = ", ".join(n for n in parts if n not in denoisers)
        raise ValueError(
            f"{folder} is a pipeline, whose models are read one at a time: give {models}"
            + (f" ({others} can be read in the same way)" if others else "")
        )
    raise ValueError(
        f"{folder} holds no {SAFETENSORS} files"
        + (f"; its folders {', '.join(parts)} do: name one of them" if parts else "")
    )


def _check_shards(files: list[Path]) -> None:
    """Raise ValueError if files without an index are numbered shards, and not all of them."""
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        if number := SHARD_NUMBER.search(file.stem):
            numbers[file.stem[: number.start()], int(number[2])].add(int(number[1]))
    for (stem, total), found in numbers.items():
        if len(found) < total:
            raise ValueError(
                f"{files[0].parent} has {len(found)} of the {total} shards of {stem!r}, and no "
                "index of them: get the others, or name one file to read it alone"
            )


def _holds_checkpoint(folder: Path) -> bool:
    return any(p.suffix == SAFETENSORS or p.suffix in PICKLES for p in folder.iterdir())


def _open_files(path: Path, files: list[Path]) -> Source:
    if all(file.suffix == SAFETENSORS for file in files):
        return SafetensorsCheckpoint(path, files)
    from cupyattn.checkpoints.pickled import PickledCheckpoint

    return PickledCheckpoint(path, files)


def _open_index(path: Path, index: Path) -> Source:
    """Open the files that an index names, after checking that they are in its folder."""
    try:
        with open_regular(index) as text:
            weight_map = json.loads(text.read())["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of a checkpoint: {error!r}") from error
    names = sorted(set(file_of.values()))
    for name in names:
        if os.path.basename(name) != name or "\0" in name:
            raise ValueError(
                f"{index} names {name!r}: only files of its own folder are read, by plain names"
            )
        if not name.endswith((SAFETENSORS, *PICKLES)):
            raise ValueError(f"{index} names {name!r}, which is no checkpoint")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name!r}, which is no file in {index.parent}")
    if not names:
        raise ValueError(f"{index} names no files")
    source = _open_files(path, [index.parent / name for name in names])
    for name, file in file_of.items():
        if name not in source.tensors or source.file_of(name).name != file:
            held = source.file_of(name).name if name in source.tensors else "no file"
            raise ValueError(f"{index} says that {name!r} is in {file}: it is in {held}")
    extra = [name for name in source.tensors if name not in file_of]
    if extra:
        raise ValueError(
            f"{index} does not name {extra[0]!r}, which is in {source.file_of(extra[0]).name}"
        )
    return source
