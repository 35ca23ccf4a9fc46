"""Find which attention module is being called, and intercept its calls of torch's attention.

Replaced modules have a class of the same name, which sends attention to the module's layer
(`class_of_layers`). It also prevents the use of earlier compiled code, whose guards check for the
original class. Hooks would not work: torch guards a hook by a unique number, so blocks could not
share their graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional
import torch.overrides
from torch import Tensor

from cupyattn.interop.diffusers.context_parallel import Ranks

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
#: The attribute of a module that holds its layer.
ATTRIBUTE = "_int8_layer"
#: The attribute of a replaced module's class that contains the original class.
_OWN = "_int8_own_class"


class Layer(Protocol):
    """The interface of `cupyattn.interop.diffusers.layers.Layer` for its callers."""

    module: Any
    own_backend: Any
    is_eager: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any],
        ranks: Ranks | None = None,
    ) -> Tensor | None:
        """Return O, or None if the native attention must run."""
        ...

    def attend_in_graph(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor | None:
        """Return O in a graph of torch, or None if the native attention must run."""
        ...

    def stays_native(self, reason: str) -> None:
        """Count a call that native attention runs."""
        ...

    def note(self, ran: str) -> None:
        """Record the layer's part in the graph that torch traces, for each run of that graph."""
        ...

    def before(self) -> None:
        """Begin to intercept attention of the module's call."""
        ...

    def after(self) -> None:
        """Stop intercepting."""
        ...

    def release(self) -> None:
        """Restore the backend of the processor."""
        ...


class _Calls(threading.local):
    """The layers whose modules are being called in this thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[Layer] = []


_calls = _Calls()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def open_call(layer: Layer) -> None:
    """Begin to intercept attention in an eager call of a layer's module."""
    _calls.open.append(layer)
    layer.before()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def close_call(layer: Layer) -> None:
    """End a call, even if it failed or was interrupted."""
    layer.after()
    _calls.open = [other for other in _calls.open if other is not layer]


def running_layer() -> Layer | None:
    """Return the layer whose module this thread calls eagerly, or None."""
    return _calls.open[-1] if _calls.open else None


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
        eager = not torch.compiler.is_compiling()
        if func is _ATTENTION and eager and running_layer() is self.layer:
            o = _attend(self.layer.attend, *args, **kwargs)
            if o is not None:
                return o
        return func(*args, **kwargs)


def _attend(
    attend: Callable[..., Tensor | None],
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
    return attend(query, key, value, scale, options)


# ---- the module's class --------------------------------------------------------------------------


def _eager(layer: Layer, function: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    """Run a module's call or forward, its attention sent to the module's layer."""
    if running_layer() is layer:  # its call, and now its forward
        return function(module, *args, **kwargs)
    try:
        open_call(layer)
        return function(module, *args, **kwargs)
    finally:
        close_call(layer)


def _traced(layer: Layer, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
    """Run a module's forward while torch traces it, its attention sent to the module's layer.

    Torch looks up its attention function when it traces the call, and finds the layer there. The
    function is in its place again when the graph runs. A torch function mode, as eager calls use,
    would also be traced, and torch cannot trace all tensor methods within one.
    """
    own, found = torch.nn.functional.scaled_dot_product_attention, 0

    def attention(*operands: Any, **options: Any) -> Any:
        nonlocal found
        # Code that torch could not trace runs with this replacement, in other threads, too.
        if torch.compiler.is_compiling() or running_layer() is layer:
            found += 1
            o = _attend(layer.attend_in_graph, *operands, **options)
            if o is not None:
                return o
        # NOTE: torch's CausalBias identifies the function by the object that has its name.
        torch.nn.functional.scaled_dot_product_attention = own
        try:
            return own(*operands, **options)
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        result = forward(module, *args, **kwargs)
    finally:
        torch.nn.functional.scaled_dot_product_attention = own
    if not found:
        layer.note("native: no call of torch's attention function")
    return result


def _passes_keys_on(module: Any) -> bool:
    """Return whether a module's ranks pass keys on in a ring; torch may trace this."""
    parallel = getattr(getattr(module, "processor", None), "_parallel_config", None)
    config = getattr(parallel, "context_parallel_config", None)
    return config is not None and config.ring_degree > 1


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a ring of codes agrees with other ranks on the host, between two graphs"
)
def _between_graphs(
    layer: Layer, forward: Callable[..., Any], module: Any, args: Any, kwargs: Any
) -> Any:
    """Run a module's forward between two graphs, its attention sent to the module's layer."""
    layer.is_eager = True
    return _eager(layer, forward, module, args, kwargs)


def layer_of(module: Any) -> Layer | None:
    """Return the layer of a replaced module or of its copy; None for other modules."""
    layer: Layer | None = vars(module).get(ATTRIBUTE)
    return layer


def replace_class(module: Any, layer: Layer) -> None:
    """Let a module send its attention to a layer in code that torch compiles from now on."""
    setattr(module, ATTRIBUTE, layer)
    own: Any = type(module)
    module.__class__ = class_of_layers(own)


def restore_class(module: Any) -> None:
    """Undo `replace_class`."""
    own = vars(type(module)).get(_OWN)
    if own is not None:  # or another library has replaced the class since
        module.__class__ = own
    delattr(module, ATTRIBUTE)


@functools.cache
def class_of_layers(own: Any) -> Any:
    """Return a class of the same name, whose calls send attention to the module's layer.

    torch traces ``forward`` of a module that is compiled alone. ``__call__`` runs replacements of
    ``forward`` by other libraries.
    """
    # NOTE: diffusers lets torch trace no attribute of some classes.
    own_call, own_forward = own.__call__, own.forward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, ATTRIBUTE, None)
        if layer is None or torch.compiler.is_compiling():
            return own_call(self, *args, **kwargs)
        return _eager(layer, own_call, self, args, kwargs)

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, ATTRIBUTE, None)
        if layer is None:
            return own_forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            layer.is_eager = True
            return _eager(layer, own_forward, self, args, kwargs)
        if _passes_keys_on(self):
            return _between_graphs(layer, own_forward, self, args, kwargs)
        layer.release()  # if the module is compiled alone, the call is eager
        return _traced(layer, own_forward, self, args, kwargs)

    names = {"forward": forward, "__call__": call, "__doc__": own.__doc__, _OWN: own}
    made = type(own.__name__, (own,), names)
    made.__module__, made.__qualname__ = own.__module__, own.__qualname__
    return made
