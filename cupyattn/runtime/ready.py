"""Calls made ready to run: compiled, loaded and laid out in memory once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cupyattn.arrays.described import Described
from cupyattn.arrays.memory import data_address
from cupyattn.compiler import modules as compiler
from cupyattn.plans.records import Runnable, Work
from cupyattn.problem.problem import Result
from cupyattn.runtime import replay
from cupyattn.runtime.launches import ReadyLaunch
from cupyattn.runtime.scratch import Layout, Memory

#: Selects some addresses, in its order, from the addresses of all buffers.
AddressSelector = Callable[[Mapping[str, int]], tuple[int, ...]]


class Receiver(NamedTuple):
    """The buffer of an ``out`` of the caller's, and what `cupyattn.arrays.described.meetings`
    says of arrays of the forms of a call."""

    buffer: str
    meetings: Mapping[str, tuple[int, int]]

    def check(self, addresses: Mapping[str, int]) -> None:
        """Raise ValueError if it shares memory with an array that is read."""
        out = addresses[self.buffer]
        for name, (first, last) in self.meetings.items():
            if first < out - addresses[name] < last:
                raise ValueError(f"out must not share memory with {name}")


class Conversion(NamedTuple):
    """An operand that is converted into scratch memory before the launches.

    Parameters
    ----------
    buffer : str
        Buffer of the operand.
    shape, dtype
        Shape and dtype of the contiguous result.
    strides : tuple of int
        Distances of the elements of `shape` in the operand, in elements. The caller's array may
        have another order of axes than the plan.
    start, nbytes : int
        Place of the result in scratch memory.
    """

    buffer: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    start: int
    nbytes: int


def address_selector(names: Sequence[str]) -> AddressSelector:
    """Return a function that selects the addresses of these buffers."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda addresses: tuple([addresses[name] for name in names])


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


def compile_side_by_side(work: Work, arch: str | None) -> None:
    """Let the sources of work be compiled side by side, not one after the other.

    Parameters
    ----------
    work, arch
        As for `Ready`.

    Notes
    -----
    Kernels of a call come to lie in the cache on disk together, so the last one tells of all:
    threads that only read would keep the call waiting for longer than it reads by itself.
    """
    import cupy

    # NOTE: thread pools take 2 ms to import, which only devices need.
    from cupyattn.compiler import ahead

    specs = dict.fromkeys(one.module for plan in work.plans for one in plan.launches)
    if len(missing := [spec for spec in specs if not compiler.is_loaded(spec, arch)]) > 1:
        capability = int(cupy.cuda.Device().compute_capability)
        jobs = [(spec, compiler.architecture(spec, arch, capability)) for spec in missing]
        if not compiler.is_compiled(*jobs[-1]):
            ahead.begin(jobs)


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
    one = Ready(Work.of(plan), arch)
    memory = one.allocate()
    start = 0 if memory is None else memory.ptr
    one.enqueue(addresses, start, cupy.cuda.get_current_stream().ptr)


class Ready:
    """A call on one device, compiled, loaded and laid out: it only needs memory and launches.

    At addresses that come again its launches are one launch of a graph (`cupyattn.runtime.replay`).
    It keeps no array of its caller's alive, and belongs to the device that is current when it is
    made.

    Parameters
    ----------
    work : Work
        Work to launch.
    arch : str, optional
        Architecture to compile for; the device's own when omitted.
    results : mapping of str to Result, optional
        Results of each call, by buffer.
    copies : mapping of str to Described, optional
        Operands that every call copies, by buffer.
    receiver : Receiver, optional
        Buffer of an ``out`` of the caller's, if given.
    memory : Memory, optional
    facts : object
        Facts that the operation needs when it returns results.
    """

    def __init__(
        self,
        work: Work,
        arch: str | None = None,
        results: Mapping[str, Result] | None = None,
        *,
        copies: Mapping[str, Described] | None = None,
        receiver: Receiver | None = None,
        memory: Memory | None = None,
        facts: Any = None,
    ) -> None:
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.device = int(self._runtime.getDevice())
        self.results = [(name, *result) for name, result in (results or {}).items()]
        self.receiver, self.facts, self.copies = receiver, facts, copies or {}
        self.memory = memory or Memory("the call")
        self.layout = Layout.of(work.workspace)
        self._scratch_copies = [
            (one.copy_of, self.layout.offsets[one.name], one.nbytes)
            for one in work.workspace
            if one.copy_of
        ]
        self.conversions = [
            Conversion(
                one.cast_of, one.shape, one.dtype, one.cast_strides,
                self.layout.offsets[one.name], one.nbytes,
            )
            for one in work.workspace
            if one.cast_of and one.nbytes
        ]  # fmt: skip
        compile_side_by_side(work, arch)
        self._launches = [
            (one, [names.get(name, name) for name in one.buffers])
            for plan, names in zip(work.plans, work.names, strict=True)
            for one in ready(plan, arch)
        ]

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that a launch takes."""
        return self.layout.nbytes

    @property
    def is_launched_alone(self) -> bool:
        """Whether `launch` is all of a call: a graph, and nothing copied, converted or filled."""
        filled = any(fill is not None for *_, fill in self.results)
        return self._is_replayed and not (self.copies or self.conversions or filled)

    def is_captured(self) -> bool:
        """Whether a CUDA graph is capturing CuPy's current stream."""
        return bool(self._runtime.streamIsCapturing(self._cupy.cuda.get_current_stream().ptr))

    def allocate(self) -> Any:
        """Take scratch memory of this device from CuPy's pool; None where none is needed."""
        return self._cupy.cuda.alloc(self.layout.nbytes) if self.layout.nbytes else None

    def __call__(
        self,
        operands: Mapping[str, Any],
        addresses: dict[str, int],
        scratch: Any = None,
        *,
        copied: bool = False,
    ) -> dict[str, Any]:
        """Run on arrays of the forms that it was made for, unchecked, on CuPy's current stream.

        Parameters
        ----------
        operands : mapping of str to cupy.ndarray
            The caller's; read where one is copied or converted.
        addresses : dict of str to int
            Addresses of the operands and of an ``out``. The addresses of results are added.
        scratch : MemoryPointer, optional
            Memory of `scratch_bytes` bytes; taken from CuPy's pool when omitted.
        copied : bool
            Whether these are the arrays by buffer, copied where they had to be.

        Returns
        -------
        dict of str to cupy.ndarray
            The results.

        Raises
        ------
        ValueError
            If an ``out`` shares memory with operands that are read.
        DeviceMemoryError
            If results and scratch memory cannot be allocated. Nothing was launched then.
        """
        if self._runtime.getDevice() != self.device:
            with self._cupy.cuda.Device(self.device):
                return self(operands, addresses, scratch, copied=copied)
        if self.receiver is not None:
            self.receiver.check(addresses)
        if self.copies and not copied:
            own = {name: x.bound(operands[x.name]) for name, x in self.copies.items()}
            addresses |= {name: x.data.ptr for name, x in own.items()}
            operands = {**operands, **own}
        made, new = {}, self._cupy.ndarray
        try:
            for name, shape, dtype, fill in self.results:
                made[name] = result = new(shape, dtype)
                addresses[name] = result.data.ptr
                if fill is not None:
                    result[...] = operands[fill] if isinstance(fill, str) else fill
            memory = self.allocate() if scratch is None else scratch
        except MemoryError as error:
            raise self.memory.error(on_device=True) from error
        for one in self.conversions:
            caller_array = operands[one.buffer]
            strides = tuple([n * caller_array.itemsize for n in one.strides])
            source = new(one.shape, caller_array.dtype, caller_array.data, strides)
            self._cupy.copyto(new(one.shape, one.dtype, memory + one.start), source)
        start = 0 if memory is None else memory.ptr
        self.launch(addresses, start, self._cupy.cuda.get_current_stream().ptr)
        return made

    def launch(
        self, addresses: Mapping[str, int], scratch: int, stream: int
    ) -> replay.Recorded | None:
        """Launch on memory of the caller's, unchecked, on the current device.

        What `conversions` says is the caller's to do before, on the same stream.

        Parameters
        ----------
        addresses : mapping of str to int
            Addresses of operands and results.
        scratch, stream : int
            Address of `scratch_bytes`, a multiple of `Layout.ALIGNMENT`; a stream's handle.

        Returns
        -------
        Recorded or None
            A graph of what was launched, which this thread may launch in its place.
        """
        if self._is_replayed:
            key = self, scratch, self._pick_outer(addresses)
            return replay.graphs(self.device).launch(
                key, lambda stream: self.enqueue(addresses, scratch, stream), stream,
                len(self._launches),
            )  # fmt: skip
        self.enqueue(addresses, scratch, stream)
        return None

    @functools.cached_property
    def _is_replayed(self) -> bool:
        """Whether there is something to launch that nothing waits for: a graph may stand for it."""
        return bool(self._launches) and not any(one.waits for one, _ in self._launches)

    @functools.cached_property
    def _picks(self) -> list[tuple[ReadyLaunch, AddressSelector]]:
        return [(one, address_selector(names)) for one, names in self._launches]

    @functools.cached_property
    def _pick_outer(self) -> AddressSelector:
        """Selects the addresses outside of scratch memory, which identify a graph."""
        names = dict.fromkeys(name for _, some in self._launches for name in some)
        names |= dict.fromkeys(name for name, *_ in self._scratch_copies)
        return address_selector([name for name in names if name not in self.layout.offsets])

    def enqueue(self, addresses: Mapping[str, int], scratch: int, stream: int) -> None:
        """Launch kernel by kernel, as `launch` does."""
        layout, runtime = self.layout, self._runtime
        if layout.zeros:
            runtime.memsetAsync(scratch, 0, layout.zeros, stream)
        for name, start, nbytes in self._scratch_copies:
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(scratch + start, addresses[name], nbytes, kind, stream)
        if layout.offsets:
            inner = {name: scratch + offset for name, offset in layout.offsets.items()}
            addresses = {**addresses, **inner}
        for one, pick in self._picks:
            one(pick(addresses), stream)
