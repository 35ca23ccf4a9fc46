"""FP8 linear layers with a scale for each row, as torchao makes them: the peer of INT8 layers.

Weights and activations in e4m3, one scale for each row of both, the largest magnitude over 448.
Activations are quantised in each call, and `torch._scaled_mm` multiplies (torchao's
``Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())``). Under ``torch.compile``
quantising is one kernel of Inductor's.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

#: Largest number of e4m3.
LARGEST = 448.0


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in e4m3, and its scales, (rows, 1), float32."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """A linear layer in e4m3; on a CPU codes are multiplied in float32."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scale = by_row(linear.weight.detach())
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        rows = x.reshape(-1, x.shape[-1])
        codes, scale = by_row(rows)
        if x.is_cuda:
            y = torch._scaled_mm(
                codes, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), bias=self.bias,
                out_dtype=x.dtype, use_fast_accum=True,
            )  # fmt: skip
        else:
            y = (codes.float() * scale @ (self.weight.float() * self.scale).t()).to(x.dtype)
            y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


def replace(model: Any, names: Container[str]) -> None:
    """Replace those linear layers of a model."""
    for name, module in [*model.named_modules()]:
        if name in names:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, Fp8Linear(module))
