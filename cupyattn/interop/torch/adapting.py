"""Let adapter libraries work on a model with INT8 layers, and refuse operations that cannot work.

Loading: diffusers reads ``state_dict()["to_q.weight"]``, but codes have another name. Fusing: an
adapter cannot be fused into codes. Layers of 16 bits would be scaled and fused before the first
INT8 layer refuses, so models and tuners refuse before they begin. Tuners that PEFT makes later are
recognised by the model that they register. PEFT adapts parameters of modules and silently skips
weights that are not parameters, so tuners refuse these, too.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.adapters import copies_layers, inner_of, needs_numbers
from cupyattn.interop.torch.candidates import int8_layers
from cupyattn.interop.torch.fusing import as_linear
from cupyattn.interop.torch.linear import CODES, Int8Linear
from cupyattn.interop.torch.originals import original_of

#: Methods that fuse adapters, of models of diffusers and of tuners of PEFT.
_FUSING = ("fuse_lora", "merge_adapter", "merge_and_unload")
#: The method of tuners of PEFT that adds an adapter.
_ADD = "inject_adapter"
_watching = False


class _State(OrderedDict[str, Any]):
    """A state dict that answers for the weights of INT8 layers, which it does not hold.

    Parameters
    ----------
    state : mapping, optional
    model : Module, optional
        The model whose state it is.
    """

    def __init__(self, state: Any = (), model: nn.Module | None = None) -> None:
        super().__init__(state)
        self._model = model

    def __missing__(self, name: str) -> Any:
        layer, _, last = name.rpartition(".")
        if self._model is not None and last == "weight":
            within = (f"{layer}.{CODES}", f"{layer}.base_layer.{CODES}")
            if any(codes in self for codes in within):
                return self._model.get_submodule(layer).weight
        raise KeyError(name)

    def __reduce__(self) -> Any:
        """Copy and pickle only the tensors and the versions of their modules."""
        rest = {name: x for name, x in vars(self).items() if name != "_model"}
        return OrderedDict, (), rest, None, iter(self.items())


def allow_adapters(model: nn.Module) -> None:
    """Let adapters be loaded into a model with INT8 layers, and not be fused into these.

    Parameters
    ----------
    model : Module
        Modules in it with a method named in `_FUSING`, or `_ADD`, get an attribute that hides the
        method, and a hook of their state dict.
    """
    global _watching
    if not _watching:
        register_module_module_registration_hook(_watch)
        _watching = True
    for module in model.modules():
        if _methods(module) and _has_codes(module):
            _adapt(module)


def _methods(module: nn.Module) -> list[str]:
    return [name for name in (*_FUSING, _ADD) if callable(getattr(type(module), name, None))]


def _adapt(module: nn.Module) -> None:
    if _answer not in module._state_dict_hooks.values():
        module._register_state_dict_hook(_answer)
    for name in _methods(module):
        if name not in vars(module):
            hiding = functools.partial(_add, module) if name == _ADD else (
                functools.partial(_fuse, module, name)
            )  # fmt: skip
            setattr(module, name, hiding)


def _watch(module: nn.Module, name: str, child: Any) -> Any:
    """Adapt PEFT's objects to INT8 layers when PEFT registers the model or one of its layers.

    Tuners are treated by `allow_adapters`. Layers get 16 bits again if they are in
    ``modules_to_save``, whose copies are trained, or if their adapters start from the weight's
    numbers.
    """
    if child is None or name not in ("model", "original_module", "base_layer"):
        return None
    if name == "model" and _methods(module) and _has_codes(child):
        if reason := needs_numbers(module, of_all=True):
            _refuse_numbers("the model has INT8 layers", reason)
        _adapt(module)
    if name == "original_module" and copies_layers(module):
        return _in_16_bits(child)
    if name == "base_layer" and (reason := needs_numbers(module)) and isinstance(child, Int8Linear):
        original = original_of(child)
        if original is None or original.module is None:
            _refuse_numbers("the layer is INT8 without the one that it replaced", reason)
        return _in_16_bits(child)
    return None


def _refuse_numbers(there: str, reason: str) -> NoReturn:
    raise UnsupportedError(
        f"{there}, but {reason}: load the adapter into the 16-bit model, then call "
        "replace_linear_with_int8"
    )


def _in_16_bits(module: nn.Module) -> nn.Module:
    """Return a module, or its original, in which INT8 layers are replaced by their originals."""
    if isinstance(module, Int8Linear):
        original = original_of(module)
        if original is not None:
            original.call.missing.discard(original.name)
        return as_linear(module).train(module.training)
    for parent in [*module.modules()]:
        for name, layer in parent._modules.items():
            if isinstance(layer, Int8Linear):
                parent._modules[name] = _in_16_bits(layer)
    return module


def forget_adapters(model: nn.Module) -> None:
    """Undo `allow_adapters` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    for module in model.modules():
        if _has_codes(module):
            continue
        for name in (*_FUSING, _ADD):
            if getattr(vars(module).get(name), "func", None) in (_fuse, _add):
                delattr(module, name)
        hooks = module._state_dict_hooks
        for number in [number for number, hook in hooks.items() if hook is _answer]:
            del hooks[number]


def _has_codes(module: nn.Module) -> bool:
    return any(isinstance(layer, Int8Linear) for layer in module.modules())


def _answer(module: nn.Module, state: Any, prefix: str, _: Any) -> Any:
    if prefix:  # of a module within the one whose state is read
        return None
    found = _State(state, module)
    found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def _fuse(module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Fuse adapters if none of them has an INT8 layer; refuse otherwise."""
    function = getattr(type(module), method)
    given = inspect.signature(function).bind(module, *args, **kwargs).arguments
    for name in _int8_tuners(module, given.get("adapter_names")):
        raise UnsupportedError(
            f"{method} of a {type(module).__name__} is refused, since the layer of {name!r} is "
            f"INT8, and codes cannot take in an adapter: call restore(), then {method}, then "
            "replace_linear_with_int8 again"
        )
    return function(module, *args, **kwargs)


def _add(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Add an adapter, unless it would replace an INT8 weight, which PEFT would drop."""
    targets = getattr(tuner.peft_config[adapter_name], "target_parameters", None) or ()
    for name, _ in int8_layers(model) if targets else ():
        weight = f".{name}.weight"
        if any(weight.endswith(f".{target}") for target in targets):
            del tuner.peft_config[adapter_name]
            raise UnsupportedError(
                f"target_parameters names {weight[1:]!r}, whose layer is INT8, so that it is no "
                "parameter: call restore(), add the adapter, then replace_linear_with_int8 again"
            )
    return type(tuner).inject_adapter(tuner, model, adapter_name, *args, **kwargs)


def _int8_tuners(model: nn.Module, adapters: Sequence[str] | None) -> Iterator[str]:
    """Yield the names of INT8 layers with one of these adapters; None: with an active adapter."""
    for name, module in model.named_modules():
        base: Any = module
        while inner_of(base) == ("base_layer",):
            base = base._modules["base_layer"]
        if base is not module and isinstance(base, Int8Linear):
            tuner: Any = module
            parts = (getattr(tuner, part) for part in tuner.adapter_layer_names)
            there = {adapter for part in parts for adapter in getattr(part, "keys", tuple)()}
            if there & {*(adapters or tuner.active_adapters)}:
                yield name
