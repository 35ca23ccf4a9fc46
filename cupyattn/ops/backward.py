"""`attention_backward` and `attention_varlen_backward`: gradients with respect to the operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays.described import Described, check_together
from cupyattn.arrays.interchange import imported
from cupyattn.arrays.operand import Operand, laid_out
from cupyattn.errors import UnsupportedError, shown
from cupyattn.gradients.exact import AnyGradients, Gradients, gradients_of
from cupyattn.ops.attention import ATTENTION
from cupyattn.ops.backward_mirror import mirror_into
from cupyattn.ops.call_operands import arguments_of, named
from cupyattn.ops.operation import ARRAYS, Library, Operation, problem_of, run
from cupyattn.plans.backward import GIVEN_SUMS, BackwardOperands, plan_backward
from cupyattn.plans.backward_rows import SIN_BACK, prepared_stages
from cupyattn.plans.records import Plan, Work
from cupyattn.problem.attention import OF_SCORES, AttentionProblem
from cupyattn.problem.backward_form import (
    BackwardKernel,
    check_backward,
    check_grad_bias,
    settle_backward,
)
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.problem.problem import Problem, Result
from cupyattn.problem.resolve import to_bhsd
from cupyattn.problem.row_preparation import EPS
from cupyattn.problem.settings import NO_WINDOW, Asked, Settings, interned, parse
from cupyattn.problem.support import BIAS_ALIGNMENT
from cupyattn.quant.quantized import QuantizedQKV


@explains_foreign_arguments
def attention_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    d_lse: Any = None,
    grad_bias: bool = False,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    block_mask: BlockMask | None = None,
    layout: str = "BHSD",
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
) -> AnyGradients:
    """Gradients of `attention` with respect to q, k and v, through O and the log-sum-exp.

    Parameters
    ----------
    d_out : array, (batch, heads, len_q, head_dim)
        The gradient with respect to O.
    q, k, v : array
        The operands of the forward pass, float16 or bfloat16; kinds of arrays and strides as for
        `attention`.
    out, lse : array
        Results of the forward pass with ``return_lse=True``: O, of q's shape and dtype, and the
        log-sum-exp, float32, (batch, heads, len_q). P is recomputed from `lse`, so no array of size
        len_q x len_kv is stored. If abs(lse) is at least 1024, float32 is too coarse for that. P is
        then the softmax of the row's scores, so k must contain all keys of the row.
    d_lse : array, float32, (batch, heads, len_q), optional
        The gradient with respect to `lse`; zero by default. Rows without keys have an lse of -inf,
        and ignore it.
    grad_bias : bool
        Whether to return the gradient with respect to `bias`, too. It has the shape and dtype of
        `bias`, is summed over the axes that broadcast, and has the same bits on every run. A
        separate kernel computes it, with two more matrix products.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask, layout
        As in the forward pass. Cost is proportional to the kept blocks.
    rope, rope_interleaved, rope_offset_q
        As in the forward pass. Q and K are rotated again, and their gradients are rotated back by
        the same angles, each rounded to its type before and after.
    qk_norm, qk_norm_eps
        As in the forward pass. Gradients of q and k go through the normalisation. Its weights
        get gradients, too: of their shapes and dtypes, with the same bits on every run.
    deterministic : bool, optional
        True: the same bits on every run. False: blocks of keys add up dQ in float32 in memory, in
        any order. None: the faster form. dK and dV always have the same bits on every run. For
        equal bits of dQ, blocks of the Hopper form add in turn. Up to head_dim 128 that is faster
        for short sequences alone, and not for causal heads that share keys. Past 128 it is slower.
        Masks, biases, softcap, block masks and packed sequences need a separate kernel for dQ
        there, with 7 matrix products in place of 5. So does every portable call.
    arch : str, optional
        Architecture to compile for; that of the device when omitted.
    backend : {"cuda", "mirror", "interpret"}, optional
        As for `attention`.

    Returns
    -------
    Gradients
        A tuple (dq, dk, dv), shaped as q, k and v, of their dtype, kind and device, on the current
        stream. Query heads that share a key head add up in its dk and dv. With `grad_bias`
        `GradientsWithBias`, a tuple (dq, dk, dv, dbias). With `qk_norm` dq_weight and dk_weight
        follow: `GradientsWithNorm` or `GradientsWithBiasAndNorm`.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit together; the message gives the values.
    UnsupportedError
        For float32 and unsupported options; the message says what is supported.
    KernelFault
        With ``backend="interpret"``: a kernel's first hazard.

    Notes
    -----
    After a forward pass in INT8 the same call gives 16-bit gradients of the 16-bit operands with
    that pass's out and lse: quantising counts as the identity (straight-through), as fine-tuning
    wants it. P is then off by the factor exp(lse of 16 bits - lse), which grows with the scores.
    Where scores of tens are common, give out and lse of a call in 16 bits.

    For any `out` and `lse`, the result is within `cupyattn.gradients.backward_bound`, which
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
    settings = interned(
        "fa_tc", "full", scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, layout, True, None, None, arch, backend,
    )  # fmt: skip
    arrays = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, block_mask=block_mask,
        d_lse=d_lse,
    ) | {"d_out": d_out, "out": out, "lse": lse}
    return run_backward(BackwardSettings(settings, deterministic, grad_bias=grad_bias), arrays)


@explains_foreign_arguments
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
    d_lse: Any = None,
    grad_bias: bool = False,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    mask: Any = None,
    bias: Any = None,
    rope: Any = None,
    rope_interleaved: bool = False,
    rope_offset_q: int = 0,
    qk_norm: Any = None,
    qk_norm_eps: float = EPS,
    block_mask: BlockMask | None = None,
    deterministic: bool | None = None,
    arch: str | None = None,
    backend: str | None = None,
) -> AnyGradients:
    """Gradients of `attention_varlen` with respect to q, k and v.

    Parameters
    ----------
    d_out, q, k, v, out : array, (total_q or total_k, heads, head_dim)
        As for `attention_backward`, packed as in the forward pass.
    lse : array, float32, (heads, total_q)
    d_lse : array, float32, (heads, total_q), optional
    grad_bias : bool
        As for `attention_backward`.
    cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k
        As for `attention_varlen`: with both limits, offsets on a device cause no synchronisation.
    scale, causal, causal_align, window, softcap, mask, bias, block_mask
        As in the forward pass.
    rope, rope_interleaved, rope_offset_q, qk_norm, qk_norm_eps, deterministic, arch, backend
        As for `attention_backward`. Every sequence has the bits of a separate call.

    Returns
    -------
    Gradients
        (dq, dk, dv), packed as q, k and v are; with `grad_bias` dbias, too, and with `qk_norm`
        dq_weight and dk_weight.

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
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise TypeError("attention_varlen_backward needs cu_seqlens_q and cu_seqlens_k")
    settings = interned(
        "fa_tc", "full", scale, causal, causal_align, window, softcap, rope_interleaved,
        rope_offset_q, qk_norm_eps, "BHSD", True, None, None, arch, backend, False, max_len_q,
        max_len_k,
    )  # fmt: skip
    arrays = named(
        q, k, v, mask=mask, bias=bias, rope=rope, qk_norm=qk_norm, block_mask=block_mask,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, d_lse=d_lse,
    ) | {"d_out": d_out, "out": out, "lse": lse}  # fmt: skip
    return run_backward(BackwardSettings(settings, deterministic, grad_bias=grad_bias), arrays)


def check_deterministic(deterministic: Any) -> None:
    """Raise TypeError unless `deterministic` is True, False or None."""
    if deterministic is not None and not isinstance(deterministic, (bool, np.bool_)):
        raise TypeError(f"deterministic must be True, False or None, got {shown(deterministic)}")


def check_offered(q: Any, deterministic: Any = None) -> None:
    """Raise UnsupportedError for unsupported options, TypeError for an invalid `deterministic`."""
    check_deterministic(deterministic)
    if isinstance(q, QuantizedQKV):
        raise UnsupportedError(
            "the backward pass takes the 16-bit q, k and v, not a QuantizedQKV: give the arrays "
            "that were quantised, with out and lse of the INT8 forward pass"
        )
    if str(getattr(q, "dtype", "")).endswith("float32"):
        raise UnsupportedError(
            "the backward pass takes float16 and bfloat16, got q.dtype=float32: convert the arrays"
        )


class BackwardSettings(NamedTuple):
    """Arguments of a backward pass, except arrays.

    Parameters
    ----------
    of_call : Settings
        Settings of the forward pass, as `Settings.without_rung` returns them.
    deterministic : bool or None
    all_keys : bool
        False: rows may have other keys elsewhere. A row with a coarse lse cannot be normalised
        again from only some of its keys: its M and factor are given as `GIVEN_SUMS`, or its lse is
        used unchanged.
    grad_bias : bool
    """

    of_call: Settings
    deterministic: bool | None = None
    all_keys: bool = True
    grad_bias: bool = False


class BackwardAsked(NamedTuple):
    """Arguments of a backward pass, except the arrays that its kernels read.

    The same as `BackwardSettings`, with the `Asked` of its forward pass."""

    forward: Asked
    deterministic: bool | None
    all_keys: bool
    grad_bias: bool


class BackwardSettled(NamedTuple):
    """A settled backward pass.

    Parameters
    ----------
    forward : AttentionProblem
        Its forward pass.
    kernel : BackwardKernel
        Form and tiles.
    places : BackwardOperands
        Layouts of the operands of its kernels.
    all_keys : bool
        As for `BackwardSettings`.
    """

    forward: AttentionProblem
    kernel: BackwardKernel
    places: BackwardOperands
    all_keys: bool


def run_backward(
    settings: BackwardSettings,
    arrays: Mapping[str, Any],
    library: Library = ARRAYS,
) -> AnyGradients:
    """Run the backward pass of a forward pass.

    Parameters
    ----------
    settings : BackwardSettings
    arrays : mapping
        The given arguments of `attention_backward` or `attention_varlen_backward`.
    library : Library
        Library of the arrays.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention_backward`.
    """
    asked, own, facts = arguments_of_backward(settings, arrays, library)
    found: AnyGradients = run(BACKWARD, asked, own, facts, library=library)
    return found


def arguments_of_backward(
    settings: BackwardSettings, given: Mapping[str, Any], library: Library = ARRAYS
) -> tuple[BackwardAsked, dict[str, Any], tuple[Any, ...] | None]:
    """Return a backward pass as `cupyattn.ops.operation.run` takes it.

    Parameters
    ----------
    settings, given
        As `parse_backward` returns them.
    library : Library
        Library of the arrays.
    """
    of_call, deterministic, all_keys, grad_bias = settings
    if isinstance(given["q"], QuantizedQKV):
        check_offered(given["q"])
    forward, arrays, facts = arguments_of(of_call, given, library)
    if "kept_blocks" in arrays:
        beside = library.beside(given["q"])
        arrays["kept_rows"] = given["block_mask"].transposed.kept_blocks(beside)
    facts = None if facts is None else (*facts, type(deterministic), type(grad_bias))
    return BackwardAsked(forward, deterministic, all_keys, grad_bias), arrays, facts


class _Backward(Operation):
    """The gradients of attention as an operation."""

    name = "attention_backward"

    def resolve(self, asked: BackwardAsked, arrays: Mapping[str, Described]) -> Problem:
        """Check the forward pass, then d_out, out, lse and d_lse against it."""
        check_offered(arrays["q"], asked.deterministic)
        own = {n: x for n, x in arrays.items() if n not in (*_RECEIVED, "kept_rows")}
        forward: AttentionProblem = problem_of(ATTENTION, asked.forward, own)
        received = {n: arrays[n] for n in _RECEIVED if n in arrays}
        operands = {**forward.rows, **_take(forward, received)}
        operands |= {**forward.of_scores, **forward.sequences}
        if "kept_rows" in arrays:
            operands["kept_rows"] = arrays["kept_rows"]
        prepared = forward.preparation
        if prepared is not None:
            prepared.check_differentiable()
            operands |= prepared.buffers
        if prepared is not None and prepared.rope is not None:
            operands[SIN_BACK] = prepared.rope.back.sin
        layout, packed = forward.settings.layout, forward.call.packed is not None
        turned = prepared is not None and layout == "BSHD"  # rows come back in layout BHSD
        bias = arrays.get("bias")
        kernel, places, operands = _settled(forward, operands, asked.deterministic, bias, turned)
        results = {
            f"d{name}": Result(_shape(x, layout, packed, turned), x.dtype)
            for name, x in forward.rows.items()
        }
        check_grad_bias(asked.grad_bias, bias)
        shape = None
        if asked.grad_bias and bias is not None:
            results["dbias"] = Result(tuple(bias.shape), bias.dtype)
            shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
        given = {f"d{n}_weight": arrays.get(f"{n}_norm_weight") for n in "qk"}
        weights = {n: Result(tuple(x.shape), x.dtype) for n, x in given.items() if x is not None}
        return Problem(
            what=self.name, backend=forward.backend, arch=forward.arch, operands=operands,
            results=results | weights, looks=forward.looks, facts=(turned, packed),
            settled=BackwardSettled(
                forward, kernel, BackwardOperands(**places, dbias=shape), asked.all_keys
            ),
        )  # fmt: skip

    def plan(self, problem: Problem) -> Work:
        """Return the kernels of the gradients, between turning rows and turning them back."""
        forward, plan = problem.settled.forward, plan_of(problem)
        if forward.preparation is None:
            return Work.of(plan)
        of_weights = (problem.results.get(f"d{n}_weight") for n in "qk")
        q_dtype, k_dtype = ("float32" if x is None else x.dtype.name for x in of_weights)
        return prepared_stages(forward, plan, (q_dtype, k_dtype))

    def mirror(self, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the gradients with NumPy, one packed sequence at a time."""
        made = {name: np.zeros(one.shape, one.dtype) for name, one in problem.results.items()}
        forward, turned = problem.settled.forward, problem.facts[0]
        layout = "BHSD" if turned else forward.settings.layout
        seen = {
            name: to_bhsd(x[None] if forward.call.packed and not turned else x, layout)
            for name, x in made.items() if name in Gradients._fields
        }
        mirror_into(problem.settled, arrays, made | seen)
        return made

    def restore(
        self, facts: tuple[bool, bool], arrays: Mapping[str, Any], results: dict[str, Any]
    ) -> AnyGradients:
        """Return the gradients, contiguous in the caller's layout."""
        turned, packed = facts
        if turned:
            rows = {n: to_bhsd(results[n], "BSHD") for n in Gradients._fields}
            rows = {n: x[0] if packed else x for n, x in rows.items()}
            results = {**results, **{n: _in_c_order(x) for n, x in rows.items()}}
        return gradients_of(results)


def _in_c_order(x: Any) -> Any:
    """Return a copy in C order of an array or a torch tensor."""
    return x.contiguous() if hasattr(x, "contiguous") else x.copy(order="C")


BACKWARD = _Backward()
#: Further arrays of a backward pass, by buffer; arrays in the layout of lse may be absent.
_RECEIVED = ("d_out", "o", "lse", "d_lse", *GIVEN_SUMS)


def _shape(x: Any, layout: str, packed: bool, turned: bool) -> tuple[int, ...]:
    """Return the shape of the gradient of an operand of layout BHSD: the caller's."""
    shape = tuple(x.shape if turned else to_bhsd(x, layout).shape)
    return shape[1:] if packed and not turned else shape


def check_received(forward: AttentionProblem, received: Mapping[str, Any], *, packed: bool) -> None:
    """Raise ValueError for results and gradients whose shapes do not match q, all as given.

    Parameters
    ----------
    forward : AttentionProblem
    received : mapping of str to array or Described
        d_out, out and lse, and a given d_lse.
    packed : bool
        Whether the arrays are packed sequences, without an axis for the batch.
    """
    q = forward.rows["q"]
    shape = tuple(to_bhsd(q, forward.settings.layout).shape)[packed:]
    for name, x in received.items():
        want = shape if name in ("d_out", "out") else tuple(q.shape[packed:3])
        if tuple(x.shape) != want:
            raise ValueError(
                f"{name} must have shape {want}, to go with q.shape={shape}, got "
                f"{name}.shape={tuple(x.shape)}"
            )


def _take(forward: AttentionProblem, arrays: Mapping[str, Described]) -> dict[str, Described]:
    """Return d_out, out, lse and d_lse by buffer, checked against q; layout BHSD."""
    call, layout = forward.call, forward.settings.layout
    if call.padded is not None:
        raise UnsupportedError(
            "the backward pass takes no lengths_q or lengths_kv: give mask=, or pack the "
            "entries for attention_varlen_backward"
        )
    packed, given = call.packed is not None, {"out" if n == "o" else n: arrays[n] for n in arrays}
    check_received(forward, given, packed=packed)
    taken = {n: x.front() if packed else x for n, x in arrays.items()}
    for name in ("d_out", "o"):
        taken[name] = to_bhsd(taken[name], layout).with_whole_rows()
    q, k, v = forward.rows.values()
    check_backward(taken["d_out"], q, k, v, taken["o"], taken["lse"], d_lse=taken.get("d_lse"))
    taken |= {n: taken[n].whole() for n in _RECEIVED[2:] if n in taken}
    check_together(q=q, **taken)
    return taken


def _places(
    forward: AttentionProblem, operands: Mapping[str, Described], turned_back: bool
) -> dict[str, Operand]:
    """Describe the operands of the gradient kernels.

    Rows of q and k are as multiplied. Gradients have the caller's layout, or BHSD if a pass rotates
    their rows back."""
    read = ("q", "k", "v", "o", "d_out", *OF_SCORES, "kept_rows")
    places = {n: operands[n].place for n in read if n in operands}
    for name in "qkv":
        x, turned = places[name], forward.preparation is not None and name != "v"
        if turned:
            places[name] = Operand.contiguous(x.shape, x.itemsize)
        layout = "BHSD" if turned or turned_back else forward.settings.layout
        places[f"d{name}"] = laid_out(x.shape, x.itemsize, layout)
    return places


#: Kernels, places of their operands, and the operands.
_Settled = tuple[BackwardKernel, dict[str, Operand], dict[str, Described]]


def _settled(
    forward: AttentionProblem,
    operands: dict[str, Described],
    deterministic: bool | None,
    bias: Described | None,
    turned_back: bool,
) -> _Settled:
    """Settle the gradient kernels; return their operands' places, too, and the operands.

    The caller's bias becomes a padded copy where a Hopper form takes it then alone.
    """
    call = replace(forward.call, rope="", rope_offset_q=0, qk_norm=False)

    def of(some: dict[str, Described]) -> _Settled:
        places = _places(forward, some, turned_back)
        kernel = settle_backward(
            call, places, deterministic=deterministic, arch=forward.architecture
        )
        return kernel, places, some

    found = of(operands)
    if found[0].on_hopper or bias is None or forward.architecture != "sm_90a":
        return found
    padded = bias.with_padded_rows(BIAS_ALIGNMENT).broadcast_to(call.score_shape)
    again = of(operands | {"bias": padded})
    return again if again[0].on_hopper else found


def plan_of(problem: Problem) -> Plan:
    """Plan the kernels of the gradients of q and k as they are multiplied, and of v."""
    _, kernel, places, all_keys = problem.settled
    return plan_backward(
        kernel, places, all_keys=all_keys, d_lse="d_lse" in problem.operands,
        given_sums=GIVEN_SUMS[0] in problem.operands,
    )  # fmt: skip


def parse_backward(
    function: str, received: tuple[Any, Any, Any], q: Any, k: Any, v: Any,
    options: Mapping[str, Any],
) -> tuple[BackwardSettings, dict[str, Any]]:  # fmt: skip
    """Tell settings and arrays of a backward pass apart.

    Parameters
    ----------
    function : str
        Name of the called function, for messages.
    received : (array, array, array)
        d_out, out and lse, as for `attention_backward`.
    q, k, v : array
    options : mapping
        Other arguments of `attention_backward` or `attention_varlen_backward`.

    Raises
    ------
    TypeError, UnsupportedError
        For an unknown argument, and for an unsupported option.
    """
    options = {"variant": "fa_tc", "return_lse": True, **options}
    deterministic, d_lse = options.pop("deterministic", None), options.pop("d_lse", None)
    grad_bias = options.pop("grad_bias", False)
    settings, arrays = parse(function, q, k, v, options)
    check_offered(q, deterministic)
    arrays |= zip(("d_out", "out", "lse"), received, strict=True)
    if d_lse is not None:
        arrays["d_lse"] = d_lse
    return BackwardSettings(settings, deterministic, grad_bias=grad_bias), arrays


def resolved_backward(
    function: str, d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
    options: Mapping[str, Any],
) -> Problem:  # fmt: skip
    """Check a backward pass and settle its kernels, without running it.

    Parameters
    ----------
    function : str
        Name of the called function, for messages.
    d_out, q, k, v, out, lse
        As for `attention_backward`; arrays or descriptions.
    options
        As for `parse_backward`.

    Raises
    ------
    ValueError, TypeError, UnsupportedError
        As `attention_backward`.
    """
    settings, arrays = parse_backward(function, (d_out, out, lse), q, k, v, options)
    asked, own, _ = arguments_of_backward(settings, arrays)
    problem: Problem = problem_of(BACKWARD, asked, imported(own)[0])
    return problem
