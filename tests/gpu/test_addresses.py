"""Operands at odd addresses on a device, each in a process of its own.

A misaligned access ends the process's use of the device, and with it all tests that follow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.problem.array_calls import CALLS

ROOT = Path(__file__).resolve().parents[2]

#: Without a row of its own: what reads NumPy arrays alone, or keeps arrays of the table's own.
ON_THE_HOST = {"BlockMask", "QuantConfig", "ladder", "calibrate_quantization_scales"}
NAMES = sorted(CALLS.keys() - ON_THE_HOST)

CODE = """
import sys
import cupy, numpy as np
from tests.problem.array_calls import CALLS

def odd(x):
    x = cupy.ascontiguousarray(cupy.asarray(x))
    if x.itemsize == 1:
        return x
    memory = cupy.zeros(x.nbytes + 32, "uint8")
    moved = cupy.ndarray(x.shape, x.dtype, memory.data + 1)
    cupy.ndarray((x.nbytes,), "uint8", memory.data + 1)[...] = x.reshape(-1).view("uint8")
    return moved

def parts(x):
    if hasattr(x, "q_codes"):
        x = (x.q_codes, x.q_scale, x.k_codes, x.k_scale, x.v)
    if isinstance(x, tuple):
        return [one for part in x for one in parts(part)]
    return [x.get() if hasattr(x, "get") else x]

given, call = CALLS[sys.argv[1]]
plain = parts(call({n: cupy.asarray(x) for n, x in given.items()}))
moved = {n: odd(x) for n, x in given.items()}
for _ in range(2):
    found = parts(call(dict(moved)))
    for one, two in zip(plain, found, strict=True):
        if isinstance(one, np.ndarray) and sys.argv[1] not in ("attention_backward",
                                                               "attention_varlen_backward"):
            assert one.tobytes() == two.tobytes()
        elif isinstance(one, np.ndarray):  # blocks add up dQ in any order
            np.testing.assert_allclose(one.astype("f4"), two.astype("f4"), rtol=1e-2, atol=1e-2)
cupy.cuda.Device().synchronize()
"""


@pytest.mark.parametrize("name", NAMES)
def test_operands_at_odd_addresses(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_out_at_an_odd_address_is_refused() -> None:
    code = """
import cupy, cupyattn as ca
q = cupy.ones((1, 1, 4, 8), "float16")
out = cupy.ndarray(q.shape, q.dtype, cupy.zeros(256, "uint8").data + 1)
try:
    ca.attention(q, q, q, out=out)
except ValueError as error:
    assert "out must have its elements at multiples of their 2 bytes" in str(error)
else:
    raise SystemExit("accepted")
cupy.cuda.Device().synchronize()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
