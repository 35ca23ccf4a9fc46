"""Hopper forms in few blocks: each takes several tiles, and tiles are cut, as on a busy device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from cupyattn.plans import assemble, attention_int8
from cupyattn.plans import attention as plans_attention


@contextmanager
def hopper_blocks(count: int) -> Iterator[None]:
    """Let Hopper forms of attention run in so many blocks, and plan again before and after."""
    planners = plans_attention.plan_attention, attention_int8.plan_int8
    try:
        with mock.patch.object(assemble, "HOPPER_BLOCKS", count):
            for planner in planners:
                planner.cache_clear()
            yield
    finally:
        for planner in planners:
            planner.cache_clear()
