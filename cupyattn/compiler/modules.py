"""Turn a ``.cu`` file into a loaded kernel: NVRTC, the cache with its keys, RawModule.

`build` turns a `ModuleSpec` into a `Binary` with no GPU, no driver and no CuPy; `load` puts that
binary on the current device. This is the only file that mentions ``cupy.RawModule``.

An edited source or header is never answered with an old binary, and equal sources in two checkouts
share one: `cupyattn.compiler.request` makes the keys. `disk_cache` keeps the files, `size_limit`
their number in bounds, and `places` keeps paths out of them.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cupyattn.compiler import disk_cache, nvrtc, size_limit
from cupyattn.compiler.architectures import ARCHITECTURES as ARCHITECTURES
from cupyattn.compiler.architectures import (
    CLUSTER_CAPABILITY,
    E4M3_CAPABILITY,
    LEAST_CAPABILITY,
    check_capability,
)
from cupyattn.compiler.architectures import capability_of as capability_of
from cupyattn.compiler.binary import Binary as Binary
from cupyattn.compiler.binary import read_entry, write_entry
from cupyattn.compiler.devices import check_runs_on, check_shared_memory, device_architecture
from cupyattn.compiler.places import Places
from cupyattn.compiler.ptxas import parse_resources, parse_smem_bytes
from cupyattn.compiler.request import Request, make_request
from cupyattn.errors import KernelCompileError, UnsupportedError
from cupyattn.kernels.features import P_TYPES
from cupyattn.switches import is_on

if TYPE_CHECKING:
    import cupy

#: Folder of the kernels: inside the package where installed, beside it in a checkout.
KERNELS = Path(__file__).resolve().parents[1] / "kernels_cu"
if not KERNELS.is_dir():
    KERNELS = Path(__file__).resolve().parents[2] / "kernels_cu"

#: Options of every compilation; they are part of the numerics (docs/MATH_REFERENCE.md).
OPTIONS = (
    "-std=c++17",
    "-ftz=false",
    "-fmad=true",
    "-prec-div=true",
    "-lineinfo",
    "--ptxas-options=-v",
)
#: Option for our own kernels, known since NVRTC 12.4. No kernel names textures or functions of the
#: CUDA runtime, and to declare them takes 7 ms.
MINIMAL = "--minimal"
SINCE_MINIMAL = (12, 4)

_log = logging.getLogger("cupyattn")


# ---- what to compile, and what comes out ---------------------------------------------------------


@dataclass(frozen=True)
class ModuleSpec:
    """One source, specialised by macros.

    Parameters
    ----------
    source : str or Path
        A ``.cu`` file, relative to `KERNELS` or absolute.
    defines : tuple of (str, int)
        Macros, in the order in which they reach the compiler.

    Examples
    --------
    >>> ModuleSpec("attn_fa.cu", (("CFG_BLOCK_Q", 32),)).path.name
    'attn_fa.cu'
    """

    source: str | Path
    defines: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, source: str | Path, *defines: Mapping[str, int]) -> ModuleSpec:
        """Specialise a source by the macros of tiles, features and others, sorted by name."""
        named = {name: value for some in defines for name, value in some.items()}
        return cls(source, tuple(sorted(named.items())))

    @property
    def path(self) -> Path:
        """The source file, absolute."""
        return KERNELS / self.source

    @property
    def hopper(self) -> bool:
        """Whether this is a Hopper form: its source lies in a folder called ``sm90``."""
        return self.path.parent.name == "sm90"

    @property
    def least_arch(self) -> str:
        """The architecture that it is compiled for where none is named."""
        return "sm_90a" if self.hopper else f"sm_{self.least_capability}"

    @property
    def least_capability(self) -> int:
        """Least compute capability times ten."""
        e4m3 = ("CFG_P_TYPE", P_TYPES.index("e4m3")) in self.defines
        shared = any(name.endswith("SPLITS") and value > 1 for name, value in self.defines)
        if shared:
            return CLUSTER_CAPABILITY
        return E4M3_CAPABILITY if e4m3 else LEAST_CAPABILITY

    def __str__(self) -> str:
        return f"{self.source} [{' '.join(f'{name}={value}' for name, value in self.defines)}]"


# ---- build ---------------------------------------------------------------------------------------

_memory: dict[tuple[str, Places], Binary] = {}
_key_locks: dict[str, threading.Lock] = {}
_state_lock = threading.Lock()
_counts = {"memory_hits": 0, "disk_hits": 0, "compiled": 0}


def build(spec: ModuleSpec, arch: str, source: str | None = None) -> Binary:
    """Compile a source for an architecture, or fetch it from the cache.

    Parameters
    ----------
    spec : ModuleSpec
        What to compile.
    arch : str
        Architecture, for example ``"sm_80"``.
    source : str, optional
        Text to compile as if it stood in the spec's file; that file's own by default.

    Returns
    -------
    Binary

    Raises
    ------
    KernelCompileError
        If the source does not compile, or an included file is missing.
    UnsupportedError
        If there is no NVRTC, or it does not know the architecture, or that lacks the instructions.
    ValueError
        If `arch` is not the name of an architecture.

    Notes
    -----
    Safe from several threads (one compiles, the others wait for it) and several processes (each
    may compile, the last rename wins, and every file is whole).
    """
    return _compiled(spec, arch, arch, source)


def translate(spec: ModuleSpec, arch: str, source: str | None = None) -> Binary:
    """Compile a source to PTX alone, which is all that the interpreter reads.

    Machine code and the report of ptxas take two fifths of the time of `build`.

    Parameters, result and errors are as for `build`, without cubin, resources and errors of
    ptxas.
    """
    capability_of(arch)  # raises for a name that is none
    return _compiled(spec, arch, arch.replace("sm_", "compute_"), source)


def _compiled(
    spec: ModuleSpec, arch: str, target: str, source: str | None, *, recompile: bool = False
) -> Binary:
    """Compile for an architecture or, with the virtual one as `target`, to PTX; or read it.

    `recompile`: compile whatever the cache holds, and replace it.
    """
    asked = _request(spec, arch, target, source)
    with _state_lock:
        lock = _key_locks.setdefault(asked.key, threading.Lock())
    with lock:
        binary = None if recompile else _memory.get((asked.key, asked.places))
        if binary is not None:
            return _count("memory_hits", binary)
        version = asked.compiler.version
        kept = None if recompile else read_entry(asked.key, arch, version, target == arch)
        if kept is not None:
            _count("disk_hits", kept)
        else:
            limit = size_limit.current().bytes  # a wrong one is told before the compiler runs
            kept = _count("compiled", _compile(spec, arch, asked))
            write_entry(asked.key, kept)
            size_limit.wrote(limit, asked.key)
        binary = _located(kept, asked.places)
        _memory[asked.key, asked.places] = binary
        return binary


def _located(kept: Binary, places: Places) -> Binary:
    """Return a binary of the cache with the paths of these folders in it."""
    return replace(
        kept,
        ptx=places.located(kept.ptx),
        cubin=places.located_code(kept.cubin),
        log=places.located(kept.log),
    )


def is_compiled(spec: ModuleSpec, arch: str) -> bool:
    """Return whether `build`, whose parameters and errors these are, has an entry to read."""
    asked = _request(spec, arch, arch, None)
    return (asked.key, asked.places) in _memory or disk_cache.holds(asked.key)


def _request(spec: ModuleSpec, arch: str, target: str, source: str | None) -> Request:
    """Return what to compile, or raise what `build` does."""
    compiler = nvrtc.load()
    if capability_of(arch) not in compiler.capabilities:
        known = ", ".join(f"sm_{value}" for value in compiler.capabilities)
        raise UnsupportedError(
            f"{compiler} does not know {arch}, only {known}: "
            "install a newer nvidia-cuda-nvrtc"
        )
    check_capability(arch, spec.least_capability)
    folder = nvrtc.headers(compiler)
    source = read_source(spec) if source is None else source
    options = [*OPTIONS, f"-arch={target}"]
    if spec.path.is_relative_to(KERNELS) and compiler.version >= SINCE_MINIMAL:
        options.append(MINIMAL)
    options += [f"-D{name}={value}" for name, value in spec.defines]
    if is_on("CUPYATTN_DEBUG"):
        options.append("-DCUPYATTN_DEBUG=1")
    return make_request(compiler, spec.path, source, options, KERNELS, folder)


def _count(what: str, binary: Binary) -> Binary:
    with _state_lock:
        _counts[what] += 1
    return binary


def read_source(spec: ModuleSpec) -> str:
    """Return the text of a spec's file, or raise `KernelCompileError`."""
    try:
        return spec.path.read_text()
    except OSError as error:
        raise KernelCompileError(f"cannot read the source of {spec}: {error}") from error


def _compile(spec: ModuleSpec, arch: str, asked: Request) -> Binary:
    _log.info("compiling %s for %s", spec, arch)
    try:
        output = asked.run()
    except nvrtc.NvrtcError as error:
        raise KernelCompileError(
            f"{asked.compiler} rejected {spec.source} for {arch}: "
            f"{_first_error(error)}\n  defines: {str(spec).partition(' ')[2]}\n"
            f"  options: {' '.join(asked.options)}\n{error.log}".rstrip()
        ) from error
    # How long ptxas took is no property of the binary: without it, equal input gives equal entries.
    log = "".join(
        line for line in output.log.splitlines(keepends=True) if "Compile time" not in line
    )
    kernels = parse_resources(log)
    smem_bytes = parse_smem_bytes(output.ptx)
    version = asked.compiler.version
    return Binary(arch, version, output.ptx, output.cubin, log, kernels, smem_bytes)


def _first_error(error: nvrtc.NvrtcError) -> str:
    """Return the first line of a log that states an error, with its file and line."""
    for line in error.log.splitlines():
        if re.search(r"\berror\b", line):
            return line.strip()
    return str(error)


# ---- the cache -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheInfo:
    """State of the compile cache: its folder, what lies there, what this process did."""

    folder: Path
    entries: int
    bytes: int
    memory_hits: int
    disk_hits: int
    compiled: int


def cache_info() -> CacheInfo:
    """Return what the compile cache holds and how often it answered in this process."""
    folder = disk_cache.cache_folder()
    sizes = []
    for path in disk_cache.entries():
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            sizes.append(path.stat().st_size)
    with _state_lock:
        return CacheInfo(folder, len(sizes), sum(sizes), **_counts)


def cache_clear(*, disk: bool = True) -> int:
    """Forget every compiled kernel.

    Parameters
    ----------
    disk : bool
        Delete the files too; otherwise only this process forgets, and loads anew what it needs.

    Returns
    -------
    int
        Files deleted.
    """
    with _state_lock:
        _memory.clear()
    with _load_lock:
        _modules.clear()
        GENERATION[0] += 1
    deleted = 0
    if disk:
        for path in disk_cache.entries():
            path.unlink(missing_ok=True)
            deleted += 1
    return deleted


# ---- load ----------------------------------------------------------------------------------------

_modules: dict[tuple[ModuleSpec, str | None, int], Module] = {}
#: Number of times that ready calls became stale (`generation`).
GENERATION = [0]
_load_lock = threading.Lock()


class Module:
    """A binary on a device: its kernels, ready to launch.

    Parameters
    ----------
    binary : Binary
        What was loaded.
    raw : cupy.RawModule
        The module that holds it.
    """

    def __init__(self, binary: Binary, raw: cupy.RawModule) -> None:
        self.binary = binary
        self._kernels = {name: raw.get_function(name) for name in binary.kernels}
        for kernel in self._kernels.values():
            if binary.smem_bytes:
                kernel.max_dynamic_shared_size_bytes = binary.smem_bytes

    def kernel(self, entry: str) -> cupy.RawKernel:
        """Return a kernel, its dynamic shared memory already allowed.

        Raises
        ------
        ValueError
            If there is none of that name.
        """
        try:
            return self._kernels[entry]
        except KeyError:
            names = ", ".join(sorted(self._kernels))
            raise ValueError(f"entry must be one of {names}, got {entry!r}") from None


def load(spec: ModuleSpec, arch: str | None = None) -> Module:
    """Compile a source for the current device and load it there.

    Parameters
    ----------
    spec : ModuleSpec
        What to load.
    arch : str, optional
        Architecture; by default the device's own (`device_architecture`).

    Returns
    -------
    Module
        The same one for every call with this spec on this device. An edited source is seen by
        `build` at once, by `load` after `cache_clear`.

    Raises
    ------
    KernelCompileError
        If the source does not compile.
    KernelLaunchError
        If it needs more shared memory than the device has.
    UnsupportedError
        If the device is older than compute capability 8.0, or cannot run `arch`.
    """
    import cupy

    device = cupy.cuda.Device()
    slot = (spec, arch, device.id)
    module = _modules.get(slot)
    if module is not None:
        return module
    capability = int(device.compute_capability)
    chosen = architecture(spec, arch, capability)
    check_runs_on(chosen, capability)
    binary = build(spec, chosen)
    limit = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
    static = max((kernel.static_smem for kernel in binary.kernels.values()), default=0)
    check_shared_memory(binary.smem_bytes + static, limit, str(spec))
    with _load_lock:
        if slot not in _modules:
            _modules[slot] = _loaded(spec, chosen, binary)
        return _modules[slot]


def is_loaded(spec: ModuleSpec, arch: str | None = None) -> bool:
    """Return whether `load` has been called with these on the current device."""
    import cupy

    return (spec, arch, cupy.cuda.Device().id) in _modules


def architecture(spec: ModuleSpec, arch: str | None, capability: int) -> str:
    """Return what `load` compiles a source for: `arch`, or `device_architecture`'s."""
    return device_architecture(capability, spec.hopper) if arch is None else arch


def generation() -> int:
    """Return how often the cache was cleared, or the ladder changed: what was made ready before is
    stale."""
    return GENERATION[0]


def renew() -> None:
    """Let all that was made ready be stale: the ladder changed."""
    with _load_lock:
        GENERATION[0] += 1


def _loaded(spec: ModuleSpec, arch: str, binary: Binary) -> Module:
    """Load a binary; where the device refuses one from the cache, compile it once more."""
    try:
        return _load_module(binary)
    except Exception as error:  # CuPy's, of the driver
        fresh = _compiled(spec, arch, arch, None, recompile=True)
        if fresh == binary:
            raise
        _log.warning("the device refuses the cache's entry of %s (%s): compiled again", spec, error)
        return _load_module(fresh)


def _load_module(binary: Binary) -> Module:
    import cupy

    # NOTE: RawModule takes a path and may open it again for each kernel that it hands out, and on
    # each device. Modules are made per device here and hand out all their kernels at once, so the
    # file need not outlive this call.
    with tempfile.TemporaryDirectory(prefix="cupyattn-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.cubin)
        return Module(binary, cupy.RawModule(path=str(path)))


def load_code(code: bytes, entry: str) -> cupy.RawKernel:
    """Load PTX or machine code that is not of this library, and return one of its kernels.

    Raises
    ------
    UnsupportedError
        If the device refuses it, for example PTX that is newer than the driver.
    """
    import cupy

    with tempfile.TemporaryDirectory(prefix="cupyattn-") as folder:
        path = Path(folder) / "kernel"
        path.write_bytes(code)
        try:
            kernel = cupy.RawModule(path=str(path)).get_function(entry)
            kernel.kernel  # noqa: B018  (loads it while the file is there)
        except cupy.cuda.driver.CUDADriverError as error:
            raise UnsupportedError(f"the device refuses the code of {entry}: {error}") from error
    return kernel
