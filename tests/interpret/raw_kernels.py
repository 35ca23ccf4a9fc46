"""Kernels of a few lines, written where they are tested and run on the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret.executor import run_kernel

#: Beginning of every kernel.
PREAMBLE = """#include "prims/io/tile_io.cuh"
extern "C" __global__ void kernel(const int* x, int* y) {
  const int i = threadIdx.x;
"""
THREADS = 64


def source(body: str) -> str:
    """Return the whole text of a kernel."""
    return f"{PREAMBLE}{body}}}\n"


def spec(folder: Path, text: str, **macros: int) -> ModuleSpec:
    """Write a text to a folder, and return what to compile."""
    path = folder / "kernel.cu"
    path.write_text(text)
    return ModuleSpec(path, tuple(macros.items()))


def arrays() -> list[np.ndarray]:
    """Return an input x and an output y."""
    x = np.arange(1, THREADS + 1, dtype=np.int32)
    x.flags.writeable = False
    return [x, np.zeros(THREADS, np.int32)]


def run(
    folder: Path,
    body: str,
    *,
    block: int = THREADS,
    grid: int = 1,
    arguments: Sequence[Any] | None = None,
    arch: str | None = None,
    **macros: int,
) -> Any:
    """Run a kernel with the body given, and return y."""
    passed = arrays() if arguments is None else list(arguments)
    module = spec(folder, source(body), **macros)
    run_kernel(module, "kernel", passed, block=block, grid=grid, arch=arch)
    return passed[1]
