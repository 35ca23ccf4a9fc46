"""Architectures that kernels are compiled for, by name."""

from __future__ import annotations

import functools
import re

from cupyattn.compiler import nvrtc
from cupyattn.errors import UnsupportedError, shown

#: Architectures that every kernel is compiled for in the tests.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
#: Compute capabilities times ten that CUDA 12 and 13 compile for, from 8.0 on. An NVRTC that knows
#: more adds its own.
CAPABILITIES = (80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
#: The least capability whose name takes a suffix: instructions of that architecture alone, or of
#: its family.
_LEAST_WITH = {"": 0, "a": 90, "f": 100}
#: Compute capability, times ten, of the first device that the kernels run on.
LEAST_CAPABILITY = 80
#: Least compute capability of 8-bit floats, and of clusters of blocks.
E4M3_CAPABILITY, CLUSTER_CAPABILITY = 89, 90


#: Bytes of shared memory that a block may have, by compute capability times ten (CUDA C++
#: Programming Guide, technical specifications). For capabilities that are not listed it is
#: `LEAST_SHARED`.
SHARED_MEMORY = {
    80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10,
}  # fmt: skip
#: Shared memory that every device from compute capability 8.0 on allows.
LEAST_SHARED = 99 << 10


def shared_memory_of(arch: str) -> int:
    """Return the bytes of shared memory that a block may have on an architecture.

    Examples
    --------
    >>> shared_memory_of("sm_90a"), shared_memory_of("sm_86")
    (232448, 101376)
    """
    return SHARED_MEMORY.get(capability_of(arch), LEAST_SHARED)


def capability_of(arch: str) -> int:
    """Return the compute capability of an architecture times ten.

    Parameters
    ----------
    arch : str
        Its name. Whether the NVRTC of this environment compiles for it is another question.

    Raises
    ------
    ValueError
        For what is not the name of an architecture.
    UnsupportedError
        For an architecture before compute capability 8.0.

    Examples
    --------
    >>> capability_of("sm_90a")
    90
    """
    if not isinstance(arch, str):
        raise ValueError(_refusal(arch))
    return _capability_of(arch)


@functools.lru_cache(maxsize=64)
def _capability_of(arch: str) -> int:
    match = re.fullmatch(r"sm_([1-9]\d+)([af]?)", arch, re.ASCII)
    if match is None or len(arch) > len("sm_000a"):
        raise ValueError(_refusal(arch))
    capability = int(match[1])
    if 50 <= capability < LEAST_CAPABILITY and not match[2]:
        raise UnsupportedError(
            f"compute capability {capability / 10:.1f} is not supported, 8.0 and newer are: give "
            f"another arch than {arch!r}, or leave it out"
        )
    if capability not in CAPABILITIES and capability not in _known():
        raise ValueError(_refusal(arch))
    if capability < _LEAST_WITH[match[2]]:
        raise ValueError(_refusal(arch))
    return capability


def check_arch(arch: str | None) -> None:
    """Raise as `capability_of` unless `arch` is the name of an architecture, or None."""
    if arch is not None:
        capability_of(arch)


def check_capability(arch: str, least: int) -> None:
    """Raise UnsupportedError for an architecture older than one of the capabilities above."""
    if capability_of(arch) < least:
        what, instead = {
            E4M3_CAPABILITY: ("8-bit floats (pv='fp8')", "pv='int8' or pv='16bit'"),
            CLUSTER_CAPABILITY: ("tiles that several blocks share (splits)", "splits=1"),
        }[least]
        raise UnsupportedError(
            f"{what} need compute capability {least / 10} or later, got {arch}: use {instead}"
        )


def _known() -> tuple[int, ...]:
    """Return the capabilities of the NVRTC of this environment, () without one."""
    try:
        return nvrtc.load().capabilities
    except UnsupportedError:
        return ()


def _refusal(arch: object) -> str:
    known = sorted({*CAPABILITIES, *(c for c in _known() if c >= LEAST_CAPABILITY)})
    names = [f"sm_{capability}" for capability in known]
    return (
        f"arch must be {', '.join(names[:-1])} or {names[-1]}, from sm_90 on also with the suffix "
        f"a, from sm_100 on also with f, got {shown(arch)}"
    )
