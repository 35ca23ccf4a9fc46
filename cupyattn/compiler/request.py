"""One compilation: the input of NVRTC, and the key under which its output is kept.

The key is made of the source, every header that an ``#include`` reaches, the options and the
version of NVRTC, the architecture among the options.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cupyattn.compiler import disk_cache
from cupyattn.compiler.includes import headers_reached
from cupyattn.compiler.nvrtc import Nvrtc, NvrtcError, Output
from cupyattn.compiler.places import NAMES, Places, anonymous, anonymous_code, shareable
from cupyattn.compiler.ptxas import parse_resources
from cupyattn.switches import is_on


class Request(NamedTuple):
    """The input of one compilation.

    Parameters
    ----------
    compiler : Nvrtc
    path : str
        File of the source, absolute.
    source : str
        What it holds, or what to compile in its place.
    options : tuple of str
        NVRTC's, without the folders of headers.
    places : Places
        Folders that are read.
    anonymous : bool
        Whether the folders are read through links, so that no path is part of output and key.
    key : str
        SHA-256 of all that the output depends on, in hexadecimal.
    """

    compiler: Nvrtc
    path: str
    source: str
    options: tuple[str, ...]
    places: Places
    anonymous: bool
    key: str

    def run(self) -> Output:
        """Compile; if the request is anonymous, with placeholders for the paths of folders.

        Raises
        ------
        NvrtcError
            If it does not compile; the log names the files that were given.
        """
        if not self.anonymous:
            return self._call(self.path, self.places)
        with self.places.linked() as folder:
            links = Places(*(os.path.join(folder, name) for name in NAMES))
            try:
                output = self._call(os.path.join(folder, self.places.relative(self.path)), links)
            except NvrtcError as error:
                error.log = self.places.located(anonymous(error.log, folder))
                raise
        ptx, log = anonymous(output.ptx, folder), anonymous(output.log, folder)
        return Output(ptx, anonymous_code(output.cubin, folder), log)

    def _call(self, path: str, places: Places) -> Output:
        """Compile the source as the file `path`, with the headers of `places`."""
        folders = (os.path.dirname(path), places.kernels, places.headers)
        options = [*self.options, *(f"-I{folder}" for folder in folders)]
        output = self.compiler.compile(self.source, path, options)
        if output.cubin and len(parse_resources(output.log)) < output.ptx.count(".entry "):
            # NOTE: if a driver is installed, NVRTC has a separate cache, and its answers from there
            # lack the report of ptxas.
            output = self.compiler.compile(self.source, path, [*options, "--no-cache"])
        return output


def make_request(
    compiler: Nvrtc,
    path: Path,
    source: str,
    options: Sequence[str],
    kernels: Path,
    headers: Path,
) -> Request:
    """Return the request to compile a source.

    Parameters
    ----------
    compiler : Nvrtc
    path : Path
        File of the source, absolute; quoted includes are looked up beside it first.
    source : str
        What it holds, or what to compile in its place.
    options : sequence of str
        NVRTC's, without the folders of headers.
    kernels : Path
        Folder that ``#include "prims/..."`` starts from.
    headers : Path
        Folder of the CUDA headers.

    Raises
    ------
    KernelCompileError
        If an included file is missing.
    """
    texts = [(os.path.normpath(path), source), *headers_reached(path, source, kernels, headers)]
    places = Places(*map(os.path.normpath, (kernels, path.parent, headers)))
    without_paths = shareable() and not _prints_paths(texts, places)
    key = _key(texts, (compiler.build, options), places if without_paths else None)
    given = compiler, texts[0][0], source, tuple(options)
    return Request(*given, places, without_paths, key)


def _prints_paths(texts: list[tuple[str, str]], places: Places) -> bool:
    """Return whether kernels may hold the path of a source among their data.

    Nothing can replace it there, since characters of strings are numbers in PTX. The library's own
    kernels hold it where CUPYATTN_DEBUG is set.
    """
    return is_on("CUPYATTN_DEBUG") or any(
        "__FILE__" in text for path, text in texts if not path.startswith(f"{places.kernels}/")
    )


def _key(texts: list[tuple[str, str]], facts: tuple[object, ...], places: Places | None) -> str:
    """Return the digest of sources and whatever else a binary depends on.

    Files count by their places among the searched folders. If paths get into the binary, `places`
    is None and they count by their paths.
    """
    digest = hashlib.sha256(json.dumps([disk_cache.FORMAT, *facts, places is None]).encode())
    for path, text in texts:
        place = path if places is None else places.relative(path)
        digest.update(f"\0{place}\0{text}".encode())
    return digest.hexdigest()
