"""Padded batches with lengths of their entries, on the mirror and in the interpreter.

Every entry is what `attention` makes of it cut to its lengths, bit for bit; padding is NaN.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyattn import (
    BlockMask,
    QuantConfig,
    attention,
    attention_backward,
    attention_varlen,
    explain,
    explain_backward,
    plan,
    quantize,
)  # fmt: skip
from cupyattn.errors import UnsupportedError
from tests.support import runs
from tests.support.padded import LENGTHS, NAMES, SIZES, assert_as_alone, padded, run_padded
from tests.support.runs import Guarded, asked_for, bits, rope_tables

RUNGS = ("unfused", "fa", "fa_warps", "fa_tc", "fa_int8")
CELLS = [(rung, dtype) for rung, dtype in runs.CELLS if rung in RUNGS]
#: Options whose places depend on the lengths of an entry, and options that do not.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {},
    {"causal": True, "causal_align": "top-left", "scale": 0.2},
    {"window": (9, 3)},
    {"window": (4, -1), "causal_align": "top-left", "softcap": 2.0},
    {"window": (2**40, 5)},
)


def scored(heads: int = 2) -> dict[str, Any]:
    """Return a mask, a bias and a block mask of `SIZES`, an entry's own each."""
    rng = np.random.default_rng(0)
    shape = (len(LENGTHS), heads, *SIZES)
    bias = rng.standard_normal(shape).astype(np.float32)
    bias[rng.random(shape) < 0.1] = -np.inf
    blocks = rng.random((len(LENGTHS), heads, 1, 2)) < 0.7
    return {"mask": rng.random(shape) < 0.7, "bias": bias, "block_mask": BlockMask(blocks, 64, 64)}


def as_alone(rung: str, dtype: str = "float16", heads_kv: int = 1, **options: Any) -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, heads_kv, dtype=dtype)
    assert_as_alone(inputs, lengths, {**asked_for(rung), **options})


# ---- each entry is as if alone -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "dtype", "turn"),
    [
        ("fa_tc", "float16", 0),
        *(
            pytest.param(*cell, turn, marks=pytest.mark.slow)
            for cell in CELLS
            for turn in (0, 1)
            if (*cell, turn) != ("fa_tc", "float16", 0)
        ),
    ],
)  # fmt: skip
def test_the_kernels_take_every_entry_for_itself(rung: str, dtype: str, turn: int) -> None:
    """Features rotate over storage types, so that each rung meets all of them, with the slow."""
    first = runs.variant_of(rung).dtypes.index(dtype)
    as_alone(rung, dtype, backend="interpret", **OPTIONS[first + 3 * turn])


@pytest.mark.parametrize("rung", [*RUNGS, "fa_int8@pv8"])
def test_the_mirror_takes_every_entry_for_itself(rung: str) -> None:
    for options in (*OPTIONS, scored(), {**scored(), "causal": True}):
        as_alone(rung, backend="mirror", heads_kv=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [*RUNGS, "fa_int8@pv8"])
def test_the_kernels_take_of_masks_and_positions_what_is_of_an_entry(rung: str) -> None:
    tables = {"rope": rope_tables(80, 32), "rope_offset_q": 3}
    as_alone(rung, backend="interpret", causal=True, **scored(), **tables)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rung", "backend"),
    [
        ("fa_tc", "mirror"), ("fa_int8", "mirror"), ("fa_tc", "interpret"),
        pytest.param("fa_int8", "interpret", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_lengths_of_queries_or_of_keys_alone(name: str, rung: str, backend: str) -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    whole = runs.normal(inputs[0].shape, inputs[1].shape)
    inputs = (inputs[0], *whole[1:]) if name == "lengths_q" else (whole[0], *inputs[1:])
    asked = {**asked_for(rung), "backend": backend, "causal": True}
    assert_as_alone(inputs, {name: lengths[name]}, asked)


@pytest.mark.parametrize(
    "quant",
    [
        QuantConfig("tensor", "tensor"),
        QuantConfig("head", "block"),
        QuantConfig("token", "token", symmetric=False),
        QuantConfig("tensor", "tensor", scales=(0.02, np.float32([0.03]).reshape(1, 1, 1))),
        QuantConfig("tensor", "head", scales=(0.02, np.float32([[[0.03]], *[[[0.02]]] * 4]))),
        QuantConfig(pv="fp8"),
        QuantConfig(pv="int8", symmetric=False),
        QuantConfig(pv="int8", granularity_v="channel"),
        QuantConfig(smooth_k=False, fused=True),
        QuantConfig(qk_bits=4),
    ],
)
@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
def test_rows_that_count_alone_are_quantised(quant: QuantConfig, backend: str) -> None:
    as_alone("fa_int8", quant=quant, backend=backend)


@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
def test_rows_are_prepared_as_ever(backend: str) -> None:
    weights = np.random.default_rng(1).uniform(0.5, 2, (2, 32)).astype(np.float32)
    prepared = {"rope": rope_tables(80, 32), "qk_norm": (weights[0], weights[1])}
    for rung in ("fa", "fa_tc", "fa_int8"):
        as_alone(rung, backend=backend, **prepared)


@pytest.mark.parametrize("backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "quant",
    [
        QuantConfig(), QuantConfig("tensor", "head", symmetric=False), QuantConfig(qk_bits=4),
        QuantConfig(pv="int8"), QuantConfig(pv="fp8"),
    ],
)  # fmt: skip
def test_a_record_is_cut_to_lengths(quant: QuantConfig, backend: str) -> None:
    """Its padding is finite. The mask of the same keys has the same scores, and so the same bits
    where no maximum lags behind."""
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    inputs = tuple(np.nan_to_num(x) for x in inputs)
    z = quantize(*inputs, quant=quant)
    o, lse = attention(z, return_lse=True, backend=backend, **lengths)
    keys = np.arange(SIZES[1]) < lengths["lengths_kv"][:, None]
    expected, expected_lse = attention(
        z, return_lse=True, backend=backend, mask=keys[:, None, None]
    )
    for number, (count, _) in enumerate(LENGTHS):
        assert bits(o[number, :, :count]) == bits(expected[number, :, :count])
        assert bits(lse[number, :, :count]) == bits(expected_lse[number, :, :count])
        assert not o[number, :, count:].any() and (lse[number, :, count:] == -np.inf).all()


# ---- judged --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "backend"),
    [
        *((rung, "mirror") for rung in (*RUNGS, "fa_int8@pv8")),
        ("fa_tc", "interpret"), ("fa_int8", "interpret"),
        pytest.param("fa_int8@pv8", "interpret", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_within_the_bound(rung: str, backend: str) -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    for one in run_padded(rung, inputs, lengths, backend=backend, causal=True):
        one.check()


def test_the_bound_notices_the_length_of_another_entry() -> None:
    inputs, lengths = padded(((40, 70), (40, 60)), SIZES, 2, 1)
    inputs = tuple(np.nan_to_num(x, nan=1.0) for x in inputs)
    runs_of = run_padded("fa_tc", inputs, lengths)
    wrong = run_padded("fa_tc", inputs, {**lengths, "lengths_kv": lengths["lengths_kv"][::-1]})
    for right, mistaken in zip(runs_of, wrong, strict=True):
        assert right.judge().passed
        assert not replace(right, o=mistaken.o, lse=mistaken.lse).judge().passed


# ---- results and arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["fa_tc", pytest.param("unfused", marks=pytest.mark.slow)])
def test_results_are_written_in_full_and_nothing_beside_them(rung: str) -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    out = Guarded.empty(inputs[0].shape, "float16")
    options = {**asked_for(rung), "backend": "interpret", **lengths}
    o = attention(*inputs, out=out.array, **options)
    assert o is out.array
    out.check()
    wide = np.full((*o.shape[:3], 48), np.nan, np.float16)
    view = wide[..., ::-1, 1:33]  # of another width of access
    attention(*inputs, out=view, **options)
    assert bits(view) == bits(o) and np.isnan(wide[..., 33:]).all()


def test_another_layout_has_the_same_numbers() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs]
    for backend in ("mirror", "interpret"):
        options = {"variant": "fa_tc", "backend": backend, **lengths}
        o = attention(*turned, layout="BSHD", **options)
        assert bits(o.swapaxes(1, 2)) == bits(attention(*inputs, **options))


def test_every_kind_of_array_that_holds_the_lengths() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    expected = bits(attention(*inputs, **lengths))
    longer = {name: x.astype(np.int64) for name, x in lengths.items()}
    strided = {name: np.repeat(x, 2)[::2] for name, x in longer.items()}
    huge = {**longer, "lengths_kv": longer["lengths_kv"] + (longer["lengths_kv"] == 99) * 2**40}
    for given in (longer, strided, huge):
        assert bits(attention(*inputs, **given)) == expected


def test_a_prepared_call_takes_other_lengths() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    inputs = tuple(np.nan_to_num(x) for x in inputs)
    other = {name: x[::-1].copy() for name, x in lengths.items()}
    for backend in ("mirror", "interpret"):
        options = {"variant": "fa_tc", "backend": backend}
        prepared = plan(*inputs, **options, **lengths)
        assert bits(prepared(*inputs)) == bits(attention(*inputs, **options, **lengths))
        assert bits(prepared(*inputs, **other)) == bits(attention(*inputs, **options, **other))
        with pytest.raises(TypeError, match="a prepared call takes mask, bias, .*got 'lengths'"):
            prepared(*inputs, lengths=lengths["lengths_q"])
        with pytest.raises(ValueError, match="was not given when the call was planned"):
            plan(*inputs, **options)(*inputs, **other)


@pytest.mark.parametrize("kind", ["int32", "int64", "every other"])
def test_a_prepared_call_reads_what_its_lengths_hold_by_then(kind: str) -> None:
    q, k, v = runs.normal((2, 2, 20, 16), (2, 2, 20, 16))
    lengths = np.array([5, 9, 9, 3], "int64" if kind == "int64" else "int32")
    lengths = lengths[::2] if kind == "every other" else lengths[:2].copy()
    prepared = plan(q, k, v, lengths_kv=lengths)
    before = prepared(q, k, v)
    lengths[:] = 1
    expected = attention(q, k, v, lengths_kv=lengths)
    assert bits(prepared(q, k, v)) == bits(expected) != bits(before)


def test_only_rows_that_count_have_to_be_finite() -> None:
    q, k, v = runs.normal((2, 2, 20, 16), (2, 2, 20, 16))
    lengths = np.int32([5, 9])
    k[:, :, 9:] = np.nan
    attention(q, k, v, lengths_kv=lengths, check_finite=True)
    k[1, 0, 8, 3] = np.inf
    with pytest.raises(ValueError, match="k holds a NaN or an infinity"):
        attention(q, k, v, lengths_kv=lengths, check_finite=True)


def test_the_plan_makes_no_mask_and_clears_the_padding_alone() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    both = explain(*inputs, variant="fa_tc", causal=True, **lengths)
    assert "rows of an entry count up to its lengths_q and lengths_kv" in both
    assert "row i attends key j of its entry where j <= i + len_kv - len_q +0" in both
    assert "clear_padding<<<" in both and "padded=True" in both and "mask" not in both
    keys = explain(*inputs, variant="fa_tc", lengths_kv=lengths["lengths_kv"])
    assert "clear_padding" not in keys and "workspace 0 bytes" in keys


def test_what_does_not_fit_is_refused() -> None:
    inputs, lengths = padded(LENGTHS, SIZES, 2, 1)
    for wrong, what in (
        (np.zeros(5, np.float32), "float32 of shape (5,)"), (np.zeros(4, np.int32), "(4,)"),
        (np.zeros((5, 1), np.int32), "(5, 1)"),
    ):  # fmt: skip
        message = "lengths_kv must be int32 or int64 of shape (batch,) = (5,), got "
        with pytest.raises(ValueError, match=re.escape(message) + ".*" + re.escape(what)):
            attention(*inputs, lengths_kv=wrong)
    ends = np.int32([0, 70])
    packed = [x[0].swapaxes(0, 1) for x in inputs[1:]]
    with pytest.raises(TypeError, match="give one of both pairs"):
        explain(
            packed[0], *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_len_q=70, max_len_k=70,
            lengths_q=ends[:1],
        )  # fmt: skip
    z = quantize(packed[0], *packed, cu_seqlens_q=ends, cu_seqlens_k=ends)
    with pytest.raises(TypeError, match="holds packed sequences: give no lengths_q"):
        explain(z, **lengths)
    of_tokens = np.full((5, 2, 40), 0.02, np.float32), np.full((5, 1, 70), 0.02, np.float32)
    with pytest.raises(UnsupportedError, match="beside lengths_q or lengths_kv, are supported"):
        quant = QuantConfig("token", "token", scales=of_tokens)
        attention(*inputs, variant="fa_int8", quant=quant, **lengths)


def test_functions_without_lengths_say_what_to_do() -> None:
    x, lengths = np.ones((1, 1, 4, 8), np.float16), {"lengths_kv": np.int32([3])}
    lse = np.zeros((1, 1, 4), np.float32)
    with pytest.raises(UnsupportedError, match="attention_backward takes no lengths_kv: call it"):
        attention_backward(x, x, x, x, x, lse, **lengths)
    with pytest.raises(UnsupportedError, match="the backward pass takes no lengths_q or"):
        explain_backward(x, x, x, x, x, lse, **lengths)
    with pytest.raises(UnsupportedError, match="attention_varlen takes no lengths_kv: call it"):
        attention_varlen(x[0], x[0], x[0], **lengths)
