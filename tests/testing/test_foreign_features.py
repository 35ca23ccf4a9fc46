"""Kernels of other libraries with a softcap, sinks, or Q that is scaled before the product."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn import distributions
from cupyattn.strategies import attention_inputs
from cupyattn.testing import assert_within_bound, judge, numerics
from tests.support.plain_attention import attend

#: Words of the kernel, and the sentence about them.
WORDS = (
    {}, {"p": "fp16"}, {"scores": "bf16"}, {"scores": "fp16", "p": "fp16"},
    {"scaled_q": "bf16"}, {"scaled_q": "fp16", "p": "fp16"}, {"scaled_q": "fp32"},
)  # fmt: skip


@settings(max_examples=60)
@given(
    attention_inputs(max_head_dim=40, max_scores=2**9, features=["softcap", "sinks"]),
    st.sampled_from(WORDS),
    st.sampled_from([2.0**-11, -(2.0**-11)]),
)
def test_kernels_keep_the_bound_of_what_they_round(
    case: tuple[Any, Any, Any, dict[str, Any]], words: dict[str, str], tanh_error: float
) -> None:
    q, k, v, options = case
    said = numerics(**{"p": "fp32"} | words)
    with np.errstate(all="ignore"):
        o, lse = attend(q, k, v, **options, **words, tanh_error=tanh_error)
    assert_within_bound(o, q, k, v, lse=lse, numerics=said, **options)


def ordinary(dtype: str = "float32", seed: int = 3) -> tuple[Any, Any, Any]:
    return distributions.make("normal", 1, 4, 8, 128, 40, dtype, seed=seed, heads_kv=2)


SINKS = np.array([0.0, 4.0, 8.0, -4.0], np.float32)
#: Options of a call, the replacement, and the words that are too narrow.
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the softcap is forgotten": ({"softcap": 1.0}, {"softcap": 0.0}),
    "the softcap is another": ({"softcap": 2.0}, {"softcap": 1.99}),
    "the tanh is coarser": ({"softcap": 1.0}, {"tanh_error": 2.0**-7}),
    "the sinks are forgotten": ({"sinks": SINKS}, {"sinks": None}),
    "a sink is the next head's": ({"sinks": SINKS}, {"sinks": np.roll(SINKS, 1)}),
    "the scale is rounded": ({}, {"scale": float(ml_dtypes.bfloat16(40**-0.5))}),
    "Q is scaled in 16 bits": ({}, {"scaled_q": "bf16"}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "instead"), FAULTS.values(), ids=list(FAULTS))
def test_faults_are_found(options: dict[str, Any], instead: dict[str, Any]) -> None:
    q, k, v = ordinary()
    said = {"numerics": numerics("fp32"), **options}
    assert judge(attend(q, k, v, **options)[0], q, k, v, **said).passed
    assert judge(attend(q, k, v, **options | instead)[0], q, k, v, **said).ratio > 1


def test_lse_without_the_sinks_is_found() -> None:
    q, k, v = ordinary()
    o, lse = attend(q, k, v, sinks=SINKS)
    said = {"numerics": numerics("fp32"), "sinks": SINKS}
    assert judge(o, q, k, v, lse=lse, **said).passed
    assert judge(o, q, k, v, lse=attend(q, k, v)[1], **said).lse_ratio > 1  # type: ignore[operator]


@pytest.mark.parametrize("words", [{"scaled_q": "bf16"}, {"tanh": 2.0**-9}], ids=str)
def test_each_word_widens_the_bound(words: dict[str, Any]) -> None:
    q, k, v = ordinary()
    o, _ = attend(q, k, v, softcap=1.0)
    narrow, wide = (
        judge(o, q, k, v, softcap=1.0, numerics=numerics("fp32", **said)).bound
        for said in ({}, words)
    )
    assert wide > narrow


def test_padded_rows_have_no_sink() -> None:
    q, k, v = distributions.make("normal", 2, 4, 8, 16, 8, "float32", seed=1)
    lengths_q, lengths_kv = np.array([8, 5]), np.array([16, 9])
    mask = np.arange(16) < lengths_kv[:, None, None, None]
    o, lse = attend(q, k, v, sinks=SINKS, mask=mask)
    o[1, :, 5:], lse[1, :, 5:] = 0, -np.inf
    options = {"sinks": SINKS, "lengths_q": lengths_q, "lengths_kv": lengths_kv}
    options["numerics"] = numerics("fp32")
    assert judge(o, q, k, v, lse=lse, **options).passed
    lse[1, :, 5:] = SINKS[:, None]
    assert not judge(o, q, k, v, lse=lse, **options).passed


def test_packed_sequences_share_their_sinks() -> None:
    q, k, v = (x[0].swapaxes(0, 1) for x in distributions.make("normal", 1, 4, 12, 12, 8, seed=1))
    ends = np.array([0, 5, 12])
    o = np.zeros_like(q)
    for rows in (slice(0, 5), slice(5, 12)):
        one = (x[rows].swapaxes(0, 1)[None] for x in (q, k, v))
        o[rows] = attend(*one, sinks=SINKS, causal=True)[0][0].swapaxes(0, 1)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True, "sinks": SINKS}
    assert judge(o, q, k, v, numerics=numerics("fp32"), **packed).passed
    assert not judge(o, q, k, v, numerics=numerics("fp32"), **packed | {"sinks": -SINKS}).passed


def test_codes_do_not_hold_the_sink() -> None:
    q, k, v = ordinary("float16")
    large = np.full(4, 500.0, np.float32)  # as a key it would spoil every code of its head
    said = {"numerics": numerics("fp16 P", qk="int8"), "sinks": np.zeros(4, np.float32)}
    bound = judge(attend(q, k, v, sinks=said["sinks"])[0], q, k, v, **said).bound
    plain = judge(attend(q, k, v)[0], q, k, v, numerics=said["numerics"]).bound
    assert bound < 1.1 * plain
    assert judge(0 * q, q, k, v, **said | {"sinks": large}).passed  # all weight is the sink's


def test_what_has_no_sinks_is_refused() -> None:
    q, k, v = ordinary()
    with pytest.raises(ValueError, match="sinks belong to kernels of other libraries"):
        judge(q, q, k, v, variant="fa", sinks=SINKS)
    with pytest.raises(ValueError, match=r"sinks must be one number for each query head.*\(4,\)"):
        judge(q, q, k, v, numerics=numerics("fp32"), sinks=SINKS[:2])
    with pytest.raises(ValueError, match="sinks must be .* in float64"):
        judge(q, q, k, v, numerics=numerics("fp32"), sinks=SINKS.astype(np.float64))
    norm = (np.ones(40, np.float32), np.ones(40, np.float32))
    with pytest.raises(ValueError, match="qk_norm cannot be judged together with sinks"):
        judge(q, q, k, v, numerics=numerics("fp32"), sinks=SINKS, qk_norm=norm)


def test_a_scaled_q_past_the_range_of_its_type_has_no_bound() -> None:
    q, k, v = ordinary()
    said = {"scale": 4096.0, "numerics": numerics("fp32", scaled_q="fp16")}
    report = judge(0 * q, q * 16, k, v, **said)
    assert report.unbounded == report.rows * 4
