"""`restore`: undo replacements in a pipeline or a model, without its handle."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cupyattn.interop.handle import is_pipeline, target_of, uncompiled

#: Functions that restore layers of a model, in order, with their modules. A module that was not
#: imported has replaced nothing.
_RESTORE = {
    "restore_compiled": "cupyattn.interop.torch.compiling",
    "restore_linear": "cupyattn.interop.torch.restoring",
    "restore_attention": "cupyattn.interop.diffusers.replace",
}


def restore(pipe_or_model: Any) -> None:
    """Undo replacements in a pipeline or a model, and drop code that `accelerate` compiled.

    Parameters
    ----------
    pipe_or_model : DiffusionPipeline or torch.nn.Module
        Modified in place. A handle is replaced by its pipeline or model.

    Raises
    ------
    TypeError
        For any other object.
    ValueError
        For a pipeline without any model.
    RuntimeError
        If a linear layer has lost its original, which is so for layers from ``load_int8``, after
        ``originals="drop"`` and in copies; or if offloading hooks prevent it. Nothing is then
        restored.

    Notes
    -----
    Use it if the handle is lost, as in a cell of a notebook that runs twice. Existing handles then
    have nothing left to restore. A model without replacements stays unchanged.

    Examples
    --------
    >>> import torch
    >>> from cupyattn.interop import restore
    >>> from cupyattn.interop.torch import replace_linear_with_int8
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    >>> _ = replace_linear_with_int8(model)
    >>> restore(model)
    >>> type(model[0]).__name__
    'Linear'
    """
    models = _models(target_of(pipe_or_model))
    if (home := _RESTORE["restore_linear"]) in sys.modules:
        for model in models:  # all of them before the first is modified
            importlib.import_module(home).check_linear(model)
    for name, home in _RESTORE.items():
        if home in sys.modules:
            take_back = getattr(importlib.import_module(home), name)
            for model in models:
                take_back(model)


def _models(pipe_or_model: Any) -> list[Any]:
    """Return the modules of a pipeline, or the module itself."""
    torch = sys.modules.get("torch")
    parts = [*getattr(pipe_or_model, "components", {"": pipe_or_model}).values()]
    models = [uncompiled(target_of(part)) for part in parts]
    models = [one for one in models if torch is not None and isinstance(one, torch.nn.Module)]
    if not models and is_pipeline(pipe_or_model):
        raise ValueError(
            f"{type(pipe_or_model).__name__} has no model any more: give the model that was in it, "
            "or call restore() of its handle"
        )
    if not models:
        raise TypeError(
            "pipe_or_model must be a DiffusionPipeline or a torch.nn.Module, got "
            f"{type(pipe_or_model).__name__}"
        )
    return models
