"""compute-sanitizer finds nothing: no access out of bounds, no race, no uninitialised read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitize import ALL
from tests.gpu.support import prebuild, specs_of

ROOT = Path(__file__).parents[2]


def sanitizer() -> str | None:
    """The tool on the PATH, or of a toolkit in its usual place."""
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    return shutil.which("compute-sanitizer") or (usual if Path(usual).is_file() else None)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_nothing_is_found(tool: str) -> None:
    command = sanitizer()
    if command is None:
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    prebuild(
        spec
        for variant, dtype in ALL
        for head_dim, causal in ((64, True), (36, False))
        for spec in specs_of(variant, dtype, head_dim, causal)
    )
    program = (sys.executable, "-m", "tests.gpu.sanitize")
    result = subprocess.run(
        [command, "--tool", tool, "--error-exitcode", "99", *program],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert result.stdout.count("ran ") == len(ALL)
