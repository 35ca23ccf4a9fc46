"""Operands at odd addresses on a device, each in a process of its own.

A misaligned access ends the process's use of the device, and with it all tests that follow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.problem.array_calls import CALLS, ON_THE_HOST

ROOT = Path(__file__).resolve().parents[2]

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
    return [x.get() if isinstance(x, cupy.ndarray) else x]

given, call = CALLS[sys.argv[1]]
plain = parts(call({n: cupy.asarray(x) for n, x in given.items()}))
moved = {n: odd(x) for n, x in given.items()}
for _ in range(2):
    found = parts(call(dict(moved)))
    for one, two in zip(plain, found, strict=True):
        if isinstance(one, np.ndarray) and "_backward" not in sys.argv[1]:
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


CAPTURE = """
import cupy, cupyattn as ca, numpy as np

def odd(x):
    memory = cupy.zeros(x.nbytes + 32, "uint8")
    cupy.ndarray((x.nbytes,), "uint8", memory.data + 1)[...] = x.reshape(-1).view("uint8")
    return cupy.ndarray(x.shape, x.dtype, memory.data + 1)

rng = np.random.default_rng(0)
q = cupy.asarray(rng.standard_normal((1, 2, 8, 16)).astype("f2"))
bias = cupy.asarray(rng.standard_normal((1, 1, 8, 8)).astype("f4"))
angles = rng.standard_normal((8, 8)).astype("f4")
rope = cupy.cos(cupy.asarray(angles)), cupy.sin(cupy.asarray(angles))
for name, arrays, options in (
    ("q", (odd(q), q, q), {}),
    ("bias", (q, q, q), {"bias": odd(bias)}),
    ("rope_sin", (q, q, q), {"rope": (rope[0], odd(rope[1]))}),
    ("v", (q, q, cupy.asfortranarray(q)), {}),
):
    out = cupy.empty_like(q)
    prepared = ca.plan(*arrays, **options, out=out)
    first = prepared(*arrays, out=out).get()
    prepared(*arrays, out=out)
    assert out.get().tobytes() == first.tobytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            prepared(*arrays, out=out)
        except ValueError as error:
            assert f"{name} must not need a copy while a CUDA graph captures" in str(error), error
        else:
            raise SystemExit(f"{name} accepted")
        finally:
            stream.end_capture()
# Tables that were copied are read again.
moved = rope[0], odd(rope[1])
prepared = ca.plan(q, q, q, rope=moved)
plain = prepared(q, q, q).get()
bytes_of = cupy.ndarray((moved[1].nbytes,), "uint8", moved[1].data)
bytes_of[...] = cupy.zeros_like(rope[1]).reshape(-1).view("uint8")
turned = ca.attention(q, q, q, rope=(rope[0], cupy.zeros_like(rope[1]))).get()
assert prepared(q, q, q).get().tobytes() == turned.tobytes() != plain.tobytes()
cupy.cuda.Device().synchronize()
"""


def test_a_capture_refuses_operands_that_are_copied() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


TENSORS = """
import cupy, numpy as np, torch
from cupyattn.interop import torch as interop

def odd(x):
    memory = cupy.zeros(x.numel() * x.element_size() + 32, "uint8")
    moved = torch.from_dlpack(cupy.ndarray(tuple(x.shape), str(x.dtype)[6:], memory.data + 1))
    raw = cupy.ndarray((x.numel() * x.element_size(),), "uint8", memory.data + 1)
    raw[...] = cupy.from_dlpack(x.contiguous().view(torch.uint8).reshape(-1))
    assert moved.data_ptr() % 2 == 1
    return moved, memory

torch.manual_seed(0)
x = torch.randn(3, 200, dtype=torch.float16, device="cuda")
layer = interop.Int8Linear.from_linear(
    torch.nn.Linear(200, 5, dtype=torch.float16, device="cuda")
)
q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float16, device="cuda")
want, wanted = layer(x), interop.attention(q, k, v)
(moved, keep), (of_q, keep_q) = odd(x), odd(q)
for _ in range(3):
    assert torch.equal(layer(moved), want)
    assert torch.equal(interop.attention(of_q, k, v), wanted)
torch.cuda.synchronize()
"""


def test_tensors_at_odd_addresses() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", TENSORS], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
