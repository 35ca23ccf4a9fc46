"""Whether the candidate is right: small calls, and a bound of its error."""

from __future__ import annotations

import argparse
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.bounds import kernel as kernel_bounds
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.bounds.scores import Scaling
from cupyattn.interpret import executor
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels.numerics import Numerics, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.problem.call import AttentionSpec
from cupyattn.reference.exact import attention_exact, score_blocks
from cupyattn.runtime import ready
from experiments.tuning.score_hook.hook_plans import ARCH, Hook, describe, plan_of

#: Relative error of softcap: the polynomial's, and a few roundings of float32.
SOFTCAP_ERROR = 2.0**-16
#: What one call may fail with while the others go on.
FAILURES = (
    RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError, MemoryError,
    OSError, KernelFault, ca.KernelCompileError, ca.KernelLaunchError, ca.UnsupportedError,
)  # fmt: skip

class HookNumerics(Numerics):
    """Rounding points of the candidate: scores stay in units of q.k, M in log2 units."""

    @property
    def subtracts_first(self) -> bool:
        """R4. exp2(fma(S, scale_log2, -M))."""
        return False


def bound_of(
    q: Any, k: Any, v: Any, call: AttentionSpec, hook: Hook, tiles: Tiles, rows: Any
) -> Any:
    """Return the bound of O (J2's, with R3 as the hook rounds) of some query rows.

    A score is fl(cap tanh(x / cap)) within SOFTCAP_ERROR and four roundings, and
    fl(score + fl(1 / scale) bias): two more of the sum, and one of the bias, which is at most the
    sum and the score.
    """
    plain = numerics("tensor_core", "sm90", call.dtype)
    n = HookNumerics(**vars(plain))
    n = replace(n, softcap=bool(hook.softcap), bias=hook.bias is not None)
    u = 2.0**-24
    capped, biased = bool(hook.softcap), hook.bias is not None
    scaling = Scaling(
        2 * u, (SOFTCAP_ERROR + 6 * u) * capped + 2 * u * biased, 3 * u * biased, 2.0**-124,
        max(call.scale, hook.softcap),
    )  # fmt: skip
    xp = array_namespace(q)
    terms = xp.zeros((call.batch, call.heads, 1, rows.size, call.head_dim))
    shared = kernel_bounds._Shared(n, tiles, call.scale, scaling, None, None, None, None)
    for block in score_blocks(
        q, k, v, scale=call.scale, causal=call.causal, rows=rows, **hook.options
    ):
        found, _ = kernel_bounds._block_bound(block, shared)
        total = sum(found.values())
        terms[block.index] = total
    return terms[:, :, 0]


def judge(
    o: Any, q: Any, k: Any, v: Any, call: AttentionSpec, hook: Hook, tiles: Tiles, rows: Any
) -> float:
    """Return the largest error of O as a fraction of its bound; 1 is allowed."""
    expected = attention_exact(
        q, k, v, scale=call.scale, causal=call.causal, rows=rows, **hook.options
    )
    bound = bound_of(q, k, v, call, hook, tiles, rows)
    return float(ratio_to_bound(as_float64(o[:, :, rows]), expected, bound).max())


def dtype_of(name: str) -> Any:
    """Return the NumPy dtype of a name, ml_dtypes' bfloat16 among them."""
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def poisoned(x: np.ndarray, pad: int) -> np.ndarray:
    """Return the same rows as a view into an array whose rows in between are NaN."""
    whole = np.full((*x.shape[:2], x.shape[2] + pad, x.shape[3]), np.nan, x.dtype)
    whole[:, :, : x.shape[2]] = x
    return whole[:, :, : x.shape[2]]


@dataclass(frozen=True)
class Case:
    """A small call to be judged."""

    name: str
    head_dim: int
    tiles: Tiles
    features: str  # of softcap, large, rows, head rows, keys, bias, row bias, causal
    lengths: tuple[int, int] = (200, 330)
    dtype: str = "bfloat16"
    seed: int = 0
    batch: int = 2
    heads: int = 2


def small_cases(head_dims: tuple[int, ...], quick: bool) -> Iterator[Case]:
    """Yield calls with every feature alone, beside a causal mask, and together."""
    tiles = {
        64: (Tiles(192, 128, 16, 2), Tiles(192, 64, 16, 3), Tiles(192, 112, 16, 2)),
        128: (Tiles(192, 80, 16, 2), Tiles(128, 128, 12, 2), Tiles(192, 64, 16, 2)),
    }
    features = (
        "rows", "rows causal", "head rows", "keys", "keys causal", "softcap", "softcap causal",
        "softcap large", "bias", "bias causal", "row bias", "bf16 row bias causal", "keys row bias",
        "softcap keys", "bias rows", "softcap bias rows causal",
    )  # fmt: skip
    for head_dim in head_dims:
        for i, one in enumerate(features):
            for number in range(1 if quick else 3):
                choice = tiles[head_dim][(i + number) % 3]
                if head_dim == 128 and "bias" in one and "rows" in one:
                    choice = Tiles(192, 64, 16, 2)  # shared memory holds no more
                yield Case(
                    one, head_dim, choice, one, dtype=("bfloat16", "float16")[i % 3 == 2], seed=i
                )


def make(case: Case) -> tuple[Any, Any, Any, AttentionSpec, Hook]:
    """Draw a case: q, k, v, the plain call, the hook. NaN lies behind the last key and row."""
    rng = np.random.default_rng(case.seed)
    dtype, (len_q, len_kv) = dtype_of(case.dtype), case.lengths
    words_of = case.features.split()
    size = 6.0 if "large" in words_of else 1.0
    shape = case.batch, case.heads
    q = poisoned((size * rng.standard_normal((*shape, len_q, case.head_dim))).astype(dtype), 8)
    k, v = (
        poisoned(rng.standard_normal((*shape, len_kv, case.head_dim)).astype(dtype), 8)
        for _ in range(2)
    )
    mask = bias = None
    if "rows" in words_of:
        own = shape if "head" in words_of else (1, 1)
        mask = rng.random((*own, len_q, len_kv)) < 0.5
        mask[..., : case.tiles.block_q, : case.tiles.block_kv] = True  # full
        mask[..., : case.tiles.block_q, case.tiles.block_kv : 2 * case.tiles.block_kv] = False
        mask[..., 5, :] = False  # a row without a key
        mask[..., 7, :] = False
        mask[..., 7, 3] = True  # with one key
        if case.tiles.block_q < len_q:
            mask[..., case.tiles.block_q :, : 2 * case.tiles.block_kv] = False  # empty at first
    if "keys" in words_of:
        mask = np.ones((case.batch, 1, 1, len_kv), bool)
        mask[0, ..., int(0.73 * len_kv) :] = False
        k[0, :, int(0.73 * len_kv) :] = np.nan  # masked scores are NaN
        if case.batch > 1:
            mask[1] = False
            mask[1, ..., len_kv - 2] = case.seed % 2  # one key, or none
    if "bias" in words_of:
        rows = 1 if "row" in words_of else len_q
        kind = dtype_of("bfloat16" if "bf16" in words_of else "float16")
        padded = np.full((1, case.heads, rows, -(-len_kv // 8) * 8), np.nan, kind)
        padded[..., :len_kv] = 3 * rng.standard_normal((1, case.heads, rows, len_kv))
        padded[..., rows - 1, 3:17] = -np.inf
        if rows > 1:
            padded[..., 2, :len_kv] = -np.inf
            padded[..., 2, 9] = 1000.0
        bias = padded[..., :len_kv]
    call = AttentionSpec(
        *shape, case.heads, len_q, len_kv, case.head_dim, case.dtype, case.head_dim**-0.5,
        "causal" in words_of, len_kv - len_q if "causal" in words_of else 0,
    )  # fmt: skip
    softcap = (2.0 if "large" in words_of else 30.0) if "softcap" in words_of else 0.0
    return q, k, v, call, Hook(softcap, mask, bias)


def check_case(case: Case, on_device: bool) -> float:
    """Run a small case and return its error as a fraction of the bound."""
    q, k, v, call, hook = make(case)
    o = np.full(call.output_shape, np.nan, dtype_of(case.dtype))
    if on_device:
        import cupy

        def moved(x: Any) -> Any:  # with what lies around it, which is NaN
            return None if x is None else (
                cupy.asarray(x.base)[tuple(slice(n) for n in x.shape)]
                if x.base is not None else cupy.asarray(x)
            )  # fmt: skip

        q, k, v, o = (moved(x) for x in (q, k, v, o))
        hook = replace(hook, mask=moved(hook.mask), bias=moved(hook.bias))
    plan = plan_of(call, hook, case.tiles, q, k, v, o)
    buffers = {"q": q, "k": k, "v": v, "o": o, **hook.buffers}
    if on_device:
        ready.run(plan, buffers, ARCH)
    else:
        for name, x in buffers.items():
            x.flags.writeable = name == "o"
        executor.run(plan, buffers, ARCH)
    rows = array_namespace(q).arange(call.len_q)
    return judge(o, q, k, v, call, hook, case.tiles, rows)


def check(args: argparse.Namespace, on_device: bool) -> list[dict[str, Any]]:
    """Judge all small cases; print and return what came of them."""
    found = []
    for case in small_cases(tuple(args.head_dims), quick=not on_device and not args.all):
        if args.only and args.only not in case.name:
            continue
        began = time.monotonic()
        try:
            ratio, note = check_case(case, on_device), ""
        except FAILURES as error:
            ratio, note = math.inf, f"{type(error).__name__}: {error}"[:600]
            if args.trace:
                traceback.print_exc()
        ok = ratio <= 1
        found.append({"case": vars(case) | {"tiles": vars(case.tiles)}, "j2": ratio, "ok": ok})
        print(
            f"{'ok ' if ok else 'BAD'} hd{case.head_dim} {describe(case.tiles):12} {case.dtype:9}"
            f"{case.name:26} error / bound {ratio:.3f}  {time.monotonic() - began:.1f} s {note}",
            flush=True,
        )
    return found
