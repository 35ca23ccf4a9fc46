"""The compiler's output, and its format in the cache on disk."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, field

from cupyattn.compiler import disk_cache
from cupyattn.compiler.ptxas import Resources, parse_resources, parse_smem_bytes
from cupyattn.errors import KernelCompileError

_log = logging.getLogger("cupyattn")


@dataclass(frozen=True)
class Binary:
    """A compiled source.

    Parameters
    ----------
    arch : str
        Architecture, for example ``"sm_90a"``.
    nvrtc_version : (int, int)
        Compiler that made it.
    ptx : str
        PTX text.
    cubin : bytes
        Machine code, complete: drivers load it and disassemblers read it. Empty from `translate`.
    log : str
        The compiler's messages, ptxas' report among them.
    kernels : dict of str to Resources
        By entry point; none from `translate`.
    smem_bytes : int
        Dynamic shared memory that the source asks for
        (``extern "C" __device__ int smem_bytes = sizeof(SharedStorage);``), 0 where it names none.
    """

    arch: str
    nvrtc_version: tuple[int, int]
    ptx: str
    cubin: bytes
    log: str
    kernels: dict[str, Resources] = field(hash=False)
    smem_bytes: int


#: Errors of reading an entry that `write_entry` did not write.
_RUBBISH = (
    ValueError, TypeError, KeyError, AttributeError, RecursionError, KernelCompileError,
)  # fmt: skip


def read_entry(key: str, arch: str, version: tuple[int, int], machine: bool) -> Binary | None:
    """Return an entry of the cache, None where there is none or it is no kernel of this kind."""
    payload = disk_cache.read(key)
    if payload is None:
        return None
    try:
        return _parse(payload, arch, version, machine)
    except _RUBBISH as error:
        _log.warning("the cache's entry %s is no kernel (%s): compiling again", key, error)
        return None


def _parse(payload: bytes, arch: str, version: tuple[int, int], machine: bool) -> Binary:
    """Return the binary of an entry; ValueError and others where it cannot be one.

    Everything that the compiler's output tells is compared with it.
    """
    head, _, cubin = payload.partition(b"\n")
    facts = json.loads(head)
    facts["nvrtc_version"] = tuple(facts["nvrtc_version"])
    facts["kernels"] = {name: Resources(**values) for name, values in facts["kernels"].items()}
    binary = Binary(cubin=cubin, **facts)
    if (binary.arch, binary.nvrtc_version) != (arch, version):
        raise ValueError(f"made by {binary.nvrtc_version} for {binary.arch}")
    entries = set(re.findall(r"\.entry ([\w$]+)\(", binary.ptx))
    if ".version " not in binary.ptx or f".target {arch}" not in binary.ptx or not entries:
        raise ValueError("its PTX has no version, target or entry point")
    if binary.smem_bytes != parse_smem_bytes(binary.ptx):
        raise ValueError("its shared memory differs from its PTX")
    known = entries if machine else set()
    if binary.kernels != parse_resources(binary.log) or not set(binary.kernels) <= known:
        raise ValueError("its kernels differ from its PTX and its log")
    if cubin.startswith(b"\x7fELF") != machine or (cubin and not machine):
        raise ValueError("its machine code is no ELF file" if machine else "it has machine code")
    if missing := [name for name in entries if machine and name.encode() not in cubin]:
        raise ValueError(f"its machine code lacks {missing[0]}")
    return binary


def write_entry(key: str, binary: Binary) -> None:
    """Keep a binary in the cache."""
    facts = {name: value for name, value in asdict(binary).items() if name != "cubin"}
    disk_cache.write(key, json.dumps(facts).encode() + b"\n" + binary.cubin)
