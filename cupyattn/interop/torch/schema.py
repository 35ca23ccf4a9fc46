"""Settings of a call as arguments that an operator's schema may hold, and back.

Numbers that a graph may keep as symbols are arguments of their own. All others are one text, which
says what differs from a plain call: ``"variant='fa_int8', causal=True, quant={'pv': 'int8'}"``.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cupyattn.block_mask import BlockMask
from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.calls import TENSORS, Settings
from cupyattn.quant import QuantConfig
from cupyattn.tiles import Tiles

OPERANDS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSORS)
#: The first fields of `Settings`, and a text for the rest.
SETTINGS = (
    "float? scale, SymInt[] window, float softcap, SymInt rope_offset_q, bool return_lse, "
    "SymInt? max_len_q, SymInt? max_len_k, str settings"
)
#: How many these are.
_NUMBERS = SETTINGS.count(",")
_TEXT_FIELDS = Settings._fields[_NUMBERS:]
_PLAIN, _PLAIN_QUANT = Settings(), QuantConfig()
_QUANT_FIELDS, _TILE_FIELDS = (
    tuple(field.name for field in fields(record)) for record in (QuantConfig, Tiles)
)
#: Block masks by the number that stands for them.
_block_masks: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()


def flat(tensors: Mapping[str, Tensor], settings: Settings) -> tuple[Any, ...]:
    """Return the arguments of ``torch.ops.cupyattn.attention``.

    Raises
    ------
    TypeError
        For a block mask that is none.
    UnsupportedError
        For static scales that are arrays, and a block mask where torch compiles the call.
    """
    operands = [tensors.get(name) for name in TENSORS]
    return (*operands, *settings[:_NUMBERS], _text_of(settings))


def given(arguments: Sequence[Any], names: Sequence[str] = TENSORS) -> dict[str, Tensor]:
    """Return the tensors among an operator's arguments, those that there are, by name."""
    return {name: x for name, x in zip(names, arguments, strict=False) if x is not None}


def settings_of(arguments: Sequence[Any]) -> Settings:
    """Return the settings that `flat` was given, of the arguments behind the tensors."""
    scale, window, *numbers, text = arguments
    rest = list(_parsed(text))
    if rest[_BLOCK_MASK] is not None:
        rest[_BLOCK_MASK] = _block_masks[rest[_BLOCK_MASK]]
    return Settings(scale, tuple(window), *numbers, *rest)


def block_mask_of(arguments: Sequence[Any]) -> BlockMask | None:
    """Return the block mask that the arguments behind the tensors name."""
    number = _parsed(arguments[-1])[_BLOCK_MASK]
    return None if number is None else _block_masks[number]


_BLOCK_MASK = _TEXT_FIELDS.index("block_mask")


def _text_of(settings: Settings) -> str:
    said = []
    x: Any
    for name, x, plain in zip(_TEXT_FIELDS, settings[_NUMBERS:], _PLAIN[_NUMBERS:], strict=True):
        if x is plain or (name not in ("quant", "tiles", "block_mask") and x == plain):
            continue
        if name == "quant":
            x = _quant_fields(x)
        if name == "tiles":
            x = tuple([getattr(x, field) for field in _TILE_FIELDS])
        if name == "block_mask" and not isinstance(x, int):
            x = number_of(x)
        said.append(f"{name}={x!r}")
    return ", ".join(said)


def _quant_fields(quant: QuantConfig) -> dict[str, Any]:
    if quant.static and any(hasattr(scale, "shape") for scale in quant.scales):
        raise UnsupportedError(
            "quant.scales that are arrays are not supported where torch compiles or "
            "differentiates: give floats, or scales='dynamic'"
        )
    values = {name: getattr(quant, name) for name in _QUANT_FIELDS}
    return {name: x for name, x in values.items() if x != getattr(_PLAIN_QUANT, name)}


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Any, ...]:
    """Return the fields that a text says, a block mask as its number."""
    call = ast.parse(f"Settings({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"settings must be keyword arguments, got {text!r}")
    found = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    if "quant" in found:
        found["quant"] = QuantConfig(**found["quant"])
    if "tiles" in found:
        found["tiles"] = Tiles(*found["tiles"])
    return Settings(**found)[_NUMBERS:]


def number_of(block_mask: BlockMask) -> int:
    """Return what stands for a block mask in a schema, as long as the mask lives.

    Raises
    ------
    TypeError
        For what is no block mask.
    UnsupportedError
        Where torch compiles the call.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must be a cupyattn.BlockMask or None, got {type(block_mask).__name__}"
        )
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "a block_mask cannot go into a graph as an argument of a function: make a "
            "cupyattn.interop.torch.Attention(block_mask=...) outside, and call that"
        )
    _block_masks[id(block_mask)] = block_mask
    return id(block_mask)
