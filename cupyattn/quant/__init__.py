"""INT8 operands: how they are quantised, the record that holds them, and the call that makes it.

Beside attention's operands, weights and activations of linear layers in blocks.
"""

from cupyattn.quant.activations import act_quant
from cupyattn.quant.blocks import Int8Config, weight_error
from cupyattn.quant.config import GROUP_ALL, QuantConfig
from cupyattn.quant.gemm import int8_gemm
from cupyattn.quant.gemm_reference import gemm_error, gemm_exact, gemm_mirror
from cupyattn.quant.linear import Int8Linear, outlier_columns
from cupyattn.quant.operands import quantize
from cupyattn.quant.quantized import QuantizedQKV
from cupyattn.quant.weights import weight_dequant, weight_quant

__all__ = [
    "GROUP_ALL",
    "Int8Config",
    "Int8Linear",
    "QuantConfig",
    "QuantizedQKV",
    "act_quant",
    "gemm_error",
    "gemm_exact",
    "gemm_mirror",
    "int8_gemm",
    "outlier_columns",
    "quantize",
    "weight_dequant",
    "weight_error",
    "weight_quant",
]
