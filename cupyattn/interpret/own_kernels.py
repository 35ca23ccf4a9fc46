"""Runs a kernel that is no rung of the ladder: CUDA source, PTX or a fatbin, without registration.

>>> import numpy as np
>>> from cupyattn import interpret
>>> source = '''
... __global__ void scale(float* x, float a, int n) {
...   int i = blockIdx.x * blockDim.x + threadIdx.x;
...   if (i < n) x[i] *= a;
... }'''
>>> x = np.arange(6, dtype=np.float32)
>>> interpret.launch(source, "scale", 2, 4, (x, np.float32(10), np.int32(6)))
>>> x
array([ 0., 10., 20., 30., 40., 50.], dtype=float32)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from cupyattn.compiler import modules as compiler
from cupyattn.compiler.binary import Binary
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.errors import KernelCompileError, KernelLaunchError
from cupyattn.interpret import fatbin
from cupyattn.interpret.executor import Extents, Geometry, extents, run_program
from cupyattn.interpret.program import Program, entry_points, program, target_of
from cupyattn.interpret.standard_headers import with_names
from cupyattn.plans import records

#: The first directive of a PTX module, after comments.
_PTX = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*\.version\s+\d", re.DOTALL)
#: Name of a CUDA source passed as text, in messages and line numbers.
TEXT_NAME = "source.cu"
#: Largest number of axes of a tensor map.
MAX_AXES = 5
#: Default architecture for compiling CUDA source.
LEAST_ARCH = "sm_80"


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A kernel parameter of type ``CUtensorMap``, which describes an array to the copy engine.

    Parameters
    ----------
    array : numpy.ndarray
        The array, of 1 to 5 axes, the last one contiguous. All maps of one array share its memory.
    box : tuple of int
        Extents of one copy, in the order of the array's axes.
    swizzle : {0, 32, 64, 128}
        Bytes over which shared memory is swizzled: ``CU_TENSOR_MAP_SWIZZLE_NONE`` to ``_128B``.
    """

    array: npt.NDArray[Any]
    box: tuple[int, ...]
    swizzle: int = 128

    def __post_init__(self) -> None:
        array, box = self.array, self.box
        if not 1 <= array.ndim <= MAX_AXES or len(box) != array.ndim:
            raise ValueError(
                f"box must have one extent for each axis of the array, which has 1 to {MAX_AXES}, "
                f"got box={box} for shape {array.shape}"
            )
        if not all(1 <= extent <= 256 for extent in box):
            raise ValueError(f"the extents of box must be 1 to 256, got {box}")
        if array.strides[-1] != array.itemsize:
            raise ValueError(
                f"the last axis of the array must be contiguous, got strides {array.strides}"
            )
        if self.swizzle not in (0, 32, 64, 128):
            raise ValueError(f"swizzle must be 0, 32, 64 or 128 bytes, got {self.swizzle}")
        row = box[-1] * array.itemsize
        if row % 16 or (self.swizzle and row > self.swizzle):
            limit = f" and at most the swizzle, {self.swizzle}" if self.swizzle else ""
            raise ValueError(
                f"the last extent of box must span a multiple of 16 bytes{limit}, got {row} bytes"
            )


def launch(
    source: str | Path | bytes,
    entry: str,
    grid: Extents,
    block: Extents,
    args: Mapping[str, Any] | Sequence[Any],
    *,
    cluster: int | None = None,
    shared_bytes: int = 0,
    arch: str | None = None,
    defines: Mapping[str, int] | None = None,
) -> None:
    """Run any kernel on NumPy arrays, and report its first hazard.

    Parameters
    ----------
    source : str, Path or bytes
        CUDA C++ or PTX as text, or the path of a ``.cu``, ``.ptx`` or ``.fatbin`` file, or the
        bytes of a fatbin with PTX in it. NVRTC compiles CUDA C++.
    entry : str
        Name of the kernel. A C++ name without its parameters (``"scale"``) suffices where the PTX
        has one kernel of that name.
    grid, block : int or tuple of int
        Blocks, and threads in each, along x, y and z.
    args : sequence or mapping of str
        One for each parameter, in order: an array for a pointer, a NumPy scalar for a number
        (``np.int32(3)``), a structured array of one element for a struct, a `TensorMap`, None for
        a null pointer. A tuple of such values is a struct, too, laid out as C does. Arrays receive
        the results after the kernel has ended without a finding. An array that is not writeable is
        an input, and a write to it is a finding. With a mapping, findings use its names instead of
        those in the PTX.
    cluster : int, optional
        Blocks of a cluster along x; the kernel's directive decides when omitted.
    shared_bytes : int
        Dynamic shared memory of a block.
    arch : str, optional
        Architecture to compile CUDA C++ for, ``"sm_80"`` when omitted. PTX names its own.
    defines : mapping of str to int, optional
        Macros for CUDA C++.

    Raises
    ------
    KernelFault
        At the first hazard.
    KernelCompileError
        If the source does not compile.
    KernelLaunchError
        For more threads or shared memory than a block may have, or a grid that clusters do not
        divide.
    PtxError
        For PTX that cannot be read.
    TypeError
        For an argument of the wrong kind or size.
    UnsupportedError
        At an instruction that is not modelled, with its name and line.
    ValueError
        For an entry point that is not there, the wrong number of arguments, or a binary without
        PTX.

    See Also
    --------
    cupyattn.interpret.observe : Counts, bank conflicts, traces and stops of this launch.
    """
    module, ptx = _read(source, arch, tuple((defines or {}).items()))
    ready = program(ptx, entry_name(entry, ptx))
    if cluster is not None:
        ready = _clustered(ready, cluster)
    geometry = Geometry(extents(grid), extents(block), shared_bytes)
    mapped, passed = _with_maps(args)
    run_program(ready, passed, geometry, module, target_of(ptx), mapped)


def _clustered(ready: Program, cluster: int) -> Program:
    """Return a kernel with the cluster size that the launch requests."""
    stated, entry = ready.kernel.cluster, ready.kernel.name
    if cluster < 1 or stated not in (1, cluster):
        states = f"states clusters of {stated}" if stated > 1 else "takes clusters of 1 block up"
        raise KernelLaunchError(f"{entry} {states}, got cluster={cluster}")
    return replace(ready, kernel=ready.kernel._replace(cluster=cluster))


def _read(
    source: str | Path | bytes, arch: str | None, defines: tuple[tuple[str, int], ...]
) -> tuple[ModuleSpec | None, str]:
    """Return the module of a source file, or None for other sources, and the PTX."""
    data = source if isinstance(source, str) else text_of(source)
    if is_ptx(data):
        return None, _text_alone(data, arch, defines)
    arch = arch or LEAST_ARCH
    if isinstance(source, Path):
        module = ModuleSpec(source.resolve(), defines)
        return module, compiled(module, arch, data, compiler.translate).ptx
    if "\n" not in data and "{" not in data:
        raise ValueError(
            f"source must be CUDA C++ or PTX as text, got {data!r}: pass Path({data!r}) for a file"
        )
    return None, compiled(ModuleSpec(TEXT_NAME, defines), arch, data, compiler.translate).ptx


def compiled(
    module: ModuleSpec, arch: str, source: str, build: Callable[[ModuleSpec, str, str], Binary]
) -> Binary:
    """Compile a source that may have been written for nvcc.

    Raises
    ------
    KernelCompileError
        If it does not compile. Host code gets a separate message.
    """
    try:
        return build(module, arch, with_names(source))
    except KernelCompileError as error:
        if "host functions are not allowed" not in str(error):
            raise
        place = re.search(r"\S+\(\d+\)(?=: error:)", str(error))
        raise KernelCompileError(
            f"{place[0] if place else module.source}: NVRTC compiles device code alone: put host "
            "code between #ifndef __CUDACC_RTC__ and #endif"
        ) from error


def text_of(source: Path | bytes) -> str:
    """Return the source or PTX in a file or its contents."""
    try:
        data = source.read_bytes() if isinstance(source, Path) else source
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    try:
        return fatbin.embedded_ptx(data) if fatbin.is_binary(data) else data.decode()
    except UnicodeDecodeError:
        what = str(source) if isinstance(source, Path) else "the source"
        raise ValueError(f"{what} is neither text nor a fatbin") from None


def is_ptx(text: str) -> bool:
    """Whether a text is PTX rather than CUDA C++."""
    return _PTX.match(text) is not None


def _text_alone(ptx: str, arch: str | None, defines: tuple[tuple[str, int], ...]) -> str:
    """Return PTX, which takes no options of a compiler."""
    given = {"arch": arch, "defines": defines}
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{name} is an option of compiling CUDA C++, and the source is PTX: leave it out"
            )
    return ptx


def entry_name(name: str, ptx: str) -> str:
    """Return the name in the PTX of a kernel that may be given by its C++ name.

    Raises
    ------
    ValueError
        If there is no such kernel, or several.
    """
    known = entry_points(ptx)
    if name in known:
        return name
    inner = f"{len(name)}{name}"
    mangled = [k for k in known if re.match(rf"_ZN?(?:\d+\w+?)??{re.escape(inner)}(?!\d)", k)]
    if len(mangled) == 1:
        return mangled[0]
    listed = ", ".join(mangled or known)
    several = "several kernels of the name" if mangled else "no entry point"
    if not known:
        raise ValueError(
            f"the PTX has no kernel at all, so none of the name {name!r}: a template needs an "
            f"instantiation, such as template __global__ void {name}<64>(...);"
        )
    raise ValueError(f"the PTX has {several} {name!r}: entry must be one of {listed}")


def _with_maps(
    args: Mapping[str, Any] | Sequence[Any],
) -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, Any] | Sequence[Any]]:
    """Return the arrays of tensor maps, each once, and the arguments with the plan's maps."""
    names = list(args) if isinstance(args, Mapping) else [f"argument {i}" for i in range(len(args))]
    values = list(args.values()) if isinstance(args, Mapping) else list(args)
    arrays: dict[str, npt.NDArray[Any]] = {}
    of_array: dict[int, str] = {}
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if not isinstance(value, TensorMap):
            continue
        array = value.array
        buffer = of_array.setdefault(id(array), name)
        arrays[buffer] = array
        values[index] = records.TensorMap(
            buffer, array.dtype.name, array.shape, array.strides[:-1], value.box, value.swizzle
        )
    passed = dict(zip(names, values, strict=True)) if isinstance(args, Mapping) else values
    return arrays, passed
