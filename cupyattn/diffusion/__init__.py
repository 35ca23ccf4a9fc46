"""INT8 attention for diffusion transformers: noise schedules and precision policies."""

from cupyattn.diffusion.policy import MODES, PrecisionPolicy, SigmaPolicy, TablePolicy
from cupyattn.diffusion.schedules import (
    SnrBins,
    compute_adaptive_scales,
    compute_sigma_schedule,
    log_snr,
    noise_to_signal,
)

__all__ = [
    "MODES",
    "PrecisionPolicy",
    "SigmaPolicy",
    "SnrBins",
    "TablePolicy",
    "compute_adaptive_scales",
    "compute_sigma_schedule",
    "log_snr",
    "noise_to_signal",
]
