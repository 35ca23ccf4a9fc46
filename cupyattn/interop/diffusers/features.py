"""Options of `cupyattn.Int8Attention` for each layer of a model: one value for all, or patterns."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupyattn.diffusion.attention import Int8Attention
from cupyattn.diffusion.calibration import Calibration
from cupyattn.diffusion.layer_scales import Calibrations
from cupyattn.diffusion.settings import ATTENTION_TYPES
from cupyattn.errors import shown
from cupyattn.interop.selection import check_found, compiled, first_names
from cupyattn.measure.words import printable
from cupyattn.quant.config import QuantConfig

#: Options that require certain values of another option, by that other option.
_OF_PRUNING = ("pruning_ratio", "pruning_threshold", "pruning_rows")
_OF_SPARSITY = ("window_size", "block_size", "block_mask")
#: Steps of the trial schedule with which options are checked, before the real one is known.
ANY_STEPS = 2


class Features:
    """The caller's options of layers, except policies.

    Parameters
    ----------
    **given
        Options of `cupyattn.Int8Attention` that are not None. A mapping has names or regular
        expressions of layers, each with a value. The exact name of a layer decides, then the first
        expression that matches it; other layers have the default. `Calibrations` have only names.

    Raises
    ------
    TypeError, ValueError
        For a pattern that is not a regular expression, for an empty mapping, and for scales given
        twice.
    """

    def __init__(self, **given: Any) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        self._patterns: dict[str, list[tuple[re.Pattern[str], Any]]] = {}
        for name, value in self.given.items():
            if isinstance(value, Mapping):
                if not value:
                    raise ValueError(f"{name} is an empty mapping: give a value for some layers")
                whole = isinstance(value, Calibrations)  # no layer has another's scales
                texts = [f"^{re.escape(n)}$" for n in value] if whole else [*value]
                expressions = compiled(f"the names of {name}", texts)
                self._patterns[name] = [*zip(expressions, value.values(), strict=True)]

    def check(self, names: Sequence[str]) -> None:
        """Raise ValueError for a pattern or a name that matches no attention module."""
        for option, patterns in self._patterns.items():
            if isinstance(given := self.given[option], Calibrations):
                other = [name for name in given if name not in names]
                if other:
                    raise ValueError(
                        f"{option} has a calibration of {printable(other[0])}, which is no "
                        f"attention module of this model, there are {first_names(names)}: record "
                        "and calibrate this model"
                    )
                continue
            check_found(option, [pattern for pattern, _ in patterns], names, "attention module")

    def of(self, name: str) -> dict[str, Any]:
        """Return the options of a layer, as `cupyattn.Int8Attention` takes them."""
        found = {option: self._value(option, name) for option in self.given}
        found = {option: value for option, value in found.items() if value is not None}
        if "enable_pruning" in self._patterns and not found.get("enable_pruning"):
            found = {o: x for o, x in found.items() if o not in _OF_PRUNING}
        kind = found.get("attention_type", ATTENTION_TYPES[0])
        if "attention_type" in self._patterns and kind == ATTENTION_TYPES[0]:
            found = {o: x for o, x in found.items() if o not in _OF_SPARSITY}
        return _with_calibration(name, found)

    def _value(self, option: str, name: str) -> Any:
        if option not in self._patterns:
            return self.given[option]
        by_name = self.given[option].get(name)
        if by_name is not None:
            return by_name
        return next((x for pattern, x in self._patterns[option] if pattern.search(name)), None)


def _with_calibration(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a calibration that was given as ``quant`` in its place."""
    quant = options.get("quant")
    if isinstance(quant, Calibration):
        if "timestep_scales" in options:
            raise ValueError(
                f"{name} has a calibration as quant, and timestep_scales as well: leave one of "
                "them out"
            )
        rest = {option: value for option, value in options.items() if option != "quant"}
        return {**rest, "timestep_scales": quant}
    if quant is not None and not isinstance(quant, QuantConfig):
        raise TypeError(
            "quant must be a cupyattn.QuantConfig, a Calibration, or a mapping of patterns to "
            f"these, got {shown(quant)}"
        )
    return options


def trial(options: Mapping[str, Any]) -> Int8Attention:
    """Return attention with a layer's options, to check them before the model runs.

    It takes its heads from a calibration, because the layer's heads are known only in a call.
    """
    given = dict(options)
    heads = head_dim = 1
    scales = given.get("timestep_scales")
    if isinstance(scales, (str, os.PathLike)):
        scales = given["timestep_scales"] = Calibration.load(scales)
    if isinstance(scales, Calibration):
        heads, head_dim = scales.heads, scales.head_dim
    elif scales is not None:  # one for each step of a schedule that is not known yet
        given["timestep_scales"] = np.ones(ANY_STEPS, np.float32)
    return Int8Attention(heads, head_dim, ANY_STEPS, **given)


def step_dependent_layers(options: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return which layers depend on the step by their options, and which option does.

    Parameters
    ----------
    options : mapping of str to mapping
        Options by the names of layers. Each combination is tried once, so it warns of options
        without effect once.
    """
    tried: dict[Any, str] = {}
    found = {}
    for name, given in options.items():
        key = tuple((option, id(value)) for option, value in given.items())
        if key not in tried:
            tried[key] = step_options(trial(given), given)
        if tried[key]:
            found[name] = tried[key]
    return found


def step_options(attention: Int8Attention, options: Mapping[str, Any]) -> str:
    """Return those options of a layer that depend on the step under any policy; "" for none."""
    adaptive = options.get("use_adaptive_scaling") is not False
    calibration = attention.calibration
    if calibration is not None and calibration.bins.count > 1 and adaptive:
        return "a calibration by step"
    if attention.quant.static and adaptive:
        return "static scales"
    if options.get("enable_pruning") and options.get("pruning_threshold") is not None:
        return "pruning_threshold"
    return ""
