"""Check flags: numbers that are too small, arrays that are too large, outputs that are inputs."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path

#: Largest number of elements of an array, so that its bytes are a 64-bit number in any type.
MOST_ELEMENTS = 2**59
#: Flags of files that a command writes, and the endings that it adds to their names.
OUTPUTS = {
    "json": ("",), "output": ("",), "out": ("",), "plot": ("",), "html": ("",), "trace": ("",),
    "save": ("",), "out_name": (".npz", ".py"),
}  # fmt: skip
#: Endings of files in a model's folder that no output replaces.
_OF_MODELS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", "config.json")


def check_whole(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Raise ValueError if the number of a flag is too small.

    Parameters
    ----------
    args : argparse.Namespace
    *names : str
        Names of flags in `args`; absent flags (None) are ignored.
    least : int

    Examples
    --------
    >>> check_whole(argparse.Namespace(len_q=0), "len_q")
    Traceback (most recent call last):
    ValueError: --len-q must be at least 1, got 0
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def check_elements(*shape: int) -> None:
    """Raise ValueError for a shape of more elements than an array can have."""
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(
            f"batch, heads, length and head_dim = {', '.join(map(str, shape))} make an array of "
            f"more than {MOST_ELEMENTS} elements: give smaller sizes"
        )


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ValueError if an output has no name, or would replace another or a file that is read.

    Parameters
    ----------
    args : argparse.Namespace
        The flags of a command. Files that flags outside of `OUTPUTS` name are inputs.
    """
    read = list(_files_read(args))
    written: dict[str, str] = {}
    for name, endings in OUTPUTS.items():
        if getattr(args, name, None) == "":  # as of an unset variable of the shell
            raise ValueError(f"--{name.replace('_', '-')} must name a file, got ''")
        for ending in endings if getattr(args, name, None) else ():
            target = Path(f"{getattr(args, name)}{ending}")
            other = written.setdefault(os.path.realpath(target), name)
            if other != name:
                raise ValueError(
                    f"--{other.replace('_', '-')} and --{name.replace('_', '-')} both name "
                    f"{str(target)!r}: name two files"
                )
            if target.is_file() and any(_holds(path, target) for path in read):
                raise ValueError(
                    f"--{name.replace('_', '-')} would replace {str(target)!r}, which the command "
                    "reads: name another file"
                )


def _files_read(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the existing files and folders that a command is given to read."""
    for name, value in vars(args).items():
        if name in OUTPUTS or name == "command":
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, (str, os.PathLike)):
                text = os.fspath(one)  # perhaps FILE.py:NAME
                yield from (Path(x) for x in {text, text.rpartition(":")[0]} if os.path.exists(x))


def _holds(path: Path, target: Path) -> bool:
    """Return whether a file is this one, or one of the model in this folder."""
    if path.is_dir():
        return path.samefile(target.parent) and target.name.endswith(_OF_MODELS)
    return path.samefile(target)
