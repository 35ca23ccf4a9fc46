"""Small calls of the backward pass, each judged by its bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn as ca
from cupyattn.gradients.judge import judge_backward
from cupyattn.problem.row_preparation import OPTIONS, Preparation
from cupyattn.problem.settings import Settings
from cupyattn.reference import attention_exact
from experiments._harness.small_inputs import (
    BATCH,
    FEWER,
    HEADS,
    HEADS_KV,
    PACKED,
    added,
    aligned_bias,
    arrays,
    normal,
    rope_tables,
)  # fmt: skip


def _judged(found: Any, received: Any, options: dict[str, Any]) -> str:
    report = judge_backward(found, *received, **options)
    if report.passed:
        return ""
    return next(line for line in str(report).splitlines() if "OUTSIDE" in line)


def gradients(
    options: dict[str, Any], factor: float = 1.0, lengths: tuple[int, int] = (140, 200),
    head_dim: int = 64, heads: tuple[int, int] = (HEADS, HEADS_KV), dtype: str = "float16",
    **how: Any,
) -> str:  # fmt: skip
    """Run the backward pass, and judge the gradients."""
    q, k, v = arrays(*lengths, dtype, 4, head_dim, heads=heads, batch=how.pop("batch", BATCH))
    q, k = (x * q.dtype.type(factor) for x in (q, k))
    d_out = normal(np.random.default_rng(6), q.shape).astype(q.dtype)
    others = ("d_lse", "grad_bias", *OPTIONS)
    forward = {name: x for name, x in options.items() if name not in others}
    own = {name: options[name] for name in OPTIONS if name in options}
    shape = *heads, *lengths, head_dim
    prepared = Preparation.of_arrays(Settings().rows({}) | own, shape)
    rows = (q, k) if prepared is None else prepared.stored(q, k)
    o, lse = attention_exact(*rows, v, return_lse=True, **forward)
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
    of_long = rng.standard_normal((2, 140, 200)).astype(np.float16)
    d_lse = 4 * rng.standard_normal((BATCH, HEADS, 140)).astype(np.float32)
    weights = [
        rng.uniform(0.5, 2, shape).astype(dtype)
        for shape, dtype in ((64, "f2"), (64, "f4"), ((HEADS, 64), "f4"), ((HEADS_KV, 64), "f2"))
    ]
    narrow = tuple(rng.uniform(0.5, 2, 20).astype(np.float32) for _ in range(2))
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
        "of a bias, window": (
            {"bias": of_heads, "window": (30, 20), "grad_bias": True}, few),
        "of a bias, block mask": (
            {"bias": of_long, "block_mask": _kept(140, 200, 64), "grad_bias": True},
            {"heads": (2, 1), "batch": 1}),
        "of lse": ({"d_lse": d_lse, "window": (0, 30)}, {}),
        "block mask": (blocks, {}),
        "head_dim 36": ({"causal": True}, {"head_dim": 36, **few}),
        "head_dim 7": ({}, {"head_dim": 7, "heads": (2, 1), **few}),
        "head_dim 7, large scores": (
            {"causal": True}, {"head_dim": 7, "heads": (2, 1), "factor": 60.0, **few}),
        "head_dim 128": ({"causal": True}, {"head_dim": 128, "heads": (2, 1), **few}),
        "head_dim 160": (
            {"causal": True}, {"head_dim": 160, "heads": (2, 1), "dtype": "bfloat16", **few}),
        "head_dim 256, softcap, window": (
            {"softcap": 2.0, "window": (50, 5)}, {"head_dim": 256, "heads": (2, 1), **few}),
        "head_dim 128, block mask": (
            {"block_mask": _kept(140, 200, 64)}, {"head_dim": 128, "heads": (2, 1), "batch": 1}),
        "head_dim 192, block mask": (
            {"block_mask": _kept(70, 150, 64), "causal": True},
            {"head_dim": 192, "heads": (2, 1), "batch": 1, **few}),
        "head_dim 160, of a bias": (
            {"bias": of_heads[:2], "grad_bias": True}, {"head_dim": 160, "heads": (2, 1), **few}),
        "norm, rope": (
            {"qk_norm": tuple(weights[:2]), "rope": rope_tables(200, 64), "causal": True}, few),
        "norm of heads, pairs": (
            {"qk_norm": tuple(weights[2:]), "rope": rope_tables(200, 64), "rope_interleaved": True,
             "rope_offset_q": 30}, few),
        "norm, narrow": (
            {"qk_norm": narrow}, {"head_dim": 20, "heads": (2, 1), **few}),
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
    hopper |= _scored()
    for form, deterministic in (("ordered", True), ("atomic", False)):
        for name, (options, how) in hopper.items():
            given = {**one, **how, "deterministic": deterministic, "arch": "sm_90a"}
            made[f"backward, sm90 {form}: {name}"] = partial(gradients, options, **given)
        given = {"deterministic": deterministic, "arch": "sm_90a"}
        for head_dim in (64, 96, 160):
            label = f"backward, sm90 {form}: packed, head_dim {head_dim}"
            made[label] = partial(_packed, head_dim, **given)
    for name, (options, how) in _wide().items():
        given = {**one, **how, "deterministic": True, "arch": "sm_90a"}
        made[f"backward, sm90 wide: {name}"] = partial(gradients, options, **given)
    for name, (options, how) in _in_pairs().items():
        given = {**one, **how, "deterministic": False, "arch": "sm_90a"}
        made[f"backward, sm90 pairs: {name}"] = partial(gradients, options, **given)
    return made


def _kept(rows: int, keys: int, size: int) -> Any:
    """Return a block mask for one head of each of two: every third block is left out."""
    kept = np.indices((1, 2, -(-rows // size), -(-keys // size))).sum(axis=0) % 3 > 0
    return ca.BlockMask(kept, size, size)


def _some(*shape: int) -> Any:
    """Return a mask of which a fifth is False, and all of its third row."""
    mask = np.random.default_rng(14).random(shape) < 0.8
    if shape[-2] > 2:
        mask[..., 2, :] = False
    return mask


#: Options of a call, and arguments of `gradients`.
_Calls = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def _scored() -> _Calls:
    """Return calls of the Hopper form up to head_dim 128 whose scores are changed."""
    of_keys = np.random.default_rng(15).standard_normal((2, 1, 140)).astype(np.float32)
    short, long = {"lengths": (150, 140)}, {"lengths": (150, 270), "head_dim": 128}
    return {
        "mask": ({"mask": _some(1, 2, 150, 140), "causal": True}, short),
        "mask, window, softcap": (
            {"softcap": 1.5, "mask": _some(150, 270), "window": (100, 100)}, long),
        "mask of keys": ({"mask": _some(2, 1, 140)}, {"lengths": (70, 140), "head_dim": 96}),
        "softcap": ({"softcap": 2.0, "causal": True}, {**short, "dtype": "bfloat16"}),
        "bias": (
            {"bias": aligned_bias("float16", 1, 2, 300, 140, masked=0.2), "causal": True},
            {"lengths": (300, 140)}),
        "bias, window": (
            {"bias": aligned_bias("bfloat16", 150, 270, masked=0.2), "window": (100, 100),
             "grad_bias": True}, {**long, "dtype": "bfloat16"}),
        "bias of keys, mask": (
            {"bias": of_keys, "mask": _some(2, 150, 1)}, {**short, "head_dim": 72}),
        "coarse lse": ({"bias": np.full((1, 1, 1, 140), -1e9, np.float32)}, short),
        "softcap, large scores": (
            {"softcap": 4000.0, "causal": True}, {"factor": 12.0, "lengths": (150, 140)}),
        "mask, large scores": ({"mask": _some(150, 140)}, {"factor": 12.0, **short}),
        "block mask": ({"block_mask": _kept(300, 400, 128)}, {"lengths": (300, 400)}),
        "block mask, causal": (
            {"block_mask": _kept(300, 300, 128), "causal": True},
            {"lengths": (300, 300), "head_dim": 128}),
    }  # fmt: skip


def _wide() -> _Calls:
    """Return calls of the Hopper form past head_dim 128 whose scores are changed."""
    return {
        "block mask": (
            {"block_mask": _kept(150, 270, 64)}, {"lengths": (150, 270), "head_dim": 200}),
        "softcap": (
            {"softcap": 1.5, "causal": True}, {"lengths": (150, 140), "head_dim": 256}),
        "mask, window": (
            {"mask": _some(1, 2, 150, 270), "window": (100, -1)},
            {"lengths": (150, 270), "head_dim": 160, "dtype": "bfloat16"}),
        "mask of keys, softcap": (
            {"mask": _some(2, 1, 140), "softcap": 1.5}, {"lengths": (70, 140), "head_dim": 256}),
    }  # fmt: skip


def _in_pairs() -> _Calls:
    """Return calls of the kernel past head_dim 128 that runs in pairs of blocks."""
    d_lse = 4 * np.random.default_rng(16).standard_normal((1, 2, 70)).astype(np.float32)
    return {
        "head_dim 136": ({}, {"lengths": (330, 100), "head_dim": 136}),
        "causal": ({"causal": True}, {"lengths": (150, 270), "head_dim": 160}),
        "of lse": ({"d_lse": d_lse}, {"lengths": (70, 140), "head_dim": 256}),
        "window": (
            {"window": (150, 40)}, {"lengths": (150, 270), "head_dim": 256, "dtype": "bfloat16"}),
        "rows without keys": ({"causal": True}, {"lengths": (300, 100), "head_dim": 200}),
        "large scores": (
            {"causal": True}, {"factor": 12.0, "lengths": FEWER, "head_dim": 160}),
    }  # fmt: skip
