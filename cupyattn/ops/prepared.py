"""A call prepared: checked, planned, compiled and loaded once, then run on arrays of one form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.arrays import memory
from cupyattn.arrays import memory as arrays_memory
from cupyattn.arrays.form import ArrayForm
from cupyattn.arrays.interchange import check_not_copied, is_cupy, misaligned
from cupyattn.arrays.kinds import STORAGE, array_namespace
from cupyattn.arrays.memory import data_address
from cupyattn.errors import DeviceMemoryError
from cupyattn.ops.call_operands import QUANTIZED, direct_operands
from cupyattn.ops.mirrored import new_output, run_mirror
from cupyattn.plans.records import Plan
from cupyattn.plans.stages import OF_SCORES, stages
from cupyattn.problem.request import Request
from cupyattn.problem.resolve import resolve
from cupyattn.problem.row_preparation import BUFFERS
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.static_scales import static_scales
from cupyattn.runtime import ready
from cupyattn.runtime.scratch import Layout, Scratch, free_bytes, memory_error

#: What gets a copy of scales that a caller gives.
_SCALES = ("q_scale", "k_scale")
#: Operands that say where packed sequences lie.
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k")
#: Buffers of a call beside q, k and v, which a prepared call keeps.
ADDED = (*OF_SCORES, *BUFFERS, *SEQUENCES)


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
    request : Request
        A call, resolved.
    keep : bool
        Whether it owns its scratch memory; otherwise each call takes some from CuPy's pool.
    """

    def __init__(self, request: Request, *, keep: bool = True) -> None:
        self.call, self.backend, self.kernel = request.call, request.backend, request.kernel
        self.variant, self.why = request.variant.name, request.why
        # NOTE: a call that attention() remembers keeps no array of its caller alive.
        nothing: dict[str, Any] = dict.fromkeys(("mask", "bias", *SEQUENCES))
        self._options = replace(request.options, out=None, **nothing)
        if not keep:
            self._options = replace(self._options, block_mask=None, rope=None, qk_norm=None)
        self._added = {
            name: a for name, a in operands_of(request).items() if keep and name in ADDED
        }
        # NOTE: a mask or bias that had to be copied is read again, from the caller's memory.
        for name in self._added.keys() & {"mask", "bias", *SEQUENCES}:
            given = misaligned(getattr(request.options, name))
            if given is not None:
                self._added[name] = given
        # NOTE: tables and weights, too, which the short way of a call would not read again.
        pairs = {"rope": self._options.rope, "qk_norm": self._options.qk_norm}
        self._tables = {
            name: array
            for option, names in (("rope", BUFFERS[:2]), ("qk_norm", BUFFERS[2:]))
            if isinstance(pairs[option], (tuple, list))
            for name, array in zip(names, pairs[option], strict=True)
        }
        self._reads_tables = any(misaligned(a) is not None for a in self._tables.values())
        self._stages = stages(request)
        self._xp = array_namespace(request.q)
        self._forms = {name: ArrayForm.of(array) for name, array in operands_of(request).items()}
        if request.receiver is not None:
            self._forms["out"] = ArrayForm.of(request.receiver)
        # Where out may not begin: the first and the last distance from an operand, exclusive.
        self._apart: Mapping[str, tuple[int, int]] = {}
        if request.receiver is not None:
            self._apart = arrays_memory.meetings(request.receiver, operands_of(request))
        # For each stage: buffer of the plan, buffer of the call.
        self._names = [
            (*stage.names.items(), *((w.name, f"{i}.{w.name}") for w in stage.plan.workspace))
            for i, stage in enumerate(self._stages.stages)
        ]
        self._workspace = self._stages.workspace
        self._layout = Layout.of(self._workspace, _SCALES if _gives_scales(request) else ())
        self._given: dict[str, Any] = {}  # scales of the caller's, by the buffer that gets a copy
        self._all_given: Any = None  # on a device, all of them as they lie in scratch memory
        self._given_addresses: dict[str, int] = {}
        filled = any(work.name == "v_operand" for work in self._workspace)
        #: What `launch` needs; None where scratch memory takes more than zeros and scales before.
        self.scratch_bytes = None if filled else self._layout.nbytes
        self._scratch: Scratch | None = None
        self._device = -1
        #: CuPy's arrays, where the call is one on them.
        self._array: Any = None
        if self.backend == "cuda":
            self._array = self._xp.ndarray
            self._device = int(request.q.device.id)
            with self._current():
                self._given = self._static_scales(request)
                self._given_addresses = {
                    _of_the_caller(name): a.data.ptr for name, a in self._given.items()
                }
                launches = [
                    (one, [names.get(name, name) for name in one.buffers])
                    for plan, names in zip(self.plans, map(dict, self._names), strict=True)
                    for one in ready.ready(plan, request.options.arch)
                ]
                scales = 0 if self._all_given is None else self._all_given.data.ptr
                self._ready = ready.ReadyCall(launches, self._layout, scales)
                try:
                    self._scratch = self._allocate() if keep else None
                except MemoryError as error:
                    raise self._lack_of_memory(request.receiver) from error
        elif self.backend == "interpret":
            self._given = self._static_scales(request)

    @property
    def plans(self) -> list[Plan]:
        """The plans that run, one after the other."""
        return self._stages.plans

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory in bytes."""
        return sum(work.nbytes for work in self._workspace)

    def __str__(self) -> str:
        first = f"{self.variant}: {self.why}"
        return "\n".join([first, *self._stages.memory, *map(str, self.plans)])

    def _lack_of_memory(self, out: Any) -> DeviceMemoryError:
        """Return what is raised where results or scratch memory cannot be had."""
        call, needed = self.call, {}
        if out is None:
            needed["o"] = math.prod(call.output_shape) * np.dtype(STORAGE[call.dtype]).itemsize
        if call.return_lse:
            needed["lse"] = 4 * math.prod(call.lse_shape)
        if self._scratch is None:
            needed |= {work.name: work.nbytes for work in self._workspace}
        free = free_bytes() if self.backend == "cuda" else None
        codes = any(plan.variant == "quantize" for plan in self.plans)
        whole = self._options.quant is None or self._options.quant.qk_bits == 8
        fused = codes and whole and self.plans[-1].form in ("portable", "sm90")
        return memory_error(self.variant, needed, free, fused=fused and bool(self._workspace))

    def _allocate(self) -> Scratch:
        if not self._workspace:
            return Scratch({})
        if self.backend == "cuda":
            filled = [work for work in self._workspace if work.name == "v_operand"]
            return self._layout.allocate(self._xp, filled)
        arrays = {work.name: self._xp.empty(work.shape, work.dtype) for work in self._workspace}
        for array in arrays.values():  # NaN, where a device has whatever was there before
            array.reshape(-1).view("u1").fill(0xFF)
        return Scratch(arrays)

    def __call__(
        self,
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        mask: Any = None,
        bias: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        out: Any = None,
    ) -> Any:
        """Run on other arrays of the same form.

        Parameters
        ----------
        q, k, v : array, or q a QuantizedQKV
        mask, bias, cu_seqlens_q, cu_seqlens_k : array, optional
            In place of those that the call was planned with. No sequence may be longer than the
            call was planned for.
        out : array, optional
            Receives O; given if and only if the call was planned with one.

        Returns
        -------
        o, or (o, lse) where the call was planned with ``return_lse=True``
            As `cupyattn.attention`.

        Raises
        ------
        ValueError
            For arrays of another form; the message says what differs.
        DeviceMemoryError
            If results and scratch memory do not fit; nothing was launched then.
        """
        alone = mask is bias is cu_seqlens_q is cu_seqlens_k is None
        plain = self._options.layout == "BHSD" and (out is None or is_cupy(out))
        plain = plain and not self._reads_tables
        if alone and plain:
            operands: dict[str, Any] | None
            if type(q) is type(k) is type(v) is self._array:
                operands = {"q": q, "k": k, "v": v}
            else:
                operands = direct_operands(q, k, v)
            if operands is not None:
                operands |= self._added
                try:
                    addresses = self.check(operands, out)
                except ValueError:
                    pass  # What must be copied first goes the long way, which raises for the rest.
                else:
                    o, lse = self._run(operands, addresses, out)
                    return o if lse is None else (o, lse)
        names: tuple[str, ...] = ("mask", "bias", *SEQUENCES)
        others = zip(names, (mask, bias, cu_seqlens_q, cu_seqlens_k), strict=True)
        given = {name: a for name, a in others if a is not None}
        if isinstance(q, QuantizedQKV):  # which has offsets of its own
            names = tuple(name for name in names if name not in SEQUENCES or name in given)
        changed = {name: a for name, a in (self._added | given).items() if name in names}
        if self.backend == "cuda" and self._is_captured():
            self._check_not_copied(q, k, v, changed)
        request = resolve(q, k, v, replace(self._options, out=out, **changed))
        operands = operands_of(request)
        addresses = self.check(operands, request.receiver)
        if self.backend == "mirror":
            o, lse = run_mirror(request)
        else:
            o, lse = self._run(operands, addresses, request.receiver)
        result = request.restore(o) if out is None else out
        return (result, request.restore_lse(lse)) if self.call.return_lse else result

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
        addresses = {}
        for name, form in self._forms.items():
            array = out if name == "out" else operands.get(name)
            address = form.address_of(array)
            if address is None:
                found = "nothing" if array is None else str(ArrayForm.of(array))
                raise ValueError(f"{name} was planned as {form}, got {found}: plan anew")
            addresses[name] = address
        if out is None:
            return addresses
        if "out" not in self._forms:
            raise ValueError("out was not given when the call was planned: plan anew with one")
        self.check_apart(addresses, addresses["out"])
        return addresses

    def check_apart(self, addresses: Mapping[str, int], out: int) -> None:
        """Raise ValueError where an `out` at an address shares memory with what is read."""
        arrays_memory.check_apart(self._apart, addresses, out)

    def run(self, operands: Mapping[str, Any], out: Any) -> tuple[Any, Any]:
        """Run on operands in layout BHSD, unchecked; return O in that layout, and lse or None."""
        return self._run(operands, {n: data_address(a) for n, a in operands.items()}, out)

    def launch(self, addresses: Mapping[str, int], scratch: int, stream: int) -> None:
        """Launch on memory of the caller's, unchecked, on the current device.

        Parameters
        ----------
        addresses : mapping of str to int
            Of the operands, of O as "o", and of "lse" where the call was planned with it.
        scratch, stream : int
            Address of `scratch_bytes`, a multiple of `Layout.ALIGNMENT`; a stream's handle.
        """
        if self._given_addresses:
            addresses = {**addresses, **self._given_addresses}
        self._ready.launch(addresses, scratch, stream)

    def _run(
        self, operands: Mapping[str, Any], addresses: dict[str, int], out: Any
    ) -> tuple[Any, Any]:
        xp, call, on_device = self._xp, self.call, self.backend == "cuda"
        if self._is_elsewhere():
            with self._current():
                return self._run(operands, addresses, out)
        try:
            o = new_output(call, self._options.layout, xp) if out is None else out
            lse = xp.empty(call.lse_shape, "float32") if call.return_lse else None
            scratch = self._scratch or self._allocate()
        except MemoryError as error:
            raise self._lack_of_memory(out) from error
        if "v_operand" in scratch.arrays:
            scratch.arrays["v_operand"][...] = operands["v"]
        if on_device:
            addresses["o"] = o.data.ptr
            if lse is not None:
                addresses["lse"] = lse.data.ptr
            self.launch(addresses, scratch.start, xp.cuda.get_current_stream().ptr)
        else:
            self._fill(scratch)
            results = {"o": o} if lse is None else {"o": o, "lse": lse}
            given = {_of_the_caller(name): scale for name, scale in self._given.items()}
            inputs = {n: memory.as_input(a) for n, a in (*operands.items(), *given.items())}
            self._interpret({**inputs, **scratch.arrays, **results})
        return o, lse

    def _static_scales(self, request: Request) -> dict[str, Any]:
        """Return the scales that a caller gives, in full, by the buffers that get a copy of each.

        Quantising may write NaN over the copy.
        """
        if not _gives_scales(request):
            return {}
        quant, tiles, call = request.quant, request.scale_tiles, request.call
        sequences = call.batch if call.packed else None
        shapes = {work.name: work.shape for work in self._workspace}
        given = static_scales(self._xp, quant, request.q.shape, request.k.shape, tiles, sequences)
        layout, found = self._layout, {}
        if self.backend == "cuda":
            self._all_given = self._xp.empty(layout.copied, "uint8")
        for name, scale in given.items():
            buffer = f"{name}_scale"
            if self.backend == "cuda":
                place = self._all_given.data + (layout.offsets[buffer] - layout.zeros)
                found[buffer] = self._xp.ndarray(shapes[buffer], "float32", place)
            else:
                found[buffer] = self._xp.empty(shapes[buffer], "float32")
            self._xp.copyto(found[buffer], scale)
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all that later calls read is there: not if a CUDA graph is yet to make it."""
        return self._all_given is None or not self._is_captured()

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is capturing CuPy's current stream."""
        cuda = self._xp.cuda
        return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))

    def _current(self) -> Any:
        """Return a context in which the device of the call is the current one."""
        return self._xp.cuda.Device(self._device) if self._is_elsewhere() else nullcontext()

    def _is_elsewhere(self) -> bool:
        """Whether another device than that of the call is the current one."""
        return self.backend == "cuda" and self._xp.cuda.runtime.getDevice() != self._device

    def _fill(self, scratch: Scratch) -> None:
        """Put into scratch memory of the host what must be there before the first stage."""
        for work in self._workspace:
            if work.zeros:
                scratch.arrays[work.name].fill(0)
        for name, scale in self._given.items():
            scratch.arrays[name][...] = scale

    def _interpret(self, buffers: Mapping[str, Any]) -> None:
        from cupyattn import interpret

        for plan, names in zip(self.plans, self._names, strict=True):
            own = {inner: buffers[outer] for inner, outer in names if outer in buffers}
            interpret.run(plan, {**buffers, **own}, self._options.arch)


def operands_of(request: Request) -> dict[str, Any]:
    """Return the arrays of a request by the names that its plans have for them."""
    z = request.quantized
    if z is None:
        found = {"q": request.q, "k": request.k, "v": request.v}
    else:
        found = {name: getattr(z, name) for name in QUANTIZED}
    found |= {name: getattr(request, name) for name in (*OF_SCORES, *SEQUENCES)}
    if request.preparation is not None:
        found |= request.preparation.buffers
    return {name: a for name, a in found.items() if a is not None}


def _gives_scales(request: Request) -> bool:
    """Whether the caller gives the scales of Q and K."""
    quant = request.options.quant
    return request.quantized is None and quant is not None and quant.static


def _of_the_caller(buffer: str) -> str:
    """Return the buffer whose scales another is a copy of.

    Examples
    --------
    >>> _of_the_caller("q_scale")
    'q_static_scale'
    """
    return f"{buffer[0]}_static_scale"
