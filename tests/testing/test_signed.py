"""Signed values: the random bound holds on right outputs, and shows faults that the other hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.bounds import signed as bounds_signed
from cupyattn.problem.attention import kernel_call
from cupyattn.problem.settings import Settings
from cupyattn.strategies import REGIMES, make_regime
from cupyattn.testing import judge
from cupyattn.testing.signed import draw_signs

Wrong = Callable[[np.ndarray], np.ndarray]


class Form(NamedTuple):
    """A form whose P has 16 bits: rung, storage type, architecture, whether Q and K are codes."""

    variant: str
    dtype: str
    arch: str
    codes: bool = False


FORMS = (
    Form("fa", "float32", "sm_90"),
    Form("fa_tc", "float16", "sm_90"),
    Form("fa_tc", "bfloat16", "sm_90"),
    Form("fa_tc", "float16", "sm_90a"),
    Form("fa_int8", "float16", "sm_90", codes=True),
    Form("fa_int8", "bfloat16", "sm_90a", codes=True),
)


def judged(
    form: Form,
    arrays: tuple[Any, Any, Any],
    *,
    before: Wrong = lambda v: v,
    after: Wrong = lambda o: o,
    seed: int = 0,
    draws: int = 1,
    causal: bool = False,
) -> Any:
    """Judge a rung of the mirror whose values change before a signed call, or whose O after it."""
    q, k, v = arrays
    options: dict[str, Any] = {"variant": form.variant, "arch": form.arch, "causal": causal}
    codes = ca.quantize(q, k, v, arch=form.arch) if form.codes else None

    def run(values: Any) -> Any:
        if codes is None:
            return after(ca.attention(q, k, before(values), **options))
        return after(ca.attention(replace(values, v=before(values.v)), **options))

    given = (q, k, v) if codes is None else (codes,)
    return judge(
        after(ca.attention(*given, **options)), q, k, v, variant=form.variant, causal=causal,
        quantized=codes, signed=run, draws=draws, seed=seed, **ca.kernel_form(*given, **options),
    )  # fmt: skip


def scaled(factor: float) -> Wrong:
    return lambda o: (o.astype(np.float64) * factor).astype(np.float32).astype(o.dtype)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.variant}-{form.dtype}-{form.arch}")
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow)], ids=str)
def test_right_outputs_are_within(seeds: tuple[int, ...], regime: str, form: Form) -> None:
    for seed in seeds:
        arrays = make_regime(regime, (1, 2, 33, 32), (1, 1, 97, 32), form.dtype, seed)
        report = judged(form, arrays, seed=seed, draws=2, causal=seed % 2 == 1)
        assert report.passed, str(report)
        assert report.signed is not None and report.signed.ratio <= 1


@pytest.mark.parametrize("form", FORMS[1:2] + FORMS[4:5], ids=lambda form: form.variant)
def test_a_scale_of_1_002_is_seen_where_the_certain_bound_is_too_wide(form: Form) -> None:
    arrays = ca.distributions.make("normal", 1, 1, 64, 1024, 32, form.dtype, 3)
    report = judged(form, arrays, after=scaled(1.002), draws=4)
    assert report.ratio <= 1 < report.signed.ratio, str(report)
    right = judged(form, arrays, draws=4)
    assert right.passed, str(right)


def test_a_wrong_sign_is_seen() -> None:
    arrays = make_regime("normal", (1, 2, 64, 32), (1, 2, 128, 32), "float16", 1)

    def flipped(v: np.ndarray) -> np.ndarray:
        other = v.copy()
        other[:, :, 5] *= -1
        return other

    report = judged(FORMS[1], arrays, before=flipped)
    assert report.ratio <= 1 < report.signed.ratio and not report.passed
    assert "signed values: O is OUTSIDE its bound" in str(report)


def test_values_that_are_rounded_again_are_seen() -> None:
    arrays = make_regime("normal", (1, 2, 64, 32), (1, 2, 128, 32), "float16", 1)

    def requantised(v: np.ndarray) -> np.ndarray:
        step = np.abs(v).max(axis=(2, 3), keepdims=True).astype(np.float32) / 127
        return (np.rint(v / step) * step).astype(v.dtype)

    report = judged(FORMS[1], arrays, before=requantised)
    assert report.ratio <= 1 < report.signed.ratio


@pytest.mark.parametrize("form", FORMS[1:4], ids=lambda form: f"{form.dtype}-{form.arch}")
@pytest.mark.parametrize("regime", ["normal", "large logits", "equal keys", "subnormal"])
def test_weights_err_by_no_more_than_c(regime: str, form: Form) -> None:
    """With the unit matrix for V the output is P: each element shows the error of one weight."""
    q, k, _ = make_regime(regime, (1, 1, 64, 64), (1, 1, 64, 64), form.dtype, 7)
    v = np.eye(64)[None, None].astype(q.dtype)
    options = {"variant": form.variant, "arch": form.arch}
    found = ca.kernel_form(q, k, v, **options)
    settings = Settings(form.variant, tiles=found["tiles"])
    rest = dict.fromkeys(("mask", "bias", "block_mask", "rope", "qk_norm"))
    received = kernel_call(settings, {"q": q, "k": k, "v": v, **rest}, form=found["form"])
    (Q, K, V), shared = bounds_signed.taken_by(received)
    blocks = bounds_signed.blocks_of(Q, K, V, shared.sigma, received.scores, np.arange(64))
    c = np.concatenate([bounds_signed.weight_errors(b, shared).c[0, 0, 0] for b in blocks])
    certain = ca.bounds.attention(q, k, v, **{"variant": form.variant, **found})
    error = np.abs(
        ca.attention(q, k, v, **options).astype(np.float64)
        - ca.reference.attention_exact(q, k, v)
    )  # fmt: skip
    rest_of_it = certain.terms["R6"] + certain.terms["R7"]
    assert (error[0, 0] <= c + rest_of_it[0, 0] + 1e-30).all()
    if regime == "normal":
        assert (error[0, 0] > rest_of_it[0, 0]).any(), "errors of P are seen"


def test_the_random_bound_is_never_wider_and_narrows_with_the_keys() -> None:
    shares = []
    for keys in (64, 2048):
        q, k, v = make_regime("normal", (1, 1, 16, 32), (1, 1, keys, 32), "float16", 0)
        rest = dict.fromkeys(("mask", "bias", "block_mask", "rope", "qk_norm"))
        received = kernel_call(
            Settings("fa_tc"), {"q": q, "k": k, "v": v, **rest}, form="portable"
        )  # fmt: skip
        bound = bounds_signed.signed_bound(received, rows=np.arange(16), elements=16 * 32)
        certain = ca.bounds.attention(q, k, v, variant="fa_tc", form="portable")
        of_p = sum(certain.terms[tag] for tag in ("R2", "R3", "R4", "R5"))
        assert (bound.total <= certain.total * (1 + 1e-12)).all()
        shares.append(float((bound.terms["P"] / of_p).mean()))
    assert shares[1] < 0.5 and shares[1] < shares[0] <= 1


def test_signs_are_of_keys_and_kv_heads() -> None:
    v = np.zeros((2, 3, 400, 8), np.float16)
    signs = draw_signs(v, np.random.default_rng(0))
    assert signs.shape == (2, 3, 400, 1) and signs.dtype == v.dtype
    assert set(np.unique(signs)) == {-1, 1} and abs(float(signs.mean(dtype=np.float64))) < 0.1
    assert not (signs[0, 0] == signs[0, 1]).all()


def test_codes_of_p_and_other_shapes_are_refused() -> None:
    q, k, v = make_regime("normal", (1, 1, 8, 32), (1, 1, 32, 32), "float16", 0)
    z = ca.quantize(q, k, v, quant=ca.QuantConfig(pv="int8"))
    o = ca.attention(z, variant="fa_int8")
    with pytest.raises(ValueError, match="signed needs values in 16 bits"):
        judge(o, q, k, v, variant="fa_int8", quantized=z, signed=lambda other: o)
    o = ca.attention(q, k, v, variant="fa_tc")
    with pytest.raises(ValueError, match=r"signed must return O of shape \(1, 1, 8, 32\)"):
        judge(o, q, k, v, variant="fa_tc", signed=lambda other: o[:, :, :4])


@pytest.mark.parametrize("draws", [0, -1, 1.5, "2", None])
def test_no_draw_at_all_is_refused(draws: Any) -> None:
    """Nothing would be judged, and every output be within."""
    q, k, v = make_regime("normal", (1, 1, 8, 32), (1, 1, 32, 32), "float16", 0)
    o = ca.attention(q, k, v, variant="fa_tc")
    with pytest.raises(ValueError, match="draws must be an integer of at least 1, got"):
        judge(o, q, k, v, variant="fa_tc", signed=lambda other: 0 * o, draws=draws)


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_signed_gets_the_callers_kind_of_array(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32).to(getattr(torch, dtype)) for n in (8, 64, 64))
    values = []

    def run(signed: Any) -> Any:
        values.append(signed)
        return ca.attention(q, k, signed, variant="fa_tc")

    report = judge(run(v), q, k, v, variant="fa_tc", signed=run)
    assert report.signed is not None and report.passed
    _, signed = values
    assert isinstance(signed, torch.Tensor) and signed.dtype == v.dtype
    assert torch.equal(signed.abs(), v.abs()) and not torch.equal(signed, v)


@pytest.mark.frameworks
def test_signed_may_return_what_has_dlpack() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = make_regime("normal", (1, 1, 8, 32), (1, 1, 32, 32), "float16", 0)
    o = ca.attention(q, k, v, variant="fa_tc")

    def run(values: Any) -> Any:
        return torch.from_numpy(ca.attention(q, k, values, variant="fa_tc"))

    report = judge(o, q, k, v, variant="fa_tc", signed=run)
    assert report.signed is not None and report.passed
    assert not judge(o, q, k, v, variant="fa_tc", signed=lambda other: 2 * run(other)).passed
    with pytest.raises(TypeError, match="what signed returns must be a NumPy or CuPy array"):
        judge(o, q, k, v, variant="fa_tc", signed=lambda other: None)
