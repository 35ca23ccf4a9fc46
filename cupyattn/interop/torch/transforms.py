"""Support the transforms of ``torch.func`` for the operators, and refuse forward mode.

``torch.func`` passes an operator to the kernel of one dispatch key before it applies any transform.
The kernel registered here calls an autograd function of the operator, which defines `grad` and
`vmap`; its `jvp` raises. The function runs the operator again on the tensors inside the wrappers of
the outermost transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils import _pytree

from cupyattn.errors import UnsupportedError
from cupyattn.interop.mapped import joins_the_batch

#: Rule for `vmap`: (size of the mapped axis, mapped axis of each argument or None, arguments) to
#: results whose first axis is the mapped one. None: each entry needs a separate call.
Join = Callable[[int, tuple[int | None, ...], tuple[Any, ...]], Any]

#: Operands that all entries of a batch share.
_TABLES = ("rope_cos", "rope_sin", "q_norm_weight", "k_norm_weight")
_MASKS = ("mask", "bias")


def active() -> bool:
    """Return whether a transform of ``torch.func`` is active."""
    return bool(torch._C._are_functorch_transforms_active())


def forward_mode() -> bool:
    """Return whether a level of dual tensors is open, so that tensors may have tangents."""
    return bool(forward_ad._current_level >= 0)


def refuse_tangents(operator: Any, arguments: Iterable[Any]) -> None:
    """Raise UnsupportedError if an argument is a dual tensor.

    Parameters
    ----------
    operator : OpOverload
    arguments : iterable
        All arguments of the operator.
    """
    if not forward_mode():
        return
    for x in arguments:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise _no_forward_mode(operator)


def is_mapped_by_autograd(x: Tensor) -> bool:
    """Return whether a gradient is a batch, from ``torch.autograd.grad(is_grads_batched=True)``.

    Such a tensor has no memory that a kernel may read; operators run once for each gradient.
    """
    return bool(_functorch.is_legacy_batchedtensor(x))


def transform(library: Any, operator: Any, derivative: Any, save: Any, join: Join | None) -> None:
    """Let an operator run under the transforms of ``torch.func``.

    Parameters
    ----------
    library : torch.library.Library
        The library that defines the operator.
    operator : OpOverload
        Without side effects; its results share no memory with its arguments.
    derivative, save : callable
        As for `torch.library.register_autograd`; `save` may be None. Errors of `save` are raised
        when a gradient is computed.
    join : Join, optional
        Runs all entries of a mapped axis in one call.
    """
    function = _function_of(operator, derivative, save, join)

    def transformed(*arguments: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        if interpreter.key() == torch._C._functorch.TransformType.Functionalize:
            return _functionalized(interpreter, operator, arguments)
        return function.apply(*arguments)

    library.impl(operator, transformed, "FuncTorchDynamicLayerFrontMode")


def _function_of(
    operator: Any, derivative: Any, save: Any, join: Join | None
) -> type[torch.autograd.Function]:
    """Return the autograd function of an operator under transforms."""

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            # NOTE: this also runs without a gradient, so a refusal is postponed.
            ctx.refusal = None
            if save is not None:
                try:
                    save(ctx, inputs, output)
                except UnsupportedError as error:
                    ctx.refusal = error

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if ctx.refusal is not None:
                raise ctx.refusal
            return derivative(ctx, *gradients)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise _no_forward_mode(operator)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            found = join(info.batch_size, in_dims, arguments) if join else None
            if found is None:
                found = _entry_by_entry(operator, info.batch_size, in_dims, arguments)
            return found, _pytree.tree_map(lambda _: 0, found)

    Transformed.__name__ = f"{operator._opname}"
    return Transformed


def _entry_by_entry(
    operator: Any, size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> Any:
    """Call an operator for each entry of a mapped axis; return its results, stacked."""
    mapped = [
        x if axis is None else first_axis(x, axis)
        for x, axis in zip(arguments, in_dims, strict=True)
    ]

    def one(entry: int) -> Any:
        return operator(
            *[x if axis is None else x[entry] for x, axis in zip(mapped, in_dims, strict=True)]
        )

    if not size:
        raise UnsupportedError(
            f"vmap over an axis of size 0 is not supported by '{operator.name()}': map at least "
            "one entry"
        )
    found = [one(entry) for entry in range(size)]
    if isinstance(found[0], Tensor):
        return torch.stack(found)
    return tuple(torch.stack(results) for results in zip(*found, strict=True))


def join_batch(
    operator: Any, names: Sequence[str], settings: Callable[[Sequence[Any]], Any]
) -> Join:
    """Return the rule that lets a mapped axis join the batch of q, k and v.

    Parameters
    ----------
    operator : OpOverload
    names : sequence of str
        Names of the operator's tensors, which are its first arguments.
    settings : callable
        Returns the `calls.TensorSettings` among all arguments.
    """

    def join(size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
        axes = dict(zip(names, in_dims, strict=False))
        own = settings(arguments)
        tables = any(axes.get(name) is not None for name in _TABLES)
        if tables or not joins_the_batch(own.of_call.quant, own.block_mask):
            return None
        q_axis, q = axes["q"], arguments[names.index("q")]
        batch = (q if q_axis is None else q.movedim(q_axis, -1)).shape[0]

        def joined(name: str, x: Tensor | None) -> Tensor | None:
            if x is None or name in _TABLES:
                return x
            axis = axes[name]
            every = x[None] if axis is None else first_axis(x, axis)
            own_batch = every.shape[1]
            if name in _MASKS:  # which broadcast to the scores
                every = every[(slice(None), *(None,) * (5 - every.ndim))]
                if axis is None and every.shape[1] == 1:
                    return every[0]
                own_batch = batch
            return every.expand(size, own_batch, *every.shape[2:]).flatten(0, 1)

        operands = [joined(n, x) for n, x in zip(names, arguments, strict=False)]
        found = operator(*operands, *arguments[len(names) :])
        return tuple(
            x.unflatten(0, (size, batch)) if x.ndim > 1 else x.new_empty((size, 0)) for x in found
        )

    return join


def first_axis(x: Tensor, axis: int) -> Tensor:
    """Return a tensor with the mapped axis first and a contiguous last axis.

    It is copied only where `vmap` maps the axis that was contiguous.
    """
    moved = x.movedim(axis, 0)
    strided = x.ndim > 1 and moved.shape[-1] > 1 and moved.stride(-1) != 1
    was_contiguous = x.stride(axis) == 1
    return moved.contiguous() if strided and was_contiguous else moved


def _functionalized(interpreter: Any, operator: Any, arguments: tuple[Any, ...]) -> Any:
    """Run an operator under ``torch.func.functionalize``, which does not change it."""
    views, level = interpreter.functionalize_add_back_views(), interpreter.level()

    def unwrapped(x: Any) -> Any:
        if not (isinstance(x, Tensor) and _functorch.is_functionaltensor(x)):
            return x
        torch._sync(x)
        return _functorch._unwrap_functional_tensor(x, views)

    operands = [unwrapped(x) for x in arguments]
    with interpreter.lower():
        found = operator(*operands)
    return _pytree.tree_map(lambda x: _functorch._wrap_functional_tensor(x, level), found)


def _no_forward_mode(operator: Any) -> UnsupportedError:
    return UnsupportedError(
        f"forward-mode derivatives of '{operator.name()}' are not implemented (torch.func.jvp, "
        "jacfwd, hessian, linearize, dual tensors): use reverse mode, as torch.func.vjp, grad and "
        "jacrev do, or torch's own function"
    )
