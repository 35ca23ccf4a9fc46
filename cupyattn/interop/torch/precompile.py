"""Kernels of layers that Inductor has just seen: they are compiled while it compiles the rest."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import ahead
from cupyattn.compiler.modules import ModuleSpec, architecture
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.linear_parts import OPERANDS
from cupyattn.ops.layers import LAYERS, LayersSettings
from cupyattn.ops.operation import problem_of
from cupyattn.problem.gemm_form import PORTABLE_ROWS
from cupyattn.quant.activation import columns_of

#: Shape and type of a tensor, None where there is none.
_Form = tuple[tuple[int, ...], str] | None


def begin(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    activations: Sequence[str],
    arch: str | None,
    backend: str | None,
) -> None:
    """Begin to compile what a call of `cupyattn.interop.torch.linear_parts.multiply` launches.

    Parameters
    ----------
    x, layers, activations, arch, backend
        As for that; fake tensors, whose forms alone are looked at. Of few rows, and of lengths that
        are symbols, nothing is begun: their first call compiles.
    """
    tensors = [x, *(one for layer in layers for one in layer if one is not None)]
    known = all(isinstance(n, int) for tensor in tensors for n in tensor.shape)
    if x.device.type != "cuda" or backend == "mirror" or not known:
        return
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability(x.device)
    forms = tuple(tuple(map(_form, layer)) for layer in layers)
    _begin(_form(x), forms, tuple(activations), arch, 10 * major + minor)


def _form(tensor: Tensor | None) -> _Form:
    if tensor is None:
        return None
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def _begin(*call: Any) -> None:
    # NOTE: whatever is wrong with a call is said when it is made.
    with contextlib.suppress(TypeError, ValueError, UnsupportedError, MemoryError):
        ahead.begin(sources(*call))


def sources(
    x: tuple[tuple[int, ...], str],
    layers: Sequence[Sequence[_Form]],
    activations: tuple[str, ...],
    arch: str | None,
    capability: int,
) -> list[tuple[ModuleSpec, str]]:
    """Return what a device compiles for layers of these forms, and for which architectures.

    Parameters
    ----------
    x : (tuple of int, str)
        Shape and type.
    layers : sequence
        As for `cupyattn.interop.torch.linear_parts.multiply`, of forms.
    activations, arch
        As for that.
    capability : int
        Of the device, times ten.
    """
    rows, dtype = x[0][:-1], x[1]
    if math.prod(rows) <= PORTABLE_ROWS:
        return []
    if arch is None and capability == HOPPER_CAPABILITY:
        arch = "sm_90a"
    arrays = {"x": _described("x", *x)}
    for number, (layer, activation) in enumerate(zip(layers, activations, strict=True)):
        for name, form in zip(OPERANDS, layer, strict=False):
            if form is not None:
                arrays[f"{name}{number}"] = _described(f"{name}{number}", *form)
        columns = columns_of(arrays[f"b{number}"].shape[0], activation)
        arrays[f"c{number}"] = _described(f"c{number}", (*rows, columns), dtype)
    settings = LayersSettings(dtype, activations, arch, "interpret")
    problem = problem_of(LAYERS, settings, arrays)
    plans = LAYERS.plan(problem).plans
    specs = dict.fromkeys(launch.module for plan in plans for launch in plan.launches)
    return [(spec, architecture(spec, problem.arch, capability)) for spec in specs]


def _described(name: str, shape: tuple[int, ...], dtype: str) -> Described:
    return Described.contiguous(name, shape, STORAGE.get(dtype, dtype))
