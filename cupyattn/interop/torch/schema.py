"""Settings of a call as arguments that an operator's schema may hold, and back.

Numbers that a graph may keep as symbols are arguments of their own. All others are one text, which
says what differs from a plain call: ``"variant='fa_int8', causal=True, quant={'pv': 'int8'}"``. An
operator takes few arguments, since torch converts each of them, several times a call.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.calls import TENSORS, Settings
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.quant.config import QuantConfig

#: Types of the first fields of `Settings`; the last two are for packed sequences.
_NUMBERS = ("float? scale", "SymInt rope_offset_q", "bool return_lse", "SymInt? max_len_q",
            "SymInt? max_len_k")  # fmt: skip
_TEXT_FIELDS = Settings._fields[len(_NUMBERS) :]
_BLOCK_MASK = _TEXT_FIELDS.index("block_mask")
_PLAIN, _PLAIN_QUANT = Settings()[len(_NUMBERS) :], QuantConfig()
_QUANT_FIELDS, _TILE_FIELDS = (
    tuple(field.name for field in fields(record)) for record in (QuantConfig, Tiles)
)
#: Block masks by the number that stands for them.
_block_masks: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Schema:
    """The arguments of one operator.

    Parameters
    ----------
    tensors : tuple of str
        Of `TENSORS`; all but q, k and v may be None.
    numbers : int
        How many fields of `Settings` come one by one, before the text of the rest.
    """

    tensors: tuple[str, ...]
    numbers: int

    def __str__(self) -> str:
        operands = [
            f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in self.tensors
        ]
        return ", ".join([*operands, *_NUMBERS[: self.numbers], "str settings"])

    def flat(self, tensors: Mapping[str, Tensor], settings: Settings) -> tuple[Any, ...]:
        """Return the arguments of a call.

        Raises
        ------
        TypeError
            For a block mask that is none.
        UnsupportedError
            For static scales that are arrays, and a block mask where torch compiles the call.
        """
        operands = [tensors.get(name) for name in self.tensors]
        return (*operands, *settings[: self.numbers], _text_of(settings))

    def given(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """Return the tensors among the arguments, those that there are, by name."""
        return {n: x for n, x in zip(self.tensors, arguments, strict=False) if x is not None}

    def settings(self, arguments: Sequence[Any]) -> Settings:
        """Return the settings among the arguments."""
        *numbers, text = arguments[len(self.tensors) :]
        rest = list(_parsed(text))
        if rest[_BLOCK_MASK] is not None:
            rest[_BLOCK_MASK] = _block_mask_of(rest[_BLOCK_MASK])
        return Settings(*numbers, *[None] * (len(_NUMBERS) - self.numbers), *rest)


ATTENTION = Schema(TENSORS[:-2], 3)
#: Of a call on q, k and v alone, which most are.
ATTENTION_QKV = Schema(TENSORS[:3], 3)
ATTENTION_VARLEN = Schema(TENSORS, 5)


def _text_of(settings: Settings) -> str:
    said = []
    x: Any
    for name, x, plain in zip(_TEXT_FIELDS, settings[len(_NUMBERS) :], _PLAIN, strict=True):
        if x is plain or (name not in ("quant", "tiles", "block_mask") and x == plain):
            continue
        if name == "quant":
            x = _quant_fields(x)
        if name == "tiles":
            x = tuple([getattr(x, field) for field in _TILE_FIELDS])
        if name == "block_mask" and not isinstance(x, int):
            x = number_of(x)
        if name == "window":
            x = tuple([_plain_number(n) for n in x])
        said.append(f"{name}={_plain_number(x)!r}")
    return ", ".join(said)


def _plain_number(x: Any) -> Any:
    """Return Python's own number for one of NumPy's."""
    return x.item() if isinstance(x, np.generic) else x


def _quant_fields(quant: QuantConfig) -> dict[str, Any]:
    if quant.static and any(hasattr(scale, "shape") for scale in quant.scales):
        raise UnsupportedError(
            "quant.scales that are arrays are not supported where torch compiles or watches a "
            "call: give floats, or scales='dynamic'"
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
    return Settings(**found)[len(_NUMBERS) :]


def _block_mask_of(number: int) -> BlockMask:
    found = _block_masks.get(number)
    if found is None:
        raise RuntimeError(
            "the block mask of this graph is no more, or belongs to another process: keep the "
            "module that has it, and trace the call again"
        )
    return found


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
