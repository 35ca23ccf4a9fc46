"""Runs plans on a CuPy device, with as little to do for a launch as there can be.

What does not change from call to call (module, kernel, all of the parameters but addresses) is
looked up and laid out once for each launch and device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn import compile as compiler
from cupyattn import tensor_map
from cupyattn.checks import data_address
from cupyattn.errors import KernelLaunchError
from cupyattn.launch import Launch, Plan, TensorMap

#: Alignment of every parameter in the buffer that the driver reads: a tensor map's.
_ALIGNMENT = 128


class ReadyLaunch:
    """One launch on one device: compiled, loaded, its parameters laid out but for addresses.

    Parameters
    ----------
    one : Launch
    arch : str or None
        Architecture to compile for; the current device's own when None.
    """

    def __init__(self, one: Launch, arch: str | None) -> None:
        module = compiler.load(one.module, arch)
        self._launch = one
        self._kernel = module.kernel(one.entry)  # keeps the module loaded
        self._function = self._kernel.kernel.ptr
        self._shared = module.binary.smem_bytes if one.dynamic_shared else 0
        self._per_thread = threading.local()

        templates = one.templates
        place = -(-8 * len(templates) // _ALIGNMENT) * _ALIGNMENT  # behind the pointers to them
        self._places: list[int] = []
        self._structs: list[tuple[slice, np.ndarray]] = []
        self._pointers: list[tuple[int, str]] = []  # 64-bit word of an address, buffer
        self._maps: list[tuple[slice, TensorMap]] = []
        for template in templates:
            self._places.append(place)
            first = place // 8
            if isinstance(template, TensorMap):
                size = tensor_map.NBYTES
                self._maps.append((slice(first, first + size // 8), template))
            else:
                words, pointers = template
                size = words.nbytes
                self._structs.append((slice(first, first + len(words)), words))
                self._pointers += [(first + index, name) for index, name in pointers]
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._nbytes = place

    def _buffer(self) -> tuple[np.ndarray, int]:
        """Return this thread's parameters as 64-bit words, and their address."""
        raw = np.zeros(self._nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        words = raw[start : start + self._nbytes].view(np.uint64)
        address = int(words.ctypes.data)
        words[: len(self._places)] = [address + place for place in self._places]
        for where, struct in self._structs:
            words[where] = struct
        self._per_thread.buffer = words, address
        return words, address

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        """Launch on a stream of the current device.

        Parameters
        ----------
        addresses : mapping of str to int
            Of every buffer that the parameters name.
        stream : int
            Handle.

        Raises
        ------
        KernelLaunchError
            If the device refuses the launch; the message gives grid, block and shared memory.
        """
        import cupy

        buffer = getattr(self._per_thread, "buffer", None)
        words, address = self._buffer() if buffer is None else buffer
        for index, name in self._pointers:
            words[index] = addresses[name]
        for where, mapped in self._maps:
            words[where] = tensor_map.encode(
                addresses[mapped.buffer], mapped.dtype, mapped.shape, mapped.strides, mapped.box
            ).view(np.uint64)
        one = self._launch
        try:
            cupy.cuda.driver.launchKernel(
                self._function, one.grid, 1, 1, one.block, 1, 1, self._shared, stream, address, 0
            )
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelLaunchError(
                f"{one.entry} cannot be launched with grid {one.grid}, block {one.block} and "
                f"{self._shared} bytes of shared memory: {error}"
            ) from error


def ready(plan: Plan, arch: str | None = None) -> tuple[ReadyLaunch, ...]:
    """Return the launches of a plan, ready on the current device: compiled and loaded once.

    Parameters
    ----------
    plan : Plan
    arch : str, optional
        Architecture to compile for; the device's own when omitted.
    """
    import cupy

    slot = (arch, cupy.cuda.runtime.getDevice(), compiler.generation())
    found = plan.on_devices.get(slot)
    if found is None:
        found = plan.on_devices[slot] = tuple(ReadyLaunch(one, arch) for one in plan.launches)
    return found


def run(plan: Plan, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan on the current CuPy device and stream.

    Parameters
    ----------
    plan : Plan
    buffers : mapping of str to cupy.ndarray or None
        Every buffer that the launches name, except the workspace, which is allocated here. More
        may be given.
    arch : str, optional
        Architecture to compile for; the device's own when omitted.

    Raises
    ------
    KernelLaunchError
        If the device refuses a launch.
    """
    import cupy

    addresses = {name: data_address(a) for name, a in buffers.items() if a is not None}
    scratch = [_allocate(cupy, work) for work in plan.workspace]
    for work, array in zip(plan.workspace, scratch, strict=True):
        addresses[work.name] = data_address(array)
    launch_all(ready(plan, arch), addresses)


def launch_all(launches: tuple[ReadyLaunch, ...], addresses: Mapping[str, int]) -> None:
    """Launch one kernel after the other on the current stream."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    handle = int(stream.ptr)
    debug = os.environ.get("CUPYATTN_DEBUG") == "1"
    for one in launches:
        one(addresses, handle)
        if debug:
            stream.synchronize()


def _allocate(cupy: Any, work: Any) -> Any:
    return (cupy.zeros if work.zeros else cupy.empty)(work.shape, work.dtype)
