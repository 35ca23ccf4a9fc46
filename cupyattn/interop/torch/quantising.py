"""Linear layers of a model as INT8, one at a time, where their weights lie.

On a device codes are made and judged there. Verdicts are those of `cupyattn.checkpoints.analyze`:
where rounding could decide, and where a weight is kept, the host looks at it as `analyze` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cupyattn.checkpoints.analysis import TensorReport, has_codes, judge, report_of
from cupyattn.checkpoints.header import FLOATS, TensorInfo
from cupyattn.checkpoints.layout import WEIGHT
from cupyattn.checkpoints.weight_errors import WeightErrors, made_for, magnitudes, weight_errors
from cupyattn.interop.torch.bridge import as_array, as_tensor, on_device_of
from cupyattn.interop.torch.device_errors import worst_errors
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.ops.weights import weight_quant
from cupyattn.quant.blocks import BLOCK_SIZE, Int8Config

#: Short names of the types that weights may have; others have no codes.
_NAMES = {text: short for short, text in FLOATS.items()}
_OTHER = "F64"

#: Codes and scales, where the weight lies.
Made = tuple[Tensor, Tensor]


def quantised(
    layers: Mapping[str, nn.Linear],
    config: Int8Config | None,
    options: Mapping[str, Any],
    advance: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Int8Linear | None, str]]:
    """Yield the name of each layer, an INT8 layer where its weight may be codes, and why.

    Parameters
    ----------
    layers : mapping of str to Linear
        May lose a layer that was yielded.
    config : Int8Config, optional
    options : mapping
        For `Int8Linear`.
    advance : callable, optional
        Called with each name when its layer is done.

    Notes
    -----
    Memory beside the codes: on a device less than a large layer, on the host a few megabytes.
    """
    config = config or Int8Config()
    for name in list(layers):
        linear = layers[name]
        report, made = coded(f"{name}{WEIGHT}", linear.weight.detach(), config)
        layer = None
        if made is not None:
            layer = Int8Linear(*made, linear.bias, **options)
            layer.weight_dtype = linear.weight.dtype
        del linear, made  # so that a layer that is dropped leaves memory before the next is read
        yield name, layer, report.reason
        if advance is not None:
            advance(name)


def coded(name: str, w: Tensor, config: Int8Config) -> tuple[TensorReport, Made | None]:
    """Return the verdict on a weight, and its codes and scales where that is INT8.

    The report has no hash, and of a weight on a device whose codes were good at their worst it has
    figures of that.
    """
    dtype = _NAMES.get(str(w.dtype).removeprefix("torch."), _OTHER)
    info = TensorInfo(dtype, tuple(w.shape))
    faultless = judge(report_of(name, info, WeightErrors(max(1, info.elements))), config)
    may_be = has_codes(info) and info.elements > 0 and faultless.verdict == "int8"
    if w.is_cuda and w.numel():
        found = (_on_device if may_be else _finite)(name, info, w, config)
        if found is not None:
            return found
    array = as_array(w.to("cpu").contiguous())
    if not may_be:
        errors = magnitudes(array) if array.size else None
        return judge(report_of(name, info, errors), config), None
    made = made_for(info.shape, config.block_size, config.strategy)
    errors = weight_errors(array, config.block_size, config.strategy, made)
    report = judge(report_of(name, info, errors), config)
    if report.verdict != "int8":
        return report, None
    codes, scales = (as_tensor(x).to(w.device) for x in made)
    return report, (codes, scales)


def _on_device(
    name: str, info: TensorInfo, w: Tensor, config: Int8Config
) -> tuple[TensorReport, Made] | None:
    """Return the verdict INT8 and codes; None where the host has to look at the weight."""
    if config.block_size != BLOCK_SIZE:
        return None
    with on_device_of(w):
        codes, scales = map(as_tensor, weight_quant(as_array(w), strategy=config.strategy))
    errors = worst_errors(w, codes, scales, config.strategy)
    if errors is None:
        return None
    report = judge(report_of(name, info, errors), config)
    return (report, (codes, scales)) if report.verdict == "int8" else None


def _finite(
    name: str, info: TensorInfo, w: Tensor, config: Int8Config
) -> tuple[TensorReport, None] | None:
    """Return the verdict on a weight that its name or size keeps; None if it is not finite."""
    least, most = (float(x) for x in torch.stack(torch.aminmax(w)).tolist())
    largest = max(-least, most)
    if not math.isfinite(least + most):
        return None
    return judge(report_of(name, info, WeightErrors(info.elements, 0, largest)), config), None
