"""Replace a model's layers by INT8 layers, one at a time as they are made."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from cupyattn.interop.torch.guards import guard
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.originals import Call, keep_original
from cupyattn.measure.words import counted

#: A layer's name, its replacement or None, and the reason.
Verdict = tuple[str, Int8Linear | None, str]


def place_layers(
    model: nn.Module, layers: dict[str, nn.Linear], made: Iterator[Verdict], call: Call
) -> tuple[dict[str, str], dict[str, str]]:
    """Put layers in their places; move each original where the call wants it before the next layer.

    Parameters
    ----------
    model : Module
    layers : dict of str to Linear
        The layers by name; dropped layers are removed from it.
    made : iterator of Verdict
    call : Call

    Returns
    -------
    replaced, kept : dict of str to str
        Names and reasons.

    Raises
    ------
    BaseException
        Any exception of `made`. All layers are then restored, except dropped ones; a note of the
        error says how many of these are INT8.
    """
    parents = _parents(model)
    replaced: dict[str, str] = {}
    kept: dict[str, str] = {}
    undo: list[tuple[nn.Module, str, nn.Linear, Any]] = []
    dropped = call.originals == "drop"
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    try:
        for name, layer, why in made:
            if layer is None:
                kept[name] = why
                continue
            linear = layers.pop(name) if dropped else layers[name]
            layer.train(linear.training)
            for parent, key in parents[id(linear)]:
                if not dropped:  # NOTE: first, for an interrupt may come between two lines.
                    undo.append((parent, key, linear, linear.weight.device))
                parent._modules[key] = layer
            owners[id(linear.weight)] -= 1
            keep_original(layer, call, name, linear, shared=owners[id(linear.weight)] > 0)
            replaced[name] = why
            del linear
    except BaseException:
        for parent, key, linear, device in undo:
            parent._modules[key] = linear
            linear.weight.data = linear.weight.data.to(device)
        if dropped and replaced:
            guard(model)
            warnings.warn(
                f"{counted(len(replaced), 'layer')} of the model stayed INT8, without originals: "
                "make it again, or use originals='cpu', which lets a failed call be undone",
                UserWarning, stacklevel=3,
            )  # fmt: skip
        raise
    return replaced, kept


def _parents(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the parents of each module, with its names there, by the module's identity."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            found.setdefault(id(child), []).append((parent, key))
    return found
