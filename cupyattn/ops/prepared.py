"""A call prepared: checked, planned, compiled and loaded once, then run on arrays of one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.arrays import memory
from cupyattn.arrays.form import described, forms_of, same_place
from cupyattn.arrays.interchange import check_not_copied, is_cupy, misaligned, take
from cupyattn.ops.call_operands import PAIRS, direct_operands
from cupyattn.ops.operation import Operation, interpret, make_ready, problem_of
from cupyattn.plans.records import Plan
from cupyattn.problem.request import LENGTHS, OF_SCORES, SEQUENCES, Request
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.row_preparation import BUFFERS
from cupyattn.problem.settings import Settings
from cupyattn.quant.quantized import QuantizedQKV

#: Buffers of a call beside q, k and v, which a prepared call keeps.
ADDED = (*OF_SCORES, *BUFFERS, *SEQUENCES, *LENGTHS)
#: Those of them that a call may replace.
_REPLACED = ("mask", "bias", *SEQUENCES, *LENGTHS)


class Prepared:
    """One call of `cupyattn.attention`, ready to run: what `cupyattn.plan` returns.

    Call it with arrays of the form that it was planned for: same shapes, strides, dtypes and
    addresses modulo 16. Where the same addresses come again, its launches are one launch of a CUDA
    graph, which costs the host less and changes nothing else. Its scratch memory is its own, so a
    CUDA graph may capture the call and replay it as long as the object lives, and two calls, or two
    graphs of it, must not run at the same time on different streams: their results would be wrong,
    and blocks that wait for numbers of the other call might wait for ever.

    Parameters
    ----------
    operation : Operation
        That of attention.
    settings : Settings
    arrays : mapping
        Its arguments, as `cupyattn.problem.settings.parse` tells them apart.
    """

    def __init__(
        self, operation: Operation, settings: Settings, arrays: Mapping[str, Any]
    ) -> None:
        request: Request = problem_of(operation, settings, arrays)
        self._operation, self._settings = operation, request.settings
        self.call, self.backend, self.kernel = request.call, request.backend, request.kernel
        self.variant, self.why = request.variant.name, request.why
        self._work = operation.plan(request)
        operands = request.operands
        self._forms, _ = forms_of({**operands, **request.received})
        self._added = {name: a for name, a in operands.items() if name in ADDED}
        #: Arguments that every call has again: a copy of what they hold is made for each call.
        self._given = {n: arrays[n] for n in ("block_mask", *PAIRS) if n in arrays}
        # NOTE: what had to be copied, or converted as numbers of 64 bits are, is read again in each
        # call, from the caller's memory.
        direct = {}
        for name in self._added.keys() & {*_REPLACED} & arrays.keys():
            own = misaligned(arrays[name])
            if own is None:
                own, _ = take(name, arrays[name])
            if not same_place(own, operands[name]):
                self._added[name] = own
            else:
                direct[name] = own
        #: Forms of arrays that others of the same form may replace as they come.
        self._replaceable = {*(forms_of(direct)[0] or ())}
        # NOTE: tables and weights, too, which the short way of a call would not read again.
        self._tables = {
            name: array
            for option, names in PAIRS.items()
            if isinstance(arrays.get(option), (tuple, list))
            for name, array in zip(names, arrays[option], strict=True)
        }
        reads_tables = any(misaligned(a) is not None for a in self._tables.values())
        self._array: Any = None  # CuPy's arrays, where the call is one on them
        #: Whether CuPy's arrays may go to the kernels as they come, unread.
        self._is_plain = (
            self.backend == "cuda" and not settings.check_finite and not reads_tables
        )
        if self.backend == "cuda":
            self._array = type(request.q)
            with memory.on_device_of(request.q):
                self._ready = make_ready(request, self._work)
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
            in place of those that the call was planned with. No sequence may be longer than the
            call was planned for.

        Returns
        -------
        o, or (o, lse) where the call was planned with ``return_lse=True``
            As `cupyattn.attention`.

        Raises
        ------
        ValueError
            For arrays of another form; the message says what differs.
        TypeError
            For others that it does not take.
        DeviceMemoryError
            If results and scratch memory do not fit; nothing was launched then.
        """
        replaced = _replaced(others) if others else others
        found = self._as_they_come(q, k, v, out, replaced) if self._is_plain else None
        if found:
            operands, addresses = found
            made = self._ready(operands, addresses, self._scratch)
            return self._operation.restore(None, {} if out is None else {"out": out}, made)
        names: tuple[str, ...] = _REPLACED
        if isinstance(q, QuantizedQKV):  # which has offsets of its own
            names = tuple(name for name in names if name not in SEQUENCES or name in replaced)
        changed = {name: a for name, a in (self._added | replaced).items() if name in names}
        if self.backend == "cuda" and self._ready.is_captured():
            self._check_not_copied(q, k, v, changed)
        received = {} if out is None else {"out": out}
        arrays = {"q": q, "k": k, "v": v, **self._given, **changed, **received}
        return self._run(problem_of(self._operation, self._settings, arrays), arrays)

    def _as_they_come(
        self, q: Any, k: Any, v: Any, out: Any, replaced: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, int]] | None:
        """Return the operands and their addresses where the kernels may read a call's arrays as
        they come; None where it goes the long way, which copies arrays or refuses them."""
        if replaced:
            forms, places = forms_of(replaced)
            if forms is None or not self._replaceable.issuperset(forms):
                return None
        arrays = operands = {"q": q, "k": k, "v": v}
        if not type(q) is type(k) is type(v) is self._array:
            operands = direct_operands(arrays) or {}
            if not all(map(is_cupy, operands.values())):
                return None
        if out is not None and not is_cupy(out):
            return None
        o, layout = out, self._settings.layout
        try:
            if layout == "BSHD" and operands is arrays:  # codes have heads first
                operands = {name: to_bhsd(a, layout) for name, a in arrays.items()}
                o = None if out is None else to_bhsd(out, layout)
            if self._added:
                operands = {**operands, **self._added}
            addresses = self.check(operands, o)
        except ValueError:
            return None
        if replaced:
            return {**operands, **replaced}, {**addresses, **places}
        return operands, addresses

    def _run(self, request: Request, arrays: Mapping[str, Any]) -> Any:
        """Run on the arrays of a request."""
        addresses = self.check(request.operands, request.receiver)
        if self.backend == "mirror":
            made = self._operation.mirror(request)
        elif self.backend == "cuda":
            made = self._ready(request.operands, addresses, self._scratch)
        else:
            made = interpret(request, self._work)
        results = {name: request.as_given(result) for name, result in made.items()}
        return self._operation.restore(None, arrays, results)

    def _check_not_copied(self, q: Any, k: Any, v: Any, changed: Mapping[str, Any]) -> None:
        """Raise ValueError if an operand of the call would have to be copied."""
        if not isinstance(q, QuantizedQKV):  # whose arrays are aligned since it was made
            for name, array in (("q", q), ("k", k), ("v", v)):
                check_not_copied(name, array, rows=True)
        for name, array in (*changed.items(), *self._tables.items()):
            check_not_copied(name, array, rows=False)

    def check(self, operands: Mapping[str, Any], out: Any) -> dict[str, int]:
        """Return the addresses of arrays that have the form that the call was planned for.

        Raises
        ------
        ValueError
            For others, and for an `out` that shares memory with what is read.
        """
        arrays = operands if out is None else {**operands, "o": out}
        forms, addresses = forms_of(arrays)
        return addresses if forms == self._forms else self._compared(arrays)

    def _compared(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Return the addresses of those arrays that the plan has, each compared by itself."""
        addresses: dict[str, int] = {}
        for planned in self._forms or ():
            name, array = planned[0], arrays.get(planned[0])
            forms, at = forms_of({name: array})
            if forms != (planned,):
                said = "out" if name == "o" else name
                found = "nothing" if forms is None else described(forms[0])
                raise ValueError(
                    f"{said} was planned as {described(planned)}, got {found}: plan anew"
                )
            addresses |= at
        for name in arrays.keys() - addresses.keys():
            said = "out" if name == "o" else name
            raise ValueError(f"{said} was not given when the call was planned: plan anew with one")
        return addresses


def _replaced(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that a call has in place of those that it was planned with."""
    for name in others.keys() - {*_REPLACED}:
        raise TypeError(f"a prepared call takes {', '.join(_REPLACED)} and out, got {name!r}")
    return {name: a for name, a in others.items() if a is not None}
