"""Rotary embeddings: what they mean, to the bit, and that every rung applies them.

J1 is that Q and K are turned as `cupyattn.problem.row_preparation.Rope.turned` says; J2 is then
about attention of the turned operands. What turning them rounds is `cupyattn.bounds.rotation` (R0).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import attention, explain, interpret, plan, quantize
from cupyattn.arrays import memory
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.bounds import kernel
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.kernels.features import BY_COLUMN, DTYPES, ROPE_PAIRS, Features
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.ops.attention import resolved
from cupyattn.plans.prepare_rows import Prepares, plan_preparation
from cupyattn.problem.row_preparation import Rope
from cupyattn.quant import QuantConfig
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from tests.support import runs
from tests.support.marks import slow
from tests.support.planned import plan_attention
from tests.support.runs import (
    PORTABLE,
    bits,
    column_tables,
    embedded,
    normal,
    rope_tables,
    variant_of,
)

#: Several tiles of every portable rung, and a tail.
LEN_Q, LEN_KV, HEAD_DIM = 37, 50, 16
SHAPE_Q, SHAPE_KV = (1, 2, LEN_Q, HEAD_DIM), (1, 1, LEN_KV, HEAD_DIM)
SIZES = LEN_Q, LEN_KV, HEAD_DIM
TABLES = rope_tables(90, HEAD_DIM)
CELLS = [(rung, dtype) for rung in PORTABLE for dtype in variant_of(rung).dtypes]
BACKENDS = ("mirror", "interpret")


def arrays(dtype: str = "float16", seed: int = 0) -> tuple[Any, Any, Any]:
    return normal(SHAPE_Q, SHAPE_KV, dtype, seed)


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_definition_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    q, k, _ = arrays("float32")
    rope = Rope.of_arrays(TABLES, interleaved, 7, *SIZES)
    for x, turned, first in zip((q, k), rope.exact(q, k), (7, 0), strict=True):
        angle = TABLES[0].astype(np.float64) + 1j * TABLES[1].astype(np.float64)
        for row in range(x.shape[2]):
            for d in range(HEAD_DIM // 2):
                one, other = (2 * d, 2 * d + 1) if interleaved else (d, d + HEAD_DIM // 2)
                z = (x[:, :, row, one] + 1j * x[:, :, row, other]) * angle[first + row, d]
                np.testing.assert_allclose(turned[:, :, row, one], z.real, rtol=1e-12, atol=1e-14)
                np.testing.assert_allclose(turned[:, :, row, other], z.imag, rtol=1e-12, atol=1e-14)


def test_exact_attention_turns_in_float64() -> None:
    q, k, v = arrays()
    for interleaved in (False, True):
        options = {"rope": TABLES, "rope_interleaved": interleaved, "rope_offset_q": 27}
        turned = Rope.of_arrays(TABLES, interleaved, 27, *SIZES).exact(q, k)
        rows = np.array([36, 0, 9])
        expected = attention_exact(*turned, as_float64(v), causal=True, rows=rows)
        np.testing.assert_array_equal(
            attention_exact(q, k, v, causal=True, rows=rows, **options), expected
        )


def test_scores_depend_on_the_distance_alone() -> None:
    """Rows of one and the same q and k: S[i, j] is a function of i - j."""
    q, k, _ = (x[:, :1, :1].repeat(60, axis=2) for x in arrays("float32"))
    for interleaved in (False, True):
        a, b = Rope.of_arrays(TABLES, interleaved, 20, 60, 60, HEAD_DIM).exact(q, k)
        S = (a @ b.swapaxes(2, 3))[0, 0]
        for distance in range(-59, 60):
            diagonal = np.diagonal(S, distance)
            np.testing.assert_allclose(diagonal, diagonal[0], atol=2e-5)
        assert np.ptp(S) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.booleans(), st.integers(-40, 12))
def test_the_bound_of_r0_holds(
    dtype: str, seed: int, half: int, interleaved: bool, magnitude: int
) -> None:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 1, 2, 7, 2 * half)) * 2.0**magnitude
    q, k = q.astype(STORAGE[dtype]), k.astype(STORAGE[dtype])
    angles = rng.uniform(0, 7, (9, half))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope = Rope.of_arrays(tables, interleaved, 2, 7, 7, 2 * half)
    for x, found, exact, first in zip(
        (q, k), rope.turned(q, k), rope.exact(q, k), (2, 0), strict=True
    ):
        bound = bounds_prepared.rotation(x, rope, first)
        assert np.isfinite(bound).all()
        assert ratio_to_bound(as_float64(found), exact, bound).max() <= 1


def test_the_bound_of_r0_notices_mistakes() -> None:
    q, k, _ = arrays()
    rope = Rope.of_arrays(TABLES, False, 3, *SIZES)
    exact, _ = rope.exact(q, k)
    right, _ = rope.turned(q, k)
    bound = bounds_prepared.rotation(q, rope, 3)
    assert 0.9 < ratio_to_bound(as_float64(right), exact, bound).max() <= 1
    for wrong in (
        Rope.of_arrays(TABLES, True, 3, *SIZES),
        Rope.of_arrays(TABLES, False, 2, *SIZES),
        Rope.of_arrays((TABLES[0], -TABLES[1]), False, 3, *SIZES),
    ):
        found, _ = wrong.turned(q, k)
        assert ratio_to_bound(as_float64(found), exact, bound).max() > 100
    too_large = np.full((1, 1, 2, HEAD_DIM), 65504, np.float16)
    assert np.isinf(bounds_prepared.rotation(too_large, rope, 50)).any()


# ---- the pass (J1) -------------------------------------------------------------------------------


def special(x: np.ndarray) -> np.ndarray:
    """Numbers at the ends of their type among ordinary ones."""
    x = x.copy()
    info = np.finfo(np.float16) if x.dtype == np.float16 else np.finfo(np.float32)
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, float(info.tiny) / 8, 60000.0, -60000.0]
    x.reshape(-1)[: 3 * len(values) : 3] = np.array(values).astype(x.dtype)
    return x


@pytest.mark.parametrize("pairs", ROPE_PAIRS)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "pad"),
    [
        ("float16", 64, 8), ("bfloat16", 128, 0), ("float32", 24, 8), ("float16", 36, 2),
        ("bfloat16", 6, 1), ("float32", 2, 1), ("float16", 24, 8), ("float32", 64, 0),
    ],
)  # fmt: skip
def test_the_pass_turns_to_the_bit(dtype: str, head_dim: int, pad: int, pairs: str) -> None:
    x = special(normal((2, 2, 70, head_dim), (1, 1, 1, head_dim), dtype)[0])
    laid = embedded(x, pad) if pad else x.swapaxes(0, 1)
    x = x if pad else np.ascontiguousarray(laid)
    tables = (column_tables if pairs.endswith(BY_COLUMN) else rope_tables)(80, head_dim)
    rope = Rope.of_arrays(tables, pairs.startswith("interleaved"), 9, 70, 0, head_dim)
    assert rope.pairs == pairs
    made = plan_preparation(Operand.of(laid), dtype, Prepares("q", pairs, 9))
    turned = np.empty(x.shape, x.dtype)
    buffers = {"x": laid, "rope_cos": rope.cos, "rope_sin": rope.sin}
    buffers = {name: memory.as_input(array) for name, array in buffers.items()}
    interpret.run(made, {**buffers, "turned": turned})
    expected, _ = rope.turned(x, x[:, :, :0])
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(turned.astype(np.float32)), nan)
    assert bits(turned[~nan]) == bits(expected[~nan])


def test_the_pass_spills_nothing_and_stores_whole_accesses() -> None:
    for dtype in DTYPES:
        x = Operand.contiguous((1, 1, 8, 128), STORAGE[dtype].itemsize)
        for pairs in ROPE_PAIRS:
            (one,) = plan_preparation(x, dtype, Prepares("q", pairs)).launches
            binary = kc.build(one.module, "sm_80")
            taken = binary.kernels["rope"]
            assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
            stores = re.findall(r"st\.global\S*", binary.ptx)
            assert stores and set(stores) == {"st.global.v4.b32"}


# ---- every rung ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interleaved", "rung", "dtype"),
    [
        pytest.param(
            interleaved, *one.values, marks=[*one.marks, *([pytest.mark.slow] if late else [])]
        )
        for interleaved in (False, True)
        for one in runs.cells_in_turn(2, CELLS)
        for late in [interleaved != (one.values[0] == "fa_tc")]
    ],
)
def test_the_kernels_attend_with_turned_operands(interleaved: bool, rung: str, dtype: str) -> None:
    """Results equal those with operands turned beforehand bit for bit, and are within the bound.
    fa_int8 does not round to 16 bits in between, so `quantize` turns its operands.
    """
    q, k, v = arrays(dtype)
    options: dict[str, Any] = {
        "rope": TABLES, "rope_interleaved": interleaved, "rope_offset_q": 27, "causal": True,
    }  # fmt: skip
    inputs = (q, k, v, *TABLES)
    before = [bits(x) for x in inputs]
    turned = Rope.of_arrays(TABLES, interleaved, 27, *SIZES).turned(q, k)
    for backend in BACKENDS:
        o, lse = attention(q, k, v, variant=rung, backend=backend, return_lse=True, **options)
        operands: tuple[Any, ...] = (*turned, v)
        if variant_of(rung).family == "int8":
            operands = (runs.quantized(rung, (q, k, v), backend, options),)
        expected = attention(
            *operands, variant=variant_of(rung).name, backend=backend, return_lse=True, causal=True
        )
        assert bits(o) == bits(expected[0]) and bits(lse) == bits(expected[1])
        report = runs.run(rung, (q, k, v), backend=backend, **options).check()
        assert report.tightness < 0.05
    assert [bits(x) for x in inputs] == before, "an input was modified"


@pytest.mark.parametrize("rung", PORTABLE)
def test_the_bound_notices_mistakes(rung: str) -> None:
    inputs = arrays()
    options: dict[str, Any] = {"rope": TABLES, "rope_offset_q": 27}
    right = runs.run(rung, inputs, **options)
    for slip in ({"rope_interleaved": True}, {"rope_offset_q": 26}, {"rope": TABLES[::-1]}):
        wrong = runs.run(rung, inputs, **{**options, **slip})
        mixed = runs.Run(rung, right.form, inputs, options, right.quantized, wrong.o, right.lse)
        assert mixed.judge().ratio > 1, slip


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(0, PORTABLE))
def test_angles_of_zero_turn_nothing(rung: str, backend: str) -> None:
    inputs = normal((1, 1, 33, 16), (1, 1, 9, 16), variant_of(rung).dtypes[-1])
    tables = np.ones((33, 8), np.float32), np.zeros((33, 8), np.float32)
    plain = attention(*inputs, variant=rung, backend=backend)
    for interleaved in (False, True):
        o = attention(
            *inputs, variant=rung, backend=backend, rope=tables, rope_interleaved=interleaved
        )
        assert bits(o) == bits(plain)


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(1, PORTABLE))
def test_rows_see_the_same_at_every_distance(rung: str, backend: str) -> None:
    """One q and one k for all rows, a window that moves along: lse is the same in every row."""
    q, k, v = (x[:, :1, :1].repeat(70, axis=2) for x in arrays())
    _, lse = attention(
        q, k, v, variant=rung, backend=backend, return_lse=True, rope=TABLES, window=(6, 6)
    )
    inner = lse[:, :, 6:-6]
    assert np.ptp(inner, axis=-1).max() < 0.03
    _, farther = attention(
        q, k, v, variant=rung, backend=backend, return_lse=True, rope=TABLES, window=(6, 6),
        rope_offset_q=5,
    )  # fmt: skip
    assert np.abs(farther - lse)[:, :, 6:-6].max() > 0.03, "the positions say nothing here"


@pytest.mark.parametrize("rung", PORTABLE)
def test_interleaved_is_half_split_with_channels_exchanged(rung: str) -> None:
    q, k, v = arrays()
    order = np.arange(HEAD_DIM).reshape(-1, 2).T.reshape(-1)  # channels 0, 2, 4, ..., 1, 3, 5, ...
    together = Rope.of_arrays(TABLES, True, 4, *SIZES).turned(q, k)
    halves = Rope.of_arrays(TABLES, False, 4, *SIZES).turned(q[..., order], k[..., order])
    for one, other in zip(together, halves, strict=True):
        assert bits(one[..., order]) == bits(other)
    o = attention(q, k, v, variant=rung, rope=TABLES, rope_interleaved=True)
    exchanged = attention(q[..., order], k[..., order], v, variant=rung, rope=TABLES)
    np.testing.assert_allclose(as_float64(o), as_float64(exchanged), atol=2e-3)


@pytest.mark.parametrize(("rung", "backend"), runs.on_both(2, PORTABLE))
def test_an_offset_is_a_slice(rung: str, backend: str) -> None:
    q, k, v = arrays()
    whole = attention(q, k, v, variant=rung, backend=backend, rope=TABLES)
    part = attention(
        q[:, :, 16:], k, v, variant=rung, backend=backend, rope=TABLES, rope_offset_q=16
    )
    if backend == "mirror":  # NumPy's products sum in another order for another number of rows
        np.testing.assert_allclose(as_float64(part), as_float64(whole[:, :, 16:]), atol=2e-3)
    else:
        assert bits(part) == bits(whole[:, :, 16:])


@pytest.mark.parametrize("rung", runs.in_turn(1, PORTABLE))
def test_rope_goes_with_everything_else(rung: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v = arrays()
    options: dict[str, Any] = {
        "rope": TABLES, "rope_offset_q": 13, "window": (30, 10), "softcap": 2.0,
        "mask": rng.random((LEN_Q, LEN_KV)) < 0.8,
        "bias": rng.standard_normal((2, 1, LEN_KV)).astype("f4"),
    }  # fmt: skip
    for inputs in ((q, k, v), tuple(embedded(x, 3) for x in (q, k, v))):
        runs.run(rung, inputs, backend="interpret", **options).check()


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (33, 1), *slow(((1, 1), (1, 33)))])
@pytest.mark.parametrize("rung", runs.in_turn(0, PORTABLE))
def test_lengths(rung: str, shape: tuple[int, int]) -> None:
    len_q, len_kv = shape
    inputs = normal((1, 2, len_q, HEAD_DIM), (1, 1, len_kv, HEAD_DIM))
    runs.run(rung, inputs, backend="interpret", rope=TABLES, rope_offset_q=3).check()


def test_the_hopper_form_takes_turned_operands() -> None:
    """They are contiguous, whatever the caller's arrays were."""
    q, k, v = normal((1, 2, 70, 64), (1, 1, 150, 64))
    options: dict[str, Any] = {"rope": rope_tables(150, 64), "causal": True, "rope_offset_q": 80}
    one = runs.run("fa_tc@sm90", (q, k, v), backend="interpret", arch="sm_90a", **options)
    assert one.form == "sm90"
    one.check()
    shifted = embedded(q, 1), embedded(k, 3), v
    two = runs.run("fa_tc@sm90", shifted, backend="interpret", arch="sm_90a", **options)
    assert two.form == "sm90" and bits(two.o) == bits(one.o)


def test_fa_int8_quantises_what_was_turned() -> None:
    q, k, v = arrays("float32")
    turned = Rope.of_arrays(TABLES, False, 5, *SIZES).turned(q, k)
    for backend in BACKENDS:
        z = quantize(*turned, v, backend=backend)
        options: dict[str, Any] = {"variant": "fa_int8", "backend": backend}
        o = attention(q, k, v, rope=TABLES, rope_offset_q=5, **options)
        assert bits(o) == bits(attention(z, **options))


# ---- calls ---------------------------------------------------------------------------------------


def test_tables_of_any_type_and_strides_are_taken() -> None:
    q, k, v = normal((1, 1, 5, 16), (1, 1, 7, 16))
    for dtype in DTYPES:
        tables = rope_tables(7, 16, dtype)
        exact = tuple(x.astype(np.float32) for x in tables)
        expected = bits(attention(q, k, v, variant="fa", rope=exact, backend="interpret"))
        wide = tuple(np.repeat(x, 2, axis=1)[:, ::2] for x in tables)
        skew = tuple(np.concatenate([x[0, :1], x.ravel()])[1:].reshape(x.shape) for x in tables)
        for laid in (tables, wide, skew):
            o = attention(q, k, v, variant="fa", rope=laid, backend="interpret")
            assert bits(o) == expected


@pytest.mark.parametrize(
    ("rung", "backend"),
    [
        ("fa", "mirror"),
        ("fa_int8", "mirror"),
        ("fa_tc", "interpret"),
        pytest.param("fa_int8", "interpret", marks=pytest.mark.slow),
    ],
)
def test_layouts_out_and_prepared_calls(rung: str, backend: str) -> None:
    q, k, v = arrays()
    options: dict[str, Any] = {"rope": TABLES, "rope_offset_q": 9, "rope_interleaved": True}
    where = {"variant": rung, "backend": backend}
    expected = attention(q, k, v, **where, **options)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    by_row = attention(*turned, layout="BSHD", **where, **options)
    assert bits(by_row.swapaxes(1, 2)) == bits(expected)
    out = np.empty_like(q)
    assert attention(q, k, v, out=out, **where, **options) is out
    assert bits(out) == bits(expected)
    prepared = plan(q, k, v, **where, **options)
    assert bits(prepared(q, k, v)) == bits(expected)
    other = arrays(seed=1)
    assert bits(prepared(*other)) == bits(attention(*other, **where, **options))


def test_explain_says_who_turns() -> None:
    q, k, v = arrays()
    text = explain(q, k, v, variant="fa", rope=TABLES)
    assert "half-split channels of q and k are turned as they are loaded; query row i has" in text
    assert "rope='half_split'" in text and "of prepare/rope.cu" not in text
    options: dict[str, Any] = {"rope": TABLES, "rope_interleaved": True, "rope_offset_q": 9}
    for variant, quant in (("fa_tc", None), ("fa_int8", QuantConfig(smooth_k=False, fused=True))):
        text = explain(q, k, v, variant=variant, quant=quant, **options)
        assert "interleaved channels of q and k are turned in a pass before; query row i" in text
        assert "the position i+9" in text and text.count("of prepare/rope.cu") == 2
        prepared = plan(q, k, v, variant=variant, quant=quant, rope=TABLES)
        assert prepared.workspace_bytes >= q.nbytes + k.nbytes
    text = explain(q, k, v, variant="fa_int8", **options)
    assert "channels of q and k are turned as they are quantised; query row i" in text
    assert "of prepare/rope.cu" not in text and text.count("of prepare/quantize") == 1
    assert "rope:" not in explain(q, k, v) and "of prepare/rope.cu" not in explain(q, k, v)


def test_features_carry_it() -> None:
    assert Features("float16", 8).defines()["CFG_ROPE"] == 0
    assert Features("float16", 8, rope="half_split").defines()["CFG_ROPE"] == 1
    assert Features("float16", 8, rope="interleaved").defines()["CFG_ROPE"] == 2
    assert Features("float16", 8, rope="interleaved_by_column").defines()["CFG_ROPE"] == 4
    with pytest.raises(ValueError, match="features.rope must be '' or one of"):
        Features("float16", 8, rope="neox")


COS, SIN = TABLES


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"rope": COS}, TypeError, "rope must be a pair (cos, sin) of arrays, got an array"),
        ({"rope": (COS,)}, TypeError, "rope must be a pair (cos, sin) of arrays"),
        ({"rope": (COS, [1.0])}, TypeError, "sin must be a NumPy or CuPy array"),
        ({"rope": (COS, SIN[:30])}, ValueError, "got (90, 8) and (30, 8)"),
        (
            {"rope": (COS[:, :4], SIN[:, :4])}, ValueError,
            "(positions, head_dim / 2 = 8) or (positions, head_dim = 16), got (90, 4)",
        ),
        ({"rope": (COS[0], SIN[0])}, ValueError, "(positions, head_dim = 16), got (8,) and (8,)"),
        (
            {"rope": (COS.astype(np.float64), SIN.astype(np.float64))}, TypeError,
            "cos of rope must be one of float16, bfloat16, float32, got float64",
        ),
        ({"rope": (COS[:49], SIN[:49])}, ValueError, "have 49 positions, but rope_offset_q + le"),
        (
            {"rope": TABLES, "rope_offset_q": 54}, ValueError,
            "have 90 positions, but rope_offset_q + len_q = 54 + 37 and len_kv = 50 are needed",
        ),
        ({"rope": TABLES, "rope_offset_q": -1}, ValueError, "rope_offset_q must be 0 to 2**31"),
        ({"rope": TABLES, "rope_offset_q": 1.5}, TypeError, "must be a whole number, got 1.5"),
        ({"rope": TABLES, "rope_interleaved": 1}, TypeError, "must be True or False, got 1"),
        ({"rope_offset_q": 3}, ValueError, "say how rope=(cos, sin) is applied: give rope too"),
        ({"rope_interleaved": True}, ValueError, "give rope too"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain, plan):
        with pytest.raises(error, match=re.escape(sentence)):
            call(*arrays(), **options)


def test_an_odd_head_dim_has_no_pairs() -> None:
    q, k, v = normal((1, 2, 5, 33), (1, 2, 7, 33))
    with pytest.raises(ValueError, match="head_dim must be even, got 33"):
        attention(q, k, v, rope=(COS, SIN))


def test_quantised_operands_are_turned_beforehand() -> None:
    z = quantize(*arrays())
    for call in (attention, attention_mirror):
        with pytest.raises(
            ValueError, match="rope and qk_norm come before quantising: give them to quantize"
        ):
            call(z, variant="fa_int8", rope=TABLES)
    with pytest.raises(ValueError, match="rope and qk_norm come before quantising"):
        kernel.attention(None, None, None, variant="fa_int8", quantized=z, rope=TABLES)


def test_a_rung_that_takes_turned_operands_is_not_planned_on_others() -> None:
    q, k, v = arrays()
    call = resolved(q, k, v, rope=TABLES).call
    operands = [Operand.of(x) for x in (q, k, v, q)]
    with pytest.raises(UnsupportedError, match="fa_tc takes operands that are turned already"):
        plan_attention(ladder.lookup("fa_tc"), call, *operands)


def test_every_family_turns_somewhere() -> None:
    assert {v.name: v.turns_on_load for v in VARIANTS.values()} == {
        "unfused": True, "fa": True, "fa_warps": True, "fa_tc": False, "fa_int8": False,
    }  # fmt: skip
