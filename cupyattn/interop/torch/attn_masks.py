"""Convert torch's masks: causal masks that are objects, supported types, broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from cupyattn.interop.torch.calls import TensorSettings
from cupyattn.interop.torch.ops import PLAIN

#: Arguments that are masks.
MASKS = ("mask", "bias")
#: Mask types of torch's function that kernels read.
_DTYPES = torch.bool, torch.float16, torch.bfloat16, torch.float32
_ALIGN = {CausalVariant.UPPER_LEFT: "top-left", CausalVariant.LOWER_RIGHT: "bottom-right"}


def with_causal_bias(
    settings: TensorSettings, tensors: dict[str, Any]
) -> tuple[TensorSettings, dict[str, Any]]:
    """Return settings and tensors of a call, with a `CausalBias` tensor replaced by ``causal``.

    Parameters
    ----------
    settings : TensorSettings
    tensors : dict of str to Tensor
        The given tensors, by names in `cupyattn.interop.torch.calls.TENSORS`.

    Raises
    ------
    ValueError
        With ``causal=True``, or with lengths or offsets of sequences.
    RuntimeError
        For a lower right mask whose lengths are not the lengths of q and k.
    """
    for name in MASKS:
        mask = tensors.get(name)
        if not isinstance(mask, CausalBias):
            continue
        call = settings.of_call
        align = _ALIGN[CausalVariant(mask.variant)]
        if call.causal:
            raise ValueError(
                f"CausalBias should not be used with causal=True: leave causal out, or give "
                f"causal_align={align!r} in place of {name}"
            )
        others = [n for n in tensors if n.startswith(("lengths", "cu_seqlens"))]
        if others:
            raise ValueError(
                f"{name} is a CausalBias, which is of one length, beside {others[0]}: give "
                f"causal=True and causal_align={align!r} in its place"
            )
        tensors = {n: x for n, x in tensors.items() if n != name}
        if align == "bottom-right":
            _check_lengths(name, mask, tensors, 2 if call.layout == "BHSD" else 1)
        settings = settings._replace(of_call=call._replace(causal=True, causal_align=align))
    return settings, tensors


def _check_lengths(name: str, mask: Any, tensors: dict[str, Any], axis: int) -> None:
    """Raise RuntimeError unless a lower right mask has the lengths of q and k."""
    q, k = tensors["q"], tensors["k"]
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k)):
        return  # refused later
    lengths = q.shape[axis], k.shape[axis]
    if (mask.seq_len_q, mask.seq_len_kv) != lengths:
        raise RuntimeError(
            f"{name} must be causal_lower_right{tuple(lengths)}, as long as q and k are, got "
            f"causal_lower_right({mask.seq_len_q}, {mask.seq_len_kv})"
        )


def check_class(name: str, mask: Any) -> None:
    """Raise TypeError for a mask of a class of tensors that is not known.

    Such a class defines how torch's operators treat it, and kernels would read undefined memory.
    Classes that define ``__torch_dispatch__`` receive our operators.
    """
    kind: Any = type(mask)
    if not isinstance(mask, Tensor) or kind in PLAIN:
        return
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return
    if kind is CausalBias:
        raise TypeError(
            f"{name} is a CausalBias, which is taken by attention and scaled_dot_product_attention "
            f"alone: give a bool tensor, {name}._materialize(q.device)"
        )
    raise TypeError(
        f"{name} must be a torch.Tensor, got its subclass {kind.__module__}.{kind.__qualname__}, "
        f"whose memory need not be a mask: if it is one, give {name}.as_subclass(torch.Tensor)"
    )


def of_query(mask: Tensor, query: Tensor) -> tuple[str, Tensor]:
    """Return cupyattn's name for the mask of torch's function, and the mask in the type for the
    query.

    Under ``torch.autocast`` a 16-bit mask gets the type of the region.

    Raises
    ------
    TypeError
        For a type that no kernel reads.
    RuntimeError
        For a 16-bit type that differs from that of the query, as in torch.
    """
    if mask.dtype not in _DTYPES:
        advice = "attn_mask.float()" if mask.is_floating_point() else "attn_mask != 0"
        raise TypeError(
            "attn_mask must be bool (True: attend), or float16, bfloat16 or float32 (added to "
            f"scores), got attn_mask.dtype={mask.dtype}: give {advice}"
        )
    if mask.dtype == torch.bool:
        return "mask", mask
    if mask.dtype not in (torch.float32, query.dtype):
        kind = query.device.type
        if not torch.is_autocast_enabled(kind):
            raise RuntimeError(
                "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                f"attn_mask.dtype: {mask.dtype} and query.dtype: {query.dtype}: give "
                "attn_mask.to(query.dtype)"
            )
        mask = mask.to(torch.get_autocast_dtype(kind))
    return "bias", mask


def of_four_axes(mask: Tensor, leading: Sequence[int]) -> Tensor:
    """Return a mask that broadcasts to scores (..., heads, len_q, len_kv) as one to four axes.

    Parameters
    ----------
    mask : Tensor
    leading : sequence of int
        Axes of the scores before the heads. More than one are made one.
    """
    if len(leading) <= 1 or mask.dim() <= 3:
        return mask
    return mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
