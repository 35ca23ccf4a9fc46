"""`record`: stores the inputs of layers of a running model, for calibration and analysis."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional
import torch.overrides
from torch import Tensor, nn

from cupyattn.diffusion.arguments import check_count, check_whole
from cupyattn.diffusion.recordings import RecordedCall, Recording
from cupyattn.errors import shown
from cupyattn.interop.handle import Handle, is_pipeline, uncompiled
from cupyattn.interop.selection import Patterns, Selection, check_found, compiled
from cupyattn.interop.torch.bridge import as_array
from cupyattn.interop.torch.forwards import substitute_of
from cupyattn.measure.words import counted, format_bytes

#: Default limit of a recorder's host memory, in bytes.
MAX_BYTES = 2**32
#: Rows that are kept of each call of a linear layer, evenly spaced.
LINEAR_ROWS = 64
#: Number of steps that remain when memory is full, before layers are dropped.
MIN_STEPS = 4

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_log = logging.getLogger("cupyattn")


@dataclass(frozen=True)
class _Kept:
    """One recorded call: a layer's number among its kind, a step, and host arrays."""

    layer: str
    number: int
    step: int
    arrays: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)


class Recorder:
    """Records a model that runs within it: `record` makes it.

    Use it as a context manager, and call `recording` and `save` afterwards. It may be entered
    again, for another prompt.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        step: Any,
        selection: Selection,
        steps: Sequence[int] | int | None,
        max_bytes: int,
        advance: Callable[[str], None] | None,
    ) -> None:
        self._models, self._step, self._selection = models, step, selection
        self._steps, self._max_bytes, self._advance = steps, max_bytes, advance
        self._hooks: list[Any] = []
        self._running: list[str] = []
        self._mode: _Calls | None = None
        self._kept: dict[str, list[_Kept]] = {"attention": [], "linear": []}
        self._numbers: dict[str, dict[str, int]] = {"attention": {}, "linear": {}}
        self._calls_of_model = 0
        self._bytes = 0
        self._every = {"step": 1, "layer": 1}  # of how many one is kept
        self._sigmas: Any = None
        self._at: int | None = None  # the step that runs; None: it is not recorded

    # ---- the recording ---------------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """All calls recorded so far.

        Raises
        ------
        ValueError
            If no call was recorded.
        """
        attention, linear = self._kept["attention"], self._kept["linear"]
        if not attention and not linear:
            raise ValueError(
                "nothing was recorded: run the model within the recorder, `with record(model) as "
                "recorder: model(...)`, and choose layers and steps that run"
            )
        known = self._sigmas is not None
        calls = [RecordedCall(k.layer, k.step if known else None, *k.arrays) for k in attention]
        rows: dict[str, list[Any]] = {}
        for k in linear:
            rows.setdefault(k.layer, []).append(k.arrays[0])
        inputs = {name: np.concatenate(some) for name, some in rows.items()}
        kinds = ", ".join(type(model).__name__ for model in self._models.values())
        return Recording(tuple(calls), inputs, self._sigmas, kinds)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `recording` as safetensors, which `Recording.load` reads."""
        self.recording.save(path)

    def __repr__(self) -> str:
        kept = [k for some in self._kept.values() for k in some]
        layers = {kind: len({k.layer for k in some}) for kind, some in self._kept.items()}
        left = ", ".join(
            f"one {name} in {n}" for name, n in self._every.items() if n > 1
        )  # fmt: skip
        return (
            f"Recorder of {counted(layers['attention'], 'layer')} of attention and "
            f"{counted(layers['linear'], 'linear layer')} at "
            f"{counted(len({k.step for k in kept}), 'step')}, {format_bytes(self._bytes)} of "
            f"{format_bytes(self._max_bytes)}{f', {left}' if left else ''}"
        )

    # ---- the context -----------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        """Begin to record."""
        if self._hooks:
            raise RuntimeError("this recorder records already: make another with record(...)")
        for prefix, model in self._models.items():
            self._hooks.append(
                model.register_forward_pre_hook(self._before_model, with_kwargs=True)
            )
            for name, module in model.named_modules():
                called = functools.partial(self._before, (prefix + name).rstrip("."))
                self._hooks.append(module.register_forward_pre_hook(called, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._after, always_call=True))
        self._mode = _Calls(self)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End recording; raise ValueError if nothing was recorded."""
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
        self._mode, self._at = None, None
        while self._hooks:
            self._hooks.pop().remove()
        self._running.clear()
        if kind is None and not any(self._kept.values()):
            raise ValueError(
                "nothing was recorded: no chosen layer ran at a chosen step; attention is seen "
                "where it calls torch.nn.functional.scaled_dot_product_attention"
            )

    # ---- while the model runs --------------------------------------------------------------------

    def _before_model(self, model: Any, args: Any, kwargs: Any) -> None:
        """Find the step for which the model is called."""
        number, self._calls_of_model = self._calls_of_model, self._calls_of_model + 1
        if self._step is not None:
            self._step.before(model, args, kwargs)
            if self._step.at is None:
                raise ValueError(
                    "the timestep is only on the device, so the recorder does not know the "
                    "step: give the model without its pipeline, whose calls are then counted"
                )
            number, sigmas = self._step.at.timestep, self._step.noise[0].falling
            if self._sigmas is None:
                self._sigmas = sigmas
                self._check_steps(sigmas.size)
            elif not np.array_equal(self._sigmas, sigmas):
                raise ValueError(
                    f"the recording is of a schedule of {self._sigmas.size} steps, this run has "
                    f"another, of {sigmas.size}: record them apart"
                )
        self._at = number if self._is_wanted(number) else None

    def _check_steps(self, count: int) -> None:
        if isinstance(self._steps, int):
            n = min(self._steps, count)
            self._steps = sorted({round(i * (count - 1) / max(n - 1, 1)) for i in range(n)})
        elif self._steps is not None and max(self._steps) >= count:
            raise ValueError(
                f"steps names step {max(self._steps)}, this run has 0 to {count - 1}: leave it out"
            )

    def _is_wanted(self, step: int) -> bool:
        if isinstance(self._steps, int):
            return step < self._steps
        if self._steps is not None and step not in self._steps:
            return False
        return self._place(step) % self._every["step"] == 0

    def _place(self, step: int) -> int:
        """Return a step's position among the requested steps."""
        return step if isinstance(self._steps, int | None) else self._steps.index(step)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(name)
        if self._at is None or not isinstance(module, nn.Linear) or name not in self._selection:
            return
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and x.ndim and x.numel():
            rows = x.detach().reshape(-1, x.shape[-1])
            self._keep("linear", name, (rows[:: -(-rows.shape[0] // LINEAR_ROWS)],))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Record operands of a call of torch's attention function."""
        name = self._running[-1] if self._running else None
        if self._at is not None and name is not None and name in self._selection and q.ndim == 4:
            self._keep("attention", name, (q, k, v))

    def _keep(self, kind: str, name: str, tensors: Sequence[Tensor]) -> None:
        numbers = self._numbers[kind]
        number = numbers.setdefault(name, len(numbers))
        if number % self._every["layer"] or self._at is None:
            return
        arrays = tuple(as_array(x.detach().to("cpu", copy=True).contiguous()) for x in tensors)
        kept = _Kept(name, number, self._at, arrays)
        self._kept[kind].append(kept)
        self._bytes += kept.nbytes
        while self._bytes > self._max_bytes:
            self._thin()
        if self._advance is not None:
            self._advance(name)

    def _thin(self) -> None:
        """Drop every second step, or every second layer if few steps are left."""
        everything = [k for some in self._kept.values() for k in some]
        steps = {k.step for k in everything}
        layers = [*dict.fromkeys(k.layer for k in everything)]
        more_layers = any(k.number for k in everything)  # the first of each kind always stays
        if len(steps) > (min(MIN_STEPS, len(layers)) if more_layers else 1):
            what = "step"
        elif more_layers:
            what = "layer"
        else:
            raise ValueError(
                f"one call of {' and one of '.join(layers)} takes {format_bytes(self._bytes)}, "
                f"more than max_bytes={self._max_bytes}: give more, or record smaller inputs"
            )
        self._every[what] *= 2
        every = self._every
        for kind, some in self._kept.items():
            self._kept[kind] = [
                k for k in some
                if self._place(k.step) % every["step"] == 0 and k.number % every["layer"] == 0
            ]  # fmt: skip
        self._bytes = sum(k.nbytes for some in self._kept.values() for k in some)
        if self._at is not None and self._place(self._at) % every["step"]:
            self._at = None  # the rest of this step
        _log.info("the recorder keeps one %s in %d from now on", what, every[what])


class _Calls(torch.overrides.TorchFunctionMode):
    """Passes calls of torch's attention function to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch; keep its operands if it is attention."""
        kwargs = kwargs or {}
        if func is _ATTENTION and not torch.compiler.is_compiling():
            names = ("query", "key", "value")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            self._recorder.attention(*(given[name] for name in names))
        return func(*args, **kwargs)


def record(
    model_or_pipe: Any,
    layers: Patterns = None,
    steps: int | Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
    *,
    scheduler: Any = None,
    advance: Callable[[str], None] | None = None,
) -> Recorder:
    """Keep Q, K, V of attention and inputs of linear layers of a model while it runs.

    Parameters
    ----------
    model_or_pipe : DiffusionPipeline or torch.nn.Module
        For a pipeline, all models that take a timestep. The model runs unchanged.
    layers : str or sequence of str, optional
        Regular expressions, searched in the names of modules; all layers when omitted. Attention
        has the name of the module that calls torch's attention function.
    steps : int or sequence of int, optional
        Which steps, 0 = most noise; or their number, evenly spaced over the schedule. For a model
        without a scheduler, calls are counted, and a number means the first calls.
    max_bytes : int
        Limit of host memory. When it is reached, every second step is dropped, repeatedly, until 4
        steps are left; then every second layer.
    scheduler : object, optional
        Scheduler of the steps, for a model without a pipeline.
    advance : callable, optional
        Called with the name of a layer for each recorded call, for a progress bar.

    Returns
    -------
    Recorder
        A context manager, with `recording` and `save(path)`.

    Raises
    ------
    TypeError
        For anything but a pipeline or a module, for patterns that are not text, and for an
        `advance` that cannot be called.
    ValueError
        For a pattern that matches no name, a compiled model, a model with INT8 attention, and
        invalid steps. While the model runs: for a call larger than `max_bytes`, a step that the
        schedule does not have, and a run with another schedule. At the end, if no call was
        recorded.
    UnsupportedError
        For a scheduler whose noise is unknown.

    Notes
    -----
    Each call is copied to the host, which waits for a device. Of a linear layer's input, up to
    64 evenly spaced rows of each call are kept. Attention within `torch.nn.MultiheadAttention` is
    not recorded, because torch shows only that function, not the operands of attention.

    Examples
    --------
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.to_q = nn.Linear(16, 16)
    ...     def forward(self, x):
    ...         q = self.to_q(x)[:, None]
    ...         return nn.functional.scaled_dot_product_attention(q, q, q)
    >>> model = nn.Sequential(Block())
    >>> with record(model) as recorder:
    ...     _ = model(torch.ones(1, 5, 16))
    >>> recorder.recording.layers, sorted(recorder.recording.inputs)
    (('0',), ['0.to_q'])
    """
    patterns = None if layers is None else compiled("layers", layers)
    models, step = _models(model_or_pipe, scheduler)
    names = [
        (prefix + name).rstrip(".") for prefix, model in models.items()
        for name, _ in model.named_modules()
    ]  # fmt: skip
    check_found("layers", patterns or (), [name for name in names if name], "module")
    for name, module in _modules(models):
        if getattr(module, "_compiled_call_impl", None) or substitute_of(module):
            raise ValueError(
                f"{name or type(module).__name__} is compiled, and runs no code that could be "
                "recorded: record the model before it is compiled"
            )
        if "_int8_layer" in vars(module):
            raise ValueError(
                f"attention of {name} is INT8: record the model before "
                "replace_attention_with_int8, or restore() it first"
            )
    most = check_count("max_bytes", max_bytes)
    if advance is not None and not callable(advance):
        raise TypeError(
            f"advance must be a function of a layer's name, got {shown(advance)}: leave it out, or "
            "give print"
        )
    return Recorder(models, step, Selection(patterns, ()), _steps(steps), most, advance)


def _modules(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, model in models.items():
        for name, module in model.named_modules():
            yield prefix + name, module


def _steps(steps: Any) -> Sequence[int] | int | None:
    """Check the caller's steps, and return them."""
    if steps is None:
        return None
    if not isinstance(steps, str) and isinstance(steps, (Sequence, range)):
        found = sorted({check_whole("a step of steps", step) for step in steps})
        if not found or found[0] < 0:
            raise ValueError(f"steps must be indices of steps, 0 or more, got {shown(steps)}")
        return found
    return check_count("steps", steps)


def _models(model_or_pipe: Any, scheduler: Any) -> tuple[dict[str, nn.Module], Any]:
    """Return models by the prefixes of their names, and the source of their steps, or None."""
    if isinstance(model_or_pipe, Handle):
        raise ValueError(
            f"{type(model_or_pipe).__name__} has replaced layers: record the model before, or "
            "restore() it first"
        )
    of_pipeline = is_pipeline(model_or_pipe)
    if not of_pipeline and not isinstance(model_or_pipe, nn.Module):
        raise TypeError(
            "model_or_pipe must be a DiffusionPipeline or a torch.nn.Module, got "
            f"{type(model_or_pipe).__name__}"
        )
    if not of_pipeline and scheduler is None:
        _check_not_compiled(model_or_pipe)
        return {"": model_or_pipe}, None
    replace = importlib.import_module("cupyattn.interop.diffusers.replace")
    owner, models = replace.models_of(model_or_pipe, scheduler)
    parts = model_or_pipe.components if of_pipeline else {"": model_or_pipe}
    for part in parts.values():
        _check_not_compiled(part)
    return models, replace.steps_of(owner)


def _check_not_compiled(model: Any) -> None:
    if uncompiled(model) is not model:
        raise ValueError(
            f"{type(model).__name__} is compiled, and runs no code that could be recorded: record "
            "the model that torch.compile was given"
        )
