"""Interface of the readers of all checkpoint formats, and the file of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cupyattn.checkpoints.header import TensorInfo

Array = Any


class Source(Protocol):
    """A checkpoint that can be read tensor by tensor."""

    #: Path of the file or the folder.
    path: Path
    #: Every tensor, in the order in which they are best read.
    tensors: dict[str, TensorInfo]
    #: The files that hold them.
    files: tuple[Path, ...]

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""

    def read(self, name: str) -> Array:
        """Return one tensor."""


def files_by_name(held: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Return the file of each tensor, given the names that each file holds.

    Raises
    ------
    ValueError
        If two files hold tensors of one name.
    """
    found: dict[str, Path] = {}
    for file, names in held.items():
        for name in names:
            if name in found:
                raise ValueError(
                    f"{name!r} is in {found[name].name} and in {file.name} of {file.parent}: "
                    "name one file in place of the folder"
                )
            found[name] = file
    return found
