"""A call is its description: every operation resolves to equal problems from equal forms, and holds
none of the arrays that it was described by."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import unfused
from cupyattn.arrays.described import Described
from cupyattn.arrays.form import form_of
from cupyattn.diffusion import pruning
from cupyattn.distributed import merging
from cupyattn.ops import (
    act_quant,
    attention,
    backward,
    gemm,
    layers,
    norm_quant,
    quantize,
    weights,
)
from cupyattn.ops.call_operands import arguments_of
from cupyattn.ops.operation import problem_of
from cupyattn.problem.problem import Problem
from cupyattn.problem.settings import Settings

#: An operation, its settings and its arrays by buffer.
Call = tuple[Any, Any, dict[str, Any]]
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array at any address, of rows at any distance, every second element of them or all."""
    step = draw(st.sampled_from((1, 1, 2)))
    whole = (*shape[:-1], step * shape[-1] + draw(st.sampled_from((0, 0, 8))))
    size = np.dtype(dtype).itemsize
    held = np.zeros(math.prod(whole) * size + 32, np.uint8)
    start = -held.ctypes.data % 16 + draw(st.sampled_from((0, 0, size, 1)))
    flat = held[start : start + math.prod(whole) * size].view(dtype)
    found: np.ndarray = flat.reshape(whole)[..., : step * shape[-1] : step]
    return found


@st.composite
def of_attention(draw: st.DrawFn) -> tuple[Settings, dict[str, Any]]:
    batch, heads, len_q, len_kv = (draw(st.integers(1, n)) for n in (2, 4, 20, 70))
    heads_kv = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    dtype, head_dim = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((8, 24, 64)))
    rows = {"q": (heads, len_q), "k": (heads_kv, len_kv), "v": (heads_kv, len_kv)}
    arrays = {n: draw(placed((batch, *s, head_dim), dtype)) for n, s in rows.items()}
    others = {
        "mask": ((len_q, len_kv), np.bool_), "bias": ((1, 1, len_kv), np.float32),
        "lengths_kv": ((batch,), np.int64), "out": ((batch, heads, len_q, head_dim), dtype),
    }  # fmt: skip
    for name in draw(st.sets(st.sampled_from([*others]))):
        arrays[name] = draw(placed(*others[name]))
        if name == "out":
            arrays[name] = np.zeros(*others[name])
    if draw(st.booleans()):
        table = (len_q + len_kv, head_dim // 2), draw(st.sampled_from(DTYPES))
        arrays["rope"] = draw(placed(*table)), draw(placed(*table))
    rung = draw(st.sampled_from(("auto", "unfused", "fa", "fa_int8")))
    arch = draw(st.sampled_from((None, "sm_80", "sm_90a")))
    causal = draw(st.booleans())
    settings = Settings(variant=rung, arch=arch, causal=causal, backend="interpret")
    return settings, arrays


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of any operation."""
    m, k, n = (draw(st.integers(1, most)) for most in (40, 300, 200))
    f16, f32, i8 = np.float16, np.float32, np.int8
    blocks = -(-k // 128)
    product = {
        "a": ((m, k), i8), "a_scales": ((m, blocks), f32), "b": ((n, k), i8),
        "b_scales": ((-(-n // 128), blocks), f32),
    }  # fmt: skip
    rows = dict.fromkeys(("q", "k", "v"), ((1, 2, m, 16), f16))
    scores, lse = ((1, 2, m, m), f32), ((1, 2, m), f32)
    made: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
        "act_quant": lambda: (
            act_quant.ACT_QUANT, act_quant.ActQuantSettings(128, "interpret"), {"x": ((m, k), f16)},
        ),
        "norm_quant": lambda: (
            norm_quant.NORM_QUANT,
            norm_quant.NormQuantSettings("layer", None, None, 1e-6, "channel", "interpret"),
            {"x": ((m, k), f16), "weight": ((k,), f32), "scale": ((m, k), f16)},
        ),
        "weight_quant": lambda: (
            weights.WEIGHT_QUANT, weights.WeightSettings(64, "interpret"), {"w": ((m, n, 2), f32)},
        ),
        "weight_dequant": lambda: (
            weights.WEIGHT_DEQUANT, weights.WeightSettings(128, "interpret", "float16"),
            {"codes": product["b"], "scales": product["b_scales"]},
        ),
        "int8_gemm": lambda: (
            gemm.GEMM, gemm.GemmSettings("float16", "", None, None, "interpret"), product
        ),
        "int8_layers": lambda: (
            layers.LAYERS, layers.LayersSettings("float16", ("",), "sm_90", "interpret"),
            {"x": ((m, k), f16), "b0": product["b"], "b_scales0": product["b_scales"]},
        ),
        "quantize": lambda: (
            quantize.QUANTIZE, quantize.QuantizeSettings(backend="interpret"), rows
        ),
        "key_importance": lambda: (
            pruning.IMPORTANCE, pruning.ImportanceSettings(None, 8, "interpret", None, False),
            {"q": rows["q"], "k": rows["k"]},
        ),
        "compact": lambda: (
            pruning.COMPACT, (1, "interpret"), {"v": rows["v"], "importance": lse}
        ),
        "merge_partials": lambda: (
            merging.MERGE, ("interpret", "float16"),
            dict.fromkeys(("part_O", "O", "before_O"), rows["q"])
            | {"part_lse": lse, "lse": lse},
        ),
        "softmax": lambda: (unfused.SOFTMAX, True, {"S_in": scores}),
        "weighted_sum": lambda: (unfused.WEIGHTED_SUM, None, {"v": rows["v"], "S": scores}),
        "scores": lambda: (unfused.SCORES, {"causal": True}, {"q": rows["q"], "k": rows["k"]}),
    }  # fmt: skip
    which = draw(st.sampled_from(["attention", "codes", "attention_backward", *made]))
    if which == "attention":
        asked, arrays, _ = arguments_of(*draw(of_attention()))
        return attention.ATTENTION, asked, arrays
    arrays = {n: draw(placed(*form)) for n, form in (rows if which not in made else {}).items()}
    if which == "codes":
        z = ca.quantize(*arrays.values())
        given = {"q": z, "k": None, "v": None}
        asked, arrays, _ = arguments_of(Settings(backend="interpret"), given)
        return attention.ATTENTION, asked, arrays
    if which == "attention_backward":
        arrays |= {"d_out": draw(placed(*rows["q"])), "out": draw(placed(*rows["q"]))}
        arrays["lse"] = draw(placed(*lse))
        of_call = Settings(variant="fa_tc", return_lse=True, backend="interpret")
        asked, own, _ = backward.arguments_of_backward(backward.BackwardSettings(of_call), arrays)
        return backward.BACKWARD, asked, own
    operation, settings, forms = made[which]()
    return operation, settings, {name: draw(placed(*form)) for name, form in forms.items()}


def held(x: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays that a value holds."""
    if isinstance(x, np.ndarray):
        yield x
    elif depth < 6:
        inner = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
        if isinstance(x, Problem):
            inner = [getattr(x, one.name) for one in fields(x)]
        for one in inner:
            yield from held(one, depth + 1)


@given(calls())
def test_equal_forms_are_equal_problems_without_arrays(call: Call) -> None:
    operation, settings, arrays = call
    first = problem_of(operation, settings, arrays)
    forms = pickle.loads(pickle.dumps([form_of(name, x) for name, x in arrays.items()]))
    assert not [*held(first)], operation.name
    for array in arrays.values():  # nothing but their forms is left
        array[...] = 1
    del call, arrays
    again = problem_of(operation, settings, {form[0]: Described(*form) for form in forms})
    assert again == first and {first: 1}[again], operation.name


@pytest.mark.parametrize("step", ["swapaxes", "front", "rows", "columns", "broadcast", "whole"])
@given(array=placed((3, 4, 8), np.float16))
def test_what_is_described_is_what_is_bound(step: str, array: np.ndarray) -> None:
    """Shape, strides and alignment of the view or copy that a call reads."""
    x = Described.of("x", array)
    made = {
        "swapaxes": lambda: x.swapaxes(0, 2), "front": x.front, "rows": x.rows,
        "columns": x.columns, "broadcast": lambda: x.broadcast_to((2, 3, 4, 8)), "whole": x.whole,
    }[step]()  # fmt: skip
    found = made.bound(array)
    assert (made.shape, made.dtype) == (found.shape, found.dtype)
    steps = [(n, s) for n, s in zip(found.shape, found.strides, strict=True) if n > 1]
    assert [(n, s) for n, s in zip(made.shape, made.strides, strict=True) if n > 1] == steps
    assert made.is_copied != np.shares_memory(found, array)
    np.testing.assert_array_equal(found.reshape(-1)[:1], array.reshape(-1)[:1])
