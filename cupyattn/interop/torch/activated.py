"""Fuse an activation module of diffusers and its linear layer into one product of INT8 codes.

``GELU``, ``GEGLU`` and ``SwiGLU`` of diffusers contain a linear layer, ``proj``, and call torch's
functions on its result. Without a compiler, only this module moves these into the product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cupyattn.interop.torch.activation_nodes import FUNCTIONS
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import has_hooks, has_own_forward
from cupyattn.quant.activation import GATE_LAST, GLU

#: A replaced module: its parent, its name there, the module, and its replacement.
Place = tuple[nn.Module, str, nn.Module, "ActivatedInt8Linear"]


class ActivatedInt8Linear(nn.Module):
    """An INT8 layer and its activation in one product; it replaces a module of diffusers.

    Parameters
    ----------
    proj : Int8Linear
        Without an activation. It keeps its name in the model, and the order of its rows.
    activation : str
        As for `Int8Linear`.

    Notes
    -----
    torch computes the activation if a gradient is required, if hooks read the layer's result, or if
    another object, such as an adapter, has replaced the layer.
    """

    def __init__(self, proj: Int8Linear, activation: str) -> None:
        super().__init__()
        self.proj: nn.Module = proj
        self.activation = activation

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the layer and its activation.

        Parameters
        ----------
        hidden_states : Tensor, (..., in)

        Returns
        -------
        Tensor, (..., out), or (..., out / 2) where the activation is gated
        """
        proj = self.proj
        if type(proj) is Int8Linear and not proj._forward_hooks:
            trained = hidden_states.requires_grad or (
                proj.bias is not None and proj.bias.requires_grad
            )
            if not (trained and torch.is_grad_enabled()):
                fused: Tensor = proj(hidden_states, activation=self.activation)
                return fused
        return _activated(proj(hidden_states), self.activation)

    def extra_repr(self) -> str:
        """Return the activation's name for ``repr``."""
        return f"activation={self.activation!r}"


def activated_layers(model: nn.Module) -> list[Place]:
    """Return the modules of diffusers whose layer is INT8, each with its `ActivatedInt8Linear`.

    Parameters
    ----------
    model : Module
        Not modified, until `place_activated_layers` of the result.

    Returns
    -------
    list of Place
    """
    made: dict[int, ActivatedInt8Linear] = {}
    places = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is None or not (activation := _activation_of(child)):
                continue
            proj = child.proj
            if type(proj) is not Int8Linear or proj.activation is not None:
                continue
            unit = made.setdefault(id(child), ActivatedInt8Linear(proj, activation))
            places.append((parent, name, child, unit.train(child.training)))
    return places


def place_activated_layers(places: list[Place]) -> None:
    """Replace each module by its `ActivatedInt8Linear`."""
    for parent, name, _, unit in places:
        parent._modules[name] = unit


def _activation_of(module: nn.Module) -> str:
    """Return the activation of a module of diffusers; "" for other modules, or with hooks."""
    # NOTE: libraries that move weights in each call replace the function of an instance.
    if has_hooks(module) or has_own_forward(module):
        return ""
    kind = type(module)
    if kind.__module__ != "diffusers.models.activations":
        return ""
    if kind.__name__ == "GELU":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(module.approximate), "")
    if kind.__name__ == "SwiGLU":
        return "swiglu_gate_last" if type(module.activation) is nn.SiLU else ""
    return "geglu_gate_last" if kind.__name__ == "GEGLU" else ""


def _activated(y: Tensor, activation: str) -> Tensor:
    """Return an activation of a layer's result, as diffusers computes it."""
    function = FUNCTIONS[GLU.get(activation, activation)]
    if activation not in GLU:
        return function(y)
    first, second = y.chunk(2, dim=-1)
    gate, other = (second, first) if activation in GATE_LAST else (first, second)
    return other * function(gate)
