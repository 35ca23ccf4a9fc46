"""Which headers a CUDA source reaches: what the key of the compile cache has to cover."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cupyattn.errors import KernelCompileError

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*(?://.*)?$", re.MULTILINE)
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_toolkit_memo: dict[tuple[str, int, int], tuple[str, tuple[str, ...]]] = {}


def headers_reached(
    source: Path, text: str, kernels: Path, toolkit: Path
) -> Iterator[tuple[Path, str]]:
    """Follow the ``#include`` lines of a source, and of what they name, to the end.

    Conditions are not evaluated: a header inside an ``#if`` counts, so that no key is too narrow.

    Parameters
    ----------
    source : Path
        The ``.cu`` file, absolute.
    text : str
        What it holds.
    kernels : Path
        Folder that ``#include "prims/..."`` starts from.
    toolkit : Path
        Folder of the CUDA headers.

    Yields
    ------
    path : Path
        Each header once.
    content : str
        Its text; of a CUDA header, the digest.

    Raises
    ------
    KernelCompileError
        If a quoted include is not found, or an include names no file.
    """
    toolkit = _join(toolkit, "")
    seen: set[Path] = set()
    queue: list[tuple[Path, str]] = [(source, text)]
    while queue:
        includer, content = queue.pop()
        for operand in _operands(content):
            path = _resolve(operand, includer, (source.parent, kernels, toolkit))
            if path is None or path in seen:
                continue
            seen.add(path)
            if path.is_relative_to(toolkit):
                yield from _toolkit_header(path, toolkit, seen)
            else:
                header = path.read_text()
                yield path, header
                queue.append((path, header))


@functools.lru_cache(maxsize=256)
def _operands(text: str) -> tuple[str, ...]:
    """Return the operands of the ``#include`` lines of a text, quotes or brackets included."""
    return tuple(_INCLUDE.findall(_BLOCK_COMMENT.sub(" ", text)))


def _join(folder: Path, name: str) -> Path:
    """Return a path without ``..``, by its text: asking the file system takes milliseconds."""
    return Path(os.path.normpath(folder / name))


def _resolve(operand: str, includer: Path, folders: tuple[Path, ...]) -> Path | None:
    """Find an included file as NVRTC does; None for one that NVRTC supplies itself."""
    name = operand[1:-1]
    quoted = operand[:1] + operand[-1:] == '""'
    if not quoted and operand[:1] + operand[-1:] != "<>":
        raise KernelCompileError(
            f"{includer}: #include {operand} names no file, so the cache cannot follow it"
        )
    places = (includer.parent, *folders) if quoted else folders
    for place in places:
        if os.path.isfile(path := _join(place, name)):
            return path
    if quoted:
        looked = ", ".join(dict.fromkeys(map(str, places)))
        raise KernelCompileError(f'{includer}: #include "{name}" was not found in {looked}')
    return None


def _toolkit_header(path: Path, toolkit: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the digest of a CUDA header and of those that it reaches.

    They are large and change only with the toolkit: read once per process while size and time of
    change stay. Theirs may include what only a host compiler has, so a missing file is no error.
    """
    status = path.stat()
    memo_key = (str(path), status.st_mtime_ns, status.st_size)
    memo = _toolkit_memo.get(memo_key)
    if memo is None:
        text = path.read_text(errors="replace")
        names = tuple(operand.strip('"<>') for operand in _operands(text))
        memo = (hashlib.sha256(text.encode()).hexdigest(), names)
        _toolkit_memo[memo_key] = memo
    digest, names = memo
    yield path, digest
    for name in names:
        for place in (path.parent, toolkit):
            reached = _join(place, name)
            if os.path.isfile(reached):
                if reached not in seen:
                    seen.add(reached)
                    yield from _toolkit_header(reached, toolkit, seen)
                break
