"""Recognise hooks of accelerate and diffusers that move or convert weights in each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: Names of the hooks of diffusers.
_GROUPS, CASTING = "group_offloading", "layerwise_casting"
_WAY_OF_ACCELERATE = (
    "pipe.remove_all_hooks() or accelerate.hooks.remove_hook_from_module(model, recurse=True)"
)
_WAY_OF_GROUPS = (
    "diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook("
    f"'{_GROUPS}', recurse=True)"
)


def hooks_of_diffusers(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of diffusers that a module has now, by their names."""
    registry = vars(module).get("_diffusers_hook")
    return {} if registry is None else dict(registry.hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether torch calls hooks before or after a module, or in its backward pass."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip


def is_hooked(module: nn.Module) -> bool:
    """Whether diffusers or accelerate hook a module; diffusers leaves an empty registry behind."""
    home = vars(module)  # NOTE: no helper, because every pass checks this for all modules
    registry = home.get("_diffusers_hook")
    return "_hf_hook" in home or (registry is not None and bool(registry.hooks))


def has_own_forward(module: nn.Module) -> bool:
    """Whether a library replaced a module's ``forward``.

    Removed hooks leave the method of the class as an attribute, which does not count.
    """
    found = vars(module).get("forward")
    return found is not None and getattr(found, "__func__", None) is not type(module).forward


def check_readable(layer: nn.Module, codes: Tensor) -> None:
    """Raise if hooks have moved the codes of an INT8 layer out of their tensor.

    Parameters
    ----------
    layer : Int8Linear
    codes : Tensor
        The layer's codes.

    Raises
    ------
    RuntimeError
    """
    if codes.is_meta and "_hf_hook" in vars(layer):
        raise RuntimeError(
            "the weight of this Int8Linear is offloaded, its codes are on the meta device: "
            "remove the offloading hooks first, or read it within a call of the layer"
        )
    hook = hooks_of_diffusers(layer).get(_GROUPS)
    if hook is not None and hook.group.offload_to_disk_path is not None:
        raise RuntimeError(
            "the weight of this Int8Linear is offloaded to disk by diffusers: read it before "
            "enable_group_offload()"
        )


def home_of(layer: nn.Module, codes: Tensor) -> torch.device:
    """Return the device of an INT8 layer's codes during a call.

    Parameters
    ----------
    layer : Int8Linear
    codes : Tensor
        The layer's codes, on the meta device if accelerate offloads them.
    """
    return (device_of_hooks(layer) if codes.is_meta else None) or codes.device


def device_of_hooks(module: nn.Module) -> torch.device | None:
    """Return the device to which accelerate's hooks move a module before a call, or None."""
    for hook in _hooks_of_accelerate(module):
        device = getattr(hook, "execution_device", None)
        if isinstance(device, torch.device | str | int):
            return torch.device(device)
    return None


def offload_codes(layer: nn.Module, hook: Any) -> None:
    """Let accelerate offload the buffers of an INT8 layer, including its codes, with its bias.

    diffusers asks for hooks without ``offload_buffers``. They would keep all codes on the device
    where the layer is called.

    Parameters
    ----------
    layer : Int8Linear
    hook : ModelHook
        The hook that accelerate has just put on the layer; may be modified.
    """
    for one in _hooks_in(hook):
        if not getattr(one, "offload", False) or getattr(one, "offload_buffers", True):
            continue
        buffers = dict(layer.named_buffers(recurse=False))
        if isinstance(one.weights_map, dict):  # the hook made it from parameters only
            one.weights_map |= {name: x.to("cpu") for name, x in buffers.items()}
        if all(name in one.weights_map for name in buffers):
            one.offload_buffers = True
            layer._buffers.update({name: x.to("meta") for name, x in buffers.items()})


def check_not_offloaded(
    model: nn.Module, way: str = "replace first, then offload"
) -> None:
    """Raise if the weights of a model are moved or converted in each call.

    Parameters
    ----------
    model : Module
    way : str
        Advice on offloading, for the message.

    Raises
    ------
    ValueError
        For weights that are offloaded layer by layer or in groups, or converted by layerwise
        casting. A hook that moves the whole model, as of ``enable_model_cpu_offload``, is fine.
    """
    for name, module in model.named_modules():
        where = repr(name) if name else "the model"
        if CASTING in hooks_of_diffusers(module):
            raise ValueError(
                f"the weights of {where} are cast by layerwise casting of diffusers, which has "
                "rounded them: load the model again, replace first, then cast"
            )
        library = "accelerate" if _is_placed(module) else ""
        if _GROUPS in hooks_of_diffusers(module):
            library = "group offloading of diffusers"
        if library:
            raise ValueError(
                f"the weights of {where} are offloaded by {library}: {way}"
            )


def check_restorable(model: nn.Module, layers: Iterator[tuple[str, nn.Module]]) -> None:
    """Raise if hooks prevent restoring the originals of some layers.

    Parameters
    ----------
    model : Module
    layers : iterator of (str, Module)
        Names and layers to remove from it.

    Raises
    ------
    RuntimeError
    """
    for name, module in model.named_modules():
        hook = hooks_of_diffusers(module).get(_GROUPS)
        if hook is None:
            continue
        where = repr(name) if name else "the model"
        if hook.group.offload_to_disk_path is not None:
            raise RuntimeError(
                f"the weights of {where} are offloaded to disk by diffusers, and are lost to the "
                "model once its hooks are removed: call restore() before enable_group_offload(), "
                "or load the model again"
            )
        raise RuntimeError(
            f"the weights of {where} are offloaded in groups by diffusers: remove the offloading "
            f"hooks first, with {_WAY_OF_GROUPS}"
        )
    offloaded = any(map(_is_placed, model.modules()))
    for name, layer in layers:
        on_meta = any(x.is_meta for x in (*layer.parameters(), *layer.buffers()))
        if on_meta and not offloaded:
            raise RuntimeError(
                f"{name!r} is on the meta device, so it has no numbers any more: "
                "make the model again, or call restore() before to('meta')"
            )
        if _is_placed(layer) or on_meta:
            raise RuntimeError(
                f"the weights of {name!r} are offloaded by accelerate: remove the offloading hooks "
                f"first, with {_WAY_OF_ACCELERATE}"
            )
        if has_own_forward(layer) and CASTING not in hooks_of_diffusers(layer):
            raise RuntimeError(
                f"{name!r} has its own forward, which another library has put there: remove it "
                "first"
            )


def move_casting(layer: nn.Module, to: nn.Module) -> None:
    """Apply the layerwise casting of one layer, if diffusers casts it, to another layer."""
    hook = hooks_of_diffusers(layer).get(CASTING)
    if hook is not None:
        from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook

        apply_layerwise_casting_hook(to, hook.storage_dtype, hook.compute_dtype, hook.non_blocking)


def _is_placed(module: nn.Module) -> bool:
    """Whether a hook of accelerate moves a module's tensors or inputs in each call."""
    return any(hasattr(one, "weights_map") for one in _hooks_of_accelerate(module))


def _hooks_of_accelerate(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks that accelerate has put on a module."""
    return _hooks_in(vars(module).get("_hf_hook"))


def _hooks_in(hook: Any) -> tuple[Any, ...]:
    """Return the hooks that one of accelerate holds, or the hook itself."""
    return tuple(getattr(hook, "hooks", (hook,)))
