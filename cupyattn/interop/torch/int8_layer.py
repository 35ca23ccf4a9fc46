"""``torch.ops.cupyattn.int8_attention``: a layer of `cupyattn.Int8Attention` as an operator.

The operator knows the layer by a number, so that one graph serves every timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cupyattn.diffusion.attention import Int8Attention
from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.bridge import (
    as_array,
    as_own_tensor,
    as_tensor,
    no_lse,
    on_device_of,
)
from cupyattn.interop.torch.calls import TensorSettings, backward_pass
from cupyattn.interop.torch.checks import check_differentiable, check_tensors
from cupyattn.interop.torch.numbered import Numbered
from cupyattn.interop.torch.ops import (
    RECEIVED,
    backward_fake,
    define,
    differentiate,
    need_lse,
    refuse_derivative,
)

#: Tensors of a call.
TENSORS = ("q", "k", "v", "mask", "rope_cos", "rope_sin")
_OPERANDS = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in TENSORS)


class Layer(Int8Attention):
    """`cupyattn.Int8Attention` with the methods that a derivative requires."""

    def check_operator(self, tensors: Mapping[str, Tensor], *, differentiable: bool) -> None:
        """Raise UnsupportedError if a call cannot be an operator."""
        if self._settings.enable_pruning:
            raise UnsupportedError(
                "token pruning has no derivative and cannot be traced: compute under "
                "torch.no_grad() and outside of torch.compile, or set enable_pruning=False"
            )
        if differentiable:
            if self._norm["qk_norm"] is not None:
                raise UnsupportedError(
                    "the derivative through qk_norm of a layer is not implemented: give qk_norm to "
                    "cupyattn.interop.torch.int8_attention, which has it"
                )
            check_differentiable("int8_attention", tensors)

    def with_lse(self, arrays: Mapping[str, Any], scores: Mapping[str, Any], **step: Any) -> Any:
        """Run a call on q, k and v at a step, with score options, ``return_lse`` and ``out``."""
        q, k, v = (arrays[name] for name in "qkv")
        found, _ = self._attend(q, k, v, self.step(**step), self._settings, dict(scores))
        return found

    def backward_settings(self, tensors: Mapping[str, Tensor], **own: Any) -> TensorSettings:
        """Return the settings of a backward pass, which are its score options."""
        q = tensors["q"]
        with on_device_of(q):
            scores = self._settings.of_scores(as_array(q), as_array(tensors["k"]), 1)
        options: dict[str, Any] = {**own, **scores, **self._where}
        return TensorSettings.of(scale=self._scale, **options)


_layers: Numbered[Layer] = Numbered()


def number_of(layer: Layer) -> int:
    """Return the number of a layer in a schema, valid while the layer exists."""
    return _layers.number_of(layer)


def _layer_of(number: int) -> Layer:
    found = _layers.find(number)
    if found is None:
        raise RuntimeError(
            "the Int8Attention of this graph no longer exists, or belongs to another process: keep "
            "the module, and trace the call again"
        )
    return found


def attend(
    function: Callable[..., Any],
    operands: Sequence[str],
    tensors: Mapping[str, Tensor],
    rope_interleaved: bool,
    **options: Any,
) -> Any:
    """Run a call with any options, outside of graphs and gradients.

    Parameters
    ----------
    function : callable
        A layer, or its `fused_cfg`.
    operands : sequence of str
        Names of the tensors that it takes by position.
    tensors : mapping of str to Tensor
        These tensors, and the given tensors named in `TENSORS`.
    rope_interleaved : bool
    **options
        All other options, as for `cupyattn.Int8Attention`.

    Returns
    -------
    Tensor, or tuple of Tensor
    """
    check_tensors("Int8Attention", tensors)
    with on_device_of(tensors["q"]):
        arrays = _arrays(tensors)
        scores = _scores(arrays, rope_interleaved)
        found = function(*(arrays[name] for name in operands), **scores, **options)
        return tuple(map(as_tensor, found)) if isinstance(found, tuple) else as_tensor(found)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: as_array(x) for name, x in tensors.items()}


def _scores(arrays: Mapping[str, Any], rope_interleaved: bool) -> dict[str, Any]:
    """Return the options that change scores, as for `cupyattn.Int8Attention`."""
    rope = (arrays["rope_cos"], arrays["rope_sin"]) if "rope_cos" in arrays else None
    return {"mask": arrays.get("mask"), "rope": rope, "rope_interleaved": rope_interleaved}


def _given(arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    return {name: x for name, x in zip(TENSORS, arguments, strict=False) if x is not None}


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = _given(arguments)
    timestep, sigma, rope_interleaved, return_lse, number = arguments[len(TENSORS) :]
    check_tensors("Int8Attention", tensors)
    o = torch.empty_like(tensors["q"], memory_format=torch.contiguous_format)
    with on_device_of(o):
        arrays = _arrays(tensors)
        options = {"return_lse": return_lse, "out": as_array(o)}
        scores = {**_scores(arrays, rope_interleaved), **options}
        found = _layer_of(number).with_lse(arrays, scores, timestep=timestep, sigma=sigma)
        return o, as_own_tensor(found[1]) if return_lse else no_lse(o)


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = _given(arguments)
    check_tensors("Int8Attention", tensors)
    q = arguments[0]
    shape = q.shape[:3] if arguments[-2] else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


def _backward(
    d_out: Tensor, o: Tensor, lse: Tensor, d_lse: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    tensors = _given(arguments)
    rope_interleaved, number = arguments[len(TENSORS) :]
    settings = _layer_of(number).backward_settings(tensors, rope_interleaved=rope_interleaved)
    return tuple(backward_pass(settings, tensors, d_out, o, lse, d_lse).values())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, rope_interleaved, return_lse, number = inputs
    _layer_of(number).check_operator(_given(inputs), differentiable=True)
    need_lse(ctx, output, return_lse=return_lse)
    ctx.save_for_backward(*output, *inputs[: len(TENSORS)])
    ctx.rest = rope_interleaved, number
    ctx.layer, ctx.others = _layer_of(number), len(inputs) - 3  # the layer is kept alive until then


def _derivative(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    o, lse, *tensors = ctx.saved_tensors
    if d_out is None:  # only lse has a gradient
        d_out = torch.zeros_like(o)
    found = _backward_operator(d_out, o, lse, d_lse, *tensors, *ctx.rest)
    return (*found, *[None] * ctx.others)


int8_attention = define(
    "int8_attention",
    f"{_OPERANDS}, SymInt? timestep, float? sigma, bool rope_interleaved, bool return_lse, "
    "int layer",
    "(Tensor o, Tensor lse)", _attention, _attention_fake,
)  # fmt: skip
_backward_operator = define(
    "int8_attention_backward",
    f"{RECEIVED}, {_OPERANDS}, bool rope_interleaved, int layer",
    "(Tensor dq, Tensor dk, Tensor dv)", _backward, backward_fake,
)  # fmt: skip
differentiate(int8_attention, _derivative, _save)
refuse_derivative(_backward_operator)
