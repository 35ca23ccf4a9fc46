"""Make copies of an accelerated model with one or both parts native, which share tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from cupyattn.interop.torch.accelerated_parts import Part, Request
from cupyattn.interop.torch.activated import ActivatedInt8Linear
from cupyattn.interop.torch.compiling import compiled_blocks
from cupyattn.interop.torch.guards import unguard
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import hooks_of_diffusers
from cupyattn.interop.torch.originals import original_of
from cupyattn.measure.trial import ALL, AS_GIVEN, ATTENTION, LINEAR, NATIVE, UNCACHED

#: The module that restores a model's attention; if it was not imported, none was replaced.
_ATTENTION = "cupyattn.interop.diffusers.replace"


#: Weights of native layers by the identities of the INT8 layers that replaced them.
Weights = dict[int, nn.Parameter]


class Way(NamedTuple):
    """A way of running a pipeline: its name, and the models by their prefixes."""

    said: str
    models: dict[str, nn.Module]


def ways_of(parts: tuple[Part, ...], request: Request) -> dict[str, Way]:
    """Return models to call: native, with each replaced part alone, and with all of them.

    Parameters
    ----------
    parts : tuple of Part
    request : Request
        Copies are compiled as it says.

    Raises
    ------
    RuntimeError
        If the weights of an INT8 layer are lost.
    ValueError
        If hooks of diffusers are there that copies would share.

    Notes
    -----
    If the model has a step cache (``enable_cache``), all ways have it, except one native way.
    """
    with _without_caches(parts) as caches:
        return _ways_of(parts, request, caches)


def _ways_of(
    parts: tuple[Part, ...], request: Request, caches: Mapping[str, Any]
) -> dict[str, Way]:
    linear = any(part.linear is not None for part in parts)
    attention = any(part.accuracy for part in parts)
    classes = dict.fromkeys(part.accuracy for part in parts if part.accuracy)
    of = " and ".join("16 bits" if one == "full" else f"{one} INT8" for one in classes)
    weights: Weights = {}
    made = functools.partial(_copies, parts, request, weights)
    names = {LINEAR: "INT8 linear layers", ATTENTION: f"attention in {of}"}
    found = {NATIVE: Way(NATIVE, made(caches))}
    if caches:
        of_caches = ", ".join(dict.fromkeys(map(_of_cache, caches.values())))
        found[UNCACHED] = Way(f"native without {of_caches}", made({}))
    if request.compile:
        found[AS_GIVEN] = Way(AS_GIVEN, made(caches, compiled=False))
    if linear and attention:
        found[LINEAR] = Way(names[LINEAR], made(caches, linear=True))
        found[ATTENTION] = Way(names[ATTENTION], made(caches, attention=True))
    said = [names[LINEAR]] * linear + [names[ATTENTION]] * attention
    found[ALL] = Way(" and ".join(said), {part.prefix: part.model for part in parts})
    return found


def _copies(
    parts: tuple[Part, ...], request: Request, weights: Weights, caches: Mapping[str, Any], *,
    linear: bool = False, attention: bool = False, compiled: bool = True,
) -> dict[str, nn.Module]:  # fmt: skip
    made = {}
    for part in parts:
        model = shared_copy(part.model, None if linear else weights)
        if not attention and _ATTENTION in sys.modules:
            sys.modules[_ATTENTION].restore_attention(model)
        if compiled and request.compile:
            compiled_blocks(model, graphs=request.compile == "graphs")
        if part.prefix in caches:
            cast(Any, model).enable_cache(caches[part.prefix])
        made[part.prefix] = model
    return made


@contextlib.contextmanager
def _without_caches(parts: tuple[Part, ...]) -> Iterator[dict[str, Any]]:
    """Remove the models' step caches temporarily, and yield their configurations."""
    models: dict[str, Any] = {part.prefix: part.model for part in parts}
    caches = {
        prefix: model._cache_config for prefix, model in models.items()
        if getattr(model, "is_cache_enabled", False)
    }  # fmt: skip
    for prefix in caches:
        models[prefix].disable_cache()
    try:
        for model in models.values():
            _check_hooks(model)
        yield caches
    finally:
        for prefix, config in caches.items():
            models[prefix].enable_cache(config)


def _check_hooks(model: nn.Module) -> None:
    """Raise ValueError for hooks of diffusers, which in a copy would run the original model."""
    for name, module in model.named_modules():
        if hooks := hooks_of_diffusers(module):
            raise ValueError(
                f"{name or 'the model'} has the hook {[*hooks][0]!r} of diffusers, which copies of "
                "the model would share: remove it, and enable step caches by model.enable_cache()"
            )


def _of_cache(config: Any) -> str:
    """Return a step cache's configuration in words that are the same in each process."""
    given = {n: x for n, x in vars(config).items() if isinstance(x, bool | int | float | str)}
    return f"{type(config).__name__}({', '.join(f'{n}={x!r}' for n, x in given.items())})"


def shared_copy(model: nn.Module, weights: Weights | None) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are the same tensors.

    Parameters
    ----------
    model : Module
    weights : dict, optional
        Weights of native layers on the device, which then replace INT8 layers. Missing weights are
        added, so all copies share them.
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
