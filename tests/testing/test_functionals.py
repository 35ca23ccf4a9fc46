"""Sums over the channels of a row hold on right outputs, and show faults that no element shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.reference import attention_exact
from cupyattn.strategies import REGIMES, make_regime
from cupyattn.testing import judge

FORMS = (
    ("fa", "float32", "sm_90"),
    ("fa_tc", "float16", "sm_90"),
    ("fa_tc", "bfloat16", "sm_90a"),
    ("fa_int8", "float16", "sm_90"),
    ("fa_int8", "bfloat16", "sm_90a"),
)
KINDS = {
    "exact attention (a scale of O)",
    "the softmax scale",
    "the sum of channels",
    "the scale of a group of keys",
    "the weight of one key",
}


@pytest.mark.parametrize(("variant", "dtype", "arch"), FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_right_outputs_are_within(regime: str, variant: str, dtype: str, arch: str) -> None:
    for seed in range(3):
        q, k, v = make_regime(regime, (1, 4, 33, 32), (1, 2, 97, 32), dtype, seed)
        options: dict[str, Any] = {"variant": variant, "arch": arch, "causal": seed == 1}
        codes = ca.quantize(q, k, v, arch=arch) if variant == "fa_int8" else None
        given = (q, k, v) if codes is None else (codes,)
        o = ca.attention(*given, **options)
        report = judge(
            o, q, k, v, variant=variant, causal=seed == 1, quantized=codes, sums=True,
            **ca.kernel_form(*given, **options),
        )  # fmt: skip
        assert report.passed, str(report)
        assert {one.name for one in report.sums} == KINDS and "along" not in str(report)


def faulty(kind: str, size: float, q: Any, k: Any, v: Any) -> np.ndarray:
    """Return exact attention with a fault, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if kind == "exact attention (a scale of O)":
        return attention_exact(q, k, v) * (1 + size)
    if kind == "the softmax scale":
        return attention_exact(q, k, v, scale=(1 + size) * q.shape[-1] ** -0.5)
    if kind == "the scale of a group of keys":
        k[:, :, 64:128] *= 1 + size
        return attention_exact(q, k, v)
    scores = np.zeros((*q.shape[:3], k.shape[2]), np.float32)
    best = int((q[0, 1, 3] @ k[0, 1].T).argmax())
    scores[0, 1, 3, best] = np.log1p(-size)
    return attention_exact(q, k, v, bias=scores)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("exact attention (a scale of O)", 0.0125),
        ("the softmax scale", 0.003),
        ("the scale of a group of keys", 0.01),
        ("the weight of one key", 0.06),
    ],
)
def test_a_fault_is_seen_that_every_element_hides(kind: str, size: float) -> None:
    q, k, v = ca.distributions.make("normal", 1, 2, 24, 1024, 128, "bfloat16", 1)
    o = ca.attention(q, k, v, variant="fa_tc").astype(np.float64)
    wrong = o + faulty(kind, size, q, k, v) - attention_exact(q, k, v)
    form = ca.kernel_form(q, k, v, variant="fa_tc")
    stored = wrong.astype(np.float32).astype(v.dtype)
    assert judge(stored, q, k, v, variant="fa_tc", **form).passed
    report = judge(stored, q, k, v, variant="fa_tc", sums=True, **form)
    seen = {one.name: one for one in report.sums}
    assert report.ratio <= 1 < seen[kind].ratio and not report.passed
    assert f"along {kind}: errors of a row sum to" in str(report)
    if kind == "the weight of one key":
        best = int((q[0, 1, 3].astype(np.float64) @ k[0, 1].astype(np.float64).T).argmax())
        assert seen[kind].index == (0, 1, 3, best)


def test_codes_of_p_have_no_sums() -> None:
    q, k, v = make_regime("normal", (1, 2, 8, 32), (1, 2, 64, 32), "float16", 0)
    z = ca.quantize(q, k, v, quant=ca.QuantConfig(pv="int8"))
    o = ca.attention(z, variant="fa_int8")
    assert judge(o, q, k, v, variant="fa_int8", quantized=z, sums=True).sums == ()


def test_what_nothing_is_promised_for_has_no_sums() -> None:
    q, k, v = make_regime("normal", (1, 1, 8, 32), (1, 1, 64, 32), "float16", 0)
    v[0, 0, 5, 3] = np.inf
    with np.errstate(invalid="ignore"):
        o = ca.attention(q, k, v, variant="fa_tc")
        report = judge(o, q, k, v, variant="fa_tc", sums=True)
    assert report.passed and all(one.ratio == 0 for one in report.sums)
