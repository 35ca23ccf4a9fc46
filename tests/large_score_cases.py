"""Finite float16 inputs of any size, and what is owed them: a finite result, no black image.

Scores past 2^27 are ones whose differences float32 hardly holds; no bound is promised of them
(docs/MATH_REFERENCE.md, §9). But weights stay weights: every row is a mean of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyattn import attention
from cupyattn.quant import QuantConfig
from cupyattn.rounding import STORAGE
from tests.runs import bits, on_host

HEAD_DIM = 64
LARGEST = 65504.0
#: Of means of values: the type's own rounding, of P and of the result.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20}
Move = Callable[[Any], Any]


class Form(NamedTuple):
    """What takes a call: the rung, its architecture, how to quantise; and its type and lengths."""

    variant: str
    arch: str = "sm_90"
    quant: dict[str, Any] | None = None
    dtype: str = "float16"
    lengths: tuple[int, int] = (20, 140)


#: What keeps every row a mean of its values, by name.
FORMS = {
    "unfused": Form("unfused"),
    "fa": Form("fa"),
    "fa, float32": Form("fa", dtype="float32"),
    "fa_warps": Form("fa_warps"),
    "fa_tc": Form("fa_tc"),
    "fa_tc, bfloat16": Form("fa_tc", dtype="bfloat16"),
    "fa_tc, split": Form("fa_tc", lengths=(5, 600)),
    "fa_tc, sm90": Form("fa_tc", "sm_90a"),
    "fa_tc, sm90, bfloat16": Form("fa_tc", "sm_90a", dtype="bfloat16"),
    "fa_int8": Form("fa_int8", quant={}),
    "fa_int8, scales by key": Form("fa_int8", quant={"granularity_k": "thread"}),
    "fa_int8, fused": Form(
        "fa_int8", quant={"fused": True, "granularity_q": "block", "granularity_k": "block"}
    ),
    "fa_int8, sm90": Form("fa_int8", "sm_90a", {}),
    "pv8": Form("fa_int8", quant={"pv": "int8"}),
    "pv8, s8": Form("fa_int8", quant={"pv": "int8", "p_type": "s8"}),
    "pv8_whole": Form("fa_int8", quant={"pv": "int8", "granularity_v": "channel"}),
    "sm90_pv8": Form("fa_int8", "sm_90a", {"pv": "int8", "granularity_v": "channel"}),
}
#: Where such rows may come out as 0, but never as what is not finite: 8-bit floats, whose weights
#: are summed as they are, and compute capability 8.0, where codes do not saturate.
FLUSHING = {
    "e4m3": Form("fa_int8", quant={"pv": "fp8"}),
    "sm90_fp8": Form("fa_int8", "sm_90a", {"pv": "fp8", "granularity_v": "channel"}),
    "pv8 of 8.0": Form("fa_int8", "sm_80", {"pv": "int8"}),
}
ALL = FORMS | FLUSHING
#: Those that multiply Q and K as they are.
WHOLE = [name for name, form in FORMS.items() if form.quant is None]
KINDS = ("normal", "constant", "opposed", "one key", "two levels", "spike", "sparse")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def operands(kind: str, size: float, seed: int, form: Form) -> Arrays:
    """Draw Q and K of a kind, up to `size`, and V from 1 to 2."""
    rng = np.random.default_rng(seed)
    len_q, len_kv = form.lengths
    q, k = (np.full((1, 1, length, HEAD_DIM), size) for length in form.lengths)
    if kind == "normal":
        q, k = (rng.standard_normal(x.shape) * size / 4 for x in (q, k))
    elif kind == "opposed":
        k = -k * rng.uniform(0.9, 1, (len_kv, 1))
    elif kind == "one key":
        k = np.broadcast_to(rng.standard_normal(HEAD_DIM) * size / 4, k.shape)
    elif kind == "two levels":
        k[:, :, : len_kv // 4] *= -1
    elif kind == "spike":
        k *= 0
        k[..., rng.integers(len_kv), rng.integers(HEAD_DIM)] = size * rng.choice([-1, 1])
    elif kind == "sparse":
        q, k = (x * (rng.random(x.shape) < 0.02) * rng.choice([-1, 1], x.shape) for x in (q, k))
    elif kind == "ties":  # of one product each, whose sum has no order
        q *= (np.arange(HEAD_DIM) == 7) * rng.choice([-1, 1], (len_q, 1))
        k *= rng.integers(4, 8, (len_kv, 1)) / 8
    q, k = (np.clip(x, -LARGEST, LARGEST).astype(np.float16) for x in (q, k))
    v = rng.uniform(1, 2, k.shape).astype(np.float16)
    return tuple(x.astype(STORAGE[form.dtype]) for x in (q, k, v))


def call(form: Form, given: Arrays, backend: str, move: Move, **options: Any) -> list[np.ndarray]:
    """Return O, and lse where it is asked for, of arrays that must stay what they were."""
    moved = tuple(move(x) for x in given)
    found = attention(*moved, variant=form.variant, arch=form.arch, backend=backend, **options)
    for x, unmoved in zip(moved, given, strict=True):
        assert bits(x) == bits(unmoved)
    return [on_host(x).astype(np.float32) for x in (found if type(found) is tuple else (found,))]


def check(
    name: str, kind: str, size: float, seed: int, backend: str, move: Move, **options: Any
) -> None:
    """Hold results of finite inputs to be finite, and rows to be means of their values."""
    form, smooth_k = ALL[name], options.pop("smooth_k")
    if form.quant is not None:
        smooth_k = smooth_k and not form.quant.get("fused")
        options["quant"] = QuantConfig(**form.quant, smooth_k=smooth_k)
    o, *lse = call(form, operands(kind, size, seed, form), backend, move, **options)
    assert np.isfinite(o).all()
    if name in FORMS:
        assert all(np.isfinite(x).all() for x in lse)
        # Of codes of V an error of half a step in 127, of P of the like; of 16 bits less.
        assert o.min() >= 1 - 0.02 and o.max() <= 2 + 0.02


def ties(form: Form, size: float, seed: int) -> tuple[Arrays, np.ndarray]:
    """Draw keys that share the largest score of a row, all others being far behind; and O."""
    q, k, v = operands("ties", size, seed, form)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3)
    largest = scores == scores.max(axis=-1, keepdims=True)
    return (q, k, v), largest @ v.astype(np.float64) / largest.sum(axis=-1, keepdims=True)


def check_ties(name: str, size: float, seed: int, backend: str, move: Move) -> None:
    """Hold rows to be the means of what shares their largest score."""
    given, expected = ties(ALL[name], size, seed)
    (o,) = call(ALL[name], given, backend, move)
    np.testing.assert_allclose(o, expected, rtol=TOLERANCE[ALL[name].dtype])
