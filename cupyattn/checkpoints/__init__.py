"""Read and write checkpoints: predict the effect of INT8 on a model, and convert the model.

Nothing here needs torch, or more memory than a model's largest tensor three times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.checkpoints.activations import read_activations
    from cupyattn.checkpoints.analysis import Analysis, TensorReport, analyze
    from cupyattn.checkpoints.conversion import Conversion, convert, dequantize
    from cupyattn.checkpoints.header import Header, TensorInfo, encode_header, read_header
    from cupyattn.checkpoints.kandinsky import KandinskyModel, open_kandinsky, optimize_kandinsky
    from cupyattn.checkpoints.roles import role_of
    from cupyattn.checkpoints.source import open_checkpoint
    from cupyattn.checkpoints.weight_errors import OUTLIER_RMS

__all__ = [
    "OUTLIER_RMS",
    "Analysis",
    "Conversion",
    "Header",
    "KandinskyModel",
    "TensorInfo",
    "TensorReport",
    "analyze",
    "convert",
    "dequantize",
    "encode_header",
    "open_checkpoint",
    "open_kandinsky",
    "optimize_kandinsky",
    "read_activations",
    "read_header",
    "role_of",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "checkpoints.activations": ("read_activations",),
        "checkpoints.analysis": ("Analysis", "TensorReport", "analyze"),
        "checkpoints.conversion": ("Conversion", "convert", "dequantize"),
        "checkpoints.header": ("Header", "TensorInfo", "encode_header", "read_header"),
        "checkpoints.kandinsky": ("KandinskyModel", "open_kandinsky", "optimize_kandinsky"),
        "checkpoints.roles": ("role_of",),
        "checkpoints.source": ("open_checkpoint",),
        "checkpoints.weight_errors": ("OUTLIER_RMS",),
    },
)  # fmt: skip
