"""Adapters of PEFT around the layers of a model: what is theirs, and which layers they read.

An adapter's own matrices are trained, or are too small for INT8. So of a layer with an adapter only
the base layer may become INT8, and only if the adapter leaves its weight alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

#: Classes of PEFT, and the child that belongs to the model: of a layer with an adapter, of one of
#: which a copy is trained, and of a whole model.
_WRAPPERS = {
    ("peft.tuners.tuners_utils", "BaseTunerLayer"): "base_layer",
    ("peft.utils.other", "AuxiliaryTrainingWrapper"): "original_module",
    ("peft.peft_model", "PeftModel"): "base_model",
    ("peft.mixed_model", "PeftMixedModel"): "base_model",
    ("peft.tuners.tuners_utils", "BaseTuner"): "model",
    ("peft.tuners.xlora.model", "XLoraModel"): "lora_model",
    ("peft.tuners.adaption_prompt.model", "AdaptionPromptModel"): "model",
    ("peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention"): "model",
}
#: Modules of `peft.tuners` whose linear layers add to what the base layer returns, or change its
#: input or its result. All others may read its weight in each call.
_BESIDE = {
    "adalora", "c3a", "delora", "fourierft", "gralora", "ia3", "loha", "lokr", "lora", "oft",
    "pvera", "randlora", "road", "tinylora", "unilora", "vblora", "vera", "waveft",
}  # fmt: skip
#: Modules of `peft.tuners` that begin with the numbers of the weight, and what for. Adapters that
#: were trained beside 16 bits are wrong beside codes then, by more than the codes are.
_NUMBERS = {
    "ln_tuning": "trains a copy of the layer",
    "osf": "begins with a decomposition of the weight",
    "psoft": "begins with a decomposition of the weight",
}
#: Those that begin with the weights of all their layers, before the first has its adapter.
_ALL_NUMBERS = {"frod": "begins with a decomposition of all weights"}


def needs_numbers(module: nn.Module, *, of_all: bool = False) -> str:
    """Say what an adapter needs the numbers of the weight for; empty if the codes will do.

    Parameters
    ----------
    module : Module
        A layer with an adapter, or a tuner.
    of_all : bool
        Of all weights at once.
    """
    kind = _kind(module)
    reasons = _ALL_NUMBERS if of_all else _NUMBERS
    return f"its adapter ({kind}) {reasons[kind]}" if kind in reasons else ""


def _kind(module: nn.Module) -> str:
    """Return the name of the module of `peft.tuners` that a class is of."""
    home = type(module).__module__
    return home.removeprefix("peft.tuners.").partition(".")[0] if "peft." in home else ""


def copies_layers(module: nn.Module) -> bool:
    """Whether a module of PEFT keeps a layer beside copies that are trained in its place."""
    kind = _class("peft.utils.other", "AuxiliaryTrainingWrapper")
    return kind is not None and isinstance(module, kind)


def inner_of(module: nn.Module) -> tuple[str, ...]:
    """Return the name of the child that a module of PEFT wraps; all others are PEFT's own.

    Returns
    -------
    tuple of str
        Empty for all other modules.
    """
    for kind, child in _WRAPPERS.items():
        cls = _class(*kind)
        if cls is not None and isinstance(module, cls) and module._modules.get(child) is not None:
            return (child,)
    return ()


def obstacle_of(module: nn.Module) -> str:
    """Say why what a module holds must keep its 16 bits; empty where it may become INT8.

    Parameters
    ----------
    module : Module
        Any module of a model.
    """
    inner = inner_of(module)
    if inner == ("original_module",):
        return "modules_to_save: peft trains a copy of it"
    if inner != ("base_layer",):
        return ""
    if getattr(module, "merged", False):
        return "an adapter is merged into its weight: unmerge it to replace the layer"
    of_parameters = _class("peft.tuners.lora.layer", "ParamWrapper")
    if of_parameters is not None and isinstance(module, of_parameters):
        return "its adapter (target_parameters) replaces the parameter in each call"
    if reason := needs_numbers(module):
        return reason
    kind = _kind(module)
    variants = [*getattr(module, "lora_variant", {}).values()]
    if kind in _BESIDE and not variants:
        return ""
    if variants:
        kind = type(variants[0]).__name__.removesuffix("Variant").removesuffix("Linear").lower()
    return f"its adapter ({kind}) may read the weight in each call, which is slow on codes"


def _class(module: str, name: str) -> Any:
    """Return a class of PEFT; None where that was not imported, so that nothing is of it."""
    return getattr(sys.modules.get(module), name, None)
