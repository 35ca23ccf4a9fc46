"""Which linear layers of a model may become INT8, and how others take their places."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from cupyattn.interop.handle import COMPILED
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import has_own_forward

#: A layer that was replaced: its parent, its name there, the layer, and what took its place.
LinearPlace = tuple[nn.Module, str, nn.Linear, Int8Linear]


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every linear layer that is not INT8, once, by its first name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(module, Int8Linear) and name:
            yield name.replace(COMPILED, ""), module


def unfit(linear: nn.Linear) -> str:
    """Say why a layer cannot be replaced, whatever its weight is; empty where it can."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__}"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks:
        return "has hooks"
    if has_own_forward(linear):  # as libraries put it there that move weights in each call
        return "has a forward of its own"
    if nn.utils.parametrize.is_parametrized(linear):
        return "is parametrised"
    return "holds no numbers, on the meta device" if linear.weight.is_meta else ""


def put(model: nn.Module, made: dict[int, Int8Linear]) -> list[LinearPlace]:
    """Put layers in the places of those of these identities; return places, old and new layers."""
    places = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in made:
                places.append((parent, name, child, made[id(child)]))
    for parent, name, child, layer in places:
        parent._modules[name] = layer.train(child.training)
    return places
