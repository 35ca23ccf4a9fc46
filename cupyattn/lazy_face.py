"""Packages that import their names at first use, and say where a name of another place is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyattn.collector import collector_paused

#: Function of `importlib` that asks a package for each name of ``from package import name``. It
#: drops an AttributeError, and the ImportError that follows has another message.
_IMPORTING = "_handle_fromlist"
_BY_STEP = "Int8Attention, whose precision_policy chooses the arithmetic of every step"
_IMAGES = (
    "on images of a pipeline before and after "
    "cupyattn.interop.diffusers.replace_attention_with_int8(pipe)"
)
#: Names of the library's original plan and of other packages, each with its replacement here.
#: `lazy_face` lets every public package answer for them.
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
    "compute_fid": f"torchmetrics.image.fid.FrechetInceptionDistance, {_IMAGES}",
    "eval_images": (
        f"torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity, {_IMAGES}"
    ),
    "get_T2V_pipeline": (
        "cupyattn.interop.torch.load_int8(pipe.transformer, folder) on a pipeline of diffusers"
    ),
    "int8_attention": "cupyattn.attention(..., variant='fa_int8')",
    "int8_attention_hq": (
        "cupyattn.attention(..., variant='fa_int8'), which keeps P and V in 16 bits, or "
        f"cupyattn.{_BY_STEP}"
    ),
    "measure_latency": (
        "cupyattn.ladder(q, k, v), or the command cupyattn profile, which time calls on a device"
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


@collector_paused()
def _imported(module: str) -> Any:
    return importlib.import_module(module)


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
            value = getattr(_imported(home_of[name]), name)
        elif name in modules:
            value = _imported(f"{package}.{name}")
        elif name in RENAMED or name in MOVED or name in sys.modules["cupyattn"].__all__:
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
