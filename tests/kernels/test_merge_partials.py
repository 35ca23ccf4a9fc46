"""Partial results brought together: kernel, mirror and bound (R13)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import interpret
from cupyattn.arrays import memory
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.compiler import modules as kc
from cupyattn.distributed.bounds import Expected, merged
from cupyattn.distributed.merging import Partial, merge_mirror, plan_merge
from cupyattn.interpret import KernelFault


def parts_of(
    shape: tuple[int, ...], dtype: str, count: int, seed: int = 0, spread: float = 3.0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """O and lse of partial results; now and then a row attends to nothing."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        o = rng.standard_normal(shape).astype(STORAGE[dtype])
        lse = (spread * rng.standard_normal(shape[:3])).astype(np.float32)
        nothing = rng.random(shape[:3]) < 0.2
        o[nothing], lse[nothing] = 0, -np.inf
        found.append((o, lse))
    return found


def exactly(parts: list[tuple[np.ndarray, np.ndarray]], dtype: str) -> Expected:
    """Merge the partial results, each taken as exact."""
    zeros = [(np.zeros(o.shape), np.zeros(lse.shape)) for o, lse in parts]
    return merged(
        [
            Expected(o.astype(np.float32).astype(np.float64), lse.astype(np.float64), *none)
            for (o, lse), none in zip(parts, zeros, strict=True)
        ],
        dtype,
    )


def assert_within(found: tuple[Any, Any], expected: Expected) -> None:
    o, lse = (x.astype(np.float64) for x in found)
    assert ratio_to_bound(o, expected.o, expected.bound).max(initial=0) <= 1
    assert ratio_to_bound(lse, expected.lse, expected.lse_bound).max(initial=0) <= 1


@given(
    st.integers(0, 2**32), st.sampled_from(["float16", "bfloat16", "float32"]), st.integers(1, 9),
    st.sampled_from([0.0, 1e-3, 3.0, 60.0, 1e4]), st.booleans(),
)  # fmt: skip
def test_the_mirror_is_within_its_bound(
    seed: int, dtype: str, count: int, spread: float, knows: bool
) -> None:
    """Whether or not it knows which part is the last."""
    parts = parts_of((1, 2, 9, 5), dtype, count, seed, spread)
    partial = Partial(parts[0][0], "mirror")
    for number, (o, lse) in enumerate(parts):
        partial.add((0, 9), o.copy(), lse.copy(), last=knows and number + 1 == count)
    assert_within(partial.result(), exactly(parts, dtype))


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 128), ("bfloat16", 17), ("float32", 40), ("float16", 36)]
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_kernel_is_within_the_bound(dtype: str, head_dim: int, count: int) -> None:
    """Rows that are no multiple of a block, results with strides, some of the rows alone. Of two
    parts nothing is ever float32; of four the first is read, and the last written, as it is."""
    parts = parts_of((2, 2, 70, head_dim), dtype, count)
    partial = Partial(parts[0][0], "interpret")
    for o, lse in parts:
        wide = np.zeros((*o.shape[:3], head_dim + 8), o.dtype)
        wide[..., :head_dim] = o
        partial.add((0, 70), wide[..., :head_dim], lse.copy())
    last = parts_of((2, 2, 70, head_dim), dtype, 1, seed=9)[0]
    partial.add((5, 70), last[0][:, :, 5:], last[1][:, :, 5:], last=True)
    last[0][:, :, :5], last[1][:, :, :5] = 0, -np.inf
    assert_within(partial.result(), exactly([*parts, last], dtype))


def test_rows_that_attend_to_nothing_stay_so_and_a_nan_stays_one() -> None:
    for backend in ("mirror", "interpret"):
        o = np.zeros((1, 1, 3, 8), np.float16)
        lse = np.full((1, 1, 3), -np.inf, np.float32)
        o[0, 0, 1], lse[0, 0, 1] = np.nan, np.nan
        o[0, 0, 2], lse[0, 0, 2] = 3, 0.5
        partial = Partial(o, backend)
        for _ in range(2):
            partial.add((0, 3), o.copy(), lse.copy())
        found, found_lse = partial.result()
        assert not found[0, 0, 0].any() and found_lse[0, 0, 0] == -np.inf
        assert np.isnan(found[0, 0, 1]).all() and np.isnan(found_lse[0, 0, 1])
        assert (found[0, 0, 2] == 3).all()


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=7))
def test_pieces_of_rows_that_overlap_come_to_the_same(
    seed: int, ranges: list[tuple[int, int]]
) -> None:
    """In any order, with rows of no part between them, and rows of one part as they came."""
    rows = [(begin, min(begin + length, 12)) for begin, length in ranges]
    parts = parts_of((1, 2, 12, 4), "float16", max(len(rows), 1), seed)[: len(rows)]
    nothing = np.zeros((1, 2, 12, 4), np.float16), np.full((1, 2, 12), -np.inf, np.float32)
    partial, whole = Partial(nothing[0], "mirror"), [nothing]
    for number, (some, (o, lse)) in enumerate(zip(rows, parts, strict=True)):
        at = slice(*some)
        last = number + 1 == len(rows)
        partial.add(some, o[:, :, at].copy(), lse[:, :, at].copy(), last=last)
        whole.append(tuple(np.copy(x) for x in nothing))
        for full, x in zip(whole[-1], (o, lse), strict=True):
            full[:, :, at] = x[:, :, at]
    found = partial.result()
    assert_within(found, exactly(whole, "float16"))
    alone = np.array([sum(begin <= row < end for begin, end in rows) == 1 for row in range(12)])
    expected = sum(o.astype(np.float32) for o, _ in whole)
    np.testing.assert_array_equal(found[0][:, :, alone], expected[:, :, alone])


def test_what_came_once_is_no_copy() -> None:
    (o, lse), *_ = parts_of((1, 1, 6, 4), "float16", 1)
    partial = Partial(o, "mirror")
    partial.add((0, 6), o, lse)
    found, found_lse = partial.result()
    assert found is o and found_lse is lse


def test_an_empty_call_launches_nothing() -> None:
    o, lse = np.zeros((1, 0, 5, 8), np.float16), np.zeros((1, 0, 5), np.float32)
    operands = (Operand.of(x) for x in (o, o, lse, o, lse))
    plan = plan_merge(*operands, "float16", "float16", "float16", in_place=True)
    assert not plan.launches


#: Changes of the kernel, and the effect of each on a test.
FAULTS = {
    "the weights of another row": ("smem.weights[row][0], w1", "smem.weights[row ^ 1][0], w1"),
    "what was is not weighted": ("w0 * to_float(", "to_float("),
    "lse of what was stays": ("lse[row] = fmaf(log2f(sum), LN2, top);", ""),
    "weights to base e": ("(incoming - top) * LOG2E", "(incoming - top)"),
    "no barrier after the weights": ("__syncthreads();", ""),
    "a part of an access": ("i < VEC / PART; ++i)\n      *reint", "i < 1; ++i)\n      *reint"),
    "accesses of another pass": (
        "first + a * NUM_THREADS;\n      const int row = i / ACCESSES, col "
        "= i % ACCESSES * VEC;\n      if (i >= accesses) continue;",
        "first;\n      const int row = i / ACCESSES, col = i % ACCESSES * VEC;",
    ),
    "rows past the end": ("min(BLOCK_Q, p.length - row0)", "BLOCK_Q"),
    "-inf less -inf": ("largest == NEG_INF ? 0.0f : largest", "largest"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_noticed(fault: str, tmp_path: Path) -> None:
    shutil.copytree(kc.KERNELS / "prims", tmp_path / "prims")
    text, (right, wrong) = (kc.KERNELS / "merge/merge_partials.cu").read_text(), FAULTS[fault]
    assert text.count(right) == 1
    (tmp_path / "merge_partials.cu").write_text(text.replace(right, wrong))
    parts = parts_of((1, 1, 70, 16), "float16", 2)
    o, lse = parts[0][0].astype(np.float32), parts[0][1].copy()
    operands = (Operand.of(x) for x in (o, o, lse, *parts[1]))
    plan = plan_merge(*operands, "float16", "float32", "float32", in_place=True)
    (launch,) = plan.launches
    module = kc.ModuleSpec(tmp_path / "merge_partials.cu", launch.module.defines)
    plan = replace(plan, launches=(replace(launch, module=module),))
    read = {"part_O": memory.as_input(parts[1][0]), "part_lse": memory.as_input(parts[1][1])}
    with pytest.raises((AssertionError, KernelFault)):
        interpret.run(plan, {"O": o, "lse": lse, **read})
        assert_within((o, lse), exactly(parts, "float16"))


def test_the_mirror_changes_in_place_and_knows_the_order() -> None:
    (o, lse), (other, other_lse) = parts_of((1, 1, 6, 4), "float32", 2, seed=3)
    first, first_lse = o.copy(), lse.copy()
    merge_mirror(first, first_lse, other, other_lse, first)
    second, second_lse = other.copy(), other_lse.copy()
    merge_mirror(second, second_lse, o, lse, second)
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first_lse, second_lse, rtol=1e-6)
