"""Limits on the draws of `attention_inputs`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cupyattn.strategies import attention_inputs

LIMITED = attention_inputs(
    head_dims=(24, 64, 128), max_head_dim=64, grouped=False, square=True, multiple=8, empty=False,
    features=["sinks"], max_scores=2**10,
)  # fmt: skip


@settings(max_examples=30)
@given(LIMITED)
def test_limits_are_kept(case: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    q, k, v, options = case
    assert q.shape == k.shape == v.shape
    assert q.shape[3] in (24, 64) and q.shape[2] % 8 == 0 and q.shape[2] > 0
    if "sinks" in options:
        assert options["sinks"].shape == (q.shape[1],) and options["sinks"].dtype == np.float32


def test_no_head_dim_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dims must have a size up to max_head_dim=32"):
        attention_inputs(head_dims=(64,), max_head_dim=32)
