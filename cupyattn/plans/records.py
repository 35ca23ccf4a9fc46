"""What a call comes to, pure data: kernels, grids, parameters, workspace.

A plan holds no array and needs no device. An executor binds names of buffers to addresses and runs
it: `cupyattn.runtime.launches` on a device, `cupyattn.interpret.executor` on NumPy.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import pack, pointers


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of a plan, zero beforehand where it says so."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter that tells the Hopper copy engine where a buffer lies.

    Parameters
    ----------
    buffer : str
        Name of the buffer.
    dtype : str
    shape : tuple of int
    strides : tuple of int
        Bytes, of every axis but the last, which is contiguous.
    box : tuple of int
        Extents of one copy.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Parameters
    ----------
    module : ModuleSpec
        Source and macros to compile.
    entry : str
        Name of the kernel.
    grid, block : int
        Thread blocks, and threads in each.
    dynamic_shared : bool
        Whether the kernel uses the shared storage whose size its module states.
    params : tuple of (numpy.dtype, mapping) or TensorMap
        The structs that it takes by value; a string is the name of a buffer, its address to be
        filled in when the plan runs (None: a null pointer).
    """

    module: ModuleSpec
    entry: str
    grid: int
    block: int
    dynamic_shared: bool
    params: tuple[tuple[np.dtype[Any], Mapping[str, Any]] | TensorMap, ...]

    @functools.cached_property
    def templates(self) -> tuple[tuple[np.ndarray, tuple[tuple[int, str], ...]] | TensorMap, ...]:
        """The parameters as they are passed: structs packed but for the addresses of buffers.

        Each comes with (index of the 64-bit word, name of the buffer) for every address.
        """
        nowhere: Mapping[str, int] = defaultdict(int)
        return tuple(
            p
            if isinstance(p, TensorMap)
            else (pack(*p, nowhere).view(np.uint64), tuple(pointers(*p)))
            for p in self.params
        )


@dataclass(frozen=True)
class Plan:
    """A call turned into launches: what `cupyattn.explain` prints and an executor runs.

    `note` says why a faster form was left out, where one was, and how a call was split.
    """

    variant: str
    form: str
    tiles: Tiles
    features: Features
    launches: tuple[Launch, ...]
    workspace: tuple[Workspace, ...] = ()
    note: str = ""

    @functools.cached_property
    def on_devices(self) -> dict[Any, Any]:
        """What an executor keeps of this plan, by device."""
        return {}

    def __str__(self) -> str:
        return described(self, f"{self.variant} ({self.form}), {self.tiles}, {self.features}")


def described(plan: Any, title: str) -> str:
    """Return a title and, in a line each, launches, workspace and note of a plan."""
    said = [f"{x.entry}<<<{x.grid}, {x.block}>>> of {x.module.source}" for x in plan.launches]
    said.append(f"workspace {sum(w.nbytes for w in plan.workspace):,} bytes")
    return "\n  ".join([title, *said, *([plan.note] if plan.note else [])])
