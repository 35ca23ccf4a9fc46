"""Operands, and one timestep of each mode, which the tests of `Int8Attention` share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import cupyattn as ca
from cupyattn.distributions import make
from cupyattn.quant import QuantConfig
from tests.support.runs import bits

HEADS, HEAD_DIM, STEPS = 4, 16, 50
#: One timestep of each mode, by the rule.
STEP_OF = {"aggressive": 0, "balanced": 25, "precision": 49}
#: The same arithmetic, as arguments of `attention`.
SAME: dict[str, dict[str, Any]] = {
    "aggressive": {"variant": "fa_int8", "quant": QuantConfig(pv="int8", granularity_v="channel")},
    "balanced": {"variant": "fa_int8"},
    "precision": {},
}

#: Operands of a call: lengths, key heads, type, seed.
operands = st.builds(
    lambda len_q, len_kv, heads_kv, dtype, seed: make(
        "channel-bias", 2, HEADS, len_q, len_kv, HEAD_DIM, dtype, seed, heads_kv
    ),
    st.integers(1, 90),
    st.integers(1, 150),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["float16", "bfloat16"]),
    st.integers(0, 2**16),
)


def layer(**changed: Any) -> ca.Int8Attention:
    return ca.Int8Attention(HEADS, HEAD_DIM, STEPS, **changed)


def example(len_q: int = 70, len_kv: int = 130, seed: int = 0, **changed: Any) -> Any:
    return make("channel-bias", 1, HEADS, len_q, len_kv, HEAD_DIM, seed=seed, **changed)


def assert_same(a: Any, b: Any) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)
