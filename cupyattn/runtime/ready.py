"""Plans made ready to run: compiled, loaded and laid out in memory once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cupyattn.arrays.memory import data_address
from cupyattn.compiler import modules as compiler
from cupyattn.plans.records import Launch, Workspace
from cupyattn.runtime import replay
from cupyattn.runtime.launches import ReadyLaunch
from cupyattn.runtime.scratch import Layout


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

    At addresses that come again they are one launch of a graph (`cupyattn.runtime.replay`).

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
