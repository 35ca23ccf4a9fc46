"""``torch.ops.cupyattn``: the calls as torch's dispatcher knows them.

Each operator has kernels for CPU and CUDA, one for fake tensors, which says shapes alone, and a
derivative: `torch.compile` keeps them in its graph, and autograd goes through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch import schema
from cupyattn.interop.torch.calls import TENSORS, Settings, backward_pass, forward
from cupyattn.interop.torch.checks import check_tensors

#: Operators of every module here.
library = torch.library.Library("cupyattn", "DEF")
library.define(f"attention({schema.OPERANDS}, {schema.SETTINGS}) -> (Tensor o, Tensor lse)")
library.define(
    f"attention_backward(Tensor d_out, Tensor o, Tensor lse, {schema.OPERANDS}, {schema.SETTINGS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)
#: Among the arguments behind the tensors.
_RETURN_LSE = Settings._fields.index("return_lse")


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    settings = schema.settings_of(arguments[len(TENSORS) :])
    o, lse = forward(settings, schema.given(arguments))
    return o, _no_lse(o) if lse is None else lse


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = schema.given(arguments), schema.settings_of(arguments[len(TENSORS) :])
    check_tensors("attention", tensors)
    q = tensors["q"]
    o = q.new_empty(q.shape)
    if not settings.return_lse:
        return o, _no_lse(o)
    if "cu_seqlens_q" in tensors:
        shape = [q.shape[1], q.shape[0]]
    else:
        length = 2 if settings.layout == "BHSD" else 1
        shape = [q.shape[0], q.shape[3 - length], q.shape[length]]
    return o, q.new_empty(shape, dtype=torch.float32)


def _no_lse(o: Tensor) -> Tensor:
    return o.new_empty((0,), dtype=torch.float32)


def _backward(d_out: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    settings = schema.settings_of(arguments[len(TENSORS) :])
    return backward_pass(settings, schema.given(arguments), d_out, o, lse)


def _backward_fake(d_out: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, lse = output
    ctx.rest = inputs[len(TENSORS) :]
    if not ctx.rest[_RETURN_LSE]:
        raise UnsupportedError("the derivative takes lse: give return_lse=True")
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(o, lse, *inputs[: len(TENSORS)])
    ctx.block_mask = schema.block_mask_of(ctx.rest)  # kept alive until then


def _derivative(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    o, lse, *tensors = ctx.saved_tensors
    found = torch.ops.cupyattn.attention_backward(d_out, o, lse, *tensors, *ctx.rest)
    return (*found, *[None] * (len(TENSORS) - 3 + len(ctx.rest)))


def refuse_derivative(operator: str) -> None:
    """Let an operator's derivative raise UnsupportedError, in place of passing nothing on."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"the derivative for '{operator}' is not implemented")

    torch.library.register_autograd(operator, refuse, lib=library)


for _key in ("CPU", "CUDA"):
    library.impl("attention", _attention, _key)
    library.impl("attention_backward", _backward, _key)
torch.library.register_fake("cupyattn::attention", _attention_fake, lib=library)
torch.library.register_fake("cupyattn::attention_backward", _backward_fake, lib=library)
torch.library.register_autograd(
    "cupyattn::attention", _derivative, setup_context=_save, lib=library
)
refuse_derivative("cupyattn::attention_backward")
#: ``torch.ops.cupyattn.attention``
attention = torch.ops.cupyattn.attention.default
