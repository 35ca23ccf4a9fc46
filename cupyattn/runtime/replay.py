"""Launches that come again: one launch of a CUDA graph in their place.

A launch costs the host several microseconds, a graph of one or a handful less: its parameters were
laid out and checked beforehand. A kernel knows its operands by addresses alone. So a graph of the
same work at the same addresses computes the same results as launches, also if the data there has
changed.

The first time, work is launched; the second time it is recorded; from then on the record is
launched. Every thread has separate graphs, because two threads must not use one at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from cupyattn.errors import KernelLaunchError

#: Launches in the graphs of one thread on one device. Each takes some 64 KiB of the device, so all
#: of them 256 MiB. A pass of a whole diffusion transformer has some hundreds, of one to four each.
MAX_LAUNCHES = 4096
#: Number of calls that a thread looks back. A call that came once is remembered for that many other
#: calls. A graph that was launched among them keeps its place. So if more calls take turns than
#: there are places, they are not recorded again each time.
HORIZON = 8192
#: Number of graphs among which a call without a place chooses one to free.
_LOOKS = 8


class Recorded:
    """A graph of a call: launched by its handle, which is None once it was destroyed.

    Parameters
    ----------
    graph : cupy.cuda.Graph
    launches : int
        How many launches it stands for.
    call : int
        Number of the call, of `Graphs.calls`.
    """

    __slots__ = ("_graph", "handle", "last_call", "launches")

    def __init__(self, graph: Any, launches: int, call: int) -> None:
        self._graph, self.handle = graph, graph.graphExec
        self.launches, self.last_call = launches, call

    def destroy(self) -> None:
        """Destroy the graph. The driver frees one that still runs when it has ended."""
        self._graph = self.handle = None


class Graphs:
    """The recorded calls of one thread on one device, and the calls that came once."""

    def __init__(self) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        #: Calls so far. Who launches a `Recorded` by itself counts the call, and notes it there.
        self.calls = 0
        self._launches = 0  # of all graphs
        self._seen: dict[Hashable, None] = {}
        self._graphs: OrderedDict[Hashable, Recorded] = OrderedDict()  # in the order of looks

    def __len__(self) -> int:
        return len(self._graphs)

    def __del__(self) -> None:
        if self._graphs and not sys.is_finalizing():  # a thread ended
            self.clear()

    def clear(self) -> None:
        """Destroy all graphs."""
        with _relaxed():
            for key in list(self._graphs):
                self._destroy(key)

    def _destroy(self, key: Hashable) -> None:
        found = self._graphs.pop(key)
        self._launches -= found.launches
        found.destroy()

    def launch(
        self, key: Hashable, enqueue: Callable[[int], object], stream: int, launches: int = 1
    ) -> Recorded | None:
        """Enqueue work on a stream of the current device, by its graph if there is one.

        Parameters
        ----------
        key : hashable
            Everything on which the work depends: the launches and all addresses. A graph is kept
            with the key, which must keep the launched modules alive.
        enqueue : callable
            Takes a stream's handle; allocates nothing and waits for nothing.
        stream : int
            Handle. Where it is being captured, the caller's graph gets the work itself.
        launches : int
            How many launches the work is.

        Returns
        -------
        Recorded or None
            The graph of this work, None where there is none yet, or the caller's graph got it.
        """
        runtime = self._runtime
        if runtime.streamIsCapturing(stream):
            enqueue(stream)
            return None
        self.calls += 1
        found = self._graphs.get(key)
        if found is not None:
            found.last_call = self.calls
            runtime.graphLaunch(found.handle, stream)
        elif key in self._seen and self._has_room(launches):
            del self._seen[key]
            with _relaxed():  # the first launch of a graph may take memory of the device as well
                found = self._graphs[key] = Recorded(_recorded(enqueue), launches, self.calls)
                self._launches += launches
                runtime.graphLaunch(found.handle, stream)
        else:
            if key not in self._seen and len(self._seen) >= HORIZON:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = None
            enqueue(stream)
        return found

    def _has_room(self, launches: int) -> bool:
        """Whether there is a place, once graphs that were not launched for long have left theirs.

        Graphs are looked at in turns, a few a call: one that is in use goes behind all others.
        """
        for _ in range(_LOOKS if launches <= MAX_LAUNCHES else 0):
            if self._launches + launches <= MAX_LAUNCHES:
                return True
            key, oldest = next(iter(self._graphs.items()))
            if self.calls - oldest.last_call > HORIZON:
                with _relaxed():
                    self._destroy(key)
            else:
                self._graphs.move_to_end(key)
        return self._launches + launches <= MAX_LAUNCHES


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.graphs: dict[int, Graphs] = {}


_per_thread = _PerThread()


def graphs(device: int) -> Graphs:
    """Return the graphs of this thread on a device."""
    found = _per_thread.graphs.get(device)
    if found is None:
        found = _per_thread.graphs[device] = Graphs()
    return found


def _recorded(enqueue: Callable[[int], object]) -> Any:
    """Return a graph of work, none of which is done yet."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    try:
        enqueue(stream.ptr)
    finally:  # a stream that is left capturing could not be destroyed
        graph = stream.end_capture()
    return graph


@functools.cache
def _exchange_mode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """Let this thread take and return memory of the device while another thread captures.

    While one thread does so in CUDA's default mode, others may not. The driver refuses, and drops
    that thread's graph, which might depend on the memory. None depends on what our graphs take.
    """
    import cupy

    mode = ctypes.c_int(cupy.cuda.runtime.streamCaptureModeRelaxed)

    def exchange() -> None:
        status = _exchange_mode()(ctypes.byref(mode))
        if status:
            raise KernelLaunchError(
                f"cuThreadExchangeStreamCaptureMode({mode.value}) failed with error {status}"
            )

    exchange()
    try:
        yield
    finally:
        exchange()
