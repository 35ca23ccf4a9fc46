"""Keep paths of sources out of compiled kernels, so equal sources in two checkouts share an entry.

``-lineinfo`` writes the paths of sources into a binary. NVRTC therefore reads them through links
whose paths have a fixed length. `Places.anonymous` replaces those paths by placeholders before a
binary is kept, `Places.located` puts the paths of the reader's own files in their place.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

#: Characters of each link's path. A folder whose path is longer keeps the placeholder in machine
#: code, where only profilers look for it.
LENGTH = 200
#: Links to: the kernels of this library, the folder of the source, the headers of CUDA.
NAMES = ("kernels", "source", "headers")


class Places(NamedTuple):
    """The folders that one compilation reads.

    Parameters
    ----------
    kernels : str
        Folder that ``#include "prims/..."`` starts from.
    source : str
        Folder of the ``.cu`` file.
    headers : str
        Folder of the CUDA headers.
    """

    kernels: str
    source: str
    headers: str

    def relative(self, path: str) -> str:
        """Return the path of a file with the name of its folder in place of the folder.

        Examples
        --------
        >>> places = Places("/here/kernels_cu", "/here/kernels_cu/sm90", "/cuda/include")
        >>> places.relative("/here/kernels_cu/sm90/attn_fa_tc.cu")
        'kernels/sm90/attn_fa_tc.cu'
        """
        for name in NAMES:
            folder = getattr(self, name)
            if path.startswith(f"{folder}{os.sep}"):
                return f"{name}{path[len(folder) :]}"
        return path

    @contextlib.contextmanager
    def linked(self) -> Iterator[str]:
        """Make the links in a temporary folder and yield its path, `LENGTH` characters long."""
        with tempfile.TemporaryDirectory(prefix="cupyattn-") as folder:
            parent = os.path.join(folder, "-" * (LENGTH - len(folder) - 1))
            os.mkdir(parent)
            for name in NAMES:
                os.symlink(getattr(self, name), os.path.join(parent, name))
            yield parent

    def located(self, text: str) -> str:
        """Return a text with these folders in place of the placeholders."""
        for name in NAMES:
            text = text.replace(f"{PLACEHOLDER}/{name}", getattr(self, name))
        return text

    def located_code(self, code: bytes) -> bytes:
        """Return machine code with these folders, whose length slashes fill up, in place of them.

        Nothing in a cubin may move.
        """
        for name in NAMES:
            placeholder = f"{PLACEHOLDER}/{name}".encode()
            folder = os.fsencode(getattr(self, name))
            if len(folder) <= len(placeholder):
                code = code.replace(placeholder, folder.ljust(len(placeholder), b"/"))
        return code


#: Placeholder of the folder of the links in kept files.
PLACEHOLDER = "/cupyattn".ljust(LENGTH, "-")


def shareable() -> bool:
    """Return whether links of `LENGTH` characters fit into the temporary folder."""
    return len(tempfile.gettempdir()) + len("/cupyattn-12345678/-") <= LENGTH


def anonymous(text: str, folder: str) -> str:
    """Return what NVRTC wrote, with the placeholder in place of the folder of the links."""
    return text.replace(folder, PLACEHOLDER)


def anonymous_code(code: bytes, folder: str) -> bytes:
    """Return machine code that NVRTC wrote, with the placeholder in place of that folder."""
    return code.replace(os.fsencode(folder), PLACEHOLDER.encode())
