"""Choose the arithmetic of attention at each timestep: three modes, and the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from cupyattn.arrays.kinds import check_values
from cupyattn.diffusion.arguments import check_whole
from cupyattn.diffusion.schedules import Float64
from cupyattn.errors import shown

#: "aggressive": INT8 Q.K^T and 8-bit P.V; "balanced": INT8 Q.K^T and 16-bit P.V; "precision": the
#: input's own 16-bit arithmetic.
MODES = ("aggressive", "balanced", "precision")

#: Multiples of the noise-to-signal ratio of the schedule's middle, above and below which
#: `SigmaPolicy` leaves "balanced".
AGGRESSIVE_ABOVE, PRECISION_BELOW = 5.0, 0.1


@runtime_checkable
class PrecisionPolicy(Protocol):
    """Anything that says a mode for a step of sampling."""

    def mode(self, timestep: int, ratio: float) -> str:
        """Return one of `MODES`.

        Parameters
        ----------
        timestep : int
            Index into the schedule, 0 = most noise.
        ratio : float
            Noise-to-signal ratio of the step relative to the schedule's middle.
        """
        ...


@dataclass(frozen=True)
class SigmaPolicy:
    """The rule: 8 bits where noise covers the error, 16 where fine detail is made.

    Parameters
    ----------
    aggressive_above, precision_below : float
        Multiples of the middle's noise-to-signal ratio. A ratio of just that is "balanced".
        ``precision_below=0`` never falls back to 16 bits; infinity in either place makes one mode
        of all steps on its side.
    late_steps : int, optional
        How many of a schedule's last steps are "precision", whatever their ratios: 10 of 50 steps
        are those from 40 on.

    Raises
    ------
    ValueError
        If the thresholds cross, or one is negative or NaN, or `late_steps` is negative.
    TypeError
        If `late_steps` is not a whole number.

    Examples
    --------
    >>> [SigmaPolicy().mode(0, ratio) for ratio in (5.1, 5.0, 0.1, 0.09)]
    ['aggressive', 'balanced', 'balanced', 'precision']
    >>> of_50_steps = as_policy(SigmaPolicy(late_steps=10), 50)
    >>> [of_50_steps.mode(timestep, 1.0) for timestep in (39, 40)]
    ['balanced', 'precision']
    """

    aggressive_above: float = AGGRESSIVE_ABOVE
    precision_below: float = PRECISION_BELOW
    late_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.precision_below <= self.aggressive_above:
            raise ValueError(
                "precision_below must be 0 to aggressive_above, got "
                f"precision_below={self.precision_below!r} "
                f"aggressive_above={self.aggressive_above!r}"
            )

        if self.late_steps is not None and check_whole("late_steps", self.late_steps) < 0:
            raise ValueError(f"late_steps must be 0 or more, got {self.late_steps!r}")

    def mode(self, timestep: int, ratio: float) -> str:
        """Return the mode of a step, as `PrecisionPolicy` says.

        Raises
        ------
        ValueError
            With `late_steps`, which count from the end of a schedule that only `as_policy` knows.
        """
        if self.late_steps is not None:
            raise ValueError(
                f"late_steps={self.late_steps} counts from the end of a schedule: give the policy "
                "to Int8Attention and ask its mode(timestep), or ask "
                "cupyattn.diffusion.policy.as_policy(policy, num_timesteps)"
            )
        return self._by_ratio(ratio)

    def _by_ratio(self, ratio: float) -> str:
        if ratio > self.aggressive_above:
            return "aggressive"
        return "precision" if ratio < self.precision_below else "balanced"


@dataclass(frozen=True)
class _LateSteps(SigmaPolicy):
    """A `SigmaPolicy` with `late_steps` of a schedule of so many timesteps."""

    num_timesteps: int = 0

    def mode(self, timestep: int, ratio: float) -> str:
        """Return the mode of a step, as `PrecisionPolicy` says."""
        late = self.late_steps or 0
        return "precision" if timestep >= self.num_timesteps - late else self._by_ratio(ratio)


@dataclass(frozen=True)
class TablePolicy:
    """A mode for every timestep.

    Parameters
    ----------
    modes : tuple of str
        Names in `MODES`, one for each timestep.

    Examples
    --------
    >>> TablePolicy(("balanced",) * 45 + ("precision",) * 5).mode(45, 0.0)
    'precision'
    """

    modes: tuple[str, ...]

    def __post_init__(self) -> None:
        check_values("modes", self.modes)
        for mode in self.modes:
            check_mode(mode)

    def mode(self, timestep: int, ratio: float) -> str:
        """Return the mode of a step, as `PrecisionPolicy` says."""
        return self.modes[timestep]


def as_policy(policy: Any, num_timesteps: int) -> PrecisionPolicy:
    """Return a policy from the caller's argument.

    Parameters
    ----------
    policy : "adaptive", a mode, a sequence of modes, or an object
        "adaptive": `SigmaPolicy` with its defaults. A mode: that at every step. A sequence: a mode
        for each timestep. An object has a method `mode` as `PrecisionPolicy` says.
    num_timesteps : int

    Raises
    ------
    ValueError
        For another name, or a table of another length.
    TypeError
        For an object without that method.
    """
    check_values("precision_policy", policy)
    if isinstance(policy, str):
        if policy == "adaptive":
            return SigmaPolicy()
        if policy not in MODES:
            raise ValueError(
                f"precision_policy must be 'adaptive' or one of {MODES}, or a table or an object, "
                f"got {policy!r}"
            )
        return TablePolicy((policy,) * num_timesteps)
    if type(policy) is SigmaPolicy and policy.late_steps is not None:
        return _LateSteps(**asdict(policy), num_timesteps=num_timesteps)
    if isinstance(policy, Sequence):
        policy = TablePolicy(tuple(policy))
    if isinstance(policy, TablePolicy) and len(policy.modes) != num_timesteps:
        raise ValueError(
            f"a table of modes must have num_timesteps={num_timesteps} entries, "
            f"got {len(policy.modes)}"
        )
    if not isinstance(policy, PrecisionPolicy):
        raise TypeError(
            "precision_policy must be a name, a sequence of modes or an object with a method "
            f"mode(timestep, ratio), got {shown(policy)}"
        )
    return policy


def check_mode(mode: Any) -> str:
    """Return a mode; ValueError unless it is one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"a precision mode must be one of {MODES}, got {shown(mode)}")
    return str(mode)


def middle_ratio(sigmas: Float64) -> float:
    """Return the ratio for comparisons: entry n // 2 of a schedule.

    Raises
    ------
    ValueError
        If it is 0 or infinite.
    """
    middle = float(sigmas[sigmas.size // 2])
    if not 0 < middle < float("inf"):
        raise ValueError(
            f"the middle of the schedule, entry {sigmas.size // 2}, must be positive and finite, "
            f"got {middle}"
        )
    return middle
