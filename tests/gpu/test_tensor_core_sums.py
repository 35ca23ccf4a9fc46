"""Tensor cores add as the bounds assume (docs/MATH_REFERENCE.md, C5), and codes are predicted."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from cupyattn.kernels.numerics import FP8_ROUNDOFF, TENSOR_CORE_ROUNDOFF
from experiments.accuracy import predicted_codes
from experiments.accuracy.tensor_core_sums import INSTRUCTIONS, Instruction, bound, drawn

cupy = pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda one: one.entry)
def test_an_addend_loses_less_than_a_unit_of_the_largest(instruction: Instruction) -> None:
    assumed = FP8_ROUNDOFF if instruction.kind == "e4m3" else TENSOR_CORE_ROUNDOFF
    assert 2.0**-instruction.fraction_bits == assumed
    a, b, c = drawn(instruction, 100_000, seed=1)
    error = np.abs(instruction.sums(a, b, c, "cuda") - ((a * b).sum(axis=1) + c))
    assert (error <= bound(a * b, c, instruction.fraction_bits)).all()


def test_codes_are_those_that_are_predicted() -> None:
    """A few thousand rows of every form; the experiment takes a million."""
    args = argparse.Namespace(
        backend="cuda", rows=8000, lengths=(300,), head_dims=(64,), seed=0, threads=8, json=None,
        distributions=predicted_codes.DISTRIBUTIONS, forms=list(predicted_codes.FORMS), quick=True,
        seconds=100.0,
    )  # fmt: skip
    assert predicted_codes.run(args) == 0
