"""No finite float16 input gives a result that is not finite, on the device."""

from __future__ import annotations

import itertools

import pytest

from tests import large_score_cases as cases

cupy = pytest.importorskip("cupy")
SIZES = (6e-8, 30.0, 1e3, 3e3, 1e4, cases.LARGEST)


def runs_here(form: str) -> bool:
    """Whether this device is the one that the form is compiled for."""
    arch = (cases.FORMS | cases.FLUSHING)[form][0]
    return cupy.cuda.Device().compute_capability == arch[3:5]


@pytest.mark.parametrize("form", [*cases.FORMS, *cases.FLUSHING])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_finite_inputs_give_finite_rows(form: str, kind: str) -> None:
    if not runs_here(form):
        pytest.skip(f"{form} needs another device")
    flags = itertools.product((True, False), repeat=3)
    for seed, (size, (smooth_k, causal, lse)) in enumerate(itertools.product(SIZES, list(flags))):
        options = {"smooth_k": smooth_k, "causal": causal, "return_lse": lse}
        cases.check(form, kind, size, seed, "cuda", cupy.asarray, **options)
