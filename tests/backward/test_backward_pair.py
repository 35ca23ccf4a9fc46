"""The Hopper kernel past head_dim 128 whose blocks share keys in pairs, in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyattn import explain_backward
from cupyattn.compiler import devices
from cupyattn.compiler import modules as kc
from cupyattn.interpret import schedule
from cupyattn.plans.records import TensorMap
from cupyattn.problem.checks import Packed
from tests.backward.backward_cases import (
    HOPPER_FORMS,
    interpreted_as,
    received,
    revealing_pair_backward,
    run_backward,
)
from tests.backward.test_backward_hopper import KEYS_BIAS, SERIALISED, hopper_plan
from tests.backward.test_backward_kernels import call_of
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.runs import bits, embedded, normal

#: The forms of calls that take it.
FORMS = ("sm90_atomic", "sm90_deterministic")
IN_ORDER = interpreted_as("sm90_deterministic")
#: The source of the order of pairs.
TURNS = "prims/schedule/gradient_turns.cuh"


@pytest.mark.parametrize("form", FORMS)
def test_two_blocks_share_the_keys_of_a_tile(form: str) -> None:
    plan = hopper_plan(call_of(200, 300, 256), deterministic=HOPPER_FORMS[form])
    assert plan.form == form and plan.tiles.block_kv == 128
    (keys,) = (x for x in plan.launches if x.entry == "backward_keys_pair")
    assert keys.grid == 2 * 3 * 2  # blocks, tiles of keys, key heads
    rows = {x.buffer: x.box[2] for x in keys.params if isinstance(x, TensorMap)}
    assert rows == {"q": 64, "k": 64, "v": 64, "d_out": 64}
    counters = {x.name: x.shape for x in plan.workspace if x.name == "turns"}
    in_order = form == "sm90_deterministic"
    assert counters == ({"turns": (4, 2 * 4)} if in_order else {})  # heads, blocks x tiles of rows


def test_calls_without_a_mask_take_additions_unless_the_same_bits_are_asked_for() -> None:
    plan = hopper_plan(call_of(200, 300, 256), deterministic=None)
    assert plan.form == "sm90_atomic"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"mask": True},
        {"bias": "float16"},
        {"block_mask": (64, 64)},
        {"packed": Packed(900, 900, True)},
    ],
)
def test_what_it_does_not_take(options: dict[str, Any], deterministic: bool) -> None:
    given = {"bias": KEYS_BIAS} if "bias" in options else {}
    call = call_of(200, 300, 256, **options)
    plan = hopper_plan(call, deterministic=deterministic, **given)
    assert plan.form == "sm90_deterministic"
    assert {x.entry for x in plan.launches} >= {"backward_keys_wide", "backward_queries_wide"}


@pytest.mark.parametrize("form", FORMS)
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
    head_dim: int, dtype: str, features: dict[str, Any], form: str
) -> None:
    call = call_of(200, 300, head_dim, **features, dtype=dtype)
    plan = hopper_plan(call, deterministic=HOPPER_FORMS[form])
    (keys,) = (x for x in plan.launches if x.entry == "backward_keys_pair")
    binary = kc.build(keys.module, "sm_90a")
    taken = binary.kernels[keys.entry]
    assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{keys.module}: {taken}"
    assert SERIALISED not in binary.log
    devices.check_shared_memory(binary.smem_bytes, 227 * 1024, keys.entry)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_one_pair(form: str) -> None:
    """Fewer rows than a step has, keys of both blocks."""
    inputs = received(*normal((1, 1, 20, 136), (1, 1, 70, 136)), causal=True)
    run_backward(inputs, **interpreted_as(form), causal=True).check()
    how = {"deterministic": HOPPER_FORMS[form], "arch": "sm_90a"}
    assert explain_backward(*inputs, causal=True, **how).startswith(form)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", range(4))
def test_gradients_are_within_their_bound(number: int, form: str) -> None:
    """Amid NaN: what lies outside of the arrays has no influence."""
    inputs, options = [*revealing_pair_backward()][number]
    amid_nan: Any = (*map(embedded, inputs[:5]), inputs[5])
    run_backward(amid_nan, **interpreted_as(form), **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_of_the_warps_is_a_race(seed: int, form: str) -> None:
    """Over more steps than a ring has stages, with a warp that falls behind."""
    inputs = received(*normal((1, 1, 450, 256), (1, 1, 128, 256)))
    with schedule(seed=seed):
        run_backward(inputs, **interpreted_as(form)).check()


# ---- pairs that add in turn ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "causal"), [(136, False), (136, True), (128, True)])
def test_bits_do_not_depend_on_the_schedule(
    head_dim: int, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head at a time, so that under a causal mask the last head alone reverses its order."""
    put_a_line_in_place(TURNS, "L2_SHARE = 32 << 20", "L2_SHARE = 1", tmp_path, monkeypatch)
    inputs = received(*normal((1, 2, 200, head_dim), (1, 2, 384, head_dim)), causal=causal)
    found = []
    for seed in range(3):
        with schedule(seed=seed):
            run = run_backward(inputs, **IN_ORDER, causal=causal)
        run.check()
        found.append([bits(x) for x in run.gradients])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_rows_without_keys_have_no_gradient() -> None:
    """No pair steps over the first rows, and none stores them."""
    inputs = received(*normal((1, 2, 300, 136), (1, 1, 100, 136)), causal=True)
    run = run_backward(inputs, **IN_ORDER, causal=True)
    run.check()
    assert not run.gradients.dq[:, :, :200].any() and run.gradients.dq[:, :, 200:].any()
