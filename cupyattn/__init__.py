"""Attention kernels for CuPy and NumPy, compiled at run time, checked against derived bounds.

>>> import numpy as np, cupyattn as ca
>>> q = k = v = np.ones((1, 2, 5, 16), np.float16)
>>> ca.attention(q, k, v).shape
(1, 2, 5, 16)

Names are imported when they are first used: ``import cupyattn`` is quick and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    from cupyattn.ops.attention import attention, attention_varlen, plan
    from cupyattn.ops.backward import attention_backward, attention_varlen_backward
    from cupyattn.ops.explain import explain, explain_backward, kernel_form
    from cupyattn.ops.gemm import int8_gemm
    from cupyattn.ops.linear import Int8Linear
    from cupyattn.ops.own_rungs import register, unregister
    from cupyattn.ops.quantize import quantize, quantize_kv
    from cupyattn.ops.weights import weight_dequant, weight_quant
    from cupyattn.problem.block_mask import BlockMask
    from cupyattn.quant.blocks import Int8Config
    from cupyattn.quant.config import QuantConfig
    from cupyattn.quant.quantized import QuantizedQKV

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
    "interop",
    "kernel_form",
    "ladder",
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


#: Function of `importlib` that asks a package for each name of ``from package import name``. Of an
#: AttributeError it keeps nothing, and the ImportError that follows has a message of its own.
_IMPORTING = "_handle_fromlist"
_BY_STEP = "Int8Attention, whose precision_policy chooses the arithmetic of every step"
#: Names of the plan that this library began as, and names of other packages, with what is here in
#: their place. `lazy_face` lets every public package answer for them.
RENAMED = {
    "KandinskyInt8Optimizer": (
        "cupyattn.checkpoints.optimize_kandinsky(model, output), or the command cupyattn kandinsky"
    ),
    "TritonInt8Config": "cupyattn.Int8Config, with the same arguments",
    "TritonInt8LinearLayer": (
        "cupyattn.Int8Linear(codes, scales, bias), or cupyattn.interop.torch.Int8Linear for tensors"
    ),
    "adaptive_precision_attention": f"cupyattn.{_BY_STEP}",
    "attention_fp16": "cupyattn.attention, which computes in the type of q, k and v",
    "attention_int8": "cupyattn.attention(..., variant='fa_int8')",
    "int8_attention": "cupyattn.attention(..., variant='fa_int8')",
    "int8_attention_hq": (
        "cupyattn.attention(..., variant='fa_int8'), which keeps P and V in 16 bits, or "
        f"cupyattn.{_BY_STEP}"
    ),
    "quantize_weight": "cupyattn.weight_quant(weight), which returns codes and scales",
    "replace_attention_with_int8": (
        "cupyattn.interop.diffusers.replace_attention_with_int8, which takes a pipeline or a model"
    ),
    "replace_linear_with_int8": (
        "cupyattn.interop.torch.replace_linear_with_int8, which takes a model"
    ),
}

#: Public names that another package of this library had before.
MOVED = {
    name: f"cupyattn.strategies.{name}" for name in ("REGIMES", "attention_inputs", "make_regime")
}


def lazy_face(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports names at first use.

    It answers for names of `RENAMED` and `MOVED`, and for public ones of `cupyattn` it has not.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    homes : mapping of str to sequence of str
        Public names by the module that defines them, relative to `cupyattn`.
    modules : sequence of str
        Submodules of the package that are public themselves.
    """
    home_of = {name: f"cupyattn.{home}" for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        elif name in RENAMED or name in MOVED or name in __all__:
            errors = importlib.import_module("cupyattn.errors")
            imported = sys._getframe(1).f_code.co_name == _IMPORTING
            imported = imported and importlib.util.find_spec(f"{package}.{name}") is None
            kind = errors.RenamedImportError if imported else errors.RenamedError
            place = {**RENAMED, **MOVED}.get(name, f"cupyattn.{name}")
            raise kind(f"{name} is not in {package}: use {place}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    return get, names


__getattr__, __dir__ = lazy_face(
    __name__,
    {
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
        "ops.attention": ("attention", "attention_varlen", "plan"),
        "ops.backward": ("attention_backward", "attention_varlen_backward"),
        "ops.explain": ("explain", "explain_backward", "kernel_form"),
        "ops.gemm": ("int8_gemm",),
        "ops.linear": ("Int8Linear",),
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
