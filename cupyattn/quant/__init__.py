"""INT8 operands: their configuration, the record that contains them, and the call that makes it.

This package also quantises weights and activations of linear layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.bounds.products import gemm_error, weight_error
    from cupyattn.kernels.limits import GROUP_ALL
    from cupyattn.ops.act_quant import act_quant
    from cupyattn.ops.gemm import int8_gemm
    from cupyattn.ops.linear import Int8Linear, outlier_columns
    from cupyattn.ops.norm_quant import norm_quant
    from cupyattn.ops.quantize import quantize, quantize_kv
    from cupyattn.ops.weights import weight_dequant, weight_quant
    from cupyattn.quant.blocks import Int8Config
    from cupyattn.quant.config import QuantConfig
    from cupyattn.quant.quantized import QuantizedQKV
    from cupyattn.quant.rotation import rotated
    from cupyattn.reference.gemm import gemm_exact, gemm_mirror

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
    "norm_quant",
    "outlier_columns",
    "quantize",
    "quantize_kv",
    "rotated",
    "weight_dequant",
    "weight_error",
    "weight_quant",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "bounds.products": ("gemm_error", "weight_error"),
        "kernels.limits": ("GROUP_ALL",),
        "ops.act_quant": ("act_quant",),
        "ops.gemm": ("int8_gemm",),
        "ops.linear": ("Int8Linear", "outlier_columns"),
        "ops.norm_quant": ("norm_quant",),
        # NOTE: that module adds with_q to the record.
        "ops.quantize": ("QuantizedQKV", "quantize", "quantize_kv"),
        "ops.weights": ("weight_dequant", "weight_quant"),
        "quant.blocks": ("Int8Config",),
        "quant.config": ("QuantConfig",),
        "quant.rotation": ("rotated",),
        "reference.gemm": ("gemm_exact", "gemm_mirror"),
    },
)  # fmt: skip
