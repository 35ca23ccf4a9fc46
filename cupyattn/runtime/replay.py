"""Launches that come again: one launch of a CUDA graph in their place.

A launch costs the host several microseconds, a graph of one or a handful less: its parameters were
laid out and checked beforehand. What a kernel reads and writes it knows by addresses alone, so a
graph of the same work at the same addresses computes what the launches would, whatever lies there
by then.

The first time, work is launched; the second time it is recorded; from then on the record is
launched. Every thread has graphs of its own, since the driver lets no two threads use one at once.
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

#: Graphs of one thread, of all of its calls: each takes some 64 KiB of the device for a launch.
MAX_GRAPHS = 128
#: How far back a thread looks, in calls. What came once is known for so many others; and a graph
#: that was launched among so many keeps its place, so that calls which come in turns, more of them
#: than there are places, are not recorded anew each time.
HORIZON = 1024


class Graphs:
    """What one thread has recorded, and what it has seen once."""

    def __init__(self) -> None:
        self._calls = 0
        self._seen: dict[Hashable, None] = {}
        self._graphs: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # graph, last call

    def __len__(self) -> int:
        return len(self._graphs)

    def __del__(self) -> None:
        if self._graphs and not sys.is_finalizing():  # a thread ended
            with _relaxed():
                self._graphs.clear()

    def launch(self, key: Hashable, enqueue: Callable[[int], object], stream: int) -> None:
        """Enqueue work on a stream of the current device, by a graph of it where there is one.

        Parameters
        ----------
        key : hashable
            What the work depends on: what is launched, and all addresses. A graph of it is kept
            with the key, which has to keep alive what is launched.
        enqueue : callable
            Takes a stream's handle; allocates nothing and waits for nothing.
        stream : int
            Handle. Where it is being captured, the caller's graph gets the work itself.
        """
        import cupy

        runtime = cupy.cuda.runtime
        if runtime.streamIsCapturing(stream):
            enqueue(stream)
            return
        self._calls += 1
        found = self._graphs.get(key)
        if found is not None:
            graph, _ = found
            self._graphs[key] = graph, self._calls
            self._graphs.move_to_end(key)
            runtime.graphLaunch(graph.graphExec, stream)
        elif key in self._seen and self._has_room():
            del self._seen[key]
            with _relaxed():  # the first launch of a graph may take memory of the device as well
                if len(self._graphs) >= MAX_GRAPHS:
                    self._graphs.popitem(last=False)
                graph = _recorded(enqueue)
                self._graphs[key] = graph, self._calls
                runtime.graphLaunch(graph.graphExec, stream)
        else:
            if key not in self._seen and len(self._seen) >= HORIZON:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = None
            enqueue(stream)

    def _has_room(self) -> bool:
        """Whether there is a place, or a graph that was not launched for long."""
        if len(self._graphs) < MAX_GRAPHS:
            return True
        _, last_call = next(iter(self._graphs.values()))
        return self._calls - last_call > HORIZON


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.graphs = Graphs()


_per_thread = _PerThread()


def graphs() -> Graphs:
    """Return the graphs of this thread."""
    return _per_thread.graphs


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

    While one does so in CUDA's default mode, others may not: the driver refuses, and gives up that
    thread's graph, which might depend on the memory. None depends on what our graphs take.
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
