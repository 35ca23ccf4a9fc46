"""What an operation is, and the one way that all of them run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyattn.arrays import memory
from cupyattn.arrays.form import forms_of
from cupyattn.plans.records import Work
from cupyattn.runtime import origins
from cupyattn.runtime.ready import Ready, Receiver
from cupyattn.runtime.recent import CALLS
from cupyattn.runtime.scratch import Memory, saying_what_is_needed

_log = logging.getLogger("cupyattn")


class Operation(Protocol):
    """All that is said of an operation: how its calls are kept and launched, it does not know.

    A problem is a `cupyattn.problem.problem.Problem`, or has what that has.
    """

    name: str

    def resolve(self, settings: Any, arrays: Mapping[str, Any]) -> Any:
        """Check a call, and settle what runs: return its problem."""

    def plan(self, problem: Any) -> Work:
        """Return which kernels are launched: pure data."""

    def mirror(self, problem: Any) -> dict[str, Any]:
        """Return the results from NumPy, with the kernels' blocks and rounding points."""

    def restore(self, facts: Any, arrays: Mapping[str, Any], results: dict[str, Any]) -> Any:
        """Return results as the caller of such arrays gets them."""


class Known(NamedTuple):
    """What a call on CuPy arrays depends on.

    Parameters
    ----------
    arrays : mapping of str to array
        The operands by the buffers of the plan, and an ``out``.
    facts : tuple
        What it depends on beside these and its settings.
    """

    arrays: Mapping[str, Any]
    facts: tuple[Any, ...] = ()


def run(
    operation: Operation, settings: Any, arrays: Mapping[str, Any], known: Known | None = None
) -> Any:
    """Run a call: recall it, or resolve, plan, run and remember it.

    Parameters
    ----------
    operation : Operation
    settings : tuple
        Its own; hashable where the call is to be remembered.
    arrays : mapping of str to array
        The caller's, by the names of the arguments.
    known : Known, optional
        None for a call that is not to be remembered.
    """
    if known is None:
        return run_new(operation, settings, arrays, None, {})
    forms, addresses = forms_of(known.arrays)
    key, again = CALLS.find((operation.name, settings, *known.facts), forms)
    if again is not None:
        return operation.restore(again.facts, arrays, again(known.arrays, addresses))
    return run_new(operation, settings, arrays, key, addresses)


def run_new(
    operation: Operation,
    settings: Any,
    arrays: Mapping[str, Any],
    key: Any,
    addresses: Mapping[str, int],
) -> Any:
    """Resolve, plan and run a call that was not found.

    Parameters
    ----------
    operation, settings, arrays
        As for `run`.
    key : object
        Under which later calls are to find it, in `CALLS`; None for a call that is not remembered.
    addresses : mapping of str to int
        Where the caller's arrays lie, by the buffers of the plan. A call that reads a copy of one
        is not remembered.
    """
    problem = problem_of(operation, settings, arrays)
    with memory.on_device_of(problem.like):
        if problem.backend == "cuda":
            ready = make_ready(problem, operation.plan(problem))
            read = {**problem.operands, **problem.received}
            own = {name: memory.data_address(array) for name, array in read.items()}
            # NOTE: views of what was copied lie elsewhere than the caller's arrays do.
            copied = any(own[name] != at for name, at in addresses.items() if name in own)
            made = ready(read, own)
            if key is not None and ready.can_be_kept and not copied:
                CALLS.remember(key, ready)
        else:
            made = run_on_host(operation, problem)
    results = {name: problem.as_given(result) for name, result in made.items()}
    return operation.restore(problem.facts, arrays, results)


def problem_of(operation: Operation, settings: Any, arrays: Mapping[str, Any]) -> Any:
    """Check a call and settle what runs: for all who run, prepare, explain or share one."""
    return operation.resolve(settings, arrays)


def make_ready(problem: Any, work: Work) -> Ready:
    """Compile, load and lay out a problem's work on the current device."""
    receiver = None
    for name, out in problem.received.items():
        receiver = Receiver(name, memory.meetings(out, problem.operands))
    return Ready(
        work, problem.arch, problem.results, kept=problem.kept, receiver=receiver,
        memory=needed(problem, work), facts=problem.facts,
    )  # fmt: skip


def run_on_host(operation: Operation, problem: Any) -> dict[str, Any]:
    """Run a problem's mirror, or its kernels in the interpreter; return the results by buffer."""
    made = _run_on_host(operation, problem)
    origins.note((*made.values(), *problem.received.values()), problem.backend)
    return made


def _run_on_host(operation: Operation, problem: Any) -> dict[str, Any]:
    if problem.backend == "mirror":
        with saying_what_is_needed(needed(problem, None), on_device=False):
            return operation.mirror(problem)
    work = operation.plan(problem)
    if problem.long_run:
        _log.warning("%s", problem.long_run)
    with saying_what_is_needed(needed(problem, work), on_device=False):
        return interpret(problem, work)


def needed(problem: Any, work: Work | None) -> Memory:
    """Say which memory a call needs beside its operands."""
    sizes = {
        name: math.prod(result.shape) * np.dtype(result.dtype).itemsize
        for name, result in problem.results.items()
    }
    sizes |= {one.name: one.nbytes for one in (work.workspace if work else ())}
    fused = work is not None and problem.needs_none_fused(work)
    return Memory(problem.what, sizes, fused)


def interpret(problem: Any, work: Work) -> dict[str, Any]:
    """Run work in the interpreter on NumPy arrays; return the results by buffer."""
    from cupyattn import interpret as interpreter

    scratch = {one.name: memory.fresh(one.shape, one.dtype, one.zeros) for one in work.between}
    copies = {}
    for one in work.between:
        if one.cast_of:
            scratch[one.name][...] = problem.operands[one.cast_of]
        if one.copy_of:
            scratch[one.name][...] = problem.kept[one.copy_of]
            copies[one.copy_of] = scratch[one.name].copy()
    # NOTE: a fresh array is often zero, and a store that never happens would not be seen.
    made = {name: memory.fresh(one.shape, one.dtype) for name, one in problem.results.items()}
    for name, one in problem.results.items():
        if one.fill is not None:
            made[name][...] = one.fill
    inputs = {name: memory.as_input(a) for name, a in {**problem.operands, **copies}.items()}
    buffers = {**inputs, **problem.received, **scratch, **made}
    for plan, names in zip(work.plans, work.names, strict=True):
        own = {inner: buffers[outer] for inner, outer in names.items() if outer in buffers}
        interpreter.run(plan, {**buffers, **own}, problem.arch)
    return made
