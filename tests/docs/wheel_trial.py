"""Checks of an installed cupyattn with only its core dependencies; not a test by itself.

tests/docs/test_packaging.py runs this with the interpreter of an empty environment, outside the
checkout. It prints one line per thing seen and stops at the first that is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np


def main(expected_sources: list[str]) -> None:
    """Import the core, find kernels and data, run a mirror inside its bound."""
    for absent in ("cupy", "pytest", "hypothesis", "matplotlib"):
        check(importlib.util.find_spec(absent) is None, f"{absent} is not installed")
    modules = (
        "bounds", "kernels.ladder", "ops.attention", "plans.assemble", "problem.checks", "quant",
        "reference", "strategies", "testing.plugin", "testing.verdict",
    )  # fmt: skip
    for name in modules:
        importlib.import_module(f"cupyattn.{name}")
    print("imported", *modules)

    from cupyattn.compiler import modules as kc

    package = Path(importlib.import_module("cupyattn").__file__ or "").parent
    check("site-packages" in package.parts, f"{package} is the installed package")
    check(package / "kernels_cu" == kc.KERNELS, f"kernels are in {kc.KERNELS}")
    found = [
        path.relative_to(kc.KERNELS).as_posix()
        for path in kc.KERNELS.rglob("*")
        if path.suffix in (".cu", ".cuh")
    ]
    check(sorted(found) == sorted(expected_sources), f"{len(found)} sources, as in the checkout")
    check(any((package / "data").glob("*.npz")), "sample data is there")
    check((package / "py.typed").is_file(), "type hints are declared")

    from cupyattn.bounds import kernel
    from cupyattn.reference import attention as reference_mirror
    from cupyattn.reference import exact as reference

    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 48, 32)).astype(np.float16)
    exact = reference.attention_exact(q, k, v)
    mirror = reference_mirror.attention_mirror(q, k, v, variant="fa")
    bound = kernel.attention(q, k, v, variant="fa").total
    check(bool(np.all(np.abs(mirror.astype(np.float64) - exact) <= bound)), "mirror within bound")
    check("cupy" not in sys.modules, "CuPy was not needed")


def check(holds: bool, what: str) -> None:
    """Print what was seen, or stop the trial."""
    if not holds:
        sys.exit(f"wrong: {what}")
    print("ok:", what)


if __name__ == "__main__":
    main(sys.argv[1:])
