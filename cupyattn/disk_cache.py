"""Files of compiled kernels: whole or absent, checked when read, in one folder.

An entry is one file; one that does not read back correctly counts as absent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path

from cupyattn.files import replacing

#: Changes when the layout of an entry, or what goes into its key, changes.
FORMAT = 1
_MAGIC = b"cupyattn-binary-%d\n" % FORMAT

_log = logging.getLogger("cupyattn")
_lock = threading.Lock()
_warned_folders: set[Path] = set()


def cache_folder() -> Path:
    """Return the folder of the cache: ``CUPYATTN_CACHE_DIR``, else under the user's cache home."""
    if os.environ.get("CUPYATTN_CACHE_DIR"):
        return Path(os.environ["CUPYATTN_CACHE_DIR"]).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "cupyattn"


def entries() -> list[Path]:
    """Return the files of the cache."""
    return list(cache_folder().glob("*.bin"))


def read(key: str) -> bytes | None:
    """Return what was written under a key, None where there is nothing or it is damaged."""
    path = cache_folder() / f"{key}.bin"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read %s (%s): compiling again", path, error)
        return None
    checksum, payload = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != checksum:
        _log.warning("%s is damaged: compiling again", path)
        return None
    return payload


def write(key: str, payload: bytes) -> None:
    """Write an entry whole, or warn once that the folder does not take it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}.bin") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        with _lock:
            first = folder not in _warned_folders
            _warned_folders.add(folder)
        if first:
            _log.warning("cannot keep compiled kernels in %s: %s", folder, error)
