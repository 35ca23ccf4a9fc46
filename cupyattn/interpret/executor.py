"""Runs a `Plan` on the interpreter: the same launches, parameters and workspace as a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn import compile as compiler
from cupyattn import tensor_map
from cupyattn.compile import Binary
from cupyattn.errors import KernelLaunchError
from cupyattn.interpret.bulk import TENSOR_MAP_MARK, Tensor
from cupyattn.interpret.findings import KernelFault
from cupyattn.interpret.machine import Machine
from cupyattn.interpret.memory import GlobalMemory
from cupyattn.interpret.observe import Observer, active
from cupyattn.interpret.program import Program, program
from cupyattn.launch import Launch, Plan, TensorMap

#: Architecture that portable forms are compiled for.
PORTABLE_ARCH = "sm_80"
#: Bytes that the blocks of one batch may take together; one block always runs.
MEMORY_BUDGET = 512 << 20


def run(plan: Plan, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan on NumPy arrays.

    Parameters
    ----------
    plan : Plan
    buffers : mapping of str to numpy.ndarray or None
        Every buffer that the launches name, except the workspace. Arrays that are not writeable
        are inputs: a kernel that writes to one has a hazard. The others receive what the kernels
        wrote, once all of them have ended without a hazard.
    arch : str, optional
        Architecture to compile for; ``"sm_80"`` when omitted.

    Raises
    ------
    KernelFault
        At the first hazard.
    TypeError
        For an array that is not NumPy's.
    UnsupportedError
        At an instruction that the interpreter does not know.
    """
    arrays = {name: a for name, a in buffers.items() if a is not None}
    for name, a in arrays.items():
        if not isinstance(a, np.ndarray):
            raise TypeError(
                f"the interpreter takes NumPy arrays, got {name} of type {type(a).__module__}."
                f"{type(a).__name__}: copy it to the host, or run it with backend='cuda'"
            )
    results = {name: np.array(a, order="K") for name, a in arrays.items() if a.flags.writeable}
    held = {**arrays, **results}
    written = set(held)
    for work in plan.workspace:
        held[work.name] = np.zeros(work.shape, work.dtype)
        if work.zeros:
            written.add(work.name)
    for one in plan.launches:
        binary = compiler.build(one.module, arch or PORTABLE_ARCH)
        run_launch(one, binary, held, written)
    for name, result in results.items():
        arrays[name][...] = result


def run_launch(
    one: Launch, binary: Binary, arrays: Mapping[str, npt.NDArray[Any]], written: set[str]
) -> None:
    """Run one launch, changing `arrays` that are writeable.

    Parameters
    ----------
    one : Launch
    binary : Binary
        Its module, compiled.
    arrays : mapping of str to numpy.ndarray
        Buffers and workspace.
    written : set of str
        Those that hold something. What the kernel writes to is added.
    """
    ready = program(binary.ptx, one.entry)
    limit = ready.kernel.max_threads
    if limit is not None and one.block > limit:
        raise KernelLaunchError(
            f"{one.entry} takes up to {limit} threads, got a block of {one.block}"
        )
    memory = GlobalMemory(ready.granules["global"])
    named = _names(one)
    addresses = {
        name: memory.add(
            name, arrays[name], initialised=name in written, writable=arrays[name].flags.writeable
        )
        for name in named
    }
    symbols = {v.name: memory.add(v.name, _variable(v)) for v in ready.variables.values()}
    params, tensors = _params(one, ready, addresses)
    shared = binary.smem_bytes if one.dynamic_shared else 0
    blocks = max(1, min(one.grid, MEMORY_BUDGET // block_bytes(ready, one.block, shared)))
    observers = active()
    for observer in observers:
        observer.launch(one, ready, binary.arch)
    now = 0
    for first in range(0, one.grid, blocks):
        machine = Machine(
            ready, grid=one.grid, block=one.block, first_block=first,
            blocks=min(blocks, one.grid - first), memory=memory, params=params, symbols=symbols,
            dynamic_shared=shared, tensors=tensors, now=now, observers=observers,
        )  # fmt: skip
        _run_batch(machine, observers)
        now = machine.clocks.now
    for array in memory.arrays:
        if array.name in addresses and array.shadow is not None:
            array.source[...] = array.elements
            written.add(array.name)


def _run_batch(machine: Machine, observers: tuple[Observer, ...]) -> None:
    try:
        machine.run()
    except KernelFault as fault:
        for observer in observers:
            observer.finding(fault.finding)
        raise
    finally:
        for observer in observers:
            observer.batch(machine)


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
    """Pack the parameters as the kernel's ABI places them; return what tensor maps describe too."""
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
            filled = np.zeros(16, np.uint64)
            filled[:2] = TENSOR_MAP_MARK, len(tensors)
            address, size = addresses[template.buffer], tensor_map.itemsize(template.dtype)
            tensors.append(
                Tensor(
                    template.buffer, address, size, template.shape, template.strides, template.box
                )
            )
        else:
            words, pointers = template
            filled = words.copy()
            for index, name in pointers:
                filled[index] = addresses[name]
        if filled.nbytes != parameter.size:
            raise ValueError(
                f"parameter {parameter.name} of {one.entry} has {parameter.size} bytes, the launch "
                f"gives {filled.nbytes}"
            )
        data[parameter.offset : parameter.offset + parameter.size] = filled.view(np.uint8)
    return data, tensors
