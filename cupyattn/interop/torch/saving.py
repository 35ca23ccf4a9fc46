"""Refuse `save_pretrained` of models with INT8 linear layers, which would write codes as weights.

The libraries write a model's state dict beside a configuration that does not name the codes. Then
`from_pretrained` puts the codes in the places of weights, without their scales.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.linear import Int8Linear

_SAVE = "save_pretrained"


def refuse_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of a model, and of models within it, raise while they have INT8 layers.

    Parameters
    ----------
    model : Module
        Gets an attribute that hides its class's method. Models of PEFT write adapters alone, so
        they get none.
    """
    for module in model.modules():
        method = getattr(type(module), _SAVE, None)
        writes_weights = method is not None and not method.__module__.startswith("peft.")
        if writes_weights and _SAVE not in vars(module) and _has_codes(module):
            setattr(module, _SAVE, functools.partial(_refuse, type(module).__name__))


def allow_saving(model: nn.Module) -> None:
    """Undo `refuse_saving` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    for module in model.modules():
        found = vars(module).get(_SAVE)
        if getattr(found, "func", None) is _refuse and not _has_codes(module):
            delattr(module, _SAVE)


def _has_codes(module: nn.Module) -> bool:
    return any(isinstance(layer, Int8Linear) for layer in module.modules())


def _refuse(kind: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        f"save_pretrained of a {kind} with INT8 linear layers is refused, since from_pretrained "
        "would take the codes for weights: call restore() of the handle first, or let `cupyattn "
        "convert` write INT8 codes of the original folder, which load_int8 loads"
    )
