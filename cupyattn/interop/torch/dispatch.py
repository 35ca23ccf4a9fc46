"""Decide how a call runs: directly on the kernels, through autograd, or as an operator.

Torch must see an operator if something observes or replaces operators: a compiler, a mode, a
transform, or a tensor of another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch import attn_masks, eager, epilogues, ops, transforms
from cupyattn.interop.torch.calls import TensorSettings, forward
from cupyattn.interop.torch.checks import check_device, check_differentiable, check_tensors
from cupyattn.problem.settings import check_switch

#: Operands that ``torch.autocast`` converts to its type.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def call(settings: TensorSettings, tensors: dict[str, Any], out: Tensor | None = None) -> Any:
    """Run attention directly, by autograd, or as an operator, as needed.

    Parameters
    ----------
    settings : TensorSettings
    tensors : dict of str to Tensor
        The given tensors, by names in `cupyattn.interop.torch.calls.TENSORS`.
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
    if len(tensors) > 3:
        settings, tensors = attn_masks.with_causal_bias(settings, tensors)
    tensors = in_region(tensors)
    if out is not None and not torch.compiler.is_compiling():
        tensors = _beside(out, tensors)
    differentiable, watched = ops.autograd_state(tensors.values())
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
    # A transform may differentiate tensors without showing it: vmap wraps tensors of an outer grad.
    wanted = settings.of_call.return_lse
    check_switch("return_lse", wanted)
    with_lse = bool(differentiable or transforms.active() or wanted)
    settings = settings._replace(of_call=settings.of_call._replace(return_lse=with_lse))
    if torch.compiler.is_compiling():
        epilogues.register()
    o, lse = (ops if watched else eager).attend(settings, tensors)
    return (o, lse) if wanted else o


def in_region(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors that kernels can read; under autocast, q, k and v get its type.

    q, k and v are copied if their last axis is not contiguous, or if they are negated views.

    Raises
    ------
    TypeError, NotImplementedError
        For a q that is not a tensor or on an unsupported device, and for masks of other classes.
    """
    q = tensors["q"]
    check_device("attention", q)
    if len(tensors) > 3:
        for name in attn_masks.MASKS:
            if name in tensors:
                attn_masks.check_class(name, tensors[name])
    if not _are_rows(tensors):
        tensors = {name: _as_rows(x) if name in "qkv" else x for name, x in tensors.items()}
    kind = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    own = {n: x for n in "qkv" if isinstance(x := tensors[n], Tensor) and x.dtype in _CAST}
    return {**tensors, **{name: x.to(dtype) for name, x in own.items()}}


def _are_rows(tensors: dict[str, Any]) -> bool:
    """Return whether rows of q, k and v are contiguous, so that no copy is needed."""
    try:
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        if not q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1:  # sooner than stride(-1)
            return False
        # A compiler cannot trace the question; the operator's dispatcher answers it at run time.
        return torch.compiler.is_compiling() or not (q.is_neg() or k.is_neg() or v.is_neg())
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return False  # something else, which is refused later


def _as_rows(x: Any) -> Any:
    """Return a tensor if it satisfies `_are_rows`, else a copy; invalid tensors stay unchanged."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided or not x.ndim:
        return x
    x = x if torch.compiler.is_compiling() else x.resolve_neg()
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _beside(out: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a call with `out`, resolved here, because operators write to no views.

    Raises
    ------
    RuntimeError
        Where `out` is a view that negates.
    """
    if isinstance(out, Tensor) and out.is_neg():
        raise RuntimeError(
            "attention(): out must not be a view that negates: give out.resolve_neg(), a copy"
        )
    return {n: x.resolve_neg() if isinstance(x, Tensor) else x for n, x in tensors.items()}
