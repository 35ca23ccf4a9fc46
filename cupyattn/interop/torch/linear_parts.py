"""A layer of INT8 codes with what follows it, whole and in two parts: codes and the product.

`cupyattn.interop.torch.epilogues` puts these operators into the place of ``int8_linear``: layers
with the same input share its codes, others stay whole. They have no derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.interop.torch.bridge import as_array, as_own_tensor, forms_of, on_device_of
from cupyattn.interop.torch.calls import launch
from cupyattn.interop.torch.ops import define
from cupyattn.ops.act_quant import ACT_QUANT, ActQuantSettings
from cupyattn.ops.gemm import GEMM, LAYER, GemmSettings
from cupyattn.ops.operation import run_new
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.runtime.recent import CALLS

#: Tensors of a layer and of a product, by the names of buffers.
_OF_LAYER = ("x", "b", "b_scales", "bias", "residual", "gate")
_OF_PRODUCT = ("a", "a_scales", *_OF_LAYER[1:])


def find(
    tensors: Mapping[str, Tensor], options: tuple[Any, ...]
) -> tuple[Any, Any, dict[str, int]]:
    """Return the key of a layer's call on a device, what is kept of it, and where tensors lie.

    The key is None where the call is not kept.
    """
    forms, addresses = forms_of(tensors)
    key, ready = CALLS.find(("torch, linear", *options), forms)
    # NOTE: the forms tell a call that is kept from all that are not; only a new one is looked at.
    if ready is None and not all(map(_can_be_kept, tensors.values())):
        key = None
    return key, ready, addresses


def _can_be_kept(x: Tensor) -> bool:
    """Whether a call may read a tensor by its address: one on a device that is not copied."""
    rows = len(x.shape) == 2 and x.stride()[1] == 1  # at any distance
    lies_so: bool = x.is_cuda and (rows or x.is_contiguous())
    return bool(lies_so and x.numel() and x.data_ptr() % x.element_size() == 0)


def _codes_of(x: Tensor, strategy: str, *_: Any) -> tuple[Tensor, Tensor]:
    """Return what codes and scales are made in; of fake tensors, their form."""
    blocks = 1 if strategy == "channel" else (x.shape[-1] + BLOCK_SIZE - 1) // BLOCK_SIZE
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32),
    )


def _quantise(x: Tensor, strategy: str, backend: str | None) -> tuple[Tensor, Tensor]:
    key: Any = None
    addresses: dict[str, int] = {}
    if backend in (None, "cuda"):
        key, ready, addresses = find({"x": x}, ("codes", strategy))
        if ready is not None:
            codes, scales = _codes_of(x, strategy)
            made = {"codes": codes.data_ptr(), "scales": scales.data_ptr()}
            launch(ready, {**addresses, **made}, x.device)
            return codes, scales
    with on_device_of(x):
        settings = ActQuantSettings(BLOCK_SIZE, backend, strategy=strategy)
        codes, scales = run_new(ACT_QUANT, settings, {"x": as_array(x)}, key, addresses)
        return as_own_tensor(codes), as_own_tensor(scales)


def multiply(
    tensors: Mapping[str, Tensor],
    y: Tensor,
    activation: str,
    arch: str | None,
    backend: str | None,
) -> Tensor:
    """Run a layer, or the product of codes that are made already.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        "x", or "a" and "a_scales"; "b" and "b_scales"; "bias", "residual" and "gate" where there
        are such.
    y : Tensor
        Receives the result.
    activation, arch, backend
        As for `Int8Linear`.

    Returns
    -------
    Tensor
        `y`.
    """
    if "gate" in tensors:
        gate = tensors["gate"]
        tensors = {**tensors, "gate": gate.reshape(-1, gate.shape[-1])}
    key: Any = None
    addresses: dict[str, int] = {}
    if backend in (None, "cuda"):
        key, ready, addresses = find(tensors, (activation, arch, y.dtype))
        if ready is not None:
            launch(ready, {**addresses, "c": y.data_ptr()}, y.device)
            return y
    with on_device_of(y):
        arrays = {name: as_array(x) for name, x in tensors.items()} | {"c": as_array(y)}
        settings = GemmSettings(arrays["c"].dtype.name, activation, None, arch, backend)
        run_new(LAYER if "x" in arrays else GEMM, settings, arrays, key, addresses)
    return y


def _layer(*arguments: Any) -> Tensor:
    named = zip(_OF_LAYER, arguments, strict=False)
    tensors = {name: x for name, x in named if x is not None}
    return multiply(tensors, _layer_result(*arguments), *arguments[len(_OF_LAYER) :])


def _layer_result(*arguments: Any) -> Tensor:
    """Return what a layer is made in; of fake tensors, its form."""
    x, weight = arguments[:2]
    made: Tensor = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return made


def _product(*arguments: Any) -> Tensor:
    named = zip(_OF_PRODUCT, arguments, strict=False)
    tensors = {name: x for name, x in named if x is not None}
    return multiply(tensors, _product_result(*arguments), *arguments[len(_OF_PRODUCT) + 1 :])


def _product_result(*arguments: Any) -> Tensor:
    """Return what a product is made in; of fake tensors, its form."""
    codes, weight, dtype = arguments[0], arguments[2], arguments[len(_OF_PRODUCT)]
    shape = (*codes.shape[:-1], weight.shape[0])
    made: Tensor = codes.new_empty(shape, dtype=getattr(torch, dtype))
    return made


_BESIDE = "Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, Tensor? gate"
_HOW = "str activation, str? arch, str? backend"
layer = define("int8_layer", f"Tensor x, {_BESIDE}, {_HOW}", "Tensor", _layer, _layer_result)
act_quantise = define(
    "int8_act_quant", "Tensor x, str strategy, str? backend", "(Tensor codes, Tensor scales)",
    _quantise, _codes_of,
)  # fmt: skip
product = define(
    "int8_product", f"Tensor codes, Tensor scales, {_BESIDE}, str dtype, {_HOW}", "Tensor",
    _product, _product_result,
)  # fmt: skip
