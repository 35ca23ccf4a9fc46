"""INT8 attention in the models of diffusers: by step and layer, and back again."""

from cupyattn.interop.diffusers.accelerating import accelerate
from cupyattn.interop.diffusers.replace import Int8Replacement, replace_attention_with_int8
from cupyattn.interop.diffusers.report import LayerReport, Report
from cupyattn.interop.torch.accelerating import Accelerated
from cupyattn.lazy_face import lazy_face

__all__ = [
    "Accelerated",
    "Int8Replacement",
    "LayerReport",
    "Report",
    "accelerate",
    "replace_attention_with_int8",
]

__getattr__, __dir__ = lazy_face(__name__, {})  # whose names are imported above
