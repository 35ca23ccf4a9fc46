"""Tensor cores add as the bounds assume (MATH_REFERENCE, L66 and L80), and codes are predicted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn.kernels.numerics import FP8_ROUNDOFF, TENSOR_CORE_ROUNDOFF
from experiments.accuracy import predicted_codes
from experiments.accuracy.tensor_core_sums import (
    INSTRUCTIONS,
    Instruction,
    bound,
    drawn,
    drawn_low,
    model,
    sided_bound,
)

cupy = pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("draw", [drawn, drawn_low])
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda one: one.entry)
def test_an_addend_loses_less_than_a_unit_of_the_largest(
    instruction: Instruction, draw: Callable[..., Any]
) -> None:
    assumed = FP8_ROUNDOFF if instruction.kind == "e4m3" else TENSOR_CORE_ROUNDOFF
    assert 2.0**-instruction.fraction_bits == assumed
    a, b, c = draw(instruction, 100_000, seed=1)
    error = np.abs(instruction.sums(a, b, c, "cuda") - ((a * b).sum(axis=1) + c))
    assert (error <= bound(a, b, c, instruction.fraction_bits, instruction.least_normal)).all()


@pytest.mark.parametrize("draw", [drawn, drawn_low])
@pytest.mark.parametrize("name", ["mma_e4m3", "wgmma_e4m3"])
def test_what_products_of_8_bit_floats_lose_has_their_sign(
    name: str, draw: Callable[..., Any]
) -> None:
    one = next(one for one in INSTRUCTIONS if one.entry == name)
    a, b, c = draw(one, 100_000, seed=2)
    middle, width = sided_bound(a, b, c, 13, one.least_normal)
    error = one.sums(a, b, c, "cuda") - ((a * b).sum(axis=1) + c)
    assert (np.abs(error - middle) <= width).all()


@pytest.mark.parametrize("draw", [drawn, drawn_low])
def test_wgmma_over_8_bit_floats_adds_as_the_model(draw: Callable[..., Any]) -> None:
    """13 bits of the largest addend and of the sum; operands below 2^-6 align as 2^-6."""
    one = next(one for one in INSTRUCTIONS if one.entry == "wgmma_e4m3")
    a, b, c = draw(one, 20_000, seed=1)
    found = one.sums(a, b, c, "cuda")
    assert (found == model(a, b, c, 13, 13, one.least_normal)).all()


@pytest.mark.parametrize("name", ["mma_f16", "mma_bf16", "wgmma_f16", "wgmma_bf16"])
def test_16_bit_operands_add_as_the_model(name: str) -> None:
    """25 bits of the largest addend, 23 of the sum; all operands are normal."""
    one = next(one for one in INSTRUCTIONS if one.entry == name)
    a, b, c = drawn(one, 20_000, seed=1)
    assert (one.sums(a, b, c, "cuda") == model(a, b, c, 25, 23)).all()


def test_codes_are_those_that_are_predicted() -> None:
    """A few thousand rows of every form; the experiment takes a million."""
    args = argparse.Namespace(
        backend="cuda", rows=8000, lengths=(300,), head_dims=(64,), seed=0, threads=8, json=None,
        distributions=predicted_codes.DISTRIBUTIONS, forms=list(predicted_codes.FORMS), quick=True,
        seconds=100.0,
    )  # fmt: skip
    assert predicted_codes.run(args) == 0
