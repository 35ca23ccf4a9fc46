"""Calls on a device that come again: known by the forms of their arrays, launched at once.

Checking, planning and laying out parameters depend on options and forms alone. With few rows they
would take longer than the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupyattn.arrays.memory import check_apart, meetings
from cupyattn.compiler import modules as compiler
from cupyattn.runtime import launches as executor
from cupyattn.runtime import ready

Array = Any

#: Calls that are kept.
MAX_RECENT = 512
_recent: dict[Any, Repeated] = {}


@dataclass(frozen=True)
class Repeated:
    """A call, planned, compiled and loaded: what is left is memory for results, and launches.

    Parameters
    ----------
    launches : sequence of (ReadyLaunch, Pick)
    results : sequence of (str, tuple of int, numpy.dtype)
        Buffer, shape and type of what it returns.
    device : int
    receiver : str
        The buffer of an ``out`` that the caller gives; "": there is none.
    meeting : mapping
        What `cupyattn.arrays.memory.meetings` says of it.
    """

    launches: Sequence[tuple[executor.ReadyLaunch, ready.Pick]]
    results: Sequence[tuple[str, tuple[int, ...], Any]]
    device: int
    receiver: str = ""
    meeting: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, addresses: dict[str, int]) -> list[Array]:
        """Run on other arrays of the same forms, on the current stream; return the results.

        Their addresses, by buffer, are added to.
        """
        import cupy

        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(addresses)
        if self.receiver:
            check_apart(self.meeting, addresses, addresses[self.receiver])
        made = []
        for name, shape, dtype in self.results:
            result = cupy.ndarray(shape, dtype)
            addresses[name] = result.data.ptr
            made.append(result)
        ready.launch_all(self.launches, addresses)
        return made


def call_key(options: tuple[Any, ...], arrays: Mapping[str, Array]) -> tuple[Any, dict[str, int]]:
    """Return what a call depends on beside values, and where its arrays lie.

    The first is None unless all of them are CuPy's.

    Parameters
    ----------
    options : tuple
        Hashable, the name of the call first.
    arrays : mapping of str to array
        By the buffers of the plan.
    """
    cupy = sys.modules.get("cupy")
    key: list[Any] = [compiler.generation(), options, *arrays]
    addresses = {}
    for name, array in arrays.items():
        if cupy is None or not isinstance(array, cupy.ndarray):
            return None, {}
        data = array.data  # a new object at each access
        addresses[name] = address = data.ptr
        key += (array.shape, array.strides, array.dtype, address % 16, data.device_id)
    return tuple(key), addresses


def recall(key: Any) -> Repeated | None:
    """Return the call that was remembered under a key."""
    return None if key is None else _recent.get(key)


def remember(
    key: Any,
    plan: ready.Runnable,
    arch: str | None,
    arrays: Mapping[str, Array],
    buffers: Mapping[str, Array],
    results: Mapping[str, tuple[int, ...]],
    receiver: str = "",
) -> None:
    """Keep a call for `recall`; the oldest make room.

    Parameters
    ----------
    key : object
        Of `call_key`; None is not kept, nor is a plan without launches.
    plan : Runnable
        Without workspace.
    arch : str, optional
    arrays : mapping of str to array
        What the caller gave.
    buffers : mapping of str to array
        What the plan ran on: where one of `arrays` was copied, nothing is kept.
    results : mapping of str to tuple of int
        Shapes to return those buffers in.
    receiver : str
        The one of `arrays` that receives a result; "": none does.
    """
    if key is None or not plan.launches:
        return
    if any(buffers[name].data.ptr != a.data.ptr for name, a in arrays.items()):
        return
    launches = [(one, ready.picking(one.buffers)) for one in ready.ready(plan, arch)]
    made = [(name, shape, buffers[name].dtype) for name, shape in results.items()]
    while len(_recent) >= MAX_RECENT:
        _recent.pop(next(iter(_recent)), None)
    device = next(iter(arrays.values())).data.device_id
    read = {name: a for name, a in arrays.items() if name != receiver}
    meeting = meetings(arrays[receiver], read) if receiver else {}
    _recent[key] = Repeated(launches, made, device, receiver, meeting)
