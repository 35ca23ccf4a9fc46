"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of another, or a free place, once all is written.

    Where anything goes wrong before that, what stood there stays, and nothing is left beside it.
    Readers never see half a file; of several writers the last to end wins.

    Parameters
    ----------
    path : path
        Its folder must exist.

    Yields
    ------
    file : binary file
        Beside `path`, with the permissions of any new file of this user.

    Raises
    ------
    OSError
        If it cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "greeting"
    ...     with replacing(path) as file:
    ...         _ = file.write(b"hello")
    ...     path.read_text(), len(os.listdir(folder))
    ('hello', 1)
    """
    target = Path(path)
    # NOTE: not by tempfile, whose files nobody but the user may read, whatever the umask says.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
