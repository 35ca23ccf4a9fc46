"""Packed sequences in the Hopper form of fa_tc, in the interpreter.

The copy engine brings rows of the next sequence along with the last of this one: they must change
nothing, and nothing may be written to theirs.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn import BlockMask, Tiles, api, attention, attention_varlen, launch
from cupyattn import compile as kc
from cupyattn.interpret import KernelFault
from cupyattn.launch import Plan
from cupyattn.request import Options, resolve
from cupyattn.rope import Rope
from tests.fault_patches import put_in_place
from tests.runs import Arrays, Guarded, bits, packed, rope_tables, run_packed, sequences

RUNG = "fa_tc@sm90"
#: Two computing warpgroups, the fewest keys a step.
TILES = Tiles(128, 64, 12, 2)
#: Empty ones in front, in the middle and at the end; no keys; no queries; tails, several tiles.
LENGTHS = ((0, 0), (5, 70), (3, 0), (0, 9), (0, 0), (140, 97), (0, 0))
#: One sequence amid others that are longer than what a tile brings of them.
AMID = ((60, 70), (37, 100), (150, 80))
ROWS, KEYS = slice(60, 97), slice(70, 170)


def varlen(inputs: Arrays, ends: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    options = {"tiles": TILES, "arch": "sm_90a", "backend": "interpret", **options}
    found: tuple[np.ndarray, np.ndarray] = attention_varlen(
        *inputs, *ends, variant="fa_tc", return_lse=True, **options
    )
    return found


def planned(inputs: Arrays, ends: Any, **options: Any) -> Plan:
    named = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    options = {"variant": "fa_tc", "arch": "sm_90a", "backend": "interpret", **options}
    return api.plans(resolve(*inputs, Options(**options, **named)))[-1]


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One block takes all tiles, one after the other."""
    monkeypatch.setattr(launch, "HOPPER_BLOCKS", 1)
    launch.plan_attention.cache_clear()
    yield
    launch.plan_attention.cache_clear()


# ---- each sequence is as if alone ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "lengths", "options"),
    [
        (64, LENGTHS, {}),  # O through the copy engine, but for a sequence's last rows
        (64, LENGTHS, {"causal": True, "causal_align": "top-left", "scale": 0.2}),
        pytest.param(64, LENGTHS, {"window": (20, 9)}, marks=pytest.mark.slow),
        (192, ((5, 66), (2, 0), (67, 9)), {"causal": True}),  # O from registers
    ],
)
def test_every_sequence_is_as_if_alone(
    head_dim: int, lengths: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    inputs, ends = packed(lengths, 2, 1, head_dim)
    out = Guarded.empty(inputs[0].shape, "float16")
    o, lse = varlen(inputs, ends, out=out.array, **options)
    out.check()
    alone = {"variant": "fa_tc", "backend": "interpret", "return_lse": True, **options}
    for rows, one in sequences(inputs, ends):
        if rows.start == rows.stop:
            continue
        with_keys = {"arch": "sm_90a", "tiles": TILES} if one[1].size else {}
        expected, expected_lse = attention(*one, **alone, **with_keys)
        assert bits(o[rows].swapaxes(0, 1)) == bits(expected), rows
        assert bits(lse[:, rows]) == bits(expected_lse), rows


@pytest.mark.parametrize("backend", ["interpret", "mirror"])
def test_within_the_bound(backend: str, one_block: Any) -> None:
    """One block also meets every phase of its barriers; the tiles are the rung's own."""
    inputs, ends = packed(((5, 38), (200, 150), (3, 0), (64, 129)), 2, 1, dtype="bfloat16")
    for one in run_packed(RUNG, inputs, ends, arch="sm_90a", backend=backend, causal=True):
        assert one.form == "sm90"
        one.check()


def spoilt(inputs: Arrays) -> Arrays:
    """Return operands that are NaN but for one sequence, amid more NaN."""
    wide = []
    for x, own in zip(inputs, (ROWS, KEYS, KEYS), strict=True):
        wide.append(np.full((x.shape[0], x.shape[1] + 1, 80), np.nan, x.dtype)[:, :-1, 8:72])
        wide[-1][own] = x[own]
    return tuple(wide)


def check_that_neighbours_have_no_influence(**options: Any) -> None:
    """Neither on a value nor on when M rises, which a warp decides for all of its rows."""
    inputs, ends = packed(AMID, 2, 1)
    o, lse = clean(**options)
    out = np.full_like(inputs[0], 7.0)
    amid, amid_lse = varlen(spoilt(inputs), ends, out=out, **options)
    assert bits(amid[ROWS]) == bits(o[ROWS]) and bits(amid_lse[:, ROWS]) == bits(lse[:, ROWS])
    assert np.isnan(amid[:60]).all() and np.isnan(amid[97:]).all()


@functools.cache
def clean(**options: Any) -> tuple[np.ndarray, np.ndarray]:
    return varlen(*packed(AMID, 2, 1), **options)


def check_that_a_sequence_past_its_limit_is_cut() -> None:
    inputs, ends = packed(((5, 9), (40, 70)), 2, 1)
    out = Guarded.empty(inputs[0].shape, "float16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyattn.checks.check_cu_seqlens", lambda *_: None)
        varlen(inputs, ends, max_len_q=33, max_len_k=40, out=out.array)
    assert np.isfinite(out.array[: 5 + 33]).all() and np.isnan(out.array[5 + 33 :]).all()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": (30, 0)}, {"tiles": Tiles(192, 64, 16, 2)}]
)
def test_neighbours_have_no_influence(options: dict[str, Any]) -> None:
    check_that_neighbours_have_no_influence(**options)


def test_no_column_past_head_dim_is_written() -> None:
    """Of the rows that do not go through the copy engine."""
    (q, k, v), ends = packed(((5, 9), (17, 7)), 2, 1, head_dim=40)
    buffer = np.full_like(q, np.nan)
    out = buffer[..., :36]
    varlen((q[..., :36], k[..., :36], v[..., :36]), ends, out=out)
    assert np.isfinite(out).all() and np.isnan(buffer[..., 36:]).all()


def test_a_sequence_past_its_limit_is_cut() -> None:
    check_that_a_sequence_past_its_limit_is_cut()


# ---- plans ---------------------------------------------------------------------------------------


def test_the_plan_of_packed_sequences() -> None:
    inputs, ends = packed(((100, 300), (0, 9), (700, 500)), 4, 2, 128)
    plan = planned(inputs, ends)
    (launched,) = plan.launches
    assert plan.form == "sm90" and plan.features.varlen and not plan.note
    assert launched.grid == -(-700 // plan.tiles.block_q) * 4 * 3
    assert [w.name for w in plan.workspace if w.zeros] == ["next_tile"]
    maps = [param for param in launched.params if isinstance(param, launch.TensorMap)]
    assert [m.shape for m in maps] == [
        (1, 4, 800, 128), (1, 2, 809, 128), (1, 2, 809, 128), (1, 4, 800, 128)
    ]  # fmt: skip


@pytest.mark.slow
def test_what_is_turned_before_stays_in_the_hopper_form() -> None:
    """And each sequence is to the bit what it is with operands that were turned beforehand."""
    inputs, ends = packed(((5, 66), (2, 0), (67, 9)), 2, 1)
    tables = rope_tables(70, 64)
    options: dict[str, Any] = {"rope": tables, "rope_offset_q": 3}
    assert planned(inputs, ends, **options).form == "sm90"
    o, lse = varlen(inputs, ends, **options)
    turned = []
    for _, (q, k, _) in sequences(inputs, ends):
        rope = Rope.of(tables, False, 3, q.shape[2], k.shape[2], 64)
        turned.append([x[0].swapaxes(0, 1) for x in rope.turned(q, k)])
    q, k = (np.concatenate(x) for x in zip(*turned, strict=True))
    expected, expected_lse = varlen((q, k, inputs[2]), ends)
    assert bits(o) == bits(expected) and bits(lse) == bits(expected_lse)


def test_tiles_follow_the_mean_of_the_lengths_and_no_limit() -> None:
    """So that limits that a caller knows beforehand change no bit."""
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
    assert "takes no softcap" in planned(inputs, ends, softcap=2.0).note
    blocks = BlockMask(np.ones((2, 1, 1, 1), bool), 128, 128)
    kept = planned(inputs, ends, block_mask=blocks)
    assert kept.form == "portable" and "takes no block mask of packed sequences" in kept.note
    inputs, ends = packed(((3, 4), (2, 5)), 2, 1, head_dim=36)
    assert "multiples of 16 bytes" in planned(inputs, ends).note
    inputs, ends = packed(((3, 4), (2, 5)), 2, 1)
    codes = planned(inputs, ends, variant="fa_int8")
    assert codes.form == "portable" and "takes no packed sequences of codes" in codes.note


# ---- mistakes ------------------------------------------------------------------------------------


def plant(old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hopper form run from a copy of the kernels with one text of it changed."""
    copy = Path(shutil.copytree(kc.KERNELS, folder / "kernels"))
    path = copy / "sm90" / "attn_fa_tc.cu"
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))
    put_in_place(copy, RUNG, monkeypatch)


#: What may be wrong with the ends of sequences: (text of the kernel, what stands there instead,
#: which check then fails, and how).
WRONG: dict[str, tuple[str, str, Callable[[], None], type[Exception]]] = {
    "values of the next sequence meet weights of 0": (
        "max(0, p.len_kv - kv0), BLOCK_KV);", "BLOCK_KV, BLOCK_KV);",
        check_that_neighbours_have_no_influence, AssertionError),
    "rows of the next sequence decide when M rises": (
        "max(row0, p.len_q - tile.q0), row0 + 64);", "row0 + 64, row0 + 64);",
        check_that_neighbours_have_no_influence, AssertionError),
    "keys of the first sequence": (
        "tile.first_key() + kv0, head_kv, tile.batch);\n        if (Q_",
        "kv0, head_kv, tile.batch);\n        if (Q_",
        check_that_neighbours_have_no_influence, AssertionError),
    "rows of the next sequence are stored": (
        "q + STORE_ROWS > p.len_q", "q > p.len_q",
        check_that_a_sequence_past_its_limit_is_cut, KernelFault),
    "zeros that wgmma has not been shown": (
        "(tile[b])[i] = {};\n  fence_proxy_async();\n", "(tile[b])[i] = {};\n",
        check_that_neighbours_have_no_influence, KernelFault),
    "zeros while the first warpgroup reads": (
        "if (VARLEN && turn.warpgroup == 0)", "if (VARLEN && turn.warpgroup == 1)",
        check_that_neighbours_have_no_influence, KernelFault),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, check, how = WRONG[what]
    clean()  # by the kernel as it is
    plant(old, new, tmp_path, monkeypatch)
    with pytest.raises(how):
        check()
