"""Let ``next(module.parameters())`` return a type and a device if INT8 layers left no parameter.

Libraries read both from a module's first parameter, and fail if it has none. INT8 layers have
buffers, so attention without biases may be such a module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import home_of

_PARAMETERS = "parameters"


def provide_parameters(model: nn.Module) -> None:
    """Give a parameter to modules of a model that contain INT8 layers and no parameters.

    Parameters
    ----------
    model : Module
        Its modules get an attribute that hides their class's method.
    """
    for module in model.modules():
        if _PARAMETERS not in vars(module) and _first_codes(module) is not None:
            empty = nn.Parameter(torch.empty(0), requires_grad=False)
            setattr(module, _PARAMETERS, functools.partial(_parameters, module, empty))


def remove_provided_parameters(model: nn.Module) -> None:
    """Undo `provide_parameters` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    for module in model.modules():
        found = vars(module).get(_PARAMETERS)
        if getattr(found, "func", None) is _parameters and _first_codes(module) is None:
            delattr(module, _PARAMETERS)


def _first_codes(module: nn.Module) -> Int8Linear | None:
    return next((one for one in module.modules() if isinstance(one, Int8Linear)), None)


def _parameters(
    module: nn.Module, empty: nn.Parameter, recurse: bool = True
) -> Iterator[nn.Parameter]:
    """Yield a module's parameters, or one empty parameter, always the same, if it has none.

    Group offloading keeps a copy of each parameter on the host and finds it by the parameter.
    """
    found = [*type(module).parameters(module, recurse)]
    if not found and (layer := _first_codes(module)) is not None and recurse:
        device = home_of(layer, layer.weight_codes)
        empty.data = torch.empty(0, dtype=layer.weight_dtype, device=device)
        found.append(empty)
    yield from found
