"""No finite float16 input gives a result that is not finite, on the device."""

from __future__ import annotations

import itertools

import pytest

from tests.kernels import large_score_cases as cases

cupy = pytest.importorskip("cupy")
SIZES = (6e-8, 30.0, 1e3, 3e3, 1e4, cases.LARGEST)


def need_device_of(form: str) -> None:
    """Skip where this device is not the one that the form is compiled for."""
    if cupy.cuda.Device().compute_capability != cases.ALL[form].arch[3:5]:
        pytest.skip(f"{form} needs another device")


@pytest.mark.parametrize("form", cases.ALL)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_finite_inputs_give_finite_rows(form: str, kind: str) -> None:
    need_device_of(form)
    flags = itertools.product((True, False), repeat=3)
    for seed, (size, (smooth_k, causal, lse)) in enumerate(itertools.product(SIZES, list(flags))):
        options = {"smooth_k": smooth_k, "causal": causal, "return_lse": lse}
        cases.check(form, kind, size, seed, "cuda", cupy.asarray, **options)


@pytest.mark.parametrize("form", cases.WHOLE)
@pytest.mark.parametrize("size", [3e3, 1e4, 2e4, cases.LARGEST])
def test_the_largest_scores_share_a_row(form: str, size: float) -> None:
    need_device_of(form)
    for seed in range(4):
        cases.check_ties(form, size, seed, "cuda", cupy.asarray)


@pytest.mark.parametrize("form", cases.OF_FLOAT16)
@pytest.mark.parametrize("kind", cases.VALUES)
def test_values_of_any_size_give_finite_rows(form: str, kind: str) -> None:
    need_device_of(form)
    for seed in range(8):
        cases.check_values(form, kind, seed, "cuda", cupy.asarray, smooth_v=seed % 2 == 1)


@pytest.mark.parametrize("form", cases.ROUNDING)
def test_weights_that_are_rounded_up_keep_rows_finite(form: str) -> None:
    need_device_of(form)
    for behind in cases.BEHIND:
        cases.check_rounded_up(form, behind, "cuda", cupy.asarray)


@pytest.mark.parametrize("form", cases.OF_V)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(form: str, value: float) -> None:
    need_device_of(form)
    cases.check_infinite(form, value, "cuda", cupy.asarray)
