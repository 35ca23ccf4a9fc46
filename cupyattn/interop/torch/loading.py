"""`load_int8`: load a converted checkpoint into a model, and make INT8 layers of its codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cupyattn.checkpoints.codes import scales_of, stored_codes
from cupyattn.checkpoints.conversion import layout_of
from cupyattn.checkpoints.header import FLOATS
from cupyattn.checkpoints.layout import QUANTIZATION, WEIGHT
from cupyattn.checkpoints.schemes import ROTATION, Codes, find_codes
from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.errors import UnsupportedError
from cupyattn.interop.handle import target_of, uncompiled
from cupyattn.interop.torch.activated import activated_layers, place_activated_layers
from cupyattn.interop.torch.bridge import as_array, as_tensor
from cupyattn.interop.torch.candidates import int8_layers, linear_layers, put
from cupyattn.interop.torch.guards import guard, unguard
from cupyattn.interop.torch.linear import CODES, Int8Linear
from cupyattn.interop.torch.offloading import check_not_offloaded
from cupyattn.interop.torch.originals import original_of
from cupyattn.quant.blocks import BLOCK_SIZE
from cupyattn.quant.rotation import rotated


def load_int8(
    model: Any,
    checkpoint: str | PathLike[str],
    *,
    arch: str | None = None,
    backend: str | None = None,
) -> nn.Module:
    """Load a converted checkpoint into a model, whose INT8 layers then run on its codes.

    Parameters
    ----------
    model : Module or class
        A module of the checkpoint's sizes, modified in place; or a class of diffusers or
        transformers, of which an object is made from the folder's ``config.json``, without
        allocating weights.
    checkpoint : path
        Written by `cupyattn.checkpoints.conversion`, or by another library in one of its two
        layouts.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.

    Returns
    -------
    Module
        The model. Codes, scales and all other tensors have the types of the files and are on the
        devices of its parameters, or on the CPU if those were meta tensors. A new model is in
        ``eval()`` mode.

    Raises
    ------
    OSError, ValueError
        For a checkpoint that cannot be read, or whose layers or shapes differ from the model's. The
        layers of the model then stay unchanged.
    TypeError
        If `model` is neither a module nor a class.
    UnsupportedError
        For weights in groups or in blocks of another size than 128 x 128, packed codes, zero
        points, static scales of activations, and several strategies.

    Notes
    -----
    `save_pretrained` of the model is refused, since it would write codes as weights.
    """
    with torch.inference_mode(mode=False):  # its tensors allow neither gradients nor loading
        return _loaded(model, checkpoint, {"arch": arch, "backend": backend})


def _loaded(
    given: Any, checkpoint: str | PathLike[str], options: dict[str, Any]
) -> nn.Module:
    """Load a model like `load_int8`; `options` are passed to the layers."""
    given = target_of(given)
    model = uncompiled(given)
    if isinstance(model, nn.Module):
        check_not_offloaded(model)
    source = opened(checkpoint)
    codes, parts = codes_of(source)
    made_here = isinstance(model, type)
    if made_here:
        with _parameters_without_memory():
            model = _instance(model, Path(checkpoint))
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a torch.nn.Module, or a class of diffusers or transformers, got "
            f"{type(model).__name__}"
        )
    layers = {name: layer for name, layer, _ in linear_layers(model)}
    before = dict(int8_layers(model))
    replaced: dict[int, Int8Linear] = {}
    for weight in codes:
        name = weight.removesuffix(WEIGHT)
        if name in before:
            raise ValueError(
                f"{name!r} of the model is INT8 already: " + (
                    "make the model again, and load into that" if original_of(before[name]) is None
                    else "call cupyattn.interop.restore(model) first"
                )
            )
        if name not in layers:
            raise ValueError(
                f"{source.path}: {weight!r} is codes, but {name!r} is no torch.nn.Linear of the "
                "model"
            )
        linear = layers[name]
        replaced[id(linear)] = layer_of(source, codes[weight], linear, options)
    places = put(model, replaced)
    try:
        _load_rest(model, source, parts | {one.codes for one in codes.values()})
        former = layout_of(source).dtypes
        for weight in codes:
            linear = layers[weight.removesuffix(WEIGHT)]
            layer = replaced[id(linear)]
            types = former.get(weight), source.tensors[codes[weight].scales].dtype
            layer.weight_dtype = _dtype_of(layer, *types, linear)
        units = activated_layers(model)
        places += units
        place_activated_layers(units)
        guard(model)
    except BaseException:
        for parent, name, module, _ in reversed(places):
            parent._modules[name] = module
        unguard(model)
        raise
    return model.eval() if made_here else given


# ---- codes of a checkpoint -----------------------------------------------------------------------


def opened(path: str | PathLike[str]) -> Source:
    """Return a checkpoint; if there is none, the error names the command that makes one."""
    try:
        return open_checkpoint(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no checkpoint {str(path)!r}: `cupyattn convert MODEL --output FOLDER` makes "
            "one of a model's folder"
        ) from error


def codes_of(source: Source) -> tuple[dict[str, Codes], frozenset[str]]:
    """Return the checkpoint's coded weights in the form of `Int8Linear`, by name, and their parts.

    Scales are of blocks of 128 x 128, of channels, or of the whole weight; the last becomes the
    scale of each channel.
    """
    known = layout_of(source)
    found, parts = find_codes(source, known.schemes, ours=known.ours, rotated=known.rotated)
    if not found:
        raise ValueError(f"{source.path} has no weights with scales: is it a model of INT8 codes?")
    for one in found.values():
        scheme = one.scheme
        in_blocks = scheme.strategy in ("block", "group")
        if in_blocks and (scheme.rows, scheme.columns) != (BLOCK_SIZE, BLOCK_SIZE):
            kind = f"in blocks of {one.block[0]} x {one.block[1]}"
        elif scheme.packed or one.zero_points or scheme.bits != 8:
            kind = "with zero points" if one.zero_points else "packed, or of fewer than 8 bits"
        elif scheme.activations:
            raise UnsupportedError(
                f"{source.path}: activations of {one.weight!r} must have {scheme.activations}, but "
                "products make symmetric scales in each call, one for each row (for 128 channels, "
                "if weights are in blocks): dequantize the model, and convert the result"
            )
        else:
            continue
        raise UnsupportedError(
            f"{source.path}: products take blocks of {BLOCK_SIZE} x {BLOCK_SIZE} or channels, "
            f"without zero points; the codes of {one.weight!r} are {kind}: dequantize the model, "
            "and convert the result"
        )
    return found, parts


def check_shape(source: Source, codes: Codes, linear: nn.Linear) -> None:
    """Raise ValueError unless codes have the shape of a layer's weight."""
    expected = (linear.out_features, linear.in_features)
    if codes.shape != expected:
        raise ValueError(
            f"{source.path}: {codes.weight!r} has shape {codes.shape}, the model's layer has "
            f"{expected}"
        )


def check_own(source: Source, codes: Codes, layer: Int8Linear, linear: nn.Linear) -> None:
    """Raise ValueError if codes written by cupyattn belong to another weight than the layer's.

    Our codes are at most half a step from their weight. A weight that was rounded to 16 bits is at
    most a quarter of a step further off. Other writers need not round to the nearest code. The
    first 128 rows are compared.
    """
    if not layout_of(source).ours:
        return
    rows = slice(0, BLOCK_SIZE)
    weight = linear.weight[rows].detach()
    if layer.rotate is not None:
        weight = as_tensor(rotated(as_array(weight.cpu()), layer.rotate)).to(weight.device)
    scale = layer.weight_scale[rows] if layer.strategy == "channel" else (
        layer.weight_scale[:1].repeat_interleave(BLOCK_SIZE, 1)[:, : linear.in_features]
    )  # fmt: skip
    found = layer.weight_codes[rows].float() * scale
    far = (found - weight.float()).abs() > scale
    if bool(far.any()):
        raise ValueError(
            f"{source.path}: {codes.weight!r} is of another weight, {int(far.sum()):,} of "
            f"{far.numel():,} elements are off by more than a step: give codes of this model"
        )


def layer_of(
    source: Source, codes: Codes, linear: nn.Linear, options: dict[str, Any]
) -> Int8Linear:
    """Return a layer of a checkpoint's codes, with the bias of the layer that it replaces."""
    check_shape(source, codes, linear)
    stored, scales = stored_codes(source, codes), scales_of(source, codes)
    if stored.dtype != np.int8:
        raise ValueError(
            f"{source.path}: {codes.weight!r} has codes of -128 where our rotation has the other "
            "sign, and 128 is no code: dequantize the model, and convert the result"
        )
    if codes.scheme.strategy == "tensor":
        scales = scales.repeat(linear.out_features, axis=0)
    home = _home(linear.weight.device)
    layer = Int8Linear(
        *(as_tensor(x).to(home) for x in (stored, scales)),
        rotate=codes.rotate, **options,
    )  # fmt: skip
    layer.bias = linear.bias
    return layer


def _dtype_of(
    layer: Int8Linear, former: str | None, of_scales: str, linear: nn.Linear
) -> torch.dtype:
    """Return the type of a weight before it was quantised.

    It is the recorded type, or else that of the bias, of 16-bit scales (which other writers
    store), or of the model.
    """
    if former is None and layer.bias is not None:
        return layer.bias.dtype
    if former is None and of_scales in ("F16", "BF16"):
        former = of_scales
    found: torch.dtype = getattr(torch, FLOATS.get(former or "", ""), linear.weight.dtype)
    return found


# ---- loading -------------------------------------------------------------------------------------


def _home(device: torch.device) -> torch.device:
    """Return the device for loaded tensors."""
    return torch.device("cpu") if device.type == "meta" else device


def _instance(cls: type, folder: Path) -> Any:
    """Make a model from its configuration, as its library does."""
    if hasattr(cls, "load_config") and hasattr(cls, "from_config"):  # diffusers
        config = dict(cls.load_config(folder))
        config.pop(QUANTIZATION, None)
        return cls.from_config(config)
    if hasattr(cls, "config_class"):  # transformers
        return cls(cls.config_class.from_pretrained(folder))
    raise TypeError(
        f"{cls.__name__} cannot be made by a config.json: give a class of diffusers or "
        "transformers, or a module"
    )


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Give modules made within this context meta tensors as parameters, and real buffers."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _load_rest(model: nn.Module, source: Source, loaded: frozenset[str]) -> None:
    """Load all tensors except `loaded`; the remaining tensors must match the model's one to one."""
    own: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    codes = {id(layer) for layer in model.modules() if isinstance(layer, Int8Linear)}
    filled = {
        f"{name}.{buffer}"
        for name, layer in model.named_modules(remove_duplicate=False)
        if id(layer) in codes
        for buffer in (CODES, "weight_scale", ROTATION)
    }
    rest = [name for name in source.tensors if name not in loaded]
    # A parameter of several names is in the files under one of them.
    tied = {id(own[name]): name for name in rest if name in own}
    places = {name: tied[id(x)] for name, x in own.items() if id(x) in tied}
    missing = sorted(set(own) - filled - set(places))
    unexpected = sorted(set(rest) - set(own))
    if missing or unexpected:
        said = [f"the model's {missing[0]!r} is not there"] if missing else []
        said += [f"the model has no {unexpected[0]!r}"] if unexpected else []
        raise ValueError(
            f"{source.path} is of another model: {' and '.join(said)} ({len(missing)} missing, "
            f"{len(unexpected)} unexpected)"
        )
    state: dict[str, Tensor] = {}
    for name in rest:
        tensor = as_tensor(source.read(name))
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{source.path}: {name!r} has shape {tuple(tensor.shape)}, the model's has "
                f"{tuple(own[name].shape)}"
            )
        state[name] = tensor.to(_home(own[name].device))
    state = {name: state[file_name] for name, file_name in places.items()}
    model.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "tie_weights"):  # transformers: one parameter again
        model.tie_weights()
