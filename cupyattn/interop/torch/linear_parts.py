"""A layer of INT8 codes with what follows it, and several layers of one input in one call.

`cupyattn.interop.torch.epilogues` puts these operators into the place of ``int8_linear``: a call
costs the host more than the launches that it makes. They have no derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.memory import as_input
from cupyattn.arrays.operand import Operand
from cupyattn.interop.torch.bridge import as_array, forms_of, on_device_of
from cupyattn.interop.torch.calls import launch
from cupyattn.interop.torch.ops import define
from cupyattn.ops.act_quant import act_quant
from cupyattn.ops.gemm import form_of, int8_gemm
from cupyattn.plans.act_quant import plan_act_quant
from cupyattn.plans.gemm import ProductOperands, plan_gemm
from cupyattn.plans.records import Stage, Work, Workspace
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.quant.blocks import strategy_of_weight
from cupyattn.runtime.ready import Ready
from cupyattn.runtime.recent import CALLS

#: Operands of a product beside codes and scales of x, by the names of the plan's buffers.
_OPERANDS = ("b", "b_scales", "bias", "residual", "gate")


def multiply(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    activations: tuple[str, ...],
    arch: str | None,
    backend: str | None,
) -> list[Tensor]:
    """Quantise an input, and run the layers that read it.

    Parameters
    ----------
    x : Tensor, (..., in)
    layers : sequence
        For each layer its weight, the weight's scales, bias, residual and gate; None, or left out
        at the end, where there is no such tensor.
    activations : tuple of str
        Of each layer; "" for none.
    arch, backend : str, optional
        As for `Int8Linear`.

    Returns
    -------
    list of Tensor
        The result of each layer: memory of torch's own, which its CUDA graphs take back.
    """
    results = results_of(x, layers)
    tensors: dict[Any, Tensor] = {"x": x}
    for number, layer in enumerate(layers):
        for name, tensor in zip(_names(number), layer, strict=False):
            if tensor is not None:
                tensors[name] = tensor
    key = None
    if backend in (None, "cuda"):
        forms, addresses = forms_of(tensors)
        key, ready = CALLS.find(("torch, linear", activations, arch), forms)
        if ready is not None:
            for number, y in enumerate(results):
                addresses[f"c{number}"] = y.data_ptr()
            again(ready, addresses, x.device)
            return results
    return _first(key, tensors, results, activations, arch, backend)


def again(ready: Ready, addresses: Mapping[str, int], device: Any) -> None:
    """Launch what has run on tensors of the same forms; all memory is torch's own."""
    if torch.cuda.current_device() == device.index:
        launch(ready, addresses, device)
        return
    with torch.cuda.device(device):
        launch(ready, addresses, device)


@functools.cache
def _names(number: int) -> tuple[str, ...]:
    """Return what a call calls the operands of its layer of a number."""
    return tuple(f"{name}{number}" for name in _OPERANDS)


def results_of(x: Tensor, layers: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
    """Return what layers are made in; of fake tensors, their forms."""
    rows = x.shape[:-1]
    return [x.new_empty((*rows, layer[0].shape[0])) for layer in layers if layer[0] is not None]


def _first(
    key: Any,
    tensors: dict[Any, Tensor],
    results: list[Tensor],
    activations: tuple[str, ...],
    arch: str | None,
    backend: str | None,
) -> list[Tensor]:
    """Run a call that is not kept, and keep it under its key if it can be kept."""
    given = list(tensors.values())
    tensors = {n: _group_rows(x) if n.startswith("gate") else x for n, x in tensors.items()}
    kept = [x.data_ptr() for x in given] == [x.data_ptr() for x in tensors.values()]
    if not kept or not all(map(_can_be_kept, tensors.values())):
        key = None
    with on_device_of(tensors["x"]):
        arrays = {name: as_array(x) for name, x in tensors.items()}
        strategy = strategy_of_weight(arrays["b0"].shape, arrays["b_scales0"].shape)
        codes, scales = act_quant(arrays["x"], strategy=strategy, backend=backend)
        products = []
        for number, (y, activation) in enumerate(zip(results, activations, strict=True)):
            own = zip(_OPERANDS, _names(number), strict=True)
            operands = {name: arrays[outer] for name, outer in own if outer in arrays}
            operands |= {"a": codes, "a_scales": scales, "c": as_array(y)}
            products.append(operands)
            int8_gemm(
                codes, scales, operands["b"], operands["b_scales"], operands["c"].dtype.name,
                bias=operands.get("bias"), activation=activation or None,
                residual=operands.get("residual"), gate=operands.get("gate"), arch=arch,
                backend=backend, out=operands["c"],
            )  # fmt: skip
        if key is not None:
            CALLS.remember(key, _ready(arrays["x"], strategy, products, activations, arch))
    return results


def _group_rows(gate: Tensor) -> Tensor:
    return gate.reshape(-1, gate.shape[-1])


def _can_be_kept(x: Tensor) -> bool:
    """Whether a call may read a tensor by its address: one on a device that is not copied."""
    rows = len(x.shape) == 2 and x.stride()[1] == 1  # at any distance
    lies_so: bool = x.is_cuda and (rows or x.is_contiguous())
    return bool(lies_so and x.numel() and x.data_ptr() % x.element_size() == 0)


def _ready(
    x: Any,
    strategy: str,
    products: Sequence[Mapping[str, Any]],
    activations: Sequence[str],
    arch: str | None,
) -> Ready:
    """Return what is launched on arrays of these forms: codes of x in scratch memory, products."""
    made = {"a": "int8", "a_scales": "float32"}
    between: tuple[Workspace, ...] = ()
    stages, compiled_for = [], arch
    for number, (arrays, activation) in enumerate(zip(products, activations, strict=True)):
        own_arch, tiles = form_of(arrays["a"], arrays["b"], None, arch, "cuda")
        bias = "" if "bias" not in arrays else arrays["bias"].dtype.name
        operands = {name: _rows(array) for name, array in arrays.items() if name != "bias"}
        operands |= {name: replace(operands[name], misalignment=0) for name in made}
        between = tuple(Workspace(n, operands[n].shape, dtype) for n, dtype in made.items())
        plan = plan_gemm(
            ProductOperands(**operands), arrays["c"].dtype.name, bias=bias, activation=activation,
            tiles=tiles, arch=own_arch,
        )  # fmt: skip
        compiled_for = compiled_for or own_arch  # of few rows, some layers alone have Hopper's form
        names = dict(zip(_OPERANDS, _names(number), strict=True))
        stages.append(Stage(plan, {**names, "c": f"c{number}"}))
    quantise = (plan_row_quant if strategy == "channel" else plan_act_quant)(_rows(x), x.dtype.name)
    first = Stage(quantise, {"codes": "a", "scales": "a_scales"})
    return Ready(Work((first, *stages), between), compiled_for)


def _rows(x: Any) -> Operand:
    return Operand.of(as_input(x.reshape(-1, x.shape[-1])))


def _layer(x: Tensor, *arguments: Any) -> Tensor:
    *operands, activation, arch, backend = arguments
    (y,) = multiply(x, (operands,), (activation,), arch, backend)
    return y


def _layer_fake(x: Tensor, *arguments: Any) -> Tensor:
    (y,) = results_of(x, (arguments[:1],))
    return y


def _layers(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[str],
    arch: str | None,
    backend: str | None,
) -> list[Tensor]:
    operands = [*zip(weights, scales, biases, strict=True)]
    return multiply(x, operands, tuple(activations), arch, backend)


def _layers_fake(x: Tensor, weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return results_of(x, [(weight,) for weight in weights])


layer = define(
    "int8_layer",
    "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, Tensor? gate, "
    "str activation, str? arch, str? backend",
    "Tensor", _layer, _layer_fake,
)  # fmt: skip
layers = define(
    "int8_layers",
    "Tensor x, Tensor[] weights, Tensor[] weight_scales, Tensor?[] biases, str[] activations, "
    "str? arch, str? backend",
    "Tensor[]", _layers, _layers_fake,
)  # fmt: skip
