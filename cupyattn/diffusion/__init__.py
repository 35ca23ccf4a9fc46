"""INT8 attention for diffusion transformers: timesteps, policies, guidance, pruning, sparsity."""

from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.calibration import Calibration, calibrate_quantization_scales
from cupyattn.diffusion.guidance import guided
from cupyattn.diffusion.policy import MODES, PrecisionPolicy, SigmaPolicy, TablePolicy
from cupyattn.diffusion.pruning import key_importance
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
    "Int8Attention",
    "PrecisionPolicy",
    "SigmaPolicy",
    "SnrBins",
    "Step",
    "TablePolicy",
    "VideoMask",
    "block_order",
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
