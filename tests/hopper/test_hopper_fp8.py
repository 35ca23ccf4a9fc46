"""P and V in e4m3 in the Hopper form of fa_int8: two levels of sums, the first in 14 bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import attention, explain
from cupyattn.interpret import tensor_core, warpgroup
from cupyattn.kernels import numerics
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.testing import verdict
from tests.hopper import hopper_pv8_cases as cases
from tests.support.runs import normal

LN2 = math.log(2.0)
FORM: dict[str, Any] = {"variant": "fa_int8", "form": "sm90_fp8"}
CHANNEL = QuantConfig(pv="fp8", granularity_v="channel")


# ---- the mirror ----------------------------------------------------------------------------------


def test_it_rounds_as_the_portable_form_does_with_one_scale_for_a_channel() -> None:
    portable, hopper = (
        numerics.numerics("int8", form, "float16", CHANNEL) for form in ("pv8", "sm90_fp8")
    )
    assert hopper.scales_last and hopper.shifts is None and hopper == portable
    by_tile = numerics.numerics("int8", "pv8", "float16", QuantConfig(pv="fp8"))
    assert by_tile == replace(portable, scales_last=False)
    assert numerics.numerics("int8", "sm90_fp8", "float16") == hopper


def test_the_error_is_a_fortieth_of_the_output() -> None:
    q, k, v = normal((1, 2, 64, 64), (1, 2, 256, 64))
    z = quantize(q, k, v, quant=CHANNEL, backend="mirror")
    o, lse = attention_mirror(z, return_lse=True, **FORM)
    report = verdict.judge(o, q, k, v, lse=lse, quantized=z, **FORM)
    assert report.passed and 0.02 < report.ratio < 1 and report.relative_l2 < 1 / 40


# ---- the kernel, interpreted ---------------------------------------------------------------------


@pytest.mark.parametrize("len_kv", [1, 129, 600])
def test_whole_numbers_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    """Codes of P are 1.75 times powers of two, sums of their products exact: no code flips."""
    z = cases.exact(np.asarray, cases.up_and_down(len_kv=len_kv), "e4m3")
    given: dict[str, Any] = {"scale": LN2, "return_lse": True}
    o, lse = attention(z, arch="sm_90a", backend="interpret", **given)
    expected, expected_lse = attention_mirror(z, **FORM, **given)
    np.testing.assert_allclose(o, expected, 2.0**-18, 2.0**-18)
    assert np.abs(lse - expected_lse).max() <= 2.0**-18


# ---- sums of 14 bits -----------------------------------------------------------------------------


def aligned(x: npt.NDArray[np.float64], exponent: npt.NDArray[np.float64]) -> Any:
    """Return numbers cut to 13 bits below 2^exponent."""
    unit = np.exp2(exponent - 13)
    return np.trunc(x / unit) * unit


def in_14_bits(
    self: warpgroup.Wgmma, a: Any, b: Any, c: Any, scale_d: Any = True, sign: int = 1
) -> Any:
    """A wgmma as tensor cores add 8-bit floats at worst: all addends cut to the largest's bits."""
    products = np.matmul(a, b.swapaxes(1, 2))
    if self.a_type == "e4m3":
        registers = np.where(np.reshape(scale_d, (-1, 1, 1)), c, np.uint32(0))
        warps = registers.reshape(-1, 32, c.shape[-1])
        held = self.accumulator.c.gather(warps.view(np.float32)).astype(np.float64)
        held = held.reshape(products.shape)
        terms = a[:, :, None, :] * b[:, None, :, :]
        largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(held))
        exponent = np.floor(np.log2(np.where(largest > 0, largest, 1.0)))
        total = aligned(held, exponent) + aligned(terms, exponent[..., None]).sum(axis=-1)
        size = np.floor(np.log2(np.where(total != 0, np.abs(total), 1.0)))
        products, c = aligned(total, size), np.zeros_like(c)
        scale_d = False
    counts = np.reshape(np.asarray(scale_d), (-1, 1, 1))
    c = np.where(counts, c, np.uint32(0)).reshape(-1, 32, c.shape[-1])
    result = self.accumulator(sign * products.reshape(-1, 16, self.columns), c)
    return result.reshape(len(products), 128, -1)


def test_sums_of_14_bits_keep_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, the sums have the worst errors that the bound allows."""
    inputs = normal((1, 1, 20, 32), (1, 1, 300, 32))
    q, k, v = inputs[0] * 0, inputs[1], np.abs(inputs[2])  # all addends of one sign
    quant = QuantConfig(pv="fp8", granularity_v="channel", smooth_v=False)
    whole = cases.run(cases.FP8, (q, k, v), backend="interpret", quant=quant)
    monkeypatch.setattr(warpgroup.Wgmma, "__call__", in_14_bits)
    cut = cases.run(cases.FP8, (q, k, v), backend="interpret", quant=quant)
    for one in (whole, cut):
        one.check()
    off = np.abs(cut.o.astype(np.float32) / whole.o.astype(np.float32) - 1)
    assert 2.0**-12 < off.max() <= tensor_core.accumulation_error(192, 1.0, numerics.FP8_ROUNDOFF)


# ---- which calls it takes ------------------------------------------------------------------------


def test_what_it_leaves_to_the_portable_form() -> None:
    given: dict[str, Any] = {"variant": "fa_int8", "arch": "sm_90a"}
    for head_dim, quant, reason in (
        (160, CHANNEL, "for P and V in e4m3 takes head_dim up to 128, got 160"),
        (64, QuantConfig(pv="fp8"), "takes one scale for a channel of V"),
    ):
        q, k, v = normal((1, 1, 70, head_dim), (1, 1, 70, head_dim))
        text = str(explain(q, k, v, quant=quant, **given))
        assert "fa_int8 (pv8)" in text and reason in text
    q, k, v = normal((1, 1, 70, 64), (1, 1, 70, 64))
    text = str(explain(q, k, v, quant=CHANNEL, **given))
    assert "fa_int8 (sm90_fp8)" in text and "attn_fa_int8_fp8<<<" in text
