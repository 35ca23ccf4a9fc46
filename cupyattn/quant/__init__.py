"""INT8 operands: how they are quantised, the record that holds them, and the call that makes it."""

from cupyattn.quant.config import GROUP_ALL, QuantConfig
from cupyattn.quant.operands import quantize
from cupyattn.quant.quantized import QuantizedQKV

__all__ = ["GROUP_ALL", "QuantConfig", "QuantizedQKV", "quantize"]
