"""What do softcap, bias and mask cost in fa_tc's Hopper form, as a hook before its softmax?

Varies       the feature: key padding (27 % of the keys of three entries of four), a half-true random
             mask shared by heads, a bias (heads, len, len) shared over the batch, softcap 30 with
             scores that its polynomial holds and with scores that it does not; tiles; head_dim
Holds fixed  16,384 tokens, length 4096, heads x head_dim = 2048, bfloat16, N(0, 1)
Measures     registers and spills; error as a fraction of a derived bound; time of a whole call,
             packing of masks included, and in the same rounds its ratio to the plain Hopper form
             and to the fastest of cuDNN, torch's efficient backend and FlexAttention
Expect       key padding at most 1.08 of plain by admitted keys, the random mask 1.35, bias 1.5,
             softcap 1.5 at head_dim 128 and 1.9 at 64
Run          python -m experiments.tuning.score_hook.race [--json FILE] [--interpret]
             [--head-dims N ...] [--rounds N] [--seconds N] [--no-peers]

With ``--interpret`` small calls run in the interpreter, without a device and without times.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import array_namespace, as_float64
from cupyattn.bounds import kernel as kernel_bounds
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.bounds.scores import Scaling
from cupyattn.cli import output
from cupyattn.compiler import modules as compiler
from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret import executor
from cupyattn.kernels import ladder
from cupyattn.kernels.features import DTYPES
from cupyattn.kernels.numerics import Numerics, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.measure import device, timing, words
from cupyattn.plans import attention
from cupyattn.plans.assemble import (
    HOPPER_BLOCKS,
    HOPPER_STORE_ROWS,
    _merge_pieces,
    _persistent,
    attn_params,
    features_of,
    module_spec,
    tensor_map_of,
)
from cupyattn.plans.records import Launch, Operand, Plan, TensorMap, Workspace
from cupyattn.plans.structs import ATTN_PARAMS, PIECE_PARAMS, QUANT_PARAMS, SCHEDULE_PARAMS
from cupyattn.problem.call import AttentionSpec
from cupyattn.reference.exact import attention_exact, score_blocks
from cupyattn.runtime import ready

FOLDER = Path(__file__).resolve().parent
ARCH = "sm_90a"
FA_TC = ladder.lookup("fa_tc")
TOKENS, WIDTH, LENGTH = 16_384, 2048, 4096
#: Least polynomial in y^2 of tanh(y) / y: relative error 2^-16.15 up to y = SMALL.
TANH = (0.9999862909, -0.3327365816, 0.1290488839, -0.0425835401, 0.0078722397)
SMALL = 1.0867
#: Relative error of softcap: the polynomial's, and a few roundings of float32.
SOFTCAP_ERROR = 2.0**-16
#: ``struct HookParams`` of hook.cuh.
HOOK_PARAMS = np.dtype(
    [
        ("bits", "u8"), ("classes", "u8"), ("steps", "u8"),
        ("tiles_batch", "i8"), ("tiles_head", "i8"), ("tiles_q", "i4"), ("mask_heads", "i4"),
        ("q_tiles", "i4"), ("key_tiles", "i4"), ("aligned", "i4"),
        ("bias_batch", "i4"), ("bias_head", "i4"), ("bias_factor", "f4"),
        ("coefficient", "f4", len(TANH)), ("largest_square", "f4"), ("exponent", "f4"),
        ("unit", "f4"),
    ],
    align=True,
)  # fmt: skip
NO_MASK, ROWS, KEYS = 0, 1, 2
KEYS_THREADS = 256  # of pack_mask.cu

#: Tiles by feature and head_dim; the first are today's where they do not spill.
CANDIDATES = {
    "key padding": {
        64: (Tiles(192, 128, 16, 2), Tiles(192, 64, 16, 3)),
        128: (Tiles(192, 80, 16, 2), Tiles(128, 128, 12, 2), Tiles(192, 64, 16, 2)),
    },
    "mask": {
        64: (Tiles(192, 128, 16, 2), Tiles(192, 96, 16, 2), Tiles(192, 64, 16, 3)),
        128: (Tiles(192, 80, 16, 2), Tiles(128, 128, 12, 2), Tiles(128, 96, 12, 2)),
    },
    "bias": {
        64: (Tiles(192, 128, 16, 2), Tiles(192, 64, 16, 3), Tiles(192, 64, 16, 2)),
        128: (Tiles(192, 64, 16, 2), Tiles(192, 80, 16, 2), Tiles(128, 128, 12, 2),
              Tiles(128, 64, 12, 3)),
    },
    "softcap": {
        64: (Tiles(192, 112, 16, 2), Tiles(192, 128, 16, 2), Tiles(192, 96, 16, 2),
             Tiles(128, 128, 12, 2)),
        128: (Tiles(192, 80, 16, 2), Tiles(192, 64, 16, 2), Tiles(128, 128, 12, 2)),
    },
    "softcap, large": {
        64: (Tiles(192, 112, 16, 2),),
        128: (Tiles(192, 80, 16, 2), Tiles(128, 128, 12, 2)),
    },
}  # fmt: skip


# ---- the candidate as a plan ---------------------------------------------------------------------


@dataclass(frozen=True)
class Hook:
    """What a call adds to plain attention; mask and bias of four axes, 1 where broadcast."""

    softcap: float = 0.0
    mask: Any = None
    bias: Any = None

    @property
    def mask_kind(self) -> int:
        """Which MaskKind of hook.cuh."""
        return NO_MASK if self.mask is None else KEYS if self.mask.shape[2] == 1 else ROWS

    @property
    def options(self) -> dict[str, Any]:
        """As the reference and ``cupyattn.attention`` take it."""
        return {"softcap": self.softcap, "mask": self.mask, "bias": self.bias}

    @property
    def defines(self) -> dict[str, int]:
        """The HOOK_* macros."""
        bias = 0 if self.bias is None else 1 + DTYPES.index(self.bias.dtype.name)
        return {
            "HOOK_MASK_KIND": self.mask_kind, "HOOK_SOFTCAP_ON": int(bool(self.softcap)),
            "HOOK_BIAS_TYPE": bias,
        }  # fmt: skip

    @property
    def buffers(self) -> dict[str, Any]:
        """Arrays that a plan names."""
        found = {"mask": self.mask, "bias": self.bias}
        return {name: a for name, a in found.items() if a is not None}


def plan_of(
    call: AttentionSpec, hook: Hook, tiles: Tiles, q: Any, k: Any, v: Any, o: Any
) -> Plan:
    """Return the launches of one call; `call` is the plain one."""
    operands = tuple(Operand.of(x) for x in (q, k, v, o))
    features = features_of(call, 8)
    spec = module_spec(FA_TC, features, tiles, "sm90")
    own = {name: str(FOLDER / f"{name}.cu") for name in ("attn_fa_tc_scores", "pack_mask")}
    defines = tuple(sorted({**dict(spec.defines), **hook.defines}.items()))
    params = attn_params(call, *operands, None, None, None)
    count = -(-call.len_q // tiles.block_q) * call.batch * call.heads
    boxes = tuple(
        (name, call.dtype, x, rows)
        for name, x, rows in zip(
            "qkvo", operands,
            (tiles.block_q, tiles.block_kv, tiles.block_kv, HOPPER_STORE_ROWS), strict=True,
        )
    )  # fmt: skip
    grid, structs, workspace, cut = _persistent(call, count, boxes, tiles)
    base = ((ATTN_PARAMS, params),)
    merge = _merge_pieces(spec, tiles, cut, (*base, (QUANT_PARAMS, {})))
    if hook.mask is not None or hook.bias is not None:  # tiles are taken as they come, uncut
        grid, merge = min(count, HOPPER_BLOCKS), ()
        workspace = (Workspace("next_tile", (1,), "int32", zeros=True),)
        whole = {"whole": count, "cut": 0, "steps": 1, "share": 1}
        structs = (
            *structs[:4], (SCHEDULE_PARAMS, {"next_tile": "next_tile"}), (PIECE_PARAMS, whole),
        )  # fmt: skip
    of_hook, passes, between = _hook_params(call, hook, tiles, params, own["pack_mask"], defines)
    bias_map = structs[0]
    if hook.bias is not None:
        x = Operand.of(hook.bias)
        bias_map = tensor_map_of("bias", hook.bias.dtype.name, x, tiles.block_q)
    launch = Launch(
        ModuleSpec(own["attn_fa_tc_scores"], defines), "attn_fa_tc", grid, tiles.num_threads, True,
        (*base, *structs, (HOOK_PARAMS, of_hook), bias_map),
    )  # fmt: skip
    return Plan(
        "fa_tc", "sm90", tiles, features, (*passes, launch, *merge), (*workspace, *between)
    )  # fmt: skip


def _hook_params(
    call: AttentionSpec,
    hook: Hook,
    tiles: Tiles,
    params: Mapping[str, Any],
    source: str,
    defines: tuple[tuple[str, int], ...],
) -> tuple[dict[str, Any], tuple[Launch, ...], tuple[Workspace, ...]]:
    """Return ``struct HookParams``, the launches that pack a mask, and what they write to."""
    found: dict[str, Any] = {}
    if hook.softcap:
        unit = hook.softcap / call.scale
        found |= {
            "coefficient": [c / unit ** (2 * k) for k, c in enumerate(TANH)],
            "largest_square": (SMALL * unit) ** 2, "exponent": 2 / math.log(2) / unit,
            "unit": unit,
        }  # fmt: skip
    if hook.bias is not None:
        found |= {
            "bias_batch": int(hook.bias.shape[0] > 1), "bias_head": int(hook.bias.shape[1] > 1),
            "bias_factor": 1 / call.scale,
        }  # fmt: skip
    if hook.mask is None:
        return found, (), ()
    mask, rows = Operand.of(hook.mask), hook.mask_kind == ROWS
    batches, heads = mask.shape[:2]
    strides = tuple(0 if n == 1 else s for s, n in zip(mask.strides, mask.shape, strict=True))
    q_tiles = -(-call.len_q // tiles.block_q) if rows else 1
    key_tiles = -(-call.len_kv // tiles.block_kv)
    words = tiles.block_q * 4 if rows else 4
    found |= {
        "bits": "bits", "classes": "classes", "steps": "steps",
        "tiles_batch": heads * q_tiles * (batches > 1), "tiles_head": q_tiles * (heads > 1),
        "tiles_q": int(rows), "mask_heads": heads, "q_tiles": q_tiles, "key_tiles": key_tiles,
        "aligned": int(
            strides[3] == 1 and not any(s % 8 for s in strides[:3]) and mask.misalignment % 8 == 0
        ),
    }  # fmt: skip
    of_mask = {**params, "mask": "mask", "mask_stride": strides}
    structs = ((ATTN_PARAMS, of_mask), (HOOK_PARAMS, found))
    module, count = ModuleSpec(source, defines), batches * heads * q_tiles
    passes: tuple[Launch, ...] = (
        Launch(module, "pack_keys", count, KEYS_THREADS, False, structs),
    )
    if rows:
        passes = (
            Launch(module, "pack_mask", count * key_tiles, tiles.block_q * 2, False, structs),
            Launch(module, "list_steps", count, 32, False, structs),
        )
    return found, passes, (
        Workspace("bits", (count, key_tiles, words), "uint32"),
        Workspace("classes", (count, key_tiles), "uint8"),
        Workspace("steps", (count, 1 + key_tiles), "int32"),
    )  # fmt: skip


def plain_plan(call: AttentionSpec, q: Any, k: Any, v: Any, o: Any) -> Plan:
    """Return the plan of plain attention in the Hopper form."""
    plan = attention.plan_attention(FA_TC, call, *(Operand.of(x) for x in (q, k, v, o)), arch=ARCH)
    if plan.form != "sm90":
        raise ca.UnsupportedError(plan.note)
    return plan


# ---- is it right ---------------------------------------------------------------------------------


class HookNumerics(Numerics):
    """Rounding points of the candidate: scores stay in units of q.k, M in log2 units."""

    @property
    def subtracts_first(self) -> bool:
        """R4. exp2(fma(S, scale_log2, -M))."""
        return False


def bound_of(q: Any, k: Any, v: Any, call: AttentionSpec, hook: Hook, tiles: Tiles, rows: Any):
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
    for block in score_blocks(
        q, k, v, scale=call.scale, causal=call.causal, rows=rows, **hook.options
    ):
        found, _ = kernel_bounds._kernel_bound(
            block, n, tiles, call.scale, scaling, None, None, None, None
        )
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
        "softcap large", "bias", "bias causal", "row bias", "softcap keys", "bias rows",
        "softcap bias rows causal",
    )  # fmt: skip
    for head_dim in head_dims:
        for i, one in enumerate(features):
            for number in range(1 if quick else 3):
                yield Case(
                    one, head_dim, tiles[head_dim][(i + number) % 3], one,
                    dtype=("bfloat16", "float16")[i % 3 == 2], seed=i,
                )  # fmt: skip


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
        of_rows = 1 if "row" in words_of else len_q
        padded = np.full((1, case.heads, len_q, -(-len_kv // 8) * 8), np.nan, np.float16)
        padded[..., :len_kv] = 3 * rng.standard_normal((1, case.heads, of_rows, len_kv))
        padded[..., 2, :len_kv] = -np.inf
        padded[..., 2, 9] = 1000.0
        padded[..., 4, 3:17] = -np.inf
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
        except Exception as error:  # one candidate that fails leaves the others
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


def describe(tiles: Tiles) -> str:
    """Return tiles in a few characters."""
    return f"{tiles.block_q}x{tiles.block_kv}s{tiles.num_stages}"
