"""Which way a call takes: straight to the kernels, through autograd, or as an operator.

Torch has to see an operator where those are watched or replaced: by a compiler, a mode, a
transform, or a tensor of another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch import eager, ops, transforms
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
    tensors = in_region(tensors)
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
    """Return tensors of which q, k and v have the type of a region of ``torch.autocast``.

    Raises
    ------
    TypeError, NotImplementedError
        For a q that is no tensor, or lies where nothing runs.
    """
    q = tensors["q"]
    check_device("attention", q)
    kind = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    own = {n: x for n in "qkv" if isinstance(x := tensors[n], Tensor) and x.dtype in _CAST}
    return {**tensors, **{name: x.to(dtype) for name, x in own.items()}}
