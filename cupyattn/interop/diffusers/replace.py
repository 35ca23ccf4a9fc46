"""`replace_attention_with_int8`: INT8 attention in a pipeline or a model of diffusers."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention

from cupyattn.compiler.architectures import check_arch
from cupyattn.diffusion.arguments import check_count
from cupyattn.diffusion.calibration import Calibration
from cupyattn.diffusion.policy import MODES, TablePolicy, as_policy
from cupyattn.interop.diffusers import backends, interception, operator, steps
from cupyattn.interop.diffusers.features import Features, step_dependent_layers
from cupyattn.interop.diffusers.layers import Layer
from cupyattn.interop.diffusers.noise import Noise, kind_of
from cupyattn.interop.diffusers.report import Report
from cupyattn.interop.handle import (
    COMPILED,
    NOT_COMPILED,
    Handle,
    is_pipeline,
    target_of,
    uncompiled,
)
from cupyattn.interop.selection import Patterns, Selection, check_found, compiled, first_names
from cupyattn.interop.torch import inductor_calls
from cupyattn.measure.words import printable
from cupyattn.problem.borrowed_names import explains_foreign_arguments
from cupyattn.quant.config import QuantConfig

#: Shorter calls stay native: quantising and a launch cost more time than INT8 saves.
MIN_LENGTH = 128
_ATTENTION = (Attention, MochiAttention, AttentionModuleMixin)


class Int8Replacement(Handle):
    """A pipeline or a model whose attention modules run in INT8, until they are restored.

    `replace_attention_with_int8` makes it. Calls and attributes go to the pipeline or the model;
    `target`, `replaced`, `report` and `restore` belong to the handle. A method that returns the
    pipeline, such as ``to``, returns the handle. As a context manager it restores at the end.
    """

    __slots__ = ("_handle_hooks", "_handle_layers")
    _handle_maker = "replace_attention_with_int8"
    _handle_arguments = (
        "include", "exclude", "policy", "scheduler", "min_length", "quant", "backend", "arch",
        "count_compiled", "again", "timestep_scales", "use_adaptive_scaling", "attention_type",
        "window_size", "block_size", "block_mask", "enable_pruning", "pruning_ratio",
        "pruning_threshold", "pruning_rows",
    )  # fmt: skip

    def __init__(self, target: Any, layers: Sequence[Layer], hooks: Sequence[Any]) -> None:
        super().__init__(target)
        object.__setattr__(self, "_handle_layers", tuple(layers))
        object.__setattr__(self, "_handle_hooks", list(hooks))

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the modules that were chosen."""
        return tuple(layer.name for layer in self._handle_layers)

    def _handle_is_in_place(self) -> bool:
        """Whether a module still runs the attention that this handle gave it."""
        return any(interception.layer_of(layer.module) is layer for layer in self._handle_layers)

    def report(self) -> Report:
        """Return the counts of calls by mode and reason since attention was replaced."""
        layers = tuple(layer.report() for layer in self._handle_layers)
        compiled = any(layer.compiled for layer in layers)
        if not compiled:
            return Report(layers)
        return Report(layers, dict(operator.fallbacks), inductor_calls.obstacle)

    # If torch compiles a function that calls the handle, the error gives this reason.
    __call__ = torch.compiler.disable(Handle.__call__, recursive=False, reason=NOT_COMPILED)

    def restore(self) -> None:
        """Restore the attention of the modules. Counts stay; a second call does nothing."""
        while self._handle_hooks:
            self._handle_hooks[-1].remove()
            self._handle_hooks.pop()
        for layer in self._handle_layers:
            module = layer.module
            if interception.layer_of(module) is layer:  # a later handle has its own
                _release(module)


def restore_attention(model: torch.nn.Module) -> None:
    """Restore all attention modules of a model, for every handle and copy."""
    for module in model.modules():
        _remove_hooks(module)
        _release(module)


def _remove_hooks(model: torch.nn.Module, step: steps.Step | None = None) -> None:
    """Remove the hooks that follow a model's steps, or only the hooks of one `Step`."""
    for number, hook in [*model._forward_pre_hooks.items()]:
        is_ours = isinstance(hook, functools.partial) and hook.func is steps.before_model
        if is_ours and (step is None or hook.args[0] is step):
            del model._forward_pre_hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)


def _release(module: torch.nn.Module) -> None:
    """Restore an attention module, if it is replaced."""
    layer = interception.layer_of(module)
    if layer is not None:
        layer.release()
        interception.restore_class(module)


@explains_foreign_arguments
def replace_attention_with_int8(
    pipe_or_model: Any,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    policy: Any = "adaptive",
    scheduler: Any = None,
    min_length: int = MIN_LENGTH,
    quant: QuantConfig | Calibration | Mapping[str, Any] | None = None,
    backend: str | None = None,
    arch: str | None = None,
    count_compiled: bool = False,
    again: bool = False,
    timestep_scales: Any = None,
    use_adaptive_scaling: Any = None,
    attention_type: Any = None,
    window_size: Any = None,
    block_size: Any = None,
    block_mask: Any = None,
    enable_pruning: Any = None,
    pruning_ratio: Any = None,
    pruning_threshold: Any = None,
    pruning_rows: Any = None,
) -> Int8Replacement:
    """Let the attention modules of a pipeline or a model run `cupyattn.Int8Attention`.

    Parameters
    ----------
    pipe_or_model : DiffusionPipeline or torch.nn.Module
        For a pipeline, all models that take a timestep. Modified in place.
    include, exclude : str or sequence of str, optional
        Regular expressions. A module is replaced if its name matches one of `include` (any name
        does, when omitted) and none of `exclude`. Names begin with the pipeline's component,
        ``"transformer.transformer_blocks.0.attn"``, or are the names in a single model.
    policy : "adaptive", a mode, a table, an object, or a mapping
        As for `cupyattn.Int8Attention`, for every layer; or a mapping of regular expressions to
        such policies. The first expression that matches a layer's name decides; other layers are
        "adaptive".
    scheduler : object, optional
        Scheduler of the steps, for a model without a pipeline. A pipeline's scheduler is read at
        every step, so it may be replaced.
    min_length : int
        Calls of fewer queries or keys stay native.
    quant : QuantConfig, Calibration or mapping, optional
        How the INT8 modes quantise. A calibration has static scales, and the result of
        `cupyattn.diffusion.calibrate` has separate scales for every layer. When omitted, a mode is
        an accuracy class of `cupyattn.attention`: the rung of the class that was measured to be the
        fastest on that device runs, in 16 bits if INT8 is slower.
    backend, arch : str, optional
        As for `cupyattn.attention`.
    count_compiled : bool
        Count the calls of each layer in compiled code, too, on the device: one addition a call.
        `report` waits for the device to read them.
    again : bool
        First undo all earlier replacements of attention in these models.
    timestep_scales, use_adaptive_scaling, attention_type, window_size, block_size, block_mask, \
    enable_pruning, pruning_ratio, pruning_threshold, pruning_rows : optional
        As for `cupyattn.Int8Attention`, at the steps of the scheduler. These and `quant`
        may be mappings, too: of names of layers, and of regular expressions that are searched in
        the others' names. Layers without one have the default.

    Returns
    -------
    Int8Replacement
        A handle to use like the pipeline or the model, with `restore()` and `report()`:
        ``pipe = replace_attention_with_int8(pipe)``, then ``pipe(prompt).images[0]``.

    Raises
    ------
    TypeError
        For anything but a pipeline or a module, a pipeline with a handle in place of a model, and
        patterns that are not text.
    ValueError
        For a pattern that is not a regular expression or matches no name, and if no module is
        chosen or one is already replaced. For an empty policy, and for a policy or static scales
        that need a noise level, without a scheduler. While the model runs: for a calibration of
        other heads and `timestep_scales` of other steps.
    UnsupportedError
        For a version of diffusers whose table of attention backends was not verified, and for a
        scheduler whose noise is unknown.

    Notes
    -----
    The model gets a hook, and its attention modules get a class of the same name. Weights,
    processors and the files of `save_pretrained` stay unchanged.
    Masks of the model are supported: bool, or numbers that are added to the scores.
    Some calls run native attention, bit for bit, and are counted with the reason. They are causal,
    or have dropout, gradients or a mask of another type; or they have too few queries or keys, or
    heads of other sizes than 1 to 256. Local and block-sparse attention requires as many keys as
    queries, and pruning requires calls without a mask. Guidance needs no setting: both branches, in
    one batch or in two passes, run at the noise level of their step. A model is called from one
    thread at a time. With diffusers' context parallelism its ranks share a call, even with
    gradients in 16 bits (docs/DISTRIBUTED.md).

    A model may be compiled before or after: by ``torch.compile(model)``, ``model.compile()`` or
    ``compile_repeated_blocks``, with ``fullgraph=True``. Attention is an operator of the graph.
    There is one graph for every mode of the policy, and a step of a known mode compiles nothing. If
    a compiled function of the caller calls the model, and in ``torch.export``, host code does not
    see the steps. Only a policy of one mode runs there, without scales that depend on the step.
    With static scales, pruning and block masks the host decides at each call of a graph. Inductor
    excludes these calls from CUDA graphs, and exported programs do not have them. The report says
    which layers stay native, and why.

    Examples
    --------
    >>> import torch
    >>> from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    >>> model = SD3Transformer2DModel(
    ...     sample_size=16, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8,
    ...     num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
    ...     pooled_projection_dim=16, out_channels=4, pos_embed_max_size=16)
    >>> with replace_attention_with_int8(model, policy="balanced") as handle, torch.no_grad():
    ...     _ = model(torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 16), torch.zeros(1, 16),
    ...               torch.tensor([500.0]))
    >>> print(handle.report())
    1 attention module: 1 call by cupyattn (1 balanced), 0 native
    transformer_blocks.0.attn: 1 balanced
    """
    check_arch(arch)
    shared: dict[str, Any] = {
        "min_length": check_count("min_length", min_length), "backend": backend, "arch": arch,
    }  # fmt: skip
    asked = Features(
        quant=quant, timestep_scales=timestep_scales, use_adaptive_scaling=use_adaptive_scaling,
        attention_type=attention_type, window_size=window_size, block_size=block_size,
        block_mask=block_mask, enable_pruning=enable_pruning, pruning_ratio=pruning_ratio,
        pruning_threshold=pruning_threshold, pruning_rows=pruning_rows,
    )  # fmt: skip
    selection, policies = Selection.of(include, exclude), _policies(policy)
    pipe_or_model = target_of(pipe_or_model)
    owner, models = models_of(pipe_or_model, scheduler)
    chosen = [
        (prefix, name, module)
        for prefix, model in models.items()
        for name, module in attention_modules(prefix, model)
        if name in selection
    ]
    _check_chosen(chosen, models, selection, policies, (include, exclude), asked)
    if not again:
        _check_not_replaced(chosen)
    options = {name: asked.of(name) for _, name, _ in chosen}
    needs_noise = [name for _, name, _ in chosen if _policy_of(name, policies) not in MODES]
    follows = step_dependent_layers(options)
    noise = None
    if needs_noise or follows:
        if owner is None and needs_noise:
            raise ValueError(
                f"policy={policy!r:.60} needs to know the noise level of a step for "
                f"{needs_noise[0]}: give the pipeline, scheduler=..., or one of the modes "
                f"{', '.join(MODES)} as policy"
            )
        if owner is None:
            name, what = next(iter(follows.items()))
            raise ValueError(
                f"{name} has {what}, for which the noise level of each step must be known: give "
                "the pipeline or scheduler=..., or use_adaptive_scaling=False or pruning_ratio, "
                "which are the same at all steps"
            )
        noise = _noise_of(owner)
    if any(hasattr(module.processor, "_attention_backend") for *_, module in chosen):
        backends.backend()
    of_models = {prefix: steps.Step(noise) for prefix in models}
    if again:
        for model in models.values():
            restore_attention(model)
    layers = [
        Layer(
            name, module, _policy_of(name, policies), of_models[prefix], **shared, **options[name]
        )
        for prefix, name, module in chosen
    ]
    if count_compiled:
        for (prefix, *_), layer in zip(chosen, layers, strict=True):
            of_models[prefix].counted.append(layer)
    try:
        # NOTE: a hook for each handle; handles of other modules of the model see steps, too.
        hooks = [
            model.register_forward_pre_hook(
                functools.partial(steps.before_model, of_models[prefix]), with_kwargs=True
            )
            for prefix, model in models.items()
        ]
        for layer in layers:
            interception.replace_class(layer.module, layer)
        return Int8Replacement(pipe_or_model, layers, hooks)
    except BaseException:
        for prefix, model in models.items():
            _remove_hooks(model, of_models[prefix])
        Int8Replacement(pipe_or_model, layers, ()).restore()
        raise


def models_of(pipe_or_model: Any, scheduler: Any) -> tuple[Any, dict[str, Any]]:
    """Return the object with a scheduler, or None, and the models by their names' prefixes."""
    if is_pipeline(pipe_or_model):
        for name, part in pipe_or_model.components.items():
            if isinstance(part, Handle):
                raise TypeError(
                    f"{name} of {type(pipe_or_model).__name__} is a handle, {type(part).__name__}, "
                    f"and no model: assign pipe.{name} = pipe.{name}.target, in which layers were "
                    "replaced in place"
                )
        parts = {f"{n}.": uncompiled(part) for n, part in pipe_or_model.components.items()}
        models = {
            prefix: part
            for prefix, part in parts.items()
            if isinstance(part, torch.nn.Module) and _takes_timestep(part)
        }
        if not models:
            raise ValueError(
                f"{type(pipe_or_model).__name__} has no model that takes a timestep, as the "
                "transformer or U-Net of a diffusion pipeline does: give the pipeline with it, or "
                "the model"
            )
        for prefix, part in models.items():
            first = next(name for name, one in models.items() if one is part)
            if first != prefix:
                raise ValueError(
                    f"{first[:-1]} and {prefix[:-1]} of {type(pipe_or_model).__name__} are the "
                    f"same model: give the model itself, pipe.{first[:-1]}"
                )
        if scheduler is None:
            return pipe_or_model, models
    elif isinstance(pipe_or_model, torch.nn.Module):
        models = {"": uncompiled(pipe_or_model)}
    else:
        raise TypeError(
            "pipe_or_model must be a DiffusionPipeline or a torch.nn.Module, as "
            "DiffusionPipeline.from_pretrained(NAME) returns one, got "
            f"{type(pipe_or_model).__name__}"
        )
    return None if scheduler is None else SimpleNamespace(scheduler=scheduler), models


def _noise_of(owner: Any) -> Noise:
    """Return the noise of an object with a scheduler; raise if it is unknown."""
    kind_of(owner.scheduler)
    return Noise(owner)


def steps_of(owner: Any) -> steps.Step:
    """Return the steps of an object with a scheduler; raise if its noise is unknown."""
    return steps.Step(_noise_of(owner))


def _takes_timestep(model: Any) -> bool:
    return any(name in inspect.signature(model.forward).parameters for name in steps.TIMESTEPS)


def attention_modules(prefix: str, model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, _ATTENTION) and hasattr(module, "processor"):
            yield prefix + name.replace(COMPILED, ""), module


def _check_chosen(
    chosen: Sequence[tuple[str, str, Any]],
    models: Mapping[str, Any],
    selection: Selection,
    policies: Sequence[tuple[re.Pattern[str], Any]],
    given: tuple[Patterns, Patterns],
    asked: Features,
) -> None:
    names = [name for p, model in models.items() for name, _ in attention_modules(p, model)]
    if names:
        selection.check(names, "attention module")
        check_found("policy", [pattern for pattern, _ in policies], names, "attention module")
        asked.check(names)
    if not chosen:
        include, exclude = given
        raise ValueError(
            f"no attention module is chosen by include={include!r} exclude={exclude!r}, there are "
            f"{first_names(names)}"
        )


def _check_not_replaced(chosen: Sequence[tuple[str, str, Any]]) -> None:
    for _, name, module in chosen:
        if interception.layer_of(module) is not None:
            raise ValueError(
                f"{printable(name)} is replaced already: restore() that first, call "
                "cupyattn.interop.restore of the pipeline or model, or give again=True; a copy of "
                "a replaced model stays INT8, so copy the model after restore()"
            )


def _policies(policy: Any) -> list[tuple[re.Pattern[str], Any]]:
    """Return policies by regular expression; the first expression that matches decides."""
    given = policy if isinstance(policy, Mapping) else {"": policy}
    if not given:
        raise ValueError(f"policy={policy!r} is empty: give 'adaptive' or a policy for some layers")
    for one in given.values():
        table = one.modes if isinstance(one, TablePolicy) else one
        if isinstance(table, str) or not isinstance(table, Sequence):
            as_policy(one, 1)  # tables are held to the steps of each schedule
        elif not table:
            raise ValueError(f"policy={policy!r:.60} has an empty table: give a mode for each step")
    patterns = (*compiled("the names of policy", [*given]), re.compile(""))
    return [*zip(patterns, [*given.values(), "adaptive"], strict=True)]


def _policy_of(name: str, policies: Sequence[tuple[re.Pattern[str], Any]]) -> Any:
    return next(policy for pattern, policy in policies if pattern.search(name))
