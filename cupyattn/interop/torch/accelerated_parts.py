"""Arguments of `accelerate`, and the models that it accelerates, with their records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cupyattn.compiler.architectures import check_arch
from cupyattn.compiler.target import check_backend
from cupyattn.errors import shown
from cupyattn.interop.handle import uncompiled
from cupyattn.interop.selection import Patterns, Selection
from cupyattn.interop.torch.bridge import device_capability
from cupyattn.interop.torch.candidates import int8_layers, linear_layers
from cupyattn.interop.torch.compiling import COMPILED, Compiled
from cupyattn.interop.torch.models import ONE_OF_BOTH, Replacement
from cupyattn.interop.torch.offloading import device_of_hooks
from cupyattn.interop.torch.quantising import Activations, check_mapping
from cupyattn.measure.timing import FASTER, judged
from cupyattn.measure.whole_gains import WholeModel, nearest, said, usual_width

#: Accuracy classes of attention, as `cupyattn.attention` has them.
ACCURACIES = ("full", "balanced", "aggressive")

Log = Callable[[str], object] | None


@dataclass(frozen=True)
class Request:
    """The arguments of `accelerate` that are the same with and without diffusers.

    Parameters
    ----------
    accuracy, compile, include, exclude, checkpoint, activations, again, arch, backend, log
        As for `accelerate`.

    Raises
    ------
    TypeError, ValueError
        For an unknown accuracy, way to compile, architecture or backend, and for an invalid
        pattern, path, mapping of activations or log function.
    """

    accuracy: str = "full"
    compile: str | bool = "blocks"
    include: Patterns = None
    exclude: Patterns = None
    checkpoint: str | PathLike[str] | None = None
    activations: Activations | None = None
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
        if self.checkpoint is not None and not isinstance(self.checkpoint, str | PathLike):
            raise TypeError(
                f"checkpoint must be the path of saved codes, got {shown(self.checkpoint)}"
            )
        given = self.activations
        check_mapping(given)
        if given is not None and self.checkpoint is not None:
            raise ValueError(ONE_OF_BOTH)
        check_arch(self.arch)
        check_backend(self.backend)
        if self.log is not None and not callable(self.log):
            raise TypeError(f"log must take a line, as print does, or be None, got {self.log!r}")
        _ = self.selection

    @property
    def selection(self) -> Selection:
        """The layers and attention modules that the request selects."""
        return Selection.of(self.include, self.exclude)

    @property
    def how(self) -> str:
        """The way of compiling whose recorded gains apply to this request."""
        return "graphs" if self.compile == "graphs" else "blocks"


@dataclass
class Part:
    """The state of one model.

    Parameters
    ----------
    prefix : str
        Prefix of its names: ``"transformer."`` in a pipeline, "" for a single model.
    model : Module
    record : WholeModel or None
        The measured model to use in its place, if it was measured on this kind of device.
    linear : Replacement or None
    compiled : Compiled or None
    native : dict of str to str
        Why ``"linear"`` or ``"attention"`` is entirely native.
    accuracy : str
        Class of the replaced attention; "" without any.
    is_partial : bool
        Whether only some of the linear layers or attention modules were selected.
    """

    prefix: str
    model: nn.Module
    record: WholeModel | None
    linear: Replacement | None = None
    compiled: Compiled | None = None
    native: dict[str, str] = field(default_factory=dict)
    accuracy: str = ""
    is_partial: bool = False

    def given(self, target: Any) -> Any:
        """Return the model as the pipeline `target` has it: perhaps from ``torch.compile``."""
        return getattr(target, self.prefix.removesuffix(".")) if self.prefix else target

    def own(self, given: Activations | None) -> Activations | None:
        """Return the entries whose names begin with the part's prefix, without that prefix."""
        if given is None:
            return None
        mine = {n: x for n, x in given.items() if n.startswith(self.prefix)}
        return {name.removeprefix(self.prefix): x for name, x in mine.items()}

    def settle(self, part: str, request: Request) -> str:
        """Return the accuracy class in which a part is replaced; "" if it stays native.

        For attention this is the requested class. If the record shows no gain for it, it is a more
        accurate class with a gain.
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


def part_of(prefix: str, model: nn.Module) -> Part:
    """Return a model before any replacement."""
    model = uncompiled(model)
    layers = [layer for _, layer, _ in linear_layers(model)]
    layers += [layer for _, layer in int8_layers(model)]
    width = usual_width(layer.in_features for layer in layers)
    known = nearest(type(model).__name__, width)
    where = device_of_hooks(model) or next(
        (p.device for p in model.parameters()), torch.device("cpu")
    )
    measured = known is not None and known.capability == device_capability(where)
    return Part(prefix, model, known if measured else None)


def codes_of(
    part: Part, checkpoint: str | PathLike[str] | None, *, alone: bool
) -> Path | None:
    """Return the folder of a model's codes; for a pipeline, it is named as the component.

    Parameters
    ----------
    part : Part
    checkpoint : path, optional
    alone : bool
        Whether the model is the only one, so that `checkpoint` may be its folder.

    Raises
    ------
    ValueError
        If one of several models has no folder; it must not get the codes of another.
    """
    if checkpoint is None:
        return None
    name = part.prefix.removesuffix(".")
    within = Path(checkpoint) / name
    if within.is_dir():
        return within
    if not alone:
        raise ValueError(
            f"checkpoint must have a folder for each model, and {checkpoint} has no folder "
            f"{name!r}: give the folder that save() of the whole pipeline wrote, or "
            f"exclude='^{name}[.]'"
        )
    return Path(checkpoint)


def layer_names(part: Part) -> Iterator[str]:
    """Yield the names of a model's linear layers, INT8 or not, with its prefix."""
    for name, *_ in (*linear_layers(part.model), *int8_layers(part.model)):
        yield f"{part.prefix}{name}"


def exactly(names: Iterable[str]) -> str:
    """Return a regular expression that matches only these names.

    Examples
    --------
    >>> exactly(["a.0", "b"])
    '^(?:a\\\\.0|b)$'
    """
    return f"^(?:{'|'.join(map(re.escape, names))})$"
