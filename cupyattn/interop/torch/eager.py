"""Run attention as an autograd function, which has derivatives without torch's dispatcher.

An operator with a derivative takes about 0.1 ms of host time a call. If only autograd must know of
a call, an autograd function is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch import ops
from cupyattn.interop.torch.calls import TensorSettings, backward_pass, forward


class _Attention(torch.autograd.Function):
    """The autograd function of `calls.forward` and `calls.backward_pass`."""

    @staticmethod
    def forward(
        ctx: Any, settings: TensorSettings, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        o, lse = forward(settings, dict(zip(names, tensors, strict=True)))
        ctx.save_for_backward(o, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.names = settings, names
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        o, lse, *given = ctx.saved_tensors
        if d_out is None:  # only lse has a gradient
            d_out = torch.zeros_like(o)
        tensors = dict(zip(ctx.names, given, strict=True))
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[2:], strict=True))
        grad_bias = wanted.get("bias", False)
        # Observers now see an operator; it refuses a second derivative.
        if torch.is_grad_enabled() or ops.watched() or not ops.has_memory(d_out, d_lse):
            found = ops.backward_of(ctx.settings, tensors, d_out, o, lse, d_lse, grad_bias)
        else:
            d_lse = None if d_lse is None else d_lse.resolve_neg()
            d_out = d_out.resolve_neg()
            found = backward_pass(ctx.settings, tensors, d_out, o, lse, d_lse, grad_bias)
        return (None, None, *(found.get(n) if wanted[n] else None for n in ctx.names))


def attend(settings: TensorSettings, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run attention on tensors of which some require gradients.

    Parameters
    ----------
    settings : TensorSettings
        With ``return_lse``.
    tensors : mapping of str to Tensor
        The given tensors, by names in `cupyattn.interop.torch.calls.TENSORS`; q, k and v first.
    """
    o, lse = _Attention.apply(settings, tuple(tensors), *tensors.values())
    return o, lse
