"""Every feature with every rung, type and layout, in pairs, on the mirror and in the kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupyattn import attention
from cupyattn.kernels import ladder
from cupyattn.problem.form import scale_tiles
from cupyattn.problem.row_preparation import EPS, Preparation
from cupyattn.problem.row_preparation import OPTIONS as PREPARATION
from cupyattn.quant.quantized import BUFFERS as QUANTIZED
from cupyattn.reference.quantize import quantize_mirror
from tests.kernels.cross_cases import (
    AXES,
    CELLS,
    QUANT_AXES,
    QUANT_CELLS,
    Case,
    cover,
    drawn,
    possible,
    rung_of,
)  # fmt: skip
from tests.quant.quant_inputs import assert_mean
from tests.support.runs import Run, bits, run, run_packed


@pytest.mark.parametrize(
    ("axes", "cells", "most"), [(AXES, CELLS, 60), (QUANT_AXES, QUANT_CELLS, 90)]
)
def test_every_two_values_meet(axes: Any, cells: Any, most: int) -> None:
    for a, b in itertools.combinations(axes, 2):
        met = {(cell[a], cell[b]) for cell in cells}
        wanted = {(x, y) for x, y in itertools.product(axes[a], axes[b]) if possible({a: x, b: y})}
        assert met == wanted, (a, b)
    assert all(map(possible, cells)) and len(cells) < most


def test_cases_of_some_axes() -> None:
    small = {"rung": ("fa", "fa_tc"), "dtype": ("float16", "float32"), "softcap": (0.0, 1.0)}
    found = {(c["rung"], c["dtype"]) for c in cover(small)}
    assert found == {("fa", "float16"), ("fa", "float32"), ("fa_tc", "float16")}


def test_drawn_cases_follow_their_seed() -> None:
    assert list(drawn(AXES, 3, 5)) == list(drawn(AXES, 3, 5)) != list(drawn(AXES, 4, 5))


@pytest.mark.parametrize(
    ("number", "backend"),
    [
        pytest.param(
            number, backend,
            marks=[pytest.mark.slow] if backend == "interpret" and number % 2 else [],
        )
        for number in range(len(CELLS))
        for backend in ("mirror", "interpret")
    ],
)  # fmt: skip
def test_every_pair_is_within_its_bound(number: int, backend: str) -> None:
    case = Case.of(CELLS[number], number)
    q, k, v = case.laid()
    before = [bits(x) for x in case.inputs]
    rung, options = case.cell["rung"], {"backend": backend, **case.options}
    if case.ends is None:
        found = [run(rung, (q, k, v), **options)]
    else:
        found = run_packed(rung, (q, k, v), case.ends, **options)
    for one in found:
        one.check()
    assert [bits(x) for x in (q, k, v)] == before, "an input was modified"
    check_layout(case, found, rung, options)


def check_layout(case: Case, found: list[Run], rung: str, options: dict[str, Any]) -> None:
    """Compare with the same call of another layout, to the bit."""
    if case.cell["layout"] == "BSHD" and case.ends is None:
        turned = (x.swapaxes(1, 2) for x in case.laid())
        o = attention(*turned, variant=rung, layout="BSHD", **options)
        expected = found[0].o
        if found[0].quantized is not None:  # by the mirror, whose means may round otherwise
            expected = attention(*case.laid(), variant=rung, **options)
        assert bits(np.swapaxes(o, 1, 2)) == bits(expected)


@pytest.mark.parametrize(
    ("number", "backend"),
    [
        *((number, "mirror") for number in range(len(QUANT_CELLS))),
        *(
            pytest.param(number, "interpret", marks=pytest.mark.slow)
            for number in range(len(QUANT_CELLS))
        ),
    ],
)
def test_every_way_to_quantise_is_within_its_bound(number: int, backend: str) -> None:
    """With every feature, type and layout, the codes by J1, and what comes of them by J2 and J3."""
    case = Case.of(QUANT_CELLS[number], number)
    quant, inputs = case.cell["quant"], case.laid()
    options = {"backend": backend, "quant": quant, **case.options}
    if case.ends is None:
        found = [run(rung_of(quant), inputs, **options)]
    else:
        found = run_packed(rung_of(quant), inputs, case.ends, **options)
    for one in found:
        one.check()
        check_operands(one)
    check_layout(case, found, "fa_int8", options)


def check_operands(one: Run) -> None:
    """J1: codes, scales and zero points of the very operands that J2 was of are the mirror's."""
    got, (q, k, v) = one.quantized, one.inputs
    assert got is not None
    sizes = q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]
    given = {"rope_interleaved": False, "rope_offset_q": 0, "qk_norm_eps": EPS, "qk_norm_split": 0}
    given |= one.options
    how = Preparation.of_arrays({name: given.get(name) for name in PREPARATION}, sizes)
    tiles = scale_tiles(ladder.lookup("fa_int8"), q.shape[3], got.config, None)
    want = quantize_mirror(
        q, k, v, got.config, tiles, k_mean=got.k_mean, v_mean=got.v_mean, preparation=how
    )
    for name in QUANTIZED:
        found, expected = getattr(got, name), getattr(want, name)
        assert (found is None) == (expected is None), name
        assert found is None or (found.shape, bits(found)) == (expected.shape, bits(expected)), name
    for mean, x in ((got.v_mean, v), (None if how else got.k_mean, k)):
        if mean is not None and x.shape[2]:
            assert_mean(mean, x)
