"""The Hopper kernel past head_dim 128 whose blocks share keys in pairs, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from cupyattn import explain_backward
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.interpret import schedule
from cupyattn.plans.records import TensorMap
from cupyattn.problem.checks import Packed
from tests.backward.backward_cases import (
    interpreted_as,
    received,
    revealing_pair_backward,
    run_backward,
)
from tests.backward.test_backward_hopper import KEYS_BIAS, SERIALISED, hopper_plan
from tests.backward.test_backward_kernels import call_of
from tests.support.runs import embedded, normal

#: The option by which calls take it.
ATOMIC = interpreted_as("sm90_atomic")


def test_two_blocks_share_the_keys_of_a_tile() -> None:
    plan = hopper_plan(call_of(200, 300, 256), deterministic=None)
    assert plan.form == "sm90_atomic" and plan.tiles.block_kv == 128
    (keys,) = (x for x in plan.launches if x.entry == "backward_keys_pair")
    assert keys.grid == 2 * 3 * 2  # blocks, tiles of keys, key heads
    rows = {x.buffer: x.box[2] for x in keys.params if isinstance(x, TensorMap)}
    assert rows == {"q": 64, "k": 64, "v": 64, "d_out": 64}


@pytest.mark.parametrize(
    ("options", "deterministic"),
    [
        ({}, True),
        ({"softcap": 2.0}, False),
        ({"mask": True}, False),
        ({"bias": "float16"}, False),
        ({"block_mask": (64, 64)}, False),
        ({"packed": Packed(900, 900, True)}, False),
    ],
)
def test_what_it_does_not_take(options: dict[str, Any], deterministic: bool) -> None:
    given = {"bias": KEYS_BIAS} if "bias" in options else {}
    call = call_of(200, 300, 256, **options)
    assert hopper_plan(call, deterministic=deterministic, **given).form == "sm90_deterministic"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "features"),
    [
        (256, "bfloat16", {"causal": True}),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                (256, "bfloat16", {}),
                (256, "float16", {"window": True, "causal": True}),
                (136, "float16", {}),
                (192, "bfloat16", {"window": True}),
            )
        ),
    ],
)
def test_it_spills_nothing_and_multiplies_in_the_background(
    head_dim: int, dtype: str, features: dict[str, Any]
) -> None:
    plan = hopper_plan(call_of(200, 300, head_dim, **features, dtype=dtype))
    (keys,) = (x for x in plan.launches if x.entry == "backward_keys_pair")
    binary = kc.build(keys.module, "sm_90a")
    taken = binary.kernels[keys.entry]
    assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{keys.module}: {taken}"
    assert SERIALISED not in binary.log
    devices.check_shared_memory(binary.smem_bytes, 227 * 1024, keys.entry)


def test_gradients_of_one_pair() -> None:
    """Fewer rows than a step has, keys of both blocks."""
    inputs = received(*normal((1, 1, 20, 136), (1, 1, 70, 136)), causal=True)
    run_backward(inputs, **ATOMIC, causal=True).check()
    assert explain_backward(*inputs, causal=True, arch="sm_90a").startswith("sm90_atomic")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_gradients_are_within_their_bound(number: int) -> None:
    """Amid NaN: what lies outside of the arrays has no influence."""
    inputs, options = [*revealing_pair_backward()][number]
    amid_nan: Any = (*map(embedded, inputs[:5]), inputs[5])
    run_backward(amid_nan, **ATOMIC, **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_of_the_warps_is_a_race(seed: int) -> None:
    """Over more steps than a ring has stages, with a warp that falls behind."""
    inputs = received(*normal((1, 1, 450, 256), (1, 1, 128, 256)))
    with schedule(seed=seed):
        run_backward(inputs, **ATOMIC).check()
