"""The kernels of pruning: importance within its bound, the choice and the rows to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.diffusion import kept_keys, key_importance, key_passes, pruning
from cupyattn.diffusion.importance_bounds import importance_bound
from cupyattn.diffusion.pruning import compact, kept_count
from cupyattn.diffusion.ranking import largest_of_rows
from cupyattn.errors import UnsupportedError
from cupyattn.ops.quantize import QuantizeSettings, quantize_at
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.support import runs
from tests.support.marks import slow, slow_unless

F16, BF16, F32 = (STORAGE[name] for name in ("float16", "bfloat16", "float32"))


def normal(shape: tuple[int, ...], dtype: Any = F16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dim: int,
    dtype: Any = F16,
    batch: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    q = normal((batch, heads[0], lengths[0], head_dim), dtype)
    return q, normal((batch, heads[1], lengths[1], head_dim), dtype, 1)


# ---- importance ----------------------------------------------------------------------------------

#: Query and key heads, lengths, head size, type, rows, and scale.
CASES: dict[str, tuple[Any, ...]] = {
    "one key": ((2, 2), (70, 1), 7, F16, 64, None),
    "groups, odd lengths": ((6, 2), (33, 131), 40, BF16, 32, None),
    "two chunks of a head": ((2, 1), (83, 150), 16, F16, 41, 0.5),
    "splits": ((1, 1), (9, 1100), 16, F16, 8, None),
    "wide rows": ((1, 1), (5, 70), 160, BF16, 4, None),
    "a row": ((3, 3), (1, 257), 24, F16, 1, -0.3),
    "no scale": ((1, 1), (40, 129), 16, F16, 32, 0.0),
    "peaks": ((2, 2), (64, 200), 16, F16, 16, 30.0),
}
SLOW = ("two chunks of a head", "wide rows", "no scale")


def check_importance(
    q: np.ndarray, k: np.ndarray, scale: float | None, rows: int, **how: Any
) -> tuple[Any, Any, Any]:
    """Compare importance with float64 and its bound; operands must not change."""
    before = q.tobytes(), k.tobytes()
    found = key_importance(q, k, scale=scale, rows=rows, **how)
    assert (q.tobytes(), k.tobytes()) == before
    assert found.shape == k.shape[:3] and found.dtype == np.float32
    exact, bound = importance_bound(q, k, scale=scale_of(scale, q), rows=rows)
    assert (np.abs(found - exact) <= bound).all()
    assert bound.sum() < 1e-2 * exact.sum()  # it says something
    np.testing.assert_allclose(found.sum(axis=2), 1, rtol=1e-5)
    return found, exact, bound


def scale_of(scale: float | None, q: np.ndarray) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


@pytest.mark.parametrize("case", slow_unless(lambda _, c: c not in SLOW, CASES))
def test_importance_is_within_its_bound(case: str) -> None:
    heads, lengths, head_dim, dtype, rows, scale = CASES[case]
    q, k = operands(heads, lengths, head_dim, dtype, batch=2 if case == "one key" else 1)
    if case == "splits":
        shape = key_passes.row_states_shape(Operand.of(k), 1, rows)
        assert shape[1] == 3
    _, exact, _ = check_importance(q, k, scale, rows, backend="interpret")
    mirrored = key_importance(q, k, scale=scale, rows=rows, backend="mirror")
    _, also = importance_bound(q, k, scale=scale_of(scale, q), rows=rows, rounded_to=dtype.name)
    assert (np.abs(mirrored - exact) <= also).all()


def test_any_strides_of_q_and_k() -> None:
    q, k = operands((2, 2), (20, 40), 16)
    want = key_importance(q, k, rows=8, backend="interpret")
    views: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "embedded": lambda x: runs.embedded(x, 3),
        "BSHD": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "backwards": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
        "last axis apart": lambda x: np.repeat(x, 2, axis=3)[..., ::2],
    }
    for name, view in views.items():
        found = key_importance(view(q), view(k), rows=8, backend="interpret")
        assert found.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_makes_its_head_important(value: float) -> None:
    q, k = operands((4, 2), (10, 60), 16)
    k[0, 1, 7, 3] = value
    q[:, 2:, :, 3] = 1
    for backend in ("mirror", "interpret"):
        with np.errstate(invalid="ignore"):
            found = key_importance(q, k, rows=8, backend=backend)
        assert np.isnan(found[0, 1]).all() and not np.isnan(found[0, 0]).any()
        x = compact(k, k, found, 20, backend=backend)
        assert x[2][0, 1].tolist() == [False] * 40 + [True] * 20


# ---- choice and rows -----------------------------------------------------------------------------


def numbers(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind == "ties":
        return rng.choice(np.float32([0, 2.0**-149, 0.25, 0.25, 1, np.inf, np.nan]), shape)
    if kind == "all alike":
        return np.full(shape, 0.125, np.float32)
    if kind == "every byte":  # bits of any exponent, and of its neighbours
        return rng.integers(0, 0x7F800000, shape).astype(np.uint32).view(np.float32)
    return (rng.random(shape) * 2.0**-12).astype(np.float32)


@pytest.mark.parametrize("kind", ["ties", "all alike", "every byte", "close"])
@pytest.mark.parametrize("length", [1, 33, pytest.param(517, marks=pytest.mark.slow), 1100])
def test_the_choice_is_that_of_the_mirror(kind: str, length: int) -> None:
    importance = numbers(kind, (1, 2, length))
    k = np.arange(2 * length, dtype=np.float32).reshape(1, 2, length, 1)
    counts = {1, length, kept_count(length, 0.2)} if length < 1000 else {kept_count(length, 0.3)}
    for count in counts:
        few, same, kept = compact(k, k, importance, count, backend="interpret")
        order = largest_of_rows(importance, count)
        np.testing.assert_array_equal(few.ravel(), order)
        np.testing.assert_array_equal(same, few)
        assert kept.dtype == np.bool_
        np.testing.assert_array_equal(np.flatnonzero(kept), order)


def views(x: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "plain": x,
        "BSHD": x.swapaxes(1, 2).copy().swapaxes(1, 2),
        "shifted": runs.embedded(x, 3),
        "backwards": x[:, ::-1, ::-1],
        "last axis apart": np.repeat(x, 2, axis=3)[..., ::2],
        "a head again and again": np.broadcast_to(x[:, :1], x.shape),
    }


#: Head size and type, by the elements of an access.
ROWS = {
    (8, 16): F16, (8, 80): BF16, (4, 20): F16, (2, 6): BF16, (1, 7): F16, (4, 36): F32,
    (2, 34): F32, (1, 255): F16,
}  # fmt: skip


@pytest.mark.parametrize("form", slow_unless(lambda i, _: not i % 2, ROWS), ids=str)
def test_rows_move_together_bit_for_bit(form: tuple[int, int]) -> None:
    vec, head_dim = form
    shape, count = (2, 2, 75, head_dim), 60
    k, v = (  # any bits, NaNs of every kind among them
        np.random.default_rng(seed).integers(0, 256, (*shape, ROWS[form].itemsize), np.uint8)
        .view(ROWS[form]).reshape(shape)
        for seed in (0, 1)
    )  # fmt: skip
    importance = numbers("ties", shape[:3])
    plan = key_passes.plan_compact(Operand.of(k), Operand.of(v), ROWS[form].name, count)
    assert dict(plan.launches[1].module.defines)["CFG_VEC"] == vec
    before = k.tobytes(), v.tobytes(), importance.tobytes()
    for name, x in views(k).items() if form == (8, 16) else [("plain", k)]:
        found = compact(x, v, importance, count, backend="interpret")
        want = compact(x, v, importance, count, backend="mirror")
        assert [y.tobytes() for y in found] == [y.tobytes() for y in want], name
        assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in want]
    assert (k.tobytes(), v.tobytes(), importance.tobytes()) == before


def test_importance_may_lie_anywhere() -> None:
    k = normal((1, 2, 20, 8))
    importance = numbers("close", (1, 20, 2)).swapaxes(1, 2)
    found = compact(k, k, importance, 9, backend="interpret")
    want = compact(k, k, importance, 9)
    assert [y.tobytes() for y in found] == [y.tobytes() for y in want]


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        (F16, ca.QuantConfig()),
        pytest.param(
            BF16, ca.QuantConfig("head", "head", symmetric=False), marks=pytest.mark.slow
        ),
        pytest.param(F16, ca.QuantConfig("tensor", "tensor"), marks=pytest.mark.slow),
        pytest.param(F32, ca.QuantConfig("block", "token", smooth_k=False), marks=pytest.mark.slow),
        pytest.param(F16, ca.QuantConfig(pv="int8"), marks=pytest.mark.slow),
        pytest.param(
            F16, ca.QuantConfig(pv="int8", granularity_v="tensor"), marks=pytest.mark.slow
        ),
        pytest.param(
            F16, ca.QuantConfig("head", "head", scales=(np.full((1, 1, 1), 0.03, F32),) * 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "view",
    ["plain", "shifted", "backwards", *slow(("BSHD", "last axis apart", "a head again and again"))],
)
def test_keys_quantised_where_they_lie_have_the_bits_of_those_that_moved(
    dtype: Any, quant: Any, view: str
) -> None:
    q, k = operands((4, 2), (12, 140), 24, dtype)
    v, importance = normal(k.shape, seed=2).astype(dtype), numbers("ties", k.shape[:3])
    k *= np.arange(140).astype(dtype)[:, None] % 7 - 3  # a mean, and rows of different sizes
    x = views(k)[view]
    before = k.tobytes(), v.tobytes(), importance.tobytes()
    few_v, kept, places = pruning.compact_values(x, v, importance, 80, backend="interpret")
    few_k, want_v, want = compact(x, v, importance, 80, backend="interpret")
    assert runs.bits(few_v) == runs.bits(want_v) and runs.bits(kept) == runs.bits(want)
    marks = np.zeros_like(kept)
    np.put_along_axis(marks, places.astype(np.int64), True, axis=2)
    assert runs.bits(marks) == runs.bits(kept) and (np.diff(places) > 0).all()
    settings = QuantizeSettings(quant, backend="interpret")
    found = quantize_at(q, x, few_v, places, settings)
    if view == "shifted":  # sums of a mean go by the width of accesses
        few_k = runs.embedded(few_k, 3)
    moved = ca.quantize(q, few_k, few_v, quant=quant, backend="interpret")
    for field in ("q_codes", "k_codes", "q_scale", "k_scale", "k_zero", "k_mean", "v_codes"):
        one, other = getattr(found, field), getattr(moved, field)
        assert one is other is None or runs.bits(one) == runs.bits(other), (view, field)
    assert (k.tobytes(), v.tobytes(), importance.tobytes()) == before


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [pytest.param("balanced", marks=pytest.mark.slow), "aggressive", "precision"]
)
def test_a_layer_that_moves_no_keys_gives_the_same_bits(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = operands((4, 2), (12, 40), 16)
    attend = ca.Int8Attention(4, 16, 50, backend="interpret", enable_pruning=True)
    moved = attend(q, k, k, 25, mode=mode, return_mask=True)
    entries: list[str] = []
    own = pruning.plan_compact
    monkeypatch.setattr(
        pruning,
        "plan_compact",
        lambda k, *rest: (entries.append("kv"[k is None :]), own(k, *rest))[1],
    )
    monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    stayed = attend(q, k, k, 25, mode=mode, return_mask=True)
    assert [runs.bits(x) for x in stayed] == [runs.bits(x) for x in moved]
    assert entries == ["kv" if mode == "precision" else "v"]
    assert not attend.fallbacks


def test_what_int8_does_not_take_is_moved_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("no such device")

    q, k = operands((4, 2), (12, 40), 16)
    attend = ca.Int8Attention(4, 16, 50, backend="interpret", enable_pruning=True)
    expected = attend(q, k, k, 25, mode="precision", return_mask=True)
    monkeypatch.setattr(pruning, "LEAST_BYTES", 0)
    monkeypatch.setattr(kept_keys, "quantize_at", refuses)
    found = attend(q, k, k, 25, mode="balanced", return_mask=True)
    assert [runs.bits(x) for x in found] == [runs.bits(x) for x in expected]
    assert attend.fallbacks == {"no such device": 1}


def test_a_layer_prunes_on_its_backend() -> None:
    q, k = operands((4, 2), (12, 40), 16)
    attend = ca.Int8Attention(4, 16, 50, backend="interpret", enable_pruning=True)
    o, kept = attend(q, k, k, 49, return_mask=True)
    importance = key_importance(q, k, backend="interpret")
    few, _, by_kv = compact(k, k, importance, 32, backend="interpret")
    np.testing.assert_array_equal(kept, by_kv.repeat(2, axis=1))
    assert runs.bits(o) == runs.bits(
        ca.Int8Attention(4, 16, 50, backend="interpret")(q, few, few, 49)
    )
    _, kept = attend(q, k, k, 25, return_mask=True, pruning_threshold=0.9)
    assert kept[0, 0].sum() == (importance >= 0.9 / 40).sum(axis=2).max()


@pytest.mark.parametrize(("dtype", "head_dim"), [(F32, 16), (F16, 264)])
def test_what_the_kernels_do_not_take_stays_with_the_library(dtype: Any, head_dim: int) -> None:
    q, k = operands((2, 2), (5, 12), head_dim, dtype)
    found, want = (key_importance(q, k, backend=b) for b in ("interpret", "mirror"))
    assert found.tobytes() == want.tobytes()
    few, same = (compact(k, k, want, 7, backend=b) for b in ("interpret", "mirror"))
    assert [x.tobytes() for x in few] == [x.tobytes() for x in same]


def test_nothing_to_do_is_no_launch() -> None:
    nothing = np.zeros((1, 2, 0, 16), F16)
    importance = key_importance(nothing, nothing, backend="interpret")
    assert importance.shape == (1, 2, 0)
    few, _, kept = compact(nothing, nothing, importance, 0, backend="interpret")
    assert few.shape == (1, 2, 0, 16) and kept.shape == (1, 2, 0)


def test_what_does_not_fit_together_says_so() -> None:
    q, k = operands((3, 2), (5, 12), 16)
    importance = np.zeros((1, 2, 12), np.float32)
    for error, message, call in (
        (ValueError, r"the heads of k must divide the heads of q, got q.shape=\(1, 3, 5, 16\) k",
         lambda: key_importance(q, k)),
        (ValueError, "backend must be", lambda: key_importance(k, k, backend="gpu")),
        (TypeError, "importance must be float32, got float64",
         lambda: compact(k, k, importance.astype(float), 3)),
        (ValueError, r"of the batch, heads and length of k and v, got \(1, 2, 11\)",
         lambda: compact(k, k, importance[:, :, 1:], 3)),
        (ValueError, "count must be 0 to the 12 keys, got 13",
         lambda: compact(k, k, importance, 13)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    long = Operand((1, 1, 2**30 + 1, 8), (0, 0, 0, 1), 2, 0)
    for plan in (
        lambda: key_passes.plan_key_importance(long, long, "float16", 1.0, range(0, 8)),
        lambda: key_passes.plan_compact(long, long, "float16", 5),
    ):
        with pytest.raises(UnsupportedError, match=r"keys exceed 2\^30"):
            plan()


# ---- the tests are tested ------------------------------------------------------------------------

#: Source, line, what stands for it, and what the interpreter says: "" where the numbers are wrong.
THEFTS = {
    "barrier of the statistics": (
        "pruning/key_importance.cu",
        "__syncthreads();  // every warp's maxima and sums are there", "//",
        "race",
    ),
    "barrier between chunks": (
        "pruning/key_importance.cu", "__syncthreads();  // no thread works on the chunk", "//",
        "race",
    ),
    "keys past the end": (
        "pruning/key_importance.cu", "key + n * 8 + t * 2 + j < at.end ?", "true ?", "",
    ),
    "rows past the end": (
        "pruning/key_importance.cu", "row < Place::rows(p, chunk) ? p.share / all.l : 0.0f",
        "p.share / all.l", "",
    ),
    "one split alone": ("pruning/key_importance.cu", "merged(p.splits,", "merged(1,", ""),
    "chunks not added": (
        "pruning/key_importance.cu", "(chunk == 0 ? 0.0f : importance[own])", "0.0f", "",
    ),
    "earlier of equal ones": (
        "pruning/largest_keys.cu", "ties_before >= dropped", "ties_before < wanted", "race",
    ),
    "barrier of the counts": (
        "pruning/largest_keys.cu", "__syncthreads();  // every number is counted", "//", "race",
    ),
    "mask not carried on": (
        "pruning/largest_keys.cu", "(bits & known) == prefix", "true", "out of bounds",
    ),
    "rows past the last": (
        "pruning/gather_rows.cu", "if (row < p.count && col0", "if (col0", "never written",
    ),
    "V for K": ("pruning/gather_rows.cu", "= v[pass][a];", "= k[pass][a];", ""),
}  # fmt: skip


@pytest.mark.parametrize("theft", slow_unless(lambda i, _: not i % 3, THEFTS))
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, line, instead, finding = THEFTS[theft]
    put_a_line_in_place(source, line, instead, tmp_path, monkeypatch)
    q, k = operands((2, 1), (40, 550), 16)
    v, importance = normal(k.shape, seed=2), numbers("ties", k.shape[:3])

    def wrong() -> bool:
        if source == "pruning/key_importance.cu":
            exact, bound = importance_bound(q, k, scale=0.25, rows=40)
            found = key_importance(q, k, rows=40, backend="interpret")
            return not (np.abs(found - exact) <= bound).all()
        found, want = (compact(k, v, importance, 300, backend=b) for b in ("interpret", "mirror"))
        return [x.tobytes() for x in found] != [x.tobytes() for x in want]

    check_found(wrong, finding)


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(F16, 128), *(pytest.param(*c, marks=pytest.mark.slow) for c in (
        (BF16, 128), (F16, 64), (BF16, 256), (F16, 96), (F16, 7), (F32, 128)))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_no_launch_spills(dtype: Any, head_dim: int, arch: str) -> None:
    k = Operand.contiguous((16, 32, 4096, head_dim), dtype.itemsize)
    plans = [key_passes.plan_compact(k, k, dtype.name, 3277)]
    if dtype != F32:
        plans.append(
            key_passes.plan_key_importance(k, k, dtype.name, 0.1, key_passes.sampled_rows(4096, 32))
        )
    for one in (one for plan in plans for one in plan.launches):
        binary = kc.build(one.module, arch)
        taken = binary.kernels[one.entry]
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{one.entry}: {taken}"
        assert taken.registers <= 168 or one.block > 128  # three blocks to an SM
        devices.check_shared_memory(binary.smem_bytes, 99 * 1024, one.entry)


def test_few_heads_and_many_fill_a_device() -> None:
    for batch, heads, len_kv, blocks in ((16, 32, 4096, 4096), (1, 32, 4096, 256), (1, 1, 100, 1)):
        k = Operand.contiguous((batch, heads, len_kv, 128), 2)
        sampled = key_passes.sampled_rows(len_kv, 32)
        plan = key_passes.plan_key_importance(k, k, "float16", 0.1, sampled)
        assert [one.grid for one in plan.launches] == [blocks, blocks]
