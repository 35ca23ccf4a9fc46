"""Run a plan in the interpreter, with the same launches, parameters and workspace as on a device.

`run_kernel` runs any kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
import numpy.typing as npt

from cupyattn.arrays.memory import fresh
from cupyattn.compiler import devices
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.architectures import shared_memory_of
from cupyattn.compiler.modules import Binary, ModuleSpec
from cupyattn.compiler.ptxas import parse_smem_bytes
from cupyattn.errors import KernelLaunchError
from cupyattn.interpret.bulk import TENSOR_MAP_MARK, Tensor
from cupyattn.interpret.findings import KernelFault
from cupyattn.interpret.machine import BoundLaunch, Machine
from cupyattn.interpret.memory import GlobalMemory, duplicate
from cupyattn.interpret.observer import Observer, active
from cupyattn.interpret.ordering import Bools
from cupyattn.interpret.program import Program, program, target_of
from cupyattn.interpret.ptx import Parameter
from cupyattn.plans.records import Launch, TensorMap

if TYPE_CHECKING:
    from cupyattn.plans.records import Runnable

#: Bytes that the blocks of one batch may take together; one block always runs.
MEMORY_BUDGET = 512 << 20
#: First architecture on which launches overlap. On older ones a kernel never waits for a launch.
OVERLAPPING = 90
#: Threads that a block may have on any device.
MAX_BLOCK = 1024
#: Extents of a grid or a block: a number in x, or up to three numbers in x, y and z.
Extents: TypeAlias = "int | tuple[int, ...]"


def extents(given: Extents) -> tuple[int, int, int]:
    """Return extents in x, y and z; x is 0 if one of them is not a positive number."""
    numbers = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"a grid or a block has 1 to 3 extents, got {numbers}")
    x, y, z = (*numbers, 1, 1)[:3]
    return (x, y, z) if min(x, y, z) > 0 else (0, 1, 1)


class Geometry(NamedTuple):
    """Extents of a launch: blocks, threads, and the dynamic shared memory of a block.

    Parameters
    ----------
    grid, block : tuple of int
        Extents in x, y and z.
    shared_bytes : int
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)


class OwnLaunch(NamedTuple):
    """The description of a kernel without a plan, for observers."""

    module: ModuleSpec | None
    entry: str
    grid: int
    block: int


def run(plan: Runnable, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan on NumPy arrays.

    Parameters
    ----------
    plan : Runnable
    buffers : mapping of str to numpy.ndarray or None
        Every buffer that the launches name, except the workspace. Arrays that are not writeable are
        inputs: a write to one is a hazard. The other arrays receive the results after all kernels
        have ended without a hazard.
    arch : str, optional
        Architecture to compile for; ``"sm_80"`` when omitted.

    Raises
    ------
    KernelFault
        At the first hazard.
    KernelLaunchError
        If a block needs more shared memory than the architecture allows.
    TypeError
        For an array that is not NumPy's.
    UnsupportedError
        At an instruction that the interpreter does not know.
    """
    arrays = {name: a for name, a in buffers.items() if a is not None}
    for name, a in arrays.items():
        check_numpy(a, name)
    results = {name: duplicate(a) for name, a in arrays.items() if a.flags.writeable}
    held = {**arrays, **results}
    undefined: dict[str, Bools] = {}
    for work in plan.workspace:
        made = held[work.name] = fresh(work.shape, work.dtype, work.zeros)
        if not work.zeros:
            undefined[work.name] = np.ones(made.nbytes, np.bool_)
    for one in plan.launches:
        binary = compiler.translate(one.module, arch or one.module.least_arch)
        run_launch(one, binary, held, undefined)
    for name, result in results.items():
        arrays[name][...] = result


def run_launch(
    one: Launch,
    binary: Binary,
    arrays: Mapping[str, npt.NDArray[Any]],
    undefined: dict[str, Bools],
) -> None:
    """Run one launch, changing `arrays` that are writeable.

    Parameters
    ----------
    one : Launch
    binary : Binary
        Its module, compiled.
    arrays : mapping of str to numpy.ndarray
        Buffers and workspace.
    undefined : dict of str to numpy.ndarray of bool
        Which bytes of an array no launch has written yet, by its name. Bytes that the kernel writes
        are taken out.
    """
    ready = program(binary.ptx, one.entry)
    awaits = one.awaits if int(binary.arch[3:].rstrip("af")) >= OVERLAPPING else ()
    memory = GlobalMemory(ready.granules["global"])
    addresses = {
        name: memory.add(
            name,
            arrays[name],
            undefined=undefined.pop(name, None),
            writable=arrays[name].flags.writeable,
            awaited=name in awaits,
        )  # fmt: skip
        for name in _names(one)
    }
    params, tensors = _params(one, ready, addresses)
    shared = binary.smem_bytes if one.dynamic_shared else 0
    devices.check_shared_memory(
        ready.shared_bytes + shared, shared_memory_of(binary.arch), str(one.module), binary.arch
    )
    observers = active()
    for observer in observers:
        observer.launch(one, ready, binary.arch)
    geometry = Geometry(extents(one.grid), extents(one.block), shared)
    _launch(ready, memory, params, tensors, geometry, observers)
    undefined.update(memory.give_back())


def run_kernel(
    source: ModuleSpec | str,
    entry: str,
    arguments: Mapping[str, Any] | Sequence[Any],
    *,
    block: Extents,
    grid: Extents = 1,
    shared: int | None = None,
    mapped: Mapping[str, npt.NDArray[Any]] | None = None,
    arch: str | None = None,
) -> None:
    """Run any kernel on NumPy arrays.

    Parameters
    ----------
    source : ModuleSpec or str
        CUDA C++ to compile, or the text of a PTX module.
    entry : str
        Name of the kernel.
    arguments : sequence or mapping of str
        One for each parameter, in order: an array for a pointer, a NumPy scalar for a number, a
        record (a structured array of one element) for a struct, a `TensorMap`, None for a null
        pointer. Arrays that are not writeable are inputs: a write to one is a hazard. The other
        arrays receive the results after the kernel has ended without a hazard. Findings use the
        names of a mapping instead of those in the PTX.
    block, grid : int or tuple of int
        Threads of a block, and blocks, in x, y and z.
    shared : int, optional
        Bytes of dynamic shared memory; the module's ``smem_bytes`` when omitted.
    mapped : mapping of str to numpy.ndarray, optional
        The buffers that tensor maps name.
    arch : str, optional
        Architecture to compile for; ``"sm_80"`` when omitted, the target of PTX.

    Raises
    ------
    KernelFault
        At the first hazard.
    KernelLaunchError
        For more threads than the kernel takes, or more shared memory than a block may have.
    PtxError
        For PTX that cannot be read.
    TypeError
        For an argument of the wrong kind.
    UnsupportedError
        At an instruction that the interpreter does not know.
    ValueError
        For an entry point that the module does not have, or the wrong number of arguments.

    Examples
    --------
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry twice(.param .u64 x) {
    ...   .reg .b32 %r<4>;
    ...   .reg .b64 %rd<4>;
    ...   ld.param.u64 %rd1, [x];
    ...   mov.u32 %r1, %tid.x;
    ...   mad.wide.u32 %rd2, %r1, 4, %rd1;
    ...   ld.global.u32 %r2, [%rd2];
    ...   shl.b32 %r3, %r2, 1;
    ...   st.global.u32 [%rd2], %r3;
    ...   ret;
    ... }'''
    >>> x = np.arange(4, dtype=np.int32)
    >>> run_kernel(ptx, "twice", [x], block=4)
    >>> x
    array([0, 2, 4, 6], dtype=int32)
    """
    module = None
    if isinstance(source, ModuleSpec):
        module, arch = source, arch or source.least_arch
        source = compiler.translate(source, arch).ptx
    ready = program(source, entry)
    if shared is None:
        shared = parse_smem_bytes(source)
    geometry = Geometry(extents(grid), extents(block), shared)
    run_program(ready, arguments, geometry, module, arch or target_of(source), mapped or {})


def run_program(
    ready: Program,
    arguments: Mapping[str, Any] | Sequence[Any],
    geometry: Geometry,
    module: ModuleSpec | None,
    arch: str,
    mapped: Mapping[str, npt.NDArray[Any]],
) -> None:
    """Run a kernel that is ready. Arguments, tensor maps and errors are as for `run_kernel`.

    Parameters
    ----------
    ready : Program
    arguments : mapping or sequence
    geometry : Geometry
    module : ModuleSpec or None
        Its source file, for observers.
    arch : str
        Architecture that it was compiled for.
    mapped : mapping of str to numpy.ndarray
    """
    entry, declared = ready.kernel.name, ready.kernel.parameters
    if len(arguments) != len(declared):
        raise ValueError(f"{entry} takes {len(declared)} arguments, got {len(arguments)}")
    names: Sequence[str] = [p.name for p in declared]
    if isinstance(arguments, Mapping):
        names, arguments = list(arguments), list(arguments.values())
    memory = GlobalMemory(ready.granules["global"])
    placed = _Placed(memory)
    buffers = {name: placed.address(name, array) for name, array in mapped.items()}
    params = np.zeros(max((p.offset + p.size for p in declared), default=0), np.uint8)
    tensors: list[Tensor] = []
    for parameter, array, value in zip(declared, names, arguments, strict=True):
        name = f"parameter {array} of {entry}"
        if isinstance(value, TensorMap):
            value = _describe(value, buffers, tensors)
        else:
            value = _argument(placed, array, value, name)
        _place(params, parameter, value, name)
    needed = ready.shared_bytes + geometry.shared_bytes
    devices.check_shared_memory(needed, shared_memory_of(arch), entry, arch)
    observers = active()
    for observer in observers:
        observer.launch(OwnLaunch(module, entry, geometry.blocks, geometry.threads), ready, arch)
    _launch(ready, memory, params, tensors, geometry, observers)
    memory.give_back()


class _Placed:
    """Arrays in the interpreter's memory; an array that is passed twice has one address."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._known: list[tuple[str, npt.NDArray[Any], int]] = []

    def address(self, name: str, array: npt.NDArray[Any]) -> int:
        """Return the address of an array, which is copied to memory if it is not there yet.

        Raises
        ------
        ValueError
            If it overlaps another array without being the same.
        """
        layout = array.__array_interface__
        for other, known, address in self._known:
            if layout == known.__array_interface__:
                return address
            written = array.flags.writeable or known.flags.writeable
            if written and np.shares_memory(array, known):
                raise ValueError(
                    f"{other} and {name} overlap, and the interpreter keeps every array apart: "
                    "pass the same array for both, or copies"
                )
        address = self._memory.add(name, array, writable=array.flags.writeable)
        self._known.append((name, array, address))
        return address


def _argument(placed: _Placed, array: str, value: Any, name: str) -> npt.NDArray[Any]:
    """Return the value to pass for an argument: for an array, its address in memory."""
    if value is None:
        return np.zeros(1, np.uint64)
    if isinstance(value, tuple):
        return _struct([_argument(placed, array, field, name) for field in value])
    if isinstance(value, np.ndarray) and not value.dtype.fields:
        return np.array([placed.address(array, value)], np.uint64)
    if not isinstance(value, np.generic | np.ndarray):
        check_numpy(value, name)
        raise TypeError(
            f"{name} must be a NumPy array, scalar or record, got {type(value).__name__}: the "
            "width of a Python number is not known, write np.int32(...) or np.float32(...)"
        )
    return np.atleast_1d(value)


def _struct(fields: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Lay out the fields of a struct as C does."""
    data = bytearray()
    alignment = 1
    for field in fields:
        aligned = field.dtype.alignment
        data += bytes(-len(data) % aligned) + field.tobytes()
        alignment = max(alignment, aligned)
    data += bytes(-len(data) % alignment)
    return np.frombuffer(data, np.uint8)


def _place(
    params: npt.NDArray[np.uint8], parameter: Parameter, value: npt.NDArray[Any], name: str
) -> None:
    """Put an argument where the kernel's ABI places it."""
    if value.nbytes != parameter.size:
        raise TypeError(f"{name} has {parameter.size} bytes, got {value.nbytes} ({value.dtype})")
    end = parameter.offset + parameter.size
    params[parameter.offset : end] = np.frombuffer(value.tobytes(), np.uint8)


def _describe(
    template: TensorMap, addresses: Mapping[str, int], tensors: list[Tensor]
) -> npt.NDArray[np.uint64]:
    """Add the array of a tensor map to a list; return the parameter that refers to it."""
    filled = np.zeros(16, np.uint64)
    filled[:2] = TENSOR_MAP_MARK, len(tensors)
    address, size = addresses[template.buffer], np.dtype(template.dtype).itemsize
    tensors.append(
        Tensor(
            template.buffer, address, size, template.shape, template.strides, template.box,
            template.swizzle,
        )
    )  # fmt: skip
    return filled


def check_numpy(value: Any, name: str) -> None:
    """Raise TypeError for an array of another library.

    Parameters
    ----------
    value : object
    name : str
        For the message.
    """
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
        kind = type(value)
        raise TypeError(
            f"the interpreter takes NumPy arrays, got {name} of type {kind.__module__}."
            f"{kind.__name__}: copy it to the host, or run it with backend='cuda'"
        )


def _launch(
    ready: Program,
    memory: GlobalMemory,
    params: npt.NDArray[np.uint8],
    tensors: list[Tensor],
    geometry: Geometry,
    observers: tuple[Observer, ...],
) -> None:
    """Run all blocks of a launch, as many at a time as fit in the memory budget."""
    grid, block, shared = geometry.blocks, geometry.threads, geometry.shared_bytes
    entry, limit = ready.kernel.name, ready.kernel.max_threads or MAX_BLOCK
    if not 1 <= block <= limit:
        raise KernelLaunchError(f"{entry} takes 1 to {limit} threads, got a block of {block}")
    if grid < 1:
        raise KernelLaunchError(f"{entry} takes 1 block or more, got a grid of {grid}")
    symbols = {v.name: memory.add(v.name, _variable(v)) for v in ready.variables.values()}
    cluster = ready.kernel.cluster
    if geometry.grid[0] % cluster:
        raise KernelLaunchError(
            f"{entry} takes clusters of {cluster} blocks, got a grid of {geometry.grid[0]}"
        )
    clusters = MEMORY_BUDGET // block_bytes(ready, block, shared) // cluster
    blocks = max(1, min(grid // cluster, clusters)) * cluster
    launch = BoundLaunch(
        ready, grid, block, params, symbols, shared, tensors, geometry.grid, geometry.block
    )
    now = 0
    for first in range(0, grid, blocks):
        machine = Machine(
            launch, memory, first_block=first, blocks=min(blocks, grid - first), now=now,
            observers=observers,
        )  # fmt: skip
        now = _run_batch(machine, observers)


def _run_batch(machine: Machine, observers: tuple[Observer, ...]) -> int:
    """Run a batch to its end; return the time then."""
    try:
        machine.run()
        return machine.clocks.now
    except KernelFault as fault:
        for observer in observers:
            observer.finding(fault.finding)
        raise
    finally:
        for observer in observers:
            observer.batch(machine)
        machine.release()


def block_bytes(ready: Program, block: int, dynamic_shared: int) -> int:
    """Return an upper estimate of the memory that one block takes in the interpreter."""
    threads = -(-block // 32) * 32
    shared = ready.shared_bytes + dynamic_shared
    history = shared // ready.granules["shared"] * (18 + 4 * threads)
    registers = sum(8 if r.type.endswith("64") else 4 for r in ready.kernel.registers)
    return shared + history + threads * (registers + 2 * ready.local_bytes + 4 * threads) + 4096


def _names(one: Launch) -> list[str]:
    """Return the buffers that the parameters of a launch name, each once."""
    found: list[str] = []
    for template in one.templates:
        if isinstance(template, TensorMap):
            found.append(template.buffer)
        else:
            found += [name for _, name in template[1]]
    return list(dict.fromkeys(found))


def _variable(variable: Any) -> npt.NDArray[np.uint8]:
    values = variable.values or b""
    data = np.zeros(variable.size, np.uint8)
    data[: len(values)] = np.frombuffer(values, np.uint8)
    return data


def _params(
    one: Launch, ready: Program, addresses: Mapping[str, int]
) -> tuple[npt.NDArray[np.uint8], list[Tensor]]:
    """Pack the parameters by the kernel's ABI; also return the arrays of tensor maps."""
    declared = ready.kernel.parameters
    if len(declared) != len(one.templates):
        raise ValueError(
            f"{one.entry} takes {len(declared)} parameters, the launch gives {len(one.templates)}"
        )
    end = max((p.offset + p.size for p in declared), default=0)
    data = np.zeros(end, np.uint8)
    tensors: list[Tensor] = []
    for parameter, template in zip(declared, one.templates, strict=True):
        if isinstance(template, TensorMap):
            filled = _describe(template, addresses, tensors)
        else:
            words, pointers = template
            filled = words.copy()
            for index, name in pointers:
                filled[index] = addresses[name]
        _place(data, parameter, filled, f"parameter {parameter.name} of {one.entry}")
    return data, tensors
