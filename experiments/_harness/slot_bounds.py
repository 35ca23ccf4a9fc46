"""Every linear layer of a model's call held against float64, adapters included.

A slot is a place of a model where a linear layer stands: the layer itself, or the adapter of PEFT
that wraps it. The reference has the slot's numbers from a twin of the model that has no INT8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import cupyattn as ca
from cupyattn.interop.torch.activation_nodes import FUNCTIONS
from cupyattn.interop.torch.bridge import as_array
from cupyattn.interop.torch.linear import Int8Linear, dequantised
from cupyattn.quant.activation import ACTIVATION_SLOPE

#: Largest number of roundings to one type if an adapter adds to a layer's result.
_ROUNDINGS = 8


@dataclass(frozen=True)
class Quantised:
    """Source and settings of an INT8 layer."""

    weight: torch.Tensor
    strategy: str


@dataclass(frozen=True)
class Call:
    """One call of a slot: what went in and came out, and the activation within the product."""

    x: torch.Tensor
    y: torch.Tensor
    activation: str


def slots(model: nn.Module) -> dict[str, nn.Module]:
    """Return the slots of a model by their names."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = name.rpartition(".")[0]
        if (isinstance(module, nn.Linear) or hasattr(module, "base_layer")) and not any(
            within == outer or within.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of a model's slots, by their names."""
    names = {module: name for name, module in slots(model).items()}
    calls: dict[str, list[Call]] = {}

    def record(module: nn.Module, given: Any, options: dict[str, Any], y: Any) -> None:
        if module in names:
            x = given[0] if given else options["x"]
            call = Call(x.detach().clone(), y.detach().clone(), options.get("activation") or "")
            calls.setdefault(names[module], []).append(call)

    hook = nn.modules.module.register_module_forward_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def base_of(slot: nn.Module) -> nn.Module:
    """Return the linear layer of a slot."""
    while hasattr(slot, "base_layer"):
        slot = slot.base_layer
    return slot


def worst(call: Call, twin: nn.Module, quantised: Quantised | None) -> float:
    """Return the largest error of a call's elements, as a fraction of its bound.

    Parameters
    ----------
    call : Call
    twin : Module
        The same slot of the twin, on the CPU.
    quantised : Quantised, optional
        What the slot's INT8 layer was made of; None where it is none.
    """
    base: Any = base_of(twin)
    x = call.x.double().reshape(-1, call.x.shape[-1])
    weight = base.weight.detach().double()
    bias = torch.zeros(len(weight)).double() if base.bias is None else base.bias.detach().double()
    product = x @ weight.T
    eps = torch.finfo(call.y.dtype).eps
    terms = x.shape[1] + 8
    size = x.abs() @ weight.abs().T
    if quantised is None:
        error = terms * 2.0**-24 * size
    else:
        error = _int8_error(call.x, quantised)
        error = error + x.abs() @ (quantised.weight.double() - weight).abs().T
    exact, size = product + bias, size + bias.abs()
    for scaling, a, b, factor in _adapters(twin, base):
        inner, inner_size = x @ a.T, x.abs() @ a.abs().T
        low = scaling * inner @ b.T
        low_size = abs(scaling) * (inner_size @ b.abs().T)
        low_error = (_ROUNDINGS * eps + 2 * terms * 2.0**-24) * low_size
        if factor is None:
            exact, size, error = exact + low, size + low_size, error + low_error
            continue
        # DoRA: factor times all but the bias. It is made of the weight that the codes stand for.
        so_far = exact - bias
        if quantised is not None:
            own = weight - quantised.weight.double() + _dequantised(quantised)
            others = factor * (weight + scaling * b @ a).norm(dim=1)
            own_factor = others / (own + scaling * b @ a).norm(dim=1)
            error = error + (own_factor - factor).abs() * (so_far.abs() + low_size)
        exact = exact + (factor - 1) * so_far + factor * low
        size = size + (1 + factor.abs()) * (size + low_size)
        error = (2 + factor.abs()) * error + factor.abs() * low_error
    error = error + _ROUNDINGS * eps * size
    if call.activation:
        exact = FUNCTIONS[call.activation](exact)
        error = ACTIVATION_SLOPE[call.activation] * error + _ROUNDINGS * eps * exact.abs()
    off = (call.y.double().reshape(exact.shape) - exact).abs()
    return float((off / (error + 1e-30)).max())


def _int8_error(x: torch.Tensor, quantised: Quantised) -> torch.Tensor:
    weight = as_array(quantised.weight.contiguous())
    layer = ca.Int8Linear.from_weight(weight, strategy=quantised.strategy)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.from_numpy(np.asarray(layer.error(as_array(rows), weight), np.float64))


def _dequantised(quantised: Quantised) -> torch.Tensor:
    layer = Int8Linear.from_weight(quantised.weight, strategy=quantised.strategy)
    return dequantised(layer.weight_codes, layer.weight_scale, torch.float64)


def _adapters(slot: Any, base: Any) -> Iterator[tuple[float, Any, Any, Any]]:
    """Yield scaling, matrices and, of DoRA, the factors of the adapters that a slot applies."""
    if slot is base or slot.disable_adapters or slot.merged:
        return
    for name in slot.active_adapters:
        if name not in slot.lora_A:
            continue
        a, b = (m[name].weight.detach().double() for m in (slot.lora_A, slot.lora_B))
        scaling, factor = slot.scaling[name], None
        if name in slot.lora_magnitude_vector:
            magnitude = slot.lora_magnitude_vector[name].weight.detach().double()
            whole = base.weight.detach().double() + scaling * b @ a
            factor = magnitude / whole.norm(dim=1)
        yield scaling, a, b, factor
