"""Find the step of a schedule for a call, by its timestep or its noise-to-signal ratio."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.diffusion.arguments import check_number, check_timestep
from cupyattn.diffusion.policy import middle_ratio
from cupyattn.diffusion.schedules import (
    Float64,
    Step,
    check_sigmas,
    compute_sigma_schedule,
    log_snr,
)


class Steps:
    """The steps of one schedule.

    Parameters
    ----------
    sigmas : array, (num_timesteps,), or {"edm", "flow", "ddpm"}, optional
        As for `Int8Attention`.
    num_timesteps : int

    Raises
    ------
    ValueError
        For ratios that make no schedule.
    """

    def __init__(self, sigmas: Any, num_timesteps: int) -> None:
        self.sigmas = _schedule(sigmas, num_timesteps)
        self._middle = middle_ratio(self.sigmas)

    def find(self, timestep: int | None, sigma: float | None) -> Step:
        """Return the properties of a step, as `Int8Attention.step` does."""
        if (timestep is None) == (sigma is None):
            raise TypeError(
                f"give either timestep or sigma, got timestep={timestep!r} sigma={sigma!r}"
            )
        if sigma is not None:
            ratio = check_number("sigma", sigma, "a noise-to-signal ratio", lambda x: x >= 0)
            return Step(self._nearest(ratio), ratio, ratio / self._middle)
        index = check_timestep("timestep", timestep, self.sigmas.size)
        value = float(self.sigmas[index])
        return Step(index, value, value / self._middle)

    def _nearest(self, sigma: float) -> int:
        """Return the entry of the schedule that is next to a ratio in log-SNR."""
        rising, value = log_snr(self.sigmas), float(log_snr(sigma))
        after = int(np.searchsorted(rising, value))
        if after == rising.size:
            return after - 1
        if after == 0 or rising[after] == value:
            return after
        return after if rising[after] - value < value - rising[after - 1] else after - 1


def _schedule(sigmas: Any, num_timesteps: int) -> Float64:
    if sigmas is None or isinstance(sigmas, str):
        return compute_sigma_schedule(num_timesteps, sigmas or "edm")
    values = check_sigmas("sigmas", sigmas)
    if values.shape != (num_timesteps,):
        raise ValueError(
            f"sigmas must have num_timesteps={num_timesteps} entries, got shape {values.shape}"
        )
    if (values[:-1] < values[1:]).any():
        raise ValueError("sigmas must not rise: timestep 0 is that with most noise")
    return values
