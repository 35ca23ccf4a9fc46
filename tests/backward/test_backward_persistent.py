"""Thread blocks of the Hopper form of the backward pass that take many blocks of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupyattn.kernels.limits import HOPPER_BLOCKS
from tests.backward.backward_cases import persistent_backward, persistent_backward_of_few_rows
from tests.backward.test_backward_hopper import hopper_plan
from tests.backward.test_backward_kernels import call_of


@pytest.mark.parametrize(
    ("features", "len_q", "heads_kv", "blocks"),
    [
        ({}, 4096, 4, HOPPER_BLOCKS), ({}, 4097, 4, 33 * 4 * 5),
        ({"causal": True}, 8192, 4, HOPPER_BLOCKS), ({"causal": True}, 8192, 2, 64 * 2 * 5),
        ({"softcap": 2.0}, 1024, 4, 8 * 4 * 5),
    ],
)  # fmt: skip
def test_blocks_of_keys_with_few_rows_share_persistent_thread_blocks(
    features: dict[str, Any], len_q: int, heads_kv: int, blocks: int
) -> None:
    call = replace(call_of(len_q, len_q, 64, **features), heads_kv=heads_kv, batch=5)
    plan = hopper_plan(call)
    (keys,) = (x for x in plan.launches if x.entry == "backward_keys")
    assert keys.grid == blocks
    counter = {"next_block"} if blocks == HOPPER_BLOCKS else set()
    assert {"next_block", "turns"} & {x.name for x in plan.workspace} == counter


def test_gradients_of_persistent_blocks_are_within_their_bound() -> None:
    persistent_backward().check()


def test_the_next_keys_wait_until_all_lanes_know_which_keys_come_now() -> None:
    persistent_backward_of_few_rows().check()


def test_zero_heads_have_no_gradients_to_compute() -> None:
    none = replace(call_of(5, 5, 64), heads=0, heads_kv=0)
    assert hopper_plan(none, deterministic=None).launches == ()
