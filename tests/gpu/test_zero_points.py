"""Zero points, and quantising inside the kernel, on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyattn import attention, quantize, testing
from cupyattn.quant import QuantConfig
from cupyattn.quant.config import GRANULARITIES
from cupyattn.quant.operands import quantize_mirror
from cupyattn.registry import lookup
from cupyattn.tiles import Tiles
from tests.quant_inputs import DTYPES, operand
from tests.runs import bits, host_copy, normal, on_host
from tests.test_zero_points import CODED, pairs

cupy = pytest.importorskip("cupy")

TILES = Tiles(64, 32, 4, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40, 7])
def test_codes_scales_and_zero_points_equal_the_mirrors(head_dim, granularity, dtype) -> None:
    """J1. The mean is a sum in another order: the mirror takes the kernel's."""
    q = operand(1, dtype, (2, 4, 133, head_dim))
    k, v = (np.abs(operand(i, dtype, (2, 2, 301, head_dim), "channel bias")) for i in (2, 3))
    for pv in ("16bit", "int8"):
        quant = QuantConfig(granularity, granularity, symmetric=False, pv=pv)
        got = host_copy(quantize(*map(cupy.asarray, (q, k, v)), quant=quant, tiles=TILES))
        want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
        for name in CODED:
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None and b is None) or bits(a) == bits(b), name


@pytest.mark.parametrize("pv", ["16bit", "int8"])
def test_codes_moved_by_their_zero_points_change_no_bit(pv) -> None:
    for operands in pairs(pv, (150, 333)):
        plain, shifted = (
            replace(
                z, **{n: cupy.asarray(a) for n in vars(z) if hasattr(a := getattr(z, n), "dtype")}
            )
            for z in operands
        )
        # Zero points have the portable form; operands without them could have the Hopper form.
        given = {"return_lse": True, "causal": True, "arch": "sm_90"}
        for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
            assert bits(a) == bits(b)


@pytest.mark.parametrize("pv", ["16bit", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_bound_holds(head_dim, pv) -> None:
    q, k, v = normal((2, 4, 300, head_dim), (2, 2, 500, head_dim))
    q, k, v = (a + np.float16(1) for a in (q, k, v))
    z = quantize(*map(cupy.asarray, (q, k, v)), quant=QuantConfig(symmetric=False, pv=pv))
    o, lse = attention(z, return_lse=True, causal=True)
    testing.assert_within_bound(
        on_host(o), q, k, v, variant="fa_int8", lse=on_host(lse), quantized=host_copy(z),
        causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 40])
def test_quantising_within_the_kernel_gives_the_bits_of_two_steps(
    head_dim, dtype, symmetric
) -> None:
    inputs = [cupy.asarray(a) for a in normal((2, 4, 300, head_dim), (2, 2, 500, head_dim), dtype)]
    tiles = lookup("fa_int8").default_tiles(head_dim, "fused")
    for granularity in ("block", "thread", "token"):
        quant = QuantConfig(granularity, granularity, smooth_k=False, symmetric=symmetric)
        given = {"variant": "fa_int8", "causal": True, "return_lse": True}
        before = attention(*inputs, quant=quant, tiles=replace(tiles, num_stages=2), **given)
        within = attention(*inputs, quant=replace(quant, fused=True), tiles=tiles, **given)
        assert list(map(bits, within)) == list(map(bits, before))
