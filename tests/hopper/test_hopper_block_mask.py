"""Block masks in the Hopper forms of fa_tc and fa_int8, in the interpreter: blocks of 128 rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, QuantConfig, Tiles, attention, quantize
from cupyattn.compiler.modules import KERNELS
from cupyattn.interpret import KernelFault
from cupyattn.ops import explain
from cupyattn.ops.attention import resolved
from cupyattn.plans.records import Plan
from cupyattn.reference.attention import attention_mirror
from tests.faults.fault_patches import put_a_line_in_place
from tests.hopper import hopper_pv8_cases as cases
from tests.support import runs
from tests.support.runs import Arrays, asked_for, bits, normal, variant_of

PV8, FP8 = "fa_int8@sm90_pv8", "fa_int8@sm90_fp8"
BY_TILE = "fa_int8@sm90_pv8_by_tile"
RUNGS = ("fa_tc@sm90", "fa_int8@sm90", PV8)
IN_TURN = [*map(pytest.param, RUNGS[:2]), pytest.param(PV8, marks=pytest.mark.slow)]
#: Two blocks of rows and five of keys, both with tails; grouped heads.
LEN_Q, LEN_KV = 150, 290
KEPT = np.array([[[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]], [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]], bool)


def arrays(head_dim: int = 64, len_q: int = LEN_Q, len_kv: int = LEN_KV) -> Arrays:
    return normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim))


def run(
    inputs: Arrays, block_mask: BlockMask | None, rung: str = "fa_tc@sm90", **options: Any
) -> runs.Run:
    options = {"arch": "sm_90a", "backend": "interpret", **options}
    one = runs.run(rung, inputs, block_mask=block_mask, **options)
    assert one.form == rung.partition("@")[2]
    return one


def without_means(rung: str) -> dict[str, Any]:
    """Return options that keep keys from having a say in what becomes of others."""
    if rung == "fa_tc@sm90":
        return {}
    quant = asked_for(rung).get("quant", QuantConfig())
    return {"quant": replace(quant, smooth_k=False, smooth_v=False if rung == PV8 else None)}


def planned(block_mask: BlockMask, head_dim: int = 64, **options: Any) -> Plan:
    asked = dict(block_mask=block_mask, arch="sm_90a", **{"variant": "fa_tc", **options})
    return explain.plans(resolved(*arrays(head_dim), **asked))[-1]


# ---- what the kernel makes of it -----------------------------------------------------------------


def check_judgements(rung: str = "fa_tc@sm90", **options: Any) -> None:
    inputs = arrays(64 if rung == "fa_tc@sm90" else 32)
    one = run(inputs, BlockMask(KEPT[None], 128, 64), rung, **options)
    one.check()
    assert (one.o[:, 1, :128] == 0).all() and (one.lse[:, 1, :128] == -np.inf).all()


@pytest.mark.parametrize("variant", ["fa_tc", "fa_int8"])
@pytest.mark.parametrize("rows", [1, 7])
def test_rows_without_a_block_read_their_bias_at_whole_16_bytes(variant: str, rows: int) -> None:
    """Their one step lies behind the last key: behind an odd one, a box was an illegal fetch."""
    inputs, bias = arrays(len_q=7, len_kv=17), np.zeros((1, 1, rows, 24), np.float16)
    o, lse = attention(
        *inputs, variant=variant, arch="sm_90a", backend="interpret", return_lse=True,
        bias=bias[..., :17], block_mask=BlockMask(np.zeros((1, 1, 1, 1), bool), 128, 64),
    )  # fmt: skip
    assert not o.any() and np.isneginf(lse).all()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 20), "causal_align": "top-left"}]
)
@pytest.mark.parametrize("backend", ["interpret", "mirror"])
def test_a_block_mask_is_a_mask(backend: str, options: dict[str, Any], one_block: Any) -> None:
    """One block also meets every phase of its barriers, between full and empty tiles."""
    check_judgements(backend=backend, **options)


#: Scales of a tile of the portable form; a window whose first steps are cut.
OF_STEPS = {"quant": QuantConfig(granularity_k="block")}
WINDOW = {"window": (70, 20), "causal_align": "top-left"}


@pytest.mark.parametrize(
    ("rung", "backend", "options"),
    [
        pytest.param("fa_int8@sm90", "interpret", {}, marks=pytest.mark.slow),
        ("fa_int8@sm90", "interpret", {"causal": True, **OF_STEPS}),
        ("fa_int8@sm90", "mirror", WINDOW),
        pytest.param(
            "fa_int8@sm90", "interpret", {**WINDOW, **OF_STEPS}, marks=pytest.mark.slow
        ),
        (PV8, "interpret", {"causal": True}), (PV8, "mirror", {}), (PV8, "mirror", WINDOW),
        pytest.param(PV8, "interpret", WINDOW, marks=pytest.mark.slow), (FP8, "mirror", WINDOW),
        pytest.param(FP8, "interpret", {"causal": True}, marks=pytest.mark.slow),
        (BY_TILE, "mirror", WINDOW), (BY_TILE, "interpret", {"causal": True}),
        pytest.param(BY_TILE, "interpret", WINDOW, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_block_mask_of_codes_is_a_mask(
    rung: str, backend: str, options: dict[str, Any], one_block: Any
) -> None:
    check_judgements(rung, backend=backend, **options)


@pytest.mark.parametrize("block_kv", [64, 128])
def test_m_falls_by_steps_that_are_taken(block_kv: int) -> None:
    """Whole numbers, as in tests/hopper/test_hopper_pv8.py: every bit is the mirror's."""
    z, mask = cases.with_gaps(np.asarray, block_kv)
    given: dict[str, Any] = {"scale": math.log(2.0), "block_mask": mask}
    o = attention(z, arch="sm_90a", backend="interpret", **given)
    expected = attention_mirror(z, variant="fa_int8", form="sm90_pv8", **given)
    assert bits(o) == bits(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "options"), [(64, {"window": (100, -1)}), (192, {})])
def test_blocks_of_several_steps(head_dim: int, options: dict[str, Any]) -> None:
    """Steps also begin in the middle of a block."""
    tiles = Tiles(128, 64, 12, 2)
    mask = BlockMask(np.array([[1, 0, 1], [1, 1, 0]], bool)[None, None], 128, 128)
    inputs = arrays(head_dim, len_kv=350)
    run(inputs, mask, tiles=tiles, causal_align="top-left", **options).check()


@pytest.mark.slow
@pytest.mark.parametrize("rung", [*RUNGS[1:], BY_TILE])
def test_blocks_of_several_steps_of_codes(rung: str) -> None:
    tiles = Tiles(128, 64, 12, 3)
    mask = BlockMask(np.array([[1, 0, 1], [1, 1, 0]], bool)[None, None], 128, 128)
    run(arrays(192, len_kv=350), mask, rung, tiles=tiles, causal=True).check()


@pytest.mark.parametrize("rung", IN_TURN)
def test_the_kept_blocks_are_attended_to_as_if_they_were_all(rung: str) -> None:
    """To the bit: the same steps over the same keys, and all blocks are no mask."""
    q, k, v = arrays(64 if rung == "fa_tc@sm90" else 32, len_q=100)
    mask = BlockMask(np.array([0, 1, 0, 1, 1], bool)[None, None, None], 128, 64)
    keys = np.r_[64:128, 192:LEN_KV]
    v[:, :, 64] = 9  # of which the scale is, where a channel has one
    tiles = Tiles(128, 64, 12, 4)
    # NOTE: of codes, groups of keys that no cut goes through, and no mean of all keys.
    quant = without_means(rung)
    one = run((q, k, v), mask, rung, **quant)
    kept = k[:, :, keys], v[:, :, keys]
    everything = BlockMask(np.ones((1, 1, 1, 3), bool), 128, 64)
    for other in (
        run((q, *kept), None, rung, tiles=tiles, **quant),
        run((q, *kept), everything, rung, **quant),
    ):
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


@pytest.mark.parametrize("rung", RUNGS)
def test_dropped_keys_and_values_are_not_read(rung: str) -> None:
    """NaN in them changes no bit, nor where a block of rows keeps nothing.

    Other numbers where a channel of V has one scale for all of its keys.
    """
    q, k, v = arrays(64 if rung == "fa_tc@sm90" else 32)
    v[:, :, 64] = 9
    mask = BlockMask(np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)[None, None], 128, 64)
    quant = without_means(rung)
    clean = run((q, k, v), mask, rung, **quant)
    k, v = k.copy(), v.copy()
    for x in (k, v):
        x[:, :, :64] = x[:, :, 128:] = -8 if rung == PV8 and x is v else np.nan
    dirty = run((q, k, v), mask, rung, **quant)
    assert bits(clean.o) == bits(dirty.o) and bits(clean.lse) == bits(dirty.lse)
    assert (dirty.o[:, :, 128:] == 0).all() and (dirty.lse[:, :, 128:] == -np.inf).all()


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", [*RUNGS, BY_TILE])
def test_tiles_divide_the_blocks(rung: str) -> None:
    for head_dim in (1, 64, 65, 128, 129, 256):
        for block in ((128, 64), (128, 128)):
            tiles = variant_of(rung).tiles_for(
                head_dim, form=rung.partition("@")[2], lengths=(100, 100), block_mask=block
            )
            assert block[0] % tiles.block_q == 0 == block[1] % tiles.block_kv
            assert block[1] == tiles.block_kv or block[1] == 64 or head_dim > 128


@pytest.mark.parametrize("rung", [*RUNGS, BY_TILE])
def test_the_plan_of_a_block_mask(rung: str) -> None:
    plan = planned(BlockMask(KEPT[None], 128, 64), **asked_for(rung))
    assert (
        plan.form == rung.partition("@")[2]
        and plan.features.block_mask == (128, 64)
        and not plan.note
    )
    assert [w.name for w in plan.workspace if w.zeros] == ["next_tile"]


def test_what_is_left_to_the_portable_form() -> None:
    rows_of_64 = BlockMask(np.ones((1, 1, 3, 3), bool), 64, 128)
    plan = planned(rows_of_64)
    assert plan.form == "portable"
    assert "takes block masks of 128 query rows, got blocks of 64 x 128" in plan.note
    codes = planned(rows_of_64, **asked_for(PV8))
    assert codes.form == "pv8_whole" and "takes block masks of 128 query rows" in codes.note
    with pytest.raises(ValueError, match="must divide the blocks of the block mask, 128 x 64"):
        attention(
            *arrays(), variant="fa_tc", arch="sm_90a", tiles=Tiles(128, 128, 12, 2),
            block_mask=BlockMask(KEPT[None], 128, 64),
        )  # fmt: skip


# ---- mistakes ------------------------------------------------------------------------------------

_LEFT = "        if (LISTED) smem.step[at.stage] = step_word;\n"
_COUNTED = (
    "        mbarrier_arrive_expect_tx(\n"
    "            smem.full[at.stage], ((step < tile.steps) + (step > 0)) * STAGE_BYTES +\n"
    f"{37 * ' '}(step < tile.steps ? load_scores.bytes(step_word) : 0));\n"
)
_WITHOUT_KEYS = "number >= keys.end ? ", "number >= keys.end ? 0 * ", AssertionError
_WITHOUT_KEYS_OF_CODES = "!kept ? ", "!kept ? 0 * ", AssertionError
#: Faults: (text of the kernel, its replacement, the sign of the fault).
WRONG: dict[str, tuple[str, str, type[Exception]]] = {
    "the first key of a step is counted, not read": (
        "kv0 = LISTED ? first_key(step_word) : kv0 + BLOCK_KV;", "kv0 += BLOCK_KV;",
        AssertionError),
    "a tile without keys gets the first ones": _WITHOUT_KEYS,
    "the key of a step is left behind when its K may be there": (
        _LEFT + _COUNTED, _COUNTED + _LEFT, KernelFault),
}  # fmt: skip
#: The same of codes, and of codes of V.
WRONG_CODES: dict[str, tuple[str, str, type[Exception]]] = {
    "the first key of a step is counted, not read": (
        "kv0 = LISTED ? first_key(step_word) : kv0 + BLOCK_KV;", "kv0 += BLOCK_KV;",
        AssertionError),
    "a tile without keys gets the first ones": _WITHOUT_KEYS_OF_CODES,
}  # fmt: skip
WRONG_VALUES: dict[str, tuple[str, str, type[Exception]]] = {
    "the first key of a step is counted, not read": (
        "      if (LISTED) kv0 = first_key(step_word);\n", "", AssertionError),
    "a tile without keys gets the first ones": _WITHOUT_KEYS_OF_CODES,
}  # fmt: skip
ALL_WRONG = [
    pytest.param(rung, *one, marks=[pytest.mark.slow] if rung == PV8 else [])
    for rung, wrong in zip(RUNGS, (WRONG, WRONG_CODES, WRONG_VALUES), strict=True)
    for one in wrong.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("rung", "what", "wrong"), ALL_WRONG)
def test_what_goes_wrong_is_seen(
    rung: str,
    what: str,
    wrong: tuple[str, str, type[Exception]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new, how = wrong
    places = f"sm90/attn_{rung.replace('@sm90', '')}.cu", "sm90/int8/producer.cuh"
    source = next(place for place in places if old in (KERNELS / place).read_text())
    put_a_line_in_place(source, old, new, tmp_path, monkeypatch)
    options = OF_STEPS if rung == "fa_int8@sm90" else {}
    with pytest.raises(how):
        check_judgements(rung, causal=True, **options)


#: Calls with a step without keys, by what makes it so.
WITHOUT_KEYS: dict[str, dict[str, Any]] = {
    "window": {"window": (4, 3), "causal_align": "top-left"},
    "block mask": {"block_mask": BlockMask(np.array([[[[1], [0]]]], bool), 128, 64)},
}


@pytest.mark.parametrize("rung", IN_TURN[1:])
@pytest.mark.parametrize("what", WITHOUT_KEYS)
def test_a_step_without_keys_reads_no_scale_behind_the_last(
    what: str, rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale belongs to a whole step, and the last key ends one."""
    inputs = normal((1, 1, 140, 32), (1, 1, 64, 32))
    tiles = Tiles(128, 64, 12, 2)
    quant = replace(asked_for(rung).get("quant", QuantConfig()), granularity_k="block")
    z = quantize(*inputs, quant=quant, tiles=tiles)
    assert z.group_kv == tiles.block_kv
    options = {**WITHOUT_KEYS[what], "tiles": tiles}

    def attend() -> tuple[Any, Any]:
        asked = {"arch": "sm_90a", "backend": "interpret", "return_lse": True, **options}
        o, lse = attention(z, **asked)
        return o, lse

    runs.Run(rung, rung.partition("@")[2], inputs, options, z, *attend()).check()
    checked = "min(kv0 + j * SCALE_KEYS, max(len_kv - 1, 0))"
    instead = "kv0 + j * SCALE_KEYS"
    put_a_line_in_place("prims/score/step_scores.cuh", checked, instead, tmp_path, monkeypatch)
    with pytest.raises(KernelFault, match="outside k_scale"):
        attend()
