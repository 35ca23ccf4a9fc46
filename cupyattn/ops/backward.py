"""`attention_backward` and `attention_varlen_backward`: gradients with respect to the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from cupyattn.arrays import interchange, memory
from cupyattn.arrays.form import same_place
from cupyattn.arrays.kinds import array_namespace
from cupyattn.arrays.operand import Operand, laid_out
from cupyattn.errors import UnsupportedError
from cupyattn.gradients.exact import Gradients
from cupyattn.gradients.mirror import backward_mirror
from cupyattn.ops import run as backends
from cupyattn.ops.call_operands import direct_operands, operands_key
from cupyattn.ops.mirrored import scoring_of
from cupyattn.ops.prepared import SEQUENCES
from cupyattn.plans.backward import BackwardOperands, plan_backward
from cupyattn.plans.prepare_rows import plan_rotation
from cupyattn.plans.records import Plan
from cupyattn.plans.stages import OF_SCORES
from cupyattn.problem import checks
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.form import architecture
from cupyattn.problem.request import Options, Request
from cupyattn.problem.resolve import resolve, to_bhsd
from cupyattn.problem.rope import Rope
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.runtime import ready as runtime_ready
from cupyattn.runtime.ready import ReadyCall
from cupyattn.runtime.recent import recall, remember
from cupyattn.runtime.scratch import saying_what_is_needed


def attention_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    block_mask: BlockMask | None = None,
    layout: str = "BHSD",
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
) -> Gradients:
    """Gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    d_out : array, (batch, heads, len_q, head_dim)
        The gradient with respect to O.
    q, k, v : array
        The operands of the forward pass, float16 or bfloat16; kinds of arrays and strides as for
        `attention`.
    out, lse : array
        What the forward pass returned with ``return_lse=True``: O, of q's shape and dtype, and the
        log-sum-exp, float32, (batch, heads, len_q). P is recomputed from `lse`; nothing of the size
        len_q x len_kv is stored. If `lse` is at least 1024 from zero, float32 is too coarse for
        that: P is then the softmax of the row's scores, for which k must be all keys of the row.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, layout
        As in the forward pass. `bias` gets no gradient. Cost follows the blocks that are kept.
    rope, rope_interleaved, rope_offset_q
        As in the forward pass. Q and K are turned anew, and their gradients turned back by the same
        angles, each rounded to its type before and after.
    qk_norm
        UnsupportedError where it is given.
    deterministic : bool, optional
        True: the same bits on every run. False: blocks of keys add up dQ in float32 in memory, in
        whatever order they come. None: the form that is faster. dK and dV have the same bits on
        every run in any case. Equal bits cost turns at these sums in the Hopper form up to head_dim
        128, which is the faster form but for long sequences of head_dim up to 64, and elsewhere a
        kernel of its own for dQ, 7 matrix products in place of 5.
    arch : str, optional
        Architecture to compile for; the device's own when omitted.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `attention`.

    Returns
    -------
    Gradients
        A tuple (dq, dk, dv), shaped as q, k and v, of their dtype, kind and device, on the current
        stream. Query heads that share a key head add up in its dk and dv.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit together; the message gives the values.
    UnsupportedError
        For float32, and for what is not offered; the message says what is.
    KernelFault
        With ``backend="interpret"``: a kernel's first hazard.

    Notes
    -----
    After a forward pass in INT8 the same call gives 16-bit gradients of the 16-bit operands with
    that pass's out and lse: quantising counts as the identity (straight-through), as fine-tuning
    wants it.

    Whatever `out` and `lse` are, the result is held to `cupyattn.gradients.backward_bound`, which
    docs/MATH_REFERENCE.md derives.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = k = v = d_out = np.ones((1, 1, 4, 8), np.float16)
    >>> o, lse = ca.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = ca.attention_backward(d_out, q, k, v, o, lse, causal=True)
    >>> dv[0, 0, :, 0].round(2).tolist()
    [2.080078125, 1.080078125, 0.580078125, 0.25]
    """
    check_offered(q, qk_norm, deterministic)
    call = None
    if rope is None and layout == "BHSD":
        call = _Call.known(
            (causal, causal_align, window, scale, softcap, deterministic, arch, backend),
            block_mask, q, k, v, d_out=d_out, o=out, lse=lse, mask=mask, bias=bias,
        )  # fmt: skip
    if call is not None and (ready := recall(call.key)) is not None:
        return cast(Gradients, ready(call.operands))
    options = Options(
        variant="fa_tc", scale=scale, causal=causal, causal_align=causal_align, window=window,
        softcap=softcap, mask=mask, bias=bias, rope=rope, rope_interleaved=rope_interleaved,
        rope_offset_q=rope_offset_q, block_mask=block_mask, layout=layout, return_lse=True,
        arch=arch, backend=backend,
    )  # fmt: skip
    return _run(resolve(q, k, v, options), (d_out, out, lse), deterministic, call)


def attention_varlen_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    block_mask: BlockMask | None = None,
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
) -> Gradients:
    """Gradients of `attention_varlen` with respect to q, k and v.

    Parameters
    ----------
    d_out, q, k, v, out : array, (total_q or total_k, heads, head_dim)
        As for `attention_backward`, packed as the forward pass had them.
    lse : array, float32, (heads, total_q)
    cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k
        As for `attention_varlen`: with both limits nothing waits for offsets that lie on a device.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As in the forward pass.
    rope, rope_interleaved, rope_offset_q, qk_norm, deterministic, arch, backend
        As for `attention_backward`. Every sequence has the bits that a call of its own would have.

    Returns
    -------
    Gradients
        (dq, dk, dv), packed as q, k and v are.

    Raises
    ------
    ValueError, TypeError, UnsupportedError, KernelFault
        As `attention_backward`.

    Notes
    -----
    A sequence longer than its limit is cut to it: gradients past the limit are not written.

    Examples
    --------
    >>> import numpy as np, cupyattn as ca
    >>> q = k = v = np.ones((5, 1, 8), np.float16)
    >>> ends = np.array([0, 2, 2, 5])
    >>> o, lse = ca.attention_varlen(q, k, v, ends, ends, return_lse=True)
    >>> dq, dk, dv = ca.attention_varlen_backward(o, q, k, v, o, lse, ends, ends)
    >>> dv.shape, dv[:, 0, 0].tolist()
    ((5, 1, 8), [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    check_offered(q, qk_norm, deterministic)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise TypeError("attention_varlen_backward needs cu_seqlens_q and cu_seqlens_k")
    options = Options(
        variant="fa_tc", scale=scale, causal=causal, causal_align=causal_align, window=window,
        softcap=softcap, mask=mask, bias=bias, rope=rope, rope_interleaved=rope_interleaved,
        rope_offset_q=rope_offset_q, block_mask=block_mask, return_lse=True, arch=arch,
        backend=backend, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_len_q=max_len_q,
        max_len_k=max_len_k,
    )  # fmt: skip
    return _run(resolve(q, k, v, options), (d_out, out, lse), deterministic)


def backward_of_part(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    deterministic: bool | None = None, **options: Any,
) -> Gradients:  # fmt: skip
    """Gradients of rows that may have other keys elsewhere: every lse is taken as it is.

    Parameters
    ----------
    d_out, q, k, v, out, lse, deterministic, **options
        As for `attention_backward`, or with `cu_seqlens_q` and `cu_seqlens_k` for
        `attention_varlen_backward`; out and lse are those of all keys of a row.

    Notes
    -----
    A row whose lse is coarse cannot be normalised again from some of its keys.
    """
    check_offered(q, None, deterministic)
    call = None
    if "cu_seqlens_q" not in options:
        settings = (deterministic, *sorted(options.items()))
        call = _Call.known(
            ("of a part", *settings), None, q, k, v, d_out=d_out, o=out, lse=lse
        )  # fmt: skip
    if call is not None and (ready := recall(call.key)) is not None:
        return cast(Gradients, ready(call.operands))
    request = resolve(q, k, v, Options(variant="fa_tc", return_lse=True, **options))
    return _run(request, (d_out, out, lse), deterministic, call, all_keys=False)


@dataclass(frozen=True)
class _Call:
    """A call on CuPy arrays: its key, and its arrays by the names of a plan's buffers."""

    key: Any
    operands: Mapping[str, Any]

    @classmethod
    def known(
        cls, options: Sequence[Any], block_mask: BlockMask | None, q: Any, k: Any, v: Any,
        **added: Any,
    ) -> _Call | None:  # fmt: skip
        """Return None for other arrays, and for options that are arrays."""
        given = direct_operands(q, k, v, block_mask=block_mask, **added)
        if given is None:
            return None
        if block_mask is not None:
            given["kept_rows"] = block_mask.transposed.kept_blocks(q)
        key = operands_key(("attention_backward", *options), given, q, block_mask=block_mask)
        return None if key is None else cls(key, given)


def check_offered(q: Any, qk_norm: Any, deterministic: Any = None) -> None:
    """Raise UnsupportedError for what the backward pass does not take, TypeError for no answer."""
    if deterministic is not None and not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(f"deterministic must be True, False or None, got {deterministic!r:.60}")
    if qk_norm is not None:
        raise UnsupportedError(
            "the backward pass takes no qk_norm: give q and k as they are after it, and take their "
            "gradients on through the normalisation"
        )
    if isinstance(q, QuantizedQKV):
        raise UnsupportedError(
            "the backward pass takes the 16-bit q, k and v, not a QuantizedQKV: give the arrays "
            "that were quantised, with out and lse of the INT8 forward pass"
        )
    if str(getattr(q, "dtype", "")).endswith("float32"):
        raise UnsupportedError(
            "the backward pass takes float16 and bfloat16, got q.dtype=float32: convert the arrays"
        )


def _run(
    request: Request,
    given: tuple[Any, Any, Any],
    deterministic: bool | None,
    call: _Call | None = None,
    all_keys: bool = True,
) -> Gradients:
    """Run the backward pass of a request on d_out, out and lse; remember how, for such a call."""
    operands = _take(*given, request)
    layout = request.options.layout
    with memory.on_device_of(request.q), _saying_what_is_needed(request, operands):
        results = {name: _result(operands[name[1:]], layout) for name in Gradients._fields}
        if request.backend == "mirror":
            _mirror(request, operands, results, deterministic, all_keys)
        else:
            _launch(request, operands, results, deterministic, call, all_keys)
    return Gradients(*(request.restore(results[name]) for name in Gradients._fields))


def _saying_what_is_needed(
    request: Request, operands: dict[str, Any], plan: Plan | None = None
) -> AbstractContextManager[None]:
    needed, on_device = needed_bytes(operands, plan), request.backend == "cuda"
    return saying_what_is_needed("attention_backward", needed, on_device=on_device)


def _take(d_out: Any, out: Any, lse: Any, request: Request) -> dict[str, Any]:
    """Return the operands by name, d_out, out and lse checked against q; layout BHSD."""
    layout, q, packed = request.options.layout, request.q, request.call.packed is not None
    named = {"d_out": d_out, "out": out, "lse": lse}
    taken = {name: interchange.take(name, array)[0] for name, array in named.items()}
    array_namespace(q, *taken.values())
    if packed:
        taken = {name: array[None] for name, array in taken.items()}
    for name in ("d_out", "out"):
        taken[name] = interchange.contiguous_last_axis(to_bhsd(taken[name], layout))
    checks.check_backward(**taken, q=q, k=request.k, v=request.v)
    interchange.check_one_device(q=q, **taken)
    taken["lse"] = array_namespace(q).ascontiguousarray(taken["lse"])
    return {"q": q, "k": request.k, "v": request.v, **taken}


def _result(operand: Any, layout: str) -> Any:
    """Return where the gradient of an operand goes: layout BHSD, contiguous in the caller's."""
    shape = to_bhsd(operand, layout).shape
    return to_bhsd(array_namespace(operand).empty(shape, operand.dtype), layout)


def _launch(
    request: Request,
    operands: dict[str, Any],
    results: dict[str, Any],
    deterministic: bool | None,
    call: _Call | None,
    all_keys: bool,
) -> None:
    """Run the kernels."""
    rope = _rope_of(request)
    if rope is not None:
        operands = {**operands, **_turned(request, operands, rope)}
    by_name = {**operands, "o": operands["out"]}
    del by_name["out"]
    added = _of_scores(request)
    described = {name: Operand.of(a) for name, a in {**by_name, **results, **added}.items()}
    plan = _plan(request, described, deterministic, all_keys)
    sequences = {name: getattr(request, name) for name in SEQUENCES}
    read = {**by_name, **added, **sequences}
    inputs = {name: memory.as_input(a) for name, a in read.items() if a is not None}
    with _saying_what_is_needed(request, operands, plan):
        if request.backend == "cuda":
            ready = PreparedBackward(plan, operands, request.options.arch)
            ready.launch({**inputs, **results})
            # NOTE: mask and bias are broadcast views; where they were copied they lie elsewhere.
            if call is not None and all(same_place(inputs[n], a) for n, a in call.operands.items()):
                remember(call.key, ready)
        else:
            backends.run(request.backend, plan, {**inputs, **results}, request.options.arch)
    if rope is not None:
        back = _turned(request, {"q": results["dq"], "k": results["dk"]}, _inverse(rope))
        results["dq"][...], results["dk"][...] = back["q"], back["k"]


def _of_scores(request: Request) -> dict[str, Any]:
    """Return mask, bias and what is read of a block mask, as far as there are such."""
    found = {name: getattr(request, name) for name in OF_SCORES}
    block_mask = request.options.block_mask
    if block_mask is not None:
        found["kept_rows"] = block_mask.transposed.kept_blocks(request.q)
    return {name: array for name, array in found.items() if array is not None}


def _plan(
    request: Request,
    described: dict[str, Operand],
    deterministic: bool | None,
    all_keys: bool = True,
) -> Plan:
    """Plan the kernels for operands, results and what changes scores."""
    at = BackwardOperands(**{name: x for name, x in described.items() if name != "lse"})
    call = replace(request.call, rope="", rope_offset_q=0)
    return plan_backward(
        call, at, deterministic=deterministic, all_keys=all_keys, arch=architecture(request)
    )


def ready_backward(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any
) -> runtime_ready.ReadyCall | None:
    """Make `attention_backward` ready to be launched on memory of the caller's.

    Parameters
    ----------
    d_out, q, k, v, out, lse, **options
        As for `explain_backward`, CuPy arrays.

    Returns
    -------
    ReadyCall or None
        It reads "q", "k", "v", "o", "lse", "d_out", mask, bias, offsets and the blocks of a block
        mask ("kept_blocks", of its transposed "kept_rows"), and writes "dq", "dk" and "dv", shaped
        as q, k and v are, contiguous and 16-byte aligned. None where more than launches is needed:
        rows that are turned, operands that are copied.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention_backward`.
    """
    deterministic, arch = options.pop("deterministic", None), options.get("arch")
    check_offered(q, options.pop("qk_norm", None), deterministic)
    request = resolve(q, k, v, Options(variant="fa_tc", return_lse=True, **options))
    operands = _take(d_out, out, lse, request)
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "out": out, "lse": lse}
    added = {n: options[n] for n in ("mask", "bias", *SEQUENCES) if options.get(n) is not None}
    used = {**operands, **{name: getattr(request, name) for name in added}}
    copied = any(not same_place(used[n], x) for n, x in {**given, **added}.items())
    if _rope_of(request) is not None or copied:
        return None
    return runtime_ready.ReadyCall.of(_plan_of(request, operands, deterministic), arch)


def _plan_of(request: Request, operands: dict[str, Any], deterministic: bool | None) -> Plan:
    """Plan the kernels for results that are contiguous in the caller's layout."""
    given = {**operands, "o": operands["out"], **_of_scores(request)}
    described = {name: Operand.of(x) for name, x in given.items() if name != "out"}
    for name in Gradients._fields:
        x = operands[name[1:]]
        described[name] = laid_out(x.shape, x.dtype.itemsize, request.options.layout)
    return _plan(request, described, deterministic)


def _rope_of(request: Request) -> Rope | None:
    return None if request.preparation is None else request.preparation.rope


def _inverse(rope: Rope) -> Rope:
    """Return what turns back: gradients of turned rows become those of the rows themselves."""
    return replace(rope, sin=-rope.sin)


def _turned(request: Request, operands: dict[str, Any], rope: Rope) -> dict[str, Any]:
    """Return q and k, or their gradients, turned by a kernel."""
    call, found = request.call, {}
    for name, position, longest in (("q", rope.offset_q, call.len_q), ("k", 0, call.len_kv)):
        x = operands[name]
        packed = None if call.packed is None else (call.batch, longest)
        plan = plan_rotation(Operand.of(x), call.dtype, rope.pairs, position, packed)
        found[name] = array_namespace(x).empty(x.shape, x.dtype)
        ends = getattr(request, f"cu_seqlens_{name}")
        read = {"x": x, "rope_cos": rope.cos, "rope_sin": rope.sin, "cu_seqlens": ends}
        inputs = {n: memory.as_input(a) for n, a in read.items() if a is not None}
        buffers = {**inputs, "turned": found[name]}
        backends.run(request.backend, plan, buffers, request.options.arch)
    return found


def _mirror(
    request: Request,
    operands: dict[str, Any],
    results: dict[str, Any],
    deterministic: bool | None,
    all_keys: bool,
) -> None:
    """Run the mirror, on every sequence by itself where they are packed."""
    options, rope = request.options, _rope_of(request)
    shared = {
        name: getattr(options, name)
        for name in ("scale", "causal", "causal_align", "window", "softcap")
    }

    def run(given: dict[str, Any], **own: Any) -> Gradients:
        if rope is not None:
            given = {**given, **dict(zip("qk", rope.turned(given["q"], given["k"]), strict=True))}
        own["all_keys"] = all_keys
        found = backward_mirror(**given, **shared, **own, deterministic=bool(deterministic))
        if rope is None:
            return found
        dq, dk = _inverse(rope).turned(found.dq, found.dk)
        return found._replace(dq=dq, dk=dk)

    if request.call.packed is None:
        own = {"mask": request.mask, "bias": request.bias, "block_mask": options.block_mask}
        for name, gradient in run(operands, **own)._asdict().items():
            results[name][...] = gradient
        return
    for result in results.values():
        result[...] = 0
    pairs = zip(pairwise(request.cu_seqlens_q), pairwise(request.cu_seqlens_k), strict=True)
    for number, (q_ends, k_ends) in enumerate(pairs):
        places = {"k": slice(*k_ends), "v": slice(*k_ends)}
        one = {name: a[:, :, places.get(name, slice(*q_ends))] for name, a in operands.items()}
        own = scoring_of(request, number, one["q"].shape[2], one["k"].shape[2])
        for name, gradient in run(one, **own)._asdict().items():
            results[name][:, :, places.get(name[1:], slice(*q_ends))] = gradient


class PreparedBackward:
    """The kernels of one call, ready to run on arrays of the same form.

    It keeps no array alive; every run takes its scratch memory from CuPy's pool.

    Parameters
    ----------
    plan : Plan
        Of `cupyattn.plans.backward.plan_backward`.
    operands : mapping of str to cupy.ndarray
        q, k and v, layout BHSD, on the current device.
    arch : str or None
        Architecture to compile for; the device's own when None.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Any], arch: str | None) -> None:
        self._ready = ReadyCall.of(plan, arch)
        of = {name: operands[name[1:]] for name in Gradients._fields}
        self._forms = {name: (x.shape, x.dtype) for name, x in of.items()}
        self._needed = needed_bytes(operands, plan)

    def __call__(self, operands: Mapping[str, Any]) -> Gradients:
        """Return the gradients, contiguous, of operands by the names that the plan has for them."""
        xp = array_namespace(operands["q"])
        told = saying_what_is_needed("attention_backward", self._needed, on_device=True)
        with memory.on_device_of(operands["q"]), told:
            found = {name: xp.empty(*form) for name, form in self._forms.items()}
            self.launch({**operands, **found})
        return Gradients(**found)

    def launch(self, buffers: Mapping[str, Any]) -> None:
        """Run on operands and results on the current device and stream."""
        cupy = array_namespace(buffers["q"])
        scratch = cupy.empty(self._ready.scratch_bytes, "uint8")
        addresses = {name: array.data.ptr for name, array in buffers.items()}
        stream = cupy.cuda.get_current_stream().ptr
        self._ready.launch(addresses, scratch.data.ptr, stream)


def needed_bytes(operands: Mapping[str, Any], plan: Plan | None = None) -> dict[str, int]:
    """Return what gradients of q, k and v take, and what a plan of them takes, by name."""
    results = {name: int(operands[name[1:]].nbytes) for name in Gradients._fields}
    return results | {work.name: work.nbytes for work in (plan.workspace if plan else ())}
