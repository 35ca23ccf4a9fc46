"""Attention for torch: functions and modules with autograd, on torch's memory and streams."""

from cupyattn.interop.torch.functional import (
    attention,
    attention_varlen,
    int8_attention,
    scaled_dot_product_attention,
)

__all__ = [
    "attention",
    "attention_varlen",
    "int8_attention",
    "scaled_dot_product_attention",
]
