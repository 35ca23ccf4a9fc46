"""The mirror: close to the definition, rounded where the record says, equal where it must be.

The limits here are rough, one formula for all rungs; `cupyattn.bounds` holds the derived ones.
"""

# ruff: noqa: E741  (O and l are the paper's letters)

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from cupyattn import distributions
from cupyattn.arrays.groups import merge_heads, split_heads
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.kernels import numerics
from cupyattn.kernels.ladder import VARIANTS
from cupyattn.kernels.numerics import HALF_SUBNORMAL, UNIT_ROUNDOFF
from cupyattn.kernels.tiles import Tiles
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact, score_blocks, softmax_exact
from cupyattn.reference.rounding import ex2, fma32, round_to
from cupyattn.reference.unfused import scores_mirror, softmax_mirror, weighted_sum_mirror
from tests.support.problems import Problem, problems

FLOAT_RUNGS = [name for name, variant in VARIANTS.items() if variant.family != "int8"]
CELLS = [(name, dtype) for name in FLOAT_RUNGS for dtype in VARIANTS[name].dtypes]
TILES = st.builds(Tiles, st.sampled_from([4, 16]), st.sampled_from([1, 3, 8, 16, 64]), st.just(1))


def quantize(q: Any, k: Any, v: Any, group_q: int, group_kv: int, smooth: bool) -> SimpleNamespace:
    """Symmetric codes, one scale for every group of rows: what the mirror asks of its operands."""

    def codes(x: Any, group: int) -> tuple[Any, Any]:
        starts = range(0, x.shape[2], group)
        scale = [np.abs(x[:, :, i : i + group]).max(axis=(2, 3)) / 127 for i in starts]
        scale = np.stack(scale, axis=-1).astype(np.float32)
        scale[scale == 0] = 1
        by_row = np.repeat(scale, group, axis=-1)[..., : x.shape[2], None]
        return np.clip(np.rint(x / by_row), -127, 127).astype(np.int8), scale

    out_dtype = q.dtype.name
    q, k = q.astype(np.float32), k.astype(np.float32)
    mean = k.mean(axis=2) if smooth else None
    q_codes, q_scale = codes(q, group_q)
    k_codes, k_scale = codes(k if mean is None else k - mean[:, :, None], group_kv)
    made = SimpleNamespace(
        q_codes=q_codes,
        k_codes=k_codes,
        q_scale=q_scale,
        k_scale=k_scale,
        group_q=group_q,
        group_kv=group_kv,
        v=v.astype(np.float16) if out_dtype == "float32" else v,
        k_mean=mean,
        q_zero=None,
        k_zero=None,
        out_dtype=out_dtype,
        form="portable",
        config=None,
        value_codes=lambda: None,
        v_scale=None,
        v_mean=None,
        v_zero=None,
        cu_seqlens_q=None,
        has_queries=True,
        group_v=0,
    )
    made.unpacked = lambda: made
    return made


def dequantize(x: SimpleNamespace, *, mean: bool) -> tuple[Any, Any, Any]:
    """The operands that the codes stand for, in float64; the mean of the keys put back or not."""
    length_q, length_kv = x.q_codes.shape[2], x.k_codes.shape[2]
    q_scale = np.repeat(x.q_scale.astype(np.float64), x.group_q, axis=-1)[..., :length_q, None]
    k_scale = np.repeat(x.k_scale.astype(np.float64), x.group_kv, axis=-1)[..., :length_kv, None]
    k = x.k_codes * k_scale
    if mean and x.k_mean is not None:
        k = k + x.k_mean[:, :, None]
    return x.q_codes * q_scale, k, as_float64(x.v)


def assert_close(
    o: Any, lse: Any, operands: tuple[Any, Any, Any], options: dict[str, Any], n: numerics.Numerics
) -> None:
    """Hold o and lse to a rough limit on what the rounding points of `n` can do to them."""
    q, k, v = operands
    exact, lse_exact = attention_exact(q, k, v, **options, return_lse=True)
    limit, lse_limit = np.empty_like(exact), np.empty_like(lse_exact)
    sizes = (split_heads(x, k.shape[1]) for x in (limit, lse_limit))
    limit_view, lse_view = sizes
    u, len_kv, head_dim = 2.0**-23, k.shape[2], q.shape[3]
    scale = head_dim**-0.5 if options["scale"] is None else options["scale"]
    for block in score_blocks(q, k, v, **options):
        P, _ = softmax_exact(block.S)
        # R2, R3: head_dim + 8 roundings of what a score sums up; R4: M, S c - M and exp2.
        reach = np.abs(block.q) @ np.abs(block.k).swapaxes(-1, -2) * scale
        delta = (head_dim + 8) * u * np.where(block.admitted, reach, 0).max(-1, initial=0.0) + 8 * u
        # R5, R6: P in its type, the sums over the keys.
        relative = np.expm1(2 * delta) + UNIT_ROUNDOFF[n.p_type] + 3 * (len_kv + 8) * u
        lost = HALF_SUBNORMAL[n.p_type] + 2.0**-126
        magnitude = np.abs(block.v)
        limit_view[block.index] = relative[..., None] * (P @ magnitude) + lost * magnitude.sum(
            -2, keepdims=True
        )
        lse_view[block.index] = delta + (len_kv + 8) * u
    # R7: the store.
    limit += UNIT_ROUNDOFF[n.out_type] * (np.abs(exact) + limit) + HALF_SUBNORMAL[n.out_type]
    error = np.abs(as_float64(o) - exact)
    assert (error <= limit).all(), (error / limit).max()
    empty = lse_exact == -np.inf
    assert_array_equal(lse == -np.inf, empty)
    with np.errstate(invalid="ignore"):
        lse_limit += 8 * u * np.abs(lse_exact)
        lse_error = np.abs(lse - lse_exact)
    assert (lse_error[~empty] <= lse_limit[~empty]).all()


@pytest.mark.parametrize("name", distributions.NAMES)
@pytest.mark.parametrize("variant, dtype", CELLS)
def test_close_to_exact_on_every_distribution(variant: str, dtype: str, name: str) -> None:
    operands = distributions.make(name, 1, 4, 100, 150, 64, dtype, seed=4, heads_kv=2)
    n = numerics.numerics(VARIANTS[variant].family, "portable", dtype)
    for causal in (False, True):
        options = {"scale": None, "causal": causal, "causal_align": "bottom-right"}
        o, lse = attention_mirror(*operands, variant=variant, **options, return_lse=True)
        assert o.dtype == STORAGE[dtype] and lse.dtype == np.float32
        assert_close(o, lse, operands, options, n)


@pytest.mark.parametrize("variant, dtype", CELLS)
@given(data=st.data(), tiles=TILES)
def test_close_to_exact_at_every_shape(
    variant: str, dtype: str, data: st.DataObject, tiles: Tiles
) -> None:
    problem = data.draw(problems(dtypes=(dtype,)))
    operands = problem.arrays()
    o, lse = attention_mirror(
        *operands, variant=variant, tiles=tiles, **problem.options, return_lse=True
    )
    n = numerics.numerics(VARIANTS[variant].family, "portable", dtype)
    assert_close(o, lse, operands, problem.options, n)


@given(
    problem=problems(min_len=1),
    tiles=TILES,
    groups=st.tuples(*[st.sampled_from([1, 2, 16, 64])] * 2),
    smooth=st.booleans(),
)
def test_int8_is_close_to_exact_attention_of_what_the_codes_stand_for(
    problem: Problem, tiles: Tiles, groups: tuple[int, int], smooth: bool
) -> None:
    codes = quantize(*problem.arrays(), *groups, smooth)
    o, lse = attention_mirror(
        codes, variant="fa_int8", tiles=tiles, **problem.options, return_lse=True
    )
    n = numerics.numerics("int8", "portable", problem.dtype)
    assert o.dtype == STORAGE[problem.dtype]
    # The mean is common to all keys: it moves lse alone, and the kernel never sees it in a score.
    exact = attention_exact(*dequantize(codes, mean=False), **problem.options)
    q, k, v = dequantize(codes, mean=True)
    assert_allclose(attention_exact(q, k, v, **problem.options), exact, rtol=1e-6, atol=1e-6)
    assert_close(o, lse, (q, k, v), problem.options, n)


@pytest.mark.parametrize("shared", [False, True])
def test_int8_scores_to_the_bit(shared: bool) -> None:
    q, k, v = distributions.make("normal", 2, 4, 21, 37, 48, heads_kv=2)
    x = quantize(q, k, v, 2, 16, smooth=False)
    if shared:  # one scale for all: both leading axes and the groups shrink to one
        x.q_scale, x.k_scale = x.q_scale[:1, :1, :1], x.k_scale[:1, :1, :1]
        x.group_q = x.group_kv = 2**30
    f32, scale = np.float32, 0.41
    assert f32(scale * np.log2(np.e)) != f32(scale) * f32(np.log2(np.e))  # rounded once, not thrice
    given = {"scale": scale, "tiles": Tiles(64, 64, 4)}
    _, steps = attention_mirror(x, variant="fa_int8", trace=True, **given)
    dot = x.q_codes.astype(np.int64) @ np.repeat(x.k_codes, 2, 1).astype(np.int64).swapaxes(2, 3)
    for b, h, i, j in np.ndindex(2, 4, 21, 37):
        at_q, at_k = ((0, 0, 0),) * 2 if shared else ((b, h, i // 2), (b, h // 2, j // 16))
        by_key = f32(dot[b, h, i, j]) * x.k_scale[at_k]
        expected = by_key * (f32(scale * np.log2(np.e)) * x.q_scale[at_q])
        assert steps[0].S[b, h, i, j] == expected


@given(problem=problems(min_len=1), tiles=TILES, variant=st.sampled_from(FLOAT_RUNGS))
def test_trace_holds_together(problem: Problem, tiles: Tiles, variant: str) -> None:
    if problem.dtype not in VARIANTS[variant].dtypes:
        problem = replace(problem, dtype="float16")
    q, k, v = problem.arrays()
    o, lse, steps = attention_mirror(
        q, k, v, variant=variant, tiles=tiles, **problem.options, return_lse=True, trace=True
    )
    n = numerics.numerics(VARIANTS[variant].family, "portable", problem.dtype)
    block_kv = tiles.block_kv if n.online else problem.len_kv
    assert [step.kv0 for step in steps] == list(range(0, problem.len_kv, block_kv))
    assert_array_equal(np.concatenate([s.S for s in steps], -1) > -np.inf, mask_of(problem, q))

    # The last m and l are the log-sum-exp.
    with np.errstate(divide="ignore", invalid="ignore"):
        final = (steps[-1].m + np.log2(steps[-1].l)) * np.log(2)
    assert_allclose(lse, final, rtol=1e-6)

    # The steps replay: m is a running maximum, and alpha, P and V make O.
    m, l = np.full(lse.shape, -np.inf), np.zeros(lse.shape)
    O = np.zeros(q.shape)
    values = np.repeat(as_float64(v), problem.group, axis=1)
    for step in steps:
        assert (step.m >= m).all()
        with np.errstate(invalid="ignore"):
            alpha = np.where(m == -np.inf, 0.0, np.exp2(m - step.m))
        assert_allclose(step.alpha, alpha, rtol=1e-5, atol=2.0**-126)
        assert_array_equal(step.P, round_to(step.P, n.p_type))
        O = O * alpha[..., None] + step.P @ values[:, :, step.kv0 : step.kv0 + block_kv]
        if n.online:
            loss = UNIT_ROUNDOFF[n.p_type] + 1e-5, 40 * HALF_SUBNORMAL[n.p_type] + 1e-37
            assert_allclose(step.l, l * alpha + step.P.sum(-1), rtol=loss[0], atol=loss[1])
        m, l = step.m.astype(float), step.l.astype(float)
    if n.online:
        O /= np.where(l == 0, 1, l)[..., None]
    spread = np.abs(as_float64(v)).max()
    assert_allclose(
        as_float64(o), O, rtol=UNIT_ROUNDOFF[problem.dtype] * 1.01, atol=2e-5 * spread + 1e-7
    )


def mask_of(problem: Problem, q: Any) -> Any:
    """Return the admitted (row, key) pairs of every head."""
    return np.broadcast_to(problem.admitted(), (*q.shape[:3], problem.len_kv))


def test_l_is_summed_from_p_before_it_is_rounded() -> None:
    q, k, v = distributions.make("normal", 1, 1, 16, 64, 32, "bfloat16", seed=9)
    _, (step,) = attention_mirror(q, k, v, variant="fa_tc", tiles=Tiles(16, 64, 1), trace=True)
    factor = np.float32(32**-0.5 * np.log2(np.e))
    whole = ex2(fma32(step.S, factor, -step.m[..., None]))
    assert_array_equal(step.P, round_to(whole, "bfloat16"))
    assert_array_equal(step.l, whole.sum(-1))
    assert (step.l != step.P.sum(-1)).any()


def test_rounding_of_the_maximum_cancels_between_steps() -> None:
    # Scores 10,000 + j, exact in float32, the maximum rises at every step. With alpha taken from
    # the unrounded maximum the error would be near 2^-25 * 14,427 = 4e-4.
    length = 64
    q = np.ones((1, 1, 1, 1), np.float32)
    k = (1e4 + np.arange(length, dtype=np.float32)).reshape(1, 1, length, 1)
    v = distributions.make("normal", 1, 1, 1, length, 1, "float32")[2]
    for variant in ("fa", "unfused"):
        o = attention_mirror(q, k, v, variant=variant, tiles=Tiles(1, 2, 1), scale=1.0)
        assert_allclose(o, attention_exact(q, k, v, scale=1.0), rtol=0, atol=3e-6)


@pytest.mark.parametrize("variant, dtype", CELLS)
def test_one_key_gives_its_value(variant: str, dtype: str) -> None:
    q, k, v = distributions.make("normal", 1, 2, 9, 1, 20, dtype)
    o = attention_mirror(q, k, v, variant=variant)
    if dtype == "float32":
        # Not to the bit: p = exp2(m c - fl(m c)) is 1 only nearly, and p v (1 / p) rounds thrice.
        assert_allclose(o, np.broadcast_to(v, o.shape), rtol=4 * 2.0**-24)
        q[:] = 0
        o = attention_mirror(q, k, v, variant=variant)
    assert_array_equal(o, np.broadcast_to(v, o.shape))


@pytest.mark.parametrize("variant, dtype", CELLS)
def test_equal_scores_average_integers_to_the_bit(variant: str, dtype: str) -> None:
    q, k, v = distributions.make("constant", 2, 2, 8, 64, 16, dtype)
    v[:] = np.random.default_rng(0).integers(-4, 5, v.shape)
    o, lse = attention_mirror(
        q, k, v, variant=variant, causal=True, causal_align="top-left", return_lse=True
    )
    for row in (0, 1, 3, 7):  # 1, 2, 4, 8 keys
        mean = v[:, :, : row + 1].astype(np.float64).mean(axis=2)
        assert_array_equal(o[:, :, row], mean)
        assert_allclose(lse[:, :, row], 4 + np.log(row + 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_unfused_is_its_three_kernels(dtype: str) -> None:
    q, k, v = distributions.make("normal", 2, 4, 19, 45, 24, dtype, heads_kv=2)
    o, lse = attention_mirror(q, k, v, variant="unfused", scale=0.2, causal=True, return_lse=True)
    S = scores_mirror(q, k, scale=0.2, causal=True)
    P, lse_alone = softmax_mirror(S)
    assert_array_equal(weighted_sum_mirror(P, v), o)
    assert_array_equal(lse_alone, lse)
    assert S.shape == P.shape == (2, 4, 19, 45)
    # Each against its own definition.
    exact = merge_heads(next(score_blocks(q, k, v, scale=0.2, causal=True)).S)
    assert_allclose(S, exact, rtol=1e-5, atol=1e-5)
    assert_allclose(P, softmax_exact(S.astype(np.float64))[0], rtol=2e-6)
    expected = P.astype(np.float64) @ np.repeat(as_float64(v), 2, axis=1)
    assert_allclose(
        as_float64(weighted_sum_mirror(P, v)), expected, rtol=UNIT_ROUNDOFF[dtype], atol=1e-6
    )


@pytest.mark.parametrize("variant", FLOAT_RUNGS)
def test_masked_keys_change_no_bit(variant: str) -> None:
    q, k, v = distributions.make("normal", 1, 2, 40, 40, 16, seed=1)
    o, lse = attention_mirror(q, k, v, variant=variant, causal=True, return_lse=True)
    k_bad, v_bad = k.copy(), v.copy()
    k_bad[:, :, 25:] = np.nan
    v_bad[:, :, 25:] = 1e4
    o_bad, lse_bad = attention_mirror(
        q, k_bad, v_bad, variant=variant, causal=True, return_lse=True
    )
    assert_array_equal(o_bad[:, :, :25], o[:, :, :25])
    assert_array_equal(lse_bad[:, :, :25], lse[:, :, :25])
    assert (
        np.isnan(o_bad[:, :, 25:].astype(np.float32)).all() and np.isnan(lse_bad[:, :, 25:]).all()
    )


def test_a_value_that_is_not_finite_stays_within_the_tiles_that_visit_it() -> None:
    q, k, v = distributions.make("normal", 1, 1, 48, 48, 16, seed=1)
    v[0, 0, 40] = np.nan
    o = attention_mirror(q, k, v, tiles=Tiles(16, 8, 1), causal=True)
    # Key 40 opens the step 40 to 47, which only the tile of rows 32 to 47 visits.
    assert_array_equal(np.isnan(o).all(axis=-1)[0, 0], np.arange(48) >= 32)
    assert_array_equal(np.isnan(o).any(axis=-1)[0, 0], np.arange(48) >= 32)


@pytest.mark.parametrize("variant", FLOAT_RUNGS)
@pytest.mark.parametrize("len_q, len_kv", [(5, 0), (0, 5), (0, 0), (70, 3)])
def test_rows_that_attend_to_nothing(variant: str, len_q: int, len_kv: int) -> None:
    q, k, v = distributions.make("normal", 1, 2, len_q, len_kv, 8)
    o, lse = attention_mirror(q, k, v, variant=variant, causal=True, return_lse=True)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    empty = max(0, len_q - len_kv)
    assert not o[:, :, :empty].any() and (lse[:, :, :empty] == -np.inf).all()
    assert np.isfinite(lse[:, :, empty:]).all()


def test_numerics_drive_the_mirror() -> None:
    q, k, v = distributions.make("normal", 1, 2, 32, 48, 16, "float16")
    exact = attention_exact(q, k, v)
    n = numerics.numerics("tensor_core", "portable", "float16")

    def worst(**changes: Any) -> float:
        o = attention_mirror(q, k, v, variant="fa", numerics=replace(n, **changes))
        return float(np.abs(as_float64(o) - exact).max())

    assert_array_equal(
        attention_mirror(q, k, v, numerics=n, tiles=Tiles(16, 64, 1)),
        attention_mirror(q, k, v, variant="fa_tc", tiles=Tiles(16, 64, 1)),
    )
    assert worst(out_type="float32", p_type="float32") < 2e-6
    assert 1e-5 < worst(out_type="float32") < 5e-4 < worst(out_type="float32", p_type="bfloat16")
    assert worst(out_type="float32", p_type="float32", v_type="bfloat16") > 5e-4
    assert worst(out_type="float32", p_type="float32", k_type="bfloat16") > 5e-4
    assert worst(out_type="float32", p_type="bfloat16", online=False) > 5e-4
    for scaling in ("natural", "folded"):
        for online in (False, True):
            assert (
                worst(out_type="float32", p_type="float32", scaling=scaling, online=online) < 2e-6
            )


def test_inputs_are_left_alone() -> None:
    arrays = distributions.make("normal", 1, 2, 20, 20, 8, "float32")
    copies = [x.copy() for x in arrays]
    for variant in ("unfused", "fa"):
        attention_mirror(*arrays, variant=variant, causal=True)
    for x, copy in zip(arrays, copies, strict=True):
        assert_array_equal(x, copy)


def test_says_what_is_wrong() -> None:
    q, k, v = distributions.make("normal", 1, 2, 4, 4, 8)
    codes = quantize(q, k, v, 2, 2, smooth=False)
    with pytest.raises(ValueError, match="variant must be one of"):
        attention_mirror(q, k, v, variant="flash")
    with pytest.raises(ValueError, match="'dequantised' does not go with arrays"):
        attention_mirror(q, k, v, variant="fa_int8")
    with pytest.raises(ValueError, match="'folded' does not go with quantised"):
        attention_mirror(codes, variant="fa_tc")
    with pytest.raises(ValueError, match="k and v must be None"):
        attention_mirror(codes, k, v, variant="fa_int8")
    with pytest.raises(TypeError, match="may only be left out"):
        attention_mirror(q)
    with pytest.raises(TypeError, match="must be of one type, float16, bfloat16 or float32"):
        attention_mirror(q, k, v.astype(np.float32))
    with pytest.raises(ValueError, match="agree on batch and len_kv"):
        weighted_sum_mirror(np.zeros((1, 2, 4, 3), np.float32), v)
