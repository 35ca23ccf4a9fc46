"""Attention for torch: functions and modules with autograd, on torch's memory and streams."""

from cupyattn.interop.torch.functional import (
    attention,
    attention_varlen,
    int8_attention,
    scaled_dot_product_attention,
)
from cupyattn.interop.torch.modules import Attention, Int8Attention

__all__ = [
    "Attention",
    "Int8Attention",
    "attention",
    "attention_varlen",
    "int8_attention",
    "scaled_dot_product_attention",
]
