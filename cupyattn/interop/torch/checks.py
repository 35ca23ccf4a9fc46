"""Checks of the tensors of a call together; errors have torch's types and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch import transforms
from cupyattn.problem.row_preparation import (
    BUFFERS_OF,
    is_of_token,
    refuse_gradient_of_token,
)
from cupyattn.problem.sequences import LENGTHS
from cupyattn.quant.quantized import QuantizedQKV

#: Operands whose rows kernels read in vectors.
_ROWS = ("q", "k", "v")


def check_tensors(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless a call on these tensors can run.

    Parameters
    ----------
    name : str
        Name of the function, for messages.
    tensors : mapping of str to Tensor
        All tensors that the call reads.

    Raises
    ------
    TypeError
        For an object that is not a tensor.
    RuntimeError
        For tensors on different devices, q, k and v of different types, or a last axis that is not
        contiguous.
    NotImplementedError
        For tensors that are not strided.
    """
    for argument, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name}(): argument '{argument}' must be Tensor, not {type(x).__name__}"
            )
        check_strided(name, argument, x)
    devices = {argument: x.device for argument, x in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{argument} is on {device}" for argument, device in devices.items())
        raise RuntimeError(f"Expected all tensors to be on the same device, but {where}")
    rows = {argument: tensors[argument] for argument in _ROWS}
    if len({x.dtype for x in rows.values()}) > 1:
        found = " and ".join(f"{argument}.dtype: {x.dtype}" for argument, x in rows.items())
        raise RuntimeError(f"Expected q, k and v to have the same dtype, but got {found}")
    if transforms.active():  # strides of wrapped tensors: vmap copies tensors if necessary
        return
    for argument, x in rows.items():
        if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise RuntimeError(
                f"Expected {argument} to have a contiguous last dimension, but got "
                f"{argument}.stride()={tuple(x.stride())}: give {argument}.contiguous()"
            )


def check_strided(name: str, argument: str, x: Tensor) -> None:
    """Raise NotImplementedError for a tensor that is sparse or nested."""
    if x.is_nested:
        raise NotImplementedError(
            f"{name}: expected {argument} to be a strided tensor, got a nested one: give its rows "
            "behind one another and where each sequence ends to attention_varlen, or pad them"
        )
    if x.layout != torch.strided:
        raise NotImplementedError(
            f"{name}: expected {argument} to be a strided tensor, got layout {x.layout}"
        )


def check_device(name: str, q: Any) -> None:
    """Raise NotImplementedError for a tensor on an unsupported device, TypeError for no tensor."""
    if not isinstance(q, Tensor):
        codes = ": cupyattn.attention takes it" if isinstance(q, QuantizedQKV) else ""
        raise TypeError(f"{name}(): argument 'q' must be Tensor, not {type(q).__name__}{codes}")
    if not (q.is_cuda or q.is_cpu):
        raise NotImplementedError(
            f"Could not run 'cupyattn::{name}' with arguments from the '{q.device.type}' backend: "
            "it takes CUDA tensors, and CPU tensors with backend='mirror' or 'interpret'"
            + ("; a meta tensor holds no numbers" if q.is_meta else "")
        )


def check_differentiable(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedError if a tensor requires a gradient for which there is no kernel."""
    for argument, x in tensors.items():
        if argument in BUFFERS_OF["qk_norm"] and is_of_token(x, tensors["q"].shape[-1]):
            refuse_gradient_of_token()
        if argument in (*_ROWS, "bias", *BUFFERS_OF["qk_norm"]):
            continue
        if x.requires_grad:
            raise UnsupportedError(
                f"the derivative for '{argument}' is not implemented: give {argument}.detach(), or "
                "compute under torch.no_grad()"
            )
        if argument in LENGTHS:
            raise UnsupportedError(
                f"{name}: the derivative beside {argument} is not implemented: give mask=, or pack "
                "the entries for attention_varlen, or compute under torch.no_grad()"
            )
    if tensors["q"].dtype == torch.float32:
        raise UnsupportedError(
            f"the derivative for 'cupyattn::{name}' is not implemented for torch.float32: "
            "give torch.float16 or torch.bfloat16, by torch.autocast for example, or compute under "
            "torch.no_grad()"
        )
