"""One scale for all of V on the device: the bits of the mirror, and attention within its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing.verdict import judge
from tests.quant.test_value_tensor import CONFIGS, TILES, inputs

cupy = pytest.importorskip("cupy")


def on_device(dtype: str) -> tuple[Any, ...]:
    return tuple(map(cupy.asarray, inputs(dtype)))


@pytest.mark.parametrize("quant", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_codes_are_those_of_the_mirror(quant: ca.QuantConfig, dtype: str) -> None:
    if quant.pv == "fp8" and int(cupy.cuda.Device().compute_capability) < 89:
        pytest.skip("8-bit floats need compute capability 8.9")
    got = ca.quantize(*on_device(dtype), quant=quant, tiles=TILES)
    means = {n: None if (x := getattr(got, n)) is None else x.get() for n in ("k_mean", "v_mean")}
    want = quantize_mirror(*inputs(dtype), quant, TILES, **means)
    for name in ("v_codes", "v_scale", "v_zero"):
        here, there = getattr(want, name), getattr(got, name)
        assert (here is None) == (there is None)
        if here is not None:
            np.testing.assert_array_equal(there.get(), here)


@pytest.mark.parametrize("quant", CONFIGS, ids=str)
def test_attention_is_within_its_bounds(quant: ca.QuantConfig) -> None:
    if quant.pv == "fp8" and int(cupy.cuda.Device().compute_capability) < 89:
        pytest.skip("8-bit floats need compute capability 8.9")
    q, k, v = on_device("float16")
    z = ca.quantize(q, k, v, quant=quant)
    o, lse = ca.attention(z, variant="fa_int8", return_lse=True)
    report = judge(o, q, k, v, lse=lse, variant="fa_int8", quantized=z)
    assert report.passed, str(report)
