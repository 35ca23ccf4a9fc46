"""Recognise PEFT adapters in a model: their matrices, and the layers whose weights they read.

The matrices of an adapter are trained, or are too small for INT8. So only the base layer may become
INT8, and only if the adapter does not use its weight.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

#: Classes of PEFT, each with the child that belongs to the model. They wrap a layer with an
#: adapter, a layer whose copy is trained, or a whole model.
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
#: Modules of `peft.tuners` whose linear layers add to the result of the base layer, or change its
#: input or result. Layers of other modules may read its weight in each call.
_BESIDE = {
    "adalora", "c3a", "delora", "fourierft", "gralora", "ia3", "loha", "lokr", "lora", "oft",
    "pvera", "randlora", "road", "tinylora", "unilora", "vblora", "vera", "waveft",
}  # fmt: skip
#: Modules of `peft.tuners` that start from the numbers of the weight, with the purpose. If such an
#: adapter was trained with 16-bit weights, its error with codes exceeds the error of the codes.
_NUMBERS = {
    "ln_tuning": "trains a copy of the layer",
    "osf": "begins with a decomposition of the weight",
    "psoft": "begins with a decomposition of the weight",
}
#: Modules that read the weights of all their layers before the first gets its adapter.
_ALL_NUMBERS = {"frod": "begins with a decomposition of all weights"}


def needs_numbers(module: nn.Module, *, of_all: bool = False) -> str:
    """Say why an adapter needs the numbers of the weight; empty if it does not.

    Parameters
    ----------
    module : Module
        A layer with an adapter, or a tuner.
    of_all : bool
        Whether the adapter needs all weights at once.
    """
    kind = _kind(module)
    reasons = _ALL_NUMBERS if of_all else _NUMBERS
    return f"its adapter ({kind}) {reasons[kind]}" if kind in reasons else ""


def _kind(module: nn.Module) -> str:
    """Return the name of the module of `peft.tuners` that a class is of."""
    home = type(module).__module__
    return home.removeprefix("peft.tuners.").partition(".")[0] if "peft." in home else ""


def copies_layers(module: nn.Module) -> bool:
    """Whether a module of PEFT contains a layer and copies that are trained in its place."""
    kind = _class("peft.utils.other", "AuxiliaryTrainingWrapper")
    return kind is not None and isinstance(module, kind)


def inner_of(module: nn.Module) -> tuple[str, ...]:
    """Return the name of the child that a module of PEFT wraps; other children belong to PEFT.

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
    """Say why the contents of a module must keep 16 bits; empty if they may become INT8.

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
    """Return a class of PEFT; None if PEFT was not imported, so no object has this class."""
    return getattr(sys.modules.get(module), name, None)
