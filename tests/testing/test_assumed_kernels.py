"""Without form and tiles the judge tries the kernels that may have run, and says which it took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.bounds.bound import widest
from cupyattn.reference import attention_mirror
from cupyattn.testing import judge

#: Codes whose right outputs in the Hopper form leave the bound of the portable one.
QUANT = ca.QuantConfig("token", "block", pv="int8", granularity_v="channel")


def made(seed: int, arch: str | None = "sm_90a") -> tuple[tuple[np.ndarray, ...], Any, Any]:
    """Wide inputs, their codes for an architecture, and attention as it runs there."""
    rng = np.random.default_rng(seed)
    q = 4 * rng.standard_normal((1, 1, 32, 64))
    k, v = 4 * rng.standard_normal((2, 1, 1, 384, 64))
    inputs = tuple(x.astype(np.float16) for x in (q, k, v))
    z = ca.quantize(*inputs, quant=QUANT, arch=arch)
    return inputs, z, ca.attention(z, arch=arch)


def scaled(o: np.ndarray, factor: float) -> np.ndarray:
    return (o.astype(np.float64) * factor).astype(o.dtype)


def test_outputs_of_the_hopper_form_are_no_false_alarm() -> None:
    left = 0
    for seed in range(4):
        inputs, z, o = made(seed)
        portable = ca.bounds.attention(*inputs, variant="fa_int8", form="pv8", quantized=z)
        exact = ca.reference.attention_exact(*z.dequantize("float64"))
        left += bool((np.abs(o.astype(np.float64) - exact) > portable.total).any())
        report = judge(o, *inputs, variant="fa_int8", quantized=z)
        assert report.passed and "form sm90_pv8 on tiles" in report.held_to, str(report)
        assert "assumed" in report.held_to and report.held_to in str(report)
        assert not judge(scaled(o, 1.0005), *inputs, variant="fa_int8", quantized=z).passed
    assert left, "no output leaves the bound of the portable form: draw others"


@pytest.mark.parametrize("head_dim", [40, 64])
def test_codes_in_padded_rows_have_their_hopper_form(head_dim: int) -> None:
    """Rows of 40 codes lie 48 bytes apart, on a device and as NumPy quantises them."""
    quant = ca.QuantConfig(pv="fp8", granularity_v="channel", p_type="e4m3")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 32, head_dim), np.float32)
    z = ca.quantize(q, k, v, quant=quant, arch="sm_90a")
    o = ca.attention(z, arch="sm_90a")
    assert judge(o, q, k, v, variant="fa_int8", quantized=z).passed
    report = judge(2 * o, q, k, v, variant="fa_int8", quantized=z)  # which names all that it tried
    assert "form sm90_fp8 on tiles" in report.held_to, str(report)


@pytest.mark.parametrize("keys", [64, 65])
def test_a_bias_of_any_row_length_has_its_hopper_form(keys: int) -> None:
    """Rows of 65 numbers are padded on a device, where the Hopper form then runs."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 1, 3, 16)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 1, keys, 16)).astype(np.float16)
    bias = rng.standard_normal((3, keys)).astype(np.float16)
    report = judge(2 * v[:, :, :3], q, k, v, variant="fa_tc", bias=bias)
    assert "form sm90 on tiles" in report.held_to, str(report)
    bounds = [
        ca.bounds.attention(q, k, v, variant="fa_tc", bias=bias, form=form).total
        for form in (None, "portable", "sm90")
    ]
    assert (bounds[0] == np.maximum(bounds[1], bounds[2])).all()


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_scales_that_are_nan_do_not_pass(name: str) -> None:
    """Finite rows have finite scales, so outputs that are NaN are nothing to agree with."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 40, 32)).astype(np.float16)
    z = ca.quantize(q, k, v)
    getattr(z, name)[0, 0, 0] = np.nan
    report = judge(ca.attention(z), q, k, v, variant="fa_int8", quantized=z)
    assert not report.passed and report.quantisation == np.inf
    q[0, 0, 3, 3] = np.nan  # whose scale is NaN, and that of rows beside it
    z = ca.quantize(q, k, v)
    assert judge(ca.attention(z), q, k, v, variant="fa_int8", quantized=z).passed


def test_what_no_tiles_explain_is_outside() -> None:
    """Also where O holds and lse, or signed values, do not."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 40, 32)).astype(np.float16)
    o, lse = ca.attention(q, k, v, variant="fa", return_lse=True)
    report = judge(o, q, k, v, lse=lse + 1, variant="fa")
    assert not report.passed and not report.undecided and "lse is OUTSIDE" in str(report)
    report = judge(o, q, k, v, variant="fa", signed=lambda values: o * np.float16(1.02))
    assert not report.passed and not report.undecided
    assert "signed values: O is OUTSIDE" in str(report)


def test_a_bound_without_a_form_is_the_widest_of_the_forms() -> None:
    inputs, z, _ = made(0)
    given: dict[str, Any] = {"variant": "fa_int8", "quantized": z}
    of_forms = [
        ca.bounds.attention(*inputs, **given, **ca.kernel_form(z, arch=arch)).total
        for arch in (None, "sm_90a")
    ]
    found = ca.bounds.attention(*inputs, **given).total
    np.testing.assert_array_equal(found, np.maximum(*of_forms))
    assert (found > of_forms[0]).any() and (found > of_forms[1]).any()


def test_the_sharp_bound_is_the_default() -> None:
    """Two per cent, which the bound of any tiles lets pass, are not passed."""
    inputs, z, o = made(0, None)
    given: dict[str, Any] = {"variant": "fa_int8", "quantized": z}
    assert judge(o, *inputs, **given).passed
    for factor in (1.0005, 1.02):
        report = judge(scaled(o, factor), *inputs, **given)
        assert not report.passed and report.ratio > 1
    report = judge(scaled(o, 1.0005), *inputs, **given)
    assert report.undecided and "UNDECIDED" in str(report)
    assert "within what any tiles give" in str(report) and "name form and tiles" in str(report)
    named = ca.kernel_form(z)
    report = judge(scaled(o, 1.0005), *inputs, **given, **named)
    assert not report.passed and not report.undecided and "OUTSIDE" in str(report)


def test_outside_of_every_form_is_outside() -> None:
    inputs, z, o = made(0)
    report = judge(2 * o, *inputs, variant="fa_int8", quantized=z)
    assert not report.passed and not report.undecided and "OUTSIDE" in str(report)
    assert "the widest bound of form" in report.held_to
    of_forms = [
        ca.bounds.attention(
            *inputs, variant="fa_int8", quantized=z, **ca.kernel_form(z, arch=arch)
        ).total[report.index]
        for arch in (None, "sm_90a")
    ]
    assert report.bound == max(of_forms) > min(of_forms)


def test_rungs_without_codes_try_their_forms_too() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 64, 32)).astype(np.float16)
    for form in ("portable", "sm90"):
        o = attention_mirror(q, k, v, variant="fa_tc", form=form)
        report = judge(o, q, k, v, variant="fa_tc")
        assert report.passed and not report.undecided
    assert not judge(scaled(o, 1.05), q, k, v, variant="fa_tc").passed


def test_a_form_that_is_named_is_the_only_one_tried() -> None:
    inputs, z, o = made(1)
    report = judge(o, *inputs, variant="fa_int8", quantized=z, form="pv8")
    assert not report.passed and "form pv8" in report.held_to
    assert judge(o, *inputs, variant="fa_int8", quantized=z, form="sm90_pv8").passed


def test_the_widest_bound_and_its_summary() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float16)
    one, other = (ca.bounds.attention(x, x, x, variant=name) for name in ("fa", "fa_tc"))
    wide = widest([one, other])
    np.testing.assert_array_equal(wide.total, np.maximum(one.total, other.total))
    np.testing.assert_array_equal(wide.lse, np.maximum(one.lse, other.lse))
    assert repr(one).startswith("Bound(1 x 2 x 8 rows, O: median ") and len(repr(one)) < 150
    x[0, 0, 0, 0] = np.inf
    assert "unbounded" in repr(ca.bounds.attention(x, x, x, variant="fa"))


@pytest.mark.parametrize("variant", ["fa", "fa_tc", "auto"])
def test_a_report_says_what_it_assumed(variant: str) -> None:
    x = np.ones((1, 1, 8, 16), np.float16)
    o = ca.attention(x, x, x, variant=variant)
    assert judge(o, x, x, x, variant=variant).held_to.endswith(", assumed")
    named = ca.kernel_form(x, x, x, variant=variant)
    report = judge(o, x, x, x, variant="fa_tc" if variant == "auto" else variant, **named)
    assert report.held_to.endswith(", as given")
