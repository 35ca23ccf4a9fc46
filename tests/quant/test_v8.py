"""fa_int8 with V as INT8 codes and P in 16 bits, in its portable form.

Whole calls (`tests.support.runs.RUNGS`) and the tests of every form run it, too.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from cupyattn import attention, attention_varlen, distributions, explain
from cupyattn.kernels.numerics import numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.quant import QuantConfig, QuantizedQKV, quantize
from cupyattn.quant.config import GRANULARITIES
from cupyattn.reference.attention import attention_mirror
from cupyattn.reference.exact import attention_exact
from cupyattn.strategies import attention_inputs
from cupyattn.testing.verdict import judge
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.runs import check_each_alone, normal, packed

SOURCE = "forms/attn_fa_int8_v8.cu"
V8 = QuantConfig(pv="int8", p_type="16bit")
TILES = Tiles(32, 32, 2, 2)


def test_v_takes_half_the_bytes_and_p_keeps_its_bits() -> None:
    assert (V8.granularity_v, V8.smooth_v, V8.form) == ("channel", True, "v8")
    q, k, v = normal((1, 1, 128, 64), (1, 1, 128, 64))
    z, whole = quantize(q, k, v, quant=V8), quantize(q, k, v)
    assert z.v is None and z.v_codes.nbytes * 2 == whole.v.nbytes
    n = numerics("int8", z.form, "float16", z.config)
    assert (n.p_type, n.v_type, n.values) == ("float16", "int8", "tensor_core")
    assert "forms/attn_fa_int8_v8.cu" in str(explain(q, k, v, variant="fa_int8", quant=V8))


@given(data=st.data())
def test_the_mirror_is_within_its_bound(data: st.DataObject) -> None:
    """J2 of every feature, granularity, zero points and means; J3 of the codes of V."""
    inputs = attention_inputs(
        dtypes=("float16", "bfloat16", "float32"), tiles=Tiles(32, 32, 2), max_head_dim=128,
        max_scores=2**11, features=("window", "softcap", "mask", "bias"),
    )  # fmt: skip
    q, k, v, options = data.draw(inputs)
    quant = QuantConfig(
        *(data.draw(st.sampled_from(GRANULARITIES)) for _ in "qk"),
        symmetric=data.draw(st.booleans()), smooth_v=data.draw(st.booleans()),
        smooth_k=data.draw(st.booleans()) and not options.get("softcap"),
        pv="int8", p_type="16bit",
    )  # fmt: skip
    z = quantize(q, k, v, quant=quant, tiles=TILES)
    given = {"variant": "fa_int8", "tiles": TILES, **options}
    o, lse = attention_mirror(z, return_lse=True, **given)
    report = judge(o, q, k, v, lse=lse, quantized=z, **given)
    target(report.ratio, label="error / bound")
    assert report.passed, str(report)


@pytest.mark.parametrize("distribution", distributions.NAMES)
def test_the_mirror_is_within_its_bound_on_distributions(distribution: str) -> None:
    q, k, v = distributions.make(distribution, 1, 2, 40, 256, 64, "float16", seed=3, heads_kv=1)
    z = quantize(q, k, v, quant=V8)
    o, lse = attention_mirror(z, variant="fa_int8", return_lse=True)
    report = judge(o, q, k, v, lse=lse, variant="fa_int8", quantized=z)
    assert report.passed, str(report)


@pytest.mark.parametrize("size", [2.0**-20, 2.0**-6, 2.0**9])
def test_values_of_any_size_have_one_relative_error(size: float) -> None:
    """Codes are whole numbers: no product is below the least normal float16, however small V is."""
    q, k, v = normal((1, 1, 16, 64), (1, 1, 64, 64), "float32", 2)
    report = []
    for factor in (1.0, size):
        z = quantize(q, k, (v * factor).astype(np.float32), quant=V8)
        o = attention_mirror(z, variant="fa_int8")
        report.append(judge(o, q, k, v * factor, variant="fa_int8", quantized=z))
        exact = attention_exact(*z.dequantize("float64"))
        assert np.abs(o - exact).max() <= 2.0**-9 * np.abs(v * factor).max()
    assert all(one.passed for one in report)
    assert report[1].ratio == pytest.approx(report[0].ratio, rel=0.05)


def test_p_in_16_bits_errs_less_than_codes_of_p() -> None:
    """Beside exact attention of the codes, which are the same."""
    q, k, v = normal((1, 1, 64, 64), (1, 1, 1024, 64), "float32", seed=1)
    errors = []
    for quant in (V8, QuantConfig(pv="int8", granularity_v="channel")):
        z = quantize(q, k, v, quant=quant)
        o = attention(z, variant="fa_int8")
        errors.append(np.linalg.norm(o - attention_exact(*z.dequantize("float64"))))
    assert errors[0] < 0.1 * errors[1]


def test_equal_scores_give_the_mean_of_the_codes_to_the_bit() -> None:
    """Weights of 1, 64 keys: sums of codes, the mean and the scale are exact."""
    codes = np.random.default_rng(0).integers(-127, 128, (1, 1, 64, 64)).astype(np.int8)
    nothing = np.zeros((1, 1, 3, 64), np.int8)
    z = QuantizedQKV.from_codes(
        nothing, codes, codes, 1.0, 1.0, v_scale=0.5, p_type="16bit", out_dtype="float32",
        v_mean=np.full((1, 1, 64), 4, np.float32),
    )  # fmt: skip
    expected = codes[0, 0].astype(np.float64).mean(axis=0) * 0.5 + 4
    for backend in ("mirror", "interpret"):
        o = attention(z, variant="fa_int8", backend=backend)
        assert (o == expected.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("mirror", "float16"),
        pytest.param("interpret", "float16", marks=pytest.mark.slow),
        pytest.param("interpret", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_are_taken_as_each_alone(backend: str, dtype: str) -> None:
    """Empty ones, one of two lots of 128 codes; a row without keys is 0."""
    inputs, ends = packed(((5, 38), (0, 9), (3, 0), (2, 130)), 1, 1, 16, dtype)
    given: dict[str, Any] = {"variant": "fa_int8", "quant": V8, "tiles": TILES, "causal": True}
    given |= {"backend": backend, "return_lse": True}
    found = attention_varlen(*inputs, *ends, **given)
    check_each_alone(found, inputs, ends, functools.partial(attention, **given))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("has_scale ? V_scale[col] : 0.0f", "has_scale ? V_scale[0] : 0.0f"),
        ("P_frag[2 * k + i % 2][r]", "P_frag[2 * k][r]"),
        ("has_mean ? V_mean[col] : 0.0f", "0.0f"),
    ],
)
def test_a_wrong_line_breaks_the_bound(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = normal((1, 1, 16, 64), (1, 1, 40, 64), seed=5)
    v += np.float16(2) * np.arange(64, dtype=np.float16)
    z = quantize(q, k, v, quant=V8)
    given: dict[str, Any] = {"variant": "fa_int8"}
    o = attention(z, backend="interpret", **given)
    assert judge(o, q, k, v, quantized=z, **given).passed
    put_a_line_in_place(SOURCE, line, instead, tmp_path, monkeypatch)
    o = attention(z, backend="interpret", **given)
    assert not judge(o, q, k, v, quantized=z, **given).passed


def test_codes_with_zero_points_or_groups_of_keys_are_refused() -> None:
    codes = np.ones((1, 1, 64, 16), np.int8)
    given: dict[str, Any] = {"v_scale": 1.0, "p_type": "16bit"}
    with pytest.raises(ValueError, match="INT8 codes of V and of P, got p_type='16bit'"):
        QuantizedQKV.from_codes(codes, codes, codes, 1.0, 1.0, v_zero=3, **given)
    given["v_scale"] = np.ones((1, 1, 2, 16), np.float32)
    with pytest.raises(ValueError, match="'tensor' or 'channel' with pv='int8' and p_type='16bit'"):
        QuantizedQKV.from_codes(codes, codes, codes, 1.0, 1.0, group_v=32, **given)
    given["v_scale"] = 1.0
    z = QuantizedQKV.from_codes(codes, codes, codes, 1.0, 1.0, 2, 3, **given)
    assert z.v_zero is None and z.q_zero is not None
