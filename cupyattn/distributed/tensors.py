"""Tensors of torch on several ranks: which of them require gradients, and a function of autograd.

Such tensors exist only if torch has been imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cupyattn.arrays import interchange
from cupyattn.errors import UnsupportedError


def is_compiling() -> bool:
    """Whether torch.compile traces the caller."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code calls between two graphs."""
    outside: Callable[..., Any] = sys.modules["torch"].compiler.disable(function)
    return outside


def need_gradients(arrays: Mapping[str, Any]) -> bool:
    """Whether torch's autograd records a call on these arrays."""
    if not any(getattr(x, "requires_grad", False) for x in arrays.values()):
        return False
    import torch

    return bool(torch.is_grad_enabled())


def detached(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays as kernels read them: of a tensor that requires a gradient its numbers."""
    return {name: interchange.detached(x) for name, x in arrays.items()}


def differentiable(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], q: Any, k: Any, v: Any,
    *, through_lse: bool,
) -> tuple[Any, Any]:
    """Return O and lse of tensors, such that autograd calls `backward` for their gradients.

    Parameters
    ----------
    forward : callable
        Takes q, k and v without gradients; returns O and lse.
    backward : callable
        Takes the gradient with respect to O, that with respect to lse or None, and q, k, v, O and
        lse. Returns the gradients with respect to q, k and v.
    q, k, v : torch.Tensor
    through_lse : bool
        Whether lse has a gradient: then all ranks get one, of zeros where the loss does not use
        lse.
    """
    found: tuple[Any, Any] = _function().apply(forward, backward, through_lse, q, k, v)
    return found


@functools.cache
def _function() -> Any:
    import torch

    class Gradients(torch.autograd.Function):  # type: ignore[misc]
        """The backward pass of several ranks, which has no derivative."""

        @staticmethod
        def forward(ctx: Any, backward: Any, d_out: Any, d_lse: Any, *saved: Any) -> Any:
            return backward(d_out, d_lse, *(x.detach() for x in saved))

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise UnsupportedError(
                "parallel_attention has no second derivative: detach the gradients that "
                "create_graph=True gave, or compute them without it"
            )

    class OnRanks(torch.autograd.Function):  # type: ignore[misc]
        """Attention of several ranks, which all call its backward pass in the same order."""

        @staticmethod
        def forward(
            ctx: Any, forward: Any, backward: Any, through_lse: bool, *qkv: Any
        ) -> tuple[Any, Any]:
            o, lse = forward(*(x.detach() for x in qkv))
            ctx.save_for_backward(*qkv, o, lse)
            if not through_lse:
                ctx.mark_non_differentiable(lse)
            ctx.of_gradients, ctx.through_lse = backward, through_lse
            return o, lse

        @staticmethod
        def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
            of_lse = d_lse.contiguous() if ctx.through_lse else None
            given = d_out.contiguous(), of_lse, *ctx.saved_tensors
            return (None, None, None, *Gradients.apply(ctx.of_gradients, *given))

    return OnRanks
