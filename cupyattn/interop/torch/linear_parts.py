"""A layer of INT8 codes with what follows it, whole and in two parts: codes and the product.

`cupyattn.interop.torch.epilogues` puts these operators into the place of ``int8_linear``: layers
with the same input share its codes, others stay whole. They have no derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from cupyattn.plans.records import Stage, Work, Workspace
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE, strategy_of_weight
from cupyattn.runtime.ready import Ready
from cupyattn.runtime.recent import CALLS

#: Tensors of a layer and of a product, by the names of buffers.
_OF_LAYER = ("x", "b", "b_scales", "bias", "residual", "gate")
_OF_PRODUCT = ("a", "a_scales", *_OF_LAYER[1:])


def again(ready: Ready, addresses: Mapping[str, int], device: Any) -> None:
    """Launch what has run on tensors of the same forms; all memory is torch's own."""
    if torch.cuda.current_device() == device.index:
        launch(ready, addresses, device)
        return
    with torch.cuda.device(device):
        launch(ready, addresses, device)


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
    key = None
    if backend in (None, "cuda"):
        key, ready, addresses = find({"x": x}, ("codes", strategy))
        if ready is not None:
            codes, scales = _codes_of(x, strategy)
            made = {"codes": codes.data_ptr(), "scales": scales.data_ptr()}
            again(ready, {**addresses, **made}, x.device)
            return codes, scales
    with on_device_of(x):
        array = as_array(x)
        codes, scales = map(as_own_tensor, act_quant(array, strategy=strategy, backend=backend))
        if key is not None:
            work = Work((_quantising(array, strategy),))
            CALLS.remember(key, Ready(work, None))
    return codes, scales


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
    key = None
    if backend in (None, "cuda"):
        key, ready, addresses = find(tensors, (activation, arch))
        if ready is not None:
            again(ready, {**addresses, "c": y.data_ptr()}, y.device)
            return y
    with on_device_of(y):
        arrays = {name: as_array(x) for name, x in tensors.items()} | {"c": as_array(y)}
        if "x" in arrays:
            strategy = strategy_of_weight(arrays["b"].shape, arrays["b_scales"].shape)
            arrays["a"], arrays["a_scales"] = act_quant(
                arrays["x"], strategy=strategy, backend=backend
            )
        int8_gemm(
            arrays["a"], arrays["a_scales"], arrays["b"], arrays["b_scales"],
            arrays["c"].dtype.name, bias=arrays.get("bias"), activation=activation or None,
            residual=arrays.get("residual"), gate=arrays.get("gate"), arch=arch, backend=backend,
            out=arrays["c"],
        )  # fmt: skip
        if key is not None:
            CALLS.remember(key, _ready(arrays, activation, arch))
    return y


def _ready(arrays: Mapping[str, Any], activation: str, arch: str | None) -> Ready:
    """Return what is launched on arrays of these forms: of an x its codes, then the product."""
    arch, tiles = form_of(arrays["a"], arrays["b"], None, arch, "cuda")
    bias = "" if "bias" not in arrays else arrays["bias"].dtype.name
    operands = {name: _rows(x) for name, x in arrays.items() if name not in ("x", "bias")}
    before: tuple[Stage, ...] = ()
    between: tuple[Workspace, ...] = ()
    if "x" in arrays:  # codes and scales lie in scratch memory
        names = {"a": "int8", "a_scales": "float32"}
        operands |= {name: replace(operands[name], misalignment=0) for name in names}
        between = tuple(Workspace(n, operands[n].shape, dtype) for n, dtype in names.items())
        strategy = ProductOperands(**operands).strategy
        before = (_quantising(arrays["x"], strategy, {"codes": "a", "scales": "a_scales"}),)
    plan = plan_gemm(
        ProductOperands(**operands), arrays["c"].dtype.name, bias=bias, activation=activation,
        tiles=tiles, arch=arch,
    )  # fmt: skip
    return Ready(Work((*before, Stage(plan)), between), arch)


def _quantising(x: Any, strategy: str, names: Mapping[str, str] | None = None) -> Stage:
    """Return the launch that quantises an array, whose buffers have other names if given."""
    plan = (plan_row_quant if strategy == "channel" else plan_act_quant)(_rows(x), x.dtype.name)
    return Stage(plan, dict(names)) if names else Stage(plan)


def _rows(x: Any) -> Operand:
    return Operand.of(as_input(x.reshape(-1, x.shape[-1])))


def _layer(*arguments: Any) -> Tensor:
    named = zip(_OF_LAYER, arguments, strict=False)
    tensors = {name: x for name, x in named if x is not None}
    return multiply(tensors, _layer_result(*arguments), *arguments[len(_OF_LAYER) :])


def _layer_result(*arguments: Any) -> Tensor:
    """Return what a layer is made in; of fake tensors, its form."""
    x, weight = arguments[:2]
    columns = columns_of(weight.shape[0], arguments[len(_OF_LAYER)])
    made: Tensor = x.new_empty((*x.shape[:-1], columns))
    return made


def _product(*arguments: Any) -> Tensor:
    named = zip(_OF_PRODUCT, arguments, strict=False)
    tensors = {name: x for name, x in named if x is not None}
    return multiply(tensors, _product_result(*arguments), *arguments[len(_OF_PRODUCT) + 1 :])


def _product_result(*arguments: Any) -> Tensor:
    """Return what a product is made in; of fake tensors, its form."""
    codes, weight, dtype = arguments[0], arguments[2], arguments[len(_OF_PRODUCT)]
    columns = columns_of(weight.shape[0], arguments[len(_OF_PRODUCT) + 1])
    shape = (*codes.shape[:-1], columns)
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
