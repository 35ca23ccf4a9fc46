"""Small calls of attention, each judged: every rung and form, with what changes scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.kernels import tile_pieces
from cupyattn.kernels.tiles import Tiles
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from cupyattn.testing import judge
from experiments._harness.few_blocks import hopper_blocks
from experiments._harness.small_inputs import (
    FEWER,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    LENGTHS,
    PACKED,
    added,
    aligned_bias,
    arrays,
    rope_tables,
)  # fmt: skip

#: A rung: variant, architecture (None: portable), type of its operands, how it quantises.
Rung = tuple[str, str | None, str, Any]
WHOLE = ca.QuantConfig(pv="int8", granularity_v="channel")
FP8 = ca.QuantConfig(pv="fp8", granularity_v="channel")
FUSED = ca.QuantConfig(smooth_k=False, fused=True)
RUNGS: dict[str, Rung] = {
    "unfused": ("unfused", None, "float16", None),
    "fa": ("fa", None, "float32", None),
    "fa_warps": ("fa_warps", None, "float16", None),
    "fa_tc": ("fa_tc", None, "bfloat16", None),
    "fa_tc, sm90": ("fa_tc", "sm_90a", "float16", None),
    "fa_int8": ("fa_int8", None, "float16", ca.QuantConfig()),
    "fa_int8, fused": ("fa_int8", None, "float16", FUSED),
    "fa_int8, pv8": ("fa_int8", None, "float16", ca.QuantConfig(pv="int8")),
    "fa_int8, pv8 whole": ("fa_int8", None, "float16", WHOLE),
    "fa_int8, v8": ("fa_int8", None, "float16", ca.QuantConfig(pv="int8", p_type="16bit")),
    "fa_int8, fp8": ("fa_int8", None, "float16", ca.QuantConfig(pv="fp8")),
    "fa_int8, sm90": ("fa_int8", "sm_90a", "float16", ca.QuantConfig()),
    "fa_int8, sm90 pv8": ("fa_int8", "sm_90a", "float16", WHOLE),
    "fa_int8, sm90 pv8 by tile": ("fa_int8", "sm_90a", "float16", ca.QuantConfig(pv="int8")),
    "fa_int8, sm90 fp8": ("fa_int8", "sm_90a", "float16", FP8),
}
#: Codes whose results for such scores may be 0 or infinite (docs/MATH_REFERENCE.md).
OVERFLOWING = ca.QuantConfig(pv="int8"), ca.QuantConfig(pv="fp8")
HOPPER = tuple(name for name, rung in RUNGS.items() if rung[1])
#: Rungs that are called with masks and biases.
SCORED = ("unfused", "fa", "fa_warps", "fa_tc", "fa_int8", *HOPPER)
#: Rungs that are also tried with every kind of mask and bias, and with head_dim 128.
EVERY = ("fa_tc", "fa_int8", "fa_tc, sm90", "fa_int8, sm90")


@contextmanager
def _cut_tiles(blocks: int) -> Iterator[None]:
    """Let Hopper forms run in so many blocks, which share the last tiles."""
    with mock.patch.object(tile_pieces, "LEAST_SAVED", 1), hopper_blocks(blocks):
        yield


def said_of(report: Any) -> str:
    """Return "" if a judgement holds, else the first line of its report."""
    return "" if report.passed else str(report).splitlines()[0]


def attend(
    rung: Rung, inputs: Any, options: dict[str, Any], *, inside: bool = False, pieces: bool = False,
    blocks: int | None = None, with_lse: bool = True, tiles: Any = None,
) -> str:  # fmt: skip
    """Run one call of attention, and judge it.

    Codes are the mirror's, or with `inside` of the call itself. `pieces`: tiles are cut. Some forms
    are other kernels without the log-sum-exp.
    """
    variant, arch, _, quant = rung
    q, k, v = inputs
    z = None
    if quant is not None:
        if options.get("softcap"):
            quant = replace(quant, smooth_k=False)
        z = ca.quantize(q, k, v, quant=quant, backend="mirror", arch=arch, tiles=tiles)
    asked: dict[str, Any] = {"variant": variant, "arch": arch, "backend": "interpret"}
    asked |= {"return_lse": with_lse, "tiles": tiles, **options}
    operands: Any = (q, k, v)
    if z is not None and (inside or quant.fused):
        asked["quant"] = quant
    elif z is not None:
        operands = (z, None, None)
    with ExitStack() as stack:
        if pieces:
            stack.enter_context(_cut_tiles(blocks or 4))
        elif blocks is not None:
            stack.enter_context(hopper_blocks(blocks))
        plan = plans(resolved(*operands, **asked))[-1]
        found = ca.attention(*operands, **asked)
    o, lse = found if with_lse else (found, None)
    report = judge(
        o, q, k, v, variant=variant, lse=lse, quantized=z, form=plan.form, tiles=plan.tiles,
        **options,
    )  # fmt: skip
    return said_of(report)


def _packed(rung: Rung, head_dim: int, options: dict[str, Any], *, inside: bool = False) -> str:
    """Run one call of packed sequences, and judge each; `inside` as for `attend`."""
    variant, arch, dtype, quant = rung
    ends = tuple(np.cumsum((0, *one), dtype=np.int32) for one in zip(*PACKED, strict=True))
    rng = np.random.default_rng(2)
    shapes = (int(ends[0][-1]), HEADS, head_dim), *[(int(ends[1][-1]), HEADS_KV, head_dim)] * 2
    q, k, v = (rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in shapes)
    named: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    z = None
    if quant is not None:
        z = ca.quantize(q, k, v, quant=quant, backend="mirror", arch=arch, **named)
    operands = (q, k, v, *ends) if z is None or inside else (z,)
    asked = {"variant": variant, **options}
    given: dict[str, Any] = {"arch": arch, "backend": "interpret", **asked}
    if inside:  # the kernel makes codes of Q itself if it gives no log-sum-exp
        o, lse = ca.attention_varlen(*operands, quant=quant, **given), None
    else:
        o, lse = ca.attention_varlen(*operands, return_lse=True, **given)
    if z is None:
        return said_of(judge(o, q, k, v, lse=lse, **asked, **named))
    return said_of(judge(o, q, k, v, lse=lse, quantized=z, **asked))


def _large(rung: Rung, kind: str) -> str:
    """Run scores up to 2^29: every row is still a mean of its values.

    With "ties" some keys share the largest score of a row, all others being far behind.
    """
    variant, arch, dtype, quant = rung
    rng = np.random.default_rng(0)
    q, k = (np.full((1, 1, length, HEAD_DIM), 60000.0) for length in (20, 300))
    if kind == "opposed":
        k = -k * rng.uniform(0.9, 1, (300, 1))
    elif kind == "two levels":
        k[:, :, :200] *= -1  # several steps
    else:
        q *= (np.arange(HEAD_DIM) == 7) * rng.choice([-1, 1], (20, 1))
        k *= rng.integers(4, 8, (300, 1)) / 8
    v = rng.uniform(1, 2, k.shape)
    q, k, v = (x.astype(STORAGE[dtype]) for x in (q, k, v))
    operands: Any = (q, k, v)
    asked: dict[str, Any] = {"variant": variant, "arch": arch, "backend": "interpret"}
    if quant is not None and quant.fused:
        asked["quant"] = quant
    elif quant is not None:
        operands = (ca.quantize(q, k, v, quant=quant, backend="mirror", arch=arch),)
    o, lse = (as_float64(x) for x in ca.attention(*operands, return_lse=True, **asked))
    if not np.isfinite(o).all() or not np.isfinite(lse).all():
        return "large scores: not finite"
    if not (o.min() >= 0.98 and o.max() <= 2.02):
        return "large scores: no mean of values"
    if kind == "ties" and quant is None:
        scores = as_float64(q) @ as_float64(k).swapaxes(2, 3)
        largest = scores == scores.max(axis=-1, keepdims=True)
        exact = largest @ as_float64(v) / largest.sum(axis=-1, keepdims=True)
        if not np.allclose(o, exact, rtol=2.0 ** (-7 if dtype == "bfloat16" else -10)):
            return "large scores: not the mean of the largest"
    return ""


def _full_sums(rung: Rung) -> str:
    """Run so many keys of one score, then of lower ones, that sums would leave their range."""
    variant, arch, dtype, quant = rung
    lengths = 6, 7200
    q, k, v = (np.ones((1, 1, length, HEAD_DIM)) for length in (lengths[0], *lengths[1:] * 2))
    k[:, :, 7000:] = 0.3
    inputs = tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))
    plain = replace(quant, smooth_k=False, smooth_v=False)
    return attend((variant, arch, dtype, plain), inputs, {})


def _not_finite(rung: Rung, len_kv: int = 150) -> str:
    """Run NaN and infinities: they reach the results that the mirror's reach, and no others."""
    variant, arch, dtype, quant = rung
    q, k, v = arrays(70, len_kv, dtype, 9, heads=(2, 1))
    q[0, 0, [7, 12], 3] = np.nan  # rows of both halves of a fragment
    k[1, 0, len_kv - 10, 5] = np.nan
    v[0, 0, len_kv // 2 - 15, 40] = np.inf
    asked: dict[str, Any] = {"variant": variant, "causal": True, "return_lse": True}
    operands: Any = (q, k, v)
    with np.errstate(invalid="ignore"):
        if quant is not None and quant.fused:
            asked["quant"] = quant
        elif quant is not None:
            operands = (ca.quantize(q, k, v, quant=quant, backend="mirror", arch=arch),)
        found = ca.attention(*operands, **asked, arch=arch, backend="interpret")
        want = ca.attention(*operands, **asked, arch=arch, backend="mirror")
    same = [
        (np.isfinite(as_float64(x)) == np.isfinite(as_float64(y))).all()
        and (np.isneginf(as_float64(x)) == np.isneginf(as_float64(y))).all()
        for x, y in zip(found, want, strict=True)
    ]
    return "" if all(same) else "not finite in other places than the mirror"


def _calls_of(name: str, rung: Rung) -> dict[str, Callable[[], str]]:
    """Return the calls of one rung: calls that all rungs have, and calls for its own kernels."""
    variant, arch, dtype, quant = rung
    two: dict[str, Any] = {"heads": (2, 1)}
    plain, fewer = arrays(*LENGTHS, dtype, 0, **two), arrays(*FEWER, dtype, 0, batch=1)
    short = arrays(33, 31, dtype, 1)
    below = short[0] + STORAGE[dtype].type(3), short[1] - STORAGE[dtype].type(7), short[2]
    # Rows that are read by 8 and by 2 bytes, and stored in chunks of 16.
    narrow, odd = (arrays(*FEWER, dtype, 8, head_dim, **two) for head_dim in (36, 7))
    keyless = arrays(70, 40, dtype, 19, heads=(2, 1), batch=1)
    some = fewer if variant in ("unfused", "fa") else plain  # these are slow to interpret
    capped = {"softcap": 1.5, "window": (60, 9)}
    calls: dict[str, Callable[[], str]] = {
        "causal": lambda: attend(rung, some, {"causal": True}),
        "one short tile, far below 0": lambda: attend(rung, below, {}),
        "window, softcap": lambda: attend(rung, some, capped),
        "rows without keys": lambda: attend(rung, keyless, {"causal": True}),
        "packed": lambda: _packed(rung, 64, {"causal": True}),
        "large scores, ties": lambda: _large(rung, "ties"),
        "not finite": lambda: _not_finite(rung),
        "not finite, rows without keys": lambda: _not_finite(rung, 40),
    }
    if quant not in (*OVERFLOWING, FP8):
        calls["large scores, two levels"] = lambda: _large(rung, "two levels")
    if arch is None:
        calls["head_dim 36"] = lambda: attend(rung, narrow, {"causal": True})
        calls["head_dim 7"] = lambda: attend(rung, odd, {}, with_lse=False)
    if name in SCORED:
        of_scores = _of_scores(rung, some, fewer)
        some_names = "mask and bias of keys", "block mask", "padded"
        calls |= of_scores if name in EVERY else {one: of_scores[one] for one in some_names}
    if name in EVERY:
        wide = arrays(70, 200, dtype, 8, 128, heads=(2, 1), batch=1)
        calls["head_dim 128"] = lambda: attend(rung, wide, {})
    if variant == "fa_tc":
        widest = arrays(70, 200, dtype, 8, 256, heads=(2, 1), batch=1)
        calls["head_dim 256"] = lambda: attend(rung, widest, {"causal": True})
    if name in HOPPER:
        calls |= _of_hopper(rung, plain) | _of_biases(rung, plain, fewer)
    if quant is not None:
        calls |= _of_codes(rung, plain, fewer, list(RUNGS).index(name))
        calls |= _of_own_codes(rung, plain) if arch else {}
    return {f"{name}: {call}": run for call, run in calls.items()}


def _of_scores(rung: Rung, some: Any, fewer: Any) -> dict[str, Callable[[], str]]:
    """Return calls with masks, biases and lengths."""
    rng = np.random.default_rng(5)
    (batch, heads, len_q, _), len_kv = some[0].shape, some[1].shape[2]
    mask = rng.random((batch, 1, len_q, len_kv)) < 0.5
    mask[:, :, 3], mask[..., 64:200] = False, False
    of_keys = {
        "mask": rng.random((1, 1, 1, len_kv)) < 0.7,
        "bias": rng.standard_normal((heads, 1, len_kv)).astype(np.float32),
    }
    block = 128 if rung[1] else 64
    shape = heads, -(-len_q // block), -(-len_kv // block)
    kept = np.indices(shape).sum(axis=0)[None] % 2 == 0
    blocks = {"block_mask": ca.BlockMask(kept, block, block), "causal": len_q == len_kv}
    lengths = {
        "lengths_q": np.int32([len_q, 61][-batch:]), "lengths_kv": np.int32([len_kv, 120][-batch:])
    }  # fmt: skip
    options = added(*FEWER, 1)
    aligned = {"causal": True, "causal_align": "top-left", "scale": 0.3}
    calls: dict[str, Callable[[], str]] = {
        "mask": lambda: attend(rung, some, {"mask": mask}),
        "mask and bias of keys": lambda: attend(rung, some, of_keys),
        "block mask": lambda: attend(rung, some, blocks),
        "padded": lambda: attend(rung, some, lengths),
        "top-left": lambda: attend(rung, fewer, aligned),
        "bias": lambda: attend(rung, fewer, {"bias": options["bias"], "causal": True}),
    }
    if rung[1] is None:  # Hopper forms leave this call to the portable ones
        calls["window, softcap, mask, bias"] = lambda: attend(rung, fewer, options)
    return calls


def _of_biases(rung: Rung, plain: Any, fewer: Any) -> dict[str, Callable[[], str]]:
    """Return calls with every kind of bias that Hopper forms take, masks beside it, a softcap."""
    rng = np.random.default_rng(18)
    len_q, len_kv = FEWER
    each = aligned_bias(rung[2], HEADS, len_q, len_kv)
    of_keys = {
        "bias": aligned_bias(rung[2], HEADS, 1, len_kv), "mask": rng.random(len_kv)[None] < 0.7,
    }  # fmt: skip
    masked = {"bias": each[:1], "mask": rng.random((1, HEADS, len_q, len_kv)) < 0.7}
    long = aligned_bias(rung[2], 1, *LENGTHS)
    small = fewer[0] * fewer[0].dtype.type(0.1), *fewer[1:]
    return {
        "aligned bias": lambda: attend(rung, fewer, {"bias": each, "causal": True}),
        "aligned bias and mask of keys": lambda: attend(rung, fewer, of_keys),
        "small scores, softcap": lambda: attend(rung, small, {"softcap": 6.0}),
        "bias of rows": lambda: attend(rung, fewer, {"bias": each[..., :1]}),
        "aligned bias and mask": lambda: attend(rung, fewer, masked),
        "aligned bias, few blocks": lambda: attend(rung, plain, {"bias": long}, blocks=3),
    }


def _of_own_codes(rung: Rung, plain: Any) -> dict[str, Callable[[], str]]:
    """Return calls of Hopper forms that make the codes of Q themselves."""
    variant, arch, dtype, quant = rung
    own = variant, arch, dtype, replace(quant, smooth_k=False)
    how: dict[str, Any] = {"inside": True, "with_lse": False}
    short = arrays(500, 50, dtype, 16, heads=(2, 1), batch=1)
    cut = arrays(200, 500, dtype, 11, heads=(3, 1), batch=1)
    return {
        "own codes, one step a tile": lambda: attend(own, short, {}, blocks=1, **how),
        "own codes, few blocks": lambda: attend(own, plain, {"causal": True}, blocks=3, **how),
        "own codes, tiles cut": lambda: attend(own, cut, {}, pieces=True, **how),
        "own codes, packed": lambda: _packed(own, 64, {}, inside=True),
    }


def _of_hopper(rung: Rung, plain: Any) -> dict[str, Callable[[], str]]:
    """Return calls whose blocks take several tiles, and whose tiles are cut."""
    dtype = rung[2]
    cut = arrays(200, 500, dtype, 11, heads=(3, 1), batch=1)
    far = arrays(70, 700, dtype, 12, 128, heads=(1, 1), batch=1)
    # A block has the end of a tile and the beginning of the next one.
    across = arrays(200, 500, dtype, 21, heads=(4, 1), batch=1)
    # One step a tile: the buffers of Q hold the producer, not the buffers of K and V.
    short = arrays(500, 50, dtype, 16, heads=(2, 1), batch=1)
    return {
        "one block, one step a tile": lambda: attend(rung, short, {}, blocks=1),
        "causal, few blocks": lambda: attend(rung, plain, {"causal": True}, blocks=3),
        "few blocks": lambda: attend(rung, plain, {}, blocks=3),
        "tiles cut": lambda: attend(rung, cut, {}, pieces=True),
        "tiles cut, two in a block": lambda: attend(rung, across, {}, pieces=True, blocks=3),
        "all tiles cut": lambda: attend(rung, far, {}, pieces=True),
    }


def _of_codes(rung: Rung, plain: Any, fewer: Any, number: int) -> dict[str, Callable[[], str]]:
    """Return calls of codes of other granularities, with zero points, and made in the call."""
    calls: dict[str, Callable[[], str]] = {}
    variant, arch, dtype, quant = rung
    many = arrays(40, 1100, dtype, 10, heads=(1, 1), batch=1)
    calls["many keys"] = lambda: attend(rung, many, {})
    if quant is WHOLE:
        calls["full sums"] = lambda: _full_sums(rung)
    if quant not in OVERFLOWING:
        calls["large scores, opposed"] = lambda: _large(rung, "opposed")
    if quant not in (*OVERFLOWING, FP8):
        unsmoothed = *rung[:3], replace(quant, smooth_k=False)
        calls["large scores, far below 0"] = lambda: _large(unsmoothed, "opposed")
    q, k, v = arrays(*FEWER, dtype, 13, batch=1)
    rising = np.linspace(-3, 3, FEWER[1]).astype(q.dtype)[:, None]
    shifted = q + q.dtype.type(1), k + rising * np.float16([1, -1]).repeat(32), v + rising
    shares = "token", "thread", "block"
    for_zeros, for_scales = (shares[(number + i) % 3] for i in range(2))
    of_both = {"granularity_q": for_zeros, "granularity_k": for_zeros}
    zeros = variant, arch, dtype, replace(quant, symmetric=False, **of_both)
    calls[f"zero points: {for_zeros}"] = partial(attend, zeros, shifted, {"causal": True})
    of_both = {"granularity_q": for_scales, "granularity_k": for_scales}
    even = variant, arch, dtype, replace(quant, **of_both)
    calls[f"scales: {for_scales}"] = partial(attend, even, fewer, {})
    if not quant.fused:
        inside = variant, arch, dtype, replace(quant, smooth_k=False)
        calls["codes made inside"] = lambda: attend(
            inside, plain, {"causal": True}, inside=True, blocks=2
        )
    return calls


def attention_calls() -> dict[str, Callable[[], str]]:
    """Return all calls of attention by name, one rung after the other."""
    calls: dict[str, Callable[[], str]] = {}
    for name, rung in RUNGS.items():
        calls |= _calls_of(name, rung)
    split = RUNGS["fa_tc"][0], None, "float16", None
    few, more = (arrays(len_q, 601, "float16", 7) for len_q in (3, 12))
    far = few[0] * np.float16(32), *few[1:]
    calls["fa_tc, split: few rows"] = lambda: attend(split, few, {"causal": True})
    calls["fa_tc, split: more rows"] = lambda: attend(split, more, {"window": (90, 9)})
    calls["fa_tc, split: scores far apart"] = lambda: attend(split, far, {})
    capped = {"softcap": 3.0, "bias": np.linspace(-2, 2, 601, dtype=np.float32)[None]}
    calls["fa_tc, split: softcap, bias"] = lambda: attend(split, more, capped)
    many_groups = (
        "fa_int8",
        None,
        "float16",
        replace(FUSED, symmetric=False, granularity_q="token", granularity_k="token"),
    )
    wide = Tiles(128, 64, 4, 1)
    inputs = arrays(*FEWER, "float16", 20, heads=(2, 1), batch=1)
    calls["fa_int8, fused: more groups than threads"] = partial(
        attend, many_groups, inputs, {}, tiles=wide
    )
    return calls | _prepared_calls()


def _prepared_calls() -> dict[str, Callable[[], str]]:
    """Return calls whose rows are turned or normalised first."""
    calls: dict[str, Callable[[], str]] = {}
    for name, head_dim, dtype in (("wide", 64, "float16"), ("narrow", 40, "bfloat16")):
        inputs = arrays(*FEWER, dtype, 14, head_dim)
        tables = rope_tables(200, head_dim)
        rng = np.random.default_rng(15)
        weights = tuple(rng.uniform(0.5, 2, head_dim).astype(STORAGE[dtype]) for _ in range(2))
        for pairs in (True, False):
            given: dict[str, Any] = {"rope": tables, "rope_interleaved": pairs, "causal": True}
            given["rope_offset_q"] = 7
            if pairs == (name == "wide"):
                given["qk_norm"] = weights
            label = f"rope {'pairs' if pairs else 'halves'}, {name}"
            of = "fa_tc", None, dtype, None
            calls[f"fa_tc: {label}"] = partial(attend, of, inputs, given)
    return calls
