"""Zero points, and quantising inside the kernel, on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyattn import attention, explain, quantize
from cupyattn.kernels.ladder import lookup
from cupyattn.kernels.limits import GROUP_ALL
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, QuantizedQKV
from cupyattn.quant.config import GRANULARITIES
from cupyattn.quant.quantizers import in_padded_rows
from cupyattn.reference.quantize import quantize_mirror
from tests.hopper.test_hopper_zero_points import pair
from tests.quant.quant_inputs import DTYPES, operand
from tests.quant.test_zero_points import CODED, pairs
from tests.support import runs
from tests.support.runs import bits, host_copy, normal

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


def on_device(z: QuantizedQKV) -> QuantizedQKV:
    """Return the same in device memory, rows of codes padded."""
    arrays = {n: cupy.asarray(a) for n in vars(z) if hasattr(a := getattr(z, n), "dtype")}
    rows = {n: in_padded_rows(arrays[n]) for n in ("q_codes", "k_codes")}
    return replace(z, **arrays | rows)


@pytest.mark.parametrize("pv", ["16bit", "int8"])
def test_codes_moved_by_their_zero_points_change_no_bit(pv) -> None:
    for operands in pairs(pv, (150, 333)):
        plain, shifted = map(on_device, operands)
        given = {"return_lse": True, "causal": True, "arch": "sm_90"}
        for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
            assert bits(a) == bits(b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "group_q", "group_kv"),
    [(64, GROUP_ALL, GROUP_ALL), (72, 1, 16), (128, 2, GROUP_ALL), (256, GROUP_ALL, 16)],
)
def test_codes_moved_by_their_zero_points_change_no_bit_in_the_hopper_form(
    head_dim, group_q, group_kv, causal
) -> None:
    """With many steps, tiles that are cut and tiles that are not: sums arrive before they are used,
    and stay until they were.
    """
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("the Hopper form needs compute capability 9.0")
    for lengths in ((150, 333), (1500, 5000), (7000, 1111)):
        plain, shifted = map(on_device, pair(head_dim, group_q, group_kv, lengths))
        given = {"return_lse": True, "causal": causal}
        assert "fa_int8 (sm90)" in str(explain(shifted, **given))
        for a, b in zip(attention(plain, **given), attention(shifted, **given), strict=True):
            assert bits(a) == bits(b)


@pytest.mark.parametrize("pv", ["16bit", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_bound_holds(head_dim, pv) -> None:
    q, k, v = normal((2, 4, 300, head_dim), (2, 2, 500, head_dim))
    q, k, v = (a + np.float16(1) for a in (q, k, v))
    inputs = tuple(map(cupy.asarray, (q, k, v)))
    rung = "fa_int8" if pv == "16bit" else "fa_int8@pv8"
    runs.run(rung, inputs, quant=QuantConfig(symmetric=False, pv=pv), causal=True).check()


@pytest.mark.parametrize("granularity", ["tensor", "head", "block", "thread"])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (90, 20)}], ids=str)
def test_the_bound_holds_in_the_hopper_form(granularity, options) -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("the Hopper form needs compute capability 9.0")
    q, k, v = normal((1, 6, 700, 128), (1, 2, 1111, 128))
    inputs = tuple(cupy.asarray(a + np.float16(1)) for a in (q, k, v))
    one = runs.run(
        "fa_int8", inputs, quant=QuantConfig(granularity, granularity, symmetric=False), **options
    )
    assert one.form == "sm90"
    one.check()


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
