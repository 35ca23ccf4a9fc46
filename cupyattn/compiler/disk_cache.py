"""Files of compiled kernels: whole or absent, checked when read, in one folder.

An entry is one file; one that does not read back correctly counts as absent. A kernel is code, so a
folder or an entry that another user owns or may write to is not used. An entry's modification time
is that of its last use, to the hour; `cupyattn.compiler.size_limit` deletes by it.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import BinaryIO

from cupyattn.files import open_regular, replacing, writable_by_others

#: Changes when the layout of an entry, or what goes into its key, changes.
FORMAT = 3
#: Bytes of an entry that are read at most: kernels have a few million.
MOST = 2**28
#: Seconds for which an entry that was used is not marked as used again.
USE_INTERVAL = 3600.0
#: Names of entries: a folder that the user chose may hold other files, which are none of ours.
ENTRY = re.compile(r"[0-9a-f]{64}\.bin")
_MAGIC = b"cupyattn-binary-%d\n" % FORMAT

_log = logging.getLogger("cupyattn")
_lock = threading.Lock()
_warned: set[Path] = set()


def cache_folder() -> Path:
    """Return the folder of the cache: ``CUPYATTN_CACHE_DIR``, else under the user's cache home.

    For a user without a home folder it lies in the temporary folder, which a warning tells once.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get("CUPYATTN_CACHE_DIR") or os.path.join(home, "cupyattn")
    found = os.path.expanduser(given)
    if not (given.startswith("~") and found.startswith("~")):
        return Path(found)
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    path = Path(tempfile.gettempdir()) / f"cupyattn-{user}"
    warn_once(Path(given), f"{given} means nothing without a home folder: the cache is {path}")
    return path


def entries() -> list[Path]:
    """Return the files of the cache."""
    found = regular_files(cache_folder(), ".bin")
    return [path for path in found if ENTRY.fullmatch(path.name)]


def regular_files(folder: Path, suffix: str) -> list[Path]:
    """Return the regular files of a folder with this suffix: no links, pipes or folders."""
    try:
        with os.scandir(folder) as found:
            return [
                Path(entry.path)
                for entry in found
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def why_unused(folder: Path) -> str | None:
    """Return why a folder is not used as a cache, or None if it is used or does not exist."""
    try:
        status, target = folder.lstat(), folder.stat()
    except OSError:
        return None  # opening a file in it raises the error
    # NOTE: the owner of a link decides its target.
    return writable_by_others(status) or writable_by_others(target)


def open_own(path: Path) -> BinaryIO:
    """Open a file of a cache to read it.

    Raises
    ------
    FileNotFoundError
        If it is not there, or its folder is not used, of which a warning has told.
    OSError
        If it is no regular file, or another user owns it or may write to it.
    """
    if why := why_unused(path.parent):
        warn_once(path.parent, f"the cache {path.parent} is not used: {why}")
        raise FileNotFoundError(str(path))
    file = open_regular(path, follow_links=False)
    why = writable_by_others(os.fstat(file.fileno()))
    if why is not None:
        file.close()
        raise OSError(f"{str(path)!r} is not used: {why}")
    return file


def make_folder(folder: Path) -> bool:
    """Make the cache folder, or one in it, writable by this user alone.

    Returns
    -------
    bool
        Whether it may be used: it may have existed with other permissions.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    for made in (cache_folder(), folder):
        made.mkdir(mode=0o755, parents=True, exist_ok=True)
    if why := why_unused(folder):
        warn_once(folder, f"the cache {folder} is not used: {why}")
        return False
    return True


def read(key: str) -> bytes | None:
    """Return what was written under a key, None where there is nothing or it is damaged.

    Parameters
    ----------
    key : str
        A SHA-256 digest in hexadecimal.
    """
    path = cache_folder() / f"{key}.bin"
    try:
        with open_own(path) as file:
            content, used = file.read(MOST), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read %s (%s): compiling again", path, error)
        return None
    checksum, payload = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if not content.startswith(_MAGIC) or _checksum(key, payload) != checksum:
        _log.warning("%s is damaged: compiling again", path)
        return None
    _mark_used(path, used)
    return payload


def holds(key: str) -> bool:
    """Return whether something lies under a key, damaged or not."""
    return (cache_folder() / f"{key}.bin").is_file()


def _mark_used(path: Path, before: float) -> None:
    """Renew the time of an entry's last use; a folder that refuses is no reason to fail."""
    now = time.time()
    if abs(now - before) > USE_INTERVAL:  # also if a clock was wrong and it lies in the future
        with contextlib.suppress(OSError):
            os.utime(path, (now, now))


def write(key: str, payload: bytes) -> None:
    """Write an entry whole, or warn once that the folder does not take it."""
    folder = cache_folder()
    try:
        if not make_folder(folder):
            return
        with replacing(folder / f"{key}.bin") as file:
            open_private(file)
            file.write(_MAGIC + _checksum(key, payload) + payload)
    except OSError as error:
        warn_once(folder, f"cannot keep compiled kernels in {folder}: {error}")


def open_private(file: BinaryIO) -> None:
    """Allow only this user to write to a new file, whatever the umask is."""
    if hasattr(os, "fchmod"):
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~0o022)


def _checksum(key: str, payload: bytes) -> bytes:
    """Return a hash of the key too: an entry that was renamed is another kernel."""
    return hashlib.sha256(key.encode() + b"\n" + payload).digest()


def warn_once(path: Path, message: str) -> None:
    """Log a warning about a folder or a file, the first time only."""
    with _lock:
        first = path not in _warned
        _warned.add(path)
    if first:
        _log.warning("%s", message)
