"""Which way a call takes: straight to the kernels, or as an operator that torch sees.

It has to see one where a gradient is wanted, and where operators are watched or replaced: by a
compiler, a mode, a transform, or a tensor of another class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch.calls import Settings, forward
from cupyattn.interop.torch.checks import check_device, check_differentiable, check_tensors
from cupyattn.interop.torch.ops import flat

#: Tensors with memory of their own; those of other classes know what they do with an operator.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: What ``torch.autocast`` gives its own type.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def call(settings: Settings, tensors: dict[str, Any], out: Tensor | None = None) -> Any:
    """Run attention the way that it has to go.

    Parameters
    ----------
    settings : Settings
    tensors : dict of str to Tensor or None
        Of `cupyattn.interop.torch.calls.TENSORS`, q first.
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
    q = tensors["q"]
    check_device("attention", q)
    kind = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind):
        tensors = _cast(tensors, torch.get_autocast_dtype(kind))
    lse: Tensor | None
    differentiable = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors.values()
    )
    if not differentiable and not _is_traced(tensors):
        o, lse = forward(settings, tensors, out)
        return (o, lse) if settings.return_lse else o
    check_tensors("attention", tensors)
    if differentiable:
        check_differentiable("attention", tensors)
    if out is not None:
        raise RuntimeError(
            "attention(): functions with out=... arguments don't support automatic "
            "differentiation or tracing: leave it out, results come from torch's allocator"
        )
    with_lse = differentiable or settings.return_lse
    arguments = flat(tensors, settings._replace(return_lse=with_lse))
    o, lse = torch.ops.cupyattn.attention.default(*arguments)
    return (o, lse) if settings.return_lse else o


def _is_traced(tensors: Mapping[str, Tensor | None]) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not all(x is None or type(x) in _PLAIN for x in tensors.values())
    )


def _cast(tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Give q, k and v the type of a region of ``torch.autocast``, as torch does with its own."""
    own = {n: x for n in "qkv" if isinstance(x := tensors[n], Tensor) and x.dtype in _CAST}
    return {**tensors, **{name: x.to(dtype) for name, x in own.items()}}
