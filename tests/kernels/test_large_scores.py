"""No finite float16 input gives a result that is not finite, in the interpreter and the mirror."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cupyattn.reference.attention import attention_mirror
from tests.kernels import large_score_cases as cases
from tests.support.marks import slow, slow_rows

FLAGS = {"smooth_k": True, "causal": False, "return_lse": True}
HUGE = {**FLAGS, "smooth_k": False}


#: The others have neighbours among these, whose last steps are the same.
SOONER = {"fa", "fa_tc", "fa_tc, sm90", "fa_int8", "pv8_whole", "sm90_pv8", "sm90_fp8"}


def forms(names: list[str], late: Set[str] = frozenset()) -> list[Any]:
    """Return forms as parameters, most of them slow, `late` too."""
    sooner = SOONER - late
    return [pytest.param(x, marks=[] if x in sooner else [pytest.mark.slow], id=x) for x in names]


@pytest.mark.parametrize(
    "form", forms(list(cases.ALL), {"fa", "pv8_whole", "sm90_fp8", "sm90_pv8"})
)
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
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
def test_finite_inputs_give_finite_rows(form, kind, size, seed, flags) -> None:
    """The next test has such scores for fa, and tests/quant/test_pv8_whole.py for pv8_whole."""
    cases.check(form, kind, size, seed, "interpret", np.asarray, **flags)


SIZES = [3e3, 1e4, 2e4, cases.LARGEST]  # largest scores from 2^20 to 2^29


@pytest.mark.parametrize("form", cases.WHOLE)
@pytest.mark.parametrize("size", [*slow(SIZES[1:3]), SIZES[0], SIZES[3]])
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


@pytest.mark.parametrize("form", forms(cases.OF_FLOAT16))
@given(kind=st.sampled_from(cases.VALUES), seed=st.integers(0, 2**32 - 1), smooth_v=st.booleans())
@example(kind="constant", seed=0, smooth_v=False)
@example(kind="levels", seed=0, smooth_v=True)
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_of_any_size_give_finite_rows(form, kind, seed, smooth_v) -> None:
    cases.check_values(form, kind, seed, "interpret", np.asarray, smooth_v=smooth_v)


@pytest.mark.parametrize("form", forms(cases.ROUNDING))
@pytest.mark.parametrize("behind", cases.BEHIND[:2])
def test_weights_that_are_rounded_up_keep_rows_finite(form: str, behind: float) -> None:
    cases.check_rounded_up(form, behind, "interpret", np.asarray)


@pytest.mark.parametrize("behind", cases.BEHIND)
def test_they_do_in_the_mirror_too(behind: float) -> None:
    given = cases.rounded_up(cases.ALL["fa_tc"], behind)
    o = attention_mirror(*given, variant="fa_tc").astype(np.float32)
    assert o.max() <= cases.LARGEST and o.min() >= cases.LARGEST * (1 - 2.0**-10)


@pytest.mark.parametrize("form", forms(cases.OF_V))
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(form: str, value: float) -> None:
    cases.check_infinite(form, value, "interpret", np.asarray)


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        *((form, "mirror") for form in cases.ALL),
        *((form, "interpret") for form in ("fa_int8", "fa_int8, fused", "v8", "pv8")),
        *slow_rows((form, "interpret") for form in ("fa_tc", "pv8_whole", "e4m3", *cases.HOPPER)),
    ],
)
def test_what_is_not_finite_leaves_rows_without_keys_empty(form: str, backend: str) -> None:
    cases.check_empty_rows(form, backend, np.asarray)
