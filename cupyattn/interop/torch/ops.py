"""Define the operators of ``torch.ops.cupyattn`` for torch's dispatcher.

Each operator has kernels for CPU and CUDA, a kernel for fake tensors, which computes only shapes,
and a derivative. So `torch.compile` keeps operators in its graph, and autograd and the transforms
of ``torch.func`` support them. A forward-mode derivative is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.bridge import empty_lse_beside, no_lse
from cupyattn.interop.torch.calls import TensorSettings, backward_pass, forward
from cupyattn.interop.torch.checks import check_differentiable, check_tensors
from cupyattn.interop.torch.schema import ATTENTION, ATTENTION_QKV, ATTENTION_VARLEN, Schema
from cupyattn.interop.torch.transforms import (
    Join,
    active,
    forward_mode,
    is_mapped_by_autograd,
    join_batch,
    refuse_tangents,
    transform,
)

#: Classes of plain tensors; other classes define how they treat an operator.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Operators of all modules in this package, each with its function.
library = torch.library.Library("cupyattn", "DEF")
#: The first arguments of a backward pass; the forward pass's follow.
RECEIVED = "Tensor d_out, Tensor o, Tensor lse, Tensor? d_lse"
#: The weights of `qk_norm`, whose gradients the backward pass returns after dq, dk and dv.
WEIGHTS = ("q_norm_weight", "k_norm_weight")
_OTHERS = ", Tensor dbias, Tensor dq_weight, Tensor dk_weight"
#: The kernel of each operator on a CPU or a CUDA device.
KERNELS: dict[Any, Any] = {}


def _define(name: str, schema: Schema) -> Any:
    """Define attention with the arguments of a schema, and its derivative; return the operator."""

    def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(schema.settings(arguments), schema.given(arguments))
        return o, empty_lse_beside(o) if lse is None else lse

    def attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, settings = schema.given(arguments), schema.settings(arguments).of_call
        check_tensors("attention", tensors)
        q = tensors["q"]
        o = torch.empty_like(q)
        if not settings.return_lse:
            return o, no_lse(o)
        if "cu_seqlens_q" in tensors:
            shape = [q.shape[1], q.shape[0]]
        else:
            length = 2 if settings.layout == "BHSD" else 1
            shape = [q.shape[0], q.shape[3 - length], q.shape[length]]
        return o, q.new_empty(shape, dtype=torch.float32)

    further = tuple(name for name in ("bias", *WEIGHTS) if name in schema.tensors)

    def backward(
        d_out: Tensor, o: Tensor, lse: Tensor, d_lse: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        grad_bias = bool(further) and arguments[-1]
        arguments = arguments[: len(arguments) - bool(further)]
        settings, tensors = schema.settings(arguments), schema.given(arguments)
        found = backward_pass(settings, tensors, d_out, o, lse, d_lse, grad_bias)
        return tuple(
            found[name] if name in found else d_out.new_empty(0)
            for name in ("q", "k", "v", *further)
        )

    def fake(
        d_out: Tensor, o: Tensor, lse: Tensor, d_lse: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, ...]:
        found = backward_fake(d_out, o, lse, d_lse, *arguments)
        wanted = dict(zip(schema.tensors, arguments, strict=False))
        if further and not arguments[-1]:
            del wanted["bias"]
        own = (wanted.get(name) for name in further)
        return *found, *(d_out.new_empty(0) if x is None else x.new_empty(x.shape) for x in own)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        settings, operands = schema.settings(inputs), len(schema.tensors)
        check_differentiable("attention", schema.given(inputs))
        need_lse(ctx, output, return_lse=settings.of_call.return_lse)
        ctx.save_for_backward(*output, *inputs[:operands])
        ctx.rest = inputs[operands:]
        ctx.block_mask = settings.block_mask  # kept alive until then

    def derivative(
        ctx: Any, d_out: Tensor | None, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        o, lse, *tensors = ctx.saved_tensors
        if d_out is None:  # only lse has a gradient
            d_out = torch.zeros_like(o)
        needed = dict(zip(schema.tensors, ctx.needs_input_grad, strict=False))
        grad_bias = [bool(needed["bias"])] if further else []
        made = backward_operator(d_out, o, lse, d_lse, *tensors, *ctx.rest, *grad_bias)
        found = dict(zip(("q", "k", "v", *further), made, strict=True))
        return *(found[n] if needed[n] and n in found else None for n in schema.tensors), *(
            [None] * len(ctx.rest)
        )

    operator = define(name, f"{schema}", "(Tensor o, Tensor lse)", attention, attention_fake)
    backward_operator = define(
        f"{name}_backward", f"{RECEIVED}, {schema}{', bool grad_bias' if further else ''}",
        f"(Tensor dq, Tensor dk, Tensor dv{_OTHERS if further else ''})", backward, fake,
    )  # fmt: skip
    join: Join | None = None
    join_of_backward: Join | None = None
    if "cu_seqlens_q" not in schema.tensors:
        join = join_batch(operator, schema.tensors, schema.settings)
        together = join_batch(
            backward_operator, ("d_out", "o", "lse", "d_lse", *schema.tensors),
            lambda arguments: schema.settings(arguments[4 : -1 if further else None]),
        )  # fmt: skip

        def join_of_backward(
            size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
        ) -> Any:
            # Each entry has its own gradient of a bias or weights that they share.
            own = dict(zip(schema.tensors, arguments[4:], strict=False))
            if (further and arguments[-1]) or any(own.get(n) is not None for n in WEIGHTS):
                return None
            return together(size, in_dims, arguments)

    differentiate(operator, derivative, save, join)
    refuse_derivative(backward_operator, join_of_backward)
    return operator


def define(
    name: str, arguments: str, results: str, kernel: Any, fake: Any, *, host: bool = False
) -> Any:
    """Define an operator of the library; return it.

    Parameters
    ----------
    name, arguments, results : str
        Parts of its schema.
    kernel, fake : callable
        Functions for tensors on a CPU or a CUDA device, and for fake tensors.
    host : bool
        Whether host code decides at each call, so no CUDA graph may replay it.

    Notes
    -----
    Kernels get operands with the traced strides. Inductor would pad some operands, which would
    change the call, and its results would have other strides than those of the fake kernel.
    """
    tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides]
    tags += [torch.Tag.cudagraph_unsafe] * host
    library.define(f"{name}({arguments}) -> {results}", tags=tuple(tags))
    for key in ("CPU", "CUDA"):
        library.impl(name, kernel, key)
    torch.library.register_fake(f"cupyattn::{name}", _of_one_device(fake), lib=library)
    operator = getattr(torch.ops.cupyattn, name).default
    KERNELS[operator] = kernel
    return operator


def _of_one_device(fake: Any) -> Any:
    """Return a kernel for fake tensors that refuses meta tensors beside real ones.

    torch calls it if one tensor is on the meta device, and the others would get results in memory
    that nothing wrote.
    """

    @functools.wraps(fake)
    def checked(*arguments: Any) -> Any:
        lists = ([*x] if isinstance(x, (list, tuple)) else [x] for x in arguments)
        plain = (x for one in lists for x in one if type(x) in PLAIN)
        devices = sorted({str(x.device) for x in plain})
        if len(devices) > 1 and "meta" in devices:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(devices)}: tensors on meta hold no numbers, load them first"
            )
        return fake(*arguments)

    return checked


def differentiate(
    operator: Any, derivative: Any, save: Any = None, join: Join | None = None
) -> None:
    """Register the derivative of an operator, for autograd and for ``torch.func``.

    The autograd kernel that torch makes from a derivative costs every call about 9 us, even without
    a gradient, because it dispatches the call twice. A call that is neither differentiated nor
    observed skips it and runs the kernel directly.

    Parameters
    ----------
    operator : OpOverload
        Made by `define`.
    derivative, save : callable
        As `torch.library.register_autograd` takes them; one function that raises refuses gradients.
    join : Join, optional
        Runs all entries of an axis that `torch.func.vmap` maps in one call.
    """
    torch.library.register_autograd(operator, derivative, setup_context=save, lib=library)
    kernel = KERNELS[operator]
    differentiated = make_autograd_impl(operator, Info(derivative, save))

    def call_without_saving(keyset: Any, *arguments: Any) -> Any:
        refuse_tangents(operator, arguments)
        differentiable, seen = autograd_state(arguments)
        if differentiable and derivative is save:  # torch's own looks into no list with None
            derivative()
        if differentiable or seen:
            return differentiated(keyset, *arguments)
        return kernel(*arguments)

    for device in ("CPU", "CUDA"):
        library.impl(operator, call_without_saving, f"Autograd{device}", with_keyset=True)
    transform(library, operator, derivative, save, join)


def autograd_state(arguments: Iterable[Any]) -> tuple[bool, bool]:
    """Return whether autograd records a call on these tensors, and whether operators are observed.

    Views that negate count as observed, because torch's dispatcher resolves them.
    """
    differentiable, seen = False, watched()
    for x in arguments:
        plain = type(x) in PLAIN
        if plain or isinstance(x, Tensor):  # others are None, a setting, or refused later
            differentiable = differentiable or x.requires_grad
            seen = seen or not plain or x.is_neg()
        elif isinstance(x, (list, tuple)):
            own = autograd_state(x)
            differentiable, seen = differentiable or own[0], seen or own[1]
    return differentiable and torch.is_grad_enabled(), seen


def has_memory(gradient: Tensor, other: Tensor | None) -> bool:
    """Return whether kernels may read gradients in place, without an operator."""
    return (type(gradient) in PLAIN and not is_mapped_by_autograd(gradient)) and (
        other is None or has_memory(other, None)
    )


def refuse_derivative(operator: Any, join: Join | None = None) -> None:
    """Let the derivative of a backward pass raise UnsupportedError instead of a silent zero."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"the derivative for '{operator.name()}' is not implemented: attention has no second "
            "derivative here, torch's own scaled_dot_product_attention has one on "
            "SDPBackend.MATH"
        )

    differentiate(operator, refuse, join=join)


def is_exported() -> bool:
    """Return whether torch traces a program for export, even if it also compiles.

    ``torch.compiler.is_exporting`` is True in all compiled code of torch 2.11.
    """
    return bool(torch.compiler._is_exporting_flag)


def need_lse(ctx: Any, output: tuple[Tensor, Tensor], *, return_lse: bool) -> None:
    """Raise UnsupportedError if a derivative lacks lse; let gradients of unused results be None."""
    if not return_lse:
        raise UnsupportedError("the derivative takes lse: give return_lse=True")
    ctx.set_materialize_grads(False)


def backward_fake(
    d_out: Tensor, o: Tensor, lse: Tensor, d_lse: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return fake gradients of q, k and v."""
    return tuple(x.new_empty(x.shape) for x in arguments[:3])


_SCHEMAS = {
    "attention": ATTENTION, "attention_qkv": ATTENTION_QKV, "attention_varlen": ATTENTION_VARLEN
}  # fmt: skip
for _name, _schema in _SCHEMAS.items():
    _define(_name, _schema)


def attend(settings: TensorSettings, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call the operator that takes these tensors; return o and lse."""
    name = _operator_of(tensors)
    o, lse = getattr(torch.ops.cupyattn, name)(*_SCHEMAS[name].flat(tensors, settings))
    return o, lse


def backward_of(
    settings: TensorSettings,
    tensors: Mapping[str, Tensor],
    d_out: Tensor,
    o: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    grad_bias: bool,
) -> dict[str, Tensor]:
    """Call the operator of the backward pass; return gradients by operand, as `backward_pass`."""
    name = _operator_of(tensors)
    operator = getattr(torch.ops.cupyattn, f"{name}_backward")
    arguments = [d_out, o, lse, d_lse, *_SCHEMAS[name].flat(tensors, settings)]
    further = "bias" in _SCHEMAS[name].tensors
    found = operator(*arguments, *[grad_bias] * further)
    wanted = ("q", "k", "v", *["bias", *WEIGHTS] * further)
    return {n: x for n, x in zip(wanted, found, strict=True) if n in tensors}


def _operator_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the operator that takes these tensors, with the fewest arguments."""
    if "cu_seqlens_q" in tensors:
        return "attention_varlen"
    return "attention_qkv" if len(tensors) == 3 else "attention"


def watched() -> bool:
    """Return whether a compiler, trace, mode, transform or forward-mode AD must see operators."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # of torch.jit.trace
        or torch._C._len_torch_dispatch_stack() > 0
        or active()
        or forward_mode()
    )
