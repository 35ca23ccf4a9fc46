"""Which way a call takes: straight to the kernels, through autograd, or as an operator.

Torch has to see an operator where those are watched or replaced: by a compiler, a mode, a
transform, or a tensor of another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch import attn_masks, eager, ops, transforms
from cupyattn.interop.torch.calls import TensorSettings, forward
from cupyattn.interop.torch.checks import check_device, check_differentiable, check_tensors
from cupyattn.problem.checks import check_switch

#: What ``torch.autocast`` gives its own type.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def call(settings: TensorSettings, tensors: dict[str, Any], out: Tensor | None = None) -> Any:
    """Run attention the way that it has to go.

    Parameters
    ----------
    settings : TensorSettings
    tensors : dict of str to Tensor
        Those of `cupyattn.interop.torch.calls.TENSORS` that there are.
    out : Tensor, optional

    Returns
    -------
    o, or (o, lse)
        As the settings ask.

    Raises
    ------
    RuntimeError, NotImplementedError, UnsupportedError, ValueError, TypeError
        As `cupyattn.interop.torch.attention`.
    """
    settings, tensors = attn_masks.with_causal_bias(settings, tensors)
    tensors = in_region(tensors)
    if isinstance(out, Tensor) and out.is_neg():
        raise RuntimeError(
            "attention(): out must not be a view that negates: give out.resolve_neg(), a copy"
        )
    differentiable, watched = ops.how_seen(tensors.values())
    lse: Tensor | None
    if not (differentiable or watched):
        o, lse = forward(settings, tensors, out)
        return (o, lse) if settings.of_call.return_lse else o
    check_tensors("attention", tensors)
    if differentiable:
        check_differentiable("attention", tensors)
    if out is not None:
        raise RuntimeError(
            "attention(): functions with out=... arguments don't support automatic "
            "differentiation or tracing: leave it out, results come from torch's allocator"
        )
    # A transform may differentiate tensors that do not say so: vmap wraps those of an outer grad.
    wanted = settings.of_call.return_lse
    check_switch("return_lse", wanted)
    with_lse = bool(differentiable or transforms.active() or wanted)
    settings = settings._replace(of_call=settings.of_call._replace(return_lse=with_lse))
    o, lse = (ops if watched else eager).attend(settings, tensors)
    return (o, lse) if wanted else o


def in_region(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as kernels read them, q, k and v of the type of a region of autocast.

    Views that negate are made numbers, and q, k and v are copied where their last axis is not
    contiguous.

    Raises
    ------
    TypeError, NotImplementedError
        For a q that is no tensor, or lies where nothing runs, and for masks of other classes.
    """
    q = tensors["q"]
    check_device("attention", q)
    for name in attn_masks.MASKS:
        if name in tensors:
            attn_masks.check_class(name, tensors[name])
    tensors = {name: readable(x, name in "qkv") for name, x in tensors.items()}
    kind = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    own = {n: x for n in "qkv" if isinstance(x := tensors[n], Tensor) and x.dtype in _CAST}
    return {**tensors, **{name: x.to(dtype) for name, x in own.items()}}


def readable(x: Any, by_row: bool) -> Any:
    """Return a tensor, or a copy, whose memory holds its numbers; anything else as it is.

    Parameters
    ----------
    x : Tensor
    by_row : bool
        Whether its last axis must be contiguous.
    """
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return x  # refused later
    # A compiler cannot trace the question; the operator's dispatcher answers it when a graph runs.
    if not torch.compiler.is_compiling() and x.is_neg():
        x = x.resolve_neg()
    if by_row and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    return x
