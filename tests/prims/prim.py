"""A test of one primitive: a tiny kernel, its arguments, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.compiler.modules import ModuleSpec
from cupyattn.kernels.features import Features
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans.records import TensorMap

FOLDER = Path(__file__).parent / "sources"
#: Arguments of a kernel by name, in its order.
Arguments = dict[str, Any]
Results = dict[str, np.ndarray]


@dataclass(frozen=True)
class Prim:
    """One kernel to run.

    Parameters
    ----------
    name : str
        Unique.
    header : str
        The header of ``prims/`` that it is about, or for bare instructions ``ptx_...``; the source
        is ``tests/prims/sources/prims_<header>.cu``, or ``tests/prims/sources/ptx_....cu``.
    entry : str
        Kernel.
    block, grid : int
        Threads of a block, and blocks.
    arguments : callable
        Returns the arguments in the kernel's order: arrays, of which those that it writes are named
        by `expected` too, parameter structs, and tensor maps. An array that a tensor map names is
        reached through it alone and is no parameter (`parameters`).
    expected : callable
        Takes the arguments by name, returns what must have been written.
    relative, absolute : float
        What floats may differ by; 0 for both means to the bit.
    defines : tuple of (str, int)
        Macros.
    hopper : bool
        Whether the instructions exist on compute capability 9.0 alone.
    since : int
        Compute capability times ten from which on they exist.
    late : bool
        Whether its tests are slow: its neighbours stand for it.
    tolerance : callable, optional
        Takes the arguments by name, returns by how much each element of a result may differ, beside
        `relative`.
    """

    name: str
    header: str
    entry: str
    block: int
    arguments: Callable[[], Arguments]
    expected: Callable[..., Mapping[str, np.ndarray]]
    relative: float = 0.0
    absolute: float = 0.0
    grid: int = 1
    defines: tuple[tuple[str, int], ...] = ()
    hopper: bool = False
    since: int = 80
    late: bool = False
    tolerance: Callable[..., Mapping[str, np.ndarray]] | None = None

    @property
    def spec(self) -> ModuleSpec:
        """The module to compile."""
        stem = self.header if self.header.startswith("ptx_") else f"prims_{self.header}"
        return ModuleSpec(FOLDER / f"{stem}.cu", self.defines)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures for which the tests compile it."""
        if self.hopper:
            return ("sm_90a",)
        return tuple(dict.fromkeys((f"sm_{self.since}", "sm_90")))

    @property
    def differs_on_sm_90(self) -> bool:
        """Whether the compiler writes other PTX for compute capability 9.0 than for 8.0."""
        return not self.hopper and self.header in (
            "mma", "warp", "quant", "griddepcontrol",
        )  # fmt: skip

    @staticmethod
    def parameters(arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of those arguments that the kernel takes as parameters."""
        mapped = {a.buffer for a in arguments.values() if isinstance(a, TensorMap)}
        return [name for name in arguments if name not in mapped]

    def check(self, written: Mapping[str, np.ndarray]) -> None:
        """Compare the results of a run with the expected results."""
        slack = self.tolerance(**self.arguments()) if self.tolerance else {}
        for name, expected in self.expected(**self.arguments()).items():
            found = np.asarray(written[name]).reshape(expected.shape)
            message = f"{self.name}: {name}"
            if name in slack:
                limit = slack[name] + self.relative * np.abs(expected)
                worst = np.max(np.abs(found - expected) / limit)
                assert worst <= 1, f"{message} is off by {worst:.3g} of what it may"
            elif expected.dtype.kind == "f" and (self.relative or self.absolute):
                np.testing.assert_allclose(
                    found, expected, self.relative, self.absolute, err_msg=message
                )
            else:
                np.testing.assert_array_equal(found, expected, err_msg=message)


def defines(tiles: Tiles, features: Features) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({**tiles.defines(), **features.defines()}.items()))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng().normal(size=shape).astype(np.float32)


def eighths(*shape: int) -> np.ndarray:
    """Scores of which every sum with a bias is exact in float32."""
    return (rng().integers(-999, 1000, shape) / 8).astype(np.float32)


def butterfly(x: np.ndarray, lanes: int, combine: Callable[..., np.ndarray]) -> np.ndarray:
    """Combine over aligned groups of lanes, in the order of ``__shfl_xor_sync``."""
    index, offset = np.arange(len(x)), lanes // 2
    while offset:
        x = combine(x, x[index ^ offset])
        offset //= 2
    return x
