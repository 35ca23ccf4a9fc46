"""Files of ComfyUI: INT8 weights, rotated or not, by the settings ``X.comfy_quant`` of each layer.

A layer X has codes ``X.weight`` and scales ``X.weight_scale``. Its settings are JSON in the bytes
of ``X.comfy_quant``, or under its name in the header's ``_quantization_metadata``.
With ``convrot``, groups of ``convrot_groupsize`` neighbouring channels are rotated. The matrix is a
Kronecker power, over the root of the group:
``[[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]``.

The matrix is from ``tensor/int8_utils.py`` of Comfy-Org/comfy-kitchen at
7d86acf60c88fd6c3c733c0e54db22ef74b8d77f, and the codes from ``backends/eager/quantization.py``.
Settings and names of a layer are from ``comfy/ops.py`` (`_load_quantized_module`) of
Comfy-Org/ComfyUI at 5522e4fdda4249ac3b5331e55cc9df6135dcbd83.
Settings in the header are from ``comfy/utils.py`` (`convert_old_quants`) of Comfy-Org/ComfyUI at
09708eae709a992a5684bed3595ce4d07e705b4e.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyattn.checkpoints.shards import Array, Source
from cupyattn.errors import UnsupportedError, shown
from cupyattn.quant.rotation import CONTIGUOUS, group_of, rotation_of, spread

#: The tensor of a layer's settings, and the entry of a header that has them for all layers.
SETTINGS, _IN_HEADER = "comfy_quant", "_quantization_metadata"
#: The format that is read, of one scale or of channels.
_FORMAT = "int8_tensorwise"
#: A tensor that changes the input of a layer.
_OF_INPUT = "pre_quant_scale"

Settings = Mapping[str, Any]


def settings_of(source: Source) -> dict[str, Settings]:
    """Return a ComfyUI file's settings of its layers, by name; empty for other files.

    Raises
    ------
    ValueError
        If something is damaged.
    """
    found: dict[str, Settings] = {}
    for header in getattr(source, "headers", {}).values():
        if _IN_HEADER in header.metadata:
            told = _parsed(source, _IN_HEADER, header.metadata[_IN_HEADER])
            layers = told.get("layers")
            each = layers.values() if isinstance(layers, dict) else [None]
            if not all(isinstance(one, dict) for one in each):
                raise ValueError(f"{source.path}: {_IN_HEADER!r} has no settings of layers")
            found |= told["layers"]
    for name, info in source.tensors.items():
        layer, _, last = name.rpartition(".")
        if last == SETTINGS:
            if info.dtype != "U8":
                raise ValueError(f"{source.path}: {name!r} must be the bytes of a text, U8")
            found[layer] = _parsed(source, name, bytes(source.read(name).reshape(-1)))
    return found


def check_format(source: Source, layer: str, settings: Settings) -> None:
    """Raise UnsupportedError for another format of a layer than `int8_tensorwise`."""
    form = settings.get("format")
    if form != _FORMAT:
        raise UnsupportedError(
            f"{source.path}: the format {shown(form)} of {layer!r} is not read, only {_FORMAT!r}"
        )


def rotation_told(source: Source, layer: str, settings: Settings, channels: int) -> str | None:
    """Return how the weight of a layer is rotated, once all of its settings are understood.

    Raises
    ------
    ValueError
        For a switch that is neither true nor false, and for `params` of another kind.
    UnsupportedError
        For other formats than ``int8_tensorwise``, groups of another size, and factors of the
        input.
    """
    check_format(source, layer, settings)
    if f"{layer}.{_OF_INPUT}" in source.tensors:
        raise UnsupportedError(
            f"{source.path}: {f'{layer}.{_OF_INPUT}'!r} is not read: factors of a layer's input"
        )
    nested = settings.get("params") or {}
    if not isinstance(nested, dict):
        raise ValueError(
            f"{source.path}: params of {layer!r} must be an object, got {shown(nested)}"
        )
    told = {**nested, **settings}
    if not _switch(source, layer, told, "convrot"):
        return None
    size = told.get("convrot_groupsize", 256)
    if rotation_of(CONTIGUOUS, channels) is None or size != group_of(channels) or size == 128:
        raise UnsupportedError(
            f"{source.path}: {layer!r} is rotated in groups of {shown(size)}, and has {channels} "
            "channels: groups of 256 are read, and of 64 where 128 does not divide the channels"
        )
    return CONTIGUOUS


def activations_told(source: Source, layer: str, settings: Settings) -> str:
    """Return a demand on activations that products of INT8 codes do not meet, or ""."""
    if _switch(source, layer, settings, "full_precision_matrix_mult"):
        return "16 bits"
    return "static scales" if f"{layer}.input_scale" in source.tensors else ""


def our_codes(codes: Array) -> Array:
    """Return codes of ComfyUI's rotation in the places and with the signs of our rotation.

    Parameters
    ----------
    codes : array, (out, in), int8
        Codes of a weight that was rotated in groups of neighbouring channels.

    Returns
    -------
    array, (out, in), int8 or int16
        The codes of `cupyattn.quant.rotated` (weight, "hadamard_contiguous"). int16 if a code -128
        changes its sign.

    Notes
    -----
    In base 4, a digit of a number's place in its group is 0, 2, 1 or 3 there where it is 0, 1, 2 or
    3 here, and each digit 3 changes its sign.
    """
    group = group_of(codes.shape[1])
    place = np.arange(group)
    low, high = place & 0x55, place >> 1 & 0x55
    threes = np.bitwise_count(low & high) % 2 == 1
    moved = codes.reshape(len(codes), codes.shape[1] // group, group)[..., low << 1 | high]
    wide = np.where(threes, -moved.astype(np.int16), moved).reshape(codes.shape)
    return spread(wide if wide.size and wide.max() > 127 else wide.astype(np.int8))


def _switch(source: Source, layer: str, settings: Settings, name: str) -> bool:
    """Return a setting of a layer that is on or off, off if it is left out."""
    value = settings.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(
            f"{source.path}: {name} of {layer!r} must be true or false, got {shown(value)}"
        )
    return value


def _parsed(source: Source, name: str, text: str | bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
        if not isinstance(told, dict):
            raise ValueError("it is no object")
        return told
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source.path}: {name!r} holds no settings: {error}") from error
