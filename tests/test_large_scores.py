"""No finite float16 input gives a result that is not finite, in the interpreter and the mirror."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cupyattn.reference import attention_mirror
from tests import large_score_cases as cases

FLAGS = {"smooth_k": True, "causal": False, "return_lse": True}
HUGE = {**FLAGS, "smooth_k": False}


@pytest.mark.parametrize("form", cases.ALL)
@given(
    kind=st.sampled_from(cases.KINDS),
    size=st.sampled_from([6e-8, 1e-4, 1.0, 30.0, 1e3, 3e3, 1e4, 3e4, cases.LARGEST]),
    seed=st.integers(0, 2**32 - 1),
    flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}),
)
@example(kind="normal", size=cases.LARGEST, seed=0, flags=FLAGS)
@example(kind="opposed", size=3e3, seed=0, flags=HUGE)
@example(kind="opposed", size=cases.LARGEST, seed=0, flags={**HUGE, "causal": True})
@example(kind="two levels", size=cases.LARGEST, seed=0, flags=HUGE)
@example(kind="spike", size=cases.LARGEST, seed=0, flags=FLAGS)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_finite_inputs_give_finite_rows(form, kind, size, seed, flags) -> None:
    cases.check(form, kind, size, seed, "interpret", np.asarray, **flags)


SIZES = [3e3, 1e4, 2e4, cases.LARGEST]  # largest scores from 2^20 to 2^29


@pytest.mark.parametrize("form", cases.WHOLE)
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_scores_share_a_row(form: str, size: float) -> None:
    cases.check_ties(form, size, 0, "interpret", np.asarray)


@pytest.mark.parametrize("form", cases.WHOLE)
@pytest.mark.parametrize("size", SIZES)
def test_they_do_in_the_mirror(form: str, size: float) -> None:
    variant, arch, _, dtype, _ = cases.ALL[form]
    given, expected = cases.ties(cases.ALL[form], size, 0)
    taken = "sm90" if arch == "sm_90a" else None
    o, lse = attention_mirror(*given, variant=variant, form=taken, return_lse=True)
    np.testing.assert_allclose(o.astype(np.float32), expected, rtol=cases.TOLERANCE[dtype])
    assert np.isfinite(lse).all()
