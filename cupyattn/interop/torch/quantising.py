"""Quantise linear layers of a model, one at a time, on the devices of their weights.

Codes and their errors are computed on the device. Verdicts equal `cupyattn.checkpoints.analyze`:
if rounding could decide, or if a weight is not quantised, the host analyses it as `analyze` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cupyattn.checkpoints.analysis import (
    TensorReport,
    check_patterns,
    has_codes,
    judge,
    report_of,
)
from cupyattn.checkpoints.choosing import Choice, Way, choose, way_by
from cupyattn.checkpoints.header import FLOATS, TensorInfo
from cupyattn.checkpoints.layout import WEIGHT
from cupyattn.checkpoints.predicted_errors import Errors, predicted_errors
from cupyattn.checkpoints.roles import INT8_ROLES, PRECISE_ROLES, role_of
from cupyattn.checkpoints.rotated import rotated_codes
from cupyattn.checkpoints.weight_errors import WeightErrors, made_for, magnitudes, weight_errors
from cupyattn.errors import shown
from cupyattn.interop.selection import first_names
from cupyattn.interop.torch.bridge import as_array, as_tensor, on_device_of
from cupyattn.interop.torch.device_errors import worst_errors
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.measure.words import counted
from cupyattn.ops.linear import quantised_weight
from cupyattn.ops.weights import weight_quant
from cupyattn.quant.blocks import AUTO, Int8Config, row_strips
from cupyattn.quant.rotation import rotation_of
from cupyattn.quant.smoothing import smoothing_factors

#: Short names of the types of weights that can be quantised.
_NAMES = {text: short for short, text in FLOATS.items()}
_OTHER = "F64"

#: Elements of a weight on the host that are divided by factors at a time.
_STRIP = 2**20

#: Codes and scales, on the device of the weight.
Made = tuple[Tensor, Tensor]

#: Inputs of linear layers, (..., in), by name.
Activations = Mapping[str, Tensor | np.ndarray]


def check_mapping(activations: Any) -> None:
    """Raise TypeError unless activations are a mapping of tensors or arrays, or None."""
    if activations is not None and not (
        isinstance(activations, Mapping)
        and all(isinstance(x, Tensor | np.ndarray) for x in activations.values())
    ):
        raise TypeError(
            "activations must map names of layers to tensors or arrays, as "
            f"record(...).recording.inputs does, got {shown(activations)}"
        )


def check_names(activations: Activations | None, names: Collection[str]) -> None:
    """Raise ValueError if activations are of a layer that is none of `names`."""
    for name in activations or ():
        if name not in names:
            raise ValueError(
                f"activations are of {name!r:.80}, which is no linear layer, there are "
                f"{first_names(names)}: give record(...).recording.inputs of the same object, as "
                "names in a pipeline begin with that of the component"
            )


def with_strategy(
    config: Int8Config | None,
    model: str,
    widths: Iterable[int],
    layers: Mapping[str, nn.Linear] | None = None,
    activations: Activations | None = None,
) -> tuple[Int8Config, Choice, dict[str, Tensor]]:
    """Return a configuration with a chosen strategy, the reason, and factors of smoothed layers.

    Parameters
    ----------
    config : Int8Config, optional
    model : str
        Class of the model.
    widths : iterable of int
        Input channels of its linear layers.
    layers, activations : mapping, optional
        Inputs of layers, (..., in), by name. Ignored are inputs of other layers, and of layers that
        keep their type by their names, or since their weights are not finite.

    Raises
    ------
    ValueError
        For activations of another width, or that are not finite; and if all layers with activations
        are to be smoothed and there are none.
    """
    config, layers = config or Int8Config(), layers or {}
    errors: dict[str, Errors] = {}
    rows: dict[str, Tensor] = {}
    tops: dict[str, Tensor] = {}
    for name, given in (activations or {}).items():
        linear = layers.get(name)
        if linear is None:
            continue
        x = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given, np.float32))
        if not x.ndim or x.shape[-1] != linear.in_features or not x.numel():
            raise ValueError(
                f"activations of {name!r:.80} are {tuple(x.shape)}, and it takes one or more rows "
                f"of {linear.in_features} channels"
            )
        own_rows = x.detach().to("cpu", torch.float32).reshape(-1, x.shape[-1])
        if not torch.isfinite(own_rows).all():
            raise ValueError(
                f"activations of {name!r:.80} are NaN or infinite in float32: record others"
            )
        role = role_of(f"{name}{WEIGHT}", (*linear.weight.shape,), model)
        if role not in INT8_ROLES or not torch.isfinite(linear.weight).all():
            continue  # which keeps its type
        enough = True
        if config.strategy == AUTO and config.rotate in (AUTO, None):
            weight = linear.weight.detach().to("cpu")
            errors[name] = predicted_errors(
                as_array(weight), as_array(own_rows), config.block_size
            )
            enough = way_by(errors[name], may_rotate=config.rotate == AUTO).strategy == "channel"
        if config.smooth is True or (config.smooth == AUTO and not enough):
            rows[name], tops[name] = own_rows, own_rows.abs().amax(0)
    if config.smooth is True and not tops:
        raise ValueError("smooth=True takes activations: give inputs of layers by name")
    factors = _factors(tops, layers)
    for name in errors.keys() & factors.keys():
        own = factors[name].cpu()
        weight = layers[name].weight.detach().to("cpu").float() / own
        made = predicted_errors(as_array(weight), as_array(rows[name] * own), config.block_size)
        errors[name] = replace(errors[name], smoothed=made.by_channel)
    choice = choose(config.strategy, model, widths, errors, config.rotate)
    if config.smooth is True:
        rotate = "hadamard" if config.rotate == AUTO else config.rotate
        ways = {n: Way("channel", rotation_of(rotate, len(top)), True) for n, top in tops.items()}
        rotated = sum(way.rotate is not None for way in ways.values())
        why = f"{counted(len(ways), 'layer')} smoothed, {rotated} of them rotated, as asked for"
        if choice.strategy == "block":
            why = f"layers without activations; by channel: {why}"
        elif not errors:  # which are of these layers without factors
            why = f"{choice.why}; {why}"
        choice = replace(choice, layers={**choice.layers, **ways}, why=why)
    factors = {name: f for name, f in factors.items() if choice.way_of(name).smooth}
    config = replace(config, smooth=False, strategy=choice.strategy, rotate=choice.rotate)
    return config, choice, factors


def _factors(tops: Mapping[str, Tensor], layers: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Return factors of channels, one tensor for all layers that have the same largest inputs."""
    groups: list[list[str]] = []
    for name, top in tops.items():
        own = next((g for g in groups if torch.equal(tops[g[0]], top)), None)
        if own is None:
            groups.append(own := [])
        own.append(name)
    found: dict[str, Tensor] = {}
    for group in groups:
        weights = [as_array(layers[name].weight.detach().to("cpu")) for name in group]
        made = smoothing_factors(as_array(tops[group[0]]), weights)
        factors = torch.from_numpy(made).to(layers[group[0]].weight.device)
        found |= dict.fromkeys(group, factors)
    return found


def quantised(
    layers: Mapping[str, nn.Linear],
    config: Int8Config | None,
    options: Mapping[str, Any],
    advance: Callable[[str], None] | None = None,
    *,
    model: str = "",
    ways: Mapping[str, Way] | None = None,
    factors: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Int8Linear | None, str]]:
    """Yield each layer's name, its INT8 layer or None, and the reason.

    Parameters
    ----------
    layers : mapping of str to Linear
        The caller may remove a layer that was yielded.
    config : Int8Config, optional
    options : mapping
        For `Int8Linear`.
    advance : callable, optional
        Called with each name when its layer is done.
    model : str
        Class of the model, as for `cupyattn.checkpoints.role_of`.
    ways : mapping of str to Way, optional
        The ways of layers to which the configuration does not apply.
    factors : mapping of str to Tensor, optional
        Factors of the channels of smoothed layers.

    Raises
    ------
    ValueError
        For a pattern of the configuration that fits no name.

    Notes
    -----
    Additional memory: on a device less than a large layer, on the host a few megabytes.
    """
    widths = (layer.in_features for layer in layers.values())
    if ways is None:
        config, *_ = with_strategy(config, model, widths)
    config = config or Int8Config()
    check_patterns(config, [f"{name}{WEIGHT}" for name in layers])
    for name in list(layers):
        linear = layers[name]
        own = config if ways is None or name not in ways else replace(config, **asdict(ways[name]))
        report, made = coded(f"{name}{WEIGHT}", linear.weight.detach(), own, model)
        layer = None
        if made is not None:
            smooth = (factors or {}).get(name)
            if smooth is not None:
                smooth = smooth.to(linear.weight.device)
                made = _smoothed(linear.weight.detach(), report.rotate, smooth)
            layer = Int8Linear(
                *made, linear.bias, rotate=report.rotate, smooth=smooth, **options
            )
            layer.weight_dtype = linear.weight.dtype
        del linear, made  # so that a layer that is dropped leaves memory before the next is read
        why = report.reason
        if layer is not None:
            why += ", smoothed" if smooth is not None else ""
            why += ", rotated" if layer.rotate else ""
            why += f", by {own.strategy}" if own.strategy != config.strategy else ""
        yield name, layer, why
        if advance is not None:
            advance(name)


def coded(
    name: str, w: Tensor, config: Int8Config, model: str = ""
) -> tuple[TensorReport, Made | None]:
    """Return the verdict on a weight, and its codes and scales if the verdict is INT8.

    The report has no hash. If a device accepted the codes by their worst-case errors, the report
    has these errors.
    """
    dtype = _NAMES.get(str(w.dtype).removeprefix("torch."), _OTHER)
    info = TensorInfo(dtype, tuple(w.shape))

    def judged(errors: WeightErrors | None) -> TensorReport:
        return judge(report_of(name, info, errors, model), config)

    # The verdict on a weight whose codes have no error.
    faultless = judged(WeightErrors(max(1, info.elements)))
    may_be = has_codes(info) and info.elements > 0 and faultless.verdict == "int8"
    if w.is_cuda and w.numel():
        made = _on_device(w, config, judged) if may_be else None
        if made is not None:
            return made[0], _rotated(w, made[0]) or made[1]
        if faultless.role in PRECISE_ROLES and (largest := _finite(w)) is not None:
            return judged(WeightErrors(info.elements, 0, largest)), None
    array = as_array(w.to("cpu").contiguous())
    if not array.size:
        return judged(None), None
    if not has_codes(info) or faultless.role in PRECISE_ROLES:
        return judged(magnitudes(array)), None
    on_host = made_for(info.shape, config.block_size, config.strategy) if may_be else None
    report = judged(weight_errors(array, config.block_size, config.strategy, on_host))
    if on_host is None or report.verdict != "int8":
        return report, None
    codes, scales = (as_tensor(x).to(w.device) for x in on_host)
    return report, _rotated(w, report) or (codes, scales)


def _rotated(w: Tensor, report: TensorReport) -> Made | None:
    """Rotate and quantise a weight on its device; return the codes."""
    if report.rotate is None:
        return None
    if w.is_cuda:
        with on_device_of(w):
            made = quantised_weight(as_array(w), "channel", report.rotate)
            return as_tensor(made[0]), as_tensor(made[1])
    codes, scales = rotated_codes(as_array(w.to("cpu").contiguous()), report.rotate)
    return as_tensor(codes), as_tensor(scales)


def _smoothed(w: Tensor, rotate: str | None, smooth: Tensor) -> Made:
    """Return the codes of a weight that is divided by factors, a few rows at a time."""
    with on_device_of(w):
        factors = as_array(smooth)
        parts = [
            quantised_weight(as_array(w[rows].contiguous()), "channel", rotate, factors)
            for rows in row_strips((*w.shape,), w.numel() if w.is_cuda else _STRIP)
        ]
        codes, scales = (torch.cat([*map(as_tensor, x)]) for x in zip(*parts, strict=True))
    return codes, scales


def _on_device(
    w: Tensor, config: Int8Config, judged: Callable[[WeightErrors], TensorReport]
) -> tuple[TensorReport, Made] | None:
    """Return the verdict INT8 and the codes, or None if the host must analyse the weight."""
    with on_device_of(w):
        codes, scales = map(as_tensor, weight_quant(as_array(w), strategy=config.strategy))
    errors = worst_errors(w, codes, scales, config.strategy)
    if errors is None:
        return None
    report = judged(errors)
    return (report, (codes, scales)) if report.verdict == "int8" else None


def _finite(w: Tensor) -> float | None:
    """Return the largest magnitude of a weight, None if it is not finite."""
    least, most = (float(x) for x in torch.stack(torch.aminmax(w)).tolist())
    return max(-least, most) if math.isfinite(least + most) else None
