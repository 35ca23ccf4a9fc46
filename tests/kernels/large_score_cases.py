"""Finite float16 inputs of any size must give a finite result, and no black image.

Scores past 2^27 are ones whose differences float32 hardly holds; no bound is promised of them
(docs/MATH_REFERENCE.md, §18). But weights stay weights: every row is a mean of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyattn import attention, quantize
from cupyattn.arrays.kinds import STORAGE
from cupyattn.quant import QuantConfig
from tests.support.runs import bits, on_host, quantiser

HEAD_DIM = 64
LARGEST = 65504.0
#: Of means of values: the type's own rounding, of P and of the result.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20}
Move = Callable[[Any], Any]


class Form(NamedTuple):
    """Form of a call: the rung, its architecture, quantisation, type and lengths."""

    variant: str
    arch: str = "sm_90"
    quant: dict[str, Any] | None = None
    dtype: str = "float16"
    lengths: tuple[int, int] = (20, 140)


#: Options that keep every row a mean of its values, by name.
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
    "v8": Form("fa_int8", quant={"pv": "int8", "p_type": "16bit"}),
    "pv8": Form("fa_int8", quant={"pv": "int8"}),
    "pv8, s8": Form("fa_int8", quant={"pv": "int8", "p_type": "s8"}),
    "pv8_whole": Form("fa_int8", quant={"pv": "int8", "granularity_v": "channel"}),
    "sm90_pv8": Form("fa_int8", "sm_90a", {"pv": "int8", "granularity_v": "channel"}),
    "sm90_pv8_by_tile": Form("fa_int8", "sm_90a", {"pv": "int8"}),
}
#: Where such rows may come out as 0, but never as what is not finite: 8-bit floats, whose weights
#: are summed as they are, and compute capability 8.0, where codes do not saturate.
FLUSHING = {
    "e4m3": Form("fa_int8", quant={"pv": "fp8"}),
    "sm90_fp8": Form("fa_int8", "sm_90a", {"pv": "fp8", "granularity_v": "channel"}),
    "pv8 of 8.0": Form("fa_int8", "sm_80", {"pv": "int8"}),
}
ALL = FORMS | FLUSHING
#: Forms of Hopper.
HOPPER = [name for name, form in ALL.items() if form.arch == "sm_90a"]
#: Rungs that multiply Q and K without codes.
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
    operands: tuple[Any, ...] = moved
    quant = options.get("quant")
    if backend == "interpret" and quant is not None and not quant.fused:
        del options["quant"]
        operands = (quantize(*moved, quant=quant, backend=quantiser(backend), arch=form.arch),)
    found = attention(*operands, variant=form.variant, arch=form.arch, backend=backend, **options)
    for x, unmoved in zip(moved, given, strict=True):
        assert bits(x) == bits(unmoved)
    return [on_host(x).astype(np.float32) for x in (found if type(found) is tuple else (found,))]


def config(form: Form, *, smooth_k: bool = True, smooth_v: bool = False) -> QuantConfig:
    """Return how a form quantises: keys are smoothed only where it can."""
    quant = form.quant or {}
    smooth_k = smooth_k and not quant.get("fused")
    return QuantConfig(**quant, smooth_k=smooth_k, smooth_v=smooth_v)


def check(
    name: str, kind: str, size: float, seed: int, backend: str, move: Move, **options: Any
) -> None:
    """Hold results of finite inputs to be finite, and rows to be means of their values."""
    form, smooth_k = ALL[name], options.pop("smooth_k")
    if form.quant is not None:
        options["quant"] = config(form, smooth_k=smooth_k)
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


#: Forms that store float16, all of which owe results within its range.
OF_FLOAT16 = [name for name, form in ALL.items() if form.dtype == "float16"]
VALUES = ("constant", "either sign", "one sign", "levels", "spike", "normal")


def values(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw V of a kind, as large as float16 has numbers."""
    rng = np.random.default_rng(seed)
    v = np.full(shape, LARGEST)
    if kind == "either sign":
        v *= rng.choice([-1, 1], shape)
    elif kind == "one sign":
        v *= rng.uniform(0.99, 1, shape) * rng.choice([-1, 1], (1, 1, 1, HEAD_DIM))
    elif kind == "levels":  # a mean between them, from which codes round past the larger one
        v = np.where(rng.random(shape) < 0.02, -LARGEST, rng.uniform(0.98, 1, shape) * LARGEST)
    elif kind == "spike":
        v = np.where(rng.random(shape) < 0.02, LARGEST, 0.0)
    elif kind == "normal":
        v = np.clip(rng.standard_normal(shape) * LARGEST / 4, -LARGEST, LARGEST)
    return v.astype(np.float16)


def check_values(
    name: str, kind: str, seed: int, backend: str, move: Move, *, smooth_v: bool = False
) -> None:
    """Hold rows of V up to the largest float16 to be finite, and near to means of them."""
    form = ALL[name]
    q, k, _ = operands("normal", 8.0, seed, form)
    v = values(kind, k.shape, seed)
    options: dict[str, Any] = {}
    if form.quant is not None:
        options["quant"] = config(form, smooth_v=smooth_v and "pv" in form.quant)
    (o,) = call(form, (q, k, v), backend, move, **options)
    assert np.isfinite(o).all()
    x = v.astype(np.float32)
    # Weights in e4m3 err by a sixteenth, which their sum does not know of; codes by half a step.
    of_weights = 2.0**-4 if name.endswith(("e4m3", "fp8")) else 2.0**-7
    slack = np.abs(x).max() * of_weights + (x.max() - x.min()) * 2.0**-7
    assert o.min() >= x.min() - slack and o.max() <= x.max() + slack


#: Forms with P in 16 bits, whose rounding the sum of weights need not have.
ROUNDING = [n for n in OF_FLOAT16 if n.startswith("fa_") and n != "fa_warps"]
#: Distances of keys from the largest score: P of most of them is rounded up in float16.
BEHIND = (0.62109375, 1.3115234375, 1.34375, 2.001953125)
#: Forms that multiply V as it is.
OF_V = [name for name in OF_FLOAT16 if "pv" not in (ALL[name].quant or {})]


def rounded_up(form: Form, behind: float) -> Arrays:
    """Return keys one of which holds the maximum, all others being `behind`; V is constant."""
    q, k = (np.zeros((1, 1, length, HEAD_DIM), np.float16) for length in form.lengths)
    q[..., 0], k[:, :, 1:, 0] = 8.0, -behind
    return q, k, np.full(k.shape, LARGEST, np.float16)


def check_rounded_up(name: str, behind: float, backend: str, move: Move) -> None:
    """Hold a constant V, the largest float16, to come back, rounded down by P at most."""
    (o,) = call(ALL[name], rounded_up(ALL[name], behind), backend, move)
    assert o.max() <= LARGEST and o.min() >= LARGEST * (1 - 2.0**-10)


def check_infinite(name: str, value: float, backend: str, move: Move) -> None:
    """Hold a channel of V with an infinity or a NaN to be that, and the others to be finite."""
    form = ALL[name]
    q, k, v = operands("normal", 1.0, 0, form)
    v[:, :, 3, 5] = value
    options = {} if form.quant is None else {"quant": config(form)}
    (o,) = call(form, (q, k, v), backend, move, **options)
    np.testing.assert_array_equal(o[..., 5], np.float32(value))
    assert np.isfinite(np.delete(o, 5, axis=-1)).all()


def check_empty_rows(name: str, backend: str, move: Move) -> None:
    """Hold rows without keys to be 0 beside a NaN of Q and, of V in one unit, an infinity."""
    form = ALL[name]._replace(lengths=(70, 40))
    q, k, v = operands("normal", 1.0, 0, form)
    q[:, :, [7, 12, 50], 3] = np.nan  # in both halves of a fragment, and one with keys
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    if form.quant is not None:
        options["quant"] = config(form, smooth_v="pv" in form.quant)
        if "pv" in form.quant and not name.startswith(("pv8", "e4m3")) or name == "pv8_whole":
            v[:, :, 3, 5] = np.inf
    o, lse = call(form, (q, k, v), backend, move, **options)
    assert not o[:, :, :30].any() and (lse[:, :, :30] == -np.inf).all()
    assert np.isnan(o[:, :, 50]).all() and np.isnan(lse[:, :, 50]).all()
