"""INT8 weights in a model: its linear layers replaced, or a converted checkpoint loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cupyattn.checkpoints.codes import scales_of
from cupyattn.checkpoints.conversion import layout_of
from cupyattn.checkpoints.layout import QUANTIZATION, WEIGHT
from cupyattn.checkpoints.schemes import Codes, find_codes
from cupyattn.checkpoints.shards import Source
from cupyattn.checkpoints.source import open_checkpoint
from cupyattn.errors import UnsupportedError
from cupyattn.interop.handle import COMPILED, NOT_COMPILED, Handle, target_of, uncompiled
from cupyattn.interop.selection import Patterns, Selection
from cupyattn.interop.torch import epilogues
from cupyattn.interop.torch.activated import Place, put_activated, take_out_activated
from cupyattn.interop.torch.bridge import as_tensor
from cupyattn.interop.torch.linear import Int8Linear
from cupyattn.interop.torch.originals import ORIGINALS, LinearPlace, settled
from cupyattn.interop.torch.quantising import quantised
from cupyattn.interop.torch.saving import allow_saving, refuse_saving
from cupyattn.quant.blocks import BLOCK_SIZE, Int8Config

#: The buffer of a layer that has the type and the device which the weight before it would have.
_LIKE = "like_original"


class Replacement(Handle):
    """A model whose linear layers are INT8, until they are restored.

    `replace_linear_with_int8` makes it. Calls and attributes go to the model; `target`, `replaced`,
    `kept`, `report` and `restore` are the handle's own. A method that returns the model, such as
    ``to`` or ``eval``, returns the handle. As a context manager it restores at the end.
    """

    __slots__ = (
        "_handle_activated", "_handle_kept", "_handle_originals", "_handle_places",
        "_handle_replaced", "_handle_trained",
    )  # fmt: skip
    _handle_maker = "replace_linear_with_int8"
    _handle_arguments = (
        "checkpoint", "include", "exclude", "config", "originals", "arch", "backend", "advance",
    )  # fmt: skip
    _handle_replaced: dict[str, str]
    _handle_kept: dict[str, str]
    _handle_trained: dict[nn.Parameter, bool]

    def __init__(
        self,
        target: nn.Module,
        replaced: dict[str, str],
        kept: dict[str, str],
        places: list[LinearPlace],
        activated: list[Place],
        originals: str,
    ) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_activated", activated)
        object.__setattr__(self, "_handle_replaced", replaced)
        object.__setattr__(self, "_handle_kept", kept)
        object.__setattr__(self, "_handle_places", places)
        object.__setattr__(self, "_handle_originals", originals)
        trained = {p: p.requires_grad for p in uncompiled(target).parameters()}
        object.__setattr__(self, "_handle_trained", trained)
        if originals != "drop":
            for *_, linear, layer in places:
                # Converted with the model, and empty: the codes do not show a change of type.
                like = torch.empty(0, dtype=linear.weight.dtype, device=layer.weight.device)
                layer.register_buffer(_LIKE, like, persistent=False)

    @property
    def replaced(self) -> dict[str, str]:
        """Layers that became INT8, and why."""
        return self._handle_replaced

    @property
    def kept(self) -> dict[str, str]:
        """Linear layers that did not, and why."""
        return self._handle_kept

    # If torch compiles a function that calls the handle, the error gives this reason.
    __call__ = torch.compiler.disable(Handle.__call__, recursive=False, reason=NOT_COMPILED)

    def restore(self) -> None:
        """Put back the layers that were replaced, on the devices where their codes are now.

        Raises
        ------
        RuntimeError
            If they were dropped, or something else has taken their places since.

        Notes
        -----
        Weights get the type that the model was converted to meanwhile. They are frozen, or may be
        trained, as the layer's bias was set to meanwhile; without a bias, as all parameters of the
        model were.
        """
        if self._handle_originals == "drop":
            raise RuntimeError(
                "the layers were dropped: replace with originals='cpu' to restore them"
            )
        for parent, name, _, layer in self._handle_places:
            if parent._modules.get(name) is not layer:
                raise RuntimeError(f"{name!r} of {type(parent).__name__} is another layer by now")
        take_out_activated(self._handle_activated)
        of_model = self._set_since(uncompiled(self.target).parameters())
        for parent, name, linear, layer in self._handle_places:
            since = of_model if layer.bias is None else self._set_since([layer.bias])
            if since is not None:
                linear.weight.requires_grad_(since)
            linear.bias = None  # its type may be another than the weight's
            linear.to(layer.get_buffer(_LIKE))
            linear.bias = layer.bias  # one parameter, which may have been trained or moved
            parent._modules[name] = linear
        allow_saving(uncompiled(self.target))
        self._handle_places.clear()

    def _set_since(self, parameters: Iterable[nn.Parameter]) -> bool | None:
        """Return to what ``requires_grad`` of all these was set since replacing, None if not."""
        now = {p: p.requires_grad for p in parameters}
        changed = any(self._handle_trained.get(p, trained) != trained for p, trained in now.items())
        return next(iter(now.values())) if changed and len({*now.values()}) == 1 else None

    def report(self) -> str:
        """Return a line for each linear layer: what it became, and why."""
        lines = [f"{name}: INT8, {why}" for name, why in self.replaced.items()]
        lines += [f"{name}: kept, {why}" for name, why in self.kept.items()]
        if epilogues.obstacle:
            lines.append(f"compiled: nothing becomes part of products, {epilogues.obstacle}")
        return "\n".join(lines)


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
    advance: Callable[[str], None] | None = None,
) -> Replacement:
    """Put an `Int8Linear` in the place of linear layers of a model.

    Parameters
    ----------
    model : Module
        Modified in place.
    checkpoint : path, optional
        What `cupyattn.checkpoints.conversion` wrote: its codes are taken, and of layers that it has
        none of nothing becomes INT8. Otherwise each weight is analysed and quantised, as
        `convert` would.
    include, exclude : str or sequence of str, optional
        Regular expressions, searched in the names of layers: only those that match one of
        `include`, and none of `exclude`.
    config : Int8Config, optional
        Without a checkpoint: which weights become INT8.
    originals : {"cpu", "device", "drop"}
        What becomes of the weights that are replaced: they are moved to the host, which frees
        memory of the device, stay where they are, or are dropped, and cannot be restored.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.
    advance : callable, optional
        Called with the name of each layer that was looked at, for a progress bar.

    Returns
    -------
    Replacement
        Used like the model, with `restore()` and `report()` of its own; as a context manager it
        restores at the end.

    Raises
    ------
    TypeError
        If `model` is no module: give a pipeline's transformer. For patterns that are no text.
    ValueError
        If no layer becomes INT8 or all are replaced already, for a pattern that is no regular
        expression or is found in no name, and for a checkpoint of other shapes.

    Notes
    -----
    Norms, embeddings, modulation, time and final layers keep their type, by their names
    (`cupyattn.checkpoints.role_of`). Only `torch.nn.Linear` itself is replaced, and nothing that
    has hooks. A layer in several places stays one. Modules of diffusers that apply an activation to
    such a layer, ``GELU``, ``GEGLU`` and ``SwiGLU``, are replaced too: the activation becomes part
    of the product, and names in a state dict stay. Code of the model that reads ``layer.weight`` by
    itself finds codes there: exclude such layers. A model may be compiled by torch before or after.
    `save_pretrained` is refused until the layers are restored: it would write codes as weights.
    Layers are quantised one at a time where their weights lie, on a device by its kernels, and
    originals that leave it do so before the next layer: beside the model there is memory for one.
    If something fails, the layers come back, unless they were dropped: those stay INT8.

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
    selection = Selection.of(include, exclude)
    own = uncompiled(model)
    before = [
        name.replace(COMPILED, "")
        for name, module in own.named_modules()
        if isinstance(module, Int8Linear) and name
    ]
    if names := [name for name, _ in _linear_layers(own)] + before:
        selection.check(names, "linear layer")
    candidates, kept = _candidates(own, selection)
    options = {"arch": arch, "backend": backend}
    if checkpoint is None:
        made = quantised(candidates, config, options, advance)
    else:
        made = _from_checkpoint(candidates, Path(checkpoint), options, advance)
    chosen = [name for name in before if name in selection]
    places, reasons, others = settled(own, candidates, made, originals)
    kept |= others
    if not reasons and chosen:
        raise ValueError(f"{chosen[0]} is replaced already: restore() that first")
    if not reasons:
        why = "; ".join(f"{name}: {reason}" for name, reason in [*kept.items()][:3])
        if isinstance(model, nn.Linear):
            why = "it is one by itself, which Int8Linear.from_linear quantises"
        raise ValueError(f"no linear layer of the model becomes INT8 ({why or 'it has none'})")
    activated = put_activated(own)
    refuse_saving(own)
    if originals == "drop":
        activated.clear()
    return Replacement(model, reasons, kept, places, activated, originals)


def load_int8(
    model: Any,
    checkpoint: str | PathLike[str],
    *,
    arch: str | None = None,
    backend: str | None = None,
) -> nn.Module:
    """Load a converted checkpoint into a model, whose INT8 layers then run on its codes.

    Parameters
    ----------
    model : Module or class
        A module of the checkpoint's sizes, modified in place; or a class of diffusers or
        transformers, which is made by the ``config.json`` of the folder, without memory for weights
        of its own.
    checkpoint : path
        What `cupyattn.checkpoints.conversion` wrote, or another library in one of its two layouts.
    arch, backend : str, optional
        As for `cupyattn.int8_gemm`.

    Returns
    -------
    Module
        The model: codes, scales and all other tensors in the types of the files, where its
        parameters were (on the CPU where those were meta tensors). One that was made here is in
        ``eval()`` mode.

    Raises
    ------
    OSError, ValueError
        For a checkpoint that cannot be read, and one of other layers or shapes than the model,
        whose layers then stay as they were.
    TypeError
        For a model that is neither.
    UnsupportedError
        For weights in groups or in blocks of another size than 128 x 128, packed codes, zero
        points, activations with scales that are not made in each call, and several strategies.

    Notes
    -----
    `save_pretrained` of the model is refused, since it would write codes as weights.
    """
    given = target_of(model)
    model = uncompiled(given)
    source = _opened(checkpoint)
    codes, parts = _codes_of(source)
    made_here = isinstance(model, type)
    if made_here:
        with _parameters_without_memory():
            model = _instance(model, Path(checkpoint))
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a torch.nn.Module, or a class of diffusers or transformers, got "
            f"{type(model).__name__}"
        )
    layers = dict(_linear_layers(model))
    replaced: dict[int, Int8Linear] = {}
    for weight in codes:
        name = weight.removesuffix(WEIGHT)
        if name not in layers:
            raise ValueError(
                f"{source.path}: {weight!r} is codes, but {name!r} is no torch.nn.Linear of the "
                "model"
            )
        linear = layers[name]
        options = {"arch": arch, "backend": backend}
        replaced[id(linear)] = _layer_of(source, codes[weight], linear, options)
    places = _put(model, replaced)
    try:
        _load_rest(model, source, parts | codes.keys())
    except BaseException:
        for parent, name, linear, _ in places:
            parent._modules[name] = linear
        raise
    put_activated(model)
    refuse_saving(model)
    return model.eval() if made_here else given


# ---- which layers --------------------------------------------------------------------------------


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every layer that is a linear one, once, by its first name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name:
            yield name.replace(COMPILED, ""), module


def _candidates(
    model: nn.Module, selection: Selection
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the layers that may be replaced, and why others may not."""
    candidates, kept = {}, {}
    for name, linear in _linear_layers(model):
        if name not in selection:
            kept[name] = "excluded"
        elif reason := _unfit(linear):
            kept[name] = reason
        else:
            candidates[name] = linear
    return candidates, kept


def _unfit(linear: nn.Linear) -> str:
    """Say why a layer cannot be replaced, whatever its weight is; empty where it can."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__}"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks:
        return "has hooks"
    if "forward" in vars(linear):  # as libraries put it there that move weights in each call
        return "has a forward of its own"
    if nn.utils.parametrize.is_parametrized(linear):
        return "is parametrised"
    return "holds no numbers, on the meta device" if linear.weight.is_meta else ""


def _from_checkpoint(
    candidates: dict[str, nn.Linear],
    path: Path,
    options: dict[str, Any],
    advance: Callable[[str], None] | None,
) -> Iterator[tuple[str, Int8Linear | None, str]]:
    """Yield each name with a layer of the codes that a checkpoint has, None without, and why."""
    source = _opened(path)
    codes, _ = _codes_of(source)
    for name in list(candidates):
        found = codes.get(f"{name}{WEIGHT}")
        if found is None:
            yield name, None, f"{source.path.name} has no codes of it"
        else:
            layer = _layer_of(source, found, candidates[name], options)
            yield name, layer, f"codes of {source.path.name}"
        if advance is not None:
            advance(name)


def _opened(path: str | PathLike[str]) -> Source:
    """Return a checkpoint; a path that leads nowhere is told what makes one."""
    try:
        return open_checkpoint(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no checkpoint {str(path)!r}: `cupyattn convert MODEL --output FOLDER` makes "
            "one of a model's folder"
        ) from error


def _codes_of(source: Source) -> tuple[dict[str, Codes], frozenset[str]]:
    """Return the weights that are codes as `Int8Linear` takes them, by name, and their parts.

    In blocks of 128 x 128, by channel, or as a whole, whose scale is that of each channel.
    """
    known = layout_of(source)
    found, parts = find_codes(source, known.schemes, ours=known.ours)
    if not found:
        raise ValueError(f"{source.path} has no weights with scales: is it a model of INT8 codes?")
    for one in found.values():
        scheme = one.scheme
        in_blocks = scheme.strategy in ("block", "group")
        if in_blocks and (scheme.rows, scheme.columns) != (BLOCK_SIZE, BLOCK_SIZE):
            kind = f"in blocks of {one.block[0]} x {one.block[1]}"
        elif scheme.packed or one.zero_points or scheme.bits != 8:
            kind = "with zero points" if one.zero_points else "packed, or of fewer than 8 bits"
        elif scheme.activations:
            raise UnsupportedError(
                f"{source.path}: products take activations with scales made in each call, "
                f"symmetric, a scale for each row (or 128 channels, where weights are in blocks); "
                f"those of {one.weight!r} are to have {scheme.activations}: dequantize the model, "
                "and convert the result"
            )
        else:
            continue
        raise UnsupportedError(
            f"{source.path}: products take blocks of {BLOCK_SIZE} x {BLOCK_SIZE} or channels, "
            f"without zero points; the codes of {one.weight!r} are {kind}: dequantize the model, "
            "and convert the result"
        )
    if len(strategies := {one.scheme.strategy for one in found.values()}) > 1:
        raise UnsupportedError(
            f"{source.path}: its weights mix the strategies {' and '.join(sorted(strategies))}: "
            "dequantize the model, and convert the result"
        )
    return found, parts


def _layer_of(
    source: Source, codes: Codes, linear: nn.Linear, options: dict[str, Any]
) -> Int8Linear:
    """Return a layer of a checkpoint's codes with the bias of the one that it replaces."""
    expected = (linear.out_features, linear.in_features)
    if codes.shape != expected:
        raise ValueError(
            f"{source.path}: {codes.weight!r} has shape {codes.shape}, the model's layer has "
            f"{expected}"
        )
    scales = scales_of(source, codes)
    if codes.scheme.strategy == "tensor":
        scales = scales.repeat(expected[0], axis=0)
    home = _home(linear.weight.device)
    layer = Int8Linear(
        *(as_tensor(x).to(home) for x in (source.read(codes.codes), scales)), **options
    )
    layer.bias = linear.bias
    return layer


def _put(model: nn.Module, made: dict[int, Int8Linear]) -> list[LinearPlace]:
    """Put layers in the places of those of these identities; return places, old and new layers."""
    places = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in made:
                places.append((parent, name, child, made[id(child)]))
    for parent, name, child, layer in places:
        parent._modules[name] = layer.train(child.training)
    return places


# ---- loading -------------------------------------------------------------------------------------


def _home(device: torch.device) -> torch.device:
    """Return where what is loaded belongs."""
    return torch.device("cpu") if device.type == "meta" else device


def _instance(cls: type, folder: Path) -> Any:
    """Make a model by its configuration, as its library does."""
    if hasattr(cls, "load_config") and hasattr(cls, "from_config"):  # diffusers
        config = dict(cls.load_config(folder))
        config.pop(QUANTIZATION, None)
        return cls.from_config(config)
    if hasattr(cls, "config_class"):  # transformers
        return cls(cls.config_class.from_pretrained(folder))
    raise TypeError(
        f"{cls.__name__} cannot be made by a config.json: give a class of diffusers or "
        "transformers, or a module"
    )


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let parameters of modules that are made within be meta tensors; buffers are made."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _load_rest(model: nn.Module, source: Source, loaded: frozenset[str]) -> None:
    """Load all that is not `loaded`; every tensor must have its place, every place its tensor."""
    own: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    codes = {id(layer) for layer in model.modules() if isinstance(layer, Int8Linear)}
    filled = {
        f"{name}.{buffer}"
        for name, layer in model.named_modules(remove_duplicate=False)
        if id(layer) in codes
        for buffer in ("weight", "weight_scale")
    }
    rest = [name for name in source.tensors if name not in loaded]
    # A parameter of several names is in the files under one of them.
    tied = {id(own[name]): name for name in rest if name in own}
    places = {name: tied[id(x)] for name, x in own.items() if id(x) in tied}
    missing = sorted(set(own) - filled - set(places))
    unexpected = sorted(set(rest) - set(own))
    if missing or unexpected:
        said = [f"the model's {missing[0]!r} is not there"] if missing else []
        said += [f"the model has no {unexpected[0]!r}"] if unexpected else []
        raise ValueError(
            f"{source.path} is of another model: {' and '.join(said)} ({len(missing)} missing, "
            f"{len(unexpected)} unexpected)"
        )
    state: dict[str, Tensor] = {}
    for name in rest:
        tensor = as_tensor(source.read(name))
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{source.path}: {name!r} has shape {tuple(tensor.shape)}, the model's has "
                f"{tuple(own[name].shape)}"
            )
        state[name] = tensor.to(_home(own[name].device))
    state = {name: state[file_name] for name, file_name in places.items()}
    model.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "tie_weights"):  # transformers: one parameter again
        model.tie_weights()
