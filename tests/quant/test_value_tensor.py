"""One scale for all of V: the quantiser to the bit, the bounds, packed and padded entries."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cupyattn import attention, attention_varlen
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, quantize
from cupyattn.reference.quantize import quantize_mirror
from cupyattn.testing.verdict import judge
from tests.quant.test_quantize_interpret import assert_equal, assert_means
from tests.support.marks import slow_unless
from tests.support.runs import bits, check_each_alone, normal, packed

TILES = Tiles(64, 64, 4, 2)
#: Configurations of each kind of codes of V.
CONFIGS = (
    QuantConfig(pv="int8", granularity_v="tensor"),
    QuantConfig("tensor", "tensor", "tensor", pv="int8", symmetric=False),
    QuantConfig("tensor", "head", "tensor", pv="fp8", smooth_v=False),
    QuantConfig("token", "token", "tensor", pv="int8", p_type="16bit", smooth_k=False),
)


def inputs(dtype: str = "float16") -> tuple[Any, Any, Any]:
    q, k, v = normal((2, 2, 37, 20), (2, 2, 150, 20), dtype, seed=3)
    return q, k, v * np.asarray([1, 3], dtype)[None, :, None, None]


@pytest.mark.parametrize("quant", slow_unless(lambda i, _: i == 1, CONFIGS), ids=str)
def test_the_kernels_give_the_bits_of_the_mirror(quant: QuantConfig) -> None:
    q, k, v = inputs()
    got = quantize(q, k, v, quant=quant, tiles=TILES, backend="interpret")
    assert_means(got, k, v)
    want = quantize_mirror(q, k, v, quant, TILES, k_mean=got.k_mean, v_mean=got.v_mean)
    assert_equal(got, want)
    centred = v if got.v_mean is None else v - got.v_mean[:, :, None]
    assert got.v_scale.shape == (2, 2, 1, 20) and np.unique(got.v_scale).size == 1
    if quant.symmetric:
        largest = 448 if quant.pv == "fp8" else 127
        assert got.v_scale.max() == np.abs(centred.astype(np.float32)).max() / np.float32(largest)


@pytest.mark.parametrize("quant", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_is_within_its_bounds(quant: QuantConfig, dtype: str) -> None:
    q, k, v = inputs(dtype)
    z = quantize(q, k, v, quant=quant)
    o, lse = attention(z, variant="fa_int8", return_lse=True)
    report = judge(o, q, k, v, lse=lse, variant="fa_int8", quantized=z)
    assert report.passed, str(report)


def test_one_scale_errs_more_than_one_for_each_channel() -> None:
    q, k, v = inputs()
    of_channels, of_all = (
        quantize(q, k, v, quant=QuantConfig(pv="int8", granularity_v=granularity)).dequantize()[2]
        for granularity in ("channel", "tensor")
    )
    assert np.linalg.norm(of_all - v) > 1.2 * np.linalg.norm(of_channels - v)


@pytest.mark.parametrize(
    "backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)]
)
def test_each_packed_sequence_has_a_scale_of_its_own(backend: str) -> None:
    arrays, ends = packed(((5, 38), (0, 9), (3, 0), (4, 40)), 2, 2, 16)
    arrays[2][38:47] *= 8
    given: dict[str, Any] = {
        "variant": "fa_int8", "quant": CONFIGS[0], "backend": backend, "return_lse": True
    }  # fmt: skip
    found = attention_varlen(*arrays, *ends, **given)
    check_each_alone(found, arrays, ends, functools.partial(attention, **given))


@pytest.mark.parametrize(
    "backend", ["mirror", pytest.param("interpret", marks=pytest.mark.slow)]
)
def test_each_padded_entry_has_a_scale_of_its_own(backend: str) -> None:
    """Values past the end of an entry do not count."""
    q, k, v = inputs()
    v[0, :, 70:] = 1e3
    lengths = np.array([70, 150])
    given: dict[str, Any] = {"variant": "fa_int8", "quant": CONFIGS[0], "backend": backend}
    o = attention(q, k, v, lengths_kv=lengths, **given)
    for entry, length in enumerate(lengths):
        one = [x[entry : entry + 1] for x in (q, k, v)]
        alone = attention(one[0], *(x[:, :, :length] for x in one[1:]), **given)
        assert bits(o[entry : entry + 1]) == bits(alone)


def test_a_value_that_is_not_finite_spoils_all() -> None:
    q, k, v = inputs()
    v[1, 1, 3, 4] = np.inf
    for backend in ("mirror", "interpret"):
        z = quantize(q, k, v, quant=CONFIGS[0], tiles=TILES, backend=backend)
        assert np.isnan(z.v_scale).all()
