"""A layer of INT8 codes as two operators of a graph: its input's codes, and the product.

`cupyattn.interop.torch.epilogues` puts them into the place of ``int8_linear``: layers with the same
input share its codes, and what follows a layer goes into its product. They have no derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.memory import as_input
from cupyattn.arrays.operand import Operand
from cupyattn.interop.torch.bridge import as_array, as_own_tensor, forms_of, on_device_of
from cupyattn.interop.torch.calls import launch
from cupyattn.interop.torch.ops import define
from cupyattn.ops.act_quant import act_quant
from cupyattn.ops.gemm import form_of, int8_gemm
from cupyattn.plans.act_quant import plan_act_quant
from cupyattn.plans.gemm import ProductOperands, plan_gemm
from cupyattn.plans.records import Stage, Work
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.runtime.ready import Ready
from cupyattn.runtime.recent import CALLS

#: Tensors of a product, by the names of its buffers; those from the fifth on may be None.
_OPERANDS = ("a", "a_scales", "b", "b_scales", "bias", "residual", "gate")


def again(ready: Ready, addresses: Mapping[str, int], device: Any) -> None:
    """Launch what has run on tensors of the same forms; all memory is torch's own."""
    if torch.cuda.current_device() == device.index:
        launch(ready, addresses, device)
        return
    with torch.cuda.device(device):
        launch(ready, addresses, device)


def find(
    tensors: Mapping[str, Tensor], options: tuple[Any, ...], what: str = "torch, linear"
) -> tuple[Any, Any, dict[str, int]]:
    """Return the key of a layer's call on a device, what is kept of it, and where tensors lie.

    The key is None where the call is not kept.
    """
    forms, addresses = forms_of(tensors)
    key, ready = CALLS.find((what, *options), forms)
    # NOTE: the forms tell a call that is kept from all that are not; only a new one is looked at.
    if ready is None and not all(map(_can_be_kept, tensors.values())):
        key = None
    return key, ready, addresses


def _can_be_kept(x: Tensor) -> bool:
    """Whether a call may read a tensor by its address: one on a device that is not copied."""
    rows = len(x.shape) == 2 and x.stride()[1] == 1  # at any distance
    lies_so = x.is_cuda and (rows or x.is_contiguous())
    return lies_so and x.numel() > 0 and x.data_ptr() % x.element_size() == 0


def _codes_of(x: Tensor, strategy: str, *_: Any) -> tuple[Tensor, Tensor]:
    """Return what codes and scales are made in; of fake tensors, their form."""
    blocks = 1 if strategy == "channel" else (x.shape[-1] + BLOCK_SIZE - 1) // BLOCK_SIZE
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32),
    )


def _quantise(x: Tensor, strategy: str, backend: str | None) -> tuple[Tensor, Tensor]:
    key = None
    if backend in (None, "cuda"):
        key, ready, addresses = find({"x": x}, (strategy,), "torch, codes")
        if ready is not None:
            codes, scales = _codes_of(x, strategy)
            made = {"codes": codes.data_ptr(), "scales": scales.data_ptr()}
            again(ready, {**addresses, **made}, x.device)
            return codes, scales
    with on_device_of(x):
        array = as_array(x)
        codes, scales = map(as_own_tensor, act_quant(array, strategy=strategy, backend=backend))
        if key is not None:
            plan = plan_row_quant if strategy == "channel" else plan_act_quant
            rows = Operand.of(as_input(array.reshape(-1, array.shape[-1])))
            CALLS.remember(key, Ready(Work((Stage(plan(rows, array.dtype.name)),)), None))
    return codes, scales


def _result(*arguments: Any) -> Tensor:
    """Return what a product is made in; of fake tensors, its form."""
    codes, weight, dtype = arguments[0], arguments[2], arguments[len(_OPERANDS)]
    made: Tensor = codes.new_empty(
        (*codes.shape[:-1], weight.shape[0]), dtype=getattr(torch, dtype)
    )
    return made


def _multiply(*arguments: Any) -> Tensor:
    dtype, activation, arch, backend = arguments[len(_OPERANDS) :]
    named = zip(_OPERANDS, arguments, strict=False)
    tensors = {name: x for name, x in named if x is not None}
    if "gate" in tensors:
        tensors["gate"] = tensors["gate"].reshape(-1, tensors["gate"].shape[-1])
    y, key = _result(*arguments), None
    if backend in (None, "cuda"):
        key, ready, addresses = find(tensors, (activation, arch), "torch, product")
        if ready is not None:
            again(ready, {**addresses, "c": y.data_ptr()}, y.device)
            return y
    with on_device_of(y):
        arrays = {name: as_array(x) for name, x in tensors.items()}
        own = as_array(y)
        int8_gemm(
            arrays["a"], arrays["a_scales"], arrays["b"], arrays["b_scales"], dtype,
            bias=arrays.get("bias"), activation=activation or None,
            residual=arrays.get("residual"), gate=arrays.get("gate"), arch=arch, backend=backend,
            out=own,
        )  # fmt: skip
        if key is not None:
            CALLS.remember(key, _ready({**arrays, "c": own}, activation, arch))
    return y


def _ready(arrays: Mapping[str, Any], activation: str, arch: str | None) -> Ready:
    """Return what a product launches on arrays of these forms."""
    codes, weight, bias = arrays["a"], arrays["b"], arrays.get("bias")
    arch, tiles = form_of(codes, weight, None, arch, "cuda")
    at = {
        name: Operand.of(as_input(x.reshape(-1, x.shape[-1])))
        for name, x in arrays.items()
        if name != "bias"
    }
    plan = plan_gemm(
        ProductOperands(**at), arrays["c"].dtype.name, bias="" if bias is None else bias.dtype.name,
        activation=activation, tiles=tiles, arch=arch,
    )  # fmt: skip
    return Ready(Work((Stage(plan),)), arch)


act_quantise = define(
    "int8_act_quant", "Tensor x, str strategy, str? backend", "(Tensor codes, Tensor scales)",
    _quantise, _codes_of,
)  # fmt: skip
product = define(
    "int8_product",
    "Tensor codes, Tensor scales, Tensor weight, Tensor weight_scale, Tensor? bias, "
    "Tensor? residual, Tensor? gate, str dtype, str activation, str? arch, str? backend",
    "Tensor", _multiply, _result,
)  # fmt: skip
