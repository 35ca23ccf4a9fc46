"""Copies of an accelerated model that have one part native, or both, and share what they can."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from cupyattn.interop.torch.accelerated_parts import Part, Request
from cupyattn.interop.torch.activated import ActivatedInt8Linear
from cupyattn.interop.torch.compiling import compiled_blocks
from cupyattn.interop.torch.guards import unguard
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.originals import original_of
from cupyattn.measure.trial import ALL, AS_GIVEN, ATTENTION, LINEAR, NATIVE

#: The module that takes attention out of a model; if nothing imported it, none was replaced.
_ATTENTION = "cupyattn.interop.diffusers.replace"


#: Weights of native layers by the identities of the INT8 layers that stand in their places.
Weights = dict[int, nn.Parameter]


class Way(NamedTuple):
    """The models of a pipeline in one way, by their prefixes, and its name."""

    said: str
    models: dict[str, nn.Module]


def ways_of(parts: tuple[Part, ...], request: Request) -> dict[str, Way]:
    """Return native, each replaced part alone, and all that was replaced, as models to call.

    Parameters
    ----------
    parts : tuple of Part
    request : Request
        Copies are compiled as it says.

    Raises
    ------
    RuntimeError
        If the weights of an INT8 layer are lost.
    """
    linear = any(part.linear is not None for part in parts)
    attention = any(part.accuracy for part in parts)
    classes = dict.fromkeys(part.accuracy for part in parts if part.accuracy)
    of = " and ".join("16 bits" if one == "full" else f"{one} INT8" for one in classes)
    weights: Weights = {}
    names = {LINEAR: "INT8 linear layers", ATTENTION: f"attention in {of}"}
    found = {NATIVE: Way(NATIVE, _copies(parts, request, weights, linear=False, attention=False))}
    if request.compile:
        models = _copies(parts, request, weights, linear=False, attention=False, compiled=False)
        found[AS_GIVEN] = Way(AS_GIVEN, models)
    if linear and attention:
        for name, of_layers in ((LINEAR, True), (ATTENTION, False)):
            models = _copies(parts, request, weights, linear=of_layers, attention=not of_layers)
            found[name] = Way(names[name], models)
    said = [names[LINEAR]] * linear + [names[ATTENTION]] * attention
    found[ALL] = Way(" and ".join(said), {part.prefix: part.model for part in parts})
    return found


def _copies(
    parts: tuple[Part, ...], request: Request, weights: Weights, *, linear: bool, attention: bool,
    compiled: bool = True,
) -> dict[str, nn.Module]:  # fmt: skip
    made = {}
    for part in parts:
        model = shared_copy(part.model, None if linear else weights)
        if not attention and _ATTENTION in sys.modules:
            sys.modules[_ATTENTION].restore_attention(model)
        if compiled and request.compile:
            compiled_blocks(model, graphs=request.compile == "graphs")
        made[part.prefix] = model
    return made


def shared_copy(model: nn.Module, weights: Weights | None) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are the same tensors.

    Parameters
    ----------
    model : Module
    weights : dict, optional
        Of native layers on the device, which stand in the places of INT8 layers then. Weights that
        it lacks are added, so that all copies have the same ones.
    """
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    if weights is not None:
        for name, module in model.named_modules():
            if isinstance(module, Int8Linear):
                memo[id(module)] = _native(name, module, weights)
        for module in model.modules():
            if isinstance(module, ActivatedInt8Linear) and isinstance(module.proj, Int8Linear):
                memo[id(module)] = _native_unit(module, memo)
    made = copy.deepcopy(model, memo)
    if weights is not None:
        unguard(made)
    return made


def _native(name: str, layer: Int8Linear, weights: Weights) -> nn.Module:
    original = original_of(layer)
    if original is None or not isinstance(original.module, nn.Linear):
        raise RuntimeError(
            f"{name!r} is INT8 without the layer that it replaced, so there is nothing to compare "
            "it with: load the model's own weights again"
        )
    linear = _shell(original.module)
    if id(layer) not in weights:
        weight = original.module.weight.detach().to(layer.weight_codes.device, layer.weight_dtype)
        weights[id(layer)] = nn.Parameter(weight, requires_grad=False)
    linear._parameters["weight"] = weights[id(layer)]
    linear._parameters["bias"] = layer.bias
    return linear


def _native_unit(unit: ActivatedInt8Linear, memo: Mapping[int, Any]) -> nn.Module:
    original = original_of(unit)
    if original is None or original.module is None:
        raise RuntimeError("an INT8 layer with an activation has lost the module that it replaced")
    own = _shell(original.module)
    own._modules["proj"] = memo[id(unit.proj)]
    return own


def _shell(module: nn.Module) -> Any:
    """Return a module with the same parts, in separate dicts."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(made)[name] = dict(vars(module)[name])
    return made


def bytes_of(models: Mapping[str, nn.Module]) -> int:
    """Return the size of all parameters and buffers, shared ones once."""
    found: dict[int, torch.Tensor] = {}
    for model in models.values():
        found |= {id(x): x for x in (*model.parameters(), *model.buffers())}
    return sum(x.numel() * x.element_size() for x in found.values())
