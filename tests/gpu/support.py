"""Code that tests on a device share, like tests/support/runs.py: arrays, forms, compiling ahead."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cupyattn.arrays.kinds import STORAGE
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.compiler.disk_cache import cache_folder
from cupyattn.ops import explain
from cupyattn.ops.attention import ATTENTION, resolved
from tests.support import runs
from tests.support.runs import Arrays, Guarded, Run

cupy = pytest.importorskip("cupy")


#: Runs until the host releases it, or for about a minute: a host whose cores are all taken is slow.
HOLD = r"""
extern "C" __global__ void hold(const volatile int* released) {
  const long long start = clock64();
  while (!*released && clock64() - start < 120'000'000'000) {
  }
}
"""


def on_device(*arrays: np.ndarray) -> tuple[Any, ...]:
    return tuple(cupy.asarray(array) for array in arrays)


class Captured:
    """A call in a CUDA graph: made once before, which compiles it and fills the pool of its stream.

    Nothing in it may wait for the device.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with self.stream:
            call()
            self.stream.synchronize()
            self.stream.begin_capture()
            self.result = call()
            self._graph = self.stream.end_capture()

    def replay(self) -> Any:
        """Launch the graph after all other work, and return the results of the captured call."""
        cupy.cuda.Device().synchronize()
        self._graph.launch(self.stream)
        self.stream.synchronize()
        return self.result


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep the current stream of the current device busy until the end of the block."""
    gc.collect()  # of earlier tests: to free memory of the device waits for all that runs
    memory = cupy.cuda.alloc_pinned_memory(4)
    released = np.frombuffer(memory, np.int32, 1)
    released[0] = 0
    cupy.RawKernel(HOLD, "hold")((1,), (1,), (np.uint64(memory.ptr),))
    try:
        yield
    finally:
        released[0] = 1


def moved(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a call with their arrays on the device."""
    arrays = (*runs.ADDED, runs.D_LSE)
    options = {n: cupy.asarray(a) if n in arrays else a for n, a in options.items()}
    for name in ("rope", "qk_norm"):
        if options.get(name):
            options[name] = on_device(*options[name])
    return options


def embedded(x: np.ndarray, pad: int = 8, fill: float = np.nan) -> Any:
    """Return `x` on the device as a view of a larger buffer that holds `fill` everywhere else."""
    return runs.embedded(x, pad, fill, xp=cupy)


def guarded(shape: Sequence[int], dtype: str) -> Guarded:
    """Return an array of NaN on the device amid more NaN."""
    return Guarded.empty(shape, dtype, xp=cupy)


def arch_of(rung: str) -> str | None:
    """Return what names the form of a rung: on a Hopper device either form runs by ``arch``."""
    hopper = int(cupy.cuda.Device().compute_capability) == 90
    if rung.partition("@")[2].startswith("sm90"):
        if not hopper:
            pytest.skip("the Hopper form runs on compute capability 9.0 alone")
        return "sm_90a"
    return "sm_90" if hopper else None


def attend(rung: str, *operands: Any, **options: Any) -> Any:
    """Call `attention` in the form that `rung` names."""
    return runs.attend(rung, *operands, arch=arch_of(rung), **options)


def form_taken(rung: str, inputs: Arrays, **options: Any) -> str:
    """Return the form that these arrays get."""
    return runs.form_taken(rung, inputs, arch=arch_of(rung), **options)


def run(rung: str, inputs: Arrays, **options: Any) -> Run:
    """Call `attention` with CuPy arrays, and keep the quantised operands of the INT8 rung."""
    return runs.run(rung, inputs, arch=arch_of(rung), **options)


def run_packed(rung: str, inputs: Arrays, ends: Any, **options: Any) -> list[Run]:
    """Call `attention_varlen` with CuPy arrays; return the run of every sequence."""
    return runs.run_packed(rung, inputs, ends, arch=arch_of(rung), **options)


def run_into(rung: str, inputs: Arrays, o: Any, lse: Any, **options: Any) -> Run:
    """Plan and launch by hand, into the buffers given for both results."""
    return runs.run_into(rung, inputs, o, lse, arch=arch_of(rung), **options)


# ---- compiling beforehand ------------------------------------------------------------------------


def specs_of(
    rung: str, dtype: str, head_dim: int, causal: bool, *, lse: bool = True, pad: int = 0
) -> Iterable[kc.ModuleSpec]:
    """Yield what a call compiles, for operands with `pad` elements on either side of a row."""
    capability = int(cupy.cuda.Device().compute_capability)
    if "@sm90" in rung and capability != 90:
        return
    x = cupy.empty((1, 1, 64, head_dim + 2 * pad), STORAGE[dtype])[..., pad : pad + head_dim]
    asked = dict(**runs.asked_for(rung), causal=causal, return_lse=lse, arch=arch_of(rung))
    for plan in explain.plans(resolved(x, x, x, **asked)):
        yield from (one.module for one in plan.launches)


def once(what: str, do: Callable[[], object]) -> None:
    """Do something in one of the workers of a test run, while the others wait for it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"alone {os.getpid()}")
    line = f"{run} {what}\n"
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "done_once").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed
        file.seek(0)
        done = [other for other in file if other.startswith(run)]
        if line not in done:
            do()
            file.truncate(0)
            file.writelines([*done, line])


def prebuild(specs: Iterable[kc.ModuleSpec]) -> None:
    """Compile for this device, in as many threads as there are cores, in one worker for all.

    The tests then find everything in the cache, where compiling one after the other would take
    most of their time.
    """
    capability = int(cupy.cuda.Device().compute_capability)
    arch = devices.device_architecture
    wanted = [(one, arch(capability, one.hopper)) for one in dict.fromkeys(specs)]

    def build() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda one: kc.build(*one), wanted))

    once(hashlib.sha256(repr(wanted).encode()).hexdigest(), build)


def checked_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with every call that is checked; none is known beforehand."""
    kc.cache_clear(disk=False)
    checked: list[Any] = []
    checks = ATTENTION.resolve
    monkeypatch.setattr(ATTENTION, "resolve", lambda *call: checked.append(call) or checks(*call))
    return checked
