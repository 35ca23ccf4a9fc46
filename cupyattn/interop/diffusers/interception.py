"""Which attention module is being called, and its calls of torch's attention function."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional
import torch.overrides
from torch import Tensor

_ATTENTION = torch.nn.functional.scaled_dot_product_attention


class Layer(Protocol):
    """What `cupyattn.interop.diffusers.layers.Layer` is for those who call it."""

    module: Any
    own_backend: Any

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """Return O; None where the model's own attention is to run."""
        ...

    def stays_native(self, reason: str) -> None:
        """Count a call that the model's own attention runs."""
        ...


class _Calls(threading.local):
    """The layers whose modules are being called in this thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[Layer] = []


_calls = _Calls()


def open_call(layer: Layer) -> None:
    """Remember that a layer's module is being called."""
    forget_interrupted(layer)
    _calls.open.append(layer)


def close_call(layer: Layer) -> None:
    """Forget it again."""
    _calls.open = [other for other in _calls.open if other is not layer]


def forget_interrupted(layer: Layer | None = None) -> None:
    """Forget calls that never closed: torch runs no hooks after a KeyboardInterrupt.

    Parameters
    ----------
    layer : Layer, optional
        Whose module begins to be called, so that an older call of it has ended.
    """
    _calls.open = [x for x in _calls.open if x is not layer and _is_running(x.module)]
    while isinstance(mode := torch.overrides._get_current_function_mode(), AttentionCalls):
        if any(mode.layer is x for x in _calls.open):
            break
        mode.__exit__(None, None, None)


def running_layer() -> Layer | None:
    """Return the layer whose module is being called, None outside of all."""
    if _calls.open and _is_running(_calls.open[-1].module):
        return _calls.open[-1]
    return None


def _is_running(module: Any) -> bool:
    """Whether a module's call is on this thread's stack."""
    code, frame = torch.nn.Module._call_impl.__code__, sys._getframe(1)
    above: Any = frame
    while above is not None:
        if above.f_code is code and above.f_locals.get("self") is module:
            return True
        above = above.f_back
    return False


class AttentionCalls(torch.overrides.TorchFunctionMode):
    """Sends `torch.nn.functional.scaled_dot_product_attention` of one layer's module to the layer.

    Parameters
    ----------
    layer : Layer
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, or the layer in its place."""
        kwargs = kwargs or {}
        if func is _ATTENTION and running_layer() is self.layer:
            o = _attend(self.layer, *args, **kwargs)
            if o is not None:
                return o
        return func(*args, **kwargs)


def _attend(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    return layer.attend(query, key, value, scale, options)
