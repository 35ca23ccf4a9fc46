"""Make calls for one place in Inductor's code, where a repeated call is one launch of a graph.

The header of the code makes a function for each place (`place`); the code calls it with tensors.
The function allocates results and scratch memory as Inductor does, and reads addresses. It looks up
a graph in a dictionary of its thread and launches it. If there is none, the operator runs. A place
is made from texts only, so Inductor's caches can store it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupyattn.compiler.modules import GENERATION
from cupyattn.interop.torch import bridge, ops
from cupyattn.runtime import replay
from cupyattn.runtime.ready import Ready

#: Largest number of graphs of a thread at one place; when it is exceeded, all are dropped. A place
#: in a repeated block's code serves all blocks, each with its weights.
MOST = 1024

_DEVICE = """\
def call({parameters}):
    if modes() or profiled():
        return operator(*{arguments})
    {allocate}
    scratch = empty(({nbytes},), (1,), uint8)
    at = stream({index})
    key = ({key},)
    graph = here.graphs.get(key)
    if (
        graph is None or graph.handle is None or here.generation != generation[0] or capturing(at)
    ):
        given = tensors, results, scratch = ({tensors},), ({names}), scratch
        return found({form}, key, given, at, {returned}, {arguments})
    of_device = here.of_device
    of_device.calls = graph.last_call = of_device.calls + 1
    launch(graph.handle, at)
    return {returned}
"""
_HOST = """\
def call({parameters}):
    if modes() or profiled():
        return operator(*{arguments})
    return run(({tensors},), {arguments})
"""


def place(
    operator: str,
    device: tuple[str, int],
    tensors: int,
    symbols: Sequence[str],
    results: Sequence[str],
    arguments: str,
    returned: str,
) -> Any:
    """Return the function of a place in generated code.

    Parameters
    ----------
    operator : str
        Its name in ``torch.ops.cupyattn``.
    device : (str, int)
        Type, "cpu" or "cuda", and index.
    tensors : int
        Number of tensors that the function takes: t0, t1, and so on.
    symbols : sequence of str
        Its further arguments: all lengths that operands, results and arguments depend on.
    results : sequence of str
        Shape, strides and type of each result, as an expression of symbols.
    arguments, returned : str
        The operator's arguments and its result, as expressions of t0, ..., y0, ... and symbols.

    Returns
    -------
    callable
        Takes the tensors and the symbols; returns the operator's result.
    """
    kind, index = device
    own = Place(operator, index if kind == "cuda" else None)
    given = [f"t{number}" for number in range(tensors)]
    made = [f"y{number}" for number in range(len(results))]
    reads = [f"{name}.data_ptr()" for name in (*given, *made, "scratch")]
    form = f"({''.join(f'{name}, ' for name in symbols)})"
    text = (_DEVICE if kind == "cuda" else _HOST).format(
        parameters=", ".join([*given, *symbols]), arguments=arguments, index=index, form=form,
        allocate="; ".join(f"{y} = empty({x})" for y, x in zip(made, results, strict=True)),
        nbytes=f"nbytes.get({form}, 0)" if symbols else "nbytes[()]",
        key=", ".join([*symbols, *reads]), tensors=", ".join(given),
        names="".join(f"{y}, " for y in made), returned=returned,
    )  # fmt: skip
    space = own.names()
    exec(compile(text, f"<cupyattn place of {operator}>", "exec"), space)
    return space["call"]


class _Here(threading.local):
    """The graphs of one thread at a place."""

    def __init__(self, device: int) -> None:
        self.graphs: dict[tuple[int, ...], replay.Recorded] = {}
        self.of_device = replay.graphs(device)
        self.generation = GENERATION[0]


class _Known(NamedTuple):
    """A call of a form: its launches, and the number of each buffer among tensors and results.

    The numbers exist once a second call had the same launches, and never if a call does more than
    launch.
    """

    ready: Ready
    buffers: dict[str, int] | None = None


class Place:
    """One place of generated code.

    Parameters
    ----------
    operator : str
        Its name in ``torch.ops.cupyattn``.
    device : int or None
        Index of a CUDA device, None for the host.
    """

    def __init__(self, operator: str, device: int | None) -> None:
        self._operator = getattr(torch.ops.cupyattn, operator).default
        self._kernel = ops.KERNELS[self._operator]
        self._device = device
        self._known: dict[Any, _Known] = {}  # by symbols, and addresses modulo 16
        self._nbytes: dict[tuple[int, ...], int] = {(): 0}  # of scratch memory, by symbols
        self._generation = GENERATION[0]

    def names(self) -> dict[str, Any]:
        """Return the objects, by name, that the text of a place uses."""
        found = {
            "operator": self._operator, "run": self.run, "torch": torch, "math": math,
            "modes": torch._C._len_torch_dispatch_stack,
            "profiled": torch.autograd._profiler_enabled,
        }  # fmt: skip
        if self._device is None:
            return found
        import cupy

        self._here = _Here(self._device)
        return found | {
            "empty": torch._C._dynamo.guards._empty_strided_cuda, "uint8": torch.uint8,
            "stream": torch._C._cuda_getCurrentRawStream, "here": self._here,
            "capturing": cupy.cuda.runtime.streamIsCapturing,
            "launch": cupy.cuda.runtime.graphLaunch, "generation": GENERATION,
            "nbytes": self._nbytes, "found": self.found,
        }  # fmt: skip

    def run(self, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """Run the operator without its dispatcher, which resolves views that negate."""
        if any(x.is_neg() for x in tensors):
            return self._operator(*arguments)
        return self._kernel(*arguments)

    def found(
        self,
        symbols: tuple[int, ...],
        key: tuple[int, ...],
        given: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
        stream: int,
        returned: Any,
        arguments: Sequence[Any],
    ) -> Any:
        """Run a call without a graph of this thread, or into a graph that the caller captures.

        Parameters
        ----------
        symbols, key : tuple of int
            Lengths; these and all addresses.
        given : tuple
            The tensors, results and scratch memory of the call.
        stream : int
            Handle.
        returned
            The results as the operator returns them.
        arguments : sequence
            The operator's.
        """
        tensors, results, scratch = given
        self._renew()
        form = symbols, tuple([x.data_ptr() % 16 for x in tensors])
        known = self._known.get(form)
        if known is None or known.buffers is None or scratch.numel() < known.ready.scratch_bytes:
            return self._run_and_know(form, tensors, results, arguments)
        lie = [x.data_ptr() for x in (*tensors, *results)]
        addresses = {name: lie[number] for name, number in known.buffers.items()}
        graph = known.ready.launch(addresses, scratch.data_ptr(), stream)
        if graph is not None:
            here = self._here.graphs
            if len(here) >= MOST:
                here.clear()
            here[key] = graph
        return returned

    def _renew(self) -> None:
        """Forget stale calls and graphs."""
        now = GENERATION[0]
        if self._generation != now:
            self._known.clear()
            self._generation = now
        if self._here.generation != now:
            self._here.graphs.clear()
            self._here.generation = now

    def _run_and_know(
        self,
        form: Any,
        tensors: Sequence[Tensor],
        results: Sequence[Tensor],
        arguments: Sequence[Any],
    ) -> Any:
        """Run the operator, which allocates its results, and remember its launches."""
        with bridge.noting() as launched:
            made = self.run(tensors, arguments)
        if len(launched) != 1:  # such as calls whose fallbacks are counted
            return made
        ready, by_buffer = launched[0]
        before = self._known.get(form)
        if before is None or before.ready is not ready:  # calls that depend on values come new
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[form] = _Known(ready)
        elif ready.is_launched_alone:
            own = [*made] if isinstance(made, (list, tuple)) else [made] * (made is not None)
            buffers = _buffers(by_buffer, [*tensors, *own])
            if buffers is not None and all(map(_have_same_layout, own, results)):
                self._known[form] = _Known(ready, buffers)
                symbols, _ = form
                self._nbytes[symbols] = max(self._nbytes.get(symbols, 0), ready.scratch_bytes)
        return made


def _buffers(by_buffer: Any, tensors: Sequence[Tensor]) -> dict[str, int] | None:
    """Return the number of each buffer's tensor; None if one has no number, or two have one."""
    numbers = {id(x): number for number, x in enumerate(tensors)}
    found = {name: numbers.get(id(x), -1) for name, x in by_buffer.items()}
    return None if len(numbers) < len(tensors) or -1 in found.values() else found


def _have_same_layout(x: Tensor, y: Tensor) -> bool:
    return bool(x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype)
