"""A call prepared: checked, planned, compiled and loaded once, then run on arrays of one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.arrays import memory
from cupyattn.arrays.form import forms_of, said
from cupyattn.arrays.interchange import imported, unchanged
from cupyattn.ops.call_operands import arguments_of
from cupyattn.ops.operation import Operation, make_ready, problem_of, run_on_host
from cupyattn.plans.records import Plan
from cupyattn.problem.attention import AttentionProblem
from cupyattn.problem.sequences import LENGTHS, SEQUENCES
from cupyattn.problem.settings import Settings
from cupyattn.problem.support import PADDED_BIAS
from cupyattn.quant.quantized import QuantizedQKV

#: Arrays that a call may replace, besides q, k and v.
_REPLACED = ("mask", "bias", *SEQUENCES, *LENGTHS)


class Prepared:
    """One call of `cupyattn.attention`, ready to run: the result of `cupyattn.plan`.

    Call it with arrays of the form that it was planned for: same shapes, strides, dtypes and
    addresses modulo 16. If the same addresses repeat, its launches become one launch of a CUDA
    graph, which only saves host time. It owns its scratch memory, so a CUDA graph may capture the
    call and replay it while the object exists. Two calls, or two graphs, of one object must not run
    at the same time on different streams. Their results would be wrong, and blocks that wait for
    numbers of the other call might never end.

    Parameters
    ----------
    operation : Operation
        The operation of attention.
    settings : Settings
    arrays : mapping
        Its array arguments, as `cupyattn.problem.settings.parse` returns them.
    """

    def __init__(
        self, operation: Operation, settings: Settings, arrays: Mapping[str, Any]
    ) -> None:
        asked, by_buffer, _ = arguments_of(settings, arrays)
        given, _ = imported(by_buffer)
        problem: AttentionProblem = problem_of(operation, asked, given)
        self._operation = operation
        #: Settings with limits of lengths, so later calls need not find these.
        self._settings = settings._replace(
            max_len_q=problem.settings.max_len_q, max_len_k=problem.settings.max_len_k
        )
        self._problem, self.call, self.backend = problem, problem.call, problem.backend
        self.kernel, self.variant, self.why = problem.kernel, problem.variant.name, problem.why
        self._work = operation.plan(problem)
        self._forms, _ = forms_of(given)
        self._codes = asked.codes
        #: Arguments besides q, k, v and out, which every call uses again, and their arrays by
        #: buffer.
        self._others = {n: a for n, a in arrays.items() if n not in ("q", "k", "v", "out")}
        own = {"q", "k", "v", "o", *(problem.quantized.buffers if problem.quantized else ())}
        self._beside = {n: a for n, a in by_buffer.items() if n not in own}
        if self.backend == "cuda":
            with memory.on_device_of(given[problem.like]):
                problem.look(given)
                self._ready = make_ready(problem, self._work)
                try:
                    self._scratch = self._ready.allocate()
                except MemoryError as error:
                    raise self._ready.memory.error(on_device=True) from error

    @property
    def plans(self) -> list[Plan]:
        """The plans that run, one after the other."""
        return self._work.plans

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory in bytes."""
        return sum(work.nbytes for work in self._work.workspace)

    def __str__(self) -> str:
        first = f"{self.variant}: {self.why}"
        return "\n".join([first, *self._work.memory, *map(str, self.plans)])

    def __call__(
        self, q: Any, k: Any = None, v: Any = None, *, out: Any = None, **others: Any
    ) -> Any:
        """Run on other arrays of the same form.

        Parameters
        ----------
        q, k, v : array, or q a QuantizedQKV
        out : array, optional
            Receives O; given if and only if the call was planned with one.
        **others : array
            ``mask``, ``bias``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``lengths_q`` and ``lengths_kv``
            in place of the arrays that the call was planned with. No sequence may be longer than
            planned.

        Returns
        -------
        o, or (o, lse) where the call was planned with ``return_lse=True``
            As `cupyattn.attention`.

        Raises
        ------
        ValueError
            For arrays of another form; the message says what differs.
        TypeError
            For other arguments that it does not take.
        DeviceMemoryError
            If results and scratch memory do not fit. Nothing was launched.
        """
        replaced = _replaced(others) if others else others
        arrays = {"q": q, "k": k, "v": v}
        if self._codes is not None and isinstance(q, QuantizedQKV):
            same = q.facts == self._codes and q.as_given is unchanged
            arrays = q.buffers if same and k is v is None else {}
        arrays |= {**self._beside, **replaced}
        if out is not None:
            arrays["o"] = out
        forms, addresses = forms_of(arrays)
        if forms != self._forms or self._problem.looks:
            given = {"q": q, "k": k, "v": v, **self._others, **replaced}
            return self._otherwise(given if out is None else {**given, "out": out})
        if self.backend != "cuda":
            made = run_on_host(self._operation, self._problem, arrays)
        else:
            if self._ready.copies:
                self._check_not_copied(self._problem, arrays)
            made = self._ready(arrays, addresses, self._scratch)
        return self._operation.restore(None, arrays, made)

    def _otherwise(self, given: Mapping[str, Any]) -> Any:
        """Run on codes, or on arrays that must first be checked, copied or imported.

        Raise ValueError for arrays of another form."""
        (asked, by_buffer, _), q = arguments_of(self._settings, given), given["q"]
        arrays, own_way = imported(by_buffer)
        problem: AttentionProblem = problem_of(self._operation, asked, arrays)
        self._check(problem)
        problem.look(arrays)
        if self.backend != "cuda":
            made = run_on_host(self._operation, problem, arrays)
        else:
            with memory.on_device_of(arrays[problem.like]):
                self._check_not_copied(problem, arrays)
                bound = problem.bound(arrays)
                places = {name: memory.data_address(x) for name, x in bound.items()}
                made = self._ready(bound, places, self._scratch, copied=True)
        way = q.as_given if isinstance(q, QuantizedQKV) else own_way
        results = {name: way(result) for name, result in made.items()}
        return self._operation.restore(None, by_buffer, results)

    def _check_not_copied(self, problem: AttentionProblem, arrays: Mapping[str, Any]) -> None:
        """Raise ValueError if a CUDA graph captures a call that copies an operand.

        The copy's memory would return to the pool after the call, and replays would write to it.
        """
        if not self._ready.is_captured():
            return
        for name in problem.copies:
            array = arrays[name]
            size = int(array.dtype.itemsize)
            if name == "bias":
                raise ValueError(
                    "bias must not need a copy while a CUDA graph captures the call, got strides "
                    f"{tuple(array.strides)} of {size}-byte elements: {PADDED_BIAS}"
                )
            raise ValueError(
                f"{name} must not need a copy while a CUDA graph captures the call, got address "
                f"{size} n + {memory.data_address(array) % size} and strides "
                f"{tuple(array.strides)} of {size}-byte elements: copy {name} to memory of its own "
                "before the capture"
            )

    def _check(self, problem: AttentionProblem) -> None:
        """Raise ValueError for operands of other forms than the call was planned for."""
        planned, found = (
            {**one.operands, **one.received} for one in (self._problem, problem)
        )
        for name, x in planned.items():
            called, own = "out" if name == "o" else name, found.get(name)
            if own is None or own.as_read != x.as_read:
                has = "nothing" if own is None else said(own.as_read)
                raise ValueError(
                    f"{called} was planned as {said(x.as_read)}, got {has}: call plan again"
                )
        for name in found.keys() - planned.keys():
            called = "out" if name == "o" else name
            raise ValueError(
                f"{called} was not given when the call was planned: call plan with one"
            )


def _replaced(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a call that replace arrays of the plan."""
    for name in others.keys() - {*_REPLACED}:
        raise TypeError(f"a prepared call takes {', '.join(_REPLACED)} and out, got {name!r}")
    return {name: a for name, a in others.items() if a is not None}
