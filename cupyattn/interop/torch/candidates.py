"""Find the linear layers of a model that may become INT8, and replace them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cupyattn.checkpoints.header import FLOATS
from cupyattn.interop.handle import COMPILED
from cupyattn.interop.torch.adapters import inner_of, obstacle_of
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import has_hooks, has_own_forward

#: A replaced layer: its parent, its name there, the layer, and its replacement.
LinearPlace = tuple[nn.Module, str, nn.Linear, Int8Linear]


#: Types of weights that are quantised.
_FLOATS = tuple(getattr(torch, name) for name in FLOATS.values())


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yield every linear layer of a model that is not INT8, once, by its first name.

    Names are as in the model without compilers and adapters. Matrices of adapters are not layers of
    the model. Each layer comes with the reason why adapters keep it in 16 bits, or "".
    """
    for name, layer, obstacle in _layers("", model, "", set()):
        if not isinstance(layer, Int8Linear):
            yield name, layer, obstacle


def int8_layers(model: nn.Module) -> Iterator[tuple[str, Int8Linear]]:
    """Yield the INT8 layers of a model, with names in the form of `linear_layers`."""
    for name, layer, _ in _layers("", model, "", set()):
        if isinstance(layer, Int8Linear):
            yield name, layer


def _layers(
    name: str, module: nn.Module, obstacle: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Linear, str]]:
    if module in seen:
        return
    seen.add(module)
    inner = inner_of(module)
    if isinstance(module, nn.Linear) and name and not inner:  # some adapters are linear layers, too
        yield name, module, obstacle
    obstacle = obstacle or obstacle_of(module)
    for part in inner or module._modules:
        child = module._modules[part]
        if child is not None:
            own = () if part in (*inner, COMPILED.removesuffix(".")) else (part,)
            yield from _layers(".".join([*[name] * bool(name), *own]), child, obstacle, seen)


def reason_unfit(linear: Any, kinds: tuple[type[nn.Module], ...] = (nn.Linear,)) -> str:
    """Say why a layer cannot be replaced, regardless of its numbers; empty if it can.

    Parameters
    ----------
    linear : Module
    kinds : tuple of type
        The accepted classes, without their subclasses.
    """
    if nn.utils.parametrize.is_parametrized(linear):
        return "is parametrised, so that its weight is made in each call"
    if nn.parameter.is_lazy(linear.weight):
        return f"a {type(linear).__name__}, whose weight is made in its first call"
    if type(linear) not in kinds:
        return f"a {type(linear).__name__}"
    if has_hooks(linear):
        return "has hooks"
    if has_own_forward(linear):  # as libraries put it there that move weights in each call
        return "has its own forward"
    for name, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is not None and type(tensor) is not nn.Parameter:
            return f"its {name} is a {type(tensor).__name__}"
    weight = linear.weight
    if weight.layout is not torch.strided:
        return f"its weight is sparse, {weight.layout}"
    if weight.dtype not in _FLOATS:
        return f"its weight is {weight.dtype}, no 16- or 32-bit float"
    return "holds no numbers, on the meta device" if weight.is_meta else ""


def put(model: nn.Module, made: dict[int, Int8Linear]) -> list[LinearPlace]:
    """Replace the layers with these identities; return places, old and new layers."""
    places = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in made:
                places.append((parent, name, child, made[id(child)]))
    for parent, name, child, layer in places:
        parent._modules[name] = layer.train(child.training)
    return places
