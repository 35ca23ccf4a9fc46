"""Options of `cupyattn.Int8Attention` that have no effect beside the other options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cupyattn.diffusion.calibration import Calibration
from cupyattn.diffusion.policy import PrecisionPolicy, SigmaPolicy, TablePolicy
from cupyattn.quant.config import QuantConfig


def of_scales(
    quant: QuantConfig,
    factors: Any,
    calibration: Calibration | None,
    use_adaptive_scaling: bool | None,
) -> list[str]:
    """Return a sentence for each option of the scales that has no effect.

    Parameters
    ----------
    quant : QuantConfig
    factors : array or None
        The caller's ``timestep_scales``, where they are no calibration.
    calibration : Calibration or None
    use_adaptive_scaling : bool or None
        As the caller gave it; None where it was omitted.
    """
    adaptive = use_adaptive_scaling is not None
    if calibration is not None:
        if adaptive and calibration.bins.count == 1:
            return [
                "use_adaptive_scaling has no effect with a calibration of one bin, which serves "
                "all steps: calibrate with num_bins=, or leave it out"
            ]
        return []
    if not quant.static:
        given = ["timestep_scales"] * (factors is not None) + ["use_adaptive_scaling"] * adaptive
        if not given:
            return []
        return [
            f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect while scales "
            "are dynamic: give timestep_scales=Calibration.load(path) or "
            f"quant=QuantConfig(scales=...), or leave {'them' if len(given) > 1 else 'it'} out"
        ]
    if factors is not None and use_adaptive_scaling is False:
        return [
            "timestep_scales has no effect with use_adaptive_scaling=False: leave one of them out"
        ]
    return []


def of_policy(
    policy: PrecisionPolicy, quant: QuantConfig | None, timestep_scales: Any, num_timesteps: int
) -> list[str]:
    """Return a sentence for each option that concerns a mode which the policy never takes.

    Only policies whose modes are known are looked at: a table, or one mode for every step.

    Parameters
    ----------
    policy : PrecisionPolicy
    quant : QuantConfig or None
        As the caller gave it.
    timestep_scales : object or None
        As the caller gave it.
    num_timesteps : int
    """
    if isinstance(policy, SigmaPolicy):
        late = policy.late_steps
        if late is None or 0 < late < num_timesteps:
            return []
        return [
            "SigmaPolicy(late_steps=0) has no effect: give the number of last steps that run in "
            "16 bits, or leave late_steps out"
            if not late
            else f"SigmaPolicy(late_steps={late}) makes all {num_timesteps} steps 'precision': "
            "give fewer, or precision_policy='precision'"
        ]
    if not isinstance(policy, TablePolicy):
        return []
    modes = set(policy.modes)
    given = {"quant": quant, "timestep_scales": timestep_scales}
    if modes == {"precision"}:
        names = [name for name, value in given.items() if value is not None]
        return [
            f"{name} has no effect in steps of mode 'precision', which precision_policy takes "
            "throughout: choose another policy, or leave it out"
            for name in names
        ]
    found = []
    if quant is not None:
        for option, without, mode in (("pv", "16bit", "aggressive"), ("fused", False, "balanced")):
            value = getattr(quant, option)
            if value != without and mode not in modes:
                found.append(
                    f"quant.{option}={value!r} has no effect, since it is for mode {mode!r}, which "
                    f"precision_policy never takes: choose a policy that does, or leave {option} "
                    "out of quant"
                )
    return found


def of_pruning(given: Collection[str], *, enabled: bool, threshold: Any) -> list[str]:
    """Return a sentence for each option of pruning that has no effect.

    Parameters
    ----------
    given : collection of str
        Names of the options that the caller gave.
    enabled : bool
        Whether keys are pruned.
    threshold : float or None
        The ``pruning_threshold`` in force.
    """
    names = [n for n in ("pruning_ratio", "pruning_threshold", "pruning_rows") if n in given]
    if not enabled:
        return [
            f"{name} has no effect while enable_pruning is False: give enable_pruning=True, for "
            "the layer or for a call, or leave it out"
            for name in names
        ]
    if "pruning_ratio" in names and threshold is not None:
        return ["pruning_ratio has no effect beside pruning_threshold: leave one of them out"]
    return []
