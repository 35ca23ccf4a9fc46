"""Noise schedules against closed forms; bins of log-SNR; factors of static scales; the policy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupyattn.diffusion import policy as policies
from cupyattn.diffusion.policy import SigmaPolicy, TablePolicy, as_policy, middle_ratio
from cupyattn.diffusion.schedules import (
    SnrBins,
    compute_adaptive_scales,
    compute_sigma_schedule,
    log_snr,
    noise_to_signal,
)

KINDS = ("edm", "flow", "ddpm")
lengths = st.integers(2, 300)


# ---- schedules -----------------------------------------------------------------------------------


@given(
    n=lengths, low=st.floats(1e-4, 1), spread=st.floats(1.5, 1e5), rho=st.sampled_from([1, 3, 7])
)
def test_edm_is_a_line_in_its_root(n, low, spread, rho) -> None:
    found = compute_sigma_schedule(n, "edm", sigma_min=low, sigma_max=low * spread, rho=rho)
    assert found[0] == low * spread and found[-1] == low
    i = np.arange(n)
    top, bottom = (low * spread) ** (1 / rho), low ** (1 / rho)
    np.testing.assert_allclose(found, (top + i / (n - 1) * (bottom - top)) ** rho, rtol=1e-10)


def test_the_middle_of_edm_lies_above_one() -> None:
    found = compute_sigma_schedule(1000)
    assert found[500] == pytest.approx(2.504, abs=5e-4)
    roots = 80.0 ** (1 / 7), 0.002 ** (1 / 7)
    assert np.abs(found - 1).argmin() == round(999 * (roots[0] - 1) / (roots[0] - roots[1]))


@given(n=lengths, shift=st.floats(0.1, 20))
def test_shifting_flow_matching_multiplies_its_ratio(n, shift) -> None:
    plain = compute_sigma_schedule(n, "flow")
    assert plain[0] == math.inf
    time = [1 - Fraction(i, n) for i in range(n)]
    np.testing.assert_allclose(plain[1:], [float(t / (1 - t)) for t in time[1:]], rtol=1e-14)
    shifted = compute_sigma_schedule(n, "flow", shift=shift)
    np.testing.assert_allclose(shifted[1:], shift * plain[1:], rtol=1e-14)
    t = np.array([float(t) for t in time])
    sigma = shift * t / (1 + (shift - 1) * t)
    np.testing.assert_allclose(noise_to_signal(np.minimum(sigma, 1), "flow")[1:], shifted[1:], 1e-9)


@given(beta=st.floats(1e-6, 0.3), steps=lengths)
def test_ddpm_of_one_beta_is_a_power(beta, steps) -> None:
    given = {"beta_start": beta, "beta_end": beta, "train_timesteps": steps}
    found = compute_sigma_schedule(steps, "ddpm", **given)
    done = np.arange(steps, 0, -1)
    np.testing.assert_allclose(found, np.sqrt((1 - beta) ** -done.astype(float) - 1), rtol=1e-7)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear"])
def test_ddpm_visits_steps_of_training(schedule) -> None:
    every = compute_sigma_schedule(1000, "ddpm", beta_schedule=schedule)
    few = compute_sigma_schedule(50, "ddpm", beta_schedule=schedule)
    assert few[0] == every[0] and few[-1] == every[-1] and np.isin(few, every).all()
    betas = np.linspace(1e-4, 0.02, 1000)
    if schedule == "scaled_linear":
        betas = np.linspace(1e-4**0.5, 0.02**0.5, 1000) ** 2
    abar = np.cumprod(1 - betas)
    np.testing.assert_allclose(noise_to_signal(abar, "ddpm")[::-1], every, rtol=1e-9)


@given(kind=st.sampled_from(KINDS), n=lengths)
def test_every_schedule_falls(kind, n) -> None:
    found = compute_sigma_schedule(n, kind)
    assert found.shape == (n,) and found.dtype == np.float64
    assert (found[:-1] > found[1:]).all() and found[-1] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "vp"}, "'edm', 'flow' or 'ddpm', got 'vp'"),
        ({"timesteps": 0}, "timesteps must be 1 or more, got 0"),
        ({"sigma_min": 90}, "sigma_min must be at most sigma_max"),
        ({"rho": 0}, "rho must be positive"),
        ({"rho": 1e-3}, "rho=0.001 is too small: sigma_max=80.0 to the power 1 / rho"),
        ({"rho": 1e-4, "sigma_max": 0.5}, "sigma_max=0.5 to the power 1 / rho does not fit"),
        ({"kind": "flow", "shift": -1.0}, "shift must be positive and finite, got -1.0"),
        ({"kind": "ddpm", "timesteps": 2000}, "at most train_timesteps=1000, got 2000"),
        ({"kind": "ddpm", "beta_end": 1.0}, "betas must rise from above 0 to below 1"),
        ({"kind": "ddpm", "beta_schedule": "cosine"}, "'linear' or 'scaled_linear', got 'cosine'"),
    ],
)
def test_what_makes_no_schedule(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        compute_sigma_schedule(**given)


def test_numbers_of_a_sampler_have_their_range() -> None:
    assert noise_to_signal([0.5, 3.0], "edm").tolist() == [0.5, 3.0]
    for kind, wrong in (("flow", 1.1), ("ddpm", -0.1), ("edm", math.nan), ("vp", 0.5)):
        with pytest.raises(ValueError, match="must"):
            noise_to_signal([wrong], kind)


# ---- bins and factors ----------------------------------------------------------------------------


@given(n=lengths, count=st.integers(1, 12), kind=st.sampled_from(KINDS))
def test_bins_are_even_in_log_snr_and_rise_with_time(n, count, kind) -> None:
    sigmas = compute_sigma_schedule(max(n, 3), kind)
    bins = SnrBins.even(sigmas, count)
    found = bins.index(sigmas)
    assert bins.count == count
    assert found[0] == 0 and found[-1] == count - 1 and (np.diff(found) >= 0).all()
    finite = np.isfinite(log_snr(sigmas))
    values = log_snr(sigmas[finite])
    place = (values - values[0]) / (values[-1] - values[0]) * count
    inside = abs(place % 1 - 0.5) < 0.499  # off the edges, which round
    assert (found[finite][inside] == np.floor(place[inside])).all()


def test_no_noise_and_no_signal_have_a_bin() -> None:
    bins = SnrBins((-1.0, 1.0))
    assert bins.index([math.inf, 1.0, 0.0]).tolist() == [0, 1, 2]
    assert bins.index(math.exp(0.5)) == 1  # on an edge: that after it
    with pytest.raises(ValueError, match="finite and rise"):
        SnrBins((1.0, 1.0))
    with pytest.raises(ValueError, match="3 bins need sigmas of several"):
        SnrBins.even([math.inf, 1.0], 3)


@given(n=lengths, kind=st.sampled_from(KINDS), count=st.none() | st.integers(1, 8))
def test_factors_are_ratios_to_the_middle_and_shared_by_a_bin(n, kind, count) -> None:
    sigmas = compute_sigma_schedule(max(n, 3), kind)
    found = compute_adaptive_scales(sigmas, num_bins=count)
    want = np.clip(sigmas / sigmas[sigmas.size // 2], 2.0**-10, 2.0**10)
    assert found.dtype == np.float32
    if count is None:
        np.testing.assert_allclose(found, want, rtol=1e-6)
        assert found[sigmas.size // 2] == 1
    else:
        assert (found >= want.astype(np.float32)).all()  # no step of a bin saturates for it
        assert len(set(found.tolist())) <= count


def test_a_power_of_two_between_activations_changes_no_code() -> None:
    """Dynamic scales fill the range at every noise level: a table has nothing to add."""
    import cupyattn as ca

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 70, 32)).astype(np.float32)
    codes = [ca.quantize(q * s, k * s, v) for s in (1.0, 2.0**-8, 2.0**9)]
    for other in codes[1:]:
        np.testing.assert_array_equal(other.q_codes, codes[0].q_codes)
        np.testing.assert_array_equal(other.k_codes, codes[0].k_codes)


def test_what_makes_no_factors() -> None:
    for arguments, said in (
        ({"sigmas": [[1.0]]}, "one axis"),
        ({"sigmas": [-1.0]}, "0 or more"),
        ({"sigmas": [1.0], "minimum": 2.0, "maximum": 1.0}, "at most maximum"),
        ({"sigmas": [0.0]}, "reference must be positive"),
    ):
        with pytest.raises(ValueError, match=said):
            compute_adaptive_scales(**arguments)


# ---- policy --------------------------------------------------------------------------------------


@given(
    ratio=st.floats(0, 1e6),
    low=st.floats(0, 10),
    width=st.floats(0, 10),
    late=st.none() | st.integers(0, 100),
    timestep=st.integers(0, 100),
)
@example(ratio=5.0, low=0.1, width=4.9, late=None, timestep=0)
@example(ratio=0.1, low=0.1, width=4.9, late=None, timestep=0)
def test_the_rule(ratio, low, width, late, timestep) -> None:
    rule = SigmaPolicy(low + width, low, late)
    mode = policies.as_policy(rule, 101).mode(timestep, ratio)
    if late is not None and timestep >= 101 - late:
        assert mode == "precision"
    else:
        assert (mode == "aggressive") == (ratio > low + width)
        assert (mode == "precision") == (ratio < low)
    assert mode in policies.MODES


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_uses_all_three_modes_of_every_family(kind) -> None:
    """On sigma itself, 1 at most, a flow model would never be aggressive."""
    sigmas = compute_sigma_schedule(1000, kind)
    middle = middle_ratio(sigmas)
    modes = [SigmaPolicy().mode(t, s / middle) for t, s in enumerate(sigmas)]
    assert modes[0] == "aggressive" and modes[500] == "balanced" and modes[-1] == "precision"
    order = [policies.MODES.index(m) for m in modes]
    assert order == sorted(order)


def test_tables_and_objects_take_the_place_of_the_rule() -> None:
    class Alternating:
        def mode(self, timestep: int, ratio: float) -> str:
            return "balanced" if timestep % 2 else "precision"

    own = Alternating()
    assert as_policy(own, 10) is own
    assert as_policy(["balanced", "precision"], 2).mode(1, 9.0) == "precision"
    assert as_policy("aggressive", 3) == TablePolicy(("aggressive",) * 3)
    assert as_policy("adaptive", 3) == SigmaPolicy()
    for wrong, said in (
        ("fastest", "'adaptive' or one of"),
        (["balanced"], "num_timesteps=2 entries, got 1"),
        (["balanced", "fp16"], "one of .*, got 'fp16'"),
    ):
        with pytest.raises(ValueError, match=said):
            as_policy(wrong, 2)
    with pytest.raises(TypeError, match="a method mode"):
        as_policy(3.0, 2)
    for low, high in ((2.0, 1.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="precision_below must be 0 to aggressive_above"):
            SigmaPolicy(high, low)
    with pytest.raises(ValueError, match=r"entry 1, must be positive and finite, got 0\.0"):
        middle_ratio(np.array([1.0, 0.0]))
