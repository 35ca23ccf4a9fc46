"""``torch.ops.cupyattn.norm_quant``: rows normalised, modulated, activated, rotated, then codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.bridge import Tensors
from cupyattn.interop.torch.ops import define, differentiate
from cupyattn.ops.norm_quant import NORM_QUANT, NormQuantSettings
from cupyattn.ops.operation import run
from cupyattn.problem.row_preparation import EPS
from cupyattn.quant.activation import columns_of
from cupyattn.quant.blocks import BLOCK_SIZE

_TENSORS = Tensors()
#: Tensors of the operator, in the order of its schema.
_NAMES = ("x", "weight", "bias", "scale", "shift")


def norm_quant(
    x: Tensor,
    *,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: str | None = None,
    rotate: str | None = None,
    eps: float = EPS,
    strategy: str = "channel",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise, modulate, activate and rotate rows, and quantise them, as one operator of torch.

    Parameters
    ----------
    x : Tensor, (..., channels)
        float16, bfloat16 or float32, on a CUDA device or a CPU.
    norm, weight, bias, scale, shift, activation, rotate, eps, strategy, backend
        As for `cupyattn.norm_quant`.

    Returns
    -------
    codes : Tensor, (..., channels), int8
    scales : Tensor, (..., 1) or (..., blocks), float32
        Both are on the device of x, written on torch's current stream.

    Raises
    ------
    TypeError, ValueError
        As for `cupyattn.norm_quant`.
    UnsupportedError
        As there, and if a tensor requires a gradient, which codes do not have.

    Notes
    -----
    `torch.compile` keeps it in its graph, and a CUDA graph may capture it.

    Examples
    --------
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> codes, scales = norm_quant(x, norm="rms")
    >>> codes.tolist(), round(scales.item() * 127, 4)
    ([[95, 127]], 1.1314)
    """
    given = x, weight, bias, scale, shift
    for name, tensor in zip(_NAMES, given, strict=True):
        if not isinstance(tensor, Tensor | Proxy) and (tensor is not None or name == "x"):
            kind = type(tensor).__name__
            raise TypeError(f"norm_quant(): argument {name!r} must be Tensor, not {kind}")
    made: tuple[Tensor, Tensor] = _operator(
        *given, norm, activation, rotate, eps, strategy, backend
    )
    return made


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Quantise rows: the operator's kernel on a CPU or a CUDA device."""
    given = zip(_NAMES, arguments, strict=False)
    tensors = {name: tensor for name, tensor in given if tensor is not None}
    settings = NormQuantSettings(*arguments[len(_NAMES) :])
    made = run(NORM_QUANT, settings, tensors, library=_TENSORS)
    return made["codes"], made["scales"]


def _fake(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    settings = NormQuantSettings(*arguments[len(_NAMES) - 1 :])
    channels = columns_of(x.shape[-1], settings.activation or "")
    blocks = 1 if settings.strategy == "channel" else -(-channels // BLOCK_SIZE)
    codes = x.new_empty((*x.shape[:-1], channels), dtype=torch.int8)
    return codes, x.new_empty((*x.shape[:-1], blocks), dtype=torch.float32)


def _refuse(*_: Any, **named: Any) -> Any:
    raise UnsupportedError(
        "the derivative for 'cupyattn::norm_quant' is not implemented, codes have none: call it "
        "under torch.no_grad(), or use torch's own norm where a gradient is wanted"
    )


_operator = define(
    "norm_quant",
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, str? norm, "
    "str? activation, str? rotate, float eps, str strategy, str? backend",
    "(Tensor codes, Tensor scales)", _run, _fake,
)  # fmt: skip
differentiate(_operator, _refuse, _refuse)
