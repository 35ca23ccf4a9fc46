"""Change a model's methods while it has INT8 layers, so that other libraries work with it."""

from __future__ import annotations

from torch import nn

from cupyattn.interop.torch.adapting import allow_adapters, forget_adapters
from cupyattn.interop.torch.fusing import allow_fusing, forget_fusing
from cupyattn.interop.torch.parameters import provide_parameters, remove_provided_parameters
from cupyattn.interop.torch.saving import allow_saving, refuse_saving


def guard(model: nn.Module) -> None:
    """Make a model's methods support its INT8 layers, or refuse.

    Parameters
    ----------
    model : Module
    """
    refuse_saving(model)
    allow_fusing(model)
    allow_adapters(model)
    provide_parameters(model)


def unguard(model: nn.Module) -> None:
    """Undo `guard` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    allow_saving(model)
    forget_fusing(model)
    forget_adapters(model)
    remove_provided_parameters(model)
