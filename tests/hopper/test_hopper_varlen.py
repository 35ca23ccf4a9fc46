"""Packed sequences in the Hopper forms of fa_tc and fa_int8, in the interpreter.

The copy engine brings rows of the next sequence along with the last of this one: they must change
nothing, and nothing may be written to theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, QuantConfig, Tiles, attention, attention_varlen
from cupyattn.compiler.modules import KERNELS
from cupyattn.interpret import KernelFault
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans import records
from cupyattn.plans.records import Plan
from cupyattn.plans.stages import stages
from cupyattn.problem.row_preparation import Rope
from cupyattn.quant.quantizers import VALUES_PAD
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.marks import slow
from tests.support.runs import (
    Arrays,
    Guarded,
    asked_for,
    bits,
    check_each_alone,
    hopper_blocks,
    packed,
    rope_tables,
    run_packed,
    sequences,
)  # fmt: skip

PV8, FP8 = "fa_int8@sm90_pv8", "fa_int8@sm90_fp8"
BY_TILE = "fa_int8@sm90_pv8_by_tile"
RUNGS = ("fa_tc@sm90", "fa_int8@sm90", PV8)
IN_TURN = [*map(pytest.param, RUNGS[:2]), pytest.param(PV8, marks=pytest.mark.slow)]
#: Two computing warpgroups, the fewest keys a step.
TILES = Tiles(128, 64, 12, 2)
#: Empty ones in front, in the middle and at the end; no keys; no queries; tails, several tiles.
LENGTHS = ((0, 0), (5, 70), (3, 0), (0, 9), (0, 0), (140, 97), (0, 0))
#: One sequence amid others that are longer than what a tile brings of them.
AMID = ((60, 70), (37, 100), (150, 80))
ROWS, KEYS = slice(60, 97), slice(70, 170)


def varlen(rung: str, inputs: Arrays, ends: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    options = {"tiles": TILES, "arch": "sm_90a", "backend": "interpret", **options}
    found: tuple[np.ndarray, np.ndarray] = attention_varlen(
        *inputs, *ends, return_lse=True, **asked_for(rung), **options
    )
    return found


def planned(inputs: Arrays, ends: Any, **options: Any) -> Plan:
    named = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    options = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret", **options}
    return explain.plans(resolved(*inputs, **options, **named))[-1]


# ---- each sequence is as if alone ----------------------------------------------------------------


def check_that_every_sequence_is_as_if_alone(
    rung: str,
    head_dim: int,
    lengths: tuple[tuple[int, int], ...],
    options: dict[str, Any],
    dtype: str = "float16",
) -> None:
    inputs, ends = packed(lengths, 2, 1, head_dim, dtype)
    out = Guarded.empty(inputs[0].shape, dtype)
    o, lse = varlen(rung, inputs, ends, out=out.array, **options)
    out.check()
    alone = {**asked_for(rung), "backend": "interpret", "return_lse": True, **options}

    def call(q: Any, k: Any, v: Any) -> Any:
        with_keys = {"arch": "sm_90a", "tiles": TILES} if k.size else {}
        return attention(q, k, v, **alone, **with_keys)

    check_each_alone((o, lse), inputs, ends, call)


@pytest.mark.parametrize(
    ("head_dim", "lengths", "options"),
    [
        (64, LENGTHS, {}),  # O through the copy engine, but for a sequence's last rows
        pytest.param(
            64,
            LENGTHS,
            {"causal": True, "causal_align": "top-left", "scale": 0.2},
            marks=pytest.mark.slow,
        ),
        pytest.param(64, LENGTHS, {"window": (20, 9)}, marks=pytest.mark.slow),
        pytest.param(  # O from registers
            192, ((5, 66), (2, 0), (67, 9)), {"causal": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_sequence_is_as_if_alone(
    head_dim: int, lengths: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    check_that_every_sequence_is_as_if_alone("fa_tc@sm90", head_dim, lengths, options)


#: Scales of many keys: of a tile of the portable form, of a sequence.
OF_STEPS, OF_HEADS = (
    {"quant": QuantConfig(granularity_q=name, granularity_k=name)} for name in ("block", "head")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rung", "head_dim", "dtype", "options"),
    [
        ("fa_int8@sm90", 32, "float32", OF_STEPS),  # O in float32, V in 16 bits
        pytest.param("fa_int8@sm90", 32, "float16", {"window": (20, 9)}, marks=pytest.mark.slow),
        pytest.param(
            "fa_int8@sm90", 64, "bfloat16",
            {"causal": True, "causal_align": "top-left", **OF_HEADS}, marks=pytest.mark.slow,
        ),
        pytest.param("fa_int8@sm90", 192, "float16", {"causal": True}, marks=pytest.mark.slow),
        (PV8, 32, "float16", {}), pytest.param(FP8, 32, "float16", {}, marks=pytest.mark.slow),
        pytest.param(BY_TILE, 32, "float16", {}, marks=pytest.mark.slow),
        pytest.param(
            PV8, 72, "float32", {"causal": True, "window": (20, 9)}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_every_sequence_of_codes_is_as_if_alone(
    rung: str, head_dim: int, dtype: str, options: dict[str, Any]
) -> None:
    """Each sequence has separate means and scales of keys, and of 8-bit values."""
    lengths = ((0, 0), (5, 70), (0, 9), (30 if rung in (PV8, FP8, BY_TILE) else 130, 66), (0, 0))
    check_that_every_sequence_is_as_if_alone(rung, head_dim, lengths, options, dtype)


def check_that_a_sequence_may_have_no_keys(rung: str) -> None:
    inputs, ends = packed(((3, 0), (7, 3)), 1, 1, 32)
    o, lse = varlen(rung, inputs, ends)
    assert not o[:3].any() and (lse[:, :3] == -np.inf).all() and o[3:].all()


@pytest.mark.parametrize("rung", [RUNGS[1], *slow((*RUNGS[2:], FP8, BY_TILE))])
def test_a_sequence_of_codes_may_have_no_keys(rung: str) -> None:
    check_that_a_sequence_may_have_no_keys(rung)


@pytest.mark.parametrize(
    ("backend", "rung"),
    [
        *(("mirror", rung) for rung in RUNGS),
        *(pytest.param("interpret", *one.values, marks=one.marks) for one in IN_TURN),
    ],
)
def test_within_the_bound(backend: str, rung: str) -> None:
    """One block also meets every phase of its barriers; the tiles are the rung's own."""
    lengths = ((5, 38), (200, 150), (3, 0), (64, 129))
    if rung != "fa_tc@sm90":  # a step has 128 or 192 keys
        lengths = ((5, 38), (200, 200), (3, 0), (64, 90))
    heads = 2 if backend == "mirror" or rung == "fa_tc@sm90" else 1
    inputs, ends = packed(lengths, heads, 1, dtype="bfloat16")
    with hopper_blocks(1):
        for one in run_packed(rung, inputs, ends, arch="sm_90a", backend=backend, causal=True):
            assert one.form == rung.partition("@")[2]
            one.check()


def amid(rung: str) -> tuple[Arrays, tuple[Any, Any]]:
    """Return sequences `AMID`; of codes fewer heads and columns, for time, and the last key of the
    one that is looked at so long that M rises for a row along it, and for few others.
    """
    if rung == "fa_tc@sm90":
        return packed(AMID, 2, 1)
    inputs, ends = packed(AMID, 1, 1, 32)
    inputs[1][KEYS][-1] *= 2.5
    return inputs, ends


def spoilt(rung: str, inputs: Arrays) -> Arrays:
    """Return operands that are NaN but for one sequence, amid more NaN.

    Codes of NaN are 0: rows of Q are then along the sequence's last key, whose score outdoes all by
    far, and 8-bit values are others.
    """
    wide = []
    for name, x, own in zip("qkv", inputs, (ROWS, KEYS, KEYS), strict=True):
        shape = x.shape[0], x.shape[1] + 1, x.shape[2] + 16
        wide.append(np.full(shape, np.nan, x.dtype)[:, :-1, 8:-8])
        if rung != "fa_tc@sm90" and name == "q":
            wide[-1][...] = inputs[1][KEYS][-1]
        if rung in (PV8, FP8, BY_TILE) and name == "v":
            wide[-1][...] = 9 - 5 * x[::-1]
        wide[-1][own] = x[own]
    return tuple(wide)


def check_that_neighbours_have_no_influence(rung: str, **options: Any) -> None:
    """Neither on a value nor on when M rises, which a warp decides for all of its rows."""
    inputs, ends = amid(rung)
    o, lse = clean(rung, **options)
    out = np.full_like(inputs[0], 7.0)
    found, found_lse = varlen(rung, spoilt(rung, inputs), ends, out=out, **options)
    assert bits(found[ROWS]) == bits(o[ROWS]) and bits(found_lse[:, ROWS]) == bits(lse[:, ROWS])
    assert np.isnan(found[:60]).all() and np.isnan(found[97:]).all()


@functools.cache
def clean(rung: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return varlen(rung, *amid(rung), **options)


def check_that_all_are_within_their_bounds(rung: str) -> None:
    with hopper_blocks(1):
        lengths = ((5, 3), (5, 100), (5, 100), (5, 100))  # the last V where the first one was
        inputs, ends = packed(lengths, 1, 1, 32)
        for one in run_packed(rung, inputs, ends, arch="sm_90a", backend="interpret"):
            one.check()


def check_that_a_sequence_past_its_limit_is_cut(rung: str) -> None:
    inputs, ends = packed(((5, 9), (40, 70)), 2, 1)
    out = Guarded.empty(inputs[0].shape, "float16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.kernels.limits.check_cu_seqlens", lambda *_: None)
        varlen(rung, inputs, ends, max_len_q=33, max_len_k=40, out=out.array)
    assert np.isfinite(out.array[: 5 + 33]).all() and np.isnan(out.array[5 + 33 :]).all()


@pytest.mark.parametrize(
    ("rung", "options"),
    [
        ("fa_tc@sm90", {}), ("fa_int8@sm90", {}),
        *(pytest.param(rung, {}, marks=pytest.mark.slow) for rung in (PV8, BY_TILE, FP8)),
        *(
            pytest.param("fa_tc@sm90", options, marks=pytest.mark.slow)
            for options in (
                {"causal": True, "window": (30, 0)}, {"tiles": Tiles(192, 64, 16, 2)}
            )
        ),
        pytest.param(
            "fa_int8@sm90", {"causal": True, "tiles": Tiles(192, 64, 16, 2)},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_neighbours_have_no_influence(rung: str, options: dict[str, Any]) -> None:
    check_that_neighbours_have_no_influence(rung, **options)


def test_no_column_past_head_dim_is_written() -> None:
    """This tests rows that are not stored by the copy engine."""
    (q, k, v), ends = packed(((5, 9), (17, 7)), 2, 1, head_dim=40)
    buffer = np.full_like(q, np.nan)
    out = buffer[..., :36]
    varlen("fa_tc@sm90", (q[..., :36], k[..., :36], v[..., :36]), ends, out=out)
    assert np.isfinite(out).all() and np.isnan(buffer[..., 36:]).all()


@pytest.mark.parametrize("rung", [RUNGS[0], *slow(RUNGS[1:])])
def test_a_sequence_past_its_limit_is_cut(rung: str) -> None:
    check_that_a_sequence_past_its_limit_is_cut(rung)


@pytest.mark.parametrize(("pv", "filled"), [("fp8", ["v_codes"]), ("int8", [])])
def test_what_lies_between_codes_that_are_floats_is_zero(pv: Any, filled: list[str]) -> None:
    """A step reaches past its sequence, with weights of 0: these do not silence a NaN."""
    inputs, ends = packed(LENGTHS, 4, 2)
    quant = QuantConfig(pv=pv, granularity_v="channel")
    named = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "quant": quant}
    options = dict(variant="fa_int8", arch="sm_90a", backend="interpret", **named)
    between = stages(resolved(*inputs, **options)).between
    assert [work.name for work in between if work.zeros] == filled


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", [*RUNGS, BY_TILE])
def test_the_plan_of_packed_sequences(rung: str) -> None:
    inputs, ends = packed(((100, 300), (0, 9), (700, 500)), 4, 2, 128)
    plan = planned(inputs, ends, **asked_for(rung))
    (launched,) = plan.launches
    assert plan.form == rung.partition("@")[2] and plan.features.varlen and not plan.note
    assert launched.grid == -(-700 // plan.tiles.block_q) * 4 * 3
    assert [w.name for w in plan.workspace if w.zeros] == ["next_tile"]
    maps = [param for param in launched.params if isinstance(param, records.TensorMap)]
    shapes = [(1, 4, 800, 128), (1, 2, 809, 128), (1, 2, 809, 128), (1, 4, 800, 128)]
    if rung in (PV8, BY_TILE):  # by channel, and each sequence in whole groups of VALUES_PAD keys
        shapes[2] = (1, 2, 128, (809 // VALUES_PAD + 3) * VALUES_PAD)
    assert [m.shape for m in maps] == shapes[: len(maps)] and len(maps) >= 3


@pytest.mark.slow
def test_what_is_turned_before_stays_in_the_hopper_form() -> None:
    """Each sequence equals the result with operands that were turned beforehand, bit for bit."""
    inputs, ends = packed(((5, 66), (2, 0), (67, 9)), 2, 1)
    tables = rope_tables(70, 64)
    options: dict[str, Any] = {"rope": tables, "rope_offset_q": 3}
    assert planned(inputs, ends, **options).form == "sm90"
    o, lse = varlen("fa_tc@sm90", inputs, ends, **options)
    turned = []
    for _, (q, k, _) in sequences(inputs, ends):
        rope = Rope.of_arrays(tables, False, 3, q.shape[2], k.shape[2], 64)
        turned.append([x[0].swapaxes(0, 1) for x in rope.turned(q, k)])
    q, k = (np.concatenate(x) for x in zip(*turned, strict=True))
    expected, expected_lse = varlen("fa_tc@sm90", (q, k, inputs[2]), ends)
    assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)


def test_tiles_follow_the_mean_of_the_lengths_and_no_limit() -> None:
    """Therefore limits that a caller gives change no bit."""
    inputs, ends = packed(((2, 500),) * 7 + ((1010, 500),), 1, 1, 128)
    for limits in ({}, {"max_len_q": 1010, "max_len_k": 500}, {"max_len_q": 9999}):
        assert planned(inputs, ends, **limits).tiles.block_q == 128
    inputs, ends = packed(((1500, 1200),) * 2, 1, 1, 128)
    assert planned(inputs, ends).tiles.block_q == 192


def test_what_is_left_to_the_portable_form() -> None:
    inputs, ends = packed(((3, 0), (2, 0)), 2, 1)
    plan = planned(inputs, ends, max_len_k=5)
    assert plan.form == "portable" and "there are no keys for the copy engine" in plan.note
    inputs, ends = packed(((3, 4), (2, 5)), 2, 1)
    assert planned(inputs, ends, softcap=2.0).form == "sm90"
    blocks = BlockMask(np.ones((2, 1, 1, 1), bool), 128, 128)
    kept = planned(inputs, ends, block_mask=blocks)
    assert kept.form == "portable" and "takes no block mask of packed sequences" in kept.note
    inputs, ends = packed(((3, 4), (2, 5)), 2, 1, head_dim=36)
    assert "multiples of 16 bytes" in planned(inputs, ends).note


# ---- mistakes ------------------------------------------------------------------------------------


Check = Callable[[str], None]
#: What may be wrong with the ends of sequences: (text of the kernel, what stands there instead,
#: which check then fails, and how).
WRONG: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "values of the next sequence meet weights of 0": (
        "max(0, p.len_kv - kv0), BLOCK_KV);", "BLOCK_KV, BLOCK_KV);",
        check_that_neighbours_have_no_influence, AssertionError),
    "rows of the next sequence decide when M rises": (
        "max(row0, p.len_q - tile.q0), row0 + 64);", "row0 + 64, row0 + 64);",
        check_that_neighbours_have_no_influence, AssertionError),
    "keys of the first sequence": (
        "BOX_COLS, tile.first_key() + kv0", "BOX_COLS, kv0",
        check_that_neighbours_have_no_influence, AssertionError),
    "rows of the next sequence are stored": (
        "(VARLEN && rows < STORE_ROWS)", "(VARLEN && rows < 0)",
        check_that_a_sequence_past_its_limit_is_cut, KernelFault),
    "zeros while the first warpgroup reads": (
        "if (VARLEN && turn.warpgroup == 0)", "if (VARLEN && turn.warpgroup == 1)",
        check_that_neighbours_have_no_influence, KernelFault),
}  # fmt: skip


#: The same of codes.
WRONG_CODES: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "values of the next sequence meet weights of 0": (
        "max(0, p.len_kv - kv0), BLOCK_KV, V_BOXES);", "BLOCK_KV, BLOCK_KV, V_BOXES);",
        check_that_neighbours_have_no_influence, AssertionError),
    "zeros among the ones": (
        "BLOCK_KV, V_BOXES);", "BLOCK_KV);",
        check_that_all_are_within_their_bounds, AssertionError),
    "rows of the next sequence decide when M rises":
        WRONG["rows of the next sequence decide when M rises"],
    "scales of the keys of the first sequence": (
        " +\n                           first_scale<GROUP_KV>(call.cu_seqlens_k, tile.batch)", "",
        check_that_neighbours_have_no_influence, AssertionError),
}  # fmt: skip
#: And what is seen later.
WRONG_CODES_TOO: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "keys of the first sequence": (
        "tile.first_key() + kv0, tile.head_kv, tile.entry());",
        "kv0, tile.head_kv, tile.entry());",
        check_that_neighbours_have_no_influence, AssertionError),
    "rows of the next sequence are stored": (
        "(VARLEN && rows < STORE_ROWS)", "(VARLEN && rows < 0)",
        check_that_neighbours_have_no_influence, KernelFault),
    "scales of the queries of the first sequence": (
        " +\n         first_scale<GROUP_Q>(call.cu_seqlens_q, tile.batch)", "",
        check_that_neighbours_have_no_influence, AssertionError),
    "the mean of the keys of the first sequence": (
        "(int64_t(tile.batch) * p.heads_kv + tile.head_kv) * HEAD_DIM", "tile.head_kv * HEAD_DIM",
        check_that_neighbours_have_no_influence, AssertionError),
    "a scale where there is no key": (
        "max(len_kv - 1, 0)", "len_kv - 1",
        check_that_a_sequence_may_have_no_keys, KernelFault),
}  # fmt: skip
#: And of codes of V.
WRONG_VALUES: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "values of the first sequence": (
        "V_first + step.kv0", "step.kv0",
        check_that_neighbours_have_no_influence, AssertionError),
}  # fmt: skip
WRONG_VALUES_TOO: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "scales of the values of the first sequence": (
        " +\n                           first_scale<GROUP_V>(p.cu_seqlens_k, batch)"
        " * HEAD_DIM", "", check_that_neighbours_have_no_influence, AssertionError),
    "the mean of the values of the first sequence": (
        "V_mean = values.V_mean  // [HEAD_DIM]\n"
        "                          + (int64_t(batch) * p.heads_kv + head_kv) * HEAD_DIM",
        "V_mean = values.V_mean  // [HEAD_DIM]\n"
        "                          + head_kv * HEAD_DIM",
        check_that_neighbours_have_no_influence, AssertionError),
    **{
        what: WRONG_CODES_TOO[what]
        for what in ("keys of the first sequence", "a scale where there is no key")
    },
}  # fmt: skip
#: And of codes of V whose scales change along the keys.
WRONG_BY_TILE: dict[str, tuple[str, str, Check, type[Exception]]] = {
    "scales of the values of the first sequence": (
        " +\n              first_scale<GROUP_V>(call.cu_seqlens_k, tile.batch)"
        " * HEAD_DIM", "", check_that_neighbours_have_no_influence, AssertionError),
    "a scale of values where there is no key": (
        "min(step.kv0, max(step.len_kv - 1, 0))", "min(step.kv0, step.len_kv - 1)",
        check_that_a_sequence_may_have_no_keys, KernelFault),
}  # fmt: skip
ALL_WRONG = [
    *(pytest.param("fa_tc@sm90", *one, id=f"fa_tc, {what}") for what, one in WRONG.items()),
    *(pytest.param("fa_int8@sm90", *one, id=what) for what, one in WRONG_CODES.items()),
    *(
        pytest.param("fa_int8@sm90", *one, id=what, marks=pytest.mark.slow)
        for what, one in WRONG_CODES_TOO.items()
    ),
    *(pytest.param(PV8, *one, id=f"pv8, {what}") for what, one in WRONG_VALUES.items()),
    *(
        pytest.param(PV8, *one, id=f"pv8, {what}", marks=pytest.mark.slow)
        for what, one in WRONG_VALUES_TOO.items()
    ),
    *(
        pytest.param(BY_TILE, *one, id=f"by tile, {what}", marks=pytest.mark.slow)
        for what, one in WRONG_BY_TILE.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rung", "old", "new", "check", "how"), ALL_WRONG)
def test_what_goes_wrong_is_seen(
    rung: str,
    old: str,
    new: str,
    check: Check,
    how: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean(rung)  # by the kernel as it is
    own = f"sm90/attn_{rung.replace('@sm90', '')}.cu"
    shared = (
        "sm90/int8/producer.cuh", "sm90/int8/rows.cuh", "prims/score/step_scores.cuh",
        "prims/io/output.cuh", "prims/codes/channel_scales.cuh",
    )  # fmt: skip
    places = (own, *shared)
    source = next(place for place in places if old in (KERNELS / place).read_text())
    put_a_line_in_place(source, old, new, tmp_path, monkeypatch)
    with pytest.raises(how):
        check(rung)


def test_zeros_that_wgmma_has_not_been_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean("fa_tc@sm90")
    zeros = "(tile[b])[i] = {};\n"
    fenced = zeros + "  fence_proxy_async();\n"
    put_a_line_in_place("prims/instructions/tma.cuh", fenced, zeros, tmp_path, monkeypatch)
    with pytest.raises(KernelFault):
        check_that_neighbours_have_no_influence("fa_tc@sm90")
