"""What libraries of adapters need of a model with INT8 layers, and what they cannot have.

Loading: diffusers looks up ``state_dict()["to_q.weight"]``, where there are codes by another name.
Fusing: codes cannot take in an adapter. Layers of 16 bits would be fused before the first INT8 one
refuses, and scaled before, so models and tuners refuse before they begin.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.adapters import inner_of
from cupyattn.interop.torch.linear import CODES, Int8Linear

#: Methods that fuse adapters, of models of diffusers and of tuners of PEFT.
_FUSING = ("fuse_lora", "merge_adapter", "merge_and_unload")


class _State(OrderedDict[str, Any]):
    """A state dict that answers for the weights of INT8 layers, which it does not hold.

    Parameters
    ----------
    state : mapping, optional
    model : Module, optional
        Whose state it is.
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
        """Copies and files have the tensors alone."""
        return OrderedDict, ([*self.items()],)


def let_adapt(model: nn.Module) -> None:
    """Let adapters be loaded into a model with INT8 layers, and not be fused into these.

    Parameters
    ----------
    model : Module
        Modules within it that have a method of `_FUSING` get an attribute that hides it, and a hook
        of their state dict.
    """
    for module in model.modules():
        names = [name for name in _FUSING if callable(getattr(type(module), name, None))]
        if not names or not _has_codes(module):
            continue
        if _answer not in module._state_dict_hooks.values():
            module._register_state_dict_hook(_answer)
        for name in names:
            if name not in vars(module):
                setattr(module, name, functools.partial(_fuse, module, name))


def forget_adapters(model: nn.Module) -> None:
    """Undo `let_adapt` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    for module in model.modules():
        if _has_codes(module):
            continue
        for name in _FUSING:
            if getattr(vars(module).get(name), "func", None) is _fuse:
                delattr(module, name)
        hooks = module._state_dict_hooks
        for number in [number for number, hook in hooks.items() if hook is _answer]:
            del hooks[number]


def _has_codes(module: nn.Module) -> bool:
    return any(isinstance(layer, Int8Linear) for layer in module.modules())


def _answer(module: nn.Module, state: Any, prefix: str, _: Any) -> Any:
    if prefix:  # of a module within the one whose state is asked for
        return None
    found = _State(state, module)
    found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def _fuse(module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Fuse adapters if none of them has an INT8 layer; refuse otherwise."""
    for name in _int8_tuners(module):
        raise UnsupportedError(
            f"{method} of a {type(module).__name__} is refused, since the layer of {name!r} is "
            f"INT8, and codes cannot take in an adapter: call restore(), then {method}, then "
            "replace_linear_with_int8 again"
        )
    return getattr(type(module), method)(module, *args, **kwargs)


def _int8_tuners(model: nn.Module) -> Iterator[str]:
    """Yield the names of layers of PEFT whose layer of the model is INT8."""
    for name, module in model.named_modules():
        base: Any = module
        while inner_of(base) == ("base_layer",):
            base = base._modules["base_layer"]
        if base is not module and isinstance(base, Int8Linear):
            yield name
