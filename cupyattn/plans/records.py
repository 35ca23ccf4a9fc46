"""The launches of a call as pure data: kernels, grids, parameters, workspace.

A plan holds no array and needs no device. An executor binds names of buffers to addresses and runs
it: `cupyattn.runtime.launches` on a device, `cupyattn.interpret.executor` on NumPy.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.structs import pack, pointers


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of a plan, which may have to be zeroed first.

    `cast_of` names an operand that is first converted into it, with strides `cast_strides` in
    elements. `copy_of` names an operand in C order that is first copied into it. "" means none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False
    cast_of: str = ""
    cast_strides: tuple[int, ...] = ()
    copy_of: str = ""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter that describes a buffer to the Hopper copy engine.

    Parameters
    ----------
    buffer : str
        Name of the buffer.
    dtype : str
    shape : tuple of int
    strides : tuple of int
        In bytes, for every axis but the last, which is contiguous.
    box : tuple of int
        Extents of one copy.
    swizzle : int
        Bytes over which shared memory is swizzled; the library's own kernels take 128.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


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
        The structs that it takes by value. A string is the name of a buffer, whose address is
        filled in when the plan runs (None: a null pointer).
    awaits : tuple of str
        Buffers that the previous launch writes, if this launch may start before that one ends. The
        kernel itself waits before it reads them or writes (``griddepcontrol``, from sm_90 on).
    """

    module: ModuleSpec
    entry: str
    grid: int
    block: int
    dynamic_shared: bool
    params: tuple[tuple[np.dtype[Any], Mapping[str, Any]] | TensorMap, ...]
    awaits: tuple[str, ...] = ()

    @functools.cached_property
    def templates(self) -> tuple[tuple[np.ndarray, tuple[tuple[int, str], ...]] | TensorMap, ...]:
        """The packed parameter structs, in which only the addresses of buffers are missing.

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
    """The launches of a call, which `cupyattn.explain` prints and an executor runs.

    `note` says why a faster form does not run, if there is one, and how a call is split.
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
        """Data of this plan that an executor keeps, by device."""
        return {}

    def __str__(self) -> str:
        return described(self, f"{self.variant} ({self.form})", self.tiles, self.features)


class Runnable(Protocol):
    """The members that an executor needs of any plan."""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels in order."""

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        """Scratch memory that they share."""

    @property
    def on_devices(self) -> dict[Any, Any]:
        """Data of this plan that an executor keeps, by device."""


@dataclass(frozen=True)
class Stage:
    """One plan of a call, and the names of its buffers in the call, if they differ."""

    plan: Any
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """All plans of a call in order, and the buffers that one writes and another reads."""

    stages: tuple[Stage, ...]
    between: tuple[Workspace, ...] = ()

    @classmethod
    def of(cls, plan: Runnable) -> Work:
        """Return the work of a single plan."""
        return cls((Stage(plan),))

    @property
    def plans(self) -> list[Any]:
        """The plans, without names of buffers."""
        return [stage.plan for stage in self.stages]

    @property
    def names(self) -> list[dict[str, str]]:
        """For each plan, the names in the call of buffers that have another name in the plan."""
        return [
            {**stage.names, **{work.name: self._outer(i, work) for work in stage.plan.workspace}}
            for i, stage in enumerate(self.stages)
        ]

    def _outer(self, number: int, work: Workspace) -> str:
        """Return the call's name of a buffer of the plan of that number."""
        return work.name if len(self.stages) == 1 else f"{number}.{work.name}"

    @property
    def memory(self) -> list[str]:
        """The buffers between the plans, a line each, with the extents that give their size."""
        return [
            f"{work.name} {' x '.join(map(str, work.shape))} {work.dtype}, {work.nbytes:,} bytes"
            for work in self.between
        ]

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        """All scratch memory of the call, under the names that it has there."""
        inner = [
            replace(work, name=self._outer(i, work))
            for i, stage in enumerate(self.stages)
            for work in stage.plan.workspace
        ]
        return (*self.between, *inner)


def described(plan: Any, title: str, tiles: Any, features: Any, **more: str) -> str:
    """Return a title and, in a line each, settings, launches, workspace and note of a plan.

    Parameters
    ----------
    plan : object
        With ``launches``, ``workspace`` and ``note``.
    title : str
    tiles, features : dataclass
        All fields of tiles are shown, and the fields of features that differ from their defaults.
    **more : str
        Further lines by name.
    """
    on = [f.name for f in fields(features) if getattr(features, f.name) != f.default]
    rows = [
        ("tiles", _values(tiles, [f.name for f in fields(tiles)])),
        ("features", _values(features, on)),
        *more.items(),
    ]
    rows += [
        ("launch", f"{one.entry}<<<{one.grid}, {one.block}>>> of {one.module.source}")
        for one in plan.launches
    ]
    rows.append(("workspace", f"{sum(work.nbytes for work in plan.workspace):,} bytes"))
    rows += [("note", plan.note)] if plan.note else []
    width = max(len(name) for name, _ in rows)
    return "\n  ".join([title, *(f"{name.ljust(width)} {text}" for name, text in rows)])


def _values(record: Any, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(record, name)!r}" for name in names)
