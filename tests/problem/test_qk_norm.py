"""RMS-normalised and turned rows of Q and K: what they mean, to the bit, on every rung.

J1 is that rows are prepared as `cupyattn.problem.row_preparation.Preparation` says: rounded to
their type before most rungs, and in float32 as ``fa_int8`` quantises them, in its own launch. What
that rounds is `cupyattn.bounds.preparation` (R0), and J3 holds with it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import attention, explain, interpret, plan, quantize
from cupyattn.arrays import memory
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.compiler import modules as kc
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels import ladder
from cupyattn.kernels.features import DTYPES, Features
from cupyattn.plans.prepare_rows import Prepares, plan_preparation
from cupyattn.plans.quantize import Part, plan_quantize
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import Preparation
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.reference.quantize import quantize_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.support import runs
from tests.support.marks import slow_rows
from tests.support.runs import bits, embedded, normal, rope_tables

#: Several blocks of rows, and tails.
LEN_Q, LEN_KV, HEADS, HEADS_KV = 37, 70, 4, 2
LENGTHS = {"lengths_q": LEN_Q, "lengths_kv": LEN_KV}
#: Scales of single rows, of groups, of heads by their extrema, of the array; given ones.
QUANTS = (
    QuantConfig(),
    QuantConfig("token", "token", symmetric=False),
    QuantConfig("head", "block", smooth_k=False),
    QuantConfig("head", "head", symmetric=False),
    QuantConfig("tensor", "tensor"),
    QuantConfig("tensor", "tensor", scales=(0.01, 0.03)),
    QuantConfig(pv="int8", smooth_k=False, qk_bits=4),
)


def arrays(dtype: str = "float16", head_dim: int = 16, seed: int = 0) -> tuple[Any, Any, Any]:
    """Rows of very different sizes, and keys with a mean."""
    q, k, v = normal((1, HEADS, LEN_Q, head_dim), (1, HEADS_KV, LEN_KV, head_dim), dtype, seed)
    size = np.exp2(np.arange(LEN_KV) % 9 - 4)[:, None]
    return q, ((k + 1) * size).astype(k.dtype), v


def weights(head_dim: int, *, by_head: bool = False, dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    shapes = [(n, head_dim) if by_head else (head_dim,) for n in (HEADS, HEADS_KV)]
    made = (rng.uniform(0.5, 2, shape).astype(STORAGE[dtype]) for shape in shapes)
    return tuple(made)  # type: ignore[return-value]


def of_tokens(head_dim: int) -> tuple[Any, Any]:
    """Weights for each channel of all heads, which are then normalised together."""
    return tuple(w.reshape(-1) for w in weights(head_dim, by_head=True))  # type: ignore[return-value]


def of_parts(head_dim: int) -> tuple[Any, Any]:
    """Weights of two parts of the rows."""
    rng = np.random.default_rng(6)
    return tuple(rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32) for _ in "qk")  # type: ignore[return-value]


def options_of(head_dim: int, kind: str) -> dict[str, Any]:
    """Return the requested preparation of rows, by name."""
    tables = rope_tables(90, head_dim)
    return {
        "norm": {"qk_norm": weights(head_dim)},
        "rope": {"rope": tables, "rope_offset_q": 5},
        "both": {"qk_norm": weights(head_dim, dtype="float16"), "rope": tables},
        "both, interleaved, by head": {
            "qk_norm": weights(head_dim, by_head=True), "qk_norm_eps": 1e-3, "rope": tables,
            "rope_interleaved": True, "rope_offset_q": 7,
        },
        "both, of tokens": {
            "qk_norm": of_tokens(head_dim), "qk_norm_eps": 1e-3, "rope": tables,
            "rope_interleaved": True, "rope_offset_q": 7,
        },
        "norm, of parts": {"qk_norm": of_parts(head_dim), "qk_norm_split": 19},
        "both, of parts": {
            "qk_norm": of_parts(head_dim), "qk_norm_split": 19, "rope": tables, "rope_offset_q": 7,
        },
    }[kind]  # fmt: skip


KINDS = (
    "norm", "rope", "both", "both, of parts", "both, interleaved, by head", "both, of tokens"
)


def preparation(head_dim: int, **options: Any) -> Preparation:
    asked = {
        "rope": None, "rope_interleaved": False, "rope_offset_q": 0, "qk_norm": None,
        "qk_norm_eps": 1e-6, **options,
    }  # fmt: skip
    found = Preparation.of_arrays(asked, (HEADS, HEADS_KV, LEN_Q, LEN_KV, head_dim))
    assert found is not None
    return found


# ---- the definition ------------------------------------------------------------------------------


def test_the_definition_row_by_row() -> None:
    q, k, _ = arrays("float32")
    w_q, w_k = weights(16, by_head=True)
    found = preparation(16, qk_norm=(w_q, w_k), qk_norm_eps=0.25).exact(q, k)
    for x, w, y in zip((q, k), (w_q, w_k), found, strict=True):
        for head in range(x.shape[1]):
            for row in range(0, x.shape[2], 9):
                one = x[0, head, row].astype(np.float64)
                expected = one / np.sqrt(np.mean(one**2) + 0.25) * w[head]
                np.testing.assert_allclose(y[0, head, row], expected, rtol=1e-13)


def test_the_definition_of_tokens() -> None:
    """One root mean square for all heads, of which one is much larger than the others."""
    q, k, _ = arrays("float32")
    q[:, 2] *= 1000
    w_q, w_k = weights(16, by_head=True)
    found = preparation(16, qk_norm=of_tokens(16), qk_norm_eps=0.25).exact(q, k)
    for x, w, y in zip((q, k), (w_q, w_k), found, strict=True):
        for row in range(0, x.shape[2], 9):
            one = x[0, :, row].astype(np.float64)
            expected = one / np.sqrt(np.mean(one**2) + 0.25) * w
            np.testing.assert_allclose(y[0, :, row], expected, rtol=1e-13)


def test_sums_of_tokens_go_over_heads_first() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, HEADS, 1, 6)).astype(np.float32)
    ones = [np.ones(6 * heads, np.float32) for heads in (HEADS, HEADS_KV)]
    y, _ = preparation(6, qk_norm=tuple(ones)).in_float32(x, x[:, :HEADS_KV])
    s = x * x
    pairs = s[0, :, 0, :3] + s[0, :, 0, 3:]
    of_pair = ((pairs[0] + pairs[1]) + pairs[2]) + pairs[3]
    mean = ((of_pair[0] + of_pair[1]) + of_pair[2]) / np.float32(24)
    assert bits(y) == bits(x * (np.float32(1) / np.sqrt(mean + np.float32(1e-6))))


def test_the_sum_of_squares_has_one_order_at_any_width() -> None:
    """Pairs first, then neighbours: written out for a head_dim that is no power of two."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, HEADS, 1, 6)).astype(np.float32)
    ones = np.ones(6, np.float32)
    y, _ = preparation(6, qk_norm=(ones, ones)).in_float32(x, x[:, :HEADS_KV])
    s = x * x
    total = (s[..., 0] + s[..., 3]) + (s[..., 1] + s[..., 4]) + (s[..., 2] + s[..., 5])
    factor = np.float32(1) / np.sqrt(total / np.float32(6) + np.float32(1e-6))
    assert bits(y) == bits(x * factor[..., None])


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from(KINDS), st.integers(-60, 60))
def test_the_bound_of_r0_holds(dtype: str, seed: int, half: int, kind: str, magnitude: int) -> None:
    rng = np.random.default_rng(seed)
    most = {"float16": 10}.get(dtype, 55)  # squares add up within float32
    x = rng.standard_normal((1, HEADS, 5, 2 * half)) * 2.0 ** min(magnitude, most)
    x = x.astype(STORAGE[dtype])
    q, k = x, x[:, :HEADS_KV] * np.asarray(0.5, x.dtype)
    how = preparation(2 * half, **options_of(2 * half, kind))
    for stored, make in ((False, how.in_float32), (True, how.stored)):
        for found, exact, bound in zip(
            make(q, k),
            how.exact(q, k),
            bounds_prepared.preparation(how, q, k, stored=stored),
            strict=True,
        ):
            assert ratio_to_bound(as_float64(found), exact, bound).max() <= 1
            assert np.isfinite(bound[np.abs(exact) < 1e4]).all()


def test_the_bound_of_r0_notices_mistakes() -> None:
    q, k, _ = arrays(head_dim=32)
    right = options_of(32, "both, interleaved, by head")
    how = preparation(32, **right)
    of_q, of_k = bounds_prepared.preparation(how, q, k)
    exact_q, exact_k = how.exact(q, k)
    w_q, w_k = right["qk_norm"]
    for slip in (
        {"qk_norm": (w_q[::-1].copy(), w_k[::-1].copy())}, {"qk_norm_eps": 1.001e-3},
        {"rope_interleaved": False}, {"rope_offset_q": 6}, {"qk_norm": of_tokens(32)},
    ):  # fmt: skip
        wrong_q, wrong_k = preparation(32, **{**right, **slip}).in_float32(q, k)
        worst = max(
            ratio_to_bound(as_float64(wrong_q), exact_q, of_q).max(),
            ratio_to_bound(as_float64(wrong_k), exact_k, of_k).max(),
        )
        assert worst > 10, slip
    found, _ = how.in_float32(q, k)
    assert 0.02 < ratio_to_bound(as_float64(found), exact_q, of_q).max() <= 1


def test_rows_that_are_not_finite_or_too_large_are_nan() -> None:
    """A sum of squares past float32 must not become a row of zeros."""
    x = np.ones((1, HEADS, 5, 8), np.float32)
    x[0, 0, 1, 3], x[0, 0, 2, 0], x[0, 0, 3, 5] = np.inf, np.nan, 2.0**64
    x[0, 0, 4] = 0
    ones = np.ones(8, np.float32)
    how = preparation(8, qk_norm=(ones, ones))
    y, _ = how.in_float32(x, x[:, :HEADS_KV])
    assert np.isnan(y[0, 0, 1:4]).all() and (y[0, 0, 4] == 0).all()
    assert np.isfinite(y[0, 1:]).all()
    assert np.isinf(bounds_prepared.preparation(how, x, x[:, :HEADS_KV])[0][0, 0, 3]).all()
    ones = [np.ones(8 * heads, np.float32) for heads in (HEADS, HEADS_KV)]
    how = preparation(8, qk_norm=tuple(ones))
    y, _ = how.in_float32(x, x[:, :HEADS_KV])
    assert np.isnan(y[0, :, 1:4]).all() and (y[0, 0, 4] == 0).all()  # the other heads, too
    assert np.isfinite(y[0, :, 0]).all() and np.isfinite(y[0, 1:, 4]).all()
    assert np.isinf(bounds_prepared.preparation(how, x, x[:, :HEADS_KV])[0][0, :, 3]).all()


# ---- as they are quantised (J1) ------------------------------------------------------------------


def assert_codes_are_the_mirrors(
    inputs: tuple[Any, Any, Any], quant: QuantConfig, options: dict[str, Any]
) -> None:
    q, k, v = inputs
    head_dim = q.shape[3]
    z = quantize(q, k, v, quant=quant, backend="interpret", **options).unpacked()
    tiles = scale_tiles(ladder.lookup("fa_int8"), head_dim, quant, None)
    how = preparation(head_dim, **options)
    mirror = quantize_mirror(
        q, k, v, quant, tiles, k_mean=z.k_mean, v_mean=z.v_mean, preparation=how
    )
    for name in ("q_codes", "k_codes", "q_scale", "k_scale", "q_zero", "k_zero", "v_codes"):
        one, other = getattr(z, name), getattr(mirror, name)
        assert (one is None) == (other is None)
        same = one is None or bits(one) == bits(other)
        assert same, name  # pytest takes seconds to compare long bytes
    assert z.out_dtype == q.dtype.name
    if z.k_mean is not None:
        expected = how.exact(q, k)[1].mean(axis=2)
        np.testing.assert_allclose(z.k_mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kind", "quant", "pad"),
    [
        ("float16", 16, "both, interleaved, by head", 0, 0), ("bfloat16", 32, "both", 1, 0),
        ("float32", 24, "norm", 3, 0), ("float16", 64, "both, of tokens", 0, 3),
        ("bfloat16", 32, "both, of parts", 0, 0), ("float32", 6, "both, of parts", 2, 1),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                ("bfloat16", 16, "rope", 5, 0),
                ("float16", 32, "both", 4, 3), ("float32", 16, "both", 6, 0),
                ("float16", 40, "both", 2, 0), ("bfloat16", 24, "both, interleaved, by head", 3, 0),
                ("float16", 128, "both", 0, 0),
                ("float32", 256, "both, interleaved, by head", 1, 0),
                ("float16", 6, "both, interleaved, by head", 0, 1), ("bfloat16", 2, "both", 0, 0),
                ("bfloat16", 256, "both, of tokens", 1, 0), ("float32", 6, "both, of tokens", 3, 1),
                ("bfloat16", 24, "both, of tokens", 4, 0), ("float16", 40, "both, of tokens", 5, 0),
            )
        ),
    ],
)  # fmt: skip
def test_codes_and_scales_are_the_mirrors_to_the_bit(
    dtype: str, head_dim: int, kind: str, quant: int, pad: int
) -> None:
    inputs = arrays(dtype, head_dim)
    if pad:
        inputs = tuple(embedded(x, pad) for x in inputs)  # type: ignore[assignment]
    before = [bits(x) for x in inputs]
    assert_codes_are_the_mirrors(inputs, QUANTS[quant], options_of(head_dim, kind))
    assert [bits(x) for x in inputs] == before, "an input was modified"


@pytest.mark.parametrize(
    ("source", "line", "instead", "quant"),
    [
        pytest.param(
            "prims/io/prepare.cuh", "p.cos + int64_t(p.position + row0)", "p.cos + int64_t(row0)",
            2, marks=pytest.mark.slow,
        ),
        pytest.param(
            "prims/io/prepare.cuh", "(NORM_BY_PART ? 0 : head * p.weight_step)", "0", 2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "prims/io/prepare.cuh", "int offset = 1; offset <", "int offset = 2; offset <", 2,
            marks=pytest.mark.slow,
        ),
        (
            "prims/codes/quantize_rows.cuh", "        made.row[pass] =",
            "        if (row_of(pass) < at.rows) made.row[pass] =", 0,
        ),
    ],
    ids=["positions", "weights of a head", "half of a sum", "rows that do not exist"],
)  # fmt: skip
def test_planted_mistakes_are_seen(
    source: str, line: str, instead: str, quant: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By J1, and by the interpreter: rows that no lane makes are registers without values."""
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    options = options_of(32, "both, interleaved, by head")
    seen = (KernelFault, "never written") if quant == 0 else (AssertionError, "(q|k)_(codes|scale)")
    with pytest.raises(seen[0], match=seen[1]):
        assert_codes_are_the_mirrors(arrays(head_dim=32), QUANTS[quant], options)


def test_rows_that_are_not_finite_spoil_what_shares_their_scale() -> None:
    q, k, v = arrays()
    q[0, 1, 3, 2], k[0, 0, 40, 1] = np.nan, np.inf
    options = options_of(16, "both")
    z = quantize(q, k, v, backend="interpret", **options)
    groups = np.isnan(z.q_scale), np.isnan(z.k_scale)
    assert groups[0].sum() == groups[1].sum() == 1
    assert groups[0][0, 1, 3 // z.group_q] and groups[1][0, 0, 40 // z.group_kv]
    mirror = quantize(q, k, v, **options)
    assert bits(mirror.q_codes) == bits(z.q_codes)
    assert bits(np.isnan(mirror.k_scale)) == bits(groups[1])


@pytest.mark.parametrize(
    ("source", "line", "instead"),
    [
        ("prims/io/prepare.cuh", "factor(p.token_factor + token0)", "factor(p.token_factor)"),
        ("prims/codes/quantize_rows.cuh", "batch * p.length + row0", "row0"),
        ("prepare/token_factors.cu", "p.factor[batch * p.length + token0", "p.factor[token0"),
        ("prepare/token_factors.cu", "float(p.heads * HEAD_DIM)", "float(HEAD_DIM)"),
        *slow_rows([("prepare/token_factors.cu", "int head = 0;", "int head = 1;")]),
    ],
    ids=["first token", "entries", "factors of entries", "a mean of one head", "a head"],
)
def test_planted_mistakes_of_tokens_are_seen(
    source: str, line: str, instead: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By J1, or as a read of factors that nothing wrote."""
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    inputs = [np.concatenate((x, x[..., ::-1] * 2)).astype(x.dtype) for x in arrays(head_dim=32)]
    with pytest.raises((AssertionError, KernelFault)):
        assert_codes_are_the_mirrors(tuple(inputs), QUANTS[2], options_of(32, "both, of tokens"))


def test_a_row_that_is_not_finite_spoils_the_rows_of_its_token() -> None:
    q, k, v = arrays()
    q[0, 1, 3, 2], k[0, 0, 40, 1] = np.nan, np.inf
    options = options_of(16, "both, of tokens")
    z = quantize(q, k, v, backend="interpret", **options)
    assert np.isnan(z.q_scale[0, :, 3 // z.group_q]).all()
    assert np.isnan(z.k_scale[0, :, 40 // z.group_kv]).all()
    assert np.isnan(z.q_scale).sum() == HEADS and np.isnan(z.k_scale).sum() == HEADS_KV


def test_rows_past_a_length_do_not_reach_the_norm_of_tokens() -> None:
    q, k, v = (np.concatenate((x, x)) for x in arrays(head_dim=32))
    lengths = {name: np.array((n, n - 9), np.int32) for name, n in LENGTHS.items()}
    options = {**options_of(32, "both, of tokens"), **lengths, "variant": "fa_int8"}
    expected = attention(q, k, v, backend="interpret", **options)
    for x, n in zip((q, k, v), lengths.values(), strict=False):
        x[1, :, n[1] :] = np.nan
    assert bits(attention(q, k, v, backend="interpret", **options)) == bits(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[-2:])
def test_packed_sequences_are_prepared_each_from_its_own_first_row(kind: str) -> None:
    lengths = [(20, 33), (0, 5), (9, 0), (8, 40)]
    (q, k, v), ends = runs.packed(lengths, HEADS, HEADS_KV, 16)
    options = options_of(16, kind)
    limits = {"max_len_q": 40, "max_len_k": 45}
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    z = quantize(q, k, v, backend="interpret", **named, **limits, **options)
    for one, (_, alone) in zip(z.sequences(), runs.sequences((q, k, v), ends), strict=True):
        expected = quantize(*alone, backend="interpret", **options)
        for name in ("q_codes", "k_codes", "q_scale", "k_scale"):
            assert bits(getattr(one, name)) == bits(getattr(expected, name)), name


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_nothing_is_added_to_the_launches(kind: str) -> None:
    """The default quantisation, and one whose scales all need a pass before; V is included."""
    q, k, v = arrays(head_dim=64)
    options = options_of(64, kind)
    for quant in QUANTS[:4]:
        prepared = plan(q, k, v, variant="fa_int8", quant=quant, backend="interpret", **options)
        plain = plan(q, k, v, variant="fa_int8", quant=quant, backend="interpret")
        sources = [
            [x.module.source for p in one.plans for x in p.launches] for one in (prepared, plain)
        ]
        assert sources[0] == sources[1]
        assert prepared.workspace_bytes == plain.workspace_bytes
    text = explain(q, k, v, variant="fa_int8", **options)
    assert text.count("of prepare/quantize") == 1 and ".cu" in text
    assert ("root mean square as they are quantised" in text) == (kind != "rope")


def test_norms_of_tokens_take_a_pass_over_q_and_one_over_k() -> None:
    q, k, v = arrays(head_dim=64)
    options = options_of(64, "both, of tokens")
    for variant, count in (("fa_int8", 3), ("fa_tc", 4)):
        text = explain(q, k, v, variant=variant, **options)
        assert text.count("of prepare/token_factors.cu") == 2
        assert text.count("of prepare/") == count
        assert "divided by the root mean square of all heads" in text
    one_head = {"qk_norm": (np.ones(64, np.float32),) * 2}
    assert "token_factors" not in explain(q[:, :1], k[:, :1], v[:, :1], variant="fa_tc", **one_head)


def test_k_of_one_head_goes_with_a_norm_of_the_heads_of_q() -> None:
    q, k, v = arrays()
    k, v = k[:, :1], v[:, :1]
    weights = of_tokens(16)[0], np.ones(16, np.float32)
    z = quantize(q, k, v, backend="interpret", qk_norm=weights)
    mirror = quantize(q, k, v, qk_norm=weights)
    alone = quantize(q[:, :1], k, v, qk_norm=(weights[1], weights[1]))
    assert bits(z.q_codes) == bits(mirror.q_codes) and bits(z.q_scale) == bits(mirror.q_scale)
    assert bits(z.k_codes) == bits(mirror.k_codes) == bits(alone.k_codes)


def test_features_say_nothing_where_nothing_is_normalised() -> None:
    assert "CFG_QK_NORM" not in Features("float16", 8).defines()
    for number, kind in ((1, "head"), (2, "token"), (3, "part")):
        assert Features("float16", 8, qk_norm=kind).defines()["CFG_QK_NORM"] == number
    with pytest.raises(ValueError, match=r"features.qk_norm must be one of .* got 'row'"):
        Features("float16", 8, qk_norm="row")


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [(128, 3), (128, 4), (128, 5), *slow_rows(((64, 2), (256, 3), (256, 4), (64, 6)))],
)
def test_what_runs_spills_nothing(dtype: str, head_dim: int, kind: int) -> None:
    """Registers of two blocks of 256 threads for a multiprocessor."""
    x = Operand.contiguous((1, 2, 500, head_dim), 2)
    how = ("half_split", 0, 1), ("", 0, 1), ("half_split", 0, 1), *[("interleaved", 3, 2)] * 2
    how = *how, ("interleaved_by_column", 0, 2), ("", 0, 2)
    parts = {"by_token": kind == 4, "split": 200 if kind > 4 else 0}
    own = {n: Prepares(n, *how[kind], 1e-6, **parts) for n in "qk"}
    part = {
        n: Part(x, g, smooth=n == "k", prepares=own[n]) for n, g in (("q", 2), ("k", 16))
    }
    passes = plan_preparation(x, dtype, own["q"])
    for launch in (*plan_quantize(dtype, **part).launches, *passes.launches):
        used = kc.build(launch.module, "sm_90").kernels[launch.entry]
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
        assert used.registers * launch.block <= 2**16 and used.static_smem <= 48 * 1024
        if launch.entry == "quantize":
            assert used.registers <= 128


# ---- the pass before other rungs -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["norm", "both", "both, of parts", "both, interleaved, by head", "both, of tokens"]
)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "pad"),
    [("float16", 64, 0), ("bfloat16", 24, 8), ("float32", 6, 1)],
)
def test_the_pass_prepares_to_the_bit(dtype: str, head_dim: int, pad: int, kind: str) -> None:
    q, k, _ = arrays(dtype, head_dim)
    how = preparation(head_dim, **options_of(head_dim, kind))
    for i, (x, expected) in enumerate(zip((q, k), how.stored(q, k), strict=True)):
        laid = embedded(x, pad) if pad else x
        made = plan_preparation(Operand.of(laid), dtype, prepares(how)["qk"[i]])
        turned = np.empty(x.shape, x.dtype)
        buffers = {name: memory.as_input(a) for name, a in {"x": laid, **how.buffers}.items()}
        interpret.run(made, {**buffers, "turned": turned})
        assert bits(turned) == bits(expected)


def prepares(how: Preparation) -> dict[str, Any]:
    from cupyattn.plans.prepare_rows import prepares_of

    return prepares_of(how)


# ---- every rung ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[-2:])
@pytest.mark.parametrize(
    "rung", [*runs.in_turn(3, runs.PORTABLE), pytest.param("fa_int8@fused", marks=pytest.mark.slow)]
)
def test_rungs_attend_with_prepared_operands(rung: str, kind: str) -> None:
    """Within the bounds, J3 of fa_int8 against operands prepared in float64 among them."""
    q, k, v = arrays(head_dim=32)
    options = {**options_of(32, kind), "causal": True}
    for backend in ("mirror", "interpret"):
        report = runs.run(rung, (q, k, v), backend=backend, **options).check()
        assert report.tightness < 0.05
        assert (report.quantisation is None) != rung.startswith("fa_int8")


@pytest.mark.parametrize("rung", ["fa", "fa_tc", "fa_int8"])
def test_the_bounds_notice_what_was_left_out(rung: str) -> None:
    q, k, v = arrays(head_dim=32)
    right = options_of(32, "both")
    for slip in ({"qk_norm": None}, {"rope": None}):
        wrong = runs.run(rung, (q, k, v), **{**right, **slip})
        report = replace(wrong, options=right).judge()  # of codes that were made otherwise: J3
        found = report.ratio if report.quantisation is None else report.quantisation
        assert found > 1, slip


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.sampled_from(range(len(QUANTS))),
    st.sampled_from(DTYPES), st.sampled_from((2, 6, 16, 40)),
)  # fmt: skip
def test_j2_and_j3_hold(seed: int, kind: str, quant: int, dtype: str, head_dim: int) -> None:
    inputs = arrays(dtype, head_dim, seed)
    options = options_of(head_dim, kind)
    runs.run("fa_int8", inputs, quant=QUANTS[quant], **options).check()


def test_packed_calls_prepare_every_sequence() -> None:
    lengths = [(20, 33), (0, 5), (8, 40)]
    inputs, ends = runs.packed(lengths, HEADS, HEADS_KV, 16)
    for rung, backend in (("fa_int8", "mirror"), ("fa", "interpret")):
        for run in runs.run_packed(rung, inputs, ends, backend=backend, **options_of(16, "both")):
            run.check()


@pytest.mark.parametrize(
    ("variant", "backend"), [("fa_int8", "interpret"), ("fa_tc", "interpret"), ("fa", "mirror")]
)
def test_a_prepared_call_keeps_the_weights(variant: str, backend: str) -> None:
    q, k, v = arrays()
    options: dict[str, Any] = {
        "variant": variant, "backend": backend, **options_of(16, "both"),
    }  # fmt: skip
    prepared = plan(q, k, v, **options)
    for inputs in ((q, k, v), arrays(seed=1)):
        assert bits(prepared(*inputs)) == bits(attention(*inputs, **options))


# ---- arguments -----------------------------------------------------------------------------------

W = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"qk_norm": W}, TypeError, "qk_norm must be a pair (q_weight, k_weight) of arrays, got"),
        ({"qk_norm": (W,)}, TypeError, "qk_norm must be a pair (q_weight, k_weight)"),
        ({"qk_norm": (W, [1.0])}, TypeError, "k_weight must be a NumPy or CuPy array"),
        (
            {"qk_norm": (W, W[:8])}, ValueError,
            "k_weight of qk_norm must have shape (16,), (2, 16) or (32,), got (8,)",
        ),
        (
            {"qk_norm": (np.ones((2, 16), np.float32), W)}, ValueError,
            "q_weight of qk_norm must have shape (16,), (4, 16) or (64,), got (2, 16)",
        ),
        (
            {"qk_norm": (np.ones(64, np.float32), W)}, ValueError,
            "must both have a number for each channel of all heads, (64,) and (32,), or neither, "
            "got (64,) and (16,)",
        ),
        (
            {"qk_norm": (W.astype(np.float64), W)}, TypeError,
            "q_weight of qk_norm must be one of float16, bfloat16, float32, got float64",
        ),
        ({"qk_norm": (W, W), "qk_norm_eps": 0.0}, ValueError, "qk_norm_eps must be a number"),
        ({"qk_norm": (W, W), "qk_norm_eps": "1"}, ValueError, "from 2**-126 to 2**127, got '1'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(
    options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for call in (attention, explain, plan):
        with pytest.raises(error, match=re.escape(sentence)):
            call(*arrays(), **options)


def test_an_odd_head_dim_and_codes_are_refused() -> None:
    q, k, v = normal((1, 2, 5, 33), (1, 2, 7, 33))
    ones = np.ones(33, np.float32)
    with pytest.raises(ValueError, match="qk_norm takes an even head_dim, got 33"):
        attention(q, k, v, qk_norm=(ones, ones))
    z = quantize(*arrays())
    assert isinstance(z, QuantizedQKV)
    with pytest.raises(ValueError, match="come before quantising"):
        attention(z, variant="fa_int8", qk_norm=(W, W))
