"""User kernels in the interpreter: arguments of `run_kernel`, correct kernels without findings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn.errors import KernelLaunchError
from cupyattn.interpret import executor
from cupyattn.interpret.executor import run_kernel
from cupyattn.interpret.findings import KernelFault
from cupyattn.interpret.ptx import PtxError
from tests.interpret.raw_kernels import THREADS, arrays, run, spec

X = np.arange(1, THREADS + 1)

# ---- arguments -----------------------------------------------------------------------------------

#: Parameters of every kind: y[i] = a * x[i] + b + pair.second, in float where pair.first says so.
MIXED = """
struct Pair { int first; double second; };
extern "C" __global__ void mixed(
    const int* x, double* y, unsigned char a, float b, Pair pair, const int* nothing) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  y[i] = a * x[i] + b + pair.first * pair.second + (nothing == nullptr ? 0 : 1000);
}
"""
PAIR = np.dtype([("first", "i4"), ("second", "f8")], align=True)


def mixed_arguments() -> list[Any]:
    pair = np.array((2, 0.25), PAIR)
    x, y = np.arange(THREADS, dtype=np.int32), np.zeros(THREADS)
    return [x, y, np.uint8(3), np.float32(0.5), pair, None]


def test_arguments_of_every_kind(tmp_path: Path) -> None:
    arguments = mixed_arguments()
    run_kernel(spec(tmp_path, MIXED), "mixed", arguments, block=16, grid=4)
    np.testing.assert_array_equal(arguments[1], 3 * arguments[0] + 1.0)


def on_gpu() -> Any:
    """The interface of CuPy's arrays."""
    return SimpleNamespace(__dlpack__=None, __cuda_array_interface__={}, dtype=np.dtype(np.int32))


@pytest.mark.parametrize(
    ("place", "value", "error", "says"),
    [
        (2, 3, TypeError, r"mixed_param_2 of mixed must be a NumPy array.*got int.*np.int32"),
        (2, np.int32(3), TypeError, r"mixed_param_2 of mixed has 1 bytes, got 4 \(int32\)"),
        (3, np.zeros(2), TypeError, "mixed_param_3 of mixed has 4 bytes, got 8"),
        (4, np.zeros(2, PAIR), TypeError, "mixed_param_4 of mixed has 16 bytes, got 32"),
        (0, [1, 2], TypeError, "mixed_param_0 of mixed must be a NumPy array.*got list"),
        (0, on_gpu(), TypeError, r"takes NumPy arrays, got .*mixed_param_0.*copy it to the host"),
    ],
)
def test_a_wrong_argument_is_one_error(
    place: int, value: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    arguments = mixed_arguments()
    arguments[place] = value
    with pytest.raises(error, match=says):
        run_kernel(spec(tmp_path, MIXED), "mixed", arguments, block=16)


def test_wrong_calls_are_one_error_each(tmp_path: Path) -> None:
    module, arguments = spec(tmp_path, MIXED), mixed_arguments()
    with pytest.raises(ValueError, match="mixed takes 6 arguments, got 5"):
        run_kernel(module, "mixed", arguments[:5], block=16)
    with pytest.raises(ValueError, match="no entry point 'mxied', only mixed"):
        run_kernel(module, "mxied", arguments, block=16)
    for block in (0, 1025):
        with pytest.raises(KernelLaunchError, match=f"takes 1 to 1024 threads, got .* of {block}"):
            run_kernel(module, "mixed", arguments, block=block)
    with pytest.raises(KernelLaunchError, match="takes 1 block or more, got a grid of 0"):
        run_kernel(module, "mixed", arguments, block=16, grid=0)
    with pytest.raises(KernelFault, match="out of bounds.*mixed_param_0"):
        run_kernel(module, "mixed", arguments, block=16, grid=5)
    assert not arguments[1].any(), "nothing was run"


def test_launch_bounds_are_kept(tmp_path: Path) -> None:
    module = spec(tmp_path, 'extern "C" __global__ __launch_bounds__(64) void small() {}\n')
    run_kernel(module, "small", [], block=64)
    with pytest.raises(KernelLaunchError, match="small takes 1 to 64 threads, got a block of 65"):
        run_kernel(module, "small", [], block=65)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x", r"PTX line 6"),
        ("%r1, 4, %rd1", "%r9, 4, %rd1", r"PTX line 7.*%r9"),
        ("[x]", "[z]", r"PTX line 5.*z"),
    ],
)
def test_malformed_ptx_is_one_error_with_its_line(old: str, new: str, says: str) -> None:
    ptx = """.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x) { .reg .b32 %r<4>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd2, %r1, 4, %rd1;
  ld.global.u32 %r2, [%rd2];
  shl.b32 %r3, %r2, 1;
  st.global.u32 [%rd2], %r3;
  ret;
}
"""
    x = np.arange(4, dtype=np.int32)
    run_kernel(ptx, "twice", [x], block=4)
    assert x.tolist() == [0, 2, 4, 6]
    assert old in ptx
    with pytest.raises(PtxError, match=says):
        run_kernel(ptx.replace(old, new), "twice", [x], block=4)


def test_an_empty_text_has_no_entry_point() -> None:
    with pytest.raises((PtxError, ValueError)):
        run_kernel("", "kernel", [], block=1)


# ---- kernels without a hazard --------------------------------------------------------------------

FINE = {
    "atomic operations of several blocks": (
        "atomicAdd(&y[0], x[i]);", 3, lambda: [3 * X.sum(), *[0] * 63],
    ),
    "an exchange ordered by __syncwarp": (
        """
  __shared__ int s[64];
  for (int step = 1; step < 32; step *= 2) {
    s[i] = x[i] * step;
    __syncwarp();
    y[i] += s[i ^ step];
    __syncwarp();
  }
""", 1, lambda: sum(X[np.arange(64) ^ step] * step for step in (1, 2, 4, 8, 16)),
    ),
    "neighbouring 16-bit words of different lanes": (
        """
  __shared__ short s[64];
  s[i] = x[i];
  y[i] = s[i];
""", 1, lambda: X,
    ),
    "neighbouring bytes of different blocks": (
        "reinterpret_cast<signed char*>(y)[blockIdx.x + 4 * i] = x[i];",
        4, lambda: X * 0x01010101,
    ),
    "producers and consumers with barriers of their own": (
        """
  __shared__ int s[32];
  if (i < 32) {
    s[i] = x[i];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    asm volatile("bar.sync 2, 64;" ::: "memory");
    s[i] = -x[i];
    asm volatile("bar.arrive 3, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    y[i] = s[63 - i];
    asm volatile("bar.arrive 2, 64;" ::: "memory");
    asm volatile("bar.sync 3, 64;" ::: "memory");
    y[i - 32] = s[i - 32];
  }
""", 1, lambda: [*-X[:32], *X[31::-1]],
    ),
    "order that is handed on from barrier to barrier": (
        """
  __shared__ int s[96];
  if (i < 32) {
    s[i] = x[i];
    asm volatile("bar.sync 1, 64;" ::: "memory");
  } else if (i < 64) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    asm volatile("bar.sync 2, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 64;" ::: "memory");
    y[i - 64] = s[i - 64];
  }
""", 1, lambda: [*X[:32], *[0] * 32],
    ),
    "lanes that part and meet again": (
        """
  int v = x[i];
  if (i % 3 == 0) v *= 2;
  else if (i % 3 == 1) v += 100;
  y[i] = __shfl_xor_sync(FULL_WARP, v, 1);
""", 1, lambda: np.choose(np.arange(64) % 3, [2 * X, X + 100, X])[np.arange(64) ^ 1],
    ),
    "lanes that exit early": (
        """
  __shared__ int s[64];
  if (i % 32 >= 20) return;
  s[i] = x[i];
  __syncwarp();
  y[i] = s[i / 32 * 32 + 19 - i % 32] + __shfl_sync(FULL_WARP, x[i], 0);
""", 1, lambda: [
            X[i // 32 * 32 + 19 - i % 32] + X[i // 32 * 32] if i % 32 < 20 else 0
            for i in range(64)
        ],
    ),
    "a loop that lanes leave at different times": (
        """
  int v = 0;
  for (int n = 0; n < x[i]; ++n) {
    if (n == 40) continue;
    v += n;
    if (v > 500) break;
  }
  y[i] = v;
""", 1, lambda: [
            next((s for s in np.cumsum([n for n in range(x) if n != 40]) if s > 500),
                 sum(n for n in range(x) if n != 40)) for x in X
        ],
    ),
    "shuffles of half a warp": (
        """
  const unsigned half = i % 32 < 16 ? 0xffffu : 0xffff0000u;
  if (i % 32 < 16) y[i] = __shfl_xor_sync(0xffffu, x[i], 8);
  else y[i] = __shfl_xor_sync(half, x[i], 4);
""", 1, lambda: [X[i ^ 8] if i % 32 < 16 else X[i ^ 4] for i in range(64)],
    ),
    "sets of lanes that hold the same": (
        """
  const unsigned alike = __match_any_sync(FULL_WARP, x[i] % 5);
  y[i] = __reduce_add_sync(alike, x[i]);
""", 1, lambda: [
            sum(int(v) for v in X[i // 32 * 32 :][:32] if v % 5 == X[i] % 5) for i in range(64)
        ],
    ),
    "a block that is no whole number of warps": (
        """
  __shared__ int s[64];
  s[i] = x[i];
  __syncthreads();
  y[i] = s[39 - i];
""", 1, lambda: [*X[39::-1], *[0] * 24],
    ),
    "a loop of copies in the background": (
        """
  __shared__ alignas(16) int s[2][64];
  cp_async<4>(&s[0][i], &x[i], true);
  cp_async_commit_group();
  for (int step = 0; step < 4; ++step) {
    cp_async<4>(&s[(step + 1) % 2][i], &x[i], step < 2);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    __syncthreads();
    y[i] += s[step % 2][63 - i];
    __syncthreads();
  }
""", 1, lambda: 3 * X[::-1],
    ),
}  # fmt: skip
BLOCKS = {
    "order that is handed on from barrier to barrier": 96,
    "a block that is no whole number of warps": 40,
    "neighbouring bytes of different blocks": 64,
}


@pytest.mark.parametrize("name", FINE)
def test_a_kernel_without_a_hazard_runs(name: str, tmp_path: Path) -> None:
    body, grid, expected = FINE[name]
    y = run(tmp_path, f"  {body}\n", block=BLOCKS.get(name, THREADS), grid=grid)
    np.testing.assert_array_equal(y, np.array(expected()))


@pytest.mark.parametrize("budget", [0, 200_000, 1 << 30])
def test_more_blocks_than_fit_at_a_time(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own number and fresh shared memory; atomic operations go on."""
    monkeypatch.setattr(executor, "MEMORY_BUDGET", budget)
    body = """
  __shared__ int s[64];
  s[i] = blockIdx.x;
  __syncthreads();
  atomicAdd(&y[64], s[63 - i] + gridDim.x);
  if (i == 0) y[65 + blockIdx.x] = s[0];
"""
    y = np.zeros(85, np.int32)
    run(tmp_path, body, grid=20, arguments=[arrays()[0], y])
    assert y[64] == 64 * (sum(range(20)) + 20 * 20)
    np.testing.assert_array_equal(y[65:], np.arange(20))
