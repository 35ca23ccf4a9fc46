"""INT8 layers put in the places of a model's own, one at a time, and where the originals go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from cupyattn.interop.torch.linear import Int8Linear

#: What becomes of the weights that are replaced.
ORIGINALS = ("cpu", "device", "drop")

#: A layer that was replaced: its parent, its name there, the layer, and what took its place.
LinearPlace = tuple[nn.Module, str, nn.Linear, Int8Linear]


def settled(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    made: Iterator[tuple[str, Int8Linear | None, str]],
    originals: str,
) -> tuple[list[LinearPlace], dict[str, str], dict[str, str]]:
    """Put layers in their places as they are made, and each original where it goes.

    Parameters
    ----------
    model : Module
    layers : dict of str to Linear
        The layers by name; those that are dropped are taken out of it.
    made : iterator of (name, layer or None, why)
        None for a layer that stays.
    originals : {"cpu", "device", "drop"}

    Returns
    -------
    places : list of LinearPlace
        Empty where originals are dropped.
    replaced, kept : dict of str to str
        Names and reasons.

    Raises
    ------
    BaseException
        Whatever `made` raises. All layers are in their places again then, but for dropped ones: the
        error has a note of how many of those are INT8 by now.
    """
    parents = _parents(model)
    places: list[LinearPlace] = []
    replaced: dict[str, str] = {}
    kept: dict[str, str] = {}
    homes: dict[int, Any] = {}
    try:
        for name, layer, why in made:
            if layer is None:
                kept[name] = why
                continue
            linear = layers.pop(name) if originals == "drop" else layers[name]
            layer.train(linear.training)
            for parent, key in parents[id(linear)]:
                parent._modules[key] = layer
                if originals != "drop":
                    places.append((parent, key, linear, layer))
            if originals == "cpu":  # NOTE: not the bias, which the new layer has too
                homes[id(linear)] = linear.weight.device
                linear.weight.data = linear.weight.data.to("cpu")
            replaced[name] = why
            del linear
    except BaseException as error:
        for parent, key, linear, _ in places:
            parent._modules[key] = linear
            if id(linear) in homes:
                linear.weight.data = linear.weight.data.to(homes[id(linear)])
        if originals == "drop" and replaced:
            error.add_note(
                f"{len(replaced)} layers of the model are INT8, and their originals dropped: make "
                "it again, or use originals='cpu', which takes back what fails"
            )
        raise
    return places, replaced, kept


def _parents(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules that hold a module and its names there, by the identity of the latter."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            found.setdefault(id(child), []).append((parent, key))
    return found
