"""Keep projections of queries, keys and values INT8 when diffusers fuses them.

``fuse_qkv_projections()`` of a model lets each attention module make one linear layer of three.
Without this module it would read the dequantised weights, and the fused layer would have 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cupyattn.interop.torch.linear import Int8Linear, dequantised
from cupyattn.interop.torch.offloading import check_readable
from cupyattn.interop.torch.originals import keep_original, original_of
from cupyattn.quant.blocks import BLOCK_SIZE

_FUSE = "fuse_projections"
#: Fused layers of diffusers, each with the layers that it replaces.
_PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
_NAMES = {name for parts in _PARTS.values() for name in parts}


def allow_fusing(model: nn.Module) -> None:
    """Let attention modules that have INT8 projections fuse them to INT8 layers.

    Parameters
    ----------
    model : Module
        Its attention modules get an attribute that hides their class's method.
    """
    for module in model.modules():
        if callable(getattr(type(module), _FUSE, None)) and _projections(module):
            setattr(module, _FUSE, functools.partial(_fuse, module))


def forget_fusing(model: nn.Module) -> None:
    """Undo `allow_fusing` of modules that have no INT8 projections left.

    Parameters
    ----------
    model : Module
    """
    for module in model.modules():
        found = vars(module).get(_FUSE)
        if getattr(found, "func", None) is _fuse and not _projections(module):
            delattr(module, _FUSE)


def _projections(module: nn.Module) -> dict[str, Int8Linear]:
    """Return the INT8 projections of an attention module, including those under adapters."""
    found = {}
    for name in _NAMES & module._modules.keys():
        child = module._modules[name]
        while isinstance(base := getattr(child, "base_layer", None), nn.Module):  # of PEFT
            child = base
        if isinstance(child, Int8Linear):
            found[name] = child
    return found


def _fuse(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the class's method on the original weights, then let its layers become INT8.

    As without INT8, an adapter of a projection is not fused.
    """
    with torch.inference_mode(mode=False):  # its tensors allow neither gradients nor loading
        return _fused_here(module, *args, **kwargs)


def _fused_here(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own, before = _projections(module), dict(module._modules)
    module._modules.update({name: as_linear(layer) for name, layer in own.items()})
    try:
        result = getattr(type(module), _FUSE)(module, *args, **kwargs)
    finally:
        module._modules.update({name: before[name] for name in own})
    for name, parts in _PARTS.items():
        made = module._modules.get(name)
        if type(made) is nn.Linear and made is not before.get(name) and set(parts) <= own.keys():
            module._modules[name] = _fused(made, name, [own[part] for part in parts])
    return result


def as_linear(layer: Int8Linear) -> nn.Linear:
    """Return a linear layer with the original weight of an INT8 layer, if that is known."""
    check_readable(layer, layer.weight_codes)
    original = original_of(layer)
    module: Any = None if original is None else original.module
    if module is None:
        own = layer.weight_codes, layer.weight_scale, layer.weight_dtype, layer.rotate
        weight = dequantised(*own)
    else:
        weight = module.weight.detach().to(layer.weight_codes.device, layer.weight_dtype)
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, len(weight), bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = layer.bias
    return linear


def _fused(linear: nn.Linear, name: str, parts: Sequence[Int8Linear]) -> Int8Linear:
    """Return the INT8 layer for a fused layer, with its parts' codes if these fill blocks."""
    first = parts[0]
    alike = len({part.rotate for part in parts}) == 1
    by_channel = alike and {part.strategy for part in parts} == {"channel"}
    in_blocks = {part.strategy for part in parts} == {"block"}
    whole = all(len(part.weight_codes) % BLOCK_SIZE == 0 for part in parts[:-1])
    if by_channel or (in_blocks and whole):
        codes = torch.cat([part.weight_codes for part in parts])
        scales = torch.cat([part.weight_scale for part in parts])
        layer = Int8Linear(
            codes, scales, linear.bias, rotate=first.rotate, arch=first.arch, backend=first.backend
        )
        layer.weight_dtype = first.weight_dtype
    else:
        layer = Int8Linear.from_linear(
            linear, strategy=first.strategy, rotate=first.rotate, arch=first.arch,
            backend=first.backend,
        )  # fmt: skip
    original = original_of(first)
    if original is not None:
        home = original.name.rpartition(".")[0]
        keep_original(layer, original.call, f"{home}.{name}" if home else name, linear)
    layer.train(linear.training)
    return layer
