"""Files: written whole or not at all, opened only if regular, who may write to them; samples."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to errors while it is written, since the error of a full disk has none.

    Examples
    --------
    >>> with naming("model.json"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'model.json'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


@contextmanager
def replacing(path: str | os.PathLike[str], *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of another, or a free place, once all is written.

    If anything fails before that, the old file stays, and nothing is left beside it. Readers never
    see half a file; of several writers the last to end wins.

    Parameters
    ----------
    path : path
        Its folder must exist.
    mode : int
        Permissions of the file, of which the umask takes some away.

    Yields
    ------
    file : binary file
        Beside `path`; by default with the permissions of any new file of this user.

    Raises
    ------
    OSError
        If it cannot be written, or is a device or a pipe; one that names no file gets the name
        `path`.

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
    if target.exists() and not (target.is_file() or target.is_dir()):
        # A device or a pipe would be gone afterwards, and a file in its place.
        raise OSError(errno.EINVAL, "is no regular file: name one to write to", os.fspath(target))
    # NOTE: not by tempfile, whose files only the user may read, regardless of the umask.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with (
            naming(target),
            open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            yield file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> BufferedReader:
    """Open a file to read it, and nothing that is no regular file.

    A pipe would wait for a writer, a socket cannot be read, and a device may do anything.

    Parameters
    ----------
    path : path
    follow_links : bool
        Whether the last part of the path may be a symbolic link.

    Raises
    ------
    OSError
        If it cannot be opened, or is something else.

    Examples
    --------
    >>> open_regular(os.curdir)
    Traceback (most recent call last):
    OSError: '.' is a folder, a regular file is needed
    """
    name = os.fspath(path)
    # NOTE: Windows has none of these flags but the first.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # or opening a pipe waits
    if not follow_links:
        if os.path.islink(name):
            raise OSError(f"{name!r} is a symbolic link, a regular file is needed")
        flags |= getattr(os, "O_NOFOLLOW", 0)  # and it has not become a link since
    before = os.stat(name).st_mode
    if not stat.S_ISREG(before):  # a device may act on being opened, a socket cannot be opened
        raise OSError(f"{name!r} is {_kind(before)}, a regular file is needed")
    descriptor = os.open(name, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"{name!r} is {_kind(mode)}, a regular file is needed")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "no file")


def writable_by_others(status: os.stat_result) -> str | None:
    """Return why another user could change a file or a folder, None where none could.

    This user and root are trusted. Folders above are not looked at: whoever replaces a folder owns
    the new one. Where there are no users by number (Windows) the answer is None.

    Parameters
    ----------
    status : os.stat_result
        Facts of an open file, of the target of a link, or of the link itself.
    """
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"user {status.st_uid} owns it, this is user {os.getuid()}"
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISLNK(status.st_mode) and mode & 0o022:
        return f"other users may write to it (mode {mode:04o}, chmod go-w ends that)"
    return None


def check_private(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise OSError where another user could read or change a file or a folder.

    Parameters
    ----------
    path : path
        For the message.
    status : os.stat_result
        As for `writable_by_others`.
    """
    why = writable_by_others(status)
    mode = stat.S_IMODE(status.st_mode)
    if why is None and hasattr(os, "getuid") and mode & 0o077:
        why = f"other users may use it (mode {mode:04o}, chmod go= ends that)"
    if why is not None:
        raise OSError(f"{os.fspath(path)!r} is not private: {why}")


def check_folder(option: str, path: str | os.PathLike[str]) -> None:
    """Raise OSError where an option's file could not be written, before the work for it."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise OSError(f"{option}: there is no folder {str(folder)!r}")
    if Path(path).is_dir():
        raise OSError(f"{option}: {str(path)!r} is a folder, give a file in it")


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file that `numpy.savez` wrote.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error
        If it is something else, damaged or cut short.
    """
    with open(os.fspath(path), "rb") as raw:  # a number would be a file that is open
        if raw.read(2) != b"PK":  # NumPy takes any other file for a pickle
            raise ValueError("it does not begin as a .npz file does")
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def data_file(name: str) -> Path:
    """Return the path of a file of sample data.

    Parameters
    ----------
    name : str
        ``"qkv_text_encoder.npz"`` or ``"qkv_dit.npz"``; the README.md beside them describes both.

    Returns
    -------
    Path
        Inside the package if it was installed from a wheel, else in ``experiments/data`` of the
        checkout.

    Raises
    ------
    OSError
        If it is in neither.
    """
    package = Path(__file__).resolve().parent
    places = package / "data", package.parent / "experiments" / "data"
    for folder in places:
        if (folder / name).is_file():
            return folder / name
    raise OSError(f"{name} is in neither {places[0]} nor {places[1]}: reinstall cupyattn")
