"""Small calls of attention at the edges of its kernels: head_dims, full tiles, long rows, NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE, as_float64
from experiments._harness.small_attention import FP8, HOPPER, RUNGS, Rung, attend, said_of
from experiments._harness.small_inputs import aligned_bias, arrays, rope_tables

#: Lengths of q and k of packed sequences: none of some, full tiles, one row, one key.
EDGES = ((64, 128), (0, 17), (130, 1), (20, 0), (1, 70), (33, 300))
#: head_dims whose tiles or widths of products differ; FP8 goes to 128.
WIDTHS = {None: (24, 128, 136, 256), "sm_90a": (40, 96, 128, 192, 256)}
#: Products of Hopper have instructions of their own for each of these.
OTHER_WIDTHS = (8, 16, 48, 72, 80, 112, 144, 160, 176, 208, 224, 240)


def one_head(rung: Rung, len_q: int, len_kv: int, head_dim: int = 64, seed: int = 30) -> Any:
    """Return inputs of one batch entry, and one head of K and V."""
    return arrays(len_q, len_kv, rung[2], seed, head_dim, heads=(2, 1), batch=1)


def _packed_edges(rung: Rung, lengths: Any, head_dim: int, options: dict[str, Any]) -> str:
    """Run one call of packed sequences, and judge each by itself."""
    variant, arch, dtype, quant = rung
    ends = tuple(np.cumsum((0, *one), dtype=np.int32) for one in zip(*lengths, strict=True))
    rng = np.random.default_rng(31)
    shapes = (int(ends[0][-1]), 4, head_dim), *[(int(ends[1][-1]), 2, head_dim)] * 2
    q, k, v = (rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in shapes)
    named: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    asked = {"variant": variant, **options}
    given: dict[str, Any] = {"arch": arch, "backend": "interpret", "return_lse": True, **asked}
    if quant is None:
        o, lse = ca.attention_varlen(q, k, v, *ends, **given)
        return said_of(ca.testing.judge(o, q, k, v, lse=lse, **asked, **named))
    z = ca.quantize(q, k, v, quant=quant, backend="interpret", arch=arch, **named)
    o, lse = ca.attention_varlen(z, **given)
    return said_of(ca.testing.judge(o, q, k, v, lse=lse, quantized=z, **asked))


def _biased_not_finite(rung: Rung) -> str:
    """Run NaN in keys that a bias of -inf masks, and in others: the mirror tells where it shows."""
    variant, arch, dtype, quant = rung
    q, k, v = one_head(rung, 140, 300)
    bias = aligned_bias(dtype, 1, 140, 300, masked=0.1)
    k[:, :, 70, 3] = np.nan
    bias[:, 20:, 70] = -np.inf
    q[:, 1, 100, 5] = np.inf
    asked: dict[str, Any] = {"variant": variant, "bias": bias, "return_lse": True, "arch": arch}
    operands: Any = (q, k, v)
    with np.errstate(invalid="ignore"):
        if quant is not None:
            operands = (ca.quantize(q, k, v, quant=quant, backend="mirror", arch=arch),)
        found, want = (ca.attention(*operands, **asked, backend=x) for x in ("interpret", "mirror"))
    for x, y in zip(found, want, strict=True):
        x, y = as_float64(x), as_float64(y)
        if (np.isfinite(x) != np.isfinite(y)).any():
            return "not finite in other places than the mirror"
        some = np.isfinite(y)
        if not np.allclose(x[some], y[some], rtol=0.05, atol=0.05):
            return "rows that are finite are wrong"
    return ""


def _prepared(rung: Rung, options: dict[str, Any]) -> str:
    """Run a call that makes codes of rows that it turns or normalises first."""
    variant, arch, dtype, quant = rung
    q, k, v = arrays(70, 150, dtype, 32, heads=(4, 2))
    own = {n: options[n] for n in options if n.startswith(("rope", "qk_norm"))}
    z = ca.quantize(q, k, v, quant=quant, backend="interpret", arch=arch, **own)
    others = {n: x for n, x in options.items() if n not in own}
    o, lse = ca.attention(
        z, variant=variant, arch=arch, backend="interpret", return_lse=True, **others
    )
    report = ca.testing.judge(o, q, k, v, variant=variant, lse=lse, quantized=z, **options)
    return said_of(report)


def _scored(rung: Rung, number: int, head_dim: int) -> tuple[str, dict[str, Any]]:
    """Return one way to change scores of 70 rows and 200 keys, and its name."""
    rng = np.random.default_rng(33)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("softcap", {"softcap": 1.5, "causal": True}),
        ("bias", {"bias": aligned_bias(rung[2], 2, 140, 300, masked=0.1)}),
        ("mask", {"mask": rng.random((2, 140, 300)) < 0.7}),
        ("bias, causal", {"bias": aligned_bias(rung[2], 1, 140, 300), "causal": True}),
        ("mask of keys, window", {"mask": rng.random((2, 1, 300)) < 0.7, "window": (90, 20)}),
    ]
    return ways[(number + head_dim // 32) % len(ways)]


def _of_rung(name: str, rung: Rung) -> dict[str, Callable[[], str]]:
    """Return the calls of one rung."""
    _, arch, dtype, quant = rung
    calls: dict[str, Callable[[], str]] = {}
    number = list(RUNGS).index(name)
    for head_dim in WIDTHS[arch]:
        if quant is FP8 and head_dim > 128:
            continue
        wide = one_head(rung, 70, 200, head_dim)
        plain = {"causal": head_dim % 128 > 0}
        calls[f"head_dim {head_dim}, plain"] = partial(
            attend, rung, wide, plain, with_lse=head_dim == 256
        )
        if name in HOPPER:
            long = one_head(rung, 140, 300, head_dim)
            for i in (0, 1):
                way, options = _scored(rung, number + 2 * i, head_dim)
                calls[f"head_dim {head_dim}, {way}"] = partial(attend, rung, long, options)
    full, single = one_head(rung, 128, 256), one_head(rung, 1, 1)
    calls["full tiles"] = lambda: attend(rung, full, {"causal": True})
    calls["one row, one key"] = lambda: attend(rung, single, {})
    square = one_head(rung, 192, 192)
    calls["square, window"] = lambda: attend(rung, square, {"window": (64, 32)})
    other = "bfloat16" if dtype == "float16" else "float16"
    of_other: Rung = rung[0], arch, other, quant
    calls[f"of {other}"] = lambda: attend(of_other, one_head(of_other, 70, 150), {"causal": True})
    windows = {"window": (60, 9), "causal_align": "top-left"}
    if quant is None or not quant.fused:
        calls["packed edges"] = lambda: _packed_edges(rung, EDGES, 64, {})
        calls["packed edges, window"] = lambda: _packed_edges(rung, EDGES, 128, windows)
    if quant is not None:
        none = *rung[:3], replace(quant, smooth_k=False, smooth_v=False)
        calls["no means"] = lambda: attend(none, one_head(rung, 70, 300), {"causal": True})
        if not quant.fused and quant.granularity_v != "channel":
            of_heads = *rung[:3], replace(quant, granularity_q="head", granularity_k="head")
            calls["packed edges, scales of heads"] = lambda: _packed_edges(of_heads, EDGES, 40, {})
    if name in HOPPER:
        calls |= _of_hopper(rung)
    return {f"{name}: {call}": run for call, run in calls.items()}


def _of_hopper(rung: Rung) -> dict[str, Callable[[], str]]:
    """Return calls whose warps skip steps, whose lists are long, and whose bias masks a NaN."""
    rng = np.random.default_rng(34)
    square = one_head(rung, 300, 300)
    each = aligned_bias(rung[2], 2, 300, 300, masked=0.1)
    kept = np.indices((2, 3, 3)).sum(axis=0)[None] % 3 < 2
    blocks = {"block_mask": ca.BlockMask(kept, 128, 128), "causal": True}
    many = one_head(rung, 20, 4400)
    of_keys = rng.random((1, 1, 4400)) < 0.02
    of_keys[..., 500:1200], of_keys[..., 2000:3000] = True, False
    mask = rng.random((2, 300, 300)) < 0.7
    mask[:, :, 128:256] = True
    return {
        "bias, causal, square": lambda: attend(rung, square, {"bias": each, "causal": True}),
        "block mask, causal": lambda: attend(rung, square, blocks),
        "mask, causal": lambda: attend(rung, square, {"mask": mask, "causal": True}),
        "mask, window": lambda: attend(rung, square, {"mask": mask, "window": (100, 60)}),
        "mask of many keys": lambda: attend(rung, many, {"mask": of_keys, "causal": True}),
        "bias, not finite": lambda: _biased_not_finite(rung),
    }


def shape_calls() -> dict[str, Callable[[], str]]:
    """Return the calls by name, one rung after the other."""
    calls: dict[str, Callable[[], str]] = {}
    for name, rung in RUNGS.items():
        calls |= _of_rung(name, rung)
    for name in ("fa_tc, sm90", "fa_int8, sm90", "fa_int8, sm90 pv8"):
        for head_dim in OTHER_WIDTHS:
            inputs = one_head(RUNGS[name], 40, 70, head_dim)
            calls[f"{name}: head_dim {head_dim}"] = partial(attend, RUNGS[name], inputs, {})
    for name in ("unfused", "fa", "fa_warps"):
        for pairs in (True, False):
            turned = {"rope": rope_tables(160, 64), "rope_interleaved": pairs, "rope_offset_q": 80}
            inputs = one_head(RUNGS[name], 40, 70)
            calls[f"{name}: rope {'pairs' if pairs else 'halves'}"] = partial(
                attend, RUNGS[name], inputs, turned
            )
    rng = np.random.default_rng(35)
    weights = tuple(rng.uniform(0.5, 2, n).astype(np.float16) for n in ((4, 64), (64,)))
    for name in ("fa_int8", "fa_int8, pv8", "fa_int8, sm90"):
        turned = {"rope": rope_tables(160, 64), "rope_interleaved": name == "fa_int8"}
        calls[f"{name}: norm, rope"] = partial(
            _prepared, RUNGS[name], {**turned, "qk_norm": weights, "causal": True}
        )
        calls[f"{name}: rope"] = partial(_prepared, RUNGS[name], turned)
    many = arrays(2, 4500, "float16", 36, 16, heads=(2, 1), batch=1)
    calls["fa_tc, split: many parts"] = partial(attend, ("fa_tc", None, "float16", None), many, {})
    return calls
