"""Find all headers that a CUDA source includes, which the key of the compile cache must cover."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cupyattn.errors import KernelCompileError

_INCLUDE = re.compile(r"[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*(?://.*)?$")
#: An include of a CUDA header. One inside a comment counts too: to strip the comments of two
#: megabytes takes longer than to search them.
_TOOLKIT_INCLUDE = re.compile(rb'#[ \t]*include[ \t]*["<]([^">\n]+)[">]')
_BLOCK_COMMENT = re.compile(r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/")
_toolkit_memo: dict[tuple[str, int, int], tuple[str, tuple[str, ...]]] = {}


def headers_reached(
    source: Path, text: str, kernels: Path, toolkit: Path
) -> Iterator[tuple[str, str]]:
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
    path : str
        Each header once.
    content : str
        Its text; of a CUDA header, the digest.

    Raises
    ------
    KernelCompileError
        If a quoted include is not found, or an include names no file.
    """
    # NOTE: paths are text here, because every launch in the interpreter makes a key. Making a Path
    # would take longer than looking for a file.
    cuda, folders = _join(toolkit), (_join(source.parent), _join(kernels), _join(toolkit))
    seen: set[str] = set()
    queue = [(str(source), text)]
    while queue:
        includer, content = queue.pop()
        for operand in _operands(content):
            path = _resolve(operand, includer, folders)
            if path is None or path in seen:
                continue
            seen.add(path)
            if path.startswith(f"{cuda}{os.sep}"):
                yield from _toolkit_header(path, cuda, seen)
            else:
                header = Path(path).read_text()
                yield path, header
                queue.append((path, header))


@functools.lru_cache(maxsize=256)
def _operands(text: str) -> tuple[str, ...]:
    """Return the operands of the ``#include`` lines of a text, quotes or brackets included."""
    lines = _BLOCK_COMMENT.sub(" ", text).split("\n")
    found = (_INCLUDE.match(line) for line in lines if "include" in line)
    return tuple(match[1] for match in found if match)


def _join(folder: str | Path, name: str = "") -> str:
    """Return a path without ``..``, by its text: asking the file system takes milliseconds."""
    return os.path.normpath(os.path.join(folder, name))


def _resolve(operand: str, includer: str, folders: tuple[str, ...]) -> str | None:
    """Find an included file as NVRTC does; None for one that NVRTC supplies itself."""
    name = operand[1:-1]
    quoted = operand[:1] + operand[-1:] == '""'
    if not quoted and operand[:1] + operand[-1:] != "<>":
        raise KernelCompileError(
            f"{includer}: #include {operand} names no file, so the cache cannot follow it"
        )
    places = (os.path.dirname(includer), *folders) if quoted else folders
    for place in places:
        if os.path.isfile(path := _join(place, name)):
            return path
    if quoted:
        looked = ", ".join(dict.fromkeys(places))
        kernels = Path(folders[1])
        there = sorted((kernels / "prims").rglob(os.path.basename(name)))
        instead = f", but there is {there[0].relative_to(kernels).as_posix()}" if there else ""
        raise KernelCompileError(
            f'{includer}: #include "{name}" was not found in {looked}{instead}'
        )
    return None


def _toolkit_header(path: str, toolkit: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the digests of a CUDA header and of the headers that it includes.

    They are large and change only with the toolkit: read once per process while size and time of
    change stay. Theirs may include what only a host compiler has, so a missing file is no error.
    """
    status = os.stat(path)
    memo_key = (path, status.st_mtime_ns, status.st_size)
    memo = _toolkit_memo.get(memo_key)
    if memo is None:
        content = Path(path).read_bytes()
        names = tuple(map(os.fsdecode, _TOOLKIT_INCLUDE.findall(content)))
        memo = (hashlib.sha256(content).hexdigest(), names)
        _toolkit_memo[memo_key] = memo
    digest, names = memo
    yield path, digest
    for name in names:
        for place in (os.path.dirname(path), toolkit):
            reached = _join(place, name)
            if os.path.isfile(reached):
                if reached not in seen:
                    seen.add(reached)
                    yield from _toolkit_header(reached, toolkit, seen)
                break
