"""Noise schedules: the noise of each step of a sampler, and its effect on activations.

One measure serves every family of models: the noise-to-signal ratio of the network's input. It is
the standard deviation of the noise over the factor of the image. It is sigma of EDM, sqrt((1 -
abar) / abar) of DDPM, and sigma / (1 - sigma) of flow matching. A *timestep* is an index into a
schedule: 0 is the first step of sampling, that with most noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyattn.arrays.kinds import as_host_array, check_values
from cupyattn.diffusion.arguments import check_count, check_number, warn_without_effect
from cupyattn.errors import shown

Float64 = npt.NDArray[np.float64]

KINDS = ("edm", "flow", "ddpm")
#: EDM's defaults: Karras et al. 2022, table 1.
EDM_SIGMA_MIN, EDM_SIGMA_MAX, EDM_RHO = 0.002, 80.0, 7.0
#: DDPM's: Ho et al. 2020, section 4.
DDPM_BETA_START, DDPM_BETA_END, DDPM_TRAIN_STEPS = 1e-4, 0.02, 1000
#: Range to which `compute_adaptive_scales` clips its factors.
SCALE_FACTOR_MIN, SCALE_FACTOR_MAX = 2.0**-10, 2.0**10


def compute_sigma_schedule(
    timesteps: int = 1000,
    kind: str = "edm",
    *,
    sigma_min: float = EDM_SIGMA_MIN,
    sigma_max: float = EDM_SIGMA_MAX,
    rho: float = EDM_RHO,
    shift: float = 1.0,
    beta_start: float = DDPM_BETA_START,
    beta_end: float = DDPM_BETA_END,
    beta_schedule: str = "linear",
    train_timesteps: int = DDPM_TRAIN_STEPS,
) -> Float64:
    """Return the noise-to-signal ratio of every step of sampling.

    Parameters
    ----------
    timesteps : int
        Steps of the sampler, n.
    kind : {"edm", "flow", "ddpm"}
    sigma_min, sigma_max, rho : float
        EDM: the ends of its schedule and its curvature.
    shift : float
        Flow matching: the shift of time towards noise, which long sequences need.
    beta_start, beta_end, beta_schedule : float, float, {"linear", "scaled_linear"}
        DDPM: the variances that training adds at its first and its last step, and whether they or
        their roots lie on a line between.
    train_timesteps : int
        DDPM: steps of training, of which the sampler visits n at even distances, both ends too.

    Returns
    -------
    array, float64, (timesteps,)
        Falling; infinite where there is no signal, as in the first step of flow matching.

    Raises
    ------
    ValueError
        For another kind, or numbers that make no schedule.

    Warns
    -----
    UserWarning
        For an argument of another kind of schedule, which has no effect.

    Notes
    -----
    EDM (Karras et al. 2022, equation 5), i = 0 ... n - 1::

        sigma_i = (sigma_max^(1/rho) + i / (n - 1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho

    Flow matching: time runs over ``t_i = 1 - i / n``, and shifting gives ``sigma = s t / (1 + (s -
    1) t)``. The ratio ``sigma / (1 - sigma)`` is then ``s t / (1 - t)``, so shifting multiplies it
    by s.

    DDPM: abar of step j is the product of 1 - beta up to j; the ratio is sqrt((1 - abar) / abar).

    Examples
    --------
    >>> edm = compute_sigma_schedule(1000)
    >>> [round(float(edm[t]), 3) for t in (0, 500, 999)]
    [80.0, 2.504, 0.002]
    >>> compute_sigma_schedule(4, "flow", shift=3.0)
    array([inf,  9.,  3.,  1.])
    """
    n = check_count("timesteps", timesteps)
    given = {
        "edm": {
            "sigma_min": sigma_min != EDM_SIGMA_MIN, "sigma_max": sigma_max != EDM_SIGMA_MAX,
            "rho": rho != EDM_RHO,
        },
        "flow": {"shift": shift != 1.0},
        "ddpm": {
            "beta_start": beta_start != DDPM_BETA_START, "beta_end": beta_end != DDPM_BETA_END,
            "beta_schedule": beta_schedule != "linear",
            "train_timesteps": train_timesteps != DDPM_TRAIN_STEPS,
        },
    }  # fmt: skip
    warn_without_effect([
        f"{name} has no effect with kind={kind!r}: it is for kind={of!r}, so leave it out"
        for of, options in given.items() if kind in KINDS and of != kind
        for name, is_given in options.items() if is_given
    ])  # fmt: skip
    if kind == "edm":
        low, high, bend = (
            _positive(name, value)
            for name, value in (("sigma_min", sigma_min), ("sigma_max", sigma_max), ("rho", rho))
        )
        if low > high:
            raise ValueError(f"sigma_min must be at most sigma_max, got {sigma_min=} {sigma_max=}")
        if abs(math.log(high)) / bend > 700:
            raise ValueError(
                f"rho={rho!r} is too small: {sigma_max=} to the power 1 / rho does not fit float64"
            )
        ends = high ** (1 / bend), low ** (1 / bend)
        steps: Float64 = np.asarray(np.linspace(*ends, n) ** bend)
        # NOTE: the root and its power round.
        steps[-1], steps[0] = low, high
        return steps
    if kind == "flow":
        index = np.arange(n)
        with np.errstate(divide="ignore"):
            return np.asarray(_positive("shift", shift) * ((n - index) / index), np.float64)
    if kind == "ddpm":
        trained = check_count("train_timesteps", train_timesteps)
        if n > trained:
            raise ValueError(f"timesteps must be at most {train_timesteps=}, got {timesteps}")
        visited = np.rint(np.linspace(trained - 1, 0, n)).astype(np.int64)
        betas = _betas(beta_start, beta_end, beta_schedule, trained)
        # NOTE: 1 - abar, a small number near the last step, from log(1 - beta) without cancelling.
        log_abar = np.cumsum(np.log1p(-betas))
        return np.asarray(np.sqrt(np.expm1(-log_abar[visited])), np.float64)
    raise ValueError(f"kind must be 'edm', 'flow' or 'ddpm', got {kind!r}")


def noise_to_signal(sigmas: npt.ArrayLike, kind: str) -> Float64:
    """Return the ratios of a sampler's own numbers.

    Parameters
    ----------
    sigmas : array_like
        EDM: sigma. Flow matching: sigma, 0 to 1, after the shift. DDPM: abar, 0 to 1.
    kind : {"edm", "flow", "ddpm"}

    Returns
    -------
    array, float64
        In the shape of `sigmas`; infinite where there is no signal.

    Raises
    ------
    ValueError
        For another kind, or a number out of its range.

    Examples
    --------
    >>> noise_to_signal([1.0, 0.75, 0.0], "flow"), noise_to_signal(0.2, "ddpm").item()
    (array([inf,  3.,  0.]), 2.0)
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be 'edm', 'flow' or 'ddpm', got {kind!r}")
    values = as_host_array("sigmas", sigmas, np.float64)
    most = math.inf if kind == "edm" else 1.0
    if not ((values >= 0) & (values <= most)).all():
        raise ValueError(f"the numbers of kind={kind!r} must lie between 0 and {most:g}")
    with np.errstate(divide="ignore"):
        if kind == "edm":
            return values
        if kind == "flow":
            return np.asarray(values / (1 - values), np.float64)
        return np.asarray(np.sqrt((1 - values) / values), np.float64)


def log_snr(sigmas: npt.ArrayLike) -> Float64:
    """Return the logarithm of signal power over noise power, -2 ln ratio.

    Parameters
    ----------
    sigmas : array_like
        Noise-to-signal ratios, 0 and infinity among them.

    Examples
    --------
    >>> log_snr([np.inf, 1.0, 0.0])
    array([-inf,   0.,  inf])
    """
    with np.errstate(divide="ignore"):
        return -2 * np.log(check_sigmas("sigmas", sigmas)) + 0.0


@dataclass(frozen=True)
class Step:
    """One step of sampling.

    Parameters
    ----------
    timestep : int
        Index into the schedule; that of the entry next in log-SNR where a caller gives a ratio.
    sigma : float
        Noise-to-signal ratio.
    ratio : float
        It over that of the schedule's middle.
    """

    timestep: int
    sigma: float
    ratio: float


@dataclass(frozen=True)
class SnrBins:
    """Ranges of the log signal-to-noise ratio, in which timesteps share scales.

    Parameters
    ----------
    edges : tuple of float
        Rising edges between bins, one fewer than bins. Bin 0 has most noise. An edge belongs to the
        bin after it.

    Raises
    ------
    ValueError
        If they are not finite or do not rise.

    Examples
    --------
    >>> bins = SnrBins.even(compute_sigma_schedule(1000), 4)
    >>> bins.count, bins.index([80.0, 1.0, 0.002]).tolist()
    (4, [0, 1, 3])
    """

    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_values("edges", self.edges)
        rising = all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))
        if not (rising and all(map(math.isfinite, self.edges))):
            raise ValueError(f"the edges of bins must be finite and rise, got {self.edges}")

    @classmethod
    def even(cls, sigmas: npt.ArrayLike, num_bins: int) -> SnrBins:
        """Return bins of one width over the finite log-SNR of a schedule.

        Parameters
        ----------
        sigmas : array_like
            Noise-to-signal ratios.
        num_bins : int
        """
        bins = check_count("num_bins", num_bins)
        values = log_snr(sigmas)
        values = values[np.isfinite(values)]
        if bins > 1 and (values.size == 0 or values.min() == values.max()):
            raise ValueError(f"{bins} bins need sigmas of several finite, positive values")
        if bins == 1:
            return cls()
        return cls(tuple(map(float, np.linspace(values.min(), values.max(), bins + 1)[1:-1])))

    @property
    def count(self) -> int:
        """Number of bins."""
        return len(self.edges) + 1

    def index(self, sigmas: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the bin of each noise-to-signal ratio."""
        found = np.searchsorted(np.asarray(self.edges, np.float64), log_snr(sigmas), side="right")
        return np.asarray(found, np.int64)


def compute_adaptive_scales(
    sigmas: npt.ArrayLike,
    *,
    reference: float | None = None,
    minimum: float = SCALE_FACTOR_MIN,
    maximum: float = SCALE_FACTOR_MAX,
    num_bins: int | None = None,
) -> npt.NDArray[np.float32]:
    """Return the factors of a reference step's static scales at every other step.

    Parameters
    ----------
    sigmas : array_like, (timesteps,)
        Noise-to-signal ratios, as `compute_sigma_schedule` returns them.
    reference : float, optional
        The ratio at which the static scales were found; the middle of the schedule, its entry
        ``timesteps // 2``, when omitted.
    minimum, maximum : float
        Limits of the result.
    num_bins : int, optional
        Steps of one bin of log-SNR (`SnrBins.even`) share the largest factor among them, so that
        none saturates for it; each step has its own when omitted.

    Returns
    -------
    array, float32, (timesteps,)
        ``sigma / reference``, clipped. A scale is the reference's times this.

    Raises
    ------
    ValueError
        For ratios that are negative or NaN, and limits that leave nothing between them.

    Notes
    -----
    That activations grow as the noise does is an assumption: `calibrate_quantization_scales`
    measures instead. With dynamic scales neither is of use, since every call finds its own.

    Examples
    --------
    >>> compute_adaptive_scales([8.0, 2.0, 0.5])
    array([4.  , 1.  , 0.25], dtype=float32)
    """
    values = check_sigmas("sigmas", sigmas)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"sigmas must have one axis and an entry, got shape {values.shape}")
    low, high = _positive("minimum", minimum), _positive("maximum", maximum)
    if low > high:
        raise ValueError(f"minimum must be at most maximum, got {minimum=} {maximum=}")
    middle = values[values.size // 2] if reference is None else reference
    if not 0 < middle < math.inf:
        raise ValueError(f"the reference must be positive and finite, got {float(middle)!r}")
    factors = np.clip(values / middle, low, high)
    if num_bins is not None:
        bins = SnrBins.even(values, num_bins).index(values)
        largest = np.zeros(num_bins)
        np.maximum.at(largest, bins, factors)
        factors = largest[bins]
    return factors.astype(np.float32)


def check_sigmas(name: str, sigmas: Any) -> Float64:
    """Return noise-to-signal ratios as an array; ValueError unless all are 0 or more."""
    values = as_host_array(name, sigmas, np.float64)
    if not (values >= 0).all():
        raise ValueError(f"{name} must be noise-to-signal ratios, 0 or more, got {shown(sigmas)}")
    return values


def _positive(name: str, value: Any) -> float:
    return check_number(name, value, "positive and finite", lambda x: 0 < x < math.inf)


def _betas(start: float, end: float, schedule: str, steps: int) -> Float64:
    if not 0 < start <= end < 1:
        raise ValueError(f"betas must rise from above 0 to below 1, got {start!r} to {end!r}")
    if schedule == "linear":
        return np.linspace(start, end, steps)
    if schedule == "scaled_linear":
        return np.linspace(math.sqrt(start), math.sqrt(end), steps) ** 2
    raise ValueError(f"beta_schedule must be 'linear' or 'scaled_linear', got {schedule!r}")
