"""The interface of operations, and the common steps of all calls."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from cupyattn.arrays import memory
from cupyattn.arrays.described import Described, describe, meetings
from cupyattn.arrays.form import forms_of
from cupyattn.arrays.interchange import imported, is_cupy, unchanged
from cupyattn.plans.records import Work
from cupyattn.runtime import origins
from cupyattn.runtime.ready import Ready, Receiver
from cupyattn.runtime.recent import CALLS
from cupyattn.runtime.scratch import Memory, explaining_memory_errors

_log = logging.getLogger("cupyattn")


class Operation:
    """An operation. It does not know how its calls are cached and launched.

    A problem is a `cupyattn.problem.problem.Problem`.
    """

    name: str
    #: Arrays of the caller's that are written to, by buffer, without numbers at the end.
    receives: tuple[str, ...] = ()

    def resolve(self, settings: Any, arrays: Mapping[str, Described]) -> Any:
        """Check a call and settle its kernels; return its problem, the only place of decisions."""
        raise NotImplementedError

    def plan(self, problem: Any) -> Work:
        """Return which kernels are launched: pure data."""
        raise NotImplementedError

    def mirror(self, problem: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results from NumPy, with the kernels' blocks and rounding points.

        `arrays` are the arrays of the problem, by buffer (`Problem.bound`).
        """
        raise NotImplementedError

    def restore(self, facts: Any, arrays: Mapping[str, Any], results: dict[str, Any]) -> Any:
        """Return results in the form that the caller receives; by default, by buffer."""
        return results


class Library(Protocol):
    """The adapter of an array library: everything in which its calls differ from other calls."""

    def forms_of(self, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
        """Return the forms and addresses of a call's arrays; no forms if they must be imported."""

    def described(self, arrays: Mapping[str, Any], forms: Any) -> dict[str, Described]:
        """Describe arrays of these forms; raise for arrays that go in no call together."""

    def imported(self, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """Return NumPy or CuPy arrays of the same memory, and the converter of results."""

    def beside(self, array: Any) -> Any:
        """Return a NumPy or CuPy array, or a description, on the device of another array."""

    def read(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return arrays of NumPy or CuPy with the same numbers, which are there to be read."""

    def on_device_of(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that allocates arrays and runs kernels as the library does."""

    def launch(
        self, ready: Ready, arrays: Mapping[str, Any], addresses: dict[str, int]
    ) -> dict[str, Any]:
        """Launch a call on arrays of its forms; return the results, of the library."""


class _Arrays:
    """NumPy and CuPy, and through them every library that has DLPack."""

    forms_of = staticmethod(forms_of)
    imported = staticmethod(imported)
    launch = staticmethod(Ready.__call__)

    def described(self, arrays: Mapping[str, Any], forms: Any) -> dict[str, Described]:
        return {form[0]: Described(*form) for form in forms}

    def beside(self, array: Any) -> Any:
        if is_cupy(array) or isinstance(array, (np.ndarray, Described)):
            return array
        return imported({"q": array})[0]["q"]

    def read(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        return imported(arrays)[0]

    def on_device_of(self, array: Any) -> contextlib.AbstractContextManager[Any]:
        return memory.on_device_of(array)


ARRAYS = _Arrays()


def run(
    operation: Operation,
    settings: Any,
    arrays: Mapping[str, Any],
    facts: tuple[Any, ...] | None = (),
    as_given: Callable[[Any], Any] = unchanged,
    library: Library = ARRAYS,
) -> Any:
    """Run a call: recall it, or resolve, plan, run and remember it.

    Parameters
    ----------
    operation : Operation
    settings : tuple
        Settings of the operation; hashable if the call is to be remembered.
    arrays : mapping of str to array
        The caller's arrays, by the buffers of the plan. Results have the kind of the first.
    facts : tuple, optional
        Everything else the key of the call must contain, besides settings and forms of arrays; None
        for a call that is not to be remembered.
    as_given : callable
        Converts a result to the kind of the caller's arrays, if they do not show it.
    library : Library
        Library of the arrays.
    """
    given = arrays
    forms, addresses = library.forms_of(arrays)
    if forms is None:
        arrays, own_way = library.imported(arrays)
        as_given = own_way if as_given is unchanged else as_given
        library = ARRAYS
        forms, addresses = library.forms_of(arrays)
    key, ready = None, None
    if facts is not None:
        key, ready = CALLS.find((operation.name, settings, *facts), forms)
    if ready is not None:
        results, known = library.launch(ready, arrays, addresses), ready.facts
    else:
        problem = problem_of(operation, settings, library.described(arrays, forms))
        with library.on_device_of(arrays[problem.like]):
            results = _run_new(operation, problem, arrays, addresses, key, library)
        known = problem.facts
    if as_given is not unchanged:
        results = {name: as_given(result) for name, result in results.items()}
    return operation.restore(known, given, results)


def _run_new(
    operation: Operation,
    problem: Any,
    arrays: Mapping[str, Any],
    addresses: dict[str, int],
    key: Any,
    library: Library,
) -> dict[str, Any]:
    """Plan and run a call that was not found, and remember it under its key, if it has one."""
    if problem.looks:
        problem.look(library.imported(arrays)[0])
    if problem.backend != "cuda":
        return run_on_host(operation, problem, arrays)
    ready = make_ready(problem, operation.plan(problem))
    results = library.launch(ready, arrays, addresses)
    if key is not None and not problem.looks:
        CALLS.remember(key, ready)
    return results


def problem_of(operation: Operation, settings: Any, arrays: Mapping[str, Any]) -> Any:
    """Check a call and settle its kernels, to run, prepare, explain or share it.

    Arrays, of NumPy or CuPy, may be descriptions of some.
    """
    return operation.resolve(settings, describe(arrays, operation.receives))


def make_ready(problem: Any, work: Work) -> Ready:
    """Compile, load and lay out a problem's work on the current device."""
    return Ready(
        work, problem.arch, problem.results, copies=problem.copies, receiver=receiver_of(problem),
        memory=needed(problem, work), facts=problem.facts,
    )  # fmt: skip


def receiver_of(problem: Any) -> Receiver | None:
    """Return the caller's array that receives a result, or None for a new array."""
    for name, out in problem.received.items():
        return Receiver(name, meetings(out, problem.operands))
    return None


def run_on_host(
    operation: Operation, problem: Any, arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a problem's mirror, or its kernels in the interpreter; return the results by buffer."""
    bound = problem.bound(arrays)
    receiver = receiver_of(problem)
    if receiver is not None:
        receiver.check({name: memory.data_address(x) for name, x in bound.items()})
    made = _run_on_host(operation, problem, bound)
    written = (bound[name] for name in problem.received)
    origins.note((*made.values(), *written), problem.backend)
    return made


def _run_on_host(
    operation: Operation, problem: Any, bound: Mapping[str, Any]
) -> dict[str, Any]:
    if problem.backend == "mirror":
        with explaining_memory_errors(needed(problem, None), on_device=False):
            return operation.mirror(problem, bound)
    work = operation.plan(problem)
    if problem.long_run:
        _log.warning("%s", problem.long_run)
    with explaining_memory_errors(needed(problem, work), on_device=False):
        return interpret(problem, work, bound)


def needed(problem: Any, work: Work | None) -> Memory:
    """Describe the memory that a call needs in addition to its operands."""
    sizes = {
        name: math.prod(result.shape) * np.dtype(result.dtype).itemsize
        for name, result in problem.results.items()
    }
    sizes |= {one.name: one.nbytes for one in (work.workspace if work else ())}
    fused = work is not None and problem.fused_form_needs_no_scratch(work)
    return Memory(problem.what, sizes, fused)


def interpret(problem: Any, work: Work, bound: Mapping[str, Any]) -> dict[str, Any]:
    """Run work in the interpreter on NumPy arrays; return the results by buffer."""
    from cupyattn import interpret as interpreter

    scratch = {one.name: memory.fresh(one.shape, one.dtype, one.zeros) for one in work.between}
    for one in work.between:
        if one.cast_of:
            with np.errstate(over="ignore"):  # an infinity, as on a device
                scratch[one.name][...] = bound[one.cast_of]
        if one.copy_of:
            scratch[one.name][...] = bound[one.copy_of]
    # NOTE: a fresh array is often zero, and a store that never happens would not be seen.
    made = {name: memory.fresh(one.shape, one.dtype) for name, one in problem.results.items()}
    for name, one in problem.results.items():
        if one.fill is not None:
            made[name][...] = bound[one.fill] if isinstance(one.fill, str) else one.fill
    inputs = {name: memory.as_input(bound[name]) for name in problem.operands}
    received = {name: bound[name] for name in problem.received}
    buffers = {**inputs, **received, **scratch, **made}
    for plan, names in zip(work.plans, work.names, strict=True):
        own = {inner: buffers[outer] for inner, outer in names.items() if outer in buffers}
        interpreter.run(plan, {**buffers, **own}, problem.arch)
    return made
