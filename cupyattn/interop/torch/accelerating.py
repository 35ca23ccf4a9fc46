"""`accelerate`: INT8 layers by measured settings, compiled, in one call; and its handle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cupyattn.checkpoints.writer import check_target
from cupyattn.interop.handle import NOT_COMPILED, Handle, target_of
from cupyattn.interop.restoring import restore
from cupyattn.interop.selection import Patterns
from cupyattn.interop.torch.accelerated_lines import replaced_of, summary_lines
from cupyattn.interop.torch.accelerated_parts import (
    Log,
    Part,
    Request,
    codes_of,
    exactly,
    layer_names,
    part_of,
)
from cupyattn.interop.torch.comparing import compare, named
from cupyattn.interop.torch.compiling import compiled_blocks
from cupyattn.interop.torch.models import (
    NothingReplaced,
    layers_of_calls,
    replace_linear_with_int8,
)
from cupyattn.interop.torch.quantising import Activations, check_names
from cupyattn.interop.torch.writing import check_writable, write_int8
from cupyattn.measure.trial import Comparison
from cupyattn.measure.words import counted, printable

#: Knows the attention modules of diffusers that are replaced; not imported if none are.
_INTERCEPTION = "cupyattn.interop.diffusers.interception"


@dataclass(frozen=True, repr=False)
class Acceleration:
    """The work of `accelerate`, and the calls since, shown line by line.

    Parameters
    ----------
    lines : tuple of str
        Five lines that say what was done.
    layers : mapping of str to str
        The outcome for each linear layer, with the reason.
    attention : object or None
        `cupyattn.interop.diffusers.Report` of the attention modules, None if all are native.
    scales : mapping of str to str
        The choice between scales of channels and of blocks, and its reason, by component.
    """

    lines: tuple[str, ...]
    layers: Mapping[str, str]
    attention: Any = None
    scales: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        scales = (f"{name}: {why}" if name else why for name, why in self.scales.items())
        found = [*self.lines, *scales, *(f"{name}: {what}" for name, what in self.layers.items())]
        found += [] if self.attention is None else [str(self.attention)]
        return "\n".join(found)

    def __repr__(self) -> str:
        return str(self)


class Accelerated(Handle):
    """A pipeline or a model that `accelerate` made faster, until it is restored.

    Calls and attributes go to the pipeline or the model; `target`, `report`, `restore`, `save` and
    `compare` belong to the handle. As a context manager it restores at the end.
    """

    __slots__ = ("_handle_attention", "_handle_parts", "_handle_request")
    _handle_maker = "accelerate"
    _handle_arguments = (
        "accuracy", "compile", "include", "exclude", "checkpoint", "activations", "again", "arch",
        "backend", "log",
    )  # fmt: skip
    _handle_attention: Any
    _handle_parts: tuple[Part, ...]
    _handle_request: Request

    def __init__(
        self, target: Any, parts: Sequence[Part], attention: Any, request: Request
    ) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_parts", tuple(parts))
        object.__setattr__(self, "_handle_attention", attention)
        object.__setattr__(self, "_handle_request", request)

    # If torch compiles a function that calls the handle, the error gives this reason.
    __call__ = torch.compiler.disable(Handle.__call__, recursive=False, reason=NOT_COMPILED)

    def report(self) -> Acceleration:
        """Return what was done, the outcome for each layer, and the calls of attention since."""
        layers: dict[str, str] = {}
        for part in self._handle_parts:
            if part.linear is not None:
                became = {n: f"INT8, {why}" for n, why in part.linear.replaced.items()}
                became |= {n: f"kept, {why}" for n, why in part.linear.kept.items()}
                layers |= {f"{part.prefix}{name}": what for name, what in became.items()}
        attention = None if self._handle_attention is None else self._handle_attention.report()
        lines = summary_lines(
            self.target, self._handle_parts, self._handle_attention, self._handle_request,
            undone=self._handle_undone(),
        )  # fmt: skip
        scales = {
            part.prefix.removesuffix("."): part.linear._handle_choice
            for part in self._handle_parts
            if part.linear is not None and part.linear._handle_choice
        }
        return Acceleration(lines, {printable(n): printable(w) for n, w in layers.items()},
                            attention, scales)  # fmt: skip

    def restore(self) -> None:
        """Restore layers, attention and code of the pipeline or the model, to the bit.

        A second call does nothing.

        Raises
        ------
        RuntimeError
            If hooks that move weights prevent it: remove the offloading hooks first. INT8 linear
            layers then stay; everything else is restored.
        """
        _undo(self._handle_parts, self._handle_attention)

    def _handle_undone(self) -> set[str]:
        """Return which of ``"linear"``, ``"attention"`` and ``"compiled"`` are not in place now.

        Another handle, the caller, or an error in the middle of `restore` may have undone a part.
        """
        parts, attention = self._handle_parts, self._handle_attention
        linear = [part.linear for part in parts if part.linear is not None]
        code = [part.compiled for part in parts if part.compiled is not None]
        undone = set()
        if linear and not any(one._handle_in_place() for one in linear):
            undone.add("linear")
        if attention is not None and not attention._handle_is_in_place():
            undone.add("attention")
        if code and all(one.is_undone for one in code):
            undone.add("compiled")
        return undone

    def _handle_check_alone(self) -> None:
        """Raise ValueError if other handles replaced parts of the models, too."""
        models = [part.model for part in self._handle_parts]
        own = [part.linear._handle_call for part in self._handle_parts if part.linear is not None]
        layers = sum(
            all(call is not one for one in own) for model in models
            for call, _ in layers_of_calls(model)
        )  # fmt: skip
        attention = self._handle_attention
        modules = 0
        if _INTERCEPTION in sys.modules:
            layer_of = sys.modules[_INTERCEPTION].layer_of
            found = (layer_of(module) for model in models for module in model.modules())
            mine = () if attention is None else attention._handle_layers
            modules = sum(one is not None and all(one is not x for x in mine) for one in found)
        others = [counted(layers, "linear layer")] if layers else []
        others += [counted(modules, "attention module")] if modules else []
        if others:
            raise ValueError(
                f"another handle replaced {' and '.join(others)} of the same models, whose gain "
                "would count as this one's: restore() that handle, or accelerate all at once, "
                "again=True"
            )

    def save(
        self, folder: str | PathLike[str], *, advance: Callable[[str], None] | None = None
    ) -> Path:
        """Write the INT8 layers with the rest of each model; ``checkpoint=`` takes the folder.

        Parameters
        ----------
        folder : path
            For a pipeline, it gets a folder for each model, named as the component. For a model, it
            is the folder of the model, which `load_int8` reads, too.
        advance : callable, optional
            Called with the name of each tensor when it was written, and again when it was checked.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        OSError
            If something cannot be written, or is there already.
        ValueError
            If no linear layer is INT8, or the weights are offloaded.
        """
        written = [part for part in self._handle_parts if part.linear is not None]
        if not written or "linear" in self._handle_undone():
            why = "after restore()" if written else "see report()"
            raise ValueError(f"no linear layer is INT8, so there are no codes to save: {why}")
        home = Path(folder)
        for part in written:
            check_writable(part.model)
        if any(part.prefix for part in written):
            home.mkdir(exist_ok=True)
        targets = [home / part.prefix.removesuffix(".") for part in written]
        for target in targets:  # all of them before the first is written
            check_target(target)
        for part, target in zip(written, targets, strict=True):
            write_int8(part.model, target, advance)
        return home

    def compare(
        self,
        *args: Any,
        rounds: int = 7,
        record: str | PathLike[str] | None = None,
        page: str | PathLike[str] | None = None,
        seed: int = 0,
        log: Log = print,
        **call: Any,
    ) -> Comparison:
        """Run a call native and accelerated in turns, to measure gain and cost of each part.

        Parameters
        ----------
        *args, **call
            Arguments of the pipeline or the model.
        rounds : int
            Timed runs of each way, after one run that compiles.
        record : path, optional
            JSON, written after each run. An existing file is continued.
        page : path, optional
            A page of HTML, with pictures side by side.
        seed : int
            Seed of each run's generator, unless the call names a generator.
        log : callable, optional
            Called with a line after each run, with the remaining time; None: silent.

        Returns
        -------
        Comparison
            Its text has the time of a step with 95 % intervals, memory, relative L2 error of
            latents by step, PSNR and SSIM of pictures, and a verdict on each part.

        Raises
        ------
        TypeError
            For arguments without a name that the pipeline or the model does not take.
        ValueError
            If the weights are offloaded, other hooks of diffusers are there, the caller compiled a
            model, the pipeline has another model now, another handle replaced parts of a model, or
            `record` is of another comparison.
        RuntimeError
            After `restore`, and if the weights of INT8 layers are lost.

        Notes
        -----
        The native model is compiled as the accelerated one is, and its weights are on the device,
        too. A step of a pipeline is a step of its scheduler; a step of a model is a call. If the
        model has a step cache, ``pipe.transformer.enable_cache(config)``, all ways have it. A
        further native run without it shows the gain of cache and INT8 together.
        """
        replaced = replaced_of(self._handle_parts, self._handle_attention)
        if not replaced:
            raise RuntimeError(
                "nothing is replaced, so that there is nothing to compare: report() says why"
            )
        if replaced <= self._handle_undone():
            raise RuntimeError(
                "all that this handle replaced is native since restore(), or belongs to a later "
                "handle since again=True, so that there is nothing to compare: accelerate again"
            )
        self._handle_check_alone()
        return compare(
            self.target, self._handle_parts, self._handle_request,
            named(self.target, args, call), rounds=rounds, record=record, page=page,
            seed=seed, log=log,
        )  # fmt: skip


def accelerate(
    model: nn.Module,
    accuracy: str = "full",
    *,
    compile: str | bool = "blocks",
    include: Patterns = None,
    exclude: Patterns = None,
    checkpoint: str | PathLike[str] | None = None,
    activations: Activations | None = None,
    again: bool = False,
    arch: str | None = None,
    backend: str | None = None,
    log: Log = print,
) -> Accelerated:
    """Make a module with linear layers faster: INT8 layers, compiled.

    `cupyattn.interop.diffusers.accelerate` takes pipelines and models of diffusers, and replaces
    their attention, too. All other arguments and results are described there.

    Parameters
    ----------
    model : Module
        Modified in place.
    accuracy : {"full", "balanced", "aggressive"}
        Attention stays native in each class, and linear layers are INT8 in each.
    compile : {"blocks", "graphs", False}
        As there; a model that names no blocks is compiled as a whole.
    include, exclude, checkpoint, activations, again, arch, backend, log : optional
        As there. Names are names of the model's layers.

    Returns
    -------
    Accelerated
        Used like the model, with `report()`, `restore()`, `save(folder)` and `compare(...)`.

    Raises
    ------
    TypeError
        If `model` is no module, and for arguments of another type.
    ValueError
        For an unknown accuracy or way to compile, and as `replace_linear_with_int8`. The model is
        then as it was.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> handle = accelerate(model, compile=False, log=None, backend="mirror")
    >>> handle.report().lines[1]
    'linear layers: 1 of 2 in INT8 with a scale for each block, 72 % less memory for weights'
    >>> handle.restore()
    >>> type(model[0]).__name__
    'Linear'
    """
    request = Request(
        accuracy, compile, include, exclude, checkpoint, activations, again, arch, backend, log
    )  # fmt: skip
    model = target_of(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: give a pipeline to "
            "cupyattn.interop.diffusers.accelerate"
        )
    part = part_of("", model)
    part.native["attention"] = "cupyattn.interop.diffusers.accelerate takes models of diffusers"
    names = [*layer_names(part)]
    request.selection.check(names, "linear layer")
    check_names(request.activations, names)
    return accelerated(model, [part], request, _no_attention)


# ---- shared by both functions `accelerate` -------------------------------------------------------


def accelerated(
    target: Any, parts: Sequence[Part], request: Request, attend: Callable[[], Any]
) -> Accelerated:
    """Replace and compile, or leave everything as it was; return the handle.

    Parameters
    ----------
    target : DiffusionPipeline or Module
    parts : sequence of Part
        Its models.
    request : Request
    attend : callable
        Replaces attention and returns its handle, or None if all attention stays native.
    """
    attention = None
    for part in parts if request.again else ():
        restore(part.model)
    try:
        for part in parts:
            _replace_layers(part, request, alone=len(parts) == 1)
        attention = attend()
        for part in parts:
            if request.compile and len(part.native) < 2:
                graphs = request.compile == "graphs"
                part.compiled = compiled_blocks(part.given(target), graphs=graphs)
        handle = Accelerated(target, parts, attention, request)
        if request.log is not None:
            for line in handle.report().lines:
                request.log(line)
        return handle
    except BaseException:
        _undo(parts, attention)
        raise


def _undo(parts: Sequence[Part], attention: Any) -> None:
    for part in parts:
        if part.compiled is not None:
            part.compiled.undo()
    if attention is not None:
        attention.restore()
    for part in parts:
        if part.linear is not None:
            part.linear.restore()


def _replace_layers(part: Part, request: Request, *, alone: bool) -> None:
    """Make the linear layers of a model INT8, if there are any and the record shows a gain."""
    everything = [*layer_names(part)]
    selection = request.selection
    names = [name for name in everything if name in selection]
    part.is_partial |= 0 < len(names) < len(everything)
    if not names:
        part.native["linear"] = "excluded" if everything else "the model has none"
    if not names or not part.settle("linear", request):
        return
    try:
        part.linear = replace_linear_with_int8(
            part.model,
            codes_of(part, request.checkpoint, alone=alone),
            include=exactly(name.removeprefix(part.prefix) for name in names),
            arch=request.arch, backend=request.backend,
            activations=part.own(request.activations),
        )  # fmt: skip
    except NothingReplaced as error:
        if request.checkpoint is not None:
            raise  # rather than to leave codes unused that were asked for
        part.native["linear"] = str(error)


def _no_attention() -> None:
    """Replace no attention, because without diffusers all of it stays native."""
