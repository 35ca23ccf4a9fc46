"""8-bit P and V on the device: J1, and the fixtures of `tests.quant.pv8_cases`.

Tests of whole calls on the device run this form as ``"fa_int8@pv8"``.
"""

from __future__ import annotations

from typing import Any

import pytest

from cupyattn import attention
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing.verdict import assert_within_bound
from tests.quant import pv8_cases
from tests.quant.quant_inputs import DTYPES, assert_mean, operand
from tests.support.runs import bits, normal

cupy = pytest.importorskip("cupy")


def needs(p_type: str) -> None:
    if p_type == "e4m3" and int(cupy.cuda.Device().compute_capability) < 89:
        pytest.skip("8-bit floats need compute capability 8.9")


@pytest.mark.parametrize(("check", "p_type"), pv8_cases.CHECKS)
def test_exactly(check: Any, p_type: str) -> None:
    needs(p_type)
    check("cuda", p_type, cupy.asarray)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 7, 255])
@pytest.mark.parametrize("p_type", ["u8", "e4m3"])
def test_codes_and_scales_equal_the_mirrors(
    p_type: str, head_dim: int, granularity: str, dtype: Any
) -> None:
    needs(p_type)
    quant = QuantConfig(pv=pv8_cases.pv_of(p_type), granularity_v=granularity)
    for block, regime in ((32, "normal"), (64, "channel bias"), (128, "far outlier channel")):
        tiles = Tiles(64, block, 4, 2)
        q = operand(1, dtype, (2, 2, 9, head_dim), regime)
        k, v = (operand(i, dtype, (2, 2, 1001, head_dim), regime) for i in (2, 3))
        got = quantize(*map(cupy.asarray, (q, k, v)), quant=quant, tiles=tiles)
        k_mean, v_mean = got.k_mean.get(), got.v_mean.get()
        want = quantize_mirror(q, k, v, quant, tiles, k_mean=k_mean, v_mean=v_mean)
        for name in ("v_codes", "v_scale"):
            assert bits(getattr(got, name)) == bits(getattr(want, name)), name
        assert_mean(v_mean, v)


@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("p_type", ["s8", "e4m3"])
def test_other_codes_are_within_their_bound(p_type: str, granularity: str) -> None:
    """Unsigned codes, the default, go through the tests of whole calls."""
    needs(p_type)
    quant = QuantConfig(pv=pv8_cases.pv_of(p_type), p_type=p_type, granularity_v=granularity)
    for dtype, head_dim in (("float16", 64), ("bfloat16", 128), ("float32", 40)):
        inputs = normal((2, 4, 150, head_dim), (2, 2, 333, head_dim), dtype)
        q, k, v = map(cupy.asarray, inputs)
        z = quantize(q, k, v + 1, quant=quant)
        o, lse = attention(z, return_lse=True, causal=True)
        assert_within_bound(o, q, k, v + 1, variant="fa_int8", lse=lse, quantized=z, causal=True)
