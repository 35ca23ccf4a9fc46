"""``torch.ops.cupyattn``: the calls as torch's dispatcher knows them.

Each operator has kernels for CPU and CUDA, one for fake tensors, which says shapes alone, and a
derivative: `torch.compile` keeps them in its graph, and autograd goes through them. Arguments are
what a schema may hold; `flat` and `Settings` go back and forth.
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
from cupyattn.interop.torch.calls import TENSORS, Settings, backward_pass, forward
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.quant import QuantConfig
from cupyattn.tiles import Tiles

_OPERANDS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSORS)
#: `Settings`, field by field.
_SETTINGS = (
    "str variant, str accuracy, float? scale, bool causal, str causal_align, SymInt[] window, "
    "float softcap, bool rope_interleaved, SymInt rope_offset_q, float qk_norm_eps, str layout, "
    "bool return_lse, bool deterministic, bool check_finite, SymInt? max_len_q, "
    "SymInt? max_len_k, str quant, int[] tiles, int? block_mask, str? arch, str? backend"
)
#: Operators of every module here.
library = torch.library.Library("cupyattn", "DEF")
library.define(f"attention({_OPERANDS}, {_SETTINGS}) -> (Tensor o, Tensor lse)")
library.define(
    f"attention_backward(Tensor d_out, Tensor o, Tensor lse, {_OPERANDS}, {_SETTINGS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)

# ---- arguments of a schema -----------------------------------------------------------------------

_QUANT_FIELDS = tuple(field.name for field in fields(QuantConfig))
_TILE_FIELDS = tuple(field.name for field in fields(Tiles))
_BLOCK_MASK = Settings._fields.index("block_mask")
_RETURN_LSE = Settings._fields.index("return_lse")
#: Block masks by the number that stands for them in a schema.
_block_masks: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()


def flat(tensors: Mapping[str, Tensor], settings: Settings) -> tuple[Any, ...]:
    """Return the arguments of ``torch.ops.cupyattn.attention``.

    Raises
    ------
    UnsupportedError
        For static scales that are arrays.
    """
    tiles, block_mask = settings.tiles, settings.block_mask
    plain = {
        **settings._asdict(),
        "quant": _text_of(settings.quant),
        "tiles": [] if tiles is None else [getattr(tiles, name) for name in _TILE_FIELDS],
        "block_mask": block_mask if isinstance(block_mask, int) else number_of(block_mask),
    }
    return (*[tensors.get(name) for name in TENSORS], *plain.values())


def _settings(arguments: tuple[Any, ...]) -> Settings:
    """Return the settings that `flat` was given, of its result without the tensors."""
    plain = dict(zip(Settings._fields, arguments, strict=True))
    tiles = plain["tiles"]
    plain |= {
        "window": tuple(plain["window"]),
        "quant": _quant_of(plain["quant"]),
        "tiles": Tiles(*tiles) if tiles else None,
        "block_mask": _block_mask_of(arguments),
    }
    return Settings(**plain)


def _block_mask_of(arguments: tuple[Any, ...]) -> BlockMask | None:
    number = arguments[_BLOCK_MASK]
    return None if number is None else _block_masks[number]


def _text_of(quant: QuantConfig | None) -> str:
    if quant is None:
        return ""
    if quant.static and any(hasattr(scale, "shape") for scale in quant.scales):
        raise UnsupportedError(
            "quant.scales that are arrays are not supported where torch compiles or "
            "differentiates: give floats, or scales='dynamic'"
        )
    return ", ".join([f"{name}={getattr(quant, name)!r}" for name in _QUANT_FIELDS])


@functools.lru_cache(maxsize=64)
def _quant_of(text: str) -> QuantConfig | None:
    if not text:
        return None
    call = ast.parse(f"QuantConfig({text})", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"quant must be keyword arguments of QuantConfig, got {text!r}")
    return QuantConfig(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


def number_of(block_mask: BlockMask | None) -> int | None:
    """Return what stands for a block mask in a schema, as long as the mask lives.

    Raises
    ------
    TypeError
        For what is no block mask.
    UnsupportedError
        Where torch compiles the call.
    """
    if block_mask is None:
        return None
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


# ---- attention -----------------------------------------------------------------------------------


def given(arguments: tuple[Any, ...], names: Sequence[str] = TENSORS) -> dict[str, Tensor]:
    """Return the tensors among an operator's arguments, those that there are, by name."""
    return {name: x for name, x in zip(names, arguments, strict=False) if x is not None}


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = given(arguments)
    o, lse = forward(_settings(arguments[len(TENSORS) :]), tensors)
    return o, _no_lse(o) if lse is None else lse


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = given(arguments)
    settings = Settings(*arguments[len(TENSORS) :])
    check_tensors("attention", tensors)
    q = tensors["q"]
    o = q.new_empty(q.shape)
    if not settings.return_lse:
        return o, _no_lse(o)
    if "cu_seqlens_q" in tensors:
        shape = [q.shape[1], q.shape[0]]
    else:
        length = 2 if settings.layout == "BHSD" else 1
        shape = [q.shape[0], q.shape[3 - length], q.shape[length]]
    return o, q.new_empty(shape, dtype=torch.float32)


def _no_lse(o: Tensor) -> Tensor:
    return o.new_empty((0,), dtype=torch.float32)


def _backward(d_out: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return backward_pass(_settings(arguments[len(TENSORS) :]), given(arguments), d_out, o, lse)


def _backward_fake(d_out: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, lse = output
    ctx.rest = inputs[len(TENSORS) :]
    if not ctx.rest[_RETURN_LSE]:
        raise UnsupportedError("the derivative takes lse: give return_lse=True")
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(o, lse, *inputs[: len(TENSORS)])
    ctx.block_mask = _block_mask_of(ctx.rest)  # kept alive until then


def _derivative(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    o, lse, *tensors = ctx.saved_tensors
    found = torch.ops.cupyattn.attention_backward(d_out, o, lse, *tensors, *ctx.rest)
    return (*found, *[None] * (len(TENSORS) - 3 + len(ctx.rest)))


def refuse_derivative(operator: str) -> None:
    """Let an operator's derivative raise UnsupportedError, in place of passing nothing on."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"the derivative for '{operator}' is not implemented")

    torch.library.register_autograd(operator, refuse, lib=library)


for _key in ("CPU", "CUDA"):
    library.impl("attention", _attention, _key)
    library.impl("attention_backward", _backward, _key)
torch.library.register_fake("cupyattn::attention", _attention_fake, lib=library)
torch.library.register_fake("cupyattn::attention_backward", _backward_fake, lib=library)
torch.library.register_autograd(
    "cupyattn::attention", _derivative, setup_context=_save, lib=library
)
refuse_derivative("cupyattn::attention_backward")
