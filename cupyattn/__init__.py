"""Attention kernels for CuPy and NumPy, compiled at run time, checked against derived bounds.

>>> import numpy as np, cupyattn as ca
>>> q = k = v = np.ones((1, 2, 5, 16), np.float16)
>>> ca.attention(q, k, v).shape
(1, 2, 5, 16)

Names are imported when they are first used: ``import cupyattn`` is quick and needs no GPU.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyattn import (
        bounds,
        checkpoints,
        diffusion,
        distributed,
        distributions,
        gradients,
        quant,
        reference,
        testing,
        unfused,
    )
    from cupyattn.api import attention, attention_varlen, explain, plan
    from cupyattn.backward import (
        attention_backward,
        attention_varlen_backward,
        explain_backward,
    )
    from cupyattn.block_mask import BlockMask
    from cupyattn.diffusion import (
        Calibration,
        Int8Attention,
        calibrate_quantization_scales,
        compute_adaptive_scales,
        compute_sigma_schedule,
    )
    from cupyattn.errors import (
        DeviceMemoryError,
        KernelCompileError,
        KernelLaunchError,
        UnsupportedError,
    )
    from cupyattn.measure import ladder
    from cupyattn.quant import (
        Int8Config,
        Int8Linear,
        QuantConfig,
        QuantizedQKV,
        act_quant,
        int8_gemm,
        quantize,
        weight_dequant,
        weight_quant,
    )
    from cupyattn.registry import VARIANTS, Variant, register
    from cupyattn.tiles import GemmTiles, Tiles

__version__ = "0.1.0"

__all__ = [
    "VARIANTS",
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
    "ladder",
    "plan",
    "quant",
    "quantize",
    "reference",
    "register",
    "testing",
    "unfused",
    "weight_dequant",
    "weight_quant",
]

#: Where each name lives; an empty string: it is a module itself.
_HOME = {
    "attention": "api",
    "attention_varlen": "api",
    "explain": "api",
    "plan": "api",
    "attention_backward": "backward",
    "explain_backward": "backward",
    "attention_varlen_backward": "backward",
    "BlockMask": "block_mask",
    "Calibration": "diffusion",
    "Int8Attention": "diffusion",
    "calibrate_quantization_scales": "diffusion",
    "compute_adaptive_scales": "diffusion",
    "compute_sigma_schedule": "diffusion",
    "KernelCompileError": "errors",
    "DeviceMemoryError": "errors",
    "KernelLaunchError": "errors",
    "UnsupportedError": "errors",
    "ladder": "measure",
    "Int8Config": "quant",
    "Int8Linear": "quant",
    "QuantConfig": "quant",
    "QuantizedQKV": "quant",
    "act_quant": "quant",
    "int8_gemm": "quant",
    "quantize": "quant",
    "weight_dequant": "quant",
    "weight_quant": "quant",
    "VARIANTS": "registry",
    "Variant": "registry",
    "register": "registry",
    "GemmTiles": "tiles",
    "Tiles": "tiles",
    "bounds": "",
    "checkpoints": "",
    "diffusion": "",
    "distributed": "",
    "distributions": "",
    "gradients": "",
    "quant": "",
    "reference": "",
    "testing": "",
    "unfused": "",
}

if os.environ.get("CUPYATTN_LOG"):
    from cupyattn.switches import start_log

    start_log()


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'cupyattn' has no attribute {name!r}")
    home = _HOME[name]
    module = importlib.import_module(f"cupyattn.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
