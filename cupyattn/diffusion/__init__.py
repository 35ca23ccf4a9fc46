"""INT8 attention for diffusion transformers: timesteps, policies, guidance, pruning, sparsity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupyattn.lazy_face import lazy_face

if TYPE_CHECKING:
    from cupyattn.diffusion.attention import Int8Attention
    from cupyattn.diffusion.calibration import Calibration, calibrate_quantization_scales
    from cupyattn.diffusion.guidance import guided
    from cupyattn.diffusion.layer_scales import Calibrations, calibrate
    from cupyattn.diffusion.policy import MODES, PrecisionPolicy, SigmaPolicy, TablePolicy
    from cupyattn.diffusion.pruning import key_importance
    from cupyattn.diffusion.recordings import RecordedCall, Recording
    from cupyattn.diffusion.schedules import (
        SnrBins,
        Step,
        compute_adaptive_scales,
        compute_sigma_schedule,
        log_snr,
        noise_to_signal,
    )
    from cupyattn.diffusion.video import VideoMask, block_order, top_cdf, window_3d

__all__ = [
    "MODES",
    "Calibration",
    "Calibrations",
    "Int8Attention",
    "PrecisionPolicy",
    "RecordedCall",
    "Recording",
    "SigmaPolicy",
    "SnrBins",
    "Step",
    "TablePolicy",
    "VideoMask",
    "block_order",
    "calibrate",
    "calibrate_quantization_scales",
    "compute_adaptive_scales",
    "compute_sigma_schedule",
    "guided",
    "key_importance",
    "log_snr",
    "noise_to_signal",
    "top_cdf",
    "window_3d",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "diffusion.attention": ("Int8Attention",),
        "diffusion.calibration": ("Calibration", "calibrate_quantization_scales"),
        "diffusion.guidance": ("guided",),
        "diffusion.layer_scales": ("Calibrations", "calibrate"),
        "diffusion.policy": ("MODES", "PrecisionPolicy", "SigmaPolicy", "TablePolicy"),
        "diffusion.pruning": ("key_importance",),
        "diffusion.recordings": ("RecordedCall", "Recording"),
        "diffusion.schedules": (
            "SnrBins", "Step", "compute_adaptive_scales", "compute_sigma_schedule", "log_snr",
            "noise_to_signal",
        ),
        "diffusion.video": ("VideoMask", "block_order", "top_cdf", "window_3d"),
    },
)  # fmt: skip
