"""The judge itself: ratios, sampled rows, reports, and the draws of the strategy."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn import distributions
from cupyattn.arrays.kinds import STORAGE
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from cupyattn.strategies import REGIMES, attention_inputs, make_regime
from cupyattn.testing.expected import SAMPLED_ROWS, sample_rows
from cupyattn.testing.verdict import assert_within_bound, judge

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("value", "expected", "bound", "ratio"),
    [
        (1.5, 1.0, 1.0, 0.5),
        (1.0, 1.0, 0.0, 0.0),
        (1.1, 1.0, 0.0, INF),
        (NAN, 1.0, 1.0, INF),  # NaN where a number was promised
        (INF, 1.0, 1.0, INF),
        (INF, 1.0, INF, 0.0),  # nothing promised
        (1e9, 1.0, INF, 0.0),
        (NAN, NAN, INF, 0.0),
        (1.0, NAN, INF, INF),  # finite garbage
        (-INF, -INF, 0.0, 0.0),  # lse of an empty row
        (0.0, -INF, 0.0, INF),
        (NAN, -INF, 0.0, INF),
    ],
)
def test_ratio_to_bound(value: float, expected: float, bound: float, ratio: float) -> None:
    arrays = (np.array([x]) for x in (value, expected, bound))
    assert ratio_to_bound(*arrays)[0] == ratio


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(0, 9))
def test_sampled_rows(len_q: int, block_q: int, seed: int) -> None:
    rows = sample_rows(len_q, block_q, seed)
    assert (np.diff(rows) > 0).all() and set(rows.tolist()) <= set(range(len_q))
    assert rows.size >= min(len_q, SAMPLED_ROWS)
    assert rows.size <= 2 * SAMPLED_ROWS + 2
    if len_q:
        assert rows[0] == 0 and rows[-1] == len_q - 1
    starts = range(block_q, len_q, block_q)
    if 2 * len(starts) + 1 <= SAMPLED_ROWS:
        assert {*starts, *(row - 1 for row in starts)} <= set(rows.tolist())
    np.testing.assert_array_equal(rows, sample_rows(len_q, block_q, seed))


def test_a_wrong_element_is_named() -> None:
    q, k, v = distributions.make("normal", 2, 4, 20, 30, 8, "float16", seed=0, heads_kv=2)
    o, lse = attention_mirror(q, k, v, variant="fa_tc", return_lse=True)
    report = assert_within_bound(o, q, k, v, lse=lse, variant="fa_tc")
    assert report.passed and report.rows == 20
    o[1, 2, 13, 5] = 7
    with pytest.raises(AssertionError, match=r"OUTSIDE.*\(1, 2, 13, 5\)") as raised:
        assert_within_bound(o, q, k, v, variant="fa_tc")
    expected = attention_exact(q, k, v)[1, 2, 13, 5]
    message = str(raised.value)
    assert "value 7," in message and f"{expected:.6g}"[:6] in message and "R" in message
    report = judge(o, q, k, v, variant="fa_tc")
    assert report.index == (1, 2, 13, 5) and report.value == 7 and not report.passed
    assert report.ratio == pytest.approx((7 - expected) / report.bound)


def test_rows_are_reported_by_their_own_number() -> None:
    q, k, v = distributions.make("normal", 1, 1, 20, 30, 8, "float32", seed=0)
    o, lse = attention_mirror(q, k, v, return_lse=True)
    o[0, 0, 17, 2] += 1
    lse[0, 0, 5] = np.nan
    report = judge(o, q, k, v, lse=lse, variant="fa", rows=np.array([3, 17, 5]))
    assert report.index == (0, 0, 17, 2) and report.rows == 3
    assert report.lse_index == (0, 0, 5) and report.lse_ratio == INF
    assert judge(o, q, k, v, variant="fa", rows=np.array([3, 5])).passed


def test_large_cells_are_sampled() -> None:
    q, k, v = distributions.make("normal", 1, 1, 4096, 1100, 4, "float32", seed=0)
    o = np.zeros(q.shape, np.float32)
    rows = sample_rows(4096, 32, seed=3)
    o[:, :, rows] = attention_exact(q, k, v, rows=rows)  # only what the seed draws is right
    report = judge(o, q, k, v, variant="fa", seed=3)
    assert report.passed and report.rows == rows.size
    assert not judge(o, q, k, v, variant="fa", seed=4).passed


def test_nan_is_never_within_a_bound() -> None:
    q, k, v = distributions.make("normal", 1, 1, 9, 9, 4, "float16", seed=0)
    o = attention_mirror(q, k, v, variant="unfused")
    o[0, 0, 3, 3] = np.nan
    report = judge(o, q, k, v, variant="unfused")
    assert report.ratio == INF and report.tightness < 1
    assert np.isnan([report.relative_l2, report.relative_l2_given]).all()


def test_pytest_shows_the_line_of_the_test_that_a_bound_failed() -> None:
    x = np.ones((1, 1, 4, 8), np.float16)
    with pytest.raises(AssertionError, match="OUTSIDE") as failed:
        assert_within_bound(0 * x, x, x, x, variant="fa")
    frames = [entry.frame.f_locals for entry in failed.traceback[1:]]
    assert frames and all(frame.get("__tracebackhide__") for frame in frames)


def test_finite_garbage_is_no_answer_to_nan() -> None:
    q, k, v = distributions.make("normal", 1, 1, 9, 9, 4, "float16", seed=0)
    q[0, 0, 2, 1] = np.nan
    o = attention_mirror(q, k, v, variant="unfused")
    assert judge(o, q, k, v, variant="unfused").passed
    o[0, 0, 2] = 0
    assert judge(o, q, k, v, variant="unfused").ratio == INF


def test_a_judgement_of_no_row_is_refused() -> None:
    q, k, v = distributions.make("normal", 1, 1, 20, 20, 16, "float32", 0)
    o = attention_exact(q, k, v).astype(np.float32)
    message = "rows must name at least one of the 20 query rows, got none: leave it out"
    with pytest.raises(ValueError, match=message):
        judge(o, q, k, v, variant="fa", rows=np.array([], np.int64))
    with pytest.raises(ValueError, match=message):
        judge(o, q, k, v, variant="fa", rows=[])


def test_empty_outputs_and_rows_without_keys() -> None:
    q, k, v = distributions.make("normal", 1, 2, 6, 4, 8, "float16", seed=0)
    none = judge(q[:, :, :0], q[:, :, :0], k, v, variant="fa")
    assert none.passed and none.rows == 0
    o, lse = attention_mirror(q, k, v, variant="fa", causal=True, return_lse=True)
    assert judge(o, q, k, v, lse=lse, variant="fa", causal=True).passed
    o[0, 0, 0, 0] = 1e-7
    assert judge(o, q, k, v, variant="fa", causal=True).ratio == INF


def test_rows_without_a_bound_are_not_counted_as_judged() -> None:
    """A row of nothing but ``finfo.min`` is zeros in a Hopper form, and no bound is promised."""
    q, k, v = distributions.make("normal", 2, 1, 9, 64, 64, "bfloat16", seed=0)
    bias = np.zeros((2, 1, 9, 64), q.dtype)
    bias[1, :, 5] = float(ml_dtypes.finfo(q.dtype).min)
    options: dict[str, Any] = {"variant": "fa_tc", "form": "sm90", "bias": bias}
    o, lse = ca.attention(
        q, k, v, bias=bias, variant="fa_tc", arch="sm_90a", backend="mirror", return_lse=True
    )
    report = judge(o, q, k, v, lse=lse, **options)
    assert report.passed and (report.rows, report.judged, report.unbounded) == (9, 17, 1)
    assert report.unbounded_rows == ((1, 0, 5),)
    assert "17 of 18 rows judged" in str(report) and "of every head" not in str(report)
    assert "  no bound is promised in 1 row, (batch, head, row) = (1, 0, 5)\n" in str(report)
    o[1, 0, 4] = 0
    assert judge(o, q, k, v, **options).index[:3] == (1, 0, 4)

    bias[1] = bias[1, 0, 5, 0]
    report = judge(o, q, k, v, rows=np.array([8, 0, 3, 5, 7]), **options)
    assert (report.judged, report.unbounded) == (5, 5)
    assert report.unbounded_rows == ((1, 0, 8), (1, 0, 0), (1, 0, 3), (1, 0, 5))
    assert "in 5 rows, (batch, head, row) = (1, 0, 8), (1, 0, 0), (1, 0, 3), (1, 0, 5), ...\n" in (
        str(report)
    )
    bias[0] = bias[1]
    report = judge(o, q, k, v, **options)
    assert report.judged == 0 and str(report).startswith("fa_tc: O is NOT JUDGED in any row, ")

    bias[...] = 0
    report = judge(attention_exact(q, k, v).astype(q.dtype), q, k, v, **options)
    assert report.passed and (report.judged, report.unbounded, report.unbounded_rows) == (18, 0, ())
    assert "9 rows of every head judged" in str(report) and "no bound" not in str(report)


def test_rows_that_must_not_be_finite_are_judged() -> None:
    q, k, v = distributions.make("normal", 1, 1, 9, 9, 4, "float16", seed=0)
    q[0, 0, 2, 1] = np.nan
    report = judge(attention_mirror(q, k, v, variant="fa"), q, k, v, variant="fa")
    assert report.passed and (report.judged, report.unbounded) == (9, 0)


def test_a_report_outside_says_that_options_may_be_missing() -> None:
    q, k, v = distributions.make("normal", 1, 1, 9, 9, 4, "float16", seed=0)
    o = attention_mirror(q, k, v, variant="fa", causal=True)
    hint = "if the call had options, such as a mask, causal, scale or lengths, give the judge"
    assert hint in str(judge(o, q, k, v, variant="fa"))
    assert hint not in str(judge(o, q, k, v, variant="fa", causal=True))
    with pytest.raises(TypeError, match="variant='fa_tc', 'auto' if the call named none"):
        judge(o, q, k, v)


def test_quantised_operands_are_judged_twice() -> None:
    q, k, v = distributions.make("channel-bias", 1, 2, 24, 40, 16, "float16", seed=0)
    quantized = quantize(q, k, v)
    o, lse = attention_mirror(quantized, variant="fa_int8", return_lse=True)
    report = assert_within_bound(o, q, k, v, lse=lse, variant="fa_int8", quantized=quantized)
    assert report.quantisation is not None and 0 < report.quantisation <= 1
    assert "J3" in str(report) and report.tightness < 0.05
    exact = attention_exact(q, k, v)
    of_caller = np.linalg.norm(o - exact) / np.linalg.norm(exact)
    assert report.relative_l2_given == pytest.approx(of_caller, rel=1e-9)
    assert report.relative_l2 < report.relative_l2_given
    for line in (
        f"relative L2 error {report.relative_l2:.3g} to exact attention of what the kernel",
        f"relative L2 error {of_caller:.3g} to exact attention of the arrays as the caller gave",
    ):
        assert line in str(report)
    alone = judge(o, None, None, None, variant="fa_int8", quantized=quantized)
    assert alone.quantisation is None and alone.ratio == report.ratio
    assert alone.relative_l2_given is None and "as the caller gave" not in str(alone)
    other = judge(o, 1.5 * q, k, v, variant="fa_int8", quantized=quantized)
    assert other.ratio == report.ratio and other.quantisation is not None
    assert other.quantisation > 1 and not other.passed


def test_arguments_are_checked() -> None:
    q, k, v = distributions.make("normal", 1, 1, 4, 6, 8, "float16", seed=0)
    with pytest.raises(ValueError, match="o must have"):
        judge(q[:, :, :2], q, k, v, variant="fa")
    with pytest.raises(ValueError, match="lse must have"):
        judge(q, q, k, v, lse=q, variant="fa")
    with pytest.raises(TypeError, match="quantized"):
        judge(q, None, None, None, variant="fa_int8")
    with pytest.raises(TypeError, match="quantized must be a cupyattn.QuantizedQKV, got 8"):
        judge(q, q, k, v, variant="fa_int8", quantized=8)
    with pytest.raises(TypeError, match="o must hold real numbers, got dtype complex64"):
        judge(q.astype(np.complex64), q, k, v, variant="fa")
    rows, ends = q[0].swapaxes(0, 1), np.array([0, 4])
    for given_ends in ({"cu_seqlens_q": ends}, {"cu_seqlens_k": ends}):
        with pytest.raises(TypeError, match="need cu_seqlens_q and cu_seqlens_k: give both"):
            judge(rows, rows, rows, rows, variant="fa", **given_ends)
    with pytest.raises(TypeError, match="cu_seqlens_q must be a NumPy or CuPy array"):
        judge(rows, rows, rows, rows, variant="fa", cu_seqlens_q=[0, 4], cu_seqlens_k=ends)


#: The quantisation of a call, the operand with an element that is not finite, and this element.
SPOILT = [
    (quant, name, bad)
    for quant in ({}, {"pv": "int8"}, {"pv": "fp8", "granularity_k": "token"})
    for name, bad in (("q", NAN), ("k", NAN), ("v", INF), ("q", INF), ("k", -INF))
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("quant", "name", "bad"), SPOILT)
def test_int8_outputs_of_operands_that_are_not_finite_pass(
    quant: dict[str, Any], name: str, bad: float
) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 1, 3, 8)).astype(np.float32) for n in "qkv"}
    arrays[name][0, 0, 1:, 2] = bad
    q, k, v = arrays.values()
    mask = np.array([[True], [True], [False]])  # the last row has no keys
    z = ca.quantize(q, k, v, quant=ca.QuantConfig(**quant))
    o, lse = ca.attention(z, mask=mask, return_lse=True)
    assert lse[0, 0, 2] == -INF
    report = judge(o, q, k, v, variant="fa_int8", lse=lse, quantized=z, mask=mask)
    assert report.passed, report


@pytest.mark.filterwarnings("error")
def test_an_infinity_is_judged_without_a_warning() -> None:
    x = np.ones((1, 1, 3, 8), np.float32)
    x[0, 0, 1, :2], x[0, 0, 2, :2] = (INF, 0), (0, INF)
    weights = np.ones(8, np.float32), np.ones(8, np.float32)
    for options in ({}, {"qk_norm": weights}):
        o = ca.attention(x, x, x, variant="fa", **options)
        assert judge(o, x, x, x, variant="fa", **options).passed


# Drawn inputs.


@settings(max_examples=60)
@given(attention_inputs(tiles=Tiles(16, 8, 1), max_head_dim=40, max_scores=2**10))
def test_drawn_inputs_fit_together(case: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    q, k, v, options = case
    assert q.dtype == k.dtype == v.dtype and q.dtype in STORAGE.values()
    assert k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    assert q.shape[1] % k.shape[1] == 0 and 1 <= q.shape[3] <= 40
    assert q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= 2**10
    assert all(np.isfinite(x.astype(np.float64)).all() for x in (q, k, v))
    attention_exact(q, k, v, **options)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda q, k, o: k.shape[2] == 0 and q.shape[2] > 0,
        lambda q, k, o: q.shape[2] == 0,
        lambda q, k, o: k.shape[2] == 33,
        lambda q, k, o: q.shape[2] > k.shape[2] > 0 and o["causal"],
        lambda q, k, o: q.shape[1] > k.shape[1] > 1,
        lambda q, k, o: q.shape[3] == 127,
        lambda q, k, o: o["causal"] and o["causal_align"] == "top-left",
    ],
)
def test_corner_cases_can_be_drawn(wanted: Any) -> None:
    deep = settings(max_examples=3000, database=None, deadline=None)
    q, k, _, options = find(attention_inputs(), lambda x: wanted(x[0], x[1], x[3]), settings=deep)
    assert wanted(q, k, options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_are_what_they_say(regime: str, dtype: str) -> None:
    q, k, v = make_regime(regime, (1, 2, 40, 16), (1, 1, 50, 16), dtype, seed=1)
    assert all(
        x.dtype == STORAGE[dtype] and np.isfinite(x.astype(np.float64)).all() for x in (q, v)
    )
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / 4
    tiny = {"float16": 2.0**-14}.get(dtype, 2.0**-126)
    found = {
        "normal": 0.8 < v.std() < 1.2,
        "outlier channel": np.abs(k).max() > 50 and np.median(np.abs(k)) < 2,
        "constant rows": not np.ptp(k, axis=-1).any(),
        "subnormal": 0 < np.median(np.abs(v)) < tiny,
        "equal keys": not np.ptp(k, axis=2).any() and np.ptp(v, axis=2).any(),
        "repeated maxima": (scores == scores.max(axis=-1, keepdims=True)).sum(axis=-1).min() > 1,
        "large offsets": v.min() > 900,
        "large logits": np.abs(scores).max() > 1e4,
        "zeros": not (q.any() or k.any() or v.any()),
    }
    assert found[regime]


def test_hypothesis_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match="pip install .cupyattn"):
        attention_inputs()


@pytest.mark.parametrize("name", ["REGIMES", "attention_inputs", "make_regime"])
def test_the_old_place_of_a_strategy_names_the_new_one(name: str) -> None:
    with pytest.raises(AttributeError, match=f"use cupyattn.strategies.{name}"):
        getattr(ca.testing, name)
    assert hasattr(ca.strategies, name)


@pytest.mark.parametrize("given", ["dtypes", "regimes", "features"])
def test_unknown_words_of_the_strategy_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{given} must be of .*, got 'x'$"):
        attention_inputs(**{given: ("x",)})


def test_unknown_kinds_of_values_are_refused() -> None:
    shape = (1, 1, 4, 8)
    with pytest.raises(ValueError, match="^name must be of 'normal', .*, got 'nope'$"):
        make_regime("nope", shape, shape, "float16", 0)
    with pytest.raises(ValueError, match="^dtype must be of .*, got 'int8'$"):
        make_regime("normal", shape, shape, "int8", 0)
