"""The backward kernel that runs in pairs of blocks, in a process that may not take for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.pairs import CALLS, SIZES
from tests.gpu.test_backward import options_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", CALLS)
def test_gradients_are_within_their_bound(form: str, dtype: str, mask: str) -> None:
    """Bits of dK and dV repeat, and of dQ if pairs add in turn."""
    options_of(form)  # skips devices without the form
    program = sys.executable, "-m", "tests.gpu.pairs", form, dtype, mask
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("within") == len(SIZES)
