"""`accelerate`: INT8 attention and linear layers by measured settings, compiled, in one call."""

from __future__ import annotations

from os import PathLike
from typing import Any

from cupyattn.interop.diffusers.replace import (
    Int8Replacement,
    attention_modules,
    models_of,
    replace_attention_with_int8,
)
from cupyattn.interop.handle import target_of
from cupyattn.interop.selection import Patterns
from cupyattn.interop.torch.accelerated_parts import (
    Log,
    Part,
    Request,
    exactly,
    layer_names,
    part_of,
)
from cupyattn.interop.torch.accelerating import Accelerated, accelerated
from cupyattn.interop.torch.quantising import Activations, check_names

#: Policies of `replace_attention_with_int8` by accuracy class.
POLICIES = {"full": "precision", "balanced": "balanced", "aggressive": "aggressive"}


def accelerate(
    pipe_or_model: Any,
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
    """Make a pipeline or a model of diffusers faster: attention, INT8 layers, compiled.

    Parameters
    ----------
    pipe_or_model : DiffusionPipeline or torch.nn.Module
        For a pipeline, all models that take a timestep. Modified in place.
    accuracy : {"full", "balanced", "aggressive"}
        Class of attention, as for `cupyattn.attention`: 16 bits, INT8 Q·Kᵀ, or 8-bit P·V, too.
        Linear layers are INT8 in each class.
    compile : {"blocks", "graphs", False}
        Compile the blocks that a model repeats with ``fullgraph=True``, as diffusers recommends;
        beside that record each pass as one CUDA graph; or neither.
    include, exclude : str or sequence of str, optional
        Regular expressions, searched in the names of linear layers and attention modules: only
        those that match one of `include`, and none of `exclude`. Names begin with the pipeline's
        component, ``"transformer.transformer_blocks.0.attn"``, or are the model's own.
    checkpoint : path, optional
        Folder written by `save` of an earlier handle or by `cupyattn convert`: its codes are used,
        and nothing is quantised. They must be codes of the model's weights.
    activations : mapping of str to Tensor or array, optional
        Inputs of layers, (..., in), by name, as ``record(pipe).recording.inputs`` has them. They
        decide between scales of blocks, of channels, and of channels of rotated rows.
    again : bool
        First undo all earlier replacements in the models; an exception later leaves them native.
    arch, backend : str, optional
        As for `cupyattn.attention`.
    log : callable, optional
        Called with each of five lines that say what was done and what stays native; None: silent.

    Returns
    -------
    Accelerated
        Used like the pipeline or the model, with `report()`, `restore()`, `save(folder)` and
        `compare(...)`.

    Raises
    ------
    TypeError
        If the first argument is neither a pipeline nor a module, and for arguments of another type.
    ValueError
        For an unknown accuracy or way to compile, for a pattern that no name matches, for
        activations of an unknown layer or beside a checkpoint, for codes of another model, and as
        `replace_attention_with_int8` and `replace_linear_with_int8`.
    UnsupportedError
        As `replace_attention_with_int8`. After any exception, all models are unchanged.

    Notes
    -----
    Settings come from ``experiments/results/whole_models.json``: from the whole model of the same
    class, of nearly the same width, on the same kind of device. A part stays native if its interval
    there includes 1, or if it was slower; the fifth line says so. Layers have a scale for each
    channel if that record allows it, and for each block if there is no such model. On other devices
    everything is replaced; `compare` measures the gain.

    Examples
    --------
    >>> from diffusers import SD3Transformer2DModel
    >>> model = SD3Transformer2DModel(
    ...     sample_size=16, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=64,
    ...     num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=128,
    ...     pooled_projection_dim=16, out_channels=4, pos_embed_max_size=16)
    >>> with accelerate(model, compile=False, log=None) as handle:
    ...     print(handle.report().lines[2])
    attention: 1 module by cupyattn, in 16 bits
    """
    request = Request(
        accuracy, compile, include, exclude, checkpoint, activations, again, arch, backend, log
    )  # fmt: skip
    pipe_or_model = target_of(pipe_or_model)
    _, models = models_of(pipe_or_model, None)
    parts = [part_of(prefix, model) for prefix, model in models.items()]
    attention = {
        part.prefix: [name for name, _ in attention_modules(part.prefix, part.model)]
        for part in parts
    }
    layers = [name for part in parts for name in layer_names(part)]
    names = [*layers, *(name for found in attention.values() for name in found)]
    request.selection.check(names, "linear layer or attention module")
    check_names(request.activations, layers)

    def attend() -> Int8Replacement | None:
        chosen: dict[str, list[str]] = {}  # names by policy
        for part in parts:
            found = _chosen(part, attention[part.prefix], request)
            if found:
                chosen.setdefault(POLICIES[part.accuracy], []).extend(found)
        if not chosen:
            return None
        every = [name for found in chosen.values() for name in found]
        return replace_attention_with_int8(
            pipe_or_model, include=exactly(every), arch=arch, backend=backend,
            policy={exactly(found): policy for policy, found in chosen.items()},
        )  # fmt: skip

    return accelerated(pipe_or_model, parts, request, attend)


def _chosen(part: Part, names: list[str], request: Request) -> list[str]:
    """Return the attention modules of a model to replace; record the reason if there are none."""
    selection = request.selection
    found = [name for name in names if name in selection]
    part.is_partial |= 0 < len(found) < len(names)
    if not found:
        part.native["attention"] = (
            "excluded" if names else "the model has no attention modules of diffusers"
        )
        return []
    part.accuracy = part.settle("attention", request)
    return found if part.accuracy else []
