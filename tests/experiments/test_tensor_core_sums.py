"""Sums of tensor cores: model, bound and probes, on the interpreter's tensor core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn.bounds.perturbation import gamma
from experiments.accuracy.tensor_core_sums import (
    INSTRUCTIONS,
    Instruction,
    Probe,
    bound,
    drawn,
    drawn_low,
    model,
    sided_bound,
)

E4M3 = next(one for one in INSTRUCTIONS if one.entry == "wgmma_e4m3")


@pytest.mark.parametrize("draw", [drawn, drawn_low])
@pytest.mark.parametrize("bits", [13, 23, 25])
@pytest.mark.parametrize("instruction", INSTRUCTIONS[:3], ids=lambda one: one.kind)
def test_the_bound_holds_of_the_model_and_is_met(
    instruction: Instruction, bits: int, draw: Callable[..., Any]
) -> None:
    a, b, c = draw(instruction, 20_000, seed=0)
    low = instruction.least_normal
    exact, allowed = (a * b).sum(axis=1) + c, bound(a, b, c, bits, low)
    for sum_bits in {bits, 23}:
        if sum_bits < bits:
            continue
        error = np.abs(model(a, b, c, bits, sum_bits, low) - exact)
        assert (error <= allowed).all()
    # One that cuts two bits more is not within it.
    assert (np.abs(model(a, b, c, bits - 2, bits - 2, low) - exact) > allowed).any()


@pytest.mark.parametrize("draw", [drawn, drawn_low])
def test_what_products_lose_has_their_sign(draw: Callable[..., Any]) -> None:
    """[L66] As the model cuts 13 bits off, or as the sum is exact; rounded outward it is not."""
    a, b, c = draw(E4M3, 20_000, seed=0)
    low = E4M3.least_normal
    exact = (a * b).sum(axis=1) + c
    middle, width = sided_bound(a, b, c, 13, low)
    assert (np.abs(model(a, b, c, 13, 13, low) - exact - middle) <= width).all()
    assert (np.abs(middle) <= width).all()
    if draw is drawn:
        lost = model(a, b, c, 13, 30, low) - exact
        assert (np.abs(-lost - middle) > width).any()


def adversarial(kind: str, cases: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw operands of one instruction: numbers of e4m3, (cases, 32) each."""
    shape = cases, 32
    a, b = rng.uniform(1, 2, (2, *shape)) * 2.0 ** rng.integers(-3, 4, (2, *shape))
    if kind == "signs":
        a = a * rng.choice([-1.0, 1.0], shape)
    elif kind == "nearly a unit":  # of a sum between 1 and 2^6
        b = np.where(rng.random(shape) < 0.03, 1.0, 2.0**-9) * 2.0 ** rng.integers(0, 2, shape)
        a = np.full(shape, 1.875 * 2.0**-3)
    elif kind == "subnormal":
        a = rng.integers(1, 8, shape) * 2.0**-9
        b = b * 2.0 ** rng.integers(-4, 5, (cases, 1))
    elif kind == "both subnormal":
        a, b = rng.integers(0, 8, (2, *shape)) * 2.0**-9
    x, y = (z.astype(np.float32).astype(ml_dtypes.float8_e4m3fn) for z in (a, b))
    return x.astype(np.float64), y.astype(np.float64)


@pytest.mark.parametrize("large_c", [False, True])
@pytest.mark.parametrize(
    "kind", ["one sign", "signs", "nearly a unit", "subnormal", "both subnormal"]
)
def test_bounds_of_chains_over_8_bit_floats(kind: str, large_c: bool) -> None:
    """[L3], [L57], [L66] of sums that begin with c: it is cut, too, where it is the largest."""
    rng, cases, low, u = np.random.default_rng(0), 500, E4M3.least_normal, 2.0**-13
    c = rng.uniform(1, 2, cases) * 2.0 ** rng.integers(-8, 12, cases) * large_c
    found = exact = c.astype(np.float32).astype(np.float64)
    size, spent = np.abs(exact), np.zeros(cases)
    for steps in range(1, 5):
        a, b = adversarial(kind, cases, rng)
        before, found = found, model(a, b, found, 13, 13, low)
        one = np.abs(found - before - (a * b).sum(axis=1))
        assert (one <= bound(a, b, before, 13, low)).all()
        aligned = np.maximum(np.abs(a), low) * np.maximum(np.abs(b), low)
        spent = spent + 33 * np.maximum(np.abs(exact), aligned.max(axis=1))
        exact = exact + (a * b).sum(axis=1)
        size, spent = size + aligned.sum(axis=1), spent + np.abs(exact)
        error = np.abs(found - exact)
        assert (error <= u * (1 + 35 * u) ** (steps + 1) * spent).all()
        assert (error <= gamma(34 * steps, u) * size).all()
    assert error.max() > 0 or (kind == "both subnormal" and not large_c)  # which are exact


def test_an_accumulator_that_is_the_largest_loses_a_unit_too() -> None:
    none, c = np.zeros((1, 32)), np.array([1 + 2.0**-13 - 2.0**-23])
    assert model(none, none, c, 13, 13) == 1
    assert bound(none, none, c, 13, E4M3.least_normal) > 2 * (1 - 2.0**-10) * 2.0**-13
    assert model(none, none, c, 23) == c  # in 16 bits it does not


def test_subnormal_operands_align_as_the_least_normal_number() -> None:
    """4 x 2^-9 is treated as if its exponent were -4, so a unit is 8 times as wide."""
    a, b, c = np.zeros((1, 32)), np.zeros((1, 32)), np.array([2.0**-18])
    a[0, 0], b[0, 0] = 4.0, 2.0**-9
    assert model(a, b, c, 13, 13) == 2.0**-7 + 2.0**-18
    assert model(a, b, c, 13, 13, E4M3.least_normal) == 2.0**-7
    assert bound(a, b, c, 13, 0.0) < 2.0**-18 <= bound(a, b, c, 13, E4M3.least_normal)


def test_the_model_cuts_toward_zero() -> None:
    one, tiny = np.array([[1.0, 1.0]]), np.array([[1.0, 2.0**-14]])
    none = np.zeros(1)
    assert model(tiny, one, none, 13) == 1 and model(-tiny, one, none, 13) == -1
    assert model(tiny, one, none, 14) == 1 + 2.0**-14


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda one: one.entry)
def test_the_interpreter_adds_exactly_and_cuts_once(instruction: Instruction) -> None:
    """So the kernels bring every addend to its place, and the probes read the right sums."""
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
