"""The secret of a group of processes: its source, and how the other ranks get it.

If the caller or the environment gives it, it is the same on every rank. Otherwise rank 0 makes a
secret and writes it to a file that only its user may read. Ranks of that user with the same cache
folder (on this host, or on hosts with a shared home) read it there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from cupyattn.compiler.disk_cache import cache_folder, make_folder
from cupyattn.files import check_private, open_regular, replacing

#: The secret itself, and a file that holds it.
VARIABLE, FILE_VARIABLE = "CUPYATTN_GROUP_SECRET", "CUPYATTN_GROUP_SECRET_FILE"
#: Advice at the end of an error message.
ADVICE = f"set {VARIABLE} or {FILE_VARIABLE} to the same on every rank"
#: Characters that a secret has at least, and bytes of a file that are read at most.
LEAST, MOST = 16, 4096


def make() -> bytes:
    """Return a new secret."""
    return secrets.token_hex(32).encode()


def given(secret: str | None, environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that the caller or the environment gives, or None.

    Raises
    ------
    ValueError
        If it is too short, or both variables are set.
    OSError
        If the file cannot be read, or others than its user may.

    Examples
    --------
    >>> given("0123456789abcdef", {})
    b'0123456789abcdef'
    """
    where = "secret"
    if secret is None:
        named, path = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
        if named and path:
            raise ValueError(f"{VARIABLE} and {FILE_VARIABLE} are both set: unset one of them")
        if path:
            return _checked(_read(Path(path).expanduser(), follow_links=True), path)
        if not named:
            return None
        secret, where = named, VARIABLE
    if not isinstance(secret, str):
        raise TypeError(f"secret must be a str, got {type(secret).__name__}")
    return _checked(secret.strip().encode(), where)


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < LEAST:
        raise ValueError(
            f"the group's secret must have at least {LEAST} characters, {where} has {len(secret)}: "
            'make one by python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def _read(path: Path, *, follow_links: bool) -> bytes:
    with open_regular(path, follow_links=follow_links) as file:
        check_private(path, os.fstat(file.fileno()))
        return file.read(MOST).strip()


class Handover:
    """The file in which rank 0 leaves a secret for the other ranks of its user.

    `address` is the address of the group's store as all ranks name it; `path` is in a folder of
    mode 0700 under the cache folder.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        host, port = address
        if host == "localhost" or host.startswith(("127.", "::1")):
            # NOTE: localhost is another address on each host, and hosts may share the folder.
            host = f"{socket.gethostname()}-{host}"
        name = re.sub(r"[^\w.-]", "_", f"{host}-{port}")
        self.path = cache_folder() / "groups" / f"{name}.secret"
        self._left: bytes | None = None

    def leave(self, secret: bytes) -> None:
        """Write the file; OSError if that fails, or if others may enter its folder."""
        folder = self.path.parent
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder, folder.lstat())
        with replacing(self.path, mode=0o600) as file:
            file.write(secret)
        self._left = secret

    def find(self) -> bytes:
        """Return the secret; FileNotFoundError if there is none yet, OSError if not private."""
        return _read(self.path, follow_links=False)

    def remove(self) -> None:
        """Delete the file that this rank left, unless another group has replaced it."""
        with contextlib.suppress(OSError):
            if self._left is not None and self.find() == self._left:
                self.path.unlink()
        self._left = None
