"""Is the lazy M right? Small calls, random and adversarial, held to the bound per element."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.operand import Operand
from cupyattn.interpret import executor
from cupyattn.interpret.findings import KernelFault
from cupyattn.plans.records import Plan
from cupyattn.problem.call import AttentionSpec
from cupyattn.problem.checks import check_attention
from cupyattn.runtime import ready
from cupyattn.testing import verdict
from experiments.tuning.lazy_maximum.contestants import (
    ARCH,
    CONTESTANTS,
    Contestant,
    resources,
)

#: What one call may fail with while the others go on.
FAILURES = (
    RuntimeError, ValueError, TypeError, OSError, KernelFault,
    ca.KernelCompileError, ca.KernelLaunchError, ca.UnsupportedError,
)  # fmt: skip
#: Scores that rise or fall from key to key, by so many log2 units, differently in every row; or
#: rise in every second eight rows, so that one of a lane's two rows of a tile rises and one not.
SLOPES = {"rising 0.02": 0.02, "rising 0.1": 0.1, "rising 0.5": 0.5, "falling": -0.1,
          "half of the rows rising": 0.3}  # fmt: skip
#: Scores far below zero, where weights relative to M = 0 are nothing; beyond LARGEST_SCORE, where
#: M is rounded down; and what `cupyattn.distributions` has.
DATA = ("normal", "tripled", "peaky", "outlier", "sink", *SLOPES, "far below zero", "huge")
FEATURES = ("", "causal", "window", "mask", "softcap", "bias")


@dataclass(frozen=True)
class Case:
    """A small call to be judged."""

    data: str
    feature: str
    head_dim: int
    dtype: str
    contestant: Contestant
    lengths: tuple[int, int] = (150, 330)
    heads: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that tells it from the others."""
        words = " ".join(filter(None, (self.data, self.feature)))
        return f"hd{self.head_dim} {self.dtype} {self.contestant.name}: {words}"

    def options(self, scores: tuple[int, ...]) -> dict[str, Any]:
        """Return the options of the call, `scores` being the shape of mask and bias."""
        rng = np.random.default_rng(self.seed + 1)
        if self.feature == "mask":
            mask = rng.random(scores) < 0.3
            mask[..., 5, :] = False  # a row without keys
            mask[..., 7, :-1] = False  # at most the last key
            mask[..., 16:32, :200] = False  # the first keys come late
            return {"mask": mask}
        return {
            "": {}, "causal": {"causal": True}, "softcap": {"softcap": 30.0},
            "window": {"causal": True, "window": (40, 0)},
            "bias": {"bias": (3 * rng.standard_normal(scores)).astype(np.float32)},
        }[self.feature]  # fmt: skip


def small_cases(head_dims: Sequence[int], *, every: bool) -> Iterator[Case]:
    """Yield calls of the lazy M: all data, each with a feature, tiles and a dtype in turns.

    With `every` each of the data meets a causal mask, none, and a third feature, in both dtypes.
    """
    for head_dim in head_dims:
        lazy = [one for one in CONTESTANTS[head_dim] if one.lazy]
        for i, data in enumerate(DATA):
            features = ("", "causal", FEATURES[2 + i % 4]) if every else (FEATURES[i % 6],)
            for j, feature in enumerate(features):
                dtype = ("float16", "bfloat16")[(i + j + head_dim // 64) % 2]
                yield Case(data, feature, head_dim, dtype, lazy[(i + j) % len(lazy)])


def poisoned(x: np.ndarray) -> np.ndarray:
    """Return the same rows as a view into an array with rows of NaN behind them."""
    whole = np.full((*x.shape[:2], x.shape[2] + 8, x.shape[3]), np.nan, x.dtype)
    whole[:, :, : x.shape[2]] = x
    return whole[:, :, : x.shape[2]]


def dtype_of(name: str) -> Any:
    """Return the NumPy dtype of a name, ml_dtypes' bfloat16 among them."""
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def draw(case: Case) -> tuple[Any, ...]:
    """Return q, k and v of a case, NaN behind the last row of each."""
    len_q, len_kv = case.lengths
    known = case.data if case.data in distributions.NAMES else "normal"
    drawn = distributions.make(
        known, 1, case.heads, len_q, len_kv, case.head_dim, "float32", case.seed
    )
    q, k, v = (x.copy() for x in drawn)
    if case.data in SLOPES:
        q, k = q / 8, k / 8
        q[..., 0] = np.linspace(0.5, 1.0, len_q)
        if case.data.startswith("half"):
            q[:, :, np.arange(len_q) // 8 % 2 == 0] = 0.0
        k[..., 0] = SLOPES[case.data] * np.log(2.0) * case.head_dim**0.5 * np.arange(len_kv)
    elif case.data == "far below zero":
        q[..., 0], k[..., 0] = 8.0, -60.0
    elif case.data == "huge":
        q, k = 2e4 * np.sign(q), 2e4 * np.sign(k)
        q[:, :, 0] = k[:, :, 0] = 2e4  # the largest score there can be, and late in other rows
        k[:, :, -3] = 2e4
    return tuple(poisoned(x.astype(dtype_of(case.dtype))) for x in (q, k, v))


def prepared(case: Case) -> tuple[AttentionSpec, dict[str, Any], dict[str, Any]]:
    """Return sizes, buffers by name, and options of a case; what it writes to is NaN."""
    q, k, v = draw(case)
    options = case.options((1, case.heads, *case.lengths))
    buffers = {"q": q, "k": k, "v": v, "o": np.full(q.shape, np.nan, q.dtype)}
    buffers |= {"lse": np.full(q.shape[:3], np.nan, np.float32)}
    buffers |= {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    return check_attention(q, k, v, return_lse=True, **options), buffers, options


def plan_of(contestant: Contestant, call: AttentionSpec, buffers: dict[str, Any]) -> Plan:
    """Return the plan of a contestant on buffers by name."""
    return contestant.plan(
        call, {name: Operand.of(x) for name, x in buffers.items() if name != "lse"}
    )


def moved(buffers: dict[str, Any]) -> dict[str, Any]:
    """Return buffers on the device, with the NaN that lies behind them."""
    import cupy

    return {
        name: cupy.asarray(x) if x.base is None else cupy.asarray(x.base)[:, :, : x.shape[2]]
        for name, x in buffers.items()
    }


def check_case(case: Case, *, on_device: bool) -> float:
    """Run a small case and return its error as a fraction of the bound, lse's if that is larger."""
    call, buffers, options = prepared(case)
    if on_device:
        buffers = moved(buffers)
        ready.run(plan_of(case.contestant, call, buffers), buffers, ARCH)
    else:
        for name, x in buffers.items():
            x.flags.writeable = name in ("o", "lse")
        executor.run(plan_of(case.contestant, call, buffers), buffers, ARCH)
    options |= {name: buffers[name] for name in options if name in buffers}
    return judged(case.contestant, call, buffers, options)


def judged(
    contestant: Contestant,
    call: AttentionSpec,
    buffers: dict[str, Any],
    options: dict[str, Any],
    **more: Any,
) -> float:
    """Return the largest error as a fraction of its bound; infinite where an output is NaN."""
    report = verdict.judge(
        buffers["o"], buffers["q"], buffers["k"], buffers["v"], lse=buffers.get("lse"),
        variant="fa_tc", form="portable", numerics=contestant.numerics(call),
        tiles=contestant.tiles, **options, **more,
    )  # fmt: skip
    ratios = [report.ratio, 0.0 if report.lse_ratio is None else report.lse_ratio]
    return math.inf if any(math.isnan(x) for x in ratios) else max(ratios)


def rows_keep_to_themselves(contestant: Contestant, head_dim: int, *, on_device: bool) -> bool:
    """Whether a row's bits are the same beside rows whose scores rise and beside rows of zeros."""
    case = Case("rising 0.5", "", head_dim, "float16", contestant)
    found = []
    for beside in (1.0, 0.0):
        call, buffers, _ = prepared(case)
        q = buffers["q"]
        own = np.arange(q.shape[2]) // 8 % 2 == 0  # rows whose scores differ, but by no 8 octaves
        q[:, :, own] = np.random.default_rng(0).standard_normal(q[:, :, own].shape) / 64
        q[:, :, ~own] *= np.float16(beside)
        if on_device:
            buffers = moved(buffers)
        (ready if on_device else executor).run(plan_of(contestant, call, buffers), buffers, ARCH)
        o = buffers["o"].get() if on_device else buffers["o"]
        found.append(o[:, :, own].view(np.uint16))
    return bool((found[0] == found[1]).all())


def compile_cases(cases: Sequence[Case], threads: int) -> None:
    """Compile what small cases need, many at a time."""

    def compile_one(case: Case) -> None:
        call, buffers, _ = prepared(case)
        resources(plan_of(case.contestant, call, buffers))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compile_one, cases))


def check(
    head_dims: Sequence[int], *, every: bool, on_device: bool, threads: int, only: str = ""
) -> list[dict[str, Any]]:
    """Judge all small cases; print those that fail, and return what came of all."""
    found: list[dict[str, Any]] = []
    cases = [case for case in small_cases(head_dims, every=every) if only in case.name]
    compile_cases(cases, threads)
    for case in cases:
        began = time.monotonic()
        try:
            ratio, note = check_case(case, on_device=on_device), ""
        except FAILURES as error:
            ratio, note = math.inf, f"{type(error).__name__}: {error}"[:600]
        ok = ratio <= 1
        found.append({"case": case.name, "j2": ratio, "ok": ok})
        if not ok or not on_device:
            seconds = f"{time.monotonic() - began:.1f} s"
            print(f"{'ok ' if ok else 'BAD'} {case.name}: {ratio:.3f} {seconds} {note}", flush=True)
    for head_dim in head_dims:
        ok = rows_keep_to_themselves(CONTESTANTS[head_dim][1], head_dim, on_device=on_device)
        name = f"hd{head_dim}: rows keep to themselves"
        found.append({"case": name, "ok": ok})
        print(f"{'ok ' if ok else 'BAD'} {name}", flush=True)
    return found
