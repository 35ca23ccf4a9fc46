"""`accelerate`: INT8 layers by measured settings, compiled, in one call; and its handle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cupyattn.diffusion.whole_gains import FASTER, WholeModel, judged, nearest, said
from cupyattn.interop.handle import NOT_COMPILED, Handle, target_of, uncompiled
from cupyattn.interop.selection import Patterns, Selection
from cupyattn.interop.torch.candidates import int8_layers, linear_layers
from cupyattn.interop.torch.compiling import COMPILED, Compiled, compiled_blocks
from cupyattn.interop.torch.models import NothingReplaced, Replacement, replace_linear_with_int8
from cupyattn.interop.torch.writing import write_int8
from cupyattn.measure.words import counted, printable
from cupyattn.quant.blocks import Int8Config

#: Accuracy classes of attention, as `cupyattn.attention` has them.
ACCURACIES = ("full", "balanced", "aggressive")
#: Kinds of reasons that a line names before the rest is counted.
_MOST_REASONS = 3

Log = Callable[[str], object] | None


@dataclass(frozen=True)
class Request:
    """The arguments of `accelerate` that are the same with and without diffusers.

    Parameters
    ----------
    accuracy, compile, include, exclude, checkpoint, again, arch, backend, log
        As for `accelerate`.

    Raises
    ------
    TypeError, ValueError
        For an accuracy or a way to compile that there is not, and patterns that are none.
    """

    accuracy: str = "full"
    compile: str | bool = "blocks"
    include: Patterns = None
    exclude: Patterns = None
    checkpoint: str | PathLike[str] | None = None
    again: bool = False
    arch: str | None = None
    backend: str | None = None
    log: Log = print

    def __post_init__(self) -> None:
        if self.accuracy not in ACCURACIES:
            raise ValueError(
                f"accuracy must be {', '.join(map(repr, ACCURACIES))}, got {self.accuracy!r}"
            )
        if self.compile not in COMPILED:
            raise ValueError(
                f"compile must be 'blocks', 'graphs' or False, got {self.compile!r}"
            )
        _ = self.selection

    @property
    def selection(self) -> Selection:
        """Which layers and attention modules are meant."""
        return Selection.of(self.include, self.exclude)

    @property
    def how(self) -> str:
        """How gains of the record were compiled that hold for these request."""
        return "graphs" if self.compile == "graphs" else "blocks"


@dataclass
class Part:
    """What became of one model.

    Parameters
    ----------
    prefix : str
        Of its names: ``"transformer."`` in a pipeline, "" alone.
    model : Module
    known : WholeModel or None
        The measured model that stands for it.
    on_measured_device : bool
        Whether its device is of the kind that was measured: else gains of `known` do not count.
    linear : Replacement or None
    compiled : Compiled or None
    native : dict of str to str
        Why ``"linear"`` or ``"attention"`` was left native as a whole.
    accuracy : str
        Class of the attention that was replaced; "" without any.
    """

    prefix: str
    model: nn.Module
    known: WholeModel | None
    on_measured_device: bool
    linear: Replacement | None = None
    compiled: Compiled | None = None
    native: dict[str, str] = field(default_factory=dict)
    accuracy: str = ""

    @property
    def record(self) -> WholeModel | None:
        """The measured model whose gains count."""
        return self.known if self.on_measured_device else None

    def settle(self, part: str, request: Request) -> str:
        """Return the accuracy class in which a part is replaced; "" if it is left native.

        Of attention that is the class asked for or, if the record has that no faster than native, a
        more accurate one that is.
        """
        if self.record is None:
            return request.accuracy
        record, how = self.record, request.how
        classes = ACCURACIES[ACCURACIES.index(request.accuracy) :: -1]
        for accuracy in classes:
            if judged(record.gain(part, accuracy, how)) == FASTER:
                return accuracy
        why = said(record.gain(part, request.accuracy, how))
        graph = record.gain(part, request.accuracy, "graphs")
        if how == "blocks" and "graphs" in record.gains and judged(graph) == FASTER:
            why += f"; with compile='graphs' {said(graph)}"
        self.native[part] = why
        return ""


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` did, and what ran since.

    Parameters
    ----------
    lines : tuple of str
        What was done, in five lines.
    layers : mapping of str to str
        By linear layer, what it became and why.
    attention : object or None
        `cupyattn.interop.diffusers.Report` of the attention modules, None if all are native.
    """

    lines: tuple[str, ...]
    layers: Mapping[str, str]
    attention: Any = None

    def __str__(self) -> str:
        found = [*self.lines, *(f"{name}: {what}" for name, what in self.layers.items())]
        found += [] if self.attention is None else [str(self.attention)]
        return "\n".join(found)


class Accelerated(Handle):
    """A pipeline or a model that `accelerate` made faster, until it is restored.

    Calls and attributes go to the pipeline or the model; `target`, `report`, `restore`, `save` and
    `compare` are the handle's own. As a context manager it restores at the end.
    """

    __slots__ = ("_handle_attention", "_handle_parts", "_handle_request")
    _handle_maker = "accelerate"
    _handle_arguments = ("accuracy", "include", "exclude", "checkpoint", "again", "log")
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
        """Return what was done, what each linear layer became, and what attention ran since."""
        layers: dict[str, str] = {}
        for part in self._handle_parts:
            if part.linear is not None:
                became = {n: f"INT8, {why}" for n, why in part.linear.replaced.items()}
                became |= {n: f"kept, {why}" for n, why in part.linear.kept.items()}
                layers |= {f"{part.prefix}{name}": what for name, what in became.items()}
        attention = None if self._handle_attention is None else self._handle_attention.report()
        lines = five_lines(
            self.target, self._handle_parts, self._handle_attention, self._handle_request
        )
        return Acceleration(lines, {printable(n): printable(w) for n, w in layers.items()},
                            attention)  # fmt: skip

    def restore(self) -> None:
        """Give the pipeline or the model its own layers, attention and code back, to the bit.

        A second call does nothing.

        Raises
        ------
        RuntimeError
            If hooks that move weights stand in the way: remove the offloading hooks first. INT8
            linear layers then stay; all else is as before.
        """
        _undo(self._handle_parts, self._handle_attention)

    def save(
        self, folder: str | PathLike[str], *, advance: Callable[[str], None] | None = None
    ) -> Path:
        """Write the INT8 layers with the rest of each model; ``checkpoint=`` takes the folder.

        Parameters
        ----------
        folder : path
            Of a pipeline it gets a folder for each model, of the component's name; of a model it is
            the folder, which `load_int8` takes, too.
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
            If no linear layer is INT8.
        """
        written = [part for part in self._handle_parts if part.linear is not None]
        if not written:
            raise ValueError("no linear layer is INT8, so there are no codes to save: see report()")
        home = Path(folder)
        for part in written:
            if part.prefix:
                home.mkdir(exist_ok=True)
            write_int8(part.model, home / part.prefix.removesuffix("."), advance)
        return home


def accelerate(
    model: nn.Module,
    accuracy: str = "full",
    *,
    compile: str | bool = "blocks",
    include: Patterns = None,
    exclude: Patterns = None,
    checkpoint: str | PathLike[str] | None = None,
    again: bool = False,
    arch: str | None = None,
    backend: str | None = None,
    log: Log = print,
) -> Accelerated:
    """Make a module with linear layers faster: INT8 layers, compiled.

    `cupyattn.interop.diffusers.accelerate` takes pipelines and models of diffusers, and replaces
    their attention, too.

    Parameters
    ----------
    model : Module
        Modified in place.
    accuracy : {"full", "balanced", "aggressive"}
        Class of attention, as for `cupyattn.attention`: without diffusers attention stays native.
        Linear layers are INT8 in each class.
    compile : {"blocks", "graphs", False}
        Compile the blocks that the model repeats, as diffusers recommends, or all of it where
        nothing names them; beside that record each pass as one CUDA graph; or neither.
    include, exclude : str or sequence of str, optional
        Regular expressions, searched in the names of layers: only those that match one of
        `include`, and none of `exclude`.
    checkpoint : path, optional
        What `Accelerated.save` or `cupyattn convert` wrote: its codes are taken, and nothing is
        quantised.
    again : bool
        Take back first what earlier calls replaced in the model, all of it.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.
    log : callable, optional
        Takes each of five lines that say what was done and what was left native; None: silent.

    Returns
    -------
    Accelerated
        Used like the model, with `report()`, `restore()`, `save(folder)` and `compare(...)`.

    Raises
    ------
    TypeError
        If `model` is no module.
    ValueError
        For arguments that there are not, and as `replace_linear_with_int8`. The model is then as it
        was.

    Notes
    -----
    Layers have a scale for each channel where a whole model of the class was measured to allow it,
    and for each block where not. What was not measured to be faster on such a device stays native.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> handle = accelerate(model, compile=False, log=None, backend="mirror")
    >>> handle.report().lines[1]
    'linear layers: 1 of 2 INT8 by block, weights -72 %'
    >>> handle.restore()
    >>> type(model[0]).__name__
    'Linear'
    """
    request = Request(
        accuracy, compile, include, exclude, checkpoint, again, arch, backend, log
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
    return accelerated(model, [part], request, _no_attention)


# ---- how both are made ---------------------------------------------------------------------------


def part_of(prefix: str, model: nn.Module) -> Part:
    """Return a model before anything becomes of it."""
    model = uncompiled(model)
    width = width_of(layer for _, layer, _ in linear_layers(model))
    known = nearest(type(model).__name__, width)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    capability = None
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        capability = 10 * major + minor
    return Part(prefix, model, known, known is not None and known.capability == capability)


def width_of(layers: Iterable[nn.Linear]) -> int:
    """Return how many channels most linear layers take, 0 without one.

    Examples
    --------
    >>> width_of([nn.Linear(8, 2), nn.Linear(4, 2), nn.Linear(8, 8)])
    8
    """
    counts = Counter(layer.in_features for layer in layers)
    return max(counts, key=lambda width: (counts[width], width), default=0)


def layer_names(part: Part) -> Iterator[str]:
    """Yield the names of a model's linear layers, with its prefix, INT8 ones, too."""
    for name, *_ in (*linear_layers(part.model), *int8_layers(part.model)):
        yield f"{part.prefix}{name}"


def exactly(names: Iterable[str]) -> str:
    """Return a regular expression that is found in these names alone.

    Examples
    --------
    >>> exactly(["a.0", "b"])
    '^(?:a\\\\.0|b)$'
    """
    return f"^(?:{'|'.join(map(re.escape, names))})$"


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
        Replaces attention, and returns the handle of that, None if all stays native.
    """
    attention = None
    try:
        for part in parts:
            _replace_layers(part, request)
        attention = attend()
        for part in parts:
            if request.compile and len(part.native) < 2:
                part.compiled = compiled_blocks(part.model, graphs=request.compile == "graphs")
    except BaseException:
        _undo(parts, attention)
        raise
    handle = Accelerated(target, parts, attention, request)
    if request.log is not None:
        for line in handle.report().lines:
            request.log(line)
    return handle


def _undo(parts: Sequence[Part], attention: Any) -> None:
    for part in parts:
        if part.compiled is not None:
            part.compiled.undo()
    if attention is not None:
        attention.restore()
    for part in parts:
        if part.linear is not None:
            part.linear.restore()


def _replace_layers(part: Part, request: Request) -> None:
    """Make the linear layers of a model INT8, unless they are slower so or there are none."""
    everything = [*layer_names(part)]
    names = [name for name in everything if name in request.selection]
    if not names:
        part.native["linear"] = "excluded" if everything else "the model has none"
    if not names or not part.settle("linear", request):
        return
    strategy = "channel" if part.known is not None and part.known.allows_channel else "block"
    try:
        part.linear = replace_linear_with_int8(
            part.model,
            _codes_of(part, request.checkpoint),
            include=exactly(name.removeprefix(part.prefix) for name in names),
            config=Int8Config(strategy=strategy),
            arch=request.arch, backend=request.backend, again=request.again,
        )  # fmt: skip
    except NothingReplaced as error:
        part.native["linear"] = str(error)


def _codes_of(part: Part, checkpoint: str | PathLike[str] | None) -> Path | None:
    """Return where the codes of a model are: of a pipeline in a folder of the component's name."""
    if checkpoint is None:
        return None
    within = Path(checkpoint) / part.prefix.removesuffix(".")
    return within if within.exists() else Path(checkpoint)


def _no_attention() -> None:
    """Replace no attention: without diffusers all of it stays native."""


# ---- what is said --------------------------------------------------------------------------------


def five_lines(
    target: Any, parts: Sequence[Part], attention: Any, request: Request
) -> tuple[str, ...]:
    """Return what was done and what was left native, in five lines."""
    found = (
        f"{type(target).__name__}: accuracy {request.accuracy!r}, {_compiled(parts, request)}",
        _layers(parts),
        _attention(parts, attention),
        _measured(parts, request),
        f"left native: {_left(parts)}",
    )
    return tuple(map(printable, found))


def _compiled(parts: Sequence[Part], request: Request) -> str:
    done = [part.compiled.said() for part in parts if part.compiled is not None]
    return "; ".join(dict.fromkeys(done)) or (
        "not compiled" if not request.compile else "not compiled, since nothing was replaced"
    )


def _layers(parts: Sequence[Part]) -> str:
    made = [part.linear for part in parts if part.linear is not None]
    if not made:
        return "linear layers: native"
    replaced, kept = (sum(len(of) for of in some) for some in (
        [one.replaced for one in made], [one.kept for one in made],
    ))  # fmt: skip
    strategies = {
        layer.strategy for part in parts if part.linear is not None
        for _, layer in int8_layers(part.model)
    }  # fmt: skip
    saved = sum(one._handle_saved for one in made) / len(made)
    scales = f" by {' and '.join(sorted(strategies))}" if strategies else ""
    layers = f"{replaced} of {replaced + kept} INT8{scales}"
    return f"linear layers: {layers}, weights {-100 * saved:.0f} %"


def _attention(parts: Sequence[Part], attention: Any) -> str:
    if attention is None:
        return "attention: native"
    classes = dict.fromkeys(part.accuracy for part in parts if part.accuracy)
    said_of = " and ".join("16 bits" if one == "full" else f"{one} INT8" for one in classes)
    return f"attention: {counted(len(attention.replaced), 'module')} by cupyattn, in {said_of}"


def _measured(parts: Sequence[Part], request: Request) -> str:
    lines = []
    for part in parts:
        record, ran = part.record, {"linear", "attention"} - part.native.keys()
        if record is None or not ran:
            continue
        name = "both" if len(ran) == 2 else ran.pop()
        gain = record.gain(name, part.accuracy or request.accuracy, request.how)
        lines.append(
            f"measured in a whole {record.name} of {record.tokens:,} tokens on an {record.device}: "
            f"{said(gain)} as compiled native"
        )
    unknown = "not measured in such a model on such a device: compare(...) times this one"
    return "; ".join(dict.fromkeys(lines)) or unknown


def _left(parts: Sequence[Part]) -> str:
    said_of = [
        f"{part.prefix}{'linear layers' if name == 'linear' else name} ({why})"
        for part in parts for name, why in sorted(part.native.items())
    ]  # fmt: skip
    kinds = Counter(
        why.partition(":")[0] for part in parts if part.linear is not None
        for why in part.linear.kept.values()
    )  # fmt: skip
    for why, count in kinds.most_common(_MOST_REASONS):
        said_of.append(f"{counted(count, 'linear layer')} ({why})")
    others = sum(kinds.values()) - sum(n for _, n in kinds.most_common(_MOST_REASONS))
    said_of += [f"{others} others"] if others else []
    return ", ".join(said_of) or "nothing"
