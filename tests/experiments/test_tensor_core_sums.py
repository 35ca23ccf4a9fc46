"""Sums of tensor cores: model, bound and probes, on the interpreter's tensor core."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.accuracy.tensor_core_sums import (
    INSTRUCTIONS,
    Instruction,
    Probe,
    bound,
    drawn,
    model,
)


@pytest.mark.parametrize("bits", [13, 23, 25])
@pytest.mark.parametrize("instruction", INSTRUCTIONS[:3], ids=lambda one: one.kind)
def test_the_bound_holds_of_the_model_and_is_met(instruction: Instruction, bits: int) -> None:
    a, b, c = drawn(instruction, 20_000, seed=0)
    exact, allowed = (a * b).sum(axis=1) + c, bound(a * b, c, bits)
    for sum_bits in {bits, 23}:
        if sum_bits < bits:
            continue
        error = np.abs(model(a, b, c, bits, sum_bits) - exact)
        assert (error <= allowed).all()
    # One that cuts two bits more is not within it.
    assert (np.abs(model(a, b, c, bits - 2, bits - 2) - exact) > allowed).any()


def test_the_model_cuts_toward_zero() -> None:
    one, tiny = np.array([[1.0, 1.0]]), np.array([[1.0, 2.0**-14]])
    none = np.zeros(1)
    assert model(tiny, one, none, 13) == 1 and model(-tiny, one, none, 13) == -1
    assert model(tiny, one, none, 14) == 1 + 2.0**-14


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda one: one.entry)
def test_the_interpreter_adds_exactly_and_cuts_once(instruction: Instruction) -> None:
    """So the kernels bring every addend to its place, and the probes read what they should."""
    a, b, c = drawn(instruction, 12, seed=0)
    sums = instruction.sums(a, b, c, "interpret")
    exact = (a * b).sum(axis=1) + c
    assert (np.abs(sums - exact) <= 2.0**-23 * np.abs(exact)).all() and (sums != 0).any()
    probe = Probe(instruction, "interpret")
    found = probe.directions(23)
    assert found["1 + half"] == 0 and found["1 - half"] == -0.5 and found["2 + 3 last"] == 2
    assert found["c of 1 + 2^-23"] == 1


def test_operands_that_the_type_does_not_hold_are_refused() -> None:
    one = np.ones((1, 16))
    with pytest.raises(ValueError, match="f16 holds"):
        INSTRUCTIONS[0].sums(one / 3, one, np.zeros(1), "interpret")
    with pytest.raises(ValueError, match="float32 holds"):
        INSTRUCTIONS[0].sums(one, one, np.array([1 / 3]), "interpret")
