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
from cupyattn.bounds.perturbation import gamma
from cupyattn.cli.verify import operands_equal
from cupyattn.gradients.judge import judge_backward
from cupyattn.ops.attention import resolved
from cupyattn.ops.explain import plans
from cupyattn.reference import attention_exact
from cupyattn.testing import judge
from experiments._harness.few_blocks import hopper_blocks

#: Lengths of queries and keys: tails, several blocks of queries, several tiles of keys. With a mask
#: and a bias, which are slow, fewer. Packed sequences have others again.
LENGTHS, FEWER, PACKED = (140, 330), (70, 150), ((5, 9), (135, 140), (40, 33))
BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 4, 2, 64


def _array(rng: Any, shape: tuple[int, ...]) -> Any:
    """Return N(0, 1) with rows of all heads side by side, as models have them: (b, h, l, d)."""
    batch, heads, length, head_dim = shape
    return rng.standard_normal((batch, length, heads, head_dim)).swapaxes(1, 2)


def _arrays(
    len_q: int, len_kv: int, dtype: str, seed: int, head_dim: int = HEAD_DIM
) -> tuple[Any, Any, Any]:
    """Return q, k and v of two batch entries.

    Scores of the first rise along the keys, so that the maximum of a row rises often and far.
    """
    rng = np.random.default_rng(seed)
    q = _array(rng, (BATCH, HEADS, len_q, head_dim))
    k, v = (_array(rng, (BATCH, HEADS_KV, len_kv, head_dim)) for _ in range(2))
    k = 1.5 * k + 0.5
    k[0] *= np.linspace(0.1, 4, len_kv)[:, None]
    return tuple(x.astype(STORAGE[dtype]) for x in (q, k, v))  # type: ignore[return-value]


def _added(len_q: int, len_kv: int) -> dict[str, Any]:
    """Return a mask and a bias with keys before rows in memory, and what else changes scores."""
    rng = np.random.default_rng(5)
    shape = BATCH, HEADS, len_kv, len_q
    bias = 2 * rng.standard_normal(shape)
    bias[..., : len_kv // 3, :] = -1e9
    added = {"mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32)}
    added = {name: x.swapaxes(2, 3) for name, x in added.items()}
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


def _in_few_blocks(call: Callable[[], str]) -> str:
    with hopper_blocks(3):
        return call()


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
    plain, fewer = (_arrays(*lengths, dtype, 0) for lengths in (LENGTHS, FEWER))
    short = _arrays(33, 31, dtype, 1)
    below = short[0] + STORAGE[dtype].type(3), short[1] - STORAGE[dtype].type(7), short[2]
    calls: dict[str, Any] = {
        "causal": lambda: _attend(variant, arch, plain, {"causal": True}, quant),
        "one short tile, far below 0": lambda: _attend(variant, arch, below, {}, quant),
    }
    if arch is not None:
        calls["causal, few blocks"] = lambda: _in_few_blocks(
            lambda: _attend(variant, arch, plain, {"causal": True}, quant)
        )
    if features:
        options, capped = _added(*FEWER), {"softcap": 1.5, "window": (60, 9)}
        kept = np.indices((HEADS, 3, 6)).sum(axis=0)[None] % 2 == 0
        blocks = {"block_mask": ca.BlockMask(kept, 64, 64)}
        calls["window, softcap"] = lambda: _attend(variant, arch, plain, capped, quant)
    if features and arch is None:  # Hopper forms leave these calls to the portable ones
        calls["window, softcap, mask, bias"] = lambda: _attend(variant, arch, fewer, options, quant)
        calls["block mask"] = lambda: _attend(variant, arch, plain, blocks, quant)
        narrow = _arrays(*FEWER, dtype, 8, 40)
        calls["head_dim 40"] = lambda: _attend(variant, arch, narrow, {"causal": True}, quant)
    if features and variant != "fa_int8":
        ends = tuple(np.cumsum((0, *one), dtype=np.int32) for one in zip(*PACKED, strict=True))
        rng = np.random.default_rng(2)
        shapes = (int(ends[0][-1]), HEADS, HEAD_DIM), *[(int(ends[1][-1]), HEADS_KV, HEAD_DIM)] * 2
        packed = tuple(rng.standard_normal(shape).astype(STORAGE[dtype]) for shape in shapes)
        calls["packed"] = lambda: _packed(variant, arch, packed, ends)
    return calls


def _quantized(granularity: str) -> str:
    """Make codes in the interpreter, and compare them with the mirror's, bit for bit (J1)."""
    inputs = _arrays(*LENGTHS, "float16", 3)
    quant = ca.QuantConfig(granularity, granularity)
    z = ca.quantize(*inputs, quant=quant, backend="interpret")
    exact = inputs[1].astype(np.float64).mean(axis=2)
    # Sums in float32, and one rounding of the mean.
    allowed = gamma(LENGTHS[1], 2.0**-24) * np.abs(inputs[1]).mean(axis=2) + 2.0**-11 * abs(exact)
    if z.k_mean is not None and (np.abs(z.k_mean.reshape(exact.shape) - exact) > allowed).any():
        return f"the mean of K of granularity {granularity} is wrong"
    return "" if operands_equal(z, inputs) else f"J1: codes or scales of granularity {granularity}"


def _gradients(options: dict[str, Any], factor: float = 1.0) -> str:
    """Run the backward pass, and judge the gradients."""
    q, k, v = _arrays(*(FEWER if "mask" in options else (140, 200)), "float16", 4)
    q, k = (x * q.dtype.type(factor) for x in (q, k))
    d_out = _array(np.random.default_rng(6), q.shape).astype(q.dtype)
    o, lse = attention_exact(q, k, v, return_lse=True, **options)
    o, lse = o.astype(q.dtype), lse.astype(np.float32)
    found = ca.attention_backward(d_out, q, k, v, o, lse, backend="interpret", **options)
    report = judge_backward(found, d_out, q, k, v, o, lse, **options)
    return "" if report.passed else str(report).splitlines()[0]


def small_calls() -> dict[str, Callable[[], str]]:
    """Return all calls by name, one rung after the other."""
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
        ("fa_int8, sm90 fp8", "fa_int8", "sm_90a", "float16", fp8, False),
    )
    calls = {
        f"{name}: {call}": run
        for name, variant, arch, dtype, quant, features in rungs
        for call, run in attention_calls(variant, arch, dtype, quant, features).items()
    }
    few, more = (_arrays(len_q, 601, "float16", 7) for len_q in (3, 12))
    calls["fa_tc, split: few rows"] = lambda: _attend("fa_tc", None, few, {"causal": True}, None)
    near = {"window": (90, 9)}
    calls["fa_tc, split: more rows"] = lambda: _attend("fa_tc", None, more, near, None)
    for granularity in ("token", "thread", "block"):
        calls[f"quantize: {granularity}"] = lambda by=granularity: _quantized(by)  # type: ignore[misc]
    calls["backward: causal"] = lambda: _gradients({"causal": True})
    calls["backward: softcap, window"] = lambda: _gradients({"softcap": 2.0, "window": (20, 5)})
    # lse of a thousand and more: P has another way to be found.
    calls["backward: large scores"] = lambda: _gradients({"causal": True}, 12.0)
    added = _added(*FEWER)
    calls["backward: softcap, window, mask, bias"] = lambda: _gradients(added)
    return calls
