"""Read a model's noise level from its pipeline's scheduler, without a device synchronisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from cupyattn.arrays.kinds import as_host_array
from cupyattn.diffusion.schedules import Float64, noise_to_signal
from cupyattn.errors import UnsupportedError, shown

#: Schedulers whose sigmas do not show their meaning, by the start of their names: the meaning is a
#: share of noise, or noise over signal.
_FLOW = ("FlowMatch", "FlowMap", "LTXEulerAncestralRF")
_EDM = ("EDM", "CosineDPM")
#: Equal noise and signal: the ratio used for a schedule with a single step of pure noise.
_EVEN = 1.0


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of one run of a scheduler; another run has another object.

    Parameters
    ----------
    ratios : array, float64, (steps,)
        Noise-to-signal ratio of every entry of the scheduler's timesteps, in their order.
    timesteps : array, float64, (steps,), or None
        These timesteps in the scheduler's units, if they are on the host.
    """

    ratios: Float64
    timesteps: Float64 | None

    @property
    def falling(self) -> Float64:
        """Falling ratios for `cupyattn.Int8Attention`; the middle one is positive and finite."""
        falling: Float64 = np.sort(self.ratios)[::-1]
        if not 0 < falling[falling.size // 2] < math.inf:
            falling = np.sort(np.append(falling, [_EVEN] * (1 + falling.size)))[::-1]
        return falling


def kind_of(scheduler: Any) -> str:
    """Return how a scheduler of diffusers counts noise.

    Returns
    -------
    {"flow", "edm", "ddpm"}
        As for `cupyattn.diffusion.noise_to_signal`; "edm" for all schedulers whose sigmas are noise
        over signal.

    Raises
    ------
    TypeError
        For an object that is not a scheduler of diffusers.
    UnsupportedError
        For an unknown scheduler.
    """
    if not hasattr(scheduler, "config"):
        raise TypeError(f"scheduler must be one of diffusers, got {shown(scheduler)}")
    config, name = scheduler.config, type(scheduler).__name__
    sigmas = getattr(scheduler, "sigmas", None) is not None
    products = getattr(scheduler, "alphas_cumprod", None) is not None
    if sigmas:
        told = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
        if told or name.startswith(_FLOW):
            return "flow"
        if products or name.startswith(_EDM):
            return "edm"
    elif products:
        return "ddpm"
    raise UnsupportedError(
        f"the noise level of a {name} is not known: known are schedulers of flow matching, of EDM "
        "and with alphas_cumprod; give one mode as policy, which needs no noise level"
    )


class Noise:
    """The noise level of a pipeline's current step.

    Parameters
    ----------
    owner : object
        Has the attribute ``scheduler``, which is read again in every step.

    Notes
    -----
    A step never waits for a device. The scheduler's lists are read once a run. This waits only if
    they are on a device: the sigmas of flow matching in Euler's form, and the timesteps of DDPM and
    similar schedulers. All other lists are on the host.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._seen: tuple[Any, ...] = ()
        self._schedule: Schedule | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Noise:
        """Return the same object: a copied model is called for the steps of the same scheduler."""
        return self

    def at(self, timestep: Any) -> tuple[Schedule, float] | None:
        """Return the schedule and the noise-to-signal ratio of a call of the model.

        Parameters
        ----------
        timestep : Tensor or number
            The timestep that the model received.

        Returns
        -------
        (Schedule, float), or None if the step is known only on a device.
        """
        scheduler = self._owner.scheduler
        schedule = self._schedule_of(scheduler)
        index = _index(scheduler, schedule, timestep)
        return None if index is None else (schedule, float(schedule.ratios[index]))

    def _schedule_of(self, scheduler: Any) -> Schedule:
        held = scheduler, scheduler.timesteps, getattr(scheduler, "sigmas", None)
        versions = tuple(getattr(x, "_version", None) for x in held[1:])
        seen = (*held, versions)
        same = len(self._seen) == len(seen) and all(
            a is b for a, b in zip(seen[:3], self._seen[:3], strict=True)
        )
        if self._schedule is None or not same or self._seen[3] != versions:
            self._schedule, self._seen = _read(scheduler), seen
        return self._schedule


def _on_host(values: Any) -> Float64:
    values = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return as_host_array("the scheduler's values", values, np.float64)


def _read(scheduler: Any) -> Schedule:
    """Return the steps to which a scheduler was set."""
    if scheduler.timesteps is None:
        raise ValueError(
            f"this {type(scheduler).__name__} has no timesteps yet: call set_timesteps before the "
            "model"
        )
    kind, timesteps = kind_of(scheduler), scheduler.timesteps
    if kind == "ddpm":
        products, steps = _on_host(scheduler.alphas_cumprod), _on_host(timesteps)
        return Schedule(noise_to_signal(products[steps.astype(np.int64)], kind), steps)
    sigmas, count = _on_host(scheduler.sigmas), len(timesteps)
    if not count <= sigmas.size <= count + 1:
        raise UnsupportedError(
            f"a {type(scheduler).__name__} with {sigmas.size} sigmas for {count} timesteps is not "
            "known; give one mode as policy, which needs no noise level"
        )
    if scheduler.config.get("invert_sigmas"):
        sigmas = 1 - sigmas
    if kind == "flow":  # of float32, rounded
        sigmas = np.clip(sigmas, 0, 1)
    known = None if _is_on_device(timesteps) else _on_host(timesteps)
    return Schedule(noise_to_signal(sigmas[:count], kind), known)


def _is_on_device(values: Any) -> bool:
    return isinstance(values, Tensor) and values.device.type != "cpu"


def _index(scheduler: Any, schedule: Schedule, timestep: Any) -> int | None:
    """Return which entry of the scheduler's timesteps a model was given."""
    own, last = scheduler.timesteps, schedule.ratios.size - 1
    if isinstance(timestep, Tensor) and _is_view_of_one(timestep, own):
        index = int(timestep.storage_offset() - own.storage_offset())
        if 0 <= index <= last:
            return index
    if hasattr(scheduler, "step_index"):
        counted = scheduler.step_index
        if counted is None:  # set by the first step, unless a pipeline starts later
            counted = getattr(scheduler, "begin_index", None)
        return min(int(counted or 0), last)
    if schedule.timesteps is None or _is_on_device(timestep):
        return None
    value = float(_on_host(timestep).reshape(-1)[0])
    return int(np.abs(schedule.timesteps - value).argmin())


def _is_view_of_one(timestep: Tensor, timesteps: Any) -> bool:
    """Whether a tensor is an entry of the scheduler's, expanded or not: its place is its index."""
    if not isinstance(timesteps, Tensor) or timestep.dtype != timesteps.dtype:
        return False
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return False
    steps = zip(timestep.shape, timestep.stride(), strict=True)
    return all(n == 1 or stride == 0 for n, stride in steps)
