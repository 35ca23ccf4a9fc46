"""Refuse `save_pretrained` of models with INT8 linear layers, which would write codes as weights.

The libraries write a model's state dict with a configuration that does not mention the codes.
`from_pretrained` would then load the codes as weights, without their scales.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.originals import original_of

_SAVE = "save_pretrained"


def refuse_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of a model, and of models within it, raise while they have INT8 layers.

    Parameters
    ----------
    model : Module
        Gets an attribute that hides the method of its class. Models of PEFT write only adapters, so
        they get none.
    """
    for module in model.modules():
        method = getattr(type(module), _SAVE, None)
        writes_weights = method is not None and not method.__module__.startswith("peft.")
        if writes_weights and _SAVE not in vars(module) and _has_codes(module):
            setattr(module, _SAVE, functools.partial(_refuse, module))


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


def _refuse(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    originals = [original_of(layer) for layer in module.modules() if isinstance(layer, Int8Linear)]
    if all(original is not None and original.module is not None for original in originals):
        way = (
            "call cupyattn.interop.restore(model) first, or let `cupyattn convert` write INT8 "
            "codes of the original folder, which load_int8 loads"
        )
    else:
        way = (
            "its layers have no weights to restore, so keep the folder that load_int8 takes, or "
            "torch.save(model.state_dict(), path)"
        )
    raise UnsupportedError(
        f"save_pretrained of a {type(module).__name__} with INT8 linear layers is refused, since "
        f"from_pretrained would take the codes for weights: {way}"
    )
