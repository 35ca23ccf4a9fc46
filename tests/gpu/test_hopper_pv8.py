"""P and V in 8 bits in the Hopper forms, on a device: `tests.hopper.hopper_pv8_cases` and more
calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupyattn import attention
from cupyattn.quant import QuantConfig
from cupyattn.reference.attention import attention_mirror
from tests.hopper import hopper_pv8_cases as cases
from tests.quant import pv8_cases
from tests.support.runs import Guarded, asked_for, bits, host_copy, normal, on_host

cupy = pytest.importorskip("cupy")

LN2 = math.log(2.0)
#: Without a mean of V, which would leave nothing of equal values.
FLOATS = QuantConfig(pv="fp8", granularity_v="channel", smooth_v=False)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("needs compute capability 9.0")


def on_device(inputs: Any) -> Any:
    return tuple(cupy.asarray(x) for x in inputs)


@pytest.mark.parametrize("rung", cases.RUNGS)
@pytest.mark.parametrize("case", range(4))
def test_problems(case: int, rung: str) -> None:
    inputs, options = list(cases.problems(rung))[case]
    cases.run(rung, on_device(inputs), **options).check()


@pytest.mark.parametrize("len_kv", [1, 193, 600])
def test_whole_numbers_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    z = cases.exact(cupy.asarray, cases.up_and_down(len_kv=len_kv))
    o = attention(z, arch="sm_90a", scale=LN2)
    expected = attention_mirror(host_copy(z), variant="fa_int8", form="sm90_pv8", scale=LN2)
    assert bits(o) == bits(expected)


@pytest.mark.parametrize("len_kv", [1, 129, 600])
def test_whole_numbers_by_tile_come_out_as_the_mirror_has_them(len_kv: int) -> None:
    """Sums of a tile are exact; exponentials that bring tiles together are the device's own.

    O and l meet a few of these, each within 2^-22 of itself; values go up to 8 * 127.
    """
    z = cases.exact_by_tile(cupy.asarray, len_kv)
    given: dict[str, Any] = {"scale": LN2, "return_lse": True}
    o, lse = map(on_host, attention(z, arch="sm_90a", **given))
    form = {"variant": "fa_int8", "form": "sm90_pv8_by_tile"}
    expected, expected_lse = attention_mirror(host_copy(z), **form, **given)
    np.testing.assert_allclose(o, expected, 0, 2.0**-19 * 8 * 127)
    assert np.abs(lse - expected_lse).max() <= 2.0**-18


@pytest.mark.parametrize(("check", "p_type"), pv8_cases.HOPPER_CHECKS)
def test_exactly(check: Any, p_type: str) -> None:
    check("cuda", p_type, cupy.asarray, pv8_cases.HOPPER)


@pytest.mark.parametrize("block_kv", [64, 128])
def test_m_falls_by_steps_that_are_taken(block_kv: int) -> None:
    z, mask = cases.with_gaps(cupy.asarray, block_kv)
    given: dict[str, Any] = {"scale": LN2, "block_mask": mask}
    o = attention(z, arch="sm_90a", **given)
    expected = attention_mirror(host_copy(z), variant="fa_int8", form="sm90_pv8", **given)
    assert bits(o) == bits(expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rung", "head_dim"),
    [
        (rung, head_dim)
        for rung in cases.RUNGS
        for head_dim in (16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
        if head_dim <= cases.largest_head_dim(rung)
    ],
)
def test_head_sizes_and_lengths(rung: str, head_dim: int, causal: bool) -> None:
    for seed, (len_q, len_kv) in enumerate(((1, 1), (63, 64), (65, 191), (193, 193), (300, 1000))):
        inputs = normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim), seed=seed)
        cases.run(rung, on_device(inputs), causal=causal).check()


def test_long_sequences_keep_to_their_range() -> None:
    """131,072 keys, random and all equal: the guard of O acts on the latter."""
    q, k, v = on_device(normal((1, 1, 128, 64), (1, 1, 131072, 64)))
    cases.run(cases.PV8, (q, k, v)).check()
    cases.run(cases.PV8, (q * 0, k, v + 2)).check()


def test_sums_of_8_bit_floats_err_by_tile_and_not_by_length() -> None:
    """All weights are one and all values: a sum that went on in 14 bits would stand still."""
    q, k, v = on_device(normal((1, 1, 128, 64), (1, 1, 131072, 64)))
    one = cases.run(cases.FP8, (q * 0, k, v * 0 + 1), quant=FLOATS)
    one.check()
    assert abs(on_host(one.o).astype(np.float32) - 1).max() <= 2.0**-8
    cases.run(cases.FP8, (q, k, v)).check()


@pytest.mark.parametrize("rung", cases.RUNGS)
def test_a_thousand_calls_give_one_result(rung: str) -> None:
    q, k, v = on_device(normal((60, 2, 300, 64), (60, 2, 300, 64)))
    given: dict[str, Any] = {**asked_for(rung), "causal": True}
    first = attention(q, k, v, **given)
    same = sum(bool((attention(q, k, v, **given) == first).all()) for _ in range(1000))
    assert same == 1000 and bool(cupy.isfinite(first).all())


@pytest.mark.parametrize("rung", cases.RUNGS)
def test_every_element_is_written_and_nothing_beside_it(rung: str) -> None:
    q, k, v = on_device(normal((2, 3, 301, 80), (2, 1, 301, 80)))
    out = Guarded.empty(q.shape, "float16", xp=cupy)
    o = attention(q, k, v, out=out.array, **asked_for(rung))
    out.check()
    assert np.isfinite(on_host(o).astype(np.float32)).all()
