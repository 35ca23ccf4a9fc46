"""Calls of ours and of torch's as CUDA graphs: what they take of the device, with no host in it.

A library behind torch takes the host a few hundred microseconds for a call, with its operands cast
before it. Where the device is done sooner, a time would be that of Python.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import cupyattn as ca
from cupyattn.measure import timing

#: Largest difference between a graph's result and a call's, relative to the sum of magnitudes.
#: SageAttention 1 subtracts the mean from its caller's keys in place, so its operands differ each
#: time.
TOLERANCE = 0.01


def of_calls(
    calls: Mapping[str, Callable[[int], Any]], count: int
) -> dict[str, Callable[[int], object]]:
    """Return graphs of calls, in place of what `cupyattn.measure.timing.time_interleaved` takes.

    Parameters
    ----------
    calls : mapping of str to callable
        Each has run before; it returns an array, or a tuple whose first one is.
    count : int
        Calls in each graph, of the numbers 0 to ``count - 1``.

    Returns
    -------
    dict of str to callable
        Without those that there is no graph of: standard error has the reasons.
    """
    found = {}
    for name, call in calls.items():
        try:
            found[name] = recorded(call, count)
        except (RuntimeError, ca.UnsupportedError) as error:
            print(f"{name}: no CUDA graph: {' '.join(str(error).split())}", file=sys.stderr)
    return found


def recorded(call: Callable[[int], Any], count: int) -> Callable[[int], object]:
    """Return a graph of calls, with all memory that they take its own.

    Parameters
    ----------
    call : callable
        Of CuPy's work or torch's, or both, on the current streams of these.
    count : int

    Returns
    -------
    callable
        Launches the graph on CuPy's current stream, whatever number it is given.

    Raises
    ------
    RuntimeError
        Where the calls cannot be captured, or the graph does not compute what the last call does:
        where work goes to another stream than the current one, it has run by then, and is not in
        the graph.
    """
    import cupy

    expected = numbers(call(count - 1))
    memory: list[Any] = [cupy.cuda.MemoryPool()]
    results: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.using_allocator(memory[0].malloc))
        torch = sys.modules.get("torch")
        if torch is not None:
            memory.append(torch.cuda.MemPool())
            stack.enter_context(torch.cuda.use_mem_pool(memory[1]))

        def on_the_same_stream(i: int) -> None:
            with contextlib.ExitStack() as inner:
                if torch is not None:
                    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
                    inner.enter_context(torch.cuda.stream(stream))
                results[:] = [call(i)]

        cupy.cuda.Device().synchronize()  # what the graph reads is there
        graph = timing.captured(on_the_same_stream, count)
    result = results.pop()
    as_bytes(result)[...] = 0
    graph(0)
    difference = float(abs(numbers(result) - expected).sum())
    if not difference <= TOLERANCE * float(abs(expected).sum()):  # NaN is not
        raise RuntimeError("the graph does not compute what the call does")
    return lambda i: (graph(i), memory)[0]  # which keep the memory as long as the graph


def first_of(result: Any) -> Any:
    """Return an array, or the first one of a tuple."""
    return result[0] if isinstance(result, tuple) else result


def as_bytes(result: Any) -> Any:
    """Return the bytes of what a call returned, as an array over the same memory."""
    import cupy

    first = first_of(result)
    if isinstance(first, cupy.ndarray):
        return first.view("uint8")
    return cupy.from_dlpack(first.view(sys.modules["torch"].uint8))


def numbers(result: Any) -> Any:
    """Return a copy of what a call returned in float32, in CuPy's memory."""
    import cupy

    first = first_of(result)
    if isinstance(first, cupy.ndarray):
        return first.astype("float32")
    return cupy.from_dlpack(first.float()).copy()
