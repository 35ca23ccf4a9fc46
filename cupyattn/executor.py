"""Runs plans on a CuPy device, with as little to do for a launch as there can be.

What does not change from call to call (module, kernel, all of the parameters but addresses) is
looked up and laid out once for each launch and device.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupyattn import compile as compiler
from cupyattn import replay, tensor_map
from cupyattn.checks import data_address
from cupyattn.errors import KernelLaunchError
from cupyattn.plans import Launch, TensorMap, Workspace
from cupyattn.scratch import Layout
from cupyattn.switches import is_on

#: Alignment of every parameter in the buffer that the driver reads: a tensor map's.
_ALIGNMENT = 128
#: Addresses of a tensor map that a launch remembers: those of every layer's weight, for example.
_MAX_ENCODED = 4096


class Runnable(Protocol):
    """What an executor needs of a plan of whatever kind."""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels in order."""

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        """Scratch memory that they share."""

    @property
    def on_devices(self) -> dict[Any, Any]:
        """What an executor keeps of this plan, by device."""


#: Takes some addresses, in its order, from those of all buffers.
Pick = Callable[[Mapping[str, int]], tuple[int, ...]]


def picking(names: Sequence[str]) -> Pick:
    """Return what takes the addresses of these buffers."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda addresses: tuple([addresses[name] for name in names])


class ReadyLaunch:
    """One launch on one device: compiled, loaded, its parameters laid out but for addresses.

    ``buffers`` names what it needs the addresses of, in the order in which it takes them.

    Parameters
    ----------
    one : Launch
    arch : str or None
        Architecture to compile for; the current device's own when None.
    """

    def __init__(self, one: Launch, arch: str | None) -> None:
        import cupy

        module = compiler.load(one.module, arch)
        self._launch = one
        self._kernel = module.kernel(one.entry)  # keeps the module loaded
        self._function = self._kernel.kernel.ptr
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._shared = module.binary.smem_bytes if one.dynamic_shared else 0
        self._per_thread = threading.local()
        #: Whether it waits, so that what goes wrong is told here: as it was when this was made.
        self.waits = is_on("CUPYATTN_DEBUG")

        templates = one.templates
        place = -(-8 * len(templates) // _ALIGNMENT) * _ALIGNMENT  # behind the pointers to them
        self._places: list[int] = []
        self._structs: list[tuple[slice, np.ndarray]] = []
        self._maps: list[tuple[slice, TensorMap]] = []
        self._encoded: list[dict[int, memoryview[int]]] = []  # of each map, by address
        pointers: list[tuple[int, str]] = []  # 64-bit word of an address, buffer
        shared: dict[TensorMap, int] = {}  # places of maps: of two that are equal there is one
        for template in templates:
            if isinstance(template, TensorMap) and template in shared:
                self._places.append(shared[template])
                continue
            self._places.append(place)
            first = place // 8
            if isinstance(template, TensorMap):
                size = tensor_map.NBYTES
                shared[template] = place
                self._encoded.append({})
                self._maps.append((slice(first, first + size // 8), template))
            else:
                words, named = template
                size = words.nbytes
                self._structs.append((slice(first, first + len(words)), words))
                pointers += [(first + index, name) for index, name in named]
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._nbytes = place
        self._pointers = [index for index, _ in pointers]
        self.buffers = (*(name for _, name in pointers), *(m.buffer for _, m in self._maps))

    def _buffer(self) -> tuple[memoryview[int], int, list[int]]:
        """Return this thread's parameters as words, their address, and what their maps describe."""
        import cupy

        # NOTE: the driver launches in the context of the thread, which a new one does not have.
        cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
        raw = np.zeros(self._nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        words = raw[start : start + self._nbytes].view(np.uint64)
        address = int(words.ctypes.data)
        words[: len(self._places)] = [address + place for place in self._places]
        for where, struct in self._structs:
            words[where] = struct
        buffer = words.data, address, [-1] * len(self._maps)
        self._per_thread.buffer = buffer
        return buffer

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream of the current device.

        Parameters
        ----------
        addresses : sequence of int
            Of ``buffers``.
        stream : int
            Handle.

        Raises
        ------
        KernelLaunchError
            If the device refuses the launch; the message gives grid, block and shared memory.
        """
        buffer = getattr(self._per_thread, "buffer", None)
        words, address, described = self._buffer() if buffer is None else buffer
        for index, pointer in zip(self._pointers, addresses, strict=False):
            words[index] = pointer
        if described:
            self._describe(words, described, addresses[len(self._pointers) :])
        one, driver = self._launch, self._driver
        try:
            driver.launchKernel(
                self._function, one.grid, 1, 1, one.block, 1, 1, self._shared, stream, address, 0
            )
        except driver.CUDADriverError as error:
            raise KernelLaunchError(
                f"{one.entry} cannot be launched with grid {one.grid}, block {one.block} and "
                f"{self._shared} bytes of shared memory: {error}"
            ) from error
        if self.waits:
            self._runtime.streamSynchronize(stream)

    def _describe(
        self, words: memoryview[int], described: list[int], addresses: Sequence[int]
    ) -> None:
        """Fill in the tensor maps of arrays that lie elsewhere than those of the last launch."""
        for number, ((where, x), address) in enumerate(zip(self._maps, addresses, strict=True)):
            if described[number] == address:
                continue
            known = self._encoded[number]
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MAX_ENCODED:
                    known.clear()
                new = tensor_map.encode(address, x.dtype, x.shape, x.strides, x.box)
                encoded = known[address] = new.view(np.uint64).data
            words[where] = encoded
            described[number] = address


def ready(plan: Runnable, arch: str | None = None) -> tuple[ReadyLaunch, ...]:
    """Return the launches of a plan, ready on the current device: compiled and loaded once.

    Parameters
    ----------
    plan : Runnable
    arch : str, optional
        Architecture to compile for; the device's own when omitted.
    """
    import cupy

    slot = (arch, cupy.cuda.runtime.getDevice(), compiler.generation())
    found = plan.on_devices.get(slot)
    if found is None:
        found = plan.on_devices[slot] = tuple(ReadyLaunch(one, arch) for one in plan.launches)
    return found


def run(plan: Runnable, buffers: Mapping[str, Any], arch: str | None = None) -> None:
    """Run a plan on the current CuPy device and stream.

    Parameters
    ----------
    plan : Runnable
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
    launch_all([(one, picking(one.buffers)) for one in ready(plan, arch)], addresses)


def launch_all(launches: Sequence[tuple[ReadyLaunch, Pick]], addresses: Mapping[str, int]) -> None:
    """Launch one kernel after the other on CuPy's current stream.

    Parameters
    ----------
    launches : sequence of (ReadyLaunch, Pick)
    addresses : mapping of str to int
        Of all buffers; each kernel picks its own.
    """
    import cupy

    _enqueue(launches, addresses, cupy.cuda.get_current_stream().ptr)


def _enqueue(
    launches: Sequence[tuple[ReadyLaunch, Pick]], addresses: Mapping[str, int], stream: int
) -> None:
    """Launch one kernel after the other on a stream; each picks its own of the addresses."""
    for one, pick in launches:
        one(pick(addresses), stream)


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """The launches of a call on one device, and where in scratch memory they find their buffers.

    At addresses that come again they are one launch of a graph (`cupyattn.replay`).

    Parameters
    ----------
    launches : sequence of (ReadyLaunch, sequence of str)
        Each with what the call calls its buffers, in order.
    layout : Layout
        Of the scratch memory.
    copied : int
        Address of what is copied into it where `layout` says.
    """

    launches: Sequence[tuple[ReadyLaunch, Sequence[str]]]
    layout: Layout
    copied: int = 0

    @classmethod
    def of(cls, plan: Runnable, arch: str | None = None) -> ReadyCall:
        """Make a plan ready on the current device, compiled for its own architecture or `arch`."""
        launches = [(one, one.buffers) for one in ready(plan, arch)]
        return cls(launches, Layout.of(plan.workspace))

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that a launch takes."""
        return self.layout.nbytes

    def launch(self, addresses: Mapping[str, int], scratch: int, stream: int) -> None:
        """Launch on memory of the caller's, unchecked, on the current device.

        Parameters
        ----------
        addresses : mapping of str to int
            Of operands and results.
        scratch, stream : int
            Address of `scratch_bytes`, a multiple of `Layout.ALIGNMENT`; a stream's handle.
        """
        if self._is_replayed:
            work = functools.partial(self._enqueue, addresses, scratch)
            key = self, scratch, self._pick_outer(addresses)
            replay.graphs().launch(key, work, stream)
        else:
            self._enqueue(addresses, scratch, stream)

    @functools.cached_property
    def _is_replayed(self) -> bool:
        """Whether nothing has to wait within the call, so that a graph may stand for it."""
        return not any(one.waits for one, _ in self.launches)

    @functools.cached_property
    def _picks(self) -> list[tuple[ReadyLaunch, Pick]]:
        return [(one, picking(names)) for one, names in self.launches]

    @functools.cached_property
    def _pick_outer(self) -> Pick:
        """What takes the addresses that scratch memory does not give: what a graph is known by."""
        names = dict.fromkeys(name for _, some in self.launches for name in some)
        return picking([name for name in names if name not in self.layout.offsets])

    def _enqueue(self, addresses: Mapping[str, int], scratch: int, stream: int) -> None:
        """Fill scratch memory and launch one kernel after the other."""
        if self.layout.zeros or self.layout.copied:
            self._fill(scratch, stream)
        inner = {name: scratch + offset for name, offset in self.layout.offsets.items()}
        _enqueue(self._picks, {**addresses, **inner}, stream)

    def _fill(self, scratch: int, stream: int) -> None:
        import cupy

        layout, runtime = self.layout, cupy.cuda.runtime
        if layout.zeros:
            runtime.memsetAsync(scratch, 0, layout.zeros, stream)
        if layout.copied:
            to, kind = scratch + layout.zeros, runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(to, self.copied, layout.copied, kind, stream)


def _allocate(cupy: Any, work: Any) -> Any:
    return (cupy.zeros if work.zeros else cupy.empty)(work.shape, work.dtype)
