"""Scratch memory of a call, which its passes write and its kernels read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cupyattn.errors import DeviceMemoryError
from cupyattn.plans.records import Workspace


def free_bytes() -> int:
    """Return how much memory of the current device CuPy's pool could still hand out."""
    import cupy

    pool = cupy.get_default_memory_pool()
    free = int(cupy.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())
    limit = int(pool.get_limit())
    return min(free, limit - int(pool.used_bytes())) if limit else free


def memory_error(
    variant: str, needed: Mapping[str, int], free: int | None, *, fused: bool
) -> DeviceMemoryError:
    """Return the error of a call that cannot have its memory.

    Parameters
    ----------
    variant : str
    needed : mapping of str to int
        Bytes of what it takes beside its operands, by name.
    free : int or None
        Bytes that are free; None where nobody knows, on the host.
    fused : bool
        Whether a form of the rung needs no scratch memory.
    """
    largest = max(needed, key=needed.__getitem__)
    found = "more than can be had" if free is None else f"{free:,} are free"
    way_out = "split the batch or the heads into several calls"
    if variant == "unfused":
        way_out = "use another variant, none of which keeps a score per query and key"
    elif fused:
        without = "use QuantConfig(smooth_k=False, fused=True), which takes no scratch memory"
        way_out = f"{without}, or {way_out}"
    return DeviceMemoryError(
        f"{variant} needs {sum(needed.values()):,} bytes beside its operands, "
        f"{needed[largest]:,} of them for {largest!r}, and {found}: {way_out}"
    )


@dataclass(frozen=True)
class Memory:
    """Memory that a call needs beside its operands.

    Parameters
    ----------
    what : str
        The operation or rung that needs it.
    needed : mapping of str to int
        Bytes of results and scratch memory, by name.
    fused : bool
        Whether a form of the rung needs no scratch memory.
    """

    what: str
    needed: Mapping[str, int] = field(default_factory=dict)
    fused: bool = False

    def error(self, *, on_device: bool) -> DeviceMemoryError:
        """Return the error for memory that the current device or the host cannot allocate."""
        free = free_bytes() if on_device else None
        return memory_error(self.what, self.needed, free, fused=self.fused)


@contextlib.contextmanager
def explaining_memory_errors(memory: Memory, *, on_device: bool) -> Iterator[None]:
    """Turn a MemoryError into one that names the needed bytes, and the largest part of them.

    Raises
    ------
    DeviceMemoryError
        In its place; one that a call within has raised says more, and passes.
    """
    try:
        yield
    except DeviceMemoryError:
        raise
    except MemoryError as error:
        if not memory.needed:
            raise
        raise memory.error(on_device=on_device) from error


@dataclass(frozen=True)
class Layout:
    """Offsets of scratch buffers in one piece of memory, because a device allocation costs time.

    Buffers that must be zero come first, so that one fill is enough.

    Parameters
    ----------
    offsets : mapping of str to int
        Bytes from the start, multiples of `ALIGNMENT`.
    zeros, nbytes : int
        Bytes that have to be zero, and all of them.
    """

    #: Enough for every access of a kernel and for a tensor map.
    ALIGNMENT: ClassVar[int] = 256

    offsets: Mapping[str, int]
    zeros: int
    nbytes: int

    @classmethod
    def of(cls, workspace: Sequence[Workspace]) -> Layout:
        """Lay buffers out one behind the other."""
        offsets, zeros, end = {}, 0, 0
        for work in sorted(workspace, key=lambda work: not work.zeros):
            offsets[work.name] = end
            end += -(-work.nbytes // cls.ALIGNMENT) * cls.ALIGNMENT
            zeros = end if work.zeros else zeros
        return cls(offsets, zeros, end)
