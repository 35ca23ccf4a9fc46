"""Small calls of the backward pass, each judged by its bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.gradients.judge import judge_backward
from cupyattn.reference import attention_exact
from experiments._harness.small_inputs import (
    BATCH,
    FEWER,
    HEADS,
    HEADS_KV,
    PACKED,
    added,
    arrays,
    normal,
)  # fmt: skip


def _judged(found: Any, received: Any, options: dict[str, Any]) -> str:
    report = judge_backward(found, *received, **options)
    if report.passed:
        return ""
    return next(line for line in str(report).splitlines() if "OUTSIDE" in line)


def gradients(
    options: dict[str, Any], factor: float = 1.0, lengths: tuple[int, int] = (140, 200),
    head_dim: int = 64, heads: tuple[int, int] = (HEADS, HEADS_KV), **how: Any,
) -> str:  # fmt: skip
    """Run the backward pass, and judge the gradients."""
    q, k, v = arrays(*lengths, "float16", 4, head_dim, heads=heads, batch=how.pop("batch", BATCH))
    q, k = (x * q.dtype.type(factor) for x in (q, k))
    d_out = normal(np.random.default_rng(6), q.shape).astype(q.dtype)
    forward = {name: x for name, x in options.items() if name not in ("d_lse", "grad_bias")}
    o, lse = attention_exact(q, k, v, return_lse=True, **forward)
    received = d_out, q, k, v, o.astype(q.dtype), lse.astype(np.float32)
    found = ca.attention_backward(*received, backend="interpret", **how, **options)
    options = {name: x for name, x in options.items() if name != "grad_bias"}
    return _judged(found, received, options)


def _packed(head_dim: int, **how: Any) -> str:
    """Run one call of packed sequences, and judge each."""
    ends = [np.cumsum((0, *one), dtype=np.int32) for one in zip(*PACKED, strict=True)]
    rng = np.random.default_rng(2)
    shapes = (ends[0][-1], HEADS, head_dim), *[(ends[1][-1], HEADS_KV, head_dim)] * 2
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    d_out, out, lse = rng.standard_normal(q.shape).astype(q.dtype), np.empty_like(q), []
    parts = []
    for rows, keys in zip(*(map(slice, x, x[1:]) for x in ends), strict=True):
        one = tuple(x.swapaxes(0, 1)[None] for x in (d_out[rows], q[rows], k[keys], v[keys]))
        o, its_lse = attention_exact(*one[1:], return_lse=True, causal=True)
        out[rows] = o[0].swapaxes(0, 1)
        lse.append(its_lse[0].astype(np.float32))
        parts.append((rows, keys, (*one, o.astype(q.dtype), its_lse.astype(np.float32))))
    found = ca.attention_varlen_backward(
        d_out, q, k, v, out, np.concatenate(lse, axis=1), *ends, causal=True, backend="interpret",
        **how,
    )  # fmt: skip
    for rows, keys, received in parts:
        cut = (found[0][rows], found[1][keys], found[2][keys])
        gradients = [x.swapaxes(0, 1)[None] for x in cut]
        if said := _judged(gradients, received, {"causal": True}):
            return said
    return ""


def gradient_calls() -> dict[str, Callable[[], str]]:
    """Return the calls of the backward pass by name."""
    rng = np.random.default_rng(7)
    few = {"lengths": FEWER}
    shape = BATCH, HEADS, *FEWER
    bias = 2 * rng.standard_normal(shape)
    bias[rng.random(shape) < 0.2] = -np.inf
    biased = {"softcap": 1.5, "mask": rng.random(shape) < 0.8, "bias": bias.astype(np.float32)}
    of_heads = rng.standard_normal((HEADS, *FEWER)).astype(np.float16)
    of_keys = rng.standard_normal((HEADS, 1, FEWER[1])).astype(np.float32)
    d_lse = 4 * rng.standard_normal((BATCH, HEADS, 140)).astype(np.float32)
    kept = np.array([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]], bool)
    blocks = {"block_mask": ca.BlockMask(np.stack([kept, kept[::-1]])[None].repeat(2, 1), 64, 64)}
    coarse = {"bias": np.full((1, 1, 1, FEWER[1]), -1e9, np.float32)}
    calls: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "causal": ({"causal": True}, {"heads": (2, 1)}),
        "softcap, window": ({"softcap": 2.0, "window": (20, 5)}, {"batch": 1}),
        # lse of a thousand and more: P has another way to be found.
        "large scores": ({"causal": True}, {"factor": 12.0, "heads": (2, 1)}),
        "coarse lse": (coarse, few),
        "softcap, window, mask, bias": (added(*FEWER), few),
        "of a bias": ({**biased, "grad_bias": True}, few),
        "of a bias that entries share": (
            {"bias": of_heads, "causal": True, "grad_bias": True}, few),
        "of a bias of keys": ({"bias": of_keys, "grad_bias": True}, few),
        "of lse": ({"d_lse": d_lse, "window": (0, 30)}, {}),
        "block mask": (blocks, {}),
        "head_dim 36": ({"causal": True}, {"head_dim": 36, **few}),
        "head_dim 7": ({}, {"head_dim": 7, "heads": (2, 1), **few}),
        "head_dim 7, large scores": (
            {"causal": True}, {"head_dim": 7, "heads": (2, 1), "factor": 60.0, **few}),
        "head_dim 128": ({"causal": True}, {"head_dim": 128, "heads": (2, 1), **few}),
    }  # fmt: skip
    made: dict[str, Callable[[], str]] = {}
    for form, deterministic in (("ordered", True), ("atomic", False)):
        for name, (options, how) in calls.items():
            if form == "ordered" or name in ("causal", "large scores", "coarse lse", "of lse"):
                given = {"deterministic": deterministic, **how}
                made[f"backward, {form}: {name}"] = partial(gradients, options, **given)
        made[f"backward, {form}: packed"] = partial(_packed, 40, deterministic=deterministic)
    one: dict[str, Any] = {"batch": 1, "heads": (2, 1)}
    lse_of_two = d_lse[:1, :2]
    hopper: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "causal": ({"causal": True, "causal_align": "top-left"}, {"lengths": (330, 150)}),
        "head_dim 72": ({"window": (150, 40)}, {"lengths": (300, 140), "head_dim": 72}),
        "of lse": ({"d_lse": lse_of_two}, {}),
        "large scores": ({"causal": True}, {"factor": 12.0}),
        "head_dim 128": ({"causal": True}, {"lengths": (130, 400), "head_dim": 128}),
        "head_dim 160": ({"causal": True}, {"lengths": (150, 270), "head_dim": 160}),
        "head_dim 256": ({"d_lse": lse_of_two}, {"head_dim": 256}),
        "head_dim 256, rows without keys": (
            {"causal": True}, {"lengths": (300, 100), "head_dim": 256}),
        "head_dim 256, large scores": (
            {"window": (150, 40)}, {"factor": 8.0, "lengths": FEWER, "head_dim": 256}),
    }  # fmt: skip
    for form, deterministic in (("ordered", True), ("atomic", False)):
        for name, (options, how) in hopper.items():
            given = {**one, **how, "deterministic": deterministic, "arch": "sm_90a"}
            made[f"backward, sm90 {form}: {name}"] = partial(gradients, options, **given)
        given = {"deterministic": deterministic, "arch": "sm_90a"}
        made[f"backward, sm90 {form}: packed"] = partial(_packed, 64, **given)
    return made
