"""Run an INT8 layer with its epilogue, or several layers of one input, in one call.

`cupyattn.interop.torch.epilogues` replaces ``int8_linear`` by these operators, because a call costs
more host time than its launches. Their derivatives are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.bridge import Tensors
from cupyattn.interop.torch.ops import autograd_state, define, differentiate
from cupyattn.ops.layers import LAYERS, LayersSettings, steps_before
from cupyattn.ops.norm_quant import NormQuantSettings
from cupyattn.ops.operation import run
from cupyattn.plans.norm_quant import VECTORS
from cupyattn.quant.activation import columns_of

#: Operands of a product, except codes and scales of x, by the names of the plan's buffers.
OPERANDS = ("b", "b_scales", "bias", "residual", "gate", "residual_below")
#: These, and the tensor that receives the result.
_TENSORS = (*OPERANDS, "c")
_OPERANDS = len(OPERANDS)


def multiply(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    activations: tuple[str, ...],
    arch: str | None,
    backend: str | None,
    rotate: str | None = None,
    smooth: Tensor | None = None,
    right: Tensor | None = None,
    *,
    below: Tensor | None = None,
    before: NormQuantSettings | None = None,
    vectors: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Quantise an input, and run the layers that read it.

    Parameters
    ----------
    x : Tensor, (..., in)
    layers : sequence
        For each layer its weight, the weight's scales, bias, residual, gate, further rows of the
        residual, and the tensor that receives the result; None, or left out at the end, where there
        is no such tensor.
    activations : tuple of str
        Activation of each layer; "" for none.
    arch, backend : str, optional
        As for `Int8Linear`.
    rotate : {None, "hadamard"}
        As for `cupyattn.norm_quant`.
    smooth : Tensor, (in,), float32, optional
        What rows are multiplied by before they are rotated.
    right : Tensor, (..., others), optional
        Channels after the channels of x, for layers by channel without `rotate` and `smooth`.
    below : Tensor, optional
        Rows after the rows of x, with `before`.
    before : NormQuantSettings, optional
        In place of both: the steps on rows before they are quantised.
    vectors : sequence
        Tensors of that pass, in the order of `cupyattn.plans.norm_quant.VECTORS`.

    Returns
    -------
    list of Tensor
        The result of each layer, in torch's memory, which its CUDA graphs can free.
    """
    dtype = str(x.dtype).removeprefix("torch.")
    if before is None:
        before, vectors = steps_before(rotate, smooth is not None), (smooth,)
    settings = LayersSettings(dtype, activations, arch, backend, before)
    found: list[Tensor] = run(
        LAYERS, settings, named(x, layers, vectors, right=right, below=below), library=_OF_LAYERS
    )
    return found


def named(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    vectors: Sequence[Tensor | None] = (),
    **further: Tensor | None,
) -> dict[str, Tensor]:
    """Return the tensors of `multiply` by the names of the plan's buffers."""
    tensors = {"x": x}
    given = [*further.items(), *zip(VECTORS, vectors, strict=False)]
    tensors |= {name: vector for name, vector in given if vector is not None}
    for number, layer in enumerate(layers):
        for name, tensor in zip(_names(number), layer, strict=False):
            if tensor is not None:
                tensors[name] = tensor
    return tensors


_OF_LAYERS = Tensors()
#: Arguments of `multiply`, by their places and by their names.
Multiplied = tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def _names(number: int) -> tuple[str, ...]:
    """Return the names of a layer's tensors in a call, by the layer's number."""
    return tuple(f"{name}{number}" for name in _TENSORS)


def results_of(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    activations: Sequence[str],
    below: Tensor | None = None,
) -> list[Tensor]:
    """Return empty tensors for the layers' results; fake tensors if the operands are fake."""
    rows = x.shape[:-1]
    if below is not None:
        rows = (*rows[:-1], rows[-1] + below.shape[-2])
    weights = (layer[0] for layer in layers if layer[0] is not None)
    return [
        x.new_empty((*rows, columns_of(weight.shape[0], activation)))
        for weight, activation in zip(weights, activations, strict=True)
    ]


class Layer(NamedTuple):
    """The arguments of ``int8_layer``, in their order."""

    x: Any
    weight: Any
    weight_scale: Any
    bias: Any
    residual: Any
    gate: Any
    activation: str
    arch: str | None
    backend: str | None
    rotate: str | None = None
    smooth: Any = None
    right: Any = None
    residual_below: Any = None

    @property
    def multiplied(self) -> Multiplied:
        """The arguments of `multiply`."""
        own = self.weight, self.weight_scale, self.bias, self.residual, self.gate
        where = self.arch, self.backend, self.rotate, self.smooth, self.right
        return (self.x, [(*own, self.residual_below)], (self.activation,), *where), {}


def run_layer(*arguments: Any) -> Tensor:
    """Run ``int8_layer`` without the operator: the same arguments."""
    given, named = Layer(*arguments).multiplied
    (y,) = multiply(*given, **named)
    return y


def _layer_fake(*arguments: Any) -> Tensor:
    call = Layer(*arguments)
    (y,) = results_of(call.x, ((call.weight,),), (call.activation,))
    return y


class Layers(NamedTuple):
    """The arguments of ``int8_layers``, in their order."""

    x: Any
    weights: Sequence[Any]
    weight_scales: Sequence[Any]
    biases: Sequence[Any]
    activations: Sequence[str]
    arch: str | None
    backend: str | None
    rotate: str | None = None
    smooth: Any = None
    right: Any = None

    @property
    def multiplied(self) -> Multiplied:
        """The arguments of `multiply`."""
        _check_counts(*self[1:5])
        layers = [*zip(self.weights, self.weight_scales, self.biases, strict=True)]
        return (self.x, layers, tuple(self.activations), *self[5:]), {}


def _layers(*arguments: Any) -> list[Tensor]:
    given, named = Layers(*arguments).multiplied
    return multiply(*given, **named)


def _layers_fake(*arguments: Any) -> list[Tensor]:
    (x, layers, activations, *_), _ = Layers(*arguments).multiplied
    return results_of(x, layers, activations)


def _check_counts(*lists: Sequence[Any]) -> None:
    """Raise unless weights, their scales, biases and activations are of the same layers."""
    counts = [len(one) for one in lists]
    if len({*counts}) > 1 or not counts[0]:
        raise ValueError(
            "weights, weight_scales, biases and activations must have one entry for each layer, "
            f"got {', '.join(map(str, counts))}: give None for no bias, and '' for no activation"
        )


class NormedLayers(NamedTuple):
    """The arguments of ``int8_normed_layers``, in their order."""

    x: Any
    #: Tensors of `cupyattn.norm_quant`: weight and bias of the norm, and the modulation.
    norm_weight: Any
    norm_bias: Any
    scale: Any
    shift: Any
    norm: str | None
    eps: float
    #: Activation of the rows before they are quantised; "" for none.
    row_activation: str
    rotate: str | None
    weights: Sequence[Any]
    weight_scales: Sequence[Any]
    biases: Sequence[Any]
    #: Arguments of a single layer.
    residual: Any
    gate: Any
    activations: Sequence[str]
    arch: str | None
    backend: str | None
    #: Rows after the rows of x, and after the rows of the residual.
    below: Any = None
    residual_below: Any = None

    @property
    def layers(self) -> list[tuple[Any, ...]]:
        """The tensors of each layer, as `multiply` takes them."""
        beside: tuple[Any, ...] = ()
        if self.residual is not None:
            beside = self.residual, self.gate, self.residual_below
        own = zip(self.weights, self.weight_scales, self.biases, strict=True)
        return [(*tensors, *beside) for tensors in own]

    @property
    def before(self) -> NormQuantSettings:
        """The steps on rows before they are quantised."""
        how = self.norm, self.row_activation or None, self.rotate, self.eps
        return NormQuantSettings(*how, "channel", None)

    @property
    def vectors(self) -> tuple[Any, ...]:
        """The tensors of these operations, as `multiply` takes them."""
        return self.norm_weight, self.norm_bias, self.scale, self.shift

    @property
    def multiplied(self) -> Multiplied:
        """The arguments of `multiply`."""
        given = self.x, self.layers, tuple(self.activations), self.arch, self.backend
        return given, {"below": self.below, "before": self.before, "vectors": self.vectors}


def _checked_call(arguments: Sequence[Any]) -> NormedLayers:
    """Return a call, whose lists are of the same layers and whose epilogue is of one."""
    call = NormedLayers(*arguments)
    _check_counts(call.weights, call.weight_scales, call.biases, call.activations)
    if call.residual is not None and len(call.weights) > 1:
        raise ValueError(
            f"residual goes with one layer, got {len(call.weights)}: call the operator for each"
        )
    for name in ("gate", "residual_below"):
        if getattr(call, name) is not None and call.residual is None:
            raise ValueError(
                f"{name} goes with residual, got residual=None: give zeros to add nothing"
            )
    return call


def _normed_layers(*arguments: Any) -> list[Tensor]:
    given, named = _checked_call(arguments).multiplied
    return multiply(*given, **named)


def _normed_layers_fake(*arguments: Any) -> list[Tensor]:
    call = _checked_call(arguments)
    return results_of(call.x, call.layers, call.activations, call.below)


def _call_into(arguments: Sequence[Any]) -> tuple[NormedLayers, list[tuple[Any, ...]]]:
    """Return a call, and the tensors of its layers with the tensors that receive the results."""
    *given, out = arguments
    call = _checked_call(given)
    if len(out) != len(call.weights):
        raise ValueError(
            f"out must have a tensor for each of {len(call.weights)} layers, got {len(out)}"
        )
    none = (None,) * _OPERANDS
    layers = zip(call.layers, out, strict=True)
    return call, [(*layer, *none[len(layer) :], y) for layer, y in layers]


def _normed_layers_into(*arguments: Any) -> None:
    call, layers = _call_into(arguments)
    if autograd_state(arguments)[0]:
        _refuse_several()
    (x, _, *others), named = call.multiplied
    multiply(x, layers, *others, **named)


def _normed_layers_into_fake(*arguments: Any) -> None:
    _call_into(arguments)


layer = define(
    "int8_layer",
    "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, Tensor? gate, "
    "str activation, str? arch, str? backend, str? rotate=None, Tensor? smooth=None, "
    "Tensor? right=None, Tensor? residual_below=None",
    "Tensor", run_layer, _layer_fake,
)  # fmt: skip
layers = define(
    "int8_layers",
    "Tensor x, Tensor[] weights, Tensor[] weight_scales, Tensor?[] biases, str[] activations, "
    "str? arch, str? backend, str? rotate=None, Tensor? smooth=None, Tensor? right=None",
    "Tensor[]", _layers, _layers_fake,
)  # fmt: skip


_NORMED = (
    "Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor? scale, Tensor? shift, str? norm, "
    "float eps, str row_activation, str? rotate, Tensor[] weights, Tensor[] weight_scales, "
    "Tensor?[] biases, Tensor? residual, Tensor? gate, str[] activations, str? arch, str? backend, "
    "Tensor? below, Tensor? residual_below"
)
normed_layers = define(
    "int8_normed_layers", _NORMED, "Tensor[]", _normed_layers, _normed_layers_fake
)
#: The same, which writes the results into given tensors in C order.
normed_layers_into = define(
    "int8_normed_layers_into", f"{_NORMED}, Tensor(a!)[] out", "()", _normed_layers_into,
    _normed_layers_into_fake,
)  # fmt: skip


#: The arguments of calls that replace layers in graphs, by operator.
CALLS: dict[Any, Any] = {layer: Layer, layers: Layers, normed_layers: NormedLayers}


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        "the derivative for 'cupyattn::int8_layer' is not implemented beside residual: leave it "
        "out, and add it to the result"
    )


def _refuse_several(*_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        "the derivative for several layers in one call is not implemented: call each Int8Linear by "
        "itself, or call it under torch.no_grad()"
    )


differentiate(layer, _refuse, _refuse)
differentiate(layers, _refuse_several, _refuse_several)
differentiate(normed_layers, _refuse_several, _refuse_several)
