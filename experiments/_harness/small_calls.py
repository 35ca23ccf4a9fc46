"""Small calls in the interpreter, each judged: what notices a fault in the kernels' sources?

A call returns "" if every judgement holds, else what the judge said. The interpreter raises
KernelFault by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.cli.verify import operands_equal
from cupyattn.gradients.judge import judge_backward
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from cupyattn.reference import attention_exact
from cupyattn.testing import judge

#: Lengths of queries and keys: tails, and several tiles of keys. Fewer of both in packed calls.
LENGTHS, PACKED = (40, 150), ((5, 9), (35, 40))
HEAD_DIM = 64


def _arrays(
    heads: int, heads_kv: int, len_q: int, len_kv: int, dtype: str, seed: int
) -> tuple[Any, Any, Any]:
    """Return q, k and v: N(0, 1), keys with an offset, and scores that rise along the keys."""
    rng = np.random.default_rng(seed)
    shapes = (1, heads, len_q, HEAD_DIM), *[(1, heads_kv, len_kv, HEAD_DIM)] * 2
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    k = 1.5 * k + np.linspace(0, 1, len_kv)[:, None] + 0.5
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))  # type: ignore[return-value]


def _added(heads: int, len_q: int, len_kv: int) -> dict[str, Any]:
    """Return a mask and a bias, and what else changes scores."""
    rng = np.random.default_rng(5)
    shape = 1, heads, len_q, len_kv
    bias = 2 * rng.standard_normal(shape)
    bias[..., : len_kv // 3] = -1e9
    added = {"mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32)}
    return {"softcap": 1.5, "window": (60, 9), **added}


def _attend(
    variant: str, arch: str | None, inputs: Any, options: dict[str, Any], quant: Any
) -> str:
    """Run one call of attention, and judge it."""
    q, k, v = inputs
    z = None
    if variant == "fa_int8":
        quant = quant or ca.QuantConfig(smooth_k=not options.get("softcap"))
        z = ca.quantize(q, k, v, quant=quant, backend="mirror")
    operands = (q, k, v) if z is None else (z,)
    asked: dict[str, Any] = {"variant": variant, "arch": arch, "backend": "interpret"}
    asked |= {"return_lse": True, **options}
    plan = plans(resolved(*(operands if z is None else (z, None, None)), **asked))[-1]
    o, lse = ca.attention(*operands, **asked)
    report = judge(
        o, q, k, v, variant=variant, lse=lse, quantized=z, form=plan.form, tiles=plan.tiles,
        **options,
    )  # fmt: skip
    return "" if report.passed else str(report).splitlines()[0]


def _packed(variant: str, arch: str | None, inputs: Any, ends: Any) -> str:
    """Run one call of packed sequences, and judge each."""
    q, k, v = inputs
    asked = {"variant": variant, "causal": True}
    o, lse = ca.attention_varlen(
        q, k, v, *ends, return_lse=True, arch=arch, backend="interpret", **asked
    )
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    report = judge(o, q, k, v, lse=lse, **asked, **named)
    return "" if report.passed else str(report).splitlines()[0]


def attention_calls(
    variant: str, arch: str | None, dtype: str, quant: Any = None, features: bool = True
) -> dict[str, Callable[[], str]]:
    """Return the calls of one rung by name."""
    plain = _arrays(4, 2, *LENGTHS, dtype, 0)
    below = plain[0] + STORAGE[dtype].type(3), plain[1] - STORAGE[dtype].type(7), plain[2]
    short = _arrays(2, 1, 33, 31, dtype, 1)
    calls: dict[str, Any] = {
        "causal, grouped": lambda: _attend(variant, arch, plain, {"causal": True}, quant),
        "scores far below 0": lambda: _attend(variant, arch, below, {}, quant),
        "one short tile": lambda: _attend(variant, arch, short, {}, quant),
    }
    if features:
        options = _added(4, *LENGTHS)
        capped = {"softcap": 1.5, "window": (60, 9)}
        kept = np.indices((4, 1, 3)).sum(axis=0)[None] % 2 == 0
        blocks = {"block_mask": ca.BlockMask(kept, 64, 64)}
        calls["window, softcap, mask, bias"] = lambda: _attend(variant, arch, plain, options, quant)
        calls["window, softcap"] = lambda: _attend(variant, arch, plain, capped, quant)
        calls["block mask"] = lambda: _attend(variant, arch, plain, blocks, quant)
    if features and variant != "fa_int8":
        ends = tuple(np.cumsum((0, *one), dtype=np.int32) for one in zip(*PACKED, strict=True))
        rng = np.random.default_rng(2)
        shapes = (int(ends[0][-1]), 4, HEAD_DIM), *[(int(ends[1][-1]), 2, HEAD_DIM)] * 2
        packed = tuple(rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in shapes)
        calls["packed"] = lambda: _packed(variant, arch, packed, ends)
    return calls


def _quantized(granularity: str) -> str:
    """Make codes in the interpreter, and compare them with the mirror's, bit for bit (J1)."""
    inputs = _arrays(4, 2, *LENGTHS, "float16", 3)
    quant = ca.QuantConfig(granularity, granularity)
    z = ca.quantize(*inputs, quant=quant, backend="interpret")
    return "" if operands_equal(z, inputs) else f"J1: codes or scales of granularity {granularity}"


def _gradients(options: dict[str, Any]) -> str:
    """Run the backward pass, and judge the gradients."""
    q, k, v = _arrays(4, 2, 40, 70, "float16", 4)
    d_out = np.random.default_rng(6).standard_normal(q.shape).astype(q.dtype)
    o, lse = attention_exact(q, k, v, return_lse=True, **options)
    o, lse = o.astype(q.dtype), lse.astype(np.float32)
    found = ca.attention_backward(d_out, q, k, v, o, lse, backend="interpret", **options)
    report = judge_backward(found, d_out, q, k, v, o, lse, **options)
    return "" if report.passed else str(report).splitlines()[0]


def small_calls() -> dict[str, Callable[[], str]]:
    """Return all calls by name, those of a rung together."""
    codes, whole = (ca.QuantConfig(pv="int8", granularity_v=by) for by in ("block", "channel"))
    fp8 = ca.QuantConfig(pv="fp8", granularity_v="channel")
    of_v = ca.QuantConfig(pv="int8", p_type="16bit")
    rungs: tuple[tuple[str, str, str | None, str, Any, bool], ...] = (
        ("unfused", "unfused", None, "float16", None, True),
        ("fa", "fa", None, "float32", None, True),
        ("fa_warps", "fa_warps", None, "float16", None, True),
        ("fa_tc", "fa_tc", None, "bfloat16", None, True),
        ("fa_tc, sm90", "fa_tc", "sm_90a", "float16", None, True),
        ("fa_int8", "fa_int8", None, "float16", None, True),
        ("fa_int8, sm90", "fa_int8", "sm_90a", "float16", None, True),
        ("fa_int8, pv8", "fa_int8", None, "float16", codes, False),
        ("fa_int8, pv8 whole", "fa_int8", None, "float16", whole, False),
        ("fa_int8, v8", "fa_int8", None, "float16", of_v, False),
        ("fa_int8, sm90 pv8", "fa_int8", "sm_90a", "float16", whole, False),
        ("fa_int8, sm90 pv8 by tile", "fa_int8", "sm_90a", "float16", codes, False),
        ("fa_int8, sm90 fp8", "fa_int8", "sm_90a", "float16", fp8, False),
    )
    calls = {
        f"{name}: {call}": run
        for name, variant, arch, dtype, quant, features in rungs
        for call, run in attention_calls(variant, arch, dtype, quant, features).items()
    }
    few = _arrays(6, 2, 3, 601, "float16", 7)
    calls["fa_tc, split: few rows"] = lambda: _attend("fa_tc", None, few, {"causal": True}, None)
    for granularity in ("token", "thread", "block"):
        calls[f"quantize: {granularity}"] = lambda by=granularity: _quantized(by)  # type: ignore[misc]
    calls["backward: causal"] = lambda: _gradients({"causal": True})
    calls["backward: softcap, window"] = lambda: _gradients({"softcap": 2.0, "window": (20, 5)})
    return calls
