"""Products of INT8 codes with a scale for each row and column: operands, exact results, checks."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupyattn.errors import KernelLaunchError
from cupyattn.plans.records import Launch
from experiments.tuning.channel_product.candidates import ARCH, CANDIDATES, Candidate


class Sizes(Protocol):
    """A product: (m, k) by (n, k)."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Case:
    """A product that is compared with exact sums: its operands and the type of C."""

    m: int
    n: int
    k: int
    dtype: str = "float16"
    bias: str = ""
    kind: str = "random"
    seed: int = 1

    @property
    def name(self) -> str:
        """One line that tells it from the others."""
        tail = f" bias {self.bias}" if self.bias else ""
        return f"{self.m} x {self.n} x {self.k} {self.dtype} {self.kind}{tail}"


#: Largest k whose sums of 127 * 127 fit in int32, a multiple of 128.
LARGEST_K = (2**31 - 1) // 127**2 // 128 * 128
EDGE_CASES = (
    Case(1001, 1003, 1040, bias="float32"),
    Case(777, 1544, 2064, "bfloat16", bias="float32"),
    Case(300, 520, LARGEST_K, "bfloat16", bias="float32", kind="largest"),
    Case(1, 264, 16, bias=""),
    Case(4096, 3072, 128, bias=""),
)
#: In the interpreter: a few tiles each, ragged at the ends, k not a multiple of 128.
SMALL_CASES = (
    Case(333, 300, 784, bias="float32"),
    Case(261, 520, 400, kind="largest"),
    Case(70, 281, 144, "bfloat16"),
)
#: What each candidate does first, in a process of its own: several waves of tiles.
TRIAL, TRIAL_SECONDS = Case(4090, 6144, 1040), 120.0
JUDGED_EVERY = 61  # rows of C
DIFFERS = 3  # exit status


# ---- operands and exact results ------------------------------------------------------------------


def draw(case: Sizes, xp: Any, kind: str = "random", seed: int = 0) -> dict[str, Any]:
    """Return a, b, a_scales, b_scales and bias of a product.

    ``"largest"``: codes of 127 and -127 whose sums are the largest there are, of either sign.
    """
    rng = xp.random.default_rng(seed)
    m, n, k = case.m, case.n, case.k
    if kind == "largest":
        sign = [xp.where(xp.arange(r) % 3 == 0, -1, 1).astype(xp.int8) for r in (m, n)]
        a, b = (xp.broadcast_to(s[:, None] * xp.int8(127), (len(s), k)).copy() for s in sign)
    else:
        a, b = (rng.integers(-127, 128, (r, k)).astype(xp.int8) for r in (m, n))
    reach = 127 * 127 * k if kind == "largest" else 5400 * k**0.5
    a_scales, b_scales = (((rng.random(r) + 0.5) / reach**0.5).astype(xp.float32) for r in (m, n))
    bias = rng.standard_normal(n).astype(xp.float32)
    return {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales, "bias": bias}


def rounded(sums: Any, x: Mapping[str, Any], dtype: Any, bias: str) -> Any:
    """Return C of exact sums, NumPy, in the kernel's order of rounding: K1 to K3, G3, G5."""
    factor = x["a_scales"][:, None] * x["b_scales"][None, :]
    c = sums.astype(np.float32) * factor
    if bias:
        c = c + x["bias"][None, :]
    return c.astype(dtype)


def torch_dtype(name: str) -> Any:
    """Return torch's type of a name."""
    import torch

    return getattr(torch, name)


def equal_on_device(x: Mapping[str, Any], c: Any, dtype: str, bias: str) -> bool:
    """Compare C, a torch tensor, with exact sums, a few thousand rows at a time."""
    import torch

    a, b, a_scales, b_scales, shift = (torch.from_dlpack(x[name]) for name in
                                       ("a", "b", "a_scales", "b_scales", "bias"))  # fmt: skip
    pad = -b.shape[0] % 8
    if pad:  # torch._int_mm takes multiples of 8 columns
        b = torch.nn.functional.pad(b, (0, 0, 0, pad))
    for first in range(0, len(a), 4096):
        some = a[first : first + 4096]
        if len(some) < 32:  # and more than 16 rows
            some = torch.nn.functional.pad(some, (0, 0, 0, 32 - len(some)))
        sums = torch._int_mm(some, b.t())[: len(a) - first, : b.shape[0] - pad]
        factor = a_scales[first : first + 4096, None] * b_scales[None, :]
        expected = sums.to(torch.float32) * factor
        if bias:
            expected = expected + shift[None, :]
        expected = expected.to(torch_dtype(dtype))
        if not torch.equal(expected.view(torch.int16), c[first : first + 4096].view(torch.int16)):
            return False
    return True


def sums_hold(x: Mapping[str, Any], rows: int = 8, columns: int = 64) -> bool:
    """Whether torch._int_mm gives exact sums, on a corner: int64 in NumPy says."""
    import torch

    a, b = (torch.from_dlpack(x[name]) for name in ("a", "b"))
    some = torch.nn.functional.pad(a[:rows], (0, 0, 0, 32 - min(rows, len(a))))
    found = torch._int_mm(some, b[:columns].contiguous().t())[: min(rows, len(a))].cpu().numpy()
    exact = a[:rows].cpu().numpy().astype(np.int64) @ b[:columns].cpu().numpy().astype(np.int64).T
    return bool((found == exact).all())


# ---- on a device ---------------------------------------------------------------------------------


class Call:
    """A launch on a device: compiled, loaded, run on buffers by name."""

    def __init__(self, one: Launch) -> None:
        from cupyattn.runtime.launches import ReadyLaunch

        self._ready = ReadyLaunch(one, ARCH)

    def bound(self, buffers: Mapping[str, Any]) -> Callable[[], None]:
        """Return what launches it on some buffers, on the current stream."""
        import cupy

        addresses = [int(buffers[name].data.ptr) for name in self._ready.buffers]
        return lambda: self._ready(addresses, cupy.cuda.get_current_stream().ptr)


def poisoned(m: int, n: int) -> Any:
    """Return room for C, 16-bit, every element NaN in float16 and in bfloat16."""
    import cupy

    return cupy.full((m, n), 0x7FFF, cupy.int16)


def check(candidate: Candidate, case: Case, x: Mapping[str, Any]) -> bool:
    """Run a candidate on a case and compare it with exact sums."""
    import torch

    c = poisoned(case.m, case.n)
    call = Call(candidate.launch(case.m, case.n, case.k, case.dtype, case.bias))
    call.bound({**x, "c": c})()
    return equal_on_device(x, torch.from_dlpack(c).view(torch_dtype(case.dtype)), case.dtype,
                           case.bias)  # fmt: skip


def check_edges(candidates: Sequence[Candidate]) -> dict[str, dict[str, bool | str]]:
    """Compare candidates on every edge case that they take; a text says why one was refused."""
    import cupy

    found: dict[str, dict[str, bool | str]] = {}
    for case in EDGE_CASES:
        x = draw(case, cupy, case.kind, case.seed)
        if not sums_hold(x):
            raise FloatingPointError(f"torch._int_mm is not exact on {case.name}")
        found[case.name] = {}
        for one in candidates:
            if one.takes(case.n):
                try:
                    found[case.name][one.name] = check(one, case, x)
                except KernelLaunchError as error:
                    found[case.name][one.name] = str(error)
    return found


def trial(number: int) -> None:
    """Run a candidate and compare some rows; exit with status `DIFFERS` where they are not exact.

    In a process of its own: what hangs or faults there takes nothing else with it.
    """
    import cupy

    x = draw(TRIAL, cupy, seed=TRIAL.seed)
    c = poisoned(TRIAL.m, TRIAL.n)
    Call(CANDIDATES[number].launch(TRIAL.m, TRIAL.n, TRIAL.k)).bound({**x, "c": c})()
    host = {name: cupy.asnumpy(array) for name, array in x.items()}
    for name in ("a", "a_scales"):
        host[name] = host[name][::JUDGED_EVERY]
    sums = host["a"].astype(np.float64) @ host["b"].astype(np.float64).T
    expected = rounded(sums, host, np.float16, TRIAL.bias)
    found = cupy.asnumpy(c[::JUDGED_EVERY])
    sys.exit(0 if (found == expected.view(np.int16)).all() else DIFFERS)


def trials() -> dict[str, str]:
    """Return what came of a trial of each candidate: ``"exact"``, or what went wrong."""
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=trial, args=(i,)) for i in range(len(CANDIDATES))]
    for process in running:
        process.start()
    end, found = time.monotonic() + TRIAL_SECONDS, {}
    for one, process in zip(CANDIDATES, running, strict=True):
        process.join(max(0.1, end - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
            found[one.name] = "hangs"
        else:
            outcomes = {0: "exact", DIFFERS: "differs"}
            found[one.name] = outcomes.get(process.exitcode, f"status {process.exitcode}")
    return found
