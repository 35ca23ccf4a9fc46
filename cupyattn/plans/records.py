"""What a call comes to, pure data: kernels, grids, parameters, workspace.

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
    """Scratch memory of a plan, zero beforehand where it says so.

    `cast_of` names an operand that is converted to it beforehand, and `cast_strides` says where
    its elements lie, by how many of them; `copy_of` names an operand in C order of which it is a
    copy; "": none.
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
        The structs that it takes by value; a string is the name of a buffer, its address to be
        filled in when the plan runs (None: a null pointer).
    awaits : tuple of str
        Buffers that the launch before it makes, where it may begin before that has ended: the
        kernel waits by itself before it reads these or writes (``griddepcontrol``, from sm_90 on).
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
        return described(self, f"{self.variant} ({self.form})", self.tiles, self.features)


class Runnable(Protocol):
    """What an executor needs of a plan of whatever kind."""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels in order."""

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        """Scratch memory that they share."""

    @property
    def on_devices(self) -> dict[Any, Any]:
        """What an executor keeps of this plan, by device."""


@dataclass(frozen=True)
class Stage:
    """One plan of a call, and what its buffers are called in the call where they differ."""

    plan: Any
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """All plans of a call in order, and the buffers that one writes and another reads."""

    stages: tuple[Stage, ...]
    between: tuple[Workspace, ...] = ()

    @classmethod
    def of(cls, plan: Runnable) -> Work:
        """Return the work of one plan alone."""
        return cls((Stage(plan),))

    @property
    def plans(self) -> list[Any]:
        """The plans alone."""
        return [stage.plan for stage in self.stages]

    @property
    def names(self) -> list[dict[str, str]]:
        """For each plan, what the call calls those of its buffers that have other names there."""
        return [
            {**stage.names, **{work.name: self._outer(i, work) for work in stage.plan.workspace}}
            for i, stage in enumerate(self.stages)
        ]

    def _outer(self, number: int, work: Workspace) -> str:
        """Return what the call calls a buffer of the plan of that number alone."""
        return work.name if len(self.stages) == 1 else f"{number}.{work.name}"

    @property
    def memory(self) -> list[str]:
        """What is between the plans, a line each: its extents, which make its size."""
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
        Of tiles all fields are shown, of features those that differ from their defaults.
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
