"""``torch.ops.cupyattn.diffusers_layer``: a layer's attention in a graph, by the layer itself.

For options that depend on the step or on the keys at each call: static scales, pruned keys, block
masks. The layer is named by a number in a tensor, so that blocks share a graph. CUDA graphs do not
replay host code, so Inductor leaves the operator out of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from cupyattn.interop.torch.checks import check_tensors
from cupyattn.interop.torch.numbered import Numbered
from cupyattn.interop.torch.ops import define

_TENSORS = ("q", "k", "v", "mask", "bias")


class HostLayer(Protocol):
    """A layer that runs calls of graphs."""

    def run_in_graph(self, given: dict[str, Tensor], scale: float | None, mode: str) -> Tensor:
        """Return O, laid out as q."""
        ...


_layers: Numbered[HostLayer] = Numbered()


def number_of(layer: HostLayer) -> Tensor:
    """Return the number of a layer in a graph, int64 on the host, valid while the layer exists."""
    with torch.inference_mode(False):
        number = torch.tensor(_layers.number_of(layer), dtype=torch.int64, device="cpu")
    return number


def attend(
    tensors: Mapping[str, Tensor], scale: float | None, layer: Tensor, mode: str
) -> Tensor:
    """Run a layer in a graph; `operator.attend` documents the tensors."""
    operands = [tensors.get(name) for name in _TENSORS]
    o: Tensor = torch.ops.cupyattn.diffusers_layer(*operands, scale, layer, mode)
    return o


def _attention(*arguments: Any) -> Tensor:
    *operands, scale, number, mode = arguments
    layer = _layers.find(int(number))
    if layer is None:
        raise RuntimeError(
            "the attention layer of this graph no longer exists, or belongs to another process: "
            "replace attention, and compile the model again"
        )
    given = {name: x for name, x in zip(_TENSORS, operands, strict=True) if x is not None}
    return layer.run_in_graph(given, scale, mode)


def _attention_fake(*arguments: Any) -> Tensor:
    given = {name: x for name, x in zip(_TENSORS, arguments, strict=False) if x is not None}
    check_tensors("diffusers_layer", given)
    return torch.empty_like(arguments[0])


define(
    "diffusers_layer",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float? scale, Tensor layer, "
    "str mode",
    "Tensor", _attention, _attention_fake, host=True,
)  # fmt: skip
