"""Rows of Q and K times a Hadamard matrix before they become codes: `QuantConfig(rotate=...)`.

Rows whose factors come first, behind a norm by head and tables by column, are here, too.

J1 is that the kernels make the mirror's bits at every head_dim and granularity. Scores of rotated
rows are scores of the rows (R0, J3), and channels of large numbers cost as little as computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import attention, explain, plan, quantize, quantize_kv, testing
from cupyattn.arrays.kinds import STORAGE, as_float64
from cupyattn.arrays.operand import Operand
from cupyattn.bounds import prepared as bounds_prepared
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.kernels import ladder
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from cupyattn.plans.prepare_rows import Prepares
from cupyattn.plans.quantize import operand_parts, plan_quantize
from cupyattn.problem import choose
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import Preparation
from cupyattn.quant import QuantConfig
from cupyattn.quant.rotation import matrix
from cupyattn.reference.quantize import quantize_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.support import runs
from tests.support.marks import slow_rows
from tests.support.runs import bits, column_tables, embedded, normal, rope_tables

ROTATE = "hadamard"
QUANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "rows, zero points": {
        "granularity_q": "token", "granularity_k": "token", "symmetric": False,
    },
    "extrema of heads": {
        "granularity_q": "head", "granularity_k": "head", "symmetric": False,
    },
    "array": {"granularity_q": "tensor", "granularity_k": "tensor"},
    "4 bits, not smoothed": {"qk_bits": 4, "smooth_k": False},
    "codes of V": {"pv": "int8"},
}  # fmt: skip
HOW = Preparation(rotate=True)
#: Keys, of which one channel is so many times as large.
LARGE = 30.0


def inputs(
    head_dim: int, dtype: str = "float16", *, large: float = 1.0, len_kv: int = 70
) -> tuple[Any, Any, Any]:
    q, k, v = normal((1, 4, 37, head_dim), (1, 2, len_kv, head_dim), dtype)
    k[..., 5] *= np.asarray(large, k.dtype)
    return q, k, v


def assert_codes_are_the_mirrors(
    arrays: tuple[Any, Any, Any], quant: QuantConfig, **options: Any
) -> None:
    z = quantize(*arrays, quant=quant, backend="interpret", **options).unpacked()
    tiles = scale_tiles(ladder.lookup("fa_int8"), arrays[0].shape[3], quant, None)
    asked = {
        "rope": None, "rope_interleaved": False, "rope_offset_q": 0, "qk_norm": None,
        "qk_norm_eps": 1e-6, **options,
    }  # fmt: skip
    sizes = 4, 2, 37, 70, arrays[0].shape[3]
    how = Preparation.of_arrays(asked, sizes, quant.rotate)
    mirror = quantize_mirror(
        *arrays, quant, tiles, k_mean=z.k_mean, v_mean=z.v_mean, preparation=how
    )
    for name in ("q_codes", "k_codes", "q_scale", "k_scale", "q_zero", "k_zero", "v_codes"):
        one, other = getattr(z, name), getattr(mirror, name)
        assert (one is None) == (other is None)
        assert one is None or bits(one) == bits(other), name


@pytest.mark.parametrize(
    ("dtype", "head_dim", "quant", "pad"),
    [
        ("float16", 64, "default", 0), ("float32", 128, "rows, zero points", 0),
        *slow_rows((
            ("bfloat16", 64, "extrema of heads", 0), ("float16", 128, "array", 0),
            ("bfloat16", 128, "default", 0), ("float16", 256, "4 bits, not smoothed", 0),
            ("float32", 256, "default", 0), ("float16", 128, "codes of V", 0),
            ("float16", 64, "rows, zero points", 1), ("float32", 256, "default", 1),
            ("bfloat16", 256, "extrema of heads", 3),
        )),
    ],
)  # fmt: skip
def test_codes_and_scales_are_the_mirrors_to_the_bit(
    dtype: str, head_dim: int, quant: str, pad: int
) -> None:
    arrays = inputs(head_dim, dtype, large=LARGE)
    if pad:  # narrow accesses: columns of a lane lie further apart
        arrays = tuple(embedded(x, pad) for x in arrays)
    before = [bits(x) for x in arrays]
    assert_codes_are_the_mirrors(arrays, QuantConfig(**QUANTS[quant], rotate=ROTATE))
    assert [bits(x) for x in arrays] == before, "an input was modified"


@pytest.mark.parametrize(
    ("head_dim", "interleaved", "heads"),
    [
        (64, True, (1, 1)), (64, False, (4, 2)),
        *slow_rows(((128, False, (1, 1)), (256, True, (1, 1)), (128, True, (4, 2)))),
    ],
)  # fmt: skip
def test_a_rotation_follows_norm_and_positions(
    head_dim: int, heads: tuple[int, int], *, interleaved: bool
) -> None:
    """Norms of each head, and of all heads together."""
    weights = tuple(np.linspace(0.5, 2, n * head_dim, dtype=np.float32) for n in heads)
    assert_codes_are_the_mirrors(
        inputs(head_dim), QuantConfig(rotate=ROTATE), qk_norm=weights,
        rope=rope_tables(90, head_dim), rope_interleaved=interleaved, rope_offset_q=3,
    )  # fmt: skip


# ---- norms by head and tables by column ----------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "quant", "interleaved"),
    [
        ("float16", 64, "default", True), ("float32", 6, "rows, zero points", False),
        *slow_rows((
            ("bfloat16", 128, "default", True), ("float16", 128, "codes of V", False),
            ("bfloat16", 24, "extrema of heads", True), ("float32", 256, "array", False),
            ("bfloat16", 8, "default", True), ("float16", 96, "rows, zero points", True),
        )),
    ],
)  # fmt: skip
def test_factors_of_norms_come_before_tables_by_column(
    dtype: str, head_dim: int, quant: str, *, interleaved: bool
) -> None:
    """A lane makes the factors of some rows; rows of one lane and of few lanes among them."""
    weights = tuple(np.linspace(0.5, 2, head_dim, dtype=np.float32) for _ in "qk")
    assert_codes_are_the_mirrors(
        inputs(head_dim, dtype, large=LARGE), QuantConfig(**QUANTS[quant]),
        qk_norm=weights, rope=column_tables(90, head_dim), rope_interleaved=interleaved,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("own = lane_in_row() == i ? other : own;", ""),
        ("__shfl_sync(FULL_WARP, own, i, LANES)", "own"),
    ],
    ids=["factor of the first row", "factor of another row"],
)
def test_planted_mistakes_of_factors_are_seen(
    line: str, instead: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place("prims/codes/quantize_rows.cuh", line, instead, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="(q|k)_(codes|scale)"):
        test_factors_of_norms_come_before_tables_by_column(
            "float16", 64, "default", interleaved=True
        )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "pairs"),
    [
        ("bfloat16", 128, "interleaved"),
        *slow_rows((
            ("float16", 64, "interleaved"), ("bfloat16", 64, "half_split"),
            ("float16", 128, "half_split"),
        )),
    ],
)  # fmt: skip
def test_rows_with_norms_and_tables_by_column_stay_in_registers(
    dtype: str, head_dim: int, pairs: str
) -> None:
    x = Operand.contiguous((1, 24, 4608, head_dim), 2)
    how = {n: Prepares(n, f"{pairs}_by_column", vectors=1, eps=1e-6) for n in "qk"}
    for quant in choose.QUANT.values():
        tiles = scale_tiles(ladder.lookup("fa_int8"), head_dim, quant, "sm_90a")
        parts = operand_parts(quant, tiles, dict.fromkeys("qkv", x), dict.fromkeys("qkv"), how)
        (launch,) = plan_quantize(dtype, **parts, p_type=quant.value_p_type).launches
        used = kc.build(launch.module, "sm_90a").kernels[launch.entry]
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{quant}: {used}"


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        pytest.param("if (minus && second) x = -x;", "", marks=pytest.mark.slow),
        pytest.param(
            "__fadd_rn(other, second ? -x : x)", "__fadd_rn(other, x)", marks=pytest.mark.slow
        ),
        pytest.param("const int other_j = bit < ROPE_PAIRS ? j ^ bit : j;",
                     "const int other_j = bit < ROPE_PAIRS ? j ^ 1 : j;", marks=pytest.mark.slow),
    ],
    ids=["signs of lanes", "differences of lanes", "neighbours"],
)  # fmt: skip
def test_planted_mistakes_are_seen(
    line: str, instead: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place("prims/io/prepare.cuh", line, instead, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="(q|k)_(codes|scale)"):
        assert_codes_are_the_mirrors(inputs(64), QuantConfig(rotate=ROTATE))


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_matrix_is_orthogonal_and_scores_are_unchanged(head_dim: int) -> None:
    q, k, _ = map(as_float64, inputs(head_dim, "float32"))
    turned_q, turned_k = HOW.exact(q, k[:, [0, 0, 1, 1]])
    by_matrix = q @ (matrix(np.arange(head_dim)) / np.sqrt(head_dim))
    np.testing.assert_allclose(turned_q, by_matrix, rtol=1e-12, atol=1e-12)
    before = q @ k[:, [0, 0, 1, 1]].swapaxes(2, 3)
    np.testing.assert_allclose(turned_q @ turned_k.swapaxes(2, 3), before, rtol=1e-9, atol=1e-12)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([64, 128, 256]), st.integers(-140, 110),
    st.sampled_from(["float16", "bfloat16", "float32"]), st.booleans(),
)  # fmt: skip
def test_the_bound_of_r0_holds(
    seed: int, head_dim: int, magnitude: int, dtype: str, turns: bool
) -> None:
    rng = np.random.default_rng(seed)
    most, least = {"float16": (12, -24)}.get(dtype, (110, -140))
    size = 2.0 ** min(max(magnitude, least), most)
    x = rng.standard_normal((1, 1, 5, head_dim)) * size
    x[..., rng.integers(head_dim)] *= 2.0 ** rng.integers(-8, 2)
    with np.errstate(over="ignore"):
        x = x.astype(STORAGE[dtype])
    given_options = {
        "rope": rope_tables(5, head_dim) if turns else None, "rope_interleaved": False,
        "rope_offset_q": 0, "qk_norm": None, "qk_norm_eps": 1e-6,
    }  # fmt: skip
    how = Preparation.of_arrays(given_options, (1, 1, 5, 5, head_dim), ROTATE)
    assert how is not None
    for found, exact, bound in zip(
        how.in_float32(x, x), how.exact(x, x), bounds_prepared.preparation(how, x, x), strict=True
    ):
        assert ratio_to_bound(as_float64(found), exact, bound).max() <= 1
    if magnitude <= 100:
        assert np.isfinite(bound).all()


def test_the_bound_notices_a_sign() -> None:
    x = as_float64(inputs(64)[0])
    exact, _ = HOW.exact(x, x)
    bound, _ = bounds_prepared.preparation(HOW, x.astype(np.float32), x.astype(np.float32))
    x[..., 7] = -x[..., 7]
    wrong, _ = HOW.in_float32(x, x)
    assert ratio_to_bound(as_float64(wrong), exact, bound).max() > 1e4


@pytest.mark.parametrize("quant", ["default", *slow_rows([(name,) for name in list(QUANTS)[1:]])])
def test_scores_are_those_of_the_rows(quant: str) -> None:
    """J2 and J3: the judge compares rotated codes with attention of the caller's rows."""
    config = QuantConfig(**QUANTS[quant], rotate=ROTATE)
    q, k, v = inputs(64, large=LARGE)
    z = quantize(q, k, v, quant=config)
    o, lse = attention(z, return_lse=True)
    report = testing.judge(o, q, k, v, variant="fa_int8", quantized=z, lse=lse)
    assert report.holds and report.quantisation is not None and 0 < report.quantisation <= 1
    assert bits(attention(q, k, v, variant="fa_int8", quant=config)) == bits(o)


# ---- what it is worth ----------------------------------------------------------------------------


def noise_of_scores(q: Any, k: Any, quant: QuantConfig) -> float:
    """Return the root mean square error of scores that scales of codes predict.

    A code of a group with the largest magnitude A errs by A / (127 sqrt(12)).
    """
    z = quantize(q, k, k, quant=quant)
    (q, k) = (as_float64(x) for x in (q, k))
    k = k - k.mean(axis=2, keepdims=True)
    variances = [
        (as_float64(scale) ** 2).mean() / 12 * (other**2).sum(axis=-1).mean()
        for scale, other in ((z.k_scale, q), (z.q_scale, k))
    ]
    return float(np.sqrt(sum(variances)))


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_large_channel_costs_as_little_as_computed(head_dim: int) -> None:
    """The channel is as much smaller in Q, as where weights of a norm balance both."""
    q, k, v = inputs(head_dim, "float32", large=LARGE, len_kv=256)
    q[..., 5] /= LARGE
    exact = attention(*(x.astype(np.float32) for x in (q, k, v)), variant="fa")
    found = {}
    for rotate in (None, ROTATE):
        quant = QuantConfig(rotate=rotate)
        o = attention(q, k, v, variant="fa_int8", quant=quant)
        error = float(np.linalg.norm(o - exact) / np.linalg.norm(exact))
        found[rotate] = error, noise_of_scores(q, k, quant)
    errors, predicted = (found[ROTATE][i] / found[None][i] for i in (0, 1))
    assert errors < 0.5
    assert abs(errors / predicted - 1) < 0.25


# ---- calls ---------------------------------------------------------------------------------------


def test_queries_that_come_later_are_rotated_too() -> None:
    q, k, v = inputs(64)
    quant = QuantConfig(rotate=ROTATE)
    whole, later = quantize(q, k, v, quant=quant), quantize_kv(k, v, quant=quant).with_q(q)
    assert bits(whole.q_codes) == bits(later.q_codes)
    assert bits(whole.k_codes) == bits(later.k_codes)


@pytest.mark.slow
def test_chosen_keys_are_rotated_where_they_lie() -> None:
    """Sums of keys that are not rotated are not read."""
    q, k, v = inputs(64)
    places = np.sort(np.random.default_rng(1).permuted(
        np.broadcast_to(np.arange(70, dtype=np.int32), (1, 2, 70)), axis=2)[..., :33], axis=2
    )  # fmt: skip
    places = np.ascontiguousarray(places)
    chosen = [np.take_along_axis(x, places[..., None], axis=2) for x in (k, v)]
    settings = QuantizeSettings(QuantConfig(rotate=ROTATE), backend="interpret")
    sums = k.astype(np.float32).sum(axis=2, keepdims=True)
    found = quantize_at(q, k, chosen[1], places, settings, sums)
    moved = quantize(q, *chosen, quant=settings.quant, backend="interpret")
    for name in ("q_codes", "k_codes", "k_scale", "k_mean"):
        assert bits(getattr(found, name)) == bits(getattr(moved, name)), name


def test_a_call_says_that_its_rows_are_rotated() -> None:
    q, k, v = inputs(64)
    said = "rotate: rows of q and k are multiplied by a Hadamard matrix as they are quantised"
    for rotate in (None, ROTATE):
        quant = QuantConfig(rotate=rotate)
        assert (said in explain(q, k, v, variant="fa_int8", quant=quant)) == (rotate is not None)


def test_calls_that_take_no_rotation_say_so() -> None:
    q, k, v = (x[..., :48] for x in inputs(64))
    with pytest.raises(UnsupportedError, match="takes head_dim 64, 128 or 256, got 48: pad q and"):
        attention(q, k, v, variant="fa_int8", quant=QuantConfig(rotate=ROTATE))
    with pytest.raises(ValueError, match="quant.rotate must be None or 'hadamard', got 'no'"):
        QuantConfig(rotate="no")
    with pytest.raises(ValueError, match="quant.fused=True needs quant.rotate=None, got 'hadamard"):
        QuantConfig("token", "token", smooth_k=False, fused=True, rotate=ROTATE)
    with pytest.raises(UnsupportedError, match="needs quant.scales='dynamic', got given scales"):
        QuantConfig("tensor", "tensor", scales=(0.1, 0.1), rotate=ROTATE)


@pytest.mark.parametrize("head_dim", [128, *slow_rows(((64,), (256,)))])
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rotated_rows_stay_in_registers(dtype: str, head_dim: int) -> None:
    from cupyattn.ops.operation import problem_of
    from cupyattn.ops.quantize import QUANTIZE

    arrays = dict(zip("qkv", inputs(head_dim, dtype), strict=True))
    settings = QuantizeSettings(QuantConfig(rotate=ROTATE), backend="interpret")
    for one in QUANTIZE.plan(problem_of(QUANTIZE, settings, arrays)).plans:
        for launch in one.launches:
            used = kc.build(launch.module, "sm_90").kernels[launch.entry]
            assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)


def test_a_pass_makes_codes_of_rotated_queries_on_hopper() -> None:
    """The attention kernel itself takes rows as they are."""
    q, k, v = inputs(64)
    for rotate in (None, ROTATE):
        quant = QuantConfig(rotate=rotate)
        found = plan(
            q, k, v, variant="fa_int8", quant=quant, arch="sm_90a", backend="interpret"
        ).plans
        assert [one.features.quantize_q for one in found] == [False, rotate is None]
        assert found[0].features.qk_rotate == (rotate is not None)


@pytest.mark.slow
def test_sequences_are_rotated_as_calls_of_their_own() -> None:
    """Packed ones, and padded entries."""
    quant = QuantConfig(rotate=ROTATE)
    (q, k, v), ends = runs.packed([(20, 33), (9, 40)], 4, 2, 64)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    z = quantize(q, k, v, quant=quant, backend="interpret", **named, max_len_q=20, max_len_k=40)
    for one, (_, alone) in zip(z.sequences(), runs.sequences((q, k, v), ends), strict=True):
        expected = quantize(*alone, quant=quant, backend="interpret")
        for name in ("q_codes", "k_codes", "q_scale", "k_scale"):
            assert bits(getattr(one, name)) == bits(getattr(expected, name)), name
    q, k, v = inputs(64)
    lengths = np.array([50], np.int32)
    o = attention(q, k, v, variant="fa_int8", quant=quant, lengths_kv=lengths)
    few = attention(q, k[:, :, :50], v[:, :, :50], variant="fa_int8", quant=quant)
    assert bits(o) == bits(few)


@pytest.mark.filterwarnings("error")
def test_rows_that_are_not_finite_spoil_what_shares_their_scale() -> None:
    q, k, v = inputs(64)
    q[0, 1, 3, 2], k[0, 0, 40, 1:3] = np.nan, np.inf
    quant = QuantConfig(rotate=ROTATE)
    z, mirror = (quantize(q, k, v, quant=quant, backend=b) for b in ("interpret", "mirror"))
    for one in (z, mirror):
        groups = np.isnan(one.q_scale), np.isnan(one.k_scale)
        assert groups[0].sum() == groups[1].sum() == 1
        assert groups[0][0, 1, 3 // one.group_q] and groups[1][0, 0, 40 // one.group_kv]
    assert bits(mirror.q_codes) == bits(z.q_codes)
    assert np.isnan(HOW.exact(q, k)[1][0, 0, 40]).any()  # inf - inf
