"""`replace_linear_with_int8`: replace linear layers by INT8 layers, and restore them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cupyattn.checkpoints.layout import WEIGHT
from cupyattn.errors import shown
from cupyattn.interop.handle import NOT_COMPILED, Handle, target_of, uncompiled
from cupyattn.interop.selection import Patterns, Selection, first_names
from cupyattn.interop.torch import epilogues, inductor_calls
from cupyattn.interop.torch.activated import activated_layers, place_activated_layers
from cupyattn.interop.torch.candidates import int8_layers, linear_layers, reason_unfit
from cupyattn.interop.torch.guards import guard
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.loading import check_own, check_shape, codes_of, layer_of, opened
from cupyattn.interop.torch.offloading import check_not_offloaded
from cupyattn.interop.torch.originals import Call, keep_original, original_of
from cupyattn.interop.torch.placing import Verdict, place_layers
from cupyattn.interop.torch.quantising import (
    Activations,
    check_mapping,
    check_names,
    quantised,
    with_strategy,
)
from cupyattn.interop.torch.restoring import restore_linear
from cupyattn.measure.words import printable
from cupyattn.quant.blocks import Int8Config

#: Why activations are refused with a checkpoint.
ONE_OF_BOTH = "activations choose codes, and a checkpoint has its codes already: give one of both"
#: Choices for the replaced weights.
ORIGINALS = ("cpu", "device", "drop")


class NothingReplaced(ValueError):
    """Raised if no linear layer of a model becomes INT8; the message has the commonest reasons."""


class Replacement(Handle):
    """A model whose linear layers are INT8, until they are restored.

    `replace_linear_with_int8` makes it. Calls and attributes go to the model; `target`, `replaced`,
    `kept`, `report` and `restore` belong to the handle. A method that returns the model, such as
    ``to`` or ``eval``, returns the handle. As a context manager it restores at the end.
    """

    __slots__ = (
        "_handle_call", "_handle_choice", "_handle_kept", "_handle_replaced", "_handle_saved",
    )  # fmt: skip
    _handle_maker = "replace_linear_with_int8"
    _handle_arguments = (
        "checkpoint", "include", "exclude", "config", "originals", "arch", "backend", "again",
        "activations", "advance",
    )  # fmt: skip
    _handle_replaced: dict[str, str]
    _handle_kept: dict[str, str]
    _handle_saved: float
    _handle_choice: str

    def __init__(
        self,
        target: nn.Module,
        replaced: dict[str, str],
        kept: dict[str, str],
        call: Call,
        saved: float,
        choice: str = "",
    ) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_choice", choice)
        object.__setattr__(self, "_handle_saved", saved)
        object.__setattr__(self, "_handle_call", call)
        object.__setattr__(self, "_handle_replaced", replaced)
        object.__setattr__(self, "_handle_kept", kept)

    @property
    def replaced(self) -> dict[str, str]:
        """Layers that became INT8, each with the reason."""
        return self._handle_replaced

    @property
    def kept(self) -> dict[str, str]:
        """Linear layers that did not become INT8, each with the reason."""
        return self._handle_kept

    def _handle_in_place(self) -> list[Int8Linear]:
        """Return the INT8 layers of this handle that are still in the model."""
        layers = layers_of_calls(uncompiled(self.target))
        return [layer for call, layer in layers if call is self._handle_call]

    # If torch compiles a function that calls the handle, the error gives this reason.
    __call__ = torch.compiler.disable(Handle.__call__, recursive=False, reason=NOT_COMPILED)

    def restore(self) -> None:
        """Put back the layers that were replaced, on the devices where their codes are now.

        The INT8 layers are found in the current model, even under adapters. A second call does
        nothing.

        Raises
        ------
        RuntimeError
            If the originals were dropped, or if hooks that move weights prevent it: remove the
            offloading hooks first. Nothing is then restored.

        Warns
        -----
        UserWarning
            Names layers that are no longer in the model, such as fused projections.

        Notes
        -----
        If the model was converted to another type since, the weights get that type. They require a
        gradient if the layer's bias now does; without a bias, if the model's parameters do.
        Layerwise casting of diffusers continues with the restored layers.
        """
        restore_linear(uncompiled(self.target), self._handle_call)

    def report(self) -> str:
        """Return counts, the strategy of scales, and the outcome for each layer with its reason."""
        lines = [
            f"{len(self.replaced)} INT8, {len(self.kept)} kept, weights "
            f"{-100 * self._handle_saved:.0f} %"
        ]
        lines += [self._handle_choice] if self._handle_choice else []
        lines += [f"{name}: INT8, {why}" for name, why in self.replaced.items()]
        lines += [f"{name}: kept, {why}" for name, why in self.kept.items()]
        if epilogues.obstacle:
            lines.append(f"compiled: nothing becomes part of products, {epilogues.obstacle}")
        if inductor_calls.obstacle:
            lines.append(
                f"compiled: layers are called by torch's dispatcher, {inductor_calls.obstacle}"
            )
        return "\n".join(map(printable, lines))


def layers_of_calls(model: nn.Module) -> Iterator[tuple[Call, Int8Linear]]:
    """Yield the INT8 layers of a model that have their original, each with its call."""
    for _, layer in int8_layers(model):
        original = original_of(layer)
        if original is not None:
            yield original.call, layer


def replace_linear_with_int8(
    model: nn.Module,
    checkpoint: str | PathLike[str] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    *,
    config: Int8Config | None = None,
    originals: str = "cpu",
    arch: str | None = None,
    backend: str | None = None,
    again: bool = False,
    activations: Activations | None = None,
    advance: Callable[[str], None] | None = None,
) -> Replacement:
    """Replace linear layers of a model by `Int8Linear`.

    Parameters
    ----------
    model : Module
        Modified in place.
    checkpoint : path, optional
        Written by `cupyattn.checkpoints.conversion`. Its codes are used, and only layers that it
        contains become INT8. Without it, each weight is analysed and quantised as by `convert`.
    include, exclude : str or sequence of str, optional
        Regular expressions, searched in the names of layers: only those that match one of
        `include`, and none of `exclude`.
    config : Int8Config, optional
        Without a checkpoint: which weights become INT8.
    originals : {"cpu", "device", "drop"}
        The replaced weights are moved to the host, which frees memory of the device; stay on their
        device; or are dropped and cannot be restored. The new layers store them, so
        `cupyattn.interop.restore` needs no handle.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.
    again : bool
        First undo all earlier replacements of linear layers in the model.
    activations : mapping of str to Tensor or array, optional
        Inputs of layers, (..., in), by name, as ``record(model).recording.inputs`` has them. They
        decide for each layer between scales of blocks, of channels, and of channels of rotated
        rows, unless `config` does. With ``Int8Config(smooth=True)`` their layers get factors of
        channels.
    advance : callable, optional
        Called with the name of each examined layer, for a progress bar.

    Returns
    -------
    Replacement
        A handle to use like the model, with `restore()` and `report()`. As a context manager it
        restores at the end.

    Raises
    ------
    TypeError
        If `model` is not a module: give a pipeline's transformer. For arguments of another type.
    ValueError
        If no layer becomes INT8 or all are replaced already, for a pattern that is not a regular
        expression or matches no name, for a checkpoint of other shapes, and for activations of an
        unknown layer or beside a checkpoint. For a model whose weights are offloaded or cast in
        each call: replace first, then offload.
    RuntimeError
        With `again`, if a layer cannot be restored: as for `Replacement.restore`.

    Notes
    -----
    Unless `config` has a strategy, layers get scales of channels if `activations` or a measured
    model of the family allow it, and scales of blocks otherwise; the report says which.
    Norms, embeddings, modulation, time and final layers keep their type, by their names
    (`cupyattn.checkpoints.role_of`). Only objects of class `torch.nn.Linear` without hooks are
    replaced. If a layer has an adapter of PEFT, its base layer is replaced under the name of the
    layer, unless the adapter is merged into its weight or reads it in each call.
    A layer in several places stays one layer. Modules of diffusers that apply an activation to
    such a layer, ``GELU``, ``GEGLU`` and ``SwiGLU``, are replaced, too: the activation becomes part
    of the product. In a state dict, ``weight_codes`` replaces ``weight``; other names stay. Code
    that reads ``layer.weight`` gets the dequantised weight, and cannot write it. A model may be
    compiled by torch before or after.
    `save_pretrained` is refused until the layers are restored, because it would write codes as
    weights. Layers are quantised one at a time on the device of their weights, so the model and one
    more layer must fit in memory. If a call fails, the layers are restored, except dropped ones,
    which stay INT8.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    >>> with replace_linear_with_int8(model, exclude="^2$", backend="mirror") as handle:
    ...     print(type(model[0]).__name__, handle.kept)
    Int8Linear {'2': 'excluded'}
    >>> type(model[0]).__name__
    'Linear'
    """
    model = target_of(model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: of a pipeline give the "
            "transformer"
        )
    if originals not in ORIGINALS:
        raise ValueError(f"originals must be {' or '.join(ORIGINALS)}, got {originals!r}")
    _check_types(config, activations, advance)
    selection = Selection.of(include, exclude)
    own = uncompiled(model)
    before = [name for name, _ in int8_layers(own)]
    names = [name for name, *_ in linear_layers(own)] + before
    if names:
        selection.check(names, "linear layer")
    check_names(activations, names)
    if activations is not None and checkpoint is not None:
        raise ValueError(ONE_OF_BOTH)
    check_not_offloaded(own)
    if again:
        restore_linear(own)
        before = []
    candidates, kept = _candidates(own, selection)
    options = {"arch": arch, "backend": backend}
    choice = ""
    if checkpoint is None:
        cls, widths = type(own).__name__, (layer.in_features for _, layer, _ in linear_layers(own))
        config, chose, factors = with_strategy(config, cls, widths, candidates, activations)
        choice = str(chose)
        made = quantised(
            candidates, config, options, advance, model=type(own).__name__, ways=chose.layers,
            factors=factors,
        )  # fmt: skip
    else:
        made = _from_checkpoint(candidates, Path(checkpoint), options, advance)
    call = Call(originals, {}, set())
    try:
        with torch.inference_mode(mode=False):  # its tensors allow neither gradients nor loading
            reasons, others = place_layers(own, candidates, made, call)
        kept |= others
        if not reasons and (chosen := [name for name in before if name in selection]):
            raise ValueError(
                f"{printable(chosen[0])} is replaced already: restore() that first, call "
                "cupyattn.interop.restore of the model, or give again=True"
            )
        if not reasons:
            why = "; ".join(printable(one) for one in _commonest(kept))
            if isinstance(model, nn.Linear):
                why = "it is itself a linear layer, which Int8Linear.from_linear quantises"
            raise NothingReplaced(
                f"no linear layer of the model becomes INT8 ({why or 'it has none'})"
            )
        call.trained |= {p: p.requires_grad for p in own.parameters()}
        call.missing |= reasons.keys()
        units = activated_layers(own)
        for _, name, module, unit in units:  # NOTE: an interrupted call restores from these.
            keep_original(unit, call, name, module)
        place_activated_layers(units)
        guard(own)
        return Replacement(model, reasons, kept, call, _saved(own, call), choice)
    except BaseException:
        if originals != "drop":
            restore_linear(own, call)
        raise


def _check_types(config: Any, activations: Any, advance: Any) -> None:
    """Raise TypeError for arguments that would fail when some layers are dropped already."""
    if config is not None and not isinstance(config, Int8Config):
        raise TypeError(
            f"config must be a cupyattn.Int8Config, as Int8Config(strategy='channel'), got "
            f"{shown(config)}"
        )
    check_mapping(activations)
    if advance is not None and not callable(advance):
        raise TypeError(f"advance must take the name of a layer, or be None, got {shown(advance)}")


def _commonest(kept: Mapping[str, str]) -> list[str]:
    """Return the commonest reasons why layers are kept, each with the first layer that has it."""
    firsts: dict[str, str] = {}
    for name, reason in kept.items():
        firsts.setdefault(reason.partition(":")[0], f"{name}: {reason}")
    kinds = Counter(reason.partition(":")[0] for reason in kept.values())
    return [firsts[kind] for kind, _ in kinds.most_common(3)]


def _saved(model: nn.Module, call: Call) -> float:
    """Return the share of the model's weight bytes that this call's INT8 layers save."""
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    now = sum(map(_bytes, model.parameters())) + sum(map(_bytes_of_codes, layers))
    saved = sum(
        int(x.weight_codes.numel()) * int(x.weight_dtype.itemsize) - _bytes_of_codes(x)
        for x in layers if (original := original_of(x)) is not None and original.call is call
    )  # fmt: skip
    return saved / (now + saved)


def _bytes_of_codes(layer: Int8Linear) -> int:
    return _bytes(layer.weight_codes) + _bytes(layer.weight_scale)


def _bytes(x: Tensor) -> int:
    if nn.parameter.is_lazy(x):  # of a module that has not been called
        return 0
    return int(x.numel()) * int(x.element_size())


def _candidates(
    model: nn.Module, selection: Selection
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the layers that may be replaced, and the reasons for the others."""
    candidates, kept = {}, {}
    for name, linear, obstacle in linear_layers(model):
        if name not in selection:
            kept[name] = "excluded"
        elif reason := obstacle or reason_unfit(linear):
            kept[name] = reason
        else:
            candidates[name] = linear
    return candidates, kept


def _from_checkpoint(
    candidates: dict[str, nn.Linear],
    path: Path,
    options: dict[str, Any],
    advance: Callable[[str], None] | None,
) -> Iterator[Verdict]:
    """Yield each name with the layer of a checkpoint's codes, or None, and the reason."""
    source = opened(path)
    codes, _ = codes_of(source)
    found = {name: codes.get(f"{name}{WEIGHT}") for name in candidates}
    if candidates and not any(found.values()):
        raise NothingReplaced(
            f"{source.path} has codes of {first_names([*codes])}, and of no layer that is to be "
            "INT8: give codes of this model"
        )
    for name, one in found.items():  # before a layer is dropped
        if one is not None:
            check_shape(source, one, candidates[name])
    for name, one in found.items():
        if one is None:
            yield name, None, "no codes in the checkpoint"
        else:
            layer = layer_of(source, one, candidates[name], options)
            check_own(source, one, layer, candidates[name])
            layer.weight_dtype = candidates[name].weight.dtype
            yield name, layer, f"codes of {source.path.name}" + ", rotated" * bool(layer.rotate)
        if advance is not None:
            advance(name)
