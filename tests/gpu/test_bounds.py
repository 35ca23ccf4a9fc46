"""Reference, bounds and judge give the same numbers on the device as on NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupyattn import attention, distributions, kernel_form
from cupyattn.bounds import kernel
from cupyattn.quant import quantize
from cupyattn.reference.attention import attention_mirror
from cupyattn.testing.verdict import judge


@pytest.mark.parametrize("variant", ["unfused", "fa", "fa_tc", "fa_int8"])
def test_bounds_and_judge_on_the_device(variant: str) -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = distributions.make("sink", 2, 4, 33, 70, 24, "float16", seed=0, heads_kv=2)
    on_device = [cupy.asarray(x) for x in (q, k, v)]
    quantized = quantized_there = None
    operands = (q, k, v)
    if variant == "fa_int8":
        quantized = quantize(q, k, v)
        names = ("q_codes", "k_codes", "v", "q_scale", "k_scale", "k_mean")
        moved = {name: cupy.asarray(getattr(quantized, name)) for name in names}
        quantized_there = dataclasses.replace(quantized, **moved)
        operands = (quantized,)
    o, lse = attention_mirror(*operands, variant=variant, causal=True, return_lse=True)
    options = {"variant": variant, "causal": True}
    ran = kernel_form(*operands, **options)  # the judge assumes another kernel on a device
    here = kernel.attention(q, k, v, quantized=quantized, **options)
    there = kernel.attention(*on_device, quantized=quantized_there, **options)
    for tag in kernel.TERMS:
        np.testing.assert_allclose(there.terms[tag].get(), here.terms[tag], rtol=1e-6, atol=1e-18)
    np.testing.assert_allclose(there.lse.get(), here.lse, rtol=1e-6)
    report = judge(o, q, k, v, lse=lse, quantized=quantized, **options, **ran)
    report_there = judge(
        cupy.asarray(o), *on_device, lse=cupy.asarray(lse), quantized=quantized_there, **options,
        **ran,
    )  # fmt: skip
    assert report_there.index == report.index and report_there.passed
    assert report_there.ratio == pytest.approx(report.ratio, rel=1e-4)


@pytest.mark.parametrize("variant", ["unfused", "fa_tc"])
def test_the_judge_of_padded_entries_keeps_their_dtype(variant: str) -> None:
    """CuPy's where makes float32 of bfloat16, whose bound is far too narrow for a bfloat16 O."""
    cupy = pytest.importorskip("cupy")
    q, k, v = distributions.make("normal", 2, 2, 33, 70, 24, "bfloat16", seed=0)
    sent = [cupy.asarray(x) for x in (q, k, v)]
    lengths = {"lengths_q": cupy.asarray([20, 33]), "lengths_kv": cupy.asarray([70, 9])}
    bias = cupy.asarray(distributions.make("normal", 1, 1, 33, 70, 70, "bfloat16", seed=1)[0])
    options = {"variant": variant, "causal": True, "bias": bias, **lengths}
    o, lse = attention(*sent, return_lse=True, **options)
    assert judge(o, *sent, lse=lse, **options).passed
    assert not judge(o * 1.05, *sent, lse=lse, **options).passed
