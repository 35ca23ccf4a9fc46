"""Read the compiler's report on a kernel, by ``ptxas -v``, and a variable of its PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cupyattn.errors import KernelCompileError


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as ptxas reports them.

    Parameters
    ----------
    registers : int
        Per thread.
    spill_stores, spill_loads : int
        Bytes per thread that did not fit in registers, functions that it calls included.
    stack : int
        Bytes of local memory per thread: spills and arrays indexed at run time.
    static_smem : int
        Bytes of shared memory per block beside the dynamic one.
    """

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    static_smem: int = 0


def parse_resources(log: str) -> dict[str, Resources]:
    """Read what each kernel takes from the report of ``ptxas -v``.

    Parameters
    ----------
    log : str
        The compiler's messages.

    Returns
    -------
    dict of str to Resources
        By entry point. The spills of a function that a kernel calls count as the kernel's.

    Examples
    --------
    >>> parse_resources('''ptxas info    : Compiling entry function 'copy' for 'sm_80'
    ... ptxas info    : Function properties for copy
    ... ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
    ... ptxas info    : Used 12 registers, 128 bytes smem, 360 bytes cmem[0]''')
    {'copy': Resources(registers=12, spill_stores=4, spill_loads=4, stack=8, static_smem=128)}
    """
    kernels: dict[str, Resources] = {}
    for report in re.split(r"Compiling entry function '", log)[1:]:
        name = report.partition("'")[0]
        frames = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        stack, stores, loads = (sum(int(frame[i]) for frame in frames) for i in range(3))
        registers = re.search(r"Used (\d+) registers", report)
        smem = re.search(r"(\d+) bytes smem", report)
        if registers is None or not frames:
            raise KernelCompileError(f"the report of ptxas on {name} was not understood:\n{log}")
        kernels[name] = Resources(
            int(registers[1]), stores, loads, stack, int(smem[1]) if smem else 0
        )
    return kernels


def parse_smem_bytes(ptx: str) -> int:
    """Return the initial value of the variable ``smem_bytes`` in a PTX text, 0 without one.

    Examples
    --------
    >>> parse_smem_bytes(".visible .global .align 4 .u32 smem_bytes = 4096;")
    4096
    """
    match = re.search(r"\.global\b[^;]*\bsmem_bytes\s*=\s*(\d+)\s*;", ptx)
    return int(match[1]) if match else 0
