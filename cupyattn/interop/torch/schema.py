"""Convert a call's settings to arguments of an operator's schema, and back.

Numbers that a graph may keep as symbols are separate arguments. All other settings are one text of
differences from a plain call: ``"variant='fa_int8', causal=True, quant={'pv': 'int8'}"``. An
operator takes few arguments, because torch converts each of them several times a call.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.calls import TENSORS, TensorSettings
from cupyattn.interop.torch.numbered import Numbered
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.block_mask import BlockMask
from cupyattn.problem.settings import Settings
from cupyattn.quant.config import QuantConfig

#: Settings that are separate arguments; the last two are for packed sequences.
_NUMBERS = ("scale", "rope_offset_q", "return_lse", "max_len_q", "max_len_k")
#: Types of a schema by the types in `Settings`.
_TYPES = {float | None: "float?", int: "SymInt", int | None: "SymInt?", bool: "bool"}
_PLACES = tuple(map(Settings._fields.index, _NUMBERS))
#: Positions, names and defaults of the other settings, which are text.
_TEXTS = tuple(
    (place, name, plain)
    for place, (name, plain) in enumerate(Settings()._asdict().items())
    if name not in _NUMBERS
)
_QUANT_FIELDS, _TILE_FIELDS = (
    tuple(field.name for field in fields(record)) for record in (QuantConfig, Tiles)
)
#: Types of torch's symbols, types of their values, and conversions. In compiled code ``bool`` and
#: ``int`` would return the symbol.
_SYMBOLS: tuple[tuple[Any, Any, Callable[[Any], Any]], ...] = (
    (torch.SymBool, bool, lambda x: any([x])), (torch.SymInt, int, operator.index),
    (torch.SymFloat, float, float),
)  # fmt: skip
#: Block masks by their numbers in graphs.
_block_masks: Numbered[BlockMask] = Numbered()


@dataclass(frozen=True)
class Schema:
    """The arguments of one operator.

    Parameters
    ----------
    tensors : tuple of str
        Names in `TENSORS`; all but q, k and v may be None.
    numbers : int
        Number of settings that are separate arguments, before the text of the rest.
    """

    tensors: tuple[str, ...]
    numbers: int

    def __str__(self) -> str:
        operands = [
            f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in self.tensors
        ]
        types = get_type_hints(Settings)
        numbers = [f"{_TYPES[types[name]]} {name}" for name in _NUMBERS[: self.numbers]]
        return ", ".join([*operands, *numbers, "str settings"])

    def flat(self, tensors: Mapping[str, Tensor], settings: TensorSettings) -> tuple[Any, ...]:
        """Return the arguments of a call.

        Raises
        ------
        TypeError
            For an invalid block mask.
        UnsupportedError
            For static scales that are arrays, and for a block mask if torch compiles the call.
        """
        operands = [tensors.get(name) for name in self.tensors]
        call = settings.of_call
        numbers = [call[place] for place in _PLACES[: self.numbers]]
        return (*operands, *numbers, _text_of(settings))

    def given(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """Return the given tensors among the arguments, by name."""
        return {n: x for n, x in zip(self.tensors, arguments, strict=False) if x is not None}

    def settings(self, arguments: Sequence[Any]) -> TensorSettings:
        """Return the settings among the arguments."""
        numbers = arguments[len(self.tensors) : -1]
        call, deterministic, block_mask = _parsed(arguments[-1])
        own: list[Any] = [*call]
        for place, x in zip(_PLACES, numbers, strict=False):
            own[place] = x
        if block_mask is not None:
            block_mask = _block_mask_of(block_mask)
        return TensorSettings(Settings._make(own), deterministic, block_mask)


ATTENTION = Schema(TENSORS[:-2], 3)
#: The schema of a call with only q, k and v, the usual case.
ATTENTION_QKV = Schema(TENSORS[:3], 3)
#: The schema of a layer's attention in a graph.
ATTENTION_OF_LAYER = Schema(TENSORS[:-4], 3)
ATTENTION_VARLEN = Schema(tuple(n for n in TENSORS if not n.startswith("lengths")), 5)


def _text_of(settings: TensorSettings) -> str:
    said = []
    call = settings.of_call
    for place, name, plain in _TEXTS:
        x: Any = call[place]
        if x is plain:
            continue
        pair = isinstance(x, (tuple, list))
        x = tuple([_constant(n) for n in x]) if pair else _constant(x)
        if _is_same(x, plain):
            continue
        if name == "quant":
            x = _quant_fields(x)
        if name == "tiles":
            x = tuple([getattr(x, field) for field in _TILE_FIELDS])
        said.append(f"{name}={x!r}")
    if settings.deterministic:
        said.append("deterministic=True")
    if settings.block_mask is not None:
        mask = settings.block_mask
        said.append(f"block_mask={mask if isinstance(mask, int) else number_of(mask)}")
    return ", ".join(said)


def _is_same(x: Any, plain: Any) -> bool:
    """Return whether a setting has this value and type; 0 equals False, but is refused."""
    if type(x) is not type(plain):
        return False
    if isinstance(x, tuple):
        return len(x) == len(plain) and all(map(_is_same, x, plain))
    return bool(x == plain)


def _constant(x: Any) -> Any:
    """Return the Python number of a NumPy scalar, or of a symbol, which the graph then guards."""
    if isinstance(x, np.generic):
        return x.item()
    for symbol, number, to_number in _SYMBOLS:
        if type(x) in (symbol, number):  # in compiled code a symbol has Python's own type
            return to_number(x)
    return x


def _quant_fields(quant: QuantConfig) -> dict[str, Any]:
    if quant.static and any(hasattr(scale, "shape") for scale in quant.scales):
        raise UnsupportedError(
            "quant.scales that are arrays are not supported where torch compiles or watches a "
            "call: give floats, or scales='dynamic'"
        )
    # NOTE: a field may be left out if the other fields imply its value, which differs with pv.
    implied = QuantConfig(pv=quant.pv, p_type=quant.p_type)
    values = {name: getattr(quant, name) for name in _QUANT_FIELDS}
    found = {name: x for name, x in values.items() if x != getattr(implied, name)}
    of_p = {"p_type": quant.p_type} if quant.p_type != QuantConfig(pv=quant.pv).p_type else {}
    return found | ({"pv": quant.pv} if quant.pv != "16bit" else {}) | of_p


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> TensorSettings:
    """Return the settings in a text, with a block mask as its number."""
    call = ast.parse(f"Settings({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"settings must be keyword arguments, got {text!r}")
    found = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    if "quant" in found:
        found["quant"] = QuantConfig(**found["quant"])
    if "tiles" in found:
        found["tiles"] = Tiles(*found["tiles"])
    return TensorSettings.of(**found)


def _block_mask_of(number: int) -> BlockMask:
    found = _block_masks.find(number)
    if found is None:
        raise RuntimeError(
            "the block mask of this graph no longer exists, or belongs to another process: keep "
            "the module that has it, and trace the call again"
        )
    return found


def number_of(block_mask: BlockMask) -> int:
    """Return the number of a block mask in a schema, valid while the mask exists.

    Raises
    ------
    TypeError
        For an object that is not a block mask.
    UnsupportedError
        If torch compiles the call.
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
    return _block_masks.number_of(block_mask)
