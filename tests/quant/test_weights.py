"""The kernels of weights in blocks: on the interpreter they are the mirror, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.arrays.kinds import STORAGE
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.ops.weights import MOST_BLOCK
from cupyattn.plans.weights import plan_weight_blocks
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.quant_inputs import DTYPES, operand, same_bytes
from tests.support.marks import slow, slow_unless

F16, BF16, F32 = DTYPES


def weight(dtype: np.dtype, shape: tuple[int, ...], regime: str = "wide") -> np.ndarray:
    """Return a matrix (out, in), or (out, in, ...) of the same numbers."""
    flat = (shape[0], int(np.prod(shape[1:])))
    return operand(7, dtype, (1, 1, *flat), regime)[0, 0].reshape(shape)


# ---- bits ----------------------------------------------------------------------------------------

#: Type, shape and size of blocks, by the elements of an access: odd ends of rows and columns,
#: blocks that no power of two divides, whole blocks, one row, one column, a convolution.
CASES = {
    8: (F16, (130, 264), 128), 4: (F32, (129, 132), 128), 2: (BF16, (33, 70), 30),
    1: (F16, (131, 257), 128), "8, small": (BF16, (50, 40), 16), "one by one": (F32, (3, 5), 1),
    "whole": (BF16, (128, 128), 128), "a row": (F32, (1, 300), 128), "a column": (F16, (300, 1), 7),
    "a convolution": (F16, (20, 5, 3, 4), 16), "odd blocks": (F32, (100, 90), 45),
}  # fmt: skip
#: Fast cases, which represent the others.
SLOW = ("a row", "a column", "whole", "odd blocks", 1)


@pytest.mark.parametrize("case", slow_unless(lambda _, c: c not in SLOW, CASES))
def test_the_kernels_are_the_mirror(case: int | str) -> None:
    dtype, shape, block = CASES[case]
    w = weight(dtype, shape)
    before = w.tobytes()
    codes, scales = ca.weight_quant(w, block)
    assert same_bytes(ca.weight_quant(w, block, backend="interpret"), (codes, scales))
    assert w.tobytes() == before
    before = codes.tobytes(), scales.tobytes()
    back = ca.weight_dequant(codes, scales, block, dtype.name, backend="interpret")
    assert same_bytes((back,), (ca.weight_dequant(codes, scales, block, dtype.name),))
    assert (codes.tobytes(), scales.tobytes()) == before
    if isinstance(case, int):
        plan = plan_weight_blocks(
            "weight_quant", Operand.of(w), Operand.of(codes), Operand.of(scales), dtype.name, block
        )
        assert plan.features.vec == case


@pytest.mark.parametrize("regime", ["subnormal", "signed zeros", "huge", "zeros"])
@pytest.mark.parametrize("dtype", [F32, *slow((F16, BF16))], ids=str)
def test_numbers_at_the_ends_of_their_range(dtype: np.dtype, regime: str) -> None:
    w = weight(dtype, (40, 32), regime)
    expected = ca.weight_quant(w, 16)
    assert same_bytes(ca.weight_quant(w, 16, backend="interpret"), expected)
    for out in STORAGE:  # float16 overflows
        with np.errstate(over="ignore"):
            back = ca.weight_dequant(*expected, 16, out, backend="interpret")
        assert same_bytes((back,), (ca.weight_dequant(*expected, 16, out),))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_poisons_its_block_alone(value: float) -> None:
    w = weight(F32, (40, 40), "normal")
    w[17, 3], w[39, 39] = value, value
    codes, scales = ca.weight_quant(w, 16)
    found = ca.weight_quant(w, 16, backend="interpret")
    assert same_bytes(found, (codes, scales)) and np.isnan(scales).sum() == 2
    back = ca.weight_dequant(*found, 16, backend="interpret")
    np.testing.assert_array_equal(back, ca.weight_dequant(codes, scales, 16))


def test_every_code_and_any_scale_comes_back() -> None:
    codes = np.arange(-128, 128).astype(np.int8).reshape(16, 16)
    scales = np.float32([[np.nan, np.inf], [2.0**-149, -3.0]])
    back = ca.weight_dequant(codes, scales, 8, backend="interpret")
    expected = ca.weight_dequant(codes, scales, 8)
    np.testing.assert_array_equal(back, expected)
    assert back[8:].tobytes() == expected[8:].tobytes() and back[8, 0] == 0


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows apart": lambda x: x[:, :32],
    "from an odd column on": lambda x: x[:, 1:33],
    "every other row, backwards": lambda x: x[::-2],
    "transposed": lambda x: x.T,
    "every third column": lambda x: x[:, ::3],
    "a row again and again": lambda x: np.broadcast_to(x[0], (40, x.shape[1])),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view: str) -> None:
    w = VIEWS[view](weight(BF16, (40, 48)))
    codes, scales = ca.weight_quant(np.ascontiguousarray(w), 16)
    assert same_bytes(ca.weight_quant(w, 16, backend="interpret"), (codes, scales))
    wide = np.zeros((2 * codes.shape[0], codes.shape[1] + 3), np.int8)
    wide[::2, 3:] = codes
    apart = np.repeat(scales, 2, axis=0)[::2]
    back = ca.weight_dequant(wide[::2, 3:], apart, 16, backend="interpret")
    assert same_bytes((back,), (ca.weight_dequant(codes, scales, 16),))


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (0, 3, 2)])
def test_nothing_to_do_is_no_launch(shape: tuple[int, ...]) -> None:
    w = np.zeros(shape, np.float16)
    expected = ca.weight_quant(w)
    assert same_bytes(ca.weight_quant(w, backend="interpret"), expected)
    assert ca.weight_dequant(*expected, backend="interpret").shape == shape


# ---- the tests are tested ------------------------------------------------------------------------

THEFTS = {
    "maximum of half a warp": ("shfl_max<WARP_SIZE>", "shfl_max<WARP_SIZE / 2>", ""),
    "maximum of a warp": ("warp < NUM_WARPS", "warp < 1", ""),
    "barrier": ("__syncthreads();  // the largest magnitudes of all warps are visible", "", "race"),
    "columns past the end": (" && col < p.columns", "", "out of"),
    "rows past the end": ("min(BLOCK_M - own_row, p.rows - row)", "BLOCK_M - own_row", "out of"),
    "lanes past the last row": ("own_row < PASS_ROWS && ", "", "race"),
    "scale of the next line": ("down * p.scales_stride", "across * p.scales_stride", "race"),
}


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place("linear/weight_blocks.cu", line, instead, tmp_path, monkeypatch)
    w = weight(F32, (120, 90), "outlier channel")
    w[:16] /= 8  # which the first warp reads
    block = 45 if "lanes" in theft else 64  # rows of 45 leave 6 of 96 threads without one
    found = functools.partial(ca.weight_quant, w, block)
    check_found(lambda: not same_bytes(found(backend="interpret"), found()), finding)


# ---- plans ---------------------------------------------------------------------------------------


def plan(dtype: np.dtype, shape: tuple[int, int], block: int, entry: str = "weight_quant"):  # type: ignore[no-untyped-def]
    blocks = tuple(-(-n // block) for n in shape)
    sizes = ((shape, dtype.itemsize), (shape, 1), (blocks, 4))
    return plan_weight_blocks(
        entry, *(Operand.contiguous(s, n) for s, n in sizes), dtype.name, block
    )


#: Columns that allow accesses of 8 or 4 numbers, of 2, of 1; and blocks of an odd size.
FORMS = ((3072, 128), (3070, 128), (3071, 128), (3072, 45), (3072, 64), (3072, 16))


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(dtype, form, marks=[] if dtype == BF16 and form in FORMS[::2] else [
            pytest.mark.slow])
        for dtype in DTYPES for form in FORMS
    ],
    ids=str,
)  # fmt: skip
def test_a_weight_is_one_launch_without_spills(dtype: np.dtype, form: tuple[int, int]) -> None:
    columns, block = form
    (one,) = plan(dtype, (4096, columns), block).launches
    assert one.grid == -(-4096 // block) * -(-columns // block)
    for arch in ("sm_80", "sm_90"):
        for taken in kc.build(one.module, arch).kernels.values():
            assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_threads_fit_every_size_of_block(dtype: np.dtype) -> None:
    """The kernel's assertions hold, and a thread makes at most 16 accesses."""
    for block in range(1, MOST_BLOCK + 1):
        for columns in {block * n for n in (1, 2, 4, 8)}:
            found = plan(dtype, (300, columns), block)
            vec, (one,) = found.features.vec, found.launches
            threads = one.block
            assert block % vec == 0 and threads % 32 == 0 and threads <= 1024
            passes = -(-block // (threads // (block // vec)))
            assert passes <= 16 and passes * vec <= 64


def test_more_than_the_kernel_counts_is_refused() -> None:
    for shape, block in (((2**30 + 1, 1), 128), ((1, 2**30 + 1), 128), ((2**17, 2**17), 2)):
        with pytest.raises(UnsupportedError, match="split it"):
            plan(F16, shape, block)


# ---- arguments -----------------------------------------------------------------------------------

W = np.ones((6, 200), np.float16)
CODES, SCALES = ca.weight_quant(W)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: ca.weight_quant(W, MOST_BLOCK + 1, backend="interpret"),
            UnsupportedError,
            "up to 128, got block_size=129",
        ),
        (
            lambda: ca.weight_dequant(CODES, SCALES[:, :1], 200, backend="interpret"),
            UnsupportedError,
            "backend='mirror'",
        ),
        (lambda: ca.weight_quant(W, 0, backend="interpret"), ValueError, "at least 1, got 0"),
        (lambda: ca.weight_quant(W, backend="cuda"), ValueError, "takes CuPy arrays"),
        (lambda: ca.weight_quant(W, backend="gpu"), ValueError, "got 'gpu'"),
        (lambda: ca.weight_quant(W.astype("f8"), backend="interpret"), TypeError, "got float64"),
        (lambda: ca.weight_quant(W[0], backend="interpret"), ValueError, "2 or more axes"),
        (
            lambda: ca.weight_dequant(CODES, SCALES[:, :1], backend="interpret"),
            ValueError,
            r"\(1, 2\), got \(1, 1\)",
        ),
        (
            lambda: ca.weight_dequant(CODES, SCALES, out_dtype="float64", backend="interpret"),
            ValueError,
            "out_dtype must be",
        ),
        (
            lambda: ca.weight_dequant(CODES, SCALES.astype("f8"), backend="interpret"),
            TypeError,
            "scales float32",
        ),
    ],
)
def test_what_cannot_be_is_said(call, error, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=said):
        call()


def test_larger_blocks_are_numpys_on_the_mirror() -> None:
    codes, scales = ca.weight_quant(W, 200, backend="mirror")
    assert scales.shape == (1, 1) and (codes == 127).all()
