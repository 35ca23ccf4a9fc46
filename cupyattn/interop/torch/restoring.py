"""Restore the originals of INT8 layers, wherever these are in the model now.

Adapters, fused projections and pipelines move layers. So each layer stores its original, and
restoring searches the current model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cupyattn.interop.torch.activated import ActivatedInt8Linear
from cupyattn.interop.torch.guards import unguard
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.offloading import check_restorable, move_casting
from cupyattn.interop.torch.originals import Call, Original, original_of, version_of
from cupyattn.measure.words import printable

#: Types that a bias may have been converted to and back.
_ROUNDED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class _Place(NamedTuple):
    """Position of a layer that will be removed."""

    parent: nn.Module
    name: str
    layer: nn.Module
    original: Original


def restore_linear(model: nn.Module, call: Call | None = None) -> None:
    """Restore the originals of a model's INT8 layers, on the current devices of their codes.

    Parameters
    ----------
    model : Module
        Modified in place, or not at all if this raises.
    call : Call, optional
        Restores only the layers of this call.

    Raises
    ------
    RuntimeError
        If a layer has lost its original, or hooks prevent it.

    Warns
    -----
    UserWarning
        Names the layers of the call that are not in the model any more.
    """
    places = check_linear(model, call)
    parameters = [*model.parameters()]
    with torch.inference_mode(mode=False):  # weights may be trained later
        restored = {
            layer: _restored(layer, original, parameters)
            for *_, layer, original in places if isinstance(layer, Int8Linear)
        }  # fmt: skip
    for parent, name, layer, _ in places:
        if layer in restored:
            parent._modules[name] = restored[layer]
    for parent, name, unit, original in places:
        if isinstance(unit, ActivatedInt8Linear) and original.module is not None:
            original.module.proj = unit.proj  # where an adapter may stand by now
            _move_hooks(unit, original.module)
            parent._modules[name] = original.module.train(unit.training)
    unguard(model)
    if call is not None and call.missing:
        names, count = ", ".join(map(printable, sorted(call.missing)[:3])), len(call.missing)
        call.missing.clear()
        warnings.warn(
            f"{count} of the layers that were replaced {'is' if count == 1 else 'are'} not in the "
            f"model any more, so that nothing was restored there: "
            f"{names}{', ...' if count > 3 else ''}",
            UserWarning, stacklevel=3,
        )  # fmt: skip


def check_linear(model: nn.Module, call: Call | None = None) -> list[_Place]:
    """Return the layers that `restore_linear` would remove, or raise its errors; modify nothing."""
    places = [*_places(model, call)]
    if call is not None and call.originals == "drop":
        raise RuntimeError("the layers were dropped: replace with originals='cpu' to restore them")
    for name, module in model.named_modules() if call is None else ():
        if isinstance(module, Int8Linear) and _lost_its_forward(module):
            raise RuntimeError(
                f"{name!r} is INT8 without the layer that it replaced, as layers from load_int8, "
                "after originals='drop' and in copies are: load the model's own weights again"
            )
    if places:
        check_restorable(model, ((place.original.name, place.layer) for place in places))
        _check_memory(model, places)
    return places


def _places(model: nn.Module, call: Call | None) -> Iterator[_Place]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            original = original_of(child)
            if child is None or original is None or original.module is None:
                continue
            if call is None or original.call is call:
                yield _Place(parent, name, child, original)


def _lost_its_forward(layer: Int8Linear) -> bool:
    original = original_of(layer)
    return original is None or original.module is None


def _check_memory(model: nn.Module, places: list[_Place]) -> None:
    """Raise if the codes of layers no longer belong to their originals.

    A state dict may have replaced them. Group offloading to disk replaces memory by uninitialised
    memory, which stays when its hooks are removed.
    """
    hooked = any("_diffusers_hook" in vars(module) for module in model.modules())
    for *_, layer, original in places:
        if not isinstance(layer, Int8Linear):
            continue
        if not _same(layer.weight_scale, original.scale):
            raise RuntimeError(
                f"scales of {original.name!r} have other numbers than when it was replaced, as "
                "after a state dict with other codes, or after group offloading to disk whose "
                "hooks were removed: load the model's own weights again"
            )
        if hooked and not _has_its_bias(layer, original):
            raise RuntimeError(
                f"the bias of {original.name!r} has other numbers than before, as after group "
                "offloading to disk whose hooks were removed: load the model's own weights again"
            )


def _has_its_bias(layer: Int8Linear, original: Original) -> bool:
    """Whether a bias has the numbers that were last written to it, as far as known."""
    bias, kept = layer.bias, original.bias
    if bias is None or kept is None:
        return True
    version = version_of(bias)
    if version is None or version != original.bias_version:
        return True
    return any(_same(bias, kept.to(dtype)) for dtype in (bias.dtype, *_ROUNDED))


def _same(now: Tensor, kept: Tensor | None) -> bool:
    """Whether a tensor has the numbers of a host copy, converted to its type."""
    if kept is None:
        return True
    now = now.detach().to("cpu")
    equal: bool = torch.equal(now.float().nan_to_num(), kept.to(now.dtype).float().nan_to_num())
    return equal


def _restored(
    layer: Int8Linear, original: Original, parameters: list[nn.Parameter]
) -> nn.Module:
    """Return the linear layer with the type, device, bias and hooks of the INT8 layer."""
    linear: Any = original.module
    since = original.call.set_since(parameters if layer.bias is None else [layer.bias])
    if since is not None:
        linear.weight.requires_grad_(since)
    linear.bias = None  # its type may be another than the weight's
    linear.to(layer.weight_codes.device, layer.weight_dtype)
    linear.bias = layer.bias  # one parameter, which may have been trained or moved
    linear.train(layer.training)
    _move_hooks(layer, linear)
    move_casting(layer, linear)
    original.call.missing.discard(original.name)
    restored: nn.Module = linear
    return restored


def _move_hooks(layer: nn.Module, to: nn.Module) -> None:
    """Move a layer's hooks to its original, which has none."""
    for name, hooks in vars(layer).items():
        if name.startswith(("_forward_", "_backward_")):
            setattr(to, name, hooks)  # the dicts themselves, so that handles remove them
