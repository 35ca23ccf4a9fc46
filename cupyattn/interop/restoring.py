"""`restore`: take back what was replaced in a pipeline or a model, without its handle."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cupyattn.interop.handle import target_of, uncompiled

#: Modules whose functions take layers out of a model, by those functions, in their order. One that
#: was not imported has replaced nothing.
_RESTORE = {
    "restore_compiled": "cupyattn.interop.torch.compiling",
    "restore_linear": "cupyattn.interop.torch.restoring",
    "restore_attention": "cupyattn.interop.diffusers.replace",
}


def restore(pipe_or_model: Any) -> None:
    """Take back what was replaced in a pipeline or a model, and code that `accelerate` compiled.

    Parameters
    ----------
    pipe_or_model : DiffusionPipeline or torch.nn.Module
        Modified in place. A handle stands for its pipeline or model.

    Raises
    ------
    TypeError
        For what is neither.
    RuntimeError
        If a linear layer has lost what it replaced, as layers from ``load_int8``, after
        ``originals="drop"`` and in copies have, and if hooks of offloading stand in the way.
        Then nothing is taken back.

    Notes
    -----
    For handles that are lost, as in a cell of a notebook that runs twice. Handles that are there
    have nothing left to restore afterwards. A model in which nothing was replaced stays as it is.

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
    if not models:
        raise TypeError(
            "pipe_or_model must be a DiffusionPipeline or a torch.nn.Module, got "
            f"{type(pipe_or_model).__name__}"
        )
    return models
