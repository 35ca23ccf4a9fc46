"""Attention for torch: functions and modules with autograd, on torch's memory and streams."""

from cupyattn.interop.torch.accelerating import Accelerated, accelerate
from cupyattn.interop.torch.convolutions import LinearConvolution, linear_convolutions
from cupyattn.interop.torch.functional import (
    attention,
    attention_varlen,
    int8_attention,
    scaled_dot_product_attention,
)
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.loading import load_int8
from cupyattn.interop.torch.models import replace_linear_with_int8
from cupyattn.interop.torch.modules import Attention, Int8Attention
from cupyattn.interop.torch.norm_quant import norm_quant
from cupyattn.interop.torch.recorder import Recorder, record
from cupyattn.lazy_face import lazy_face

__all__ = [
    "Accelerated",
    "Attention",
    "Int8Attention",
    "Int8Linear",
    "LinearConvolution",
    "Recorder",
    "accelerate",
    "attention",
    "attention_varlen",
    "int8_attention",
    "linear_convolutions",
    "load_int8",
    "norm_quant",
    "record",
    "replace_linear_with_int8",
    "scaled_dot_product_attention",
]

__getattr__, __dir__ = lazy_face(__name__, {})  # answers for the founding notes' names
