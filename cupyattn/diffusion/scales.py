"""Choose the scales of INT8 attention at each step: dynamic, or static by timestep."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from cupyattn.arrays.interchange import on_host, take
from cupyattn.arrays.kinds import Array
from cupyattn.arrays.threads import Lock
from cupyattn.diffusion import guidance, unused
from cupyattn.diffusion.calibration import Calibration
from cupyattn.diffusion.schedules import Float64, Step, compute_adaptive_scales
from cupyattn.problem import choose
from cupyattn.quant.config import QuantConfig

#: The row of a calibration that stands for all steps.
_UNIFORM = -1
#: Noise-to-signal ratios whose bin is kept.
_MAX_BINS = 4096


class StepScales:
    """Makes the `QuantConfig` of a step, the same object for the same scales.

    `cupyattn.attention` finds the plan of a call again by that object.

    Parameters
    ----------
    quant : QuantConfig
        How the caller quantises.
    given : array, (num_timesteps,), Calibration, path or None
        The caller's ``timestep_scales``.
    sigmas : array, (num_timesteps,)
        The schedule.
    num_heads, head_dim : int
    adaptive : bool or None
        Whether static scales follow the timestep; None: they do, and the caller said nothing.

    Attributes
    ----------
    unused : list of str
        A sentence for each of these options that has no effect.

    Raises
    ------
    ValueError
        For arguments that do not fit together.
    """

    def __init__(
        self,
        quant: QuantConfig,
        given: Any,
        sigmas: Float64,
        num_heads: int,
        head_dim: int,
        *,
        adaptive: bool | None,
    ) -> None:
        self.quant = quant
        self.calibration: Calibration | None = None
        self._factors: Any = None
        if isinstance(given, (str, os.PathLike)):
            given = Calibration.load(given)
        if isinstance(given, Calibration):
            given.check_fits(num_heads, head_dim)
            if quant.static or not quant.symmetric or quant.fused or quant.rotate:
                raise ValueError(
                    "a calibration gives static, symmetric scales to a pass of their own: leave "
                    f"scales, symmetric, fused and rotate of quant as they are, got {quant}"
                )
            self.calibration = given
        elif given is not None:
            self._factors = _check_factors(given, sigmas.size)
        self.unused = unused.of_scales(quant, self._factors, self.calibration, adaptive)
        self.adaptive = adaptive is not False
        if quant.static and self.adaptive and given is None:
            self._factors = compute_adaptive_scales(sigmas)
        if quant.static and not quant.symmetric:
            raise ValueError("static scales of quant need symmetric=True")
        self._made: dict[Any, QuantConfig] = {}
        self._bins: dict[float, int] = {}
        self._lock = Lock()

    def config(
        self, mode: str, step: Step, device: int, heads_kv: int, branches: int = 1
    ) -> QuantConfig:
        """Return how an INT8 mode quantises at a step.

        Parameters
        ----------
        mode : {"aggressive", "balanced"}
        step : Step
        device : int
            Where the scales are to lie; -1 is the host.
        heads_kv : int
        branches : {1, 2}
            How many heads of q are stacked for each head of the model.
        """
        row: Any = None
        if self.calibration is not None:
            row = self._bin(self.calibration, step.sigma) if self.adaptive else _UNIFORM
            if heads_kv != self.calibration.heads_kv:
                raise ValueError(
                    f"the calibration is of {self.calibration.heads_kv} key heads, got {heads_kv}"
                )
        elif self.quant.static and self.adaptive:
            row = float(self._factors[step.timestep])
        key = mode, row, device, branches
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(mode, row, device, branches)
            return self._made[key]

    def _bin(self, calibration: Calibration, sigma: float) -> int:
        """Return a calibration's bin of a step, looked up once for each noise-to-signal ratio."""
        found = self._bins.get(sigma)
        if found is None:
            if len(self._bins) >= _MAX_BINS:
                self._bins.clear()
            found = self._bins[sigma] = int(calibration.bins.index(sigma))
        return found

    def _make(self, mode: str, row: Any, device: int, branches: int) -> QuantConfig:
        quant = self.quant
        granularities = quant.granularity_q, quant.granularity_k
        smooth_k, scales = quant.smooth_k, quant.scales
        if self.calibration is not None:
            granularities, smooth_k = ("head", "head"), self.calibration.smooth_k
            pair = self.calibration.uniform()
            if row != _UNIFORM:
                pair = self.calibration.q_scale[row, None], self.calibration.k_scale[row, None]
            per_code = np.float32(
                127 / quant.largest_code
            )  # a calibration gives the value of code 127
            scales = tuple(_on_device(s[..., None] * per_code, device) for s in pair)
        elif row is not None:
            scales = tuple(s * (np.float32(row) if hasattr(s, "shape") else row) for s in scales)
        if branches == guidance.BRANCHES and hasattr(scales[0], "shape"):
            scales = guidance.repeat_heads(scales[0], 1), scales[1]
        eight = mode == "aggressive"
        values = quant if eight == (quant.pv != "16bit") else choose.QUANT[mode]
        of_values = {n: getattr(values, n) for n in ("pv", "granularity_v", "smooth_v", "p_type")}
        return QuantConfig(
            *granularities, symmetric=quant.symmetric, smooth_k=smooth_k, qk_bits=quant.qk_bits,
            scales=scales, fused=quant.fused and not eight, rotate=quant.rotate, **of_values,
        )  # fmt: skip


def _on_device(scales: Array, device: int) -> Array:
    """Return scales of the host on a device; -1 is the host."""
    if device < 0:
        return scales
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(scales)


def _check_factors(given: Any, num_timesteps: int) -> Any:
    """Return the caller's factors by timestep, on the host."""
    factors = take("timestep_scales", given)[0]
    factors = on_host(factors).astype(np.float32)
    if factors.shape != (num_timesteps,):
        raise ValueError(
            f"timestep_scales must have num_timesteps={num_timesteps} entries, one for each step "
            f"of the schedule, got shape {factors.shape}: give compute_adaptive_scales("
            f"compute_sigma_schedule({num_timesteps})), or your own"
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError("timestep_scales must be positive and finite")
    return factors
