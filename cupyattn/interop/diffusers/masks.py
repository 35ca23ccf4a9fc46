"""Convert the mask of torch's attention for the kernels: to a mask of keys, or a bias of scores.

This module reads no values, so no call waits for a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch.ops import PLAIN

#: Types of a bias; the kernels support each with operands of any type.
_BIASES = (torch.float16, torch.bfloat16, torch.float32)
#: Bytes of one access when Hopper forms copy a bias.
_VECTOR = 16


def obstacle(mask: Any, q: Tensor, k: Tensor) -> str | None:
    """Return why the kernels do not take a mask, or None if they do; torch may trace this.

    Parameters
    ----------
    mask : object
        ``attn_mask`` of torch's function.
    q, k : Tensor, (batch, heads, len, head_dim)
    """
    if mask is None:
        return None
    kind = obstacle_of_kind(mask, q)
    if kind is not None:
        return kind
    scores = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = all(n in (1, most) for n, most in zip(mask.shape[::-1], scores[::-1], strict=False))
    if mask.ndim > len(scores) or not fits:
        return "attention mask that does not broadcast to (batch, heads, len_q, len_kv)"
    return None


def obstacle_of_kind(mask: Any, q: Tensor) -> str | None:
    """Return why the kernels take no mask of this class, type and device, or None if they do."""
    if not isinstance(mask, Tensor) or type(mask) not in PLAIN:  # CausalBias is a class of tensors
        return f"attention mask of type {type(mask).__name__}"
    if mask.dtype != torch.bool and mask.dtype not in _BIASES:
        return f"attention mask of dtype {str(mask.dtype).removeprefix('torch.')}"
    if mask.device != q.device:
        return f"attention mask on device {mask.device.type}"
    return None


def of_scores(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return mask and bias for `cupyattn.attention`; at least one of them is None.

    Parameters
    ----------
    mask : Tensor, optional
        bool (True: attend), or numbers that are added to the scores; accepted by `obstacle`.
    """
    if mask is None:
        return None, None
    mask = _not_expanded(mask)
    return (mask, None) if mask.dtype == torch.bool else (None, _in_vectors(mask))


def _not_expanded(mask: Tensor) -> Tensor:
    """Return a mask with length 1 along expanded axes, so that no graph materialises them."""
    for axis, (n, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and n != 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _in_vectors(bias: Tensor) -> Tensor:
    """Return a 16-bit bias whose rows of keys begin at multiples of 16 bytes, copied if needed.

    Hopper forms require such rows. Portable forms support others, but take two to three times as
    long. A copy reads and writes the bias once.
    """
    if bias.dtype == torch.float32 or bias.ndim == 0 or bias.shape[-1] == 1:
        return bias
    step = _VECTOR // bias.element_size()
    starts = [s for n, s in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if n != 1]
    if not torch.compiler.is_compiling():  # torch traces no offset; what models make has none
        starts.append(bias.storage_offset())
    if bias.stride(-1) == 1 and all(s % step == 0 for s in starts):
        return bias
    keys = bias.shape[-1]
    room = bias.new_zeros((*bias.shape[:-1], keys + -keys % step))
    room[..., :keys] = bias
    return room[..., :keys]
