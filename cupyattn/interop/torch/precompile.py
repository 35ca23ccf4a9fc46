"""Compile kernels of layers that Inductor has just seen, while it compiles the rest."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cupyattn.arrays.described import Described
from cupyattn.compiler import ahead
from cupyattn.compiler.modules import ModuleSpec, architecture
from cupyattn.compiler.target import HOPPER_CAPABILITY
from cupyattn.errors import UnsupportedError
from cupyattn.interop.torch.bridge import device_capability, dtype_of
from cupyattn.interop.torch.linear_parts import named
from cupyattn.ops.layers import LAYERS, LayersSettings, steps_before
from cupyattn.ops.norm_quant import NormQuantSettings
from cupyattn.ops.operation import problem_of
from cupyattn.problem.gemm_form import PORTABLE_ROWS
from cupyattn.problem.joint_rows import joined


def begin(
    x: Tensor,
    layers: Sequence[Sequence[Tensor | None]],
    activations: Sequence[str],
    arch: str | None,
    backend: str | None,
    rotate: str | None = None,
    smooth: Tensor | None = None,
    right: Tensor | None = None,
    *,
    below: Tensor | None = None,
    before: NormQuantSettings | None = None,
    vectors: Sequence[Tensor | None] = (),
) -> None:
    """Begin to compile the kernels of a call of `cupyattn.interop.torch.linear_parts.multiply`.

    Parameters
    ----------
    x, layers, activations, arch, backend, rotate, smooth, right, below, before, vectors
        As for that function; the tensors are fake, and only their forms are read. Calls with few
        rows or symbolic lengths are compiled when they first run.
    """
    if before is None:
        before, vectors = steps_before(rotate, smooth is not None), (smooth,)
    tensors = named(x, layers, vectors, right=right, below=below)
    known = all(isinstance(n, int) for tensor in tensors.values() for n in tensor.shape)
    if x.device.type != "cuda" or backend == "mirror" or not known:
        return
    if not torch.cuda.is_available():
        return
    forms = tuple((name, tuple(one.shape), one.dtype) for name, one in tensors.items())
    _begin(forms, tuple(activations), arch, device_capability(x.device), before)


@functools.lru_cache(maxsize=1024)
def _begin(*call: Any) -> None:
    # NOTE: the call itself reports its errors.
    with contextlib.suppress(TypeError, ValueError, UnsupportedError, MemoryError):
        ahead.begin(sources(*call))


def sources(
    forms: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    activations: tuple[str, ...],
    arch: str | None,
    capability: int,
    before: NormQuantSettings | None = None,
) -> list[tuple[ModuleSpec, str]]:
    """Return the modules that layers of these forms need, with their architectures.

    Parameters
    ----------
    forms : sequence of (str, tuple of int, torch.dtype)
        Buffer, shape and type of each tensor.
    activations, arch
        As for `cupyattn.interop.torch.linear_parts.multiply`.
    capability : int
        Compute capability of the device, times ten.
    before : NormQuantSettings, optional
        As for that function.
    """
    arrays = {n: Described.contiguous(n, shape, dtype_of(n, dtype)) for n, shape, dtype in forms}
    x = joined(arrays["x"], arrays.get("below"))
    if math.prod(x.shape[:-1]) <= PORTABLE_ROWS:
        return []
    if arch is None and capability == HOPPER_CAPABILITY:
        arch = "sm_90a"
    settings = LayersSettings(x.dtype.name, activations, arch, "interpret", before)
    problem = problem_of(LAYERS, settings, arrays)
    plans = LAYERS.plan(problem).plans
    specs = dict.fromkeys(launch.module for plan in plans for launch in plan.launches)
    return [(spec, architecture(spec, problem.arch, capability)) for spec in specs]
