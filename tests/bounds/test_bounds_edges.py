"""The bounds hold at the edge of float16 and of float64, and are not loose there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupyattn import distributions
from cupyattn.bounds import kernel, quantised, scores
from cupyattn.bounds.perturbation import ratio_to_bound
from cupyattn.kernels.numerics import numerics
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from cupyattn.testing.verdict import Report
from cupyattn.testing.verdict import judge as judge_output

Array = npt.NDArray[Any]

#: (pv, p_type, granularity_v, form): every form of fa_int8 with P and V in 8 bits.
EIGHT_BIT_FORMS = (
    ("int8", "u8", "block", "pv8"),
    ("int8", "s8", "channel", "pv8"),
    ("int8", "u8", "channel", "pv8_whole"),
    ("int8", "u8", "channel", "sm90_pv8"),
    ("int8", "u8", "block", "sm90_pv8_by_tile"),
    ("fp8", "e4m3", "block", "pv8"),
    ("fp8", "e4m3", "channel", "sm90_fp8"),
)


def judge_large_values(
    form: tuple[str, str, str, str], v: Array, scale: float, *, smooth: bool
) -> tuple[Array, Report, Callable[[Array], Report]]:
    pv, p_type, granularity, name = form
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 32, 32)).astype(np.float16)
    quant = QuantConfig(pv=pv, p_type=p_type, granularity_v=granularity, smooth_v=smooth)
    z = quantize(q, k, v, quant=quant, **({"arch": "sm_90a"} if name.startswith("sm90") else {}))
    o = attention_mirror(z, variant="fa_int8", form=name, scale=scale)
    options: Any = {
        "variant": "fa_int8", "quantized": z, "form": name, "scale": scale,
    }  # fmt: skip
    return o, judge_output(o, q, k, v, **options), lambda x: judge_output(x, q, k, v, **options)


@pytest.mark.parametrize("form", EIGHT_BIT_FORMS, ids=lambda form: f"{form[3]} {form[1]}")
@pytest.mark.parametrize("smooth", [True, False])
def test_values_at_the_edge_of_float16_are_stored_with_their_mean(form: Any, smooth: bool) -> None:
    rng = np.random.default_rng(1)
    signs = np.sign(rng.standard_normal((1, 1, 32, 32)))
    for v in (65504 * signs, np.where(signs > 0, 65504.0, 30000.0), np.full(signs.shape, -65504.0)):
        for scale in (0.2, 1.0, 3.0, 30.0):
            _, report, _ = judge_large_values(form, v.astype(np.float16), scale, smooth=smooth)
            assert report.ratio <= 1, str(report)
            assert report.quantisation is not None and report.quantisation <= 1, str(report)


def test_a_store_is_charged_for_the_sum_with_the_mean_and_for_nothing_else() -> None:
    """Without the mean some results lie past 65504, with it none: 5 % of the output is a fault."""
    v = np.full((1, 1, 32, 32), 60000.0)
    v[:, :, :4] = -60000.0
    o, report, judge_again = judge_large_values(
        ("int8", "u8", "block", "pv8"), v.astype(np.float16), 30.0, smooth=True
    )
    assert report.ratio <= 1, str(report)
    spoilt = o.copy()
    spoilt[0, 0, 3] -= np.float16(3000)
    assert judge_again(spoilt).ratio > 1


@pytest.mark.parametrize("pv", ["16bit", "int8", "fp8"])
def test_keys_about_700_below_the_maximum_are_charged(pv: str) -> None:
    """Key 0 has the whole weight and the value 0: the output is what the keys far below leave."""
    for below in (690.0, 699.0, 701.0, 705.0, 720.0, 740.0, 1e4):
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 1, 1, 16, 16)).astype(np.float16)
        k[:, :, 0], v[:, :, 0] = 0, 0  # code 0: its score is exact
        bias = np.full((1, 1, 16, 16), -below, np.float32)
        bias[..., 0] = 0
        given: Any = {} if pv == "16bit" else {"pv": pv, "smooth_v": False}
        z = quantize(q, k, v, quant=QuantConfig("token", "token", smooth_k=False, **given))
        codes, exact = (
            attention_exact(*x, bias=bias) for x in (kernel.kernel_operands(z), (q, k, v))
        )
        bound = quantised.quantisation(q, k, v, z, bias=bias).total
        assert ratio_to_bound(codes, exact, bound).max() <= 1, below
        assert bound.max() < 1e-290, below


def test_the_scale_of_no_rows_is_no_least_scale() -> None:
    """Packed sequences without rows have scale 0 from a device: nothing divides by it."""
    q, k, v = distributions.make("normal", 1, 2, 8, 8, 16, "float16", seed=0)
    z = quantize(q, k, v, quant=QuantConfig(granularity_q="head"))
    empty = replace(z, q_codes=z.q_codes[:, :, :0], q_scale=0 * z.q_scale)
    n = numerics("int8", "portable", "float16")
    assert np.isfinite(scores.scaling_errors(n, 0.3, empty).common)
