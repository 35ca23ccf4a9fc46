"""Tables of a rotary embedding with a number for each column: a general matrix for each pair.

`tests/problem/test_rope.py` tests the pass and the definitions that both kinds of tables share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.described import Described
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.bounds import prepared
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.kernels.features import DTYPES
from cupyattn.problem.row_preparation import Preparation, Rope
from cupyattn.reference.exact import attention_exact
from tests.backward.backward_cases import received, run_backward
from tests.problem.test_rope import HEAD_DIM, SHAPE_KV, SHAPE_Q, SIZES
from tests.support import runs
from tests.support.runs import (
    PORTABLE,
    bits,
    column_tables,
    normal,
    rope_tables,
    variant_of,
    widened,
)

TABLES = column_tables(90, HEAD_DIM)
WEIGHTS = np.linspace(0.5, 2, HEAD_DIM, dtype=np.float32), np.ones(HEAD_DIM, np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_definition_is_a_matrix_for_each_pair(interleaved: bool) -> None:
    q, k, _ = normal(SHAPE_Q, SHAPE_KV, "float32")
    rope = Rope.of_arrays(TABLES, interleaved, 7, *SIZES)
    assert rope is not None and rope.by_column
    cos, sin = (as_float64(x) for x in TABLES)
    for x, turned, first in zip((q, k), rope.exact(q, k), (7, 0), strict=True):
        at = slice(first, first + x.shape[2])
        for d in range(HEAD_DIM // 2):
            one, other = (2 * d, 2 * d + 1) if interleaved else (d, d + HEAD_DIM // 2)
            matrix = np.array([[cos[at, one], -sin[at, one]], [sin[at, other], cos[at, other]]])
            expected = np.einsum("ijr,bhrj->bhri", matrix, as_float64(x[..., [one, other]]))
            np.testing.assert_allclose(turned[..., [one, other]], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.booleans(), st.integers(-40, 12))
def test_the_bound_of_r0_holds(
    dtype: str, seed: int, half: int, interleaved: bool, magnitude: int
) -> None:
    q = np.random.default_rng(seed).standard_normal((1, 2, 7, 2 * half)) * 2.0**magnitude
    q = q.astype(STORAGE[dtype])
    rope = Rope.of_arrays(column_tables(9, 2 * half, seed), interleaved, 2, 7, 0, 2 * half)
    assert rope is not None
    found, exact = (turn(q, q[:, :, :0])[0] for turn in (rope.turned, rope.exact))
    bound = prepared.rotation(q, rope, 2)
    assert np.isfinite(bound).all()
    assert ratio_to_bound(as_float64(found), exact, bound).max() <= 1


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_take_the_transpose(interleaved: bool) -> None:
    """<dy, turned x> = <turned-back dy, x> for all x and dy, to rounding in float64."""
    for head_dim in (2, 6, HEAD_DIM):
        tables = column_tables(9, head_dim)
        x, dy, _ = normal((2, 2, 7, head_dim), (2, 2, 7, head_dim), "float32")
        rope = Rope.of_arrays(tables, interleaved, 2, 7, 7, head_dim)
        assert rope is not None
        ahead, _ = rope.exact(x, dy)
        back, _ = rope.back.exact(dy, x)
        np.testing.assert_allclose((ahead * dy).sum(), (back * x).sum(), rtol=1e-12)
        described = Rope.of(
            tuple(map(Described.of, ("cos", "sin"), tables)), interleaved, 2, 7, 7, head_dim
        )
        assert described is not None
        sin = described.back.sin.bound(tables[1])
        assert bits(sin) == bits(rope.back.sin) and sin.flags.c_contiguous


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rung", runs.in_turn(0, PORTABLE))
def test_kernels_attend_with_turned_operands(rung: str, interleaved: bool) -> None:
    """Rows in the interpreter have the bits of the mirror, and results are within the bound."""
    q, k, v = normal(SHAPE_Q, SHAPE_KV)
    options: dict[str, Any] = {
        "rope": TABLES, "rope_interleaved": interleaved, "rope_offset_q": 27,
    }  # fmt: skip
    operands: Any = (*Rope.of_arrays(TABLES, interleaved, 27, *SIZES).turned(q, k), v)
    if variant_of(rung).family == "int8":
        operands = (ca.quantize(q, k, v, backend="mirror", **options),)
    how: dict[str, Any] = {"variant": rung, "backend": "interpret"}
    o = ca.attention(q, k, v, **how, **options)
    assert bits(o) == bits(ca.attention(*operands, **how))
    runs.run(rung, (q, k, v), backend="interpret", **options).check()


@pytest.mark.parametrize("rung", runs.in_turn(1, PORTABLE))
def test_rows_are_normalised_before(rung: str) -> None:
    q, k, v = normal(SHAPE_Q, SHAPE_KV)
    options: dict[str, Any] = {
        "rope": TABLES, "rope_interleaved": True, "rope_offset_q": 3, "qk_norm": WEIGHTS,
        "qk_norm_eps": 1e-6,
    }  # fmt: skip
    how = Preparation.of_arrays(options, (2, 1, *SIZES))
    assert how is not None
    operands: Any = (*how.stored(q, k), v)
    if variant_of(rung).family == "int8":
        operands = (ca.quantize(q, k, v, backend="mirror", **options),)
    where: dict[str, Any] = {"variant": rung, "backend": "interpret"}
    o = ca.attention(q, k, v, **where, **options)
    assert bits(o) == bits(ca.attention(*operands, **where))
    runs.run(rung, (q, k, v), backend="interpret", **options).check()


@pytest.mark.parametrize(("interleaved", "qk_norm"), [(False, None), (True, WEIGHTS)])
@pytest.mark.parametrize(("rung", "backend"), runs.on_both(2, PORTABLE))
def test_equal_numbers_in_a_pair_are_a_number_for_the_pair(
    rung: str, backend: str, interleaved: bool, qk_norm: Any
) -> None:
    q, k, v = normal((1, 2, 19, HEAD_DIM), (1, 1, 33, HEAD_DIM))
    narrow = rope_tables(40, HEAD_DIM)
    options: dict[str, Any] = {"rope_interleaved": interleaved, "rope_offset_q": 9}
    options |= {"variant": rung, "backend": backend, "qk_norm": qk_norm}
    o = ca.attention(q, k, v, rope=widened(narrow, interleaved), **options)
    assert bits(o) == bits(ca.attention(q, k, v, rope=narrow, **options))


def test_the_bound_notices_mistakes() -> None:
    """Numbers of the other column of a pair, of one column for both, and rounded numbers."""
    inputs = normal(SHAPE_Q, SHAPE_KV)
    options: dict[str, Any] = {"rope": TABLES, "rope_offset_q": 27}
    right = runs.run("fa", inputs, **options)
    cos, sin = TABLES
    for wrong_tables in (
        (cos, np.roll(sin, HEAD_DIM // 2, axis=1)),
        (np.roll(cos, HEAD_DIM // 2, axis=1), sin),
        (cos, widened((cos, sin[:, : HEAD_DIM // 2]), False)[1]),
        (cos.astype(np.float16), sin),
    ):
        wrong = runs.run("fa", inputs, **{**options, "rope": wrong_tables})
        mixed = runs.Run("fa", right.form, inputs, options, right.quantized, wrong.o, right.lse)
        assert mixed.judge().ratio > 1


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_packed_sequences(backend: str) -> None:
    lengths = ((5, 9), (21, 13))
    q, k, v = normal((26, 2, HEAD_DIM), (22, 1, HEAD_DIM))
    options: dict[str, Any] = {"rope": TABLES, "variant": "fa_tc", "backend": backend}
    offsets = {"cu_seqlens_q": np.array([0, 5, 26]), "cu_seqlens_k": np.array([0, 9, 22])}
    o = ca.attention_varlen(
        q, k, v, **{n: x.astype(np.int32) for n, x in offsets.items()}, **options
    )
    first_q = first_k = 0
    for len_q, len_k in lengths:
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        parts = (x[None, part] for x, part in ((q, rows), (k, keys), (v, keys)))
        alone = ca.attention(*parts, layout="BSHD", **options)
        assert bits(o[rows]) == bits(alone[0])
        first_q, first_k = first_q + len_q, first_k + len_k


def test_exact_attention_takes_them() -> None:
    q, k, v = normal(SHAPE_Q, SHAPE_KV)
    turned = Rope.of_arrays(TABLES, True, 27, *SIZES).exact(q, k)
    expected = attention_exact(*turned, as_float64(v))
    found = attention_exact(q, k, v, rope=TABLES, rope_interleaved=True, rope_offset_q=27)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool, backend: str) -> None:
    """Of operands turned beforehand, turned back; within the bound behind a norm."""
    q, k, v = normal(SHAPE_Q, SHAPE_KV)
    options: dict[str, Any] = {"rope": TABLES, "rope_interleaved": interleaved}
    rope = Rope.of_arrays(TABLES, interleaved, 0, *SIZES)
    assert rope is not None
    inputs = received(*rope.turned(q, k), v)
    how: dict[str, Any] = {"backend": backend, "deterministic": True}
    plain = ca.attention_backward(*inputs, **how)
    found = ca.attention_backward(inputs[0], q, k, *inputs[3:], **how, **options)
    expected = rope.back.turned(plain.dq, plain.dk)
    assert [bits(x) for x in found[:2]] == [bits(x) for x in expected]
    options |= {"qk_norm": WEIGHTS, "qk_norm_eps": 2.0**-10}
    run_backward(received(q, k, v, **options), backend=backend, **options).check()


def test_explain_says_that_each_channel_has_numbers() -> None:
    q, k, v = normal(SHAPE_Q, SHAPE_KV)
    text = ca.explain(q, k, v, variant="fa", rope=TABLES, rope_interleaved=True)
    assert "interleaved channels of q and k are turned as they are loaded, by a cosine and" in text
    assert "rope='interleaved_by_column'" in text
