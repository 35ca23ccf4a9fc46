"""Every script of examples/ runs by itself, as its docstring says; those of a library, where it is.

`make test-interop` runs those of torch, JAX and diffusers, tests/gpu that of CuPy.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: The library that a script needs, what it is run with, and what it prints at its end.
SCRIPTS = {
    "numpy_script": ("numpy", (), r"gradients of shapes \(1, 4, 256, 64\)"),
    "calibrate_then_sample": (
        "numpy", ("--quick",), r"'balanced': \d.*\n(9\d|100)\.\d% of samples end at the same point"
    ),
    "calibrate_recorded": (
        "numpy", ("--quick",), r"(block [14], step .* static [1-9]\.\de-03, dynamic .*\n){6}"
    ),
    "torch_module": ("torch", (), r"qkv: INT8, linear\nout: INT8, linear\nINT8 .* 0\.\d\d% away"),
    "jax_gradient": ("jax", (), r"loss 1\.0\d+\n.*\(2, 1, 2, 128, 64\)"),
    "diffusers_pipeline": ("diffusers", (), r"balanced(.|\n)*INT8 is 0\.\d+% away"),
}  # fmt: skip
#: Needs a device: tests/gpu/test_examples.py.
ON_DEVICE = {"cupy_script"}


def run(name: str, *arguments: str) -> str:
    """Run a script of examples/ in a process of its own; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments], cwd=EXAMPLES, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name: str) -> None:
    library, arguments, printed = SCRIPTS[name]
    pytest.importorskip(library)
    assert re.search(printed, run(name, *arguments))


def test_every_example_is_run_somewhere_and_says_how() -> None:
    found = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(found) == SCRIPTS.keys() | ON_DEVICE
    for name, text in found.items():
        assert f"python examples/{name}.py" in text.split('"""')[1]
