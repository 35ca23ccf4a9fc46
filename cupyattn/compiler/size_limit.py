"""Limit the size of the compile cache: beyond it, the least recently used entries are deleted.

An entry's modification time is the time of its last use: writing sets it, `disk_cache.read` renews
it. Access times would need no care, but most file systems are mounted so that they stand still.
Entries are always deleted whole. A process that has opened an entry keeps the open file; a later
process compiles again. What a process holds in memory stays there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import NamedTuple

from cupyattn.compiler.disk_cache import (
    ENTRY,
    cache_folder,
    make_folder,
    open_own,
    open_private,
    warn_once,
    why_unused,
)
from cupyattn.files import replacing

VARIABLE = "CUPYATTN_CACHE_SIZE"
#: Bytes by default: a thousand of the largest kernels, which take less than 1 MB each.
DEFAULT = 2**30
#: File of the cache folder that holds the limit which `store` set.
_FILE = "size_limit"
#: Nanoseconds after which a file that is still being written belongs to a process that has died.
_ABANDONED = 3600 * 10**9
#: Names of entries while they are written, as `cupyattn.files.replacing` gives them.
_UNFINISHED = re.compile(rf"\.{ENTRY.pattern}\.[0-9a-f]+\.tmp")
#: Processes that may write to the folder at a time while it stays within its limit. Each lists it
#: and leaves an eighth of the limit free, before it writes more than its part of that eighth. So
#: all writes between two listings fit. Listing thousands of files takes 0.1 s.
_WRITERS, _FREE = 16, 8
#: The limit at this process's last listing of each folder, and the bytes that it may still write.
_room: dict[Path, tuple[int | None, float]] = {}
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

_log = logging.getLogger("cupyattn")


class Limit(NamedTuple):
    """The bytes that the cache may hold (None: any number), and where that is said."""

    bytes: int | None
    source: str


def parse(text: str, name: str) -> int | None:
    """Return the bytes that a size names, None for ``none``.

    Parameters
    ----------
    text : str
    name : str
        Name of the variable or option, for the message.

    Raises
    ------
    ValueError
        If it is no size, or 0.

    Examples
    --------
    >>> parse("512MiB", "--limit"), parse("1.5 GB", "--limit"), parse("none", "--limit")
    (536870912, 1500000000, None)
    """
    if text.strip().lower() == "none":
        return None
    matched = re.fullmatch(r"(\d+)(?:\.(\d+))?\s*([a-z]*)", text.strip().lower(), re.ASCII)
    size = 0
    if matched:
        part = matched[2] or ""
        size = int(matched[1] + part) * _UNITS.get(matched[3], 0) // 10 ** len(part)
    if size < 1:
        raise ValueError(f"{name} must be a size such as 512MiB or 2GB, or none, got {text!r}")
    return size


def current() -> Limit:
    """Return the limit: the environment's, that of the folder, or the default.

    Raises
    ------
    ValueError
        If the environment's is no size.
    """
    if given := os.environ.get(VARIABLE):
        return Limit(parse(given, VARIABLE), VARIABLE)
    path = cache_folder() / _FILE
    try:
        with open_own(path) as file:
            return Limit(parse(file.read(100).decode(), str(path)), "cupyattn cache --limit")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warn_once(path, f"the cache keeps to its default size: {error}")
    return Limit(DEFAULT, "default")


def store(size: int | None) -> None:
    """Keep a limit in the cache folder, for every process without `VARIABLE`.

    Raises
    ------
    OSError
        If the folder does not take it.
    """
    folder = cache_folder()
    if not make_folder(folder):
        raise OSError(f"{str(folder)!r} is not used: {why_unused(folder)}")
    with replacing(folder / _FILE) as file:
        open_private(file)
        file.write(b"none" if size is None else b"%d" % size)


def forget() -> None:
    """Return to the default limit."""
    (cache_folder() / _FILE).unlink(missing_ok=True)


def trim(limit: int | None, newest: str | None = None) -> tuple[int, int]:
    """Delete the least recently used entries until the rest is within a limit.

    Files that a process which died had begun to write are deleted too.

    Parameters
    ----------
    limit : int or None
        Bytes; None deletes no entry.
    newest : str, optional
        Key of an entry that stays, however large it is: the one that was just written.

    Returns
    -------
    (int, int)
        Entries deleted, and their bytes.

    Notes
    -----
    Several processes may do this at the same time, while others read and write. All delete in the
    same order, and an entry that another has deleted counts as deleted. One that was used or
    written since it was listed stays, and the next trim sees it as it is then.
    """
    folder = cache_folder()
    if why_unused(folder):
        return 0, 0
    kept, unfinished = _listed(folder)
    abandoned = time.time_ns() - _ABANDONED
    for file in unfinished:
        if file.used < abandoned:
            _delete(folder / file.name)
    excess = sum(file.size for file in kept) - (math.inf if limit is None else limit)
    deleted = freed = 0
    for file in sorted(kept):
        if excess <= 0:
            break
        path = folder / file.name
        if path.stem == newest or _changed(path, file):
            continue
        gone = _delete(path)
        if gone is None:
            continue
        excess -= file.size
        deleted, freed = deleted + gone, freed + gone * file.size
    if deleted:
        _log.info("deleted %d kernels of the cache (%d bytes): it was full", deleted, freed)
    return deleted, freed


def wrote(limit: int | None, key: str) -> None:
    """Keep the folder within a limit after an entry was written: `trim` where it may be reached.

    Parameters
    ----------
    limit : int or None
        Bytes; None: any number.
    key : str
        Key of the entry to keep.
    """
    folder = cache_folder()
    try:
        size = (folder / f"{key}.bin").lstat().st_size
    except OSError:
        return  # it could not be written, or another process was faster
    listed_for, room = _room.get(folder, (limit, 0.0))
    if listed_for == limit and size <= room:
        _room[folder] = limit, room - size
        return
    free = math.inf if limit is None else limit // _FREE
    trim(None if limit is None else limit - limit // _FREE, key)
    _room[folder] = limit, free / _WRITERS


class _File(NamedTuple):
    """A file as it was listed; the least recently used is the least."""

    used: int  # nanoseconds
    size: int
    inode: int
    name: str


def _listed(folder: Path) -> tuple[list[_File], list[_File]]:
    """Return the entries of the cache, and files that are being written or were left so."""
    kept: list[_File] = []
    unfinished: list[_File] = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            is_entry = ENTRY.fullmatch(entry.name)
            if not is_entry and not _UNFINISHED.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files = kept if is_entry else unfinished
                    files.append(_as_listed(status, entry.name))
    return kept, unfinished


def _as_listed(status: os.stat_result, name: str) -> _File:
    return _File(status.st_mtime_ns, status.st_size, status.st_ino, name)


def _changed(path: Path, listed: _File) -> bool:
    """Whether a file has been used or replaced since it was listed."""
    try:
        return _as_listed(path.lstat(), listed.name) != listed
    except OSError:
        return False  # gone, or deleting it will say why not


def _delete(path: Path) -> bool | None:
    """Delete a file; False if another process has done so, None if that is refused."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:  # Windows refuses while a process reads it
        _log.debug("cannot delete %s: %s", path, error)
        return None
    return True
