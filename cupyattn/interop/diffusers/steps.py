"""Find the step for which a model is called, and the mode that each policy chooses there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from cupyattn.diffusion import schedules
from cupyattn.diffusion.policy import MODES, PrecisionPolicy, as_policy, check_mode
from cupyattn.diffusion.steps import Steps
from cupyattn.interop.diffusers.noise import Noise, Schedule

#: Names that models have for the timestep, `t` in Z-Image.
TIMESTEPS = ("timestep", "t")


class Counted(Protocol):
    """A layer whose calls in compiled code are counted."""

    def count_on(self, device: torch.device) -> None:
        """Move the counts to a device."""
        ...


class Choice:
    """The mode that a policy takes at the step that runs.

    Compiled code reads only `mode`, a string: torch compiles a graph for each mode.

    Parameters
    ----------
    policy : object
        As `cupyattn.Int8Attention` takes it.

    Attributes
    ----------
    mode : str or None
        None if the noise level is unknown.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.is_fixed = isinstance(policy, str) and policy in MODES
        self.mode: str | None = policy if self.is_fixed else None
        self._schedule: Schedule | None = None
        self._rule: PrecisionPolicy | None = None

    def decide(self, schedule: Schedule, at: schedules.Step) -> None:
        """Ask the policy for the mode of a step."""
        if self.is_fixed:
            return
        if self._rule is None or schedule is not self._schedule:
            self._schedule = schedule
            self._rule = as_policy(self.policy, schedule.falling.size)
        self.mode = check_mode(self._rule.mode(at.timestep, at.ratio))

    def forget(self) -> None:
        """Forget the mode, because the noise level is not known."""
        if not self.is_fixed:
            self.mode = None


class Step:
    """The current step of a model, for the layers of one handle.

    Parameters
    ----------
    source : Noise, optional
        Source of the noise level.

    Attributes
    ----------
    noise : (Schedule, float) or None
        Schedule and noise-to-signal ratio.
    at : cupyattn.diffusion.schedules.Step or None
        The step of that schedule.
    counted : list of Layer
        Layers whose calls in compiled code are counted on the model's device.
    is_seen : bool
        Whether `before` ran for this call of the model. `before` does not run if a function that
        torch compiled calls the model, because no host code runs between two steps.
    """

    def __init__(self, source: Noise | None = None) -> None:
        self._source = source
        self._choices: list[Choice] = []
        self._steps: tuple[Schedule, Steps] | None = None
        self.noise: tuple[Schedule, float] | None = None
        self.at: schedules.Step | None = None
        self.counted: list[Counted] = []
        self.is_seen = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Return the step of a copied model, whose layers register their policies."""
        return Step(self._source)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model whose attention is replaced cannot be pickled, as torch.save(model) does: "
            "call restore() of its handle first, or save model.state_dict()"
        )

    def choice(self, policy: Any) -> Choice:
        """Return the choice of a policy; layers of one policy share one."""
        for known in self._choices:
            if known.policy is policy:
                return known
        self._choices.append(Choice(policy))
        return self._choices[-1]

    def before(self, model: Any, args: Any, kwargs: Any) -> None:
        """Look up the noise level, before the model runs."""
        self.is_seen = True
        if self.counted:
            where = next(model.parameters()).device
            for layer in self.counted:
                layer.count_on(where)
        if self._source is None:
            return
        given = _signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        at = next((given[name] for name in TIMESTEPS if name in given), None)
        self.set(None if at is None else self._source.at(at))

    def set(self, noise: tuple[Schedule, float] | None) -> None:
        """Set the noise level, None if unknown, and update the mode of every policy."""
        self.noise = noise
        if noise is None:
            self.at = None
            for choice in self._choices:
                choice.forget()
            return
        schedule, ratio = noise
        if self._steps is None or self._steps[0] is not schedule:
            falling = schedule.falling
            self._steps = schedule, Steps(falling, falling.size)
        self.at = self._steps[1].find(None, ratio)
        for choice in self._choices:
            choice.decide(schedule, self.at)


@functools.lru_cache(maxsize=16)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_model(step: Step, model: Any, args: Any, kwargs: Any) -> None:
    """Look up the noise level of a model's call; with a handle's step bound, this is the model's
    hook.

    Torch runs it before the code compiled by ``torch.compile(model)`` and by ``model.compile()``.
    """
    if torch.compiler.is_compiling():  # torch.export runs hooks as Python, on tensors of no memory
        step.is_seen = False
    else:
        step.before(model, args, kwargs)


@torch.compiler.substitute_in_graph(  # type: ignore[untyped-decorator]
    before_model, skip_signature_check=True
)
def _before_model_in_graph(step: Step, model: Any, args: Any, kwargs: Any) -> None:
    """Do nothing: in the graph of a function that calls the model, no host code sees the step."""
    step.is_seen = False
