"""Tiles of the last wave are cut into pieces along the keys: choice of tiles, and results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn import QuantConfig
from cupyattn.kernels import tile_pieces
from cupyattn.kernels import tiles as kernels_tiles
from cupyattn.kernels.numerics import MOST_PIECES
from cupyattn.kernels.tile_pieces import LEAST_SAVED, share_out
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans import passes
from cupyattn.plans.structs import PIECE_PARAMS
from tests.support import runs
from tests.support.marks import slow_unless
from tests.support.runs import Guarded, bits

RUNGS = ("fa_tc@sm90", "fa_int8@sm90", "fa_int8@sm90_pv8")


def slow_but(rung: str, rungs: tuple[str, ...] = RUNGS) -> tuple[Any, ...]:
    """Return the rungs, all but one marked as slow."""
    return tuple(r if r == rung else pytest.param(r, marks=pytest.mark.slow) for r in rungs)


@given(
    st.integers(1, 3000), st.integers(1, 5000), st.integers(1, 300), st.sampled_from([80, 128, 256])
)  # fmt: skip
def test_every_step_of_a_tile_that_is_cut_is_taken_once(
    tiles: int, steps: int, blocks: int, keys: int
) -> None:
    found = share_out(tiles, steps, blocks, keys)
    assert found.whole + found.cut == tiles
    if not found.cut:
        assert not found.slots and not found.buffers(kernels_tiles.Tiles(128, 64, 12), 64)
        return
    assert found.whole % blocks == 0 and found.cut < blocks
    used = -(-found.cut * steps // found.share)  # blocks that have any
    assert used <= blocks and (steps - found.share) * max(1, keys // 128) >= LEAST_SAVED
    # Pieces end where a tile ends or a share does; places for them are told apart by both.
    ends = {*range(0, found.cut * steps, steps), *range(0, found.cut * steps, found.share)}
    places = [end // found.share + end // steps for end in sorted(ends)]
    assert len(set(places)) == len(places) and max(places) < found.slots
    assert max(np.bincount([end // steps for end in ends])) <= MOST_PIECES + 1


@pytest.mark.parametrize(("tiles", "steps"), [(1320, 205), (1376, 17), (8, LEAST_SAVED)])
def test_whole_tiles_where_cutting_saves_nothing(tiles: int, steps: int) -> None:
    assert share_out(tiles, steps, 132).whole == tiles


def test_steps_of_many_keys_save_more() -> None:
    assert share_out(20, 10, 132).cut == 0 and share_out(20, 10, 132, 256).cut == 20


# ---- what comes out ------------------------------------------------------------------------------


@pytest.fixture
def few_blocks() -> Iterator[None]:
    """Four blocks, and cutting pays from the first step on."""
    with pytest.MonkeyPatch.context() as patch, runs.hopper_blocks(4):
        patch.setattr(tile_pieces, "LEAST_SAVED", 1)
        yield


def planned(rung: str, inputs: Any, **options: Any) -> Any:
    asked = dict(**runs.asked_for(rung), arch="sm_90a", backend="interpret", **options)
    return explain.plans(resolved(*inputs, **asked))[-1]


#: rung, batch, heads, heads_kv, len_q, len_kv, head_dim, dtype: tails of rows and of keys; where
#: there is one head, all tiles are cut
CELLS: tuple[tuple[Any, ...], ...] = (
    ("fa_tc@sm90", 1, 1, 1, 70, 700, 64, "bfloat16"),
    ("fa_int8@sm90_pv8", 1, 1, 1, 70, 700, 128, "bfloat16"),
    ("fa_tc@sm90", 1, 3, 1, 200, 500, 40, "float16"),  # whole tiles leave through Q's place
    ("fa_tc@sm90", 3, 1, 1, 130, 400, 136, "float16"),
    ("fa_int8@sm90_pv8", 1, 3, 1, 200, 900, 32, "float16"),
    ("fa_int8@sm90_pv8", 3, 1, 1, 130, 400, 136, "float32"),
    ("fa_int8@sm90", 1, 3, 1, 200, 500, 32, "float16"),
    ("fa_int8@sm90", 1, 1, 1, 70, 700, 64, "bfloat16"),
    ("fa_int8@sm90", 3, 1, 1, 130, 400, 136, "float32"),
)
NOW = CELLS[:2]


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("cell", slow_unless(lambda _, c: c in NOW, CELLS), ids=str)
def test_within_the_bound(cell: tuple[Any, ...]) -> None:
    rung, batch, heads, heads_kv, len_q, len_kv, head_dim, dtype = cell
    inputs = runs.normal(
        (batch, heads, len_q, head_dim), (batch, heads_kv, len_kv, head_dim), dtype
    )
    plan = planned(rung, inputs)
    assert [one.entry for one in plan.launches] == [plan.launches[0].entry, "merge_pieces"]
    runs.run(rung, inputs, arch="sm_90a", backend="interpret").check()


@pytest.mark.usefixtures("few_blocks")
def test_softcap_and_biases_of_keys_in_pieces() -> None:
    """Tiles of a mask or a dense bias differ in work, or share a bias: they are whole."""
    inputs = runs.normal((1, 1, 70, 64), (1, 1, 704, 64))
    bias = np.random.default_rng(0).standard_normal((1, 704)).astype(np.float16)
    options = {"softcap": 3.0, "bias": bias}
    plan = planned("fa_tc@sm90", inputs, **options)
    assert [one.entry for one in plan.launches] == ["attn_fa_tc", "merge_pieces"]
    runs.run("fa_tc@sm90", inputs, arch="sm_90a", backend="interpret", **options).check()
    for whole in ({"bias": bias.repeat(70, axis=0)}, {"mask": bias[0] > 0}):
        assert planned("fa_tc@sm90", inputs, **whole).launches[-1].entry == "attn_fa_tc"


def small() -> Any:
    return runs.normal((1, 3, 200, 32), (1, 1, 500, 32))


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rung", slow_but("fa_tc@sm90"))
def test_every_row_is_written_once_and_nothing_beside_it(rung: str) -> None:
    inputs = small()
    out = Guarded.empty(inputs[0].shape, "float16")
    runs.attend(rung, *inputs, out=out.array, arch="sm_90a", backend="interpret")
    out.check()


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (30, 9)}], ids=["causal", "window"]
)
def test_tiles_that_differ_in_work_are_whole(rung: str, options: dict[str, Any]) -> None:
    assert len(planned(rung, small()).launches) == 2
    assert len(planned(rung, small(), **options).launches) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rung", slow_but("fa_int8@sm90", RUNGS[:2]))
def test_whole_numbers_are_exact_in_pieces(rung: str) -> None:
    """Scores of one size, weights of one size: O is the mean of V, whichever way it is added up."""
    q = np.zeros((1, 3, 200, 32), np.float16)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, 1, 512, 32)).astype(np.float16)
    v = rng.integers(-8, 9, k.shape).astype(np.float16)
    quant = {"quant": QuantConfig(smooth_k=False)} if "int8" in rung else {}
    o, lse = runs.attend(
        rung, q, k, v, return_lse=True, arch="sm_90a", backend="interpret", **quant
    )
    mean = v.astype(np.float64).mean(axis=2, keepdims=True).astype(np.float16)
    assert bits(o) == bits(np.broadcast_to(mean, o.shape))
    assert np.abs(lse - math.log(512)).max() < 1e-5


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rung", RUNGS)
def test_scratch_memory_is_what_the_plan_says(rung: str) -> None:
    plan = planned(rung, small())
    (found,) = (of for one, of in plan.launches[-1].params if one is PIECE_PARAMS)
    made = share_out(6, -(-500 // plan.tiles.block_kv), 4, plan.tiles.block_kv)
    assert (found["whole"], found["cut"], found["share"]) == (made.whole, made.cut, made.share)
    floats = made.slots * plan.tiles.block_q * (32 + 3)
    assert sum(work.nbytes for work in plan.workspace) == 4 * floats


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rung", RUNGS[1:])
def test_pieces_are_merged_alike_wherever_codes_are_made(
    rung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = planned(rung, small())
    monkeypatch.setattr(passes, "_numbers", lambda *_: None)
    beside = planned(rung, small())
    assert (within.features.quantize_q, beside.features.quantize_q) == (True, False)
    assert within.launches[-1].module == beside.launches[-1].module
