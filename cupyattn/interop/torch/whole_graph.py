"""Run a model's whole pass as one CUDA graph, recorded for each form of its arguments.

The host then launches one graph in place of a thousand kernels. A pass is recorded at its third
call: the first compiles, the second completes all one-time preparation. A graph repeats the work
of the device, but no host code. So passes run without a graph if host code decides: with hooks of
diffusers in the model (step caches, offloading), adapters or gradients. The same holds for
arguments with numbers on the host.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cupyattn.interop.torch.bridge import form_of
from cupyattn.interop.torch.forwards import Substitute
from cupyattn.interop.torch.offloading import is_hooked

_log = logging.getLogger("cupyattn")

#: Largest number of recorded forms of a pass; each needs memory for intermediate results.
MOST_GRAPHS = 4
#: Calls of a form that run before it is recorded.
CALLS_BEFORE = 2
#: Types of values other than tensors that identify a form.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)

#: The attribute of a replaced attention module that holds its layer; its class is another, too.
_LAYER = "_int8_layer"
#: Reason that torch gives if a caller compiles the whole model with ``fullgraph=True``.
_NOT_TRACED = "accelerate(..., compile='graphs') runs this pass: compile with compile='blocks' only"

Form = tuple[Any, ...]


class _Recorded(NamedTuple):
    """A recorded pass, its arguments and result, and the parts of the model that it ran."""

    graph: Any
    arguments: list[Tensor]
    result: Any
    addresses: list[tuple[dict[str, Any], str, int]]
    parts: list[tuple[dict[str, Any], str, nn.Module, type[nn.Module]]]
    attention: list[tuple[dict[str, Any], Any]]


class WholeGraph:
    """Calls a model's ``forward`` by CUDA graphs, until `undo`.

    Parameters
    ----------
    model : Module
        An attribute hides its ``forward``.
    record : callable, optional
        Runs a call without arguments while it records a graph; returns the graph and the result of
        the call. torch's recorder when omitted.

    Attributes
    ----------
    reasons : Counter of str
        Why passes ran without a graph, except those before the first recording.
    """

    def __init__(
        self, model: nn.Module, record: Callable[[Callable[[], Any]], tuple[Any, Any]] | None = None
    ) -> None:
        self.reasons: Counter[str] = Counter()
        self._model, self._forward = model, model.forward
        self._record = record or _recorded
        self._seen: Counter[Form] = Counter()
        self._graphs: dict[Form, _Recorded | None] = {}
        self._modules = [*model.modules()]
        self._substitute = Substitute(model, lambda _: self)

    def undo(self) -> None:
        """Restore the model's ``forward``, and return the graphs' memory to torch."""
        self._substitute.undo()
        self._graphs.clear()

    # NOTE: code that is compiled around it calls it, and compiles the pass within.
    @torch.compiler.disable(recursive=False, reason=_NOT_TRACED)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass, by its graph if there is one."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        reason = self._obstacle(leaves)
        form = () if reason else _form_of(leaves, structure)
        if not reason and self._seen[form] < CALLS_BEFORE:
            self._seen[form] += 1
            return self._forward(*args, **kwargs)
        if not reason and form not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                reason = f"more than {MOST_GRAPHS} forms of a pass"
            else:
                self._graphs[form] = self._try(leaves, structure)
        recorded = None if reason else self._graphs[form]
        if recorded is not None and not _in_place(recorded):
            del self._graphs[form]
            recorded, reason = None, "weights or layers that were moved or replaced since"
        if recorded is None:
            self._say(reason or "a pass that cannot be recorded")
            return self._forward(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        for own, given in zip(recorded.arguments, tensors, strict=True):
            own.copy_(given)
        recorded.graph.replay()
        return pytree.tree_map(_copied, recorded.result)

    def _obstacle(self, leaves: Sequence[Any]) -> str:
        """Return why a pass runs without a graph; "" if it may be recorded."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            return "gradients"
        if self._model.training:
            return "a model that is being trained"
        if getattr(self._model, "peft_config", None):
            return "adapters"
        if any(map(is_hooked, self._modules)):
            return "hooks of step caches or offloading"
        for x in leaves:
            if isinstance(x, Tensor):
                if not _on_device(x):
                    return "arguments on the host"
            elif not isinstance(x, _VALUES):
                return f"an argument of type {type(x).__name__}"
        return ""

    def _try(self, leaves: Sequence[Any], structure: Any) -> _Recorded | None:
        """Record a pass; None if something in it waits for the device."""
        own = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(own, structure)
        try:
            graph, result = self._record(lambda: self._forward(*args, **kwargs))
        except RuntimeError as error:
            self._say(f"a pass that cannot be recorded: {str(error).splitlines()[0]}")
            return None
        self._modules = [*self._model.modules()]
        homes = [vars(module) for module in self._modules]
        addresses = [
            (home[kind], name, x.data_ptr())
            for home in homes for kind in ("_parameters", "_buffers")
            for name, x in home[kind].items() if x is not None
        ]  # fmt: skip
        parts = [
            (home["_modules"], name, part, type(part))
            for home in homes for name, part in home["_modules"].items() if part is not None
        ]  # fmt: skip
        attention = [(home, home[_LAYER]) for home in homes if _LAYER in home]
        arguments = [x for x in own if isinstance(x, Tensor)]
        return _Recorded(graph, arguments, result, addresses, parts, attention)

    def _say(self, reason: str) -> None:
        self.reasons[reason] += 1
        if self.reasons[reason] == 1:
            _log.info("%s runs without a CUDA graph: %s", type(self._model).__name__, reason)


def _on_device(x: Tensor) -> bool:
    return bool(x.is_cuda)


def _form_of(leaves: Sequence[Any], structure: Any) -> Form:
    """Return those properties of arguments on which a graph depends, without tensors' values."""
    found = [
        form_of(x) if isinstance(x, Tensor) else (type(x), x) for x in leaves
    ]
    return structure, *found


def _in_place(recorded: _Recorded) -> bool:
    """Whether layers run the same code, with parameters and buffers where a graph reads them."""
    return (
        all(home.get(name) is x and type(x) is cls for home, name, x, cls in recorded.parts)
        and all(home.get(_LAYER) is layer for home, layer in recorded.attention)
        and all(
            (x := home.get(name)) is not None and x.data_ptr() == address
            for home, name, address in recorded.addresses
        )
    )


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _recorded(call: Callable[[], Any]) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
