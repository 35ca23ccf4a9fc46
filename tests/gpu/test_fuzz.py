"""Configurations drawn by a seed: every feature, rung, type and layout, larger than in CI.

``CUPYATTN_FUZZ_SEED`` names the seed, which is printed; without it the clock gives one.
``CUPYATTN_FUZZ_COUNT`` says how many configurations are drawn.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from cupyattn import attention
from cupyattn.quant import QuantConfig
from tests.gpu.support import arch_of, moved, on_device, run, run_packed
from tests.hopper import hopper_pv8_cases
from tests.kernels.cross_cases import AXES, CELLS, QUANT_CELLS, QUANTS, Case, drawn, rung_of
from tests.support.runs import RUNGS, asked_for, bits

cupy = pytest.importorskip("cupy")

SEED = int(os.environ.get("CUPYATTN_FUZZ_SEED", time.time_ns() % 2**32))
COUNT = int(os.environ.get("CUPYATTN_FUZZ_COUNT", 100))
#: Every rung in every form, the Hopper forms of 8-bit V among them.
ALL = (*RUNGS, *hopper_pv8_cases.RUNGS)
#: The axes of CI with larger arrays, and with the Hopper forms.
WIDE: dict[str, tuple[Any, ...]] = {
    **AXES,
    "rung": ALL,
    "head_dim": (16, 36, 64, 80, 128, 7, 200, 256),
    "lengths": ((150, 333), (64, 128), (129, 65), (1, 257), (300, 5), (7, 7)),
    "window": (*AXES["window"], (100, 3)),
}


def check(cell: dict[str, Any], seed: int) -> None:
    """Judge one configuration; the rung of a Hopper form may take the portable one instead."""
    case = Case.of(cell, seed)
    inputs, options, rung = case.laid(cupy), moved(case.options), cell["rung"]
    if "quant" in cell:
        options, rung = {**options, "quant": cell["quant"]}, rung_of(cell["quant"])
    before = [bits(x) for x in inputs]
    if case.ends is None:
        found = [run(rung, inputs, **options)]
    else:
        found = run_packed(rung, inputs, on_device(*case.ends), **options)
    for one in found:
        report = one.judge()
        assert report.passed, f"CUPYATTN_FUZZ_SEED={SEED}: {cell}\n{report}"
    assert [bits(x) for x in inputs] == before
    if cell["layout"] == "BSHD" and case.ends is None:
        turned = (x.swapaxes(1, 2) for x in inputs)
        asked = {**asked_for(rung), **options}
        o = attention(*turned, arch=arch_of(rung), layout="BSHD", **asked)
        assert bits(o.swapaxes(1, 2)) == bits(found[0].o)


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_every_pair_is_within_its_bound(number: int) -> None:
    check(CELLS[number], number)


@pytest.mark.parametrize("number", range(len(QUANT_CELLS)))
def test_every_way_to_quantise_is_within_its_bound(number: int) -> None:
    skip_what_is_missing(QUANT_CELLS[number]["quant"])
    check(QUANT_CELLS[number], number)


def skip_what_is_missing(quant: QuantConfig) -> None:
    if quant.pv == "fp8" and int(cupy.cuda.Device().compute_capability) < 89:
        pytest.skip("8-bit floats need compute capability 8.9")


@pytest.mark.parametrize("number", range(len(QUANTS)))
def test_drawn_ways_to_quantise(number: int) -> None:
    print(f"CUPYATTN_FUZZ_SEED={SEED} CUPYATTN_FUZZ_COUNT={COUNT}")
    skip_what_is_missing(QUANTS[number])
    axes = {**WIDE, "rung": ("fa_int8",), "quant": (QUANTS[number],)}
    for shift, cell in enumerate(drawn(axes, SEED + number, COUNT // len(QUANTS))):
        check(cell, SEED + shift)


@pytest.mark.parametrize("rung", ALL)
def test_drawn_configurations(rung: str) -> None:
    print(f"CUPYATTN_FUZZ_SEED={SEED} CUPYATTN_FUZZ_COUNT={COUNT}")
    for number, cell in enumerate(drawn({**WIDE, "rung": (rung,)}, SEED, COUNT // len(ALL))):
        check(cell, SEED + number)
