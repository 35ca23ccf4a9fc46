"""Window, softcap, mask and bias: their meaning, on the mirror and in the interpreter.

Every combination is judged by its bound in pairs (`tests.kernels.feature_cases`). Relations between
calls need none: a window is a mask, a bias of -inf is a mask, and so on, bit for bit.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import attention, explain, plan, quantize, unfused
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.distributions import make
from cupyattn.kernels import ladder
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import TANHF_ERROR, numerics
from cupyattn.ops.attention import resolved
from cupyattn.problem.checks import check_limits
from cupyattn.quant import QuantConfig
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from cupyattn.testing.verdict import judge
from tests.kernels.feature_cases import CELLS, admitted, options_of
from tests.support import runs
from tests.support.planned import plan_attention
from tests.support.runs import Run, assert_same, bits

#: Every rung with every storage type that it takes, in its portable form.
RUNGS = [(name, dtype) for name, variant in VARIANTS.items() for dtype in variant.dtypes]
PLAIN = [name for name, variant in VARIANTS.items() if variant.family != "int8"]
#: Several tiles of every rung, and a tail.
SHAPE = (2, 4, 45, 83)
HEAD_DIM = 16


def arrays(dtype: str = "float16", shape: Any = SHAPE, seed: int = 0) -> tuple[Any, Any, Any]:
    batch, heads, len_q, len_kv = shape
    return make("normal", batch, heads, len_q, len_kv, HEAD_DIM, dtype, seed, heads // 2)


def interpret(rung: str, inputs: Any, **options: Any) -> Run:
    return runs.run(rung, inputs, backend="interpret", **options)


def on_mirror(rung: str, inputs: Any, **options: Any) -> Run:
    return runs.run(rung, inputs, backend="mirror", **options)


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_the_definition_by_hand(number: int) -> None:
    options = options_of(CELLS[number], SHAPE, number)
    q, k, v = (x.astype(np.float64) for x in arrays())
    o, lse = attention_exact(q, k, v, scale=0.3, return_lse=True, **options)
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    S = 0.3 * np.einsum("bhid,bhjd->bhij", q, k)
    if options["softcap"]:
        S = options["softcap"] * np.tanh(S / options["softcap"])
    if "bias" in options:
        S = S + options["bias"].astype(np.float64)
    S = np.where(admitted(SHAPE, options), S, -np.inf)
    empty = np.isneginf(S).all(axis=-1)
    top = np.where(empty, 0.0, S.max(axis=-1))
    weights = np.exp(S - top[..., None])
    total = np.where(empty, 1.0, weights.sum(axis=-1))
    np.testing.assert_allclose(o, weights @ v / total[..., None], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, np.where(empty, -np.inf, top + np.log(total)), rtol=1e-10)
    assert (o[empty] == 0).all()


@given(
    st.integers(0, 9), st.integers(0, 9), st.integers(-1, 12), st.integers(-1, 12), st.booleans(),
    st.sampled_from(["bottom-right", "top-left"]),
)  # fmt: skip
def test_limits_are_their_definition(
    len_q: int, len_kv: int, left: int, right: int, causal: bool, align: str
) -> None:
    first, last = check_limits(causal, align, (left, right), len_q, len_kv)
    key, row = np.arange(len_kv), np.arange(len_q)[:, None]
    found = (first is None or key >= row + first) & (last is None or key <= row + last)
    options = {"causal": causal, "causal_align": align, "window": (left, right)}
    shape = (1, 1, len_q, len_kv)
    np.testing.assert_array_equal(
        np.broadcast_to(found, (len_q, len_kv)), admitted(shape, options)[0, 0]
    )


def test_windows_of_any_size_fit_into_32_bits() -> None:
    assert check_limits(False, "bottom-right", (2**40, 2**40), 5, 7) == (-5, 7)


# ---- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rung", "dtype"), RUNGS)
def test_the_mirror_is_within_its_bound(rung: str, dtype: str) -> None:
    inputs = arrays(dtype)
    for number, cell in enumerate(CELLS):
        report = on_mirror(rung, inputs, **options_of(cell, SHAPE, number)).check()
        assert report.tightness < 0.05, f"the bound says little: {cell}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "dtype", "number"),
    [
        pytest.param(*cell.values, number, marks=cell.marks)
        for shift, cell in enumerate(runs.cells_in_turn(1, RUNGS))
        for number in range(shift % 7, len(CELLS), 7)
    ],
)
def test_the_kernels_are_within_their_bound(rung: str, dtype: str, number: int) -> None:
    """Each rung and type takes its share of the pairs; each pair is taken.

    The quick tests have each pair, and each value with each rung, in tests/kernels/test_cross.py.
    """
    inputs, options = arrays(dtype), options_of(CELLS[number], SHAPE, number)
    given = [*inputs, *(options[name] for name in runs.ADDED if name in options)]
    before = [bits(x) for x in given]
    interpret(rung, inputs, **options).check()
    assert [bits(x) for x in given] == before


def test_each_combination_is_taken() -> None:
    assert {n for shift in range(len(RUNGS)) for n in range(shift % 7, len(CELLS), 7)} == set(
        range(len(CELLS))
    )


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("rung", runs.in_turn(2))
def test_masks_by_a_very_negative_bias(rung: str, low: float) -> None:
    """Whole blocks of keys have it, the first ones among them, and one row has nothing else."""
    inputs = arrays(shape=(1, 2, 45, 83))
    bias = np.zeros((45, 83), np.float32)
    bias[:, :70] = bias[7] = low
    for one in (on_mirror(rung, inputs, bias=bias), interpret(rung, inputs, bias=bias)):
        report = one.check()
        assert np.isfinite(as_float64(one.o)).all() and report.tightness < 0.01
        kept = attention_exact(*(x[:, :, 70:] if i else x for i, x in enumerate(inputs)))
        assert np.abs(as_float64(one.o) - kept)[:, :, np.arange(45) != 7].max() < 0.05


def test_the_bound_notices_mistakes() -> None:
    inputs = arrays()
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((1, 4, 45, 83)).astype(np.float32)
    mask = rng.random((2, 1, 45, 83)) < 0.7
    options: dict[str, Any] = {"window": (20, 9), "softcap": 1.5, "mask": mask, "bias": bias}
    assert judge(attention_exact(*inputs, **options), *inputs, variant="fa_tc", **options).passed
    q, k, v = (as_float64(x) for x in inputs)
    S = q @ np.repeat(k, 2, axis=1).swapaxes(-1, -2) * HEAD_DIM**-0.5 + bias
    late = {**options, "softcap": 0.0, "bias": 1.5 * np.tanh(S / 1.5) - (S - bias)}
    late["bias"] = late["bias"].astype(np.float32)
    wrong = {
        "left": {**options, "window": (19, 9)},
        "right": {**options, "window": (20, 10)},
        "no softcap": {**options, "softcap": 0.0},
        "softcap after bias": late,
        "mask of the other entry": {**options, "mask": mask[::-1]},
        "bias of another head": {**options, "bias": np.roll(bias, 1, axis=1)},
        "bias of another row": {**options, "bias": np.roll(bias, 1, axis=2)},
    }
    for name, slip in wrong.items():
        o = attention_exact(*inputs, **slip)
        assert judge(o, *inputs, variant="fa_tc", **options).ratio > 1, name


# ---- relations -----------------------------------------------------------------------------------

BACKENDS = {"mirror": on_mirror, "interpret": interpret}


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(0))
def test_a_window_is_a_mask(rung: str, backend: str) -> None:
    inputs, run = arrays(shape=(1, 2, 45, 83)), BACKENDS[backend]
    for options in ({"window": (11, 3)}, {"window": (40, -1), "causal": True}):
        mask = admitted((1, 1, 45, 83), options)
        assert_same(run(rung, inputs, **options), run(rung, inputs, mask=mask))


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(1))
def test_a_bias_of_minus_infinity_is_a_mask(rung: str, backend: str) -> None:
    inputs, run = arrays(shape=(1, 2, 45, 83)), BACKENDS[backend]
    rng = np.random.default_rng(1)
    mask, bias = rng.random((2, 1, 83)) < 0.6, rng.standard_normal((1, 1, 45, 83)).astype("f4")
    masked = np.where(mask, bias, np.float32(-np.inf))
    assert_same(run(rung, inputs, mask=mask, bias=bias), run(rung, inputs, bias=masked))


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(2))
def test_a_mask_of_true_masks_nothing(rung: str, backend: str) -> None:
    inputs, run = arrays(shape=(1, 2, 45, 83)), BACKENDS[backend]
    plain = run(rung, inputs)
    assert_same(run(rung, inputs, mask=np.ones((1, 1, 1, 1), bool)), plain)
    assert_same(run(rung, inputs, window=(100, 100)), plain)


@pytest.mark.parametrize("rung", VARIANTS)
def test_a_bias_of_zero_and_a_high_softcap_change_little(rung: str) -> None:
    """Scores are rounded where they are not in the plain rung: both keep to their bound."""
    inputs = arrays(shape=(1, 2, 45, 83))
    plain = attention_exact(*inputs)
    for options in ({"bias": np.zeros(1, np.float16)}, {"softcap": 1e6}):
        assert np.abs(attention_exact(*inputs, **options) - plain).max() < 1e-9
        on_mirror(rung, inputs, **options).check()


@pytest.mark.parametrize("rung", VARIANTS)
def test_a_bias_common_to_a_row_moves_only_lse(rung: str) -> None:
    inputs = arrays("float32" if "float32" in VARIANTS[rung].dtypes else "float16")
    bias = np.arange(45, dtype=np.float32)[:, None] * 4
    shifted = on_mirror(rung, inputs, bias=bias)
    zero = on_mirror(rung, inputs, bias=0 * bias)
    np.testing.assert_allclose(as_float64(shifted.o), as_float64(zero.o), atol=2e-3)
    moved = np.broadcast_to(bias[:, 0], zero.lse.shape)
    np.testing.assert_allclose(shifted.lse - zero.lse, moved, atol=1e-4)


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(0))
def test_rows_that_attend_to_nothing(rung: str, backend: str) -> None:
    inputs, run = arrays(shape=(1, 2, 45, 83)), BACKENDS[backend]
    mask = np.ones((45, 1), bool)
    mask[[0, 9, 44]] = False
    bias = np.where(np.arange(45)[:, None] % 10 == 3, -np.inf, 0.5).astype(np.float16)
    options = {"mask": mask, "bias": bias, "window": (0, 0), "causal_align": "top-left"}
    one = run(rung, inputs, **options)
    one.check()
    empty = ~admitted((1, 2, 45, 83), options).any(axis=-1)
    assert empty.any() and (one.o[empty] == 0).all() and (one.lse[empty] == -np.inf).all()
    # One key is left to every other row: its value comes out, to the bit.
    rows = np.flatnonzero(~empty[0, 0])
    np.testing.assert_array_equal(one.o[:, :, rows], np.repeat(inputs[2], 2, axis=1)[:, :, rows])


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(1, PLAIN))
def test_a_nan_in_a_masked_key_has_no_influence(rung: str, backend: str) -> None:
    (q, k, v), run = arrays(shape=(1, 2, 45, 83)), BACKENDS[backend]
    spoilt = k.copy()
    spoilt[:, :, [5, 40, 82]] = np.nan
    spoilt[:, :, 60, 3] = np.inf
    keep = ~np.isin(np.arange(83), (5, 40, 60, 82))
    bias = np.where(keep, 0.25, -np.inf).astype(np.float32)
    for options in ({"mask": keep}, {"bias": bias}, {"mask": keep, "softcap": 2.0}):
        assert_same(run(rung, (q, spoilt, v), **options), run(rung, (q, k, v), **options))
    window = {"window": (3, 2), "causal_align": "top-left"}  # rows 0 to 44 see keys 0 to 46
    clean, dirty = run(rung, (q, k, v), **window), run(rung, (q, spoilt, v), **window)
    seen = admitted((1, 2, 45, 83), window)[..., [5, 40]].any(axis=-1)
    assert bits(clean.o[~seen]) == bits(dirty.o[~seen])
    assert np.isnan(as_float64(dirty.o[seen])).all()


# ---- R3 ------------------------------------------------------------------------------------------


def tanhf(x: np.ndarray, error: float) -> np.ndarray:
    """The instructions of tanhf, with the worst that ex2.approx and rcp.approx may do."""

    def number(bits: int) -> np.float32:
        return np.uint32(bits).view(np.float32)

    def fma(a: Any, b: Any, c: Any) -> Any:
        return (np.asarray(a, np.float64) * b + np.float64(c)).astype(np.float32)

    size = np.abs(x)
    power = np.exp2((size * number(0x4038AA3B)).astype(np.float64)) * (1 + error * 2.0**-22)
    inverse = 1 / (power.astype(np.float32) + np.float32(1)).astype(np.float64)
    inverse = (inverse * (1 + error * 2.0**-23)).astype(np.float32)
    large = np.where(size >= number(0x41102CB4), np.float32(1), fma(inverse, -2.0, 1.0))
    small, square = number(0x3C80F082), x * x
    for coefficient in (0xBD563CAE, 0x3E085941, 0xBEAAA9ED, 0):
        small = fma(small, square, number(coefficient))
    return np.where(size >= number(0x3F19999A), np.copysign(large, x), fma(small, x, x))


@pytest.mark.parametrize("error", [-1.0, 0.0, 1.0])
def test_tanhf_keeps_what_the_bound_assumes(error: float) -> None:
    x = np.concatenate([np.linspace(-12, 12, 400_001), np.geomspace(1e-30, 1, 100_001)])
    x = x.astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    relative = np.abs(tanhf(x, error) / np.where(exact == 0, 1, exact) - (exact != 0))
    assert 2.0**-24 < relative.max() <= TANHF_ERROR


def test_numerics_follow_the_features() -> None:
    for family in ("unfused", "float32", "tensor_core", "int8"):
        plain = numerics(family, "portable", "float16")
        assert not plain.subtracts_first
        for features in ({"softcap": True}, {"bias": True}):
            n = numerics(family, "portable", "float16", **features)
            assert n.subtracts_first and "R3" in n.tags and n.scaling != "folded"
    q, k, v = arrays()
    with pytest.raises(ValueError, match="numerics says softcap=False, bias=False, the call has"):
        attention_mirror(q, k, v, softcap=1.0, numerics=numerics("float32", "portable", "float16"))


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"window": 5}, ValueError, "window must be a pair (left, right) of whole numbers, got 5"),
        ({"window": (1, 2.5)}, ValueError, "of whole numbers, got (1, 2.5)"),
        ({"window": (-2, 0)}, ValueError, "or -1 for no limit, got (-2, 0)"),
        ({"softcap": -3.0}, ValueError, "softcap must be 0 (none) or between 2**-120"),
        ({"softcap": float("nan")}, ValueError, "got nan"),
        ({"softcap": "high"}, TypeError, "softcap must be a number, got 'high'"),
        ({"mask": np.ones((45, 83))}, TypeError, "True: attend), got mask.dtype=float64"),
        ({"mask": [[True]]}, TypeError, "mask must be a NumPy or CuPy array"),
        (
            {"mask": np.ones((44, 83), bool)}, ValueError,
            "mask must broadcast to (batch, heads, len_q, len_kv) = (2, 4, 45, 83), got "
            "mask.shape=(44, 83)",
        ),
        ({"mask": np.ones((1, 2, 4, 45, 83), bool)}, ValueError, "mask must broadcast"),
        ({"bias": np.zeros((45, 83))}, TypeError, "or float32, got bias.dtype=float64"),
        ({"bias": np.zeros((3, 1, 1), "f4")}, ValueError, "got bias.shape=(3, 1, 1)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain, plan):
        with pytest.raises(error, match=re.escape(sentence)):
            call(*arrays(), **options)
    if isinstance(options.get("mask"), list):
        return
    with pytest.raises(error, match=re.escape(sentence)):
        unfused.scores(*arrays()[:2], **options)


def test_mask_and_bias_are_taken_as_they_lie() -> None:
    q, k, v = arrays()
    mask = np.ones((45, 166), bool)[:, ::2]
    bias = np.zeros((4, 83, 45), np.float16).swapaxes(1, 2)
    request = resolved(q, k, v, mask=mask, bias=bias)
    bound = {name: request.operands[name].bound(x) for name, x in (("mask", mask), ("bias", bias))}
    assert bound["mask"].shape == bound["bias"].shape == SHAPE
    assert np.shares_memory(bound["mask"], mask) and np.shares_memory(bound["bias"], bias)
    values = plan_attention(
        request.variant, request.call, *(Operand.of(x) for x in (q, k, v, q)),
        added={name: request.operands[name].place for name in ("mask", "bias")},
    ).launches[0].params[0][1]  # fmt: skip
    assert values["mask_stride"] == (0, 0, 166, 2)
    assert values["bias_stride"] == (0, 45 * 83, 1, 45)
    packed = np.zeros(4, np.dtype([("skew", "u1"), ("bias", "f4")]))["bias"]
    o = attention(q, k, v[:, :, :83], bias=np.repeat(packed[:1], 83))
    assert resolved(q, k, v, bias=packed[:1]).operands["bias"].strides == (0, 0, 0, 0)
    assert np.isfinite(as_float64(o)).all()


def test_out_must_not_overlap_the_bias() -> None:
    q, k, v = arrays("float32", (1, 2, 45, HEAD_DIM))
    out = np.zeros_like(q)
    with pytest.raises(ValueError, match="out must not share memory with bias"):
        attention(q, k, v, variant="fa", bias=out, out=out)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_mask_and_bias_have_one_layout(layout: str) -> None:
    q, k, v = arrays()
    bias = np.random.default_rng(0).standard_normal((4, 45, 83)).astype(np.float32)
    o = attention(q, k, v, bias=bias)
    turned = (x.swapaxes(1, 2) if layout == "BSHD" else x for x in (q, k, v))
    found = attention(*turned, bias=bias, layout=layout)
    np.testing.assert_array_equal(found.swapaxes(1, 2) if layout == "BSHD" else found, o)


def test_fa_int8_does_not_smooth_under_a_softcap() -> None:
    q, k, v = arrays()
    text = explain(q, k, v, variant="fa_int8", softcap=2.0)
    assert "keys are not smoothed, since a softcap would feel their mean" in text
    assert "k: rows" in text and "softcap 2" in text
    assert "k: sums, then rows" in explain(q, k, v, variant="fa_int8")
    by_hand = quantize(q, k, v, quant=QuantConfig(smooth_k=False))
    expected = attention(by_hand, softcap=2.0)
    np.testing.assert_array_equal(attention(q, k, v, variant="fa_int8", softcap=2.0), expected)
    for call in (attention, explain, attention_mirror):
        options: Any = {"variant": "fa_int8", "softcap": 2.0}
        with pytest.raises(ValueError, match=re.escape("softcap=2.0 needs keys that are not smoo")):
            call(quantize(q, k, v), **options)


def test_explain_says_what_happens_to_the_scores() -> None:
    q, k, v = arrays()
    mask, bias = np.ones((45, 1), bool), np.zeros((4, 1, 83), np.float16)
    text = explain(q, k, v, window=(12, 0), softcap=30.0, mask=mask, bias=bias)
    line = (
        "scores: row i attends key j where i+26 <= j and j <= i+38; softcap 30; mask of shape "
        "(45, 1); bias of shape (4, 1, 83)"
    )
    assert line in text
    for piece in ("window=True", "softcap=True", "mask=True", "bias='float16'"):
        assert piece in text
    assert "scores:" not in explain(q, k, v)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 1e6}, "takes softcap/scale from 2**-10 to 2**14, got 8e+06"),
        ({"bias": np.zeros(64, "f4"), "scale": 2.0**20}, "takes a bias with scale from 2**-14"),
    ],
)
def test_the_hopper_form_leaves_these_to_the_portable_one(
    options: dict[str, Any], reason: str
) -> None:
    q, k, v = make("normal", 1, 2, 64, 64, 64, "float16")
    text = explain(q, k, v, variant="fa_tc", arch="sm_90a", **options)
    assert f"portable form: the Hopper form {reason}" in text and "fa_tc (portable)" in text


@pytest.mark.parametrize(
    ("shape", "head_dim", "options"),
    [
        ((1, 2, 200, 333), 64, {"window": (20, 3), "causal_align": "top-left"}),
        pytest.param((1, 2, 70, 150), 64, {"window": (9, 30)}, marks=pytest.mark.slow),
        ((1, 2, 200, 300), 128, {"window": (100, -1), "causal": True}),
        pytest.param((1, 2, 150, 333), 192, {"window": (50, 20)}, marks=pytest.mark.slow),
        ((1, 2, 400, 40), 64, {"window": (3, 2), "causal_align": "top-left"}),
    ],
)
def test_the_hopper_form_takes_windows(
    shape: tuple[int, int, int, int], head_dim: int, options: dict[str, Any]
) -> None:
    batch, heads, len_q, len_kv = shape
    inputs = make("normal", batch, heads, len_q, len_kv, head_dim, "float16", heads_kv=1)
    one = interpret("fa_tc@sm90", inputs, arch="sm_90a", **options)
    assert one.form == "sm90"
    one.check()
    empty = ~admitted(shape, options).any(axis=-1)
    assert (one.o[empty] == 0).all() and (one.lse[empty] == -np.inf).all()


def test_a_prepared_call_keeps_mask_and_bias_and_takes_others() -> None:
    q, k, v = arrays()
    mask = np.random.default_rng(0).random((45, 83)) < 0.5
    bias = np.random.default_rng(1).standard_normal((4, 1, 83)).astype(np.float32)
    for backend in BACKENDS:
        prepared = plan(q, k, v, variant="fa", mask=mask, bias=bias, backend=backend)
        expected = attention(q, k, v, variant="fa", mask=mask, bias=bias, backend=backend)
        np.testing.assert_array_equal(prepared(q, k, v), expected)
        other = attention(q, k, v, variant="fa", mask=~mask, bias=bias, backend=backend)
        np.testing.assert_array_equal(prepared(q, k, v, mask=~mask), other)
        with pytest.raises(ValueError, match="mask was planned as shape"):
            prepared(q, k, v, mask=mask[:1])


def test_the_steps_of_the_unfused_rung_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays()
    options = options_of(
        {"causal": True, "causal_align": "top-left", "window": (30, -1), "softcap": 2.5,
         "mask": "whole", "bias": "float16", "bias_shape": "turned", "block_mask": True}, SHAPE, 3,
    )  # fmt: skip
    mirrored = unfused.scores(q, k, **options)
    np.testing.assert_array_equal(mirrored > -np.inf, admitted(SHAPE, options))
    monkeypatch.setenv("CUPYATTN_INTERPRET", "1")
    S = unfused.scores(q, k, **options)
    np.testing.assert_allclose(S, mirrored, rtol=1e-5, atol=1e-5)
    o = unfused.weighted_sum(unfused.softmax(S), v)
    expected = attention_exact(q, k, v, **options)
    np.testing.assert_allclose(as_float64(o), expected, rtol=2e-3, atol=2e-3)


def test_features_are_compiled_in_only_where_they_are_asked_for() -> None:
    q, k, v = (Operand.of(x) for x in arrays())

    def defines(**options: Any) -> dict[str, int]:
        request = resolved(*arrays(), **options)
        added = {n: request.operands[n].place for n in runs.ADDED if n in options}
        made = plan_attention(ladder.lookup("fa"), request.call, q, k, v, q, added=added)
        return {n: x for n, x in made.launches[0].module.defines if n in FEATURE_MACROS and x}

    assert defines() == {}
    assert defines(causal=True) == defines(window=(-1, 0)) == {"CFG_CAUSAL": 1}
    assert defines(window=(-1, 3)) == {"CFG_CAUSAL": 1}
    assert defines(window=(4, -1)) == {"CFG_WINDOW": 1}
    assert defines(window=(4, 9), causal=True) == {"CFG_CAUSAL": 1, "CFG_WINDOW": 1}
    assert defines(softcap=1.0) == {"CFG_SOFTCAP": 1}
    for number, dtype in enumerate(("float16", "bfloat16", "float32"), 1):
        bias = np.zeros(1, STORAGE[dtype])
        assert defines(bias=bias, mask=bias == 0) == {"CFG_MASK": 1, "CFG_BIAS": number}


FEATURE_MACROS = ("CFG_CAUSAL", "CFG_WINDOW", "CFG_SOFTCAP", "CFG_MASK", "CFG_BIAS")
