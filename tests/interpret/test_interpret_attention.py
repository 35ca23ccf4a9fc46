"""Whole calls in the interpreter: J1, J2 and J3 of every rung, and its kernels' memory accesses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyattn import strategies
from cupyattn.arrays.kinds import STORAGE
from cupyattn.interpret import executor
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.reference.quantize import quantize_mirror
from tests.quant.quant_inputs import DTYPES, assert_mean, operand
from tests.support import runs
from tests.support.marks import slow_unless
from tests.support.problems import drawn_values
from tests.support.runs import (
    CELLS,
    PLAIN,
    RUNGS,
    Arrays,
    Guarded,
    Run,
    bits,
    embedded,
    form_taken,
    normal,
)

#: Query and key lengths on both sides of the edges of tiles (16, 32, 64), and far from square.
LENGTHS = [(1, 77), (33, 64), (66, 129), (70, 5)]


def arch_of(rung: str) -> str | None:
    return "sm_90a" if rung.endswith("@sm90") else None


def head_dims(rung: str) -> tuple[int, int]:
    """Return a head size of its own tile, and one that pads: small ones take less time."""
    return (64, 36) if rung.endswith("@sm90") else (32, 20)


def run(rung: str, inputs: Arrays, **options: Any) -> Run:
    return runs.run(rung, inputs, arch=arch_of(rung), backend="interpret", **options)


def attend(rung: str, *operands: Any, **options: Any) -> Any:
    return runs.attend(rung, *operands, arch=arch_of(rung), backend="interpret", **options)


# ---- J2 and J3 -----------------------------------------------------------------------------------


def lengths_in_turn() -> Iterator[Any]:
    """Yield cells with the lengths that each takes, and whether the odd ones are causal.

    Every length meets every rung with a mask and without one, in one type or in another. Single
    rows and few keys are slow: `test_results_are_written_in_full_and_nothing_beside_them` has them.
    """
    for number, one in enumerate(runs.cells_in_turn(0)):
        yield pytest.param(*one.values, True, (2,), marks=one.marks)
        odd = number % 2 == 0
        seeds = (0, 1, 3) if odd else (0, 1, 2, 3)
        yield pytest.param(*one.values, odd, seeds, marks=pytest.mark.slow)


@pytest.mark.parametrize(("rung", "dtype", "odd", "seeds"), list(lengths_in_turn()), ids=str)
def test_lengths(rung: str, dtype: str, odd: bool, seeds: tuple[int, ...]) -> None:
    head_dim, _ = head_dims(rung)
    for seed in seeds:
        len_q, len_kv = LENGTHS[seed]
        causal = seed % 2 == odd
        inputs = normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim), dtype, seed)
        before = [bits(x) for x in inputs]
        run(rung, inputs, causal=causal).check()
        assert [bits(x) for x in inputs] == before


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(*one.values, marks=pytest.mark.slow if "@pv8" in one.values[0] else one.marks)
        for one in runs.cells_in_turn(2)
    ],
)
@given(data=st.data())
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_problems(rung: str, dtype: str, data: Any) -> None:
    lengths = st.integers(1, 70) | st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65])
    inputs, options = drawn_values(data, lengths, head_dims(rung), dtype)
    run(rung, inputs, **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("rung", runs.in_turn(0, RUNGS))
def test_kinds_of_values(rung: str) -> None:
    """Within the bound on all of them, and not a hundred times below it on each."""
    ratios = {}
    head_dim, _ = head_dims(rung)
    for regime in strategies.REGIMES:
        shapes = (1, 1, 17, head_dim), (1, 1, 70, head_dim)
        inputs = strategies.make_regime(regime, *shapes, "float16", seed=1)
        ratios[regime] = run(rung, inputs).check().ratio
    assert max(ratios.values()) >= 0.05, ratios


@pytest.mark.slow
@pytest.mark.parametrize("rung", runs.in_turn(1, RUNGS))
def test_batches_and_grouped_heads(rung: str) -> None:
    """They equal each head alone, bit for bit."""
    head_dim, _ = head_dims(rung)
    q, k, v = normal((2, 4, 35, head_dim), (2, 2, 33, head_dim))
    whole = run(rung, (q, k, v), causal=True)
    whole.check()
    for batch, head in ((0, 1), (1, 2), (1, 3)):
        kv = slice(head // 2, head // 2 + 1)
        alone = (q[batch:, head : head + 1][:1], k[batch:, kv][:1], v[batch:, kv][:1])
        one = run(rung, alone, causal=True)
        assert bits(one.o[0, 0]) == bits(whole.o[batch, head])
        assert bits(one.lse[0, 0]) == bits(whole.lse[batch, head])


@pytest.mark.parametrize(("rung", "dtype"), runs.cells_in_turn(1))
def test_rows_without_keys(rung: str, dtype: str) -> None:
    """Bottom-right alignment with more queries than keys leaves the first rows empty."""
    head_dim, _ = head_dims(rung)
    q, k, v = normal((1, 2, 70, head_dim), (1, 2, 20, head_dim), dtype)
    found = run(rung, (q, k, v), causal=True)
    found.check()
    assert (found.o[:, :, :50] == 0).all() and (found.lse[:, :, :50] == -np.inf).all()
    without = run(rung, (q, k[:, :, :0], v[:, :, :0]))
    assert (without.o == 0).all() and (without.lse == -np.inf).all()


@pytest.mark.parametrize("rung", runs.in_turn(1, RUNGS))
def test_rows_past_the_last_key_have_keys_where_the_mask_begins_at_the_first(rung: str) -> None:
    head_dim, _ = head_dims(rung)
    q, k, v = normal((1, 2, 70, head_dim), (1, 2, 20, head_dim))
    found = run(rung, (q, k, v), causal=True, causal_align="top-left")
    found.check()
    assert np.isfinite(found.lse).all()


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if i % 3 and one[0] not in PLAIN else [])
        for i, one in enumerate(CELLS)
    ],
)
def test_empty_results(rung: str, dtype: str) -> None:
    q, k, v = normal((2, 2, 5, 64), (2, 2, 7, 64), dtype)
    for empty in ((q[:0], k[:0], v[:0]), (q[:, :0], k[:, :0], v[:, :0]), (q[:, :, :0], k, v)):
        o, lse = attend(rung, *empty, return_lse=True)
        assert o.shape == empty[0].shape and lse.shape == empty[0].shape[:3]
        assert isinstance(o, np.ndarray) and o.dtype == STORAGE[dtype]


@pytest.mark.parametrize("rung", runs.in_turn(2, PLAIN))
def test_a_masked_nan_has_no_influence_and_an_attended_one_shows(rung: str) -> None:
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    clean = run(rung, (q, k, v), causal=True).o
    k[:, :, 40] = np.nan  # attended to from row 40 on
    dirty = run(rung, (q, k, v), causal=True).o
    assert bits(dirty[:, :, :40]) == bits(clean[:, :, :40])
    assert np.isnan(dirty[:, :, 40:]).all()


# ---- what a kernel may touch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "dtype", "pads"),
    [
        *(pytest.param(*one.values, True, marks=one.marks) for one in runs.cells_in_turn(1)),
        *(pytest.param(rung, "float16", False, marks=pytest.mark.slow) for rung in RUNGS),
    ],
)
def test_results_are_written_in_full_and_nothing_beside_them(
    rung: str, dtype: str, pads: bool
) -> None:
    head_dim = head_dims(rung)[pads]
    for (len_q, len_kv), causal in (((1, 5), True), ((66, 70), False)):
        inputs = normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim), dtype)
        o = Guarded.empty((1, 2, len_q, head_dim), dtype)
        lse = Guarded.empty((1, 2, len_q), "float32")
        found = runs.run_into(
            rung, inputs, o.array, lse.array, arch=arch_of(rung), backend="interpret",
            causal=causal,
        )  # fmt: skip
        o.check()
        lse.check()
        found.check()


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(*one.values, marks=one.marks if "@" in one.values[0] else pytest.mark.slow)
        for one in runs.cells_in_turn(2)
    ],
)
def test_what_lies_outside_the_arrays_has_no_influence(rung: str, dtype: str) -> None:
    """Portable rungs also lie amid NaN in tests/kernels/test_cross.py and test_bug_classes.py."""
    for head_dim, pad in zip(head_dims(rung), (8, 1), strict=True):
        inputs = normal((1, 2, 40, head_dim), (1, 2, 70, head_dim), dtype)
        alone = run(rung, inputs, causal=True)
        amid_nan = run(rung, tuple(embedded(x, pad) for x in inputs), causal=True)
        if amid_nan.form == alone.form and rung in PLAIN:  # wider access, another mean of keys
            assert bits(amid_nan.o) == bits(alone.o)
            assert bits(amid_nan.lse) == bits(alone.lse)
        amid_nan.check()


#: Rungs whose blocks run together and one by one, for comparison: threads, lanes, warpgroups.
TOGETHER = ("fa_warps", "fa_tc", "fa_tc@sm90", "fa_int8@sm90")


def views_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Views of other strides."""
    return {
        "BSHD underneath": x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "heads and batch reversed": x[::-1, ::-1],
        "rows reversed": x[:, :, ::-1],
        "every second row": x[:, :, ::2],
        "one head for all": np.broadcast_to(x[:, :1], x.shape),
        "one batch for all": np.broadcast_to(x[:1], x.shape),
        "columns strided": np.repeat(x, 2, axis=3)[..., ::2],
    }


@pytest.mark.slow
@pytest.mark.parametrize("rung", slow_unless(lambda _, rung: rung == "fa_tc@sm90", RUNGS))
def test_strides(rung: str) -> None:
    """Of every portable rung tests/kernels/test_bug_classes.py has some."""
    head_dim, _ = head_dims(rung)
    views = [views_of(x) for x in normal((2, 2, 18, head_dim), (2, 2, 36, head_dim))]
    for name in views[0]:
        strided = tuple(view[name] for view in views)
        found = run(rung, strided, causal=True)
        found.check()
        plain = run(rung, tuple(np.ascontiguousarray(x) for x in strided), causal=True)
        if found.form == plain.form and rung in PLAIN:
            assert bits(found.o) == bits(plain.o), name


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(*one.values, marks=pytest.mark.slow if "@pv8" in one.values[0] else one.marks)
        for one in runs.cells_in_turn(0)
    ],
)
def test_out_is_written_in_any_strides(rung: str, dtype: str) -> None:
    head_dim, _ = head_dims(rung)
    inputs = normal((1, 2, 35, head_dim), (1, 1, 20, head_dim), dtype)
    alone = run(rung, inputs)
    for pad in (8, 1):
        buffer = np.full((1, 35, 2, head_dim + 2 * pad), np.nan, STORAGE[dtype])
        view = buffer[..., pad : pad + head_dim].swapaxes(1, 2)
        o, lse = attend(rung, *inputs, out=view, return_lse=True)
        assert o is view
        form = form_taken(rung, inputs, out=view, arch=arch_of(rung), backend="interpret")
        if form == alone.form:
            assert bits(view) == bits(alone.o)
        replace(alone, form=form, o=view, lse=lse).check()
        assert np.isnan(buffer[..., :pad].astype(np.float32)).all()
        assert np.isnan(buffer[..., pad + head_dim :].astype(np.float32)).all()


@pytest.mark.parametrize("head_dim", [36, 132])
def test_the_hopper_form_writes_no_column_past_head_dim(head_dim: int) -> None:
    """Rows of 16-byte strides whose last columns are others', stored from shared memory or not."""
    wide = normal((1, 1, 17, head_dim + 4), (1, 1, 9, head_dim + 4))
    inputs = tuple(x[..., :head_dim] for x in wide)
    buffer = np.full_like(wide[0], np.nan)
    out = buffer[..., :head_dim]
    assert runs.form_taken("fa_tc@sm90", inputs, arch="sm_90a", out=out) == "sm90"
    attend("fa_tc@sm90", *inputs, out=out)
    assert np.isfinite(out).all() and np.isnan(buffer[..., head_dim:]).all()


@pytest.mark.parametrize("rung", slow_unless(lambda _, rung: rung in TOGETHER, RUNGS))
def test_batches_of_blocks_change_nothing(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head_dim, _ = head_dims(rung)
    inputs = normal((1, 2, 70, head_dim), (1, 2, 40, head_dim))
    together = run(rung, inputs)
    monkeypatch.setattr(executor, "MEMORY_BUDGET", 0)
    one_by_one = run(rung, inputs)
    assert bits(one_by_one.o) == bits(together.o) and bits(one_by_one.lse) == bits(together.lse)


# ---- J1 ------------------------------------------------------------------------------------------

TILES = Tiles(64, 32, 4)


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [
        pytest.param(granularity, dtype, marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, granularity in enumerate(GRANULARITIES)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "regime"),
    [
        pytest.param(64, "normal", marks=pytest.mark.slow),
        (36, "channel bias"),
        (36, "subnormal"),
    ],
)
def test_codes_and_scales_equal_the_mirrors(
    head_dim: int, regime: str, granularity: str, dtype: np.dtype
) -> None:
    q = operand(1, dtype, (1, 2, 37, head_dim), regime)
    k = operand(2, dtype, (1, 1, 70, head_dim), regime)
    v = operand(3, dtype, (1, 1, 70, head_dim))
    quant = QuantConfig(granularity, granularity)
    got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
    # The mean is a sum in another order: the mirror takes the kernel's.
    want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean)
    for name in ("q_codes", "k_codes", "q_scale", "k_scale", "v"):
        assert bits(getattr(got, name)) == bits(getattr(want, name)), name
    assert_mean(got.k_mean, k)


# ---- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["fa", "fa_tc"])
def test_a_small_problem_takes_seconds(rung: str, cold_cache: Path) -> None:
    """One head of 128 rows of 64 in at most 4 seconds of this process, compiling included."""
    inputs = normal((1, 1, 128, 64), (1, 1, 128, 64))
    start = time.process_time()
    attend(rung, *inputs)
    assert time.process_time() - start <= 4.0
