"""Rows of codes from two tensors side by side: bits of their concatenation, faults, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.arrays.operand import Operand
from cupyattn.compiler import modules as kc
from cupyattn.errors import UnsupportedError
from cupyattn.ops.act_quant import ACT_QUANT, ActQuantSettings
from cupyattn.ops.layers import LAYERS, LayersSettings, steps_before
from cupyattn.ops.operation import run
from cupyattn.plans.row_quant import plan_row_quant
from cupyattn.quant.blocks import BLOCK_SIZE
from tests.faults.fault_patches import check_found, put_a_line_in_place
from tests.quant.quant_inputs import DTYPES, operand, same_bytes


def rows(shape: tuple[int, ...], dtype: np.dtype = DTYPES[0], seed: int = 0) -> np.ndarray:
    return operand(seed, dtype, (*[1] * (4 - len(shape)), *shape), "wide").reshape(shape)


def codes(
    x: np.ndarray, right: np.ndarray, backend: str = "interpret", strategy: str = "channel"
) -> tuple[np.ndarray, ...]:
    how = ActQuantSettings(BLOCK_SIZE, backend, strategy=strategy)
    return tuple(run(ACT_QUANT, how, {"x": x, "right": right}).values())


def joined(x: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, ...]:
    return ca.act_quant(np.concatenate((x, right), axis=-1), strategy="channel")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "widths"),
    [
        (5, (64, 200)), (3, (129, 31)), (4, (6, 300)), (2, (0, 40)), (2, (40, 0)), (0, (8, 8)),
        (1, (3072, 1040)), pytest.param(3, (5000, 35_000), marks=pytest.mark.slow),
        pytest.param(2, (33_001, 64), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_codes_are_of_the_concatenation(
    count: int, widths: tuple[int, int], dtype: np.dtype
) -> None:
    left, right = widths
    wide = rows((count, left + right + 8), dtype)
    if count > 1:
        wide[0], wide[-1, -1] = 0, np.nan
    apart = wide[:, :left].copy(), wide[:, left : left + right].copy()
    of_one = wide[:, :left], wide[:, 8 : 8 + right]  # rows further apart than they are long
    for sides in (apart, of_one):
        expected = joined(*sides)
        assert same_bytes(codes(*sides), expected)
        assert same_bytes(codes(*sides, backend="mirror"), expected)


def test_rows_of_several_axes_and_sides_that_are_copied() -> None:
    x, right = rows((2, 3, 40)), rows((2, 24, 3), seed=1).swapaxes(1, 2)
    assert same_bytes(codes(x, right), joined(x, right))
    right = rows((3, 2, 24), seed=2).swapaxes(0, 1)
    assert same_bytes(codes(x, right), joined(x, right))


@pytest.mark.parametrize(
    ("left", "right", "vec"),
    [((64, 64), (128, 128), 8), ((68, 68), (128, 128), 4), ((64, 64), (126, 126), 2),
     ((64, 64), (128, 129), 1), ((63, 64), (65, 72), 1)],
)  # fmt: skip
def test_an_access_has_one_side(left: tuple[int, int], right: tuple[int, int], vec: int) -> None:
    """Widths and strides of both limit its elements."""
    sides = [Operand((6, n), (stride, 1), 2, 0) for n, stride in (left, right)]
    plan = plan_row_quant(sides[0], "float16", right=sides[1])
    assert plan.features.vec == vec
    assert dict(plan.launches[0].module.defines)["CFG_PAIRED"] == 1
    alone = plan_row_quant(sides[0], "float16")
    assert "CFG_PAIRED" not in dict(alone.launches[0].module.defines)


def test_two_sides_take_no_more_registers_at_the_shape_of_flux() -> None:
    """A block of 256 threads with more than 80 registers would leave room for two, not three."""
    for dtype in ("float16", "bfloat16"):
        x, right = (Operand.contiguous((4608, n), 2) for n in (3072, 12_288))
        (one,) = plan_row_quant(x, dtype, right=right).launches
        taken = kc.build(one.module, "sm_90").kernels["row_quant"]
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
        assert one.block == 256 and taken.registers <= 80
    with pytest.raises(UnsupportedError, match="split them"):
        plan_row_quant(x, "float16", right=Operand.contiguous((4608, 2**30), 2))


#: Line of the source, its replacement, and the finding.
THEFTS = {
    "one channel too many of x": ("channel < split", "channel <= split", "outside x"),
    "the right side from its split on": (
        "p.right_stride - p.split", "p.right_stride", "outside right"
    ),
    "the right side at the distance of x": (
        "row * p.right_stride", "row * p.X_stride", "outside right"
    ),
    "x alone": ("channel < split ?", "true ?", "outside x"),
}  # fmt: skip


@pytest.mark.parametrize("theft", THEFTS)
def test_a_line_less_is_found(theft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, finding = THEFTS[theft]
    put_a_line_in_place("linear/row_quant.cu", line, instead, tmp_path, monkeypatch)
    wide = rows((9, 400)) + np.arange(400, dtype=np.float16)
    x, right = wide[:5, :40], np.vstack((wide[:, 200:300], wide[:, :100]))[:5]
    check_found(lambda: not same_bytes(codes(x, right), joined(x, right)), finding)


@settings(max_examples=8)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 150), st.integers(1, 300),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_split_has_the_bits_of_the_mirror(seed, count, left, right, dtype) -> None:
    x, y = rows((count, left), dtype, seed), rows((count, right), dtype, seed + 1)
    assert same_bytes(codes(x, y), joined(x, y))


# ---- layers --------------------------------------------------------------------------------------


def layers(channels: int, strategy: str = "channel") -> dict[str, Any]:
    found = {}
    for number, out in enumerate((40, 24)):
        made = ca.weight_quant(rows((out, channels), seed=number), strategy=strategy)
        found |= dict(zip((f"b{number}", f"b_scales{number}"), made, strict=True))
    return found


@pytest.mark.parametrize("backend", ["mirror", "interpret"])
def test_layers_of_two_sides_are_the_layers_of_their_concatenation(backend: str) -> None:
    x, right = rows((2, 3, 64)), rows((2, 3, 96), seed=1)
    how = LayersSettings("float16", ("", ""), "sm_90", backend)
    found = run(LAYERS, how, {"x": x, "right": right, **layers(160)})
    whole = np.concatenate((x, right), axis=-1)
    expected = run(LAYERS, how._replace(backend="mirror"), {"x": whole, **layers(160)})
    assert same_bytes(tuple(found), tuple(expected))


HOW = LayersSettings("float16", ("", ""), None, "interpret")
X = rows((6, 64))
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "blocks": (
        lambda: codes(X, X, strategy="block"), UnsupportedError, "right goes with strategy='chan"
    ),
    "layers by block": (
        lambda: run(LAYERS, HOW, {"x": X, "right": X, **layers(128, "block")}), UnsupportedError,
        "right goes with strategy='channel', got 'block': concatenate x and right",
    ),
    "a rotation": (
        lambda: run(
            LAYERS, HOW._replace(before=steps_before("hadamard")),
            {"x": X, "right": X, **layers(128)},
        ), UnsupportedError, "right goes with rows that are quantised as they are",
    ),
    "other rows": (
        lambda: codes(X, X[1:]), ValueError,
        r"right must have the rows .*float16 of shape \(6, '\*'\), got float16 of shape \(5, 64\)",
    ),
    "other axes": (lambda: codes(X[0], np.float16(1)[...]), ValueError, "right must have the rows"),
    "another type": (lambda: codes(X, X.astype(np.float32)), ValueError, "got float32 of shape"),
    "weights of other channels": (
        lambda: run(LAYERS, HOW, {"x": X, "right": X, **layers(64)}), ValueError, "128.*64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name: str) -> None:
    call, error, said = REFUSED[name]
    with pytest.raises(error, match=said):
        call()
