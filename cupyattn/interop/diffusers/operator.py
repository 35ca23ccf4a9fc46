"""``torch.ops.cupyattn.diffusers_attention``: a layer's attention in a graph of torch.

Its result has the layout of its queries, as in eager calls, so what follows needs no copy.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch import bridge, epilogues
from cupyattn.interop.torch.calls import TensorSettings, forward
from cupyattn.interop.torch.checks import check_tensors
from cupyattn.interop.torch.ops import define
from cupyattn.interop.torch.schema import ATTENTION_OF_LAYER as _SCHEMA

_log = logging.getLogger("cupyattn")

#: Calls of this process in compiled code that fell back to 16 bits, by reason.
fallbacks: Counter[str] = Counter()


def text_of(settings: TensorSettings) -> str:
    """Return all settings except the scale, as text for the operator."""
    return str(_SCHEMA.flat({}, settings)[-1])


def attend(tensors: Mapping[str, Tensor], scale: float | None, text: str) -> Tensor:
    """Run attention in a graph.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        "q", "k" and "v", (batch, heads, len, head_dim), and "mask" and "bias" if given.
    scale : float, optional
    text : str
        Result of `text_of`.
    """
    if torch.compiler.is_compiling():
        epilogues.register()
    operands = [tensors.get(name) for name in _SCHEMA.tensors]
    o: Tensor = torch.ops.cupyattn.diffusers_attention(*operands, scale, 0, False, text)
    return o


@functools.lru_cache(maxsize=256)
def _settings(*arguments: Any) -> TensorSettings:
    """Return the settings from the operator's arguments after the tensors."""
    return _SCHEMA.settings((*[None] * len(_SCHEMA.tensors), *arguments))


def _attention(*arguments: Any) -> Tensor:
    tensors = _SCHEMA.given(arguments)
    settings = _settings(*arguments[len(_SCHEMA.tensors) :])
    try:
        return forward(settings, tensors)[0]
    except UnsupportedError as error:
        call = settings.of_call
        if call.variant != "fa_int8" and call.accuracy == "full":
            raise
        fallbacks[str(error)] += 1
        level = logging.WARNING if fallbacks[str(error)] == 1 else logging.DEBUG
        _log.log(level, "compiled attention fell back to 16 bits: %s", error)
        sixteen = call._replace(variant="auto", accuracy="full", quant=None)
        with bridge.noting():  # each of these calls is counted
            return forward(settings._replace(of_call=sixteen), tensors)[0]


def _attention_fake(*arguments: Any) -> Tensor:
    tensors = _SCHEMA.given(arguments)
    check_tensors("diffusers_attention", tensors)
    return torch.empty_like(tensors["q"])


define("diffusers_attention", f"{_SCHEMA}", "Tensor", _attention, _attention_fake)
