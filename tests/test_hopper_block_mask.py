"""Block masks in the Hopper form of fa_tc, in the interpreter: blocks of 128 query rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, Tiles, api, attention, launch
from cupyattn import compile as kc
from cupyattn.interpret import KernelFault
from cupyattn.launch import Plan
from cupyattn.registry import VARIANTS
from cupyattn.request import Options, resolve
from tests import runs
from tests.fault_patches import put_in_place
from tests.runs import Arrays, bits, normal

RUNG = "fa_tc@sm90"
#: Two blocks of rows and five of keys, both with tails; grouped heads.
LEN_Q, LEN_KV = 150, 290
KEPT = np.array([[[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]], [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]], bool)


def arrays(head_dim: int = 64, len_q: int = LEN_Q, len_kv: int = LEN_KV) -> Arrays:
    return normal((1, 2, len_q, head_dim), (1, 1, len_kv, head_dim))


def run(inputs: Arrays, block_mask: BlockMask | None, **options: Any) -> runs.Run:
    options = {"arch": "sm_90a", "backend": "interpret", **options}
    one = runs.run(RUNG, inputs, block_mask=block_mask, **options)
    assert one.form == "sm90"
    return one


def planned(block_mask: BlockMask, head_dim: int = 64, **options: Any) -> Plan:
    asked = Options(block_mask=block_mask, arch="sm_90a", **{"variant": "fa_tc", **options})
    return api.plans(resolve(*arrays(head_dim), asked))[-1]


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One block takes all tiles, one after the other."""
    monkeypatch.setattr(launch, "HOPPER_BLOCKS", 1)
    launch.plan_attention.cache_clear()
    yield
    launch.plan_attention.cache_clear()


# ---- what the kernel makes of it -----------------------------------------------------------------


def check_judgements(**options: Any) -> None:
    one = run(arrays(), BlockMask(KEPT[None], 128, 64), **options)
    one.check()
    assert (one.o[:, 1, :128] == 0).all() and (one.lse[:, 1, :128] == -np.inf).all()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 20), "causal_align": "top-left"}]
)
@pytest.mark.parametrize("backend", ["interpret", "mirror"])
def test_a_block_mask_is_a_mask(backend: str, options: dict[str, Any], one_block: Any) -> None:
    """One block also meets every phase of its barriers, between full and empty tiles."""
    check_judgements(backend=backend, **options)


@pytest.mark.parametrize(("head_dim", "options"), [(64, {"window": (100, -1)}), (192, {})])
def test_blocks_of_several_steps(head_dim: int, options: dict[str, Any]) -> None:
    """Steps also begin in the middle of a block."""
    tiles = Tiles(128, 64, 12, 2)
    mask = BlockMask(np.array([[1, 0, 1], [1, 1, 0]], bool)[None, None], 128, 128)
    inputs = arrays(head_dim, len_kv=350)
    run(inputs, mask, tiles=tiles, causal_align="top-left", **options).check()


def test_the_kept_blocks_are_attended_to_as_if_they_were_all() -> None:
    """To the bit: the same steps over the same keys, and all blocks are no mask."""
    q, k, v = arrays(len_q=100)
    mask = BlockMask(np.array([0, 1, 0, 1, 1], bool)[None, None, None], 128, 64)
    keys = np.r_[64:128, 192:LEN_KV]
    tiles = Tiles(128, 64, 12, 4)
    one = run((q, k, v), mask)
    kept = k[:, :, keys], v[:, :, keys]
    everything = BlockMask(np.ones((1, 1, 1, 3), bool), 128, 64)
    for other in (run((q, *kept), None, tiles=tiles), run((q, *kept), everything)):
        assert bits(one.o) == bits(other.o) and bits(one.lse) == bits(other.lse)


def test_dropped_keys_and_values_are_not_read() -> None:
    """NaN in them changes no bit, nor where a block of rows keeps nothing."""
    q, k, v = arrays()
    mask = BlockMask(np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)[None, None], 128, 64)
    clean = run((q, k, v), mask)
    k, v = k.copy(), v.copy()
    for x in (k, v):
        x[:, :, :64] = x[:, :, 128:] = np.nan
    dirty = run((q, k, v), mask)
    assert bits(clean.o) == bits(dirty.o) and bits(clean.lse) == bits(dirty.lse)
    assert (dirty.o[:, :, 128:] == 0).all() and (dirty.lse[:, :, 128:] == -np.inf).all()


# ---- plans ---------------------------------------------------------------------------------------


def test_tiles_divide_the_blocks() -> None:
    for head_dim in (1, 64, 65, 128, 129, 256):
        for block in ((128, 64), (128, 128)):
            tiles = VARIANTS["fa_tc"].tiles_for(
                head_dim, form="sm90", lengths=(100, 100), block_mask=block
            )
            assert block[0] % tiles.block_q == 0 == block[1] % tiles.block_kv
            assert block[1] == tiles.block_kv or block[1] == 64 or head_dim > 128


def test_the_plan_of_a_block_mask() -> None:
    plan = planned(BlockMask(KEPT[None], 128, 64))
    assert plan.form == "sm90" and plan.features.block_mask == (128, 64) and not plan.note
    assert [w.name for w in plan.workspace if w.zeros] == ["next_tile"]


def test_what_is_left_to_the_portable_form() -> None:
    rows_of_64 = BlockMask(np.ones((1, 1, 3, 3), bool), 64, 128)
    plan = planned(rows_of_64)
    assert plan.form == "portable"
    assert "takes block masks of 128 query rows, got blocks of 64 x 128" in plan.note
    codes = planned(BlockMask(KEPT[None], 128, 64), variant="fa_int8")
    assert codes.form == "portable" and "takes no block_mask" in codes.note
    with pytest.raises(ValueError, match="must divide the blocks of the block mask, 128 x 64"):
        attention(
            *arrays(), variant="fa_tc", arch="sm_90a", tiles=Tiles(128, 128, 12, 2),
            block_mask=BlockMask(KEPT[None], 128, 64),
        )  # fmt: skip


# ---- mistakes ------------------------------------------------------------------------------------

_LEFT = "        if (BLOCK_MASK) smem.kv0[at.stage] = kv0;\n"
_COUNTED = "        mbarrier_arrive_expect_tx(smem.K_full[at.stage], sizeof(smem.K[0]));\n"
#: What may be wrong: (text of the kernel, what stands there instead, how it is seen).
WRONG: dict[str, tuple[str, str, type[Exception]]] = {
    "the first key of a step is counted, not read": (
        "kv0 = BLOCK_MASK ? kept : kv0 + BLOCK_KV;", "kv0 += BLOCK_KV;", AssertionError),
    "a tile without keys gets the first ones": (
        "number >= keys.end ? p.len_kv", "number >= keys.end ? 0", AssertionError),
    "the key of a step is left behind when its K may be there": (
        _LEFT + _COUNTED, _COUNTED + _LEFT, KernelFault),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, how = WRONG[what]
    copy = Path(shutil.copytree(kc.KERNELS, tmp_path / "kernels"))
    path = copy / "sm90" / "attn_fa_tc.cu"
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))
    put_in_place(copy, RUNG, monkeypatch)
    with pytest.raises(how):
        check_judgements(causal=True)
