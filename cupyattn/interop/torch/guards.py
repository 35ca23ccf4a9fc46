"""Changes of a model's methods while it has INT8 layers, so other libraries work with it."""

from __future__ import annotations

from torch import nn

from cupyattn.interop.torch.adapting import forget_adapters, let_adapt
from cupyattn.interop.torch.fusing import keep_fused, let_fuse
from cupyattn.interop.torch.parameters import answer_for_parameters, forget_parameters
from cupyattn.interop.torch.saving import allow_saving, refuse_saving


def guard(model: nn.Module) -> None:
    """Make a model's methods support its INT8 layers, or refuse.

    Parameters
    ----------
    model : Module
    """
    refuse_saving(model)
    keep_fused(model)
    let_adapt(model)
    answer_for_parameters(model)


def unguard(model: nn.Module) -> None:
    """Undo `guard` of modules that have no INT8 layers left.

    Parameters
    ----------
    model : Module
    """
    allow_saving(model)
    let_fuse(model)
    forget_adapters(model)
    forget_parameters(model)
