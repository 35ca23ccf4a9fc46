"""Attention kernels for CuPy and NumPy, compiled at run time, checked against derived bounds.

>>> import numpy as np, cupyattn as ca
>>> q = k = v = np.ones((1, 2, 5, 16), np.float16)
>>> ca.attention(q, k, v).shape
(1, 2, 5, 16)

Names are imported when they are first used: ``import cupyattn`` is quick and needs no GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face
from cupyattn.version import __version__

if TYPE_CHECKING:
    from cupyattn import (
        bounds,
        checkpoints,
        diffusion,
        distributed,
        distributions,
        gradients,
        interop,
        quant,
        reference,
        strategies,
        testing,
        unfused,
    )
    from cupyattn.diffusion.ablation import ablate
    from cupyattn.diffusion.attention import Int8Attention
    from cupyattn.diffusion.calibration import Calibration, calibrate_quantization_scales
    from cupyattn.diffusion.schedules import compute_adaptive_scales, compute_sigma_schedule
    from cupyattn.errors import (
        DeviceMemoryError,
        KernelCompileError,
        KernelLaunchError,
        UnsupportedError,
    )
    from cupyattn.kernels.ladder import VARIANTS, Variant
    from cupyattn.kernels.tiles import GemmTiles, Tiles
    from cupyattn.measure.rungs import ladder
    from cupyattn.ops.act_quant import act_quant
    from cupyattn.ops.affine_linear import AffineInt8Linear
    from cupyattn.ops.attention import attention, attention_varlen, plan
    from cupyattn.ops.backward import attention_backward, attention_varlen_backward
    from cupyattn.ops.explain import explain, explain_backward, kernel_form
    from cupyattn.ops.gemm import int8_gemm
    from cupyattn.ops.linear import Int8Linear
    from cupyattn.ops.norm_quant import norm_quant
    from cupyattn.ops.own_rungs import register, unregister
    from cupyattn.ops.quantize import quantize, quantize_kv
    from cupyattn.ops.weights import weight_dequant, weight_quant
    from cupyattn.problem.block_mask import BlockMask
    from cupyattn.quant.blocks import Int8Config
    from cupyattn.quant.config import QuantConfig
    from cupyattn.quant.quantized import QuantizedQKV

__all__ = [
    "VARIANTS",
    "AffineInt8Linear",
    "BlockMask",
    "Calibration",
    "DeviceMemoryError",
    "GemmTiles",
    "Int8Attention",
    "Int8Config",
    "Int8Linear",
    "KernelCompileError",
    "KernelLaunchError",
    "QuantConfig",
    "QuantizedQKV",
    "Tiles",
    "UnsupportedError",
    "Variant",
    "__version__",
    "ablate",
    "act_quant",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "bounds",
    "calibrate_quantization_scales",
    "checkpoints",
    "compute_adaptive_scales",
    "compute_sigma_schedule",
    "diffusion",
    "distributed",
    "distributions",
    "explain",
    "explain_backward",
    "gradients",
    "int8_gemm",
    "interop",
    "kernel_form",
    "ladder",
    "norm_quant",
    "plan",
    "quant",
    "quantize",
    "quantize_kv",
    "reference",
    "register",
    "strategies",
    "testing",
    "unfused",
    "unregister",
    "weight_dequant",
    "weight_quant",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "diffusion.ablation": ("ablate",),
        "diffusion.attention": ("Int8Attention",),
        "diffusion.calibration": ("Calibration", "calibrate_quantization_scales"),
        "diffusion.schedules": ("compute_adaptive_scales", "compute_sigma_schedule"),
        "errors": (
            "DeviceMemoryError", "KernelCompileError", "KernelLaunchError", "UnsupportedError",
        ),
        "kernels.ladder": ("VARIANTS", "Variant"),
        "kernels.tiles": ("GemmTiles", "Tiles"),
        "measure.rungs": ("ladder",),
        "ops.act_quant": ("act_quant",),
        "ops.affine_linear": ("AffineInt8Linear",),
        "ops.attention": ("attention", "attention_varlen", "plan"),
        "ops.backward": ("attention_backward", "attention_varlen_backward"),
        "ops.explain": ("explain", "explain_backward", "kernel_form"),
        "ops.gemm": ("int8_gemm",),
        "ops.linear": ("Int8Linear",),
        "ops.norm_quant": ("norm_quant",),
        "ops.own_rungs": ("register", "unregister"),
        # NOTE: that module gives the record its with_q.
        "ops.quantize": ("QuantizedQKV", "quantize", "quantize_kv"),
        "ops.weights": ("weight_dequant", "weight_quant"),
        "problem.block_mask": ("BlockMask",),
        "quant.blocks": ("Int8Config",),
        "quant.config": ("QuantConfig",),
    },
    modules=(
        "bounds", "checkpoints", "diffusion", "distributed", "distributions", "gradients",
        "interop", "quant", "reference", "strategies", "testing", "unfused",
    ),
)  # fmt: skip

if os.environ.get("CUPYATTN_LOG"):
    from cupyattn.switches import start_log

    start_log()
