"""NVRTC, NVIDIA's run-time compiler, through ctypes: CUDA C++ in, PTX and cubin out.

No GPU, no driver and no CuPy are needed. CuPy has another binding. This one works without CuPy, and
keeps the last byte of the cubin, without which disassemblers refuse the file. It can also hold a
second NVRTC beside CuPy's, to compare two versions of ptxas
(``CUPYATTN_NVRTC=/path/to/libnvrtc.so``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cupyattn.errors import UnsupportedError

#: Advice if NVRTC or its headers are missing.
INSTALL_HINT = (
    'pip install -e ".[cuda13]" in a checkout (or ".[cuda12]" for a CUDA 12 driver, or '
    "nvidia-cuda-nvrtc nvidia-cuda-runtime for the interpreter alone)"
)
#: Library names that the loader itself may know, newest first.
SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
#: Folders of the wheels under ``site-packages/nvidia`` that hold the library.
_WHEEL_LIBRARIES = ("cu13/lib", "cuda_nvrtc/lib")
#: Folders of the wheels under ``site-packages/nvidia`` that hold ``cuda_fp16.h``.
_WHEEL_HEADERS = ("cu13/include", "cuda_runtime/include")

_SUCCESS = 0

_lock = threading.Lock()
_loaded: dict[str, Nvrtc] = {}


class NvrtcError(RuntimeError):
    """NVRTC reported a failure.

    Parameters
    ----------
    message : str
        What NVRTC calls the failure.
    log : str
        The compilation log, empty where there is none.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Output(NamedTuple):
    """Result of one compilation: PTX text, a whole cubin, and the compiler's log."""

    ptx: str
    cubin: bytes
    log: str


class Nvrtc:
    """One loaded NVRTC library.

    Parameters
    ----------
    path : str
        The shared library, or a name that the system's loader can resolve.

    Raises
    ------
    UnsupportedError
        If it cannot be loaded, or is not NVRTC.
    """

    def __init__(self, path: str) -> None:
        #: Folder of the library; None where the system's loader resolved a bare name.
        self.folder = Path(path).resolve().parent if os.path.dirname(path) else None
        try:
            if self.folder is not None:
                # NOTE: NVRTC opens its builtins by bare name, which the loader only finds in a
                # wheel's folder when the library is in the process already.
                for builtins in sorted(self.folder.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins))
            self._library = ctypes.CDLL(path)
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                f"{path} is not a usable NVRTC ({error}): {INSTALL_HINT}"
            ) from error
        self.path = path

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            what = self._library.nvrtcGetErrorString(status).decode()
            raise NvrtcError(f"{name}: {what}")

    def __str__(self) -> str:
        return f"NVRTC {'.'.join(map(str, self.version))}"

    @cached_property
    def version(self) -> tuple[int, int]:
        """Version of the compiler, for example ``(13, 0)``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    @cached_property
    def build(self) -> tuple[int, ...]:
        """Version and size of the library, which tells patch releases of one version apart."""
        size = os.path.getsize(self.path) if self.folder is not None else 0
        return (*self.version, size)

    @cached_property
    def capabilities(self) -> tuple[int, ...]:
        """Compute capabilities times ten that it compiles for, rising: ``(75, 80, ...)``."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return tuple(sorted(values))

    def compile(self, source: str, name: str, options: Sequence[str]) -> Output:
        """Compile one source.

        Parameters
        ----------
        source : str
            CUDA C++.
        name : str
            File name for messages and line information; quoted includes are looked up beside it.
        options : sequence of str
            NVRTC's own options; they must name a real architecture (``-arch=sm_80``) for there to
            be a cubin.

        Returns
        -------
        Output

        Raises
        ------
        NvrtcError
            If it does not compile; ``.log`` holds the compiler's messages.
        """
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            os.fsencode(name),
            0,
            None,
            None,
        )
        try:
            encoded = [os.fsencode(option) for option in options]
            status = self._library.nvrtcCompileProgram(
                program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
            )
            log = self._fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0")
            if status != _SUCCESS:
                what = self._library.nvrtcGetErrorString(status).decode()
                raise NvrtcError(what, log)
            ptx = self._fetch(program, "PTX").decode().rstrip("\0")
            return Output(ptx, self._fetch(program, "CUBIN"), log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw


def load() -> Nvrtc:
    """Return the NVRTC of this environment, loaded once.

    Looked for in this order: ``CUPYATTN_NVRTC``, one that the process has loaded, the NVIDIA
    wheels' folders, `cuda.pathfinder` (it comes with CuPy), the system's loader. To compare two
    versions in one process, call this before naming the second: CuPy, too, takes the first that
    the process holds.

    Returns
    -------
    Nvrtc

    Raises
    ------
    UnsupportedError
        If there is none; the message says what to install.
    """
    override = os.environ.get("CUPYATTN_NVRTC", "")
    with _lock:
        if override not in _loaded:
            _loaded[override] = Nvrtc(override) if override else _find()
        return _loaded[override]


def _find() -> Nvrtc:
    failures = []
    for candidate in _candidates():
        try:
            return Nvrtc(candidate)
        except UnsupportedError as error:  # what to install is said once, for all of them
            failures.append(f"{candidate} ({error.__cause__})")
    raise UnsupportedError(
        f"NVRTC was not found: {INSTALL_HINT} (cupyattn docs troubleshooting). "
        f"Tried: {'; '.join(failures)}"
    )


def _candidates() -> Iterator[str]:
    """Yield the places where NVRTC may be, the likeliest first."""
    wheels = [
        str(path)
        for folder in _wheel_folders(_WHEEL_LIBRARIES)
        for path in (folder / name for name in SONAMES)
        if path.is_file()
    ]
    loaded = any(map(_is_loaded, SONAMES))
    if not loaded:
        # NOTE: pathfinder finds them too, but its import takes longer than reading a kept kernel.
        yield from wheels
    try:
        from cuda import pathfinder
    except ImportError:
        pass
    else:
        try:
            found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
        except RuntimeError:  # DynamicLibNotFoundError; older releases raise plain RuntimeError
            found = None
        # NOTE: pathfinder returns a library that the process has already loaded. That may be the
        # second NVRTC, named by CUPYATTN_NVRTC earlier, which must not become the default.
        named = {os.path.realpath(library.path) for name, library in _loaded.items() if name}
        if found and os.path.realpath(found) not in named:
            yield found
    if loaded:
        yield from wheels
    yield from SONAMES


def _is_loaded(soname: str) -> bool:
    """Return whether the process holds a library of this name, whoever loaded it."""
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _wheel_folders(relative: Sequence[str]) -> Iterator[Path]:
    """Yield folders of NVIDIA's wheels, which share the namespace package ``nvidia``."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return
    for root in spec.submodule_search_locations:
        for name in relative:
            yield Path(root) / name


def headers(library: Nvrtc) -> Path:
    """Return the folder of the CUDA headers that belong to an NVRTC.

    Parameters
    ----------
    library : Nvrtc
        The headers beside it come first, so that both are of one release.

    Returns
    -------
    Path
        A folder that holds ``cuda_fp16.h``.

    Raises
    ------
    UnsupportedError
        If there is none; the message says what to install.
    """
    folders: list[Path] = []
    if library.folder is not None:
        folders.append(library.folder.parent / "include")  # a toolkit, the CUDA 13 wheels
        folders.append(library.folder.parents[1] / "cuda_runtime" / "include")  # the CUDA 12 wheels
    folders += _wheel_folders(_WHEEL_HEADERS)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            folders.append(Path(os.environ[name]) / "include")
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise UnsupportedError(
        f"the CUDA headers (cuda_fp16.h) were not found: {INSTALL_HINT}; looked in "
        + ", ".join(map(str, folders))
    )
