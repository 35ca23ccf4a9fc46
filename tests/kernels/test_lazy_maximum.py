"""M that rises only where weights get large: the Hopper form of fa_tc, its mirror and its bound."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyattn.arrays.operand import Operand
from cupyattn.bounds import kernel
from cupyattn.compiler import modules as kc
from cupyattn.interpret import executor as interpreter
from cupyattn.interpret.findings import KernelFault
from cupyattn.kernels import ladder
from cupyattn.kernels.numerics import HEADROOM, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import assemble, attention
from cupyattn.problem.checks import check_attention
from cupyattn.reference.mirror import attention_mirror
from cupyattn.testing import verdict
from tests.support.planned import plan_attention

SOURCE = kc.KERNELS / "sm90" / "attn_fa_tc.cu"
#: Two computing warpgroups, the fewest keys a step.
TILES = Tiles(128, 64, 12, 2)


def rising(slope: float, len_q: int = 70, len_kv: int = 400, head_dim: int = 64) -> Any:
    """Scores that rise by `slope` in log2 units from key to key, differently in every row."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, head_dim)) / 8 for n in (len_q, len_kv, len_kv))
    q[..., 0] = np.linspace(0.5, 1.0, len_q)
    k[..., 0] = slope * np.log(2.0) * head_dim**0.5 * np.arange(len_kv)
    return tuple(x.astype(np.float16) for x in (q, k, v))


# ---- the mirror ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5, -0.1])
def test_weights_keep_to_the_headroom_and_m_lags_behind(slope: float) -> None:
    q, k, v = rising(slope)
    _, steps = attention_mirror(q, k, v, variant="fa_tc", form="sm90", tiles=TILES, trace=True)
    _, eager = attention_mirror(q, k, v, variant="fa_tc", tiles=TILES, trace=True)
    largest = max(float(step.P.max()) for step in steps)
    assert largest <= 2.0**HEADROOM
    assert all((lazy.m <= now.m).all() for lazy, now in zip(steps, eager, strict=True))
    lagged = any((lazy.m < now.m).any() for lazy, now in zip(steps, eager, strict=True))
    assert lagged == (slope > 0) == (largest > 1.5)
    rose = sum(int((step.alpha != 1).any()) for step in steps[1:])
    assert (rose > 0) == (slope >= 0.1)  # 0.02 a key: not 8 over all of them


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5])
def test_the_mirror_keeps_its_bound(slope: float) -> None:
    q, k, v = rising(slope)
    o, lse = attention_mirror(q, k, v, variant="fa_tc", form="sm90", tiles=TILES, return_lse=True)
    report = verdict.judge(o, q, k, v, lse=lse, variant="fa_tc", form="sm90", tiles=TILES)
    assert report.passed and report.tightness < 0.05


def test_the_first_keys_of_a_row_may_come_late() -> None:
    """Until then M is -inf, and no weight may be taken for small."""
    q, k, v = rising(0.0)
    k = k - np.float16(20)  # weights of M = 0 would be nothing
    options = {"causal": True, "window": (10, 0)}
    o, lse = attention_mirror(
        q, k, v, variant="fa_tc", form="sm90", tiles=TILES, return_lse=True, **options
    )
    assert verdict.judge(
        o, q, k, v, lse=lse, variant="fa_tc", form="sm90", tiles=TILES, **options
    ).passed


# ---- the bound -----------------------------------------------------------------------------------


def test_headroom_costs_a_bound_and_never_tightens_it() -> None:
    q, k, v = rising(0.1)
    eager, lazy = (
        kernel.attention(
            q, k, v, numerics=replace(numerics("tensor_core", "sm90", "float16"), headroom=n),
            tiles=TILES,
        )
        for n in (0, HEADROOM)
    )  # fmt: skip
    for tag in ("R5", "R6"):  # R2 to R4 share what perturbed scores do
        assert (lazy.terms[tag] >= eager.terms[tag]).all(), tag
    assert (lazy.total >= eager.total).all() and (lazy.lse >= eager.lse).all()
    assert (lazy.total <= 2.5 * eager.total).all()


# ---- the kernel ----------------------------------------------------------------------------------


def run(
    q: Any, k: Any, v: Any, folder: Path | None = None, tiles: Tiles = TILES, **options: Any
) -> tuple[Any, Any]:
    """Run the Hopper form, or the changed one in a folder, in the interpreter."""
    call = check_attention(q, k, v, return_lse=True, **options)
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    plan = plan_attention(
        ladder.lookup("fa_tc"), call, *map(Operand.of, (q, k, v, o)), tiles=tiles, arch="sm_90a"
    )
    assert plan.form == "sm90"
    if folder is not None:
        (one,) = plan.launches
        module = replace(one.module, source=folder / SOURCE.name)
        plan = replace(plan, launches=(replace(one, module=module),))
    interpreter.run(plan, {"q": q, "k": k, "v": v, "o": o, "lse": lse}, "sm_90a")
    return o, lse


def changed(folder: Path, line: str, instead: str) -> Path:
    """Lay the kernel's sources into a folder, one line of it or of its headers changed."""
    shutil.copytree(kc.KERNELS / "prims", folder / "prims")
    shutil.copy(SOURCE, folder)
    (file,) = (f for f in folder.rglob("*.cu*") if line in f.read_text())
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, instead))
    return folder


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5])
def test_the_kernel_keeps_the_bound(slope: float) -> None:
    q, k, v = rising(slope, len_q=64, len_kv=200)
    o, lse = run(q, k, v)
    verdict.assert_within_bound(o, q, k, v, lse=lse, variant="fa_tc", form="sm90", tiles=TILES)


#: What may be wrong with the lazy M, as (line of the kernel, what stands there instead).
WRONG = {
    "M never rises": ("LARGEST_SUM = 256.0f", "LARGEST_SUM = 3e38f"),
    "only the first of the two rows is asked": (
        "sum[0] <= LARGEST_SUM && sum[1] <= LARGEST_SUM", "sum[0] <= LARGEST_SUM"
    ),
    "O is not rescaled": ("))\n        rescale(O_acc, alpha);", ")) {}"),
    "the sum of a step taken twice counts twice": (
        "    rises = true;\n", "    rises = true;\n    state[0].l += sum[0];\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_seen(what: str, tmp_path: Path) -> None:
    q, k, v = rising(0.3, len_q=64, len_kv=200)
    if what.startswith("only"):
        q[:, :, :8] = 0.0  # the first rows of every pair do not rise
        q[:, :, 16:24] = q[:, :, 32:40] = q[:, :, 48:56] = q[:, :, 64:] = 0.0
    o, lse = run(q, k, v, changed(tmp_path, *WRONG[what]))
    report = verdict.judge(o, q, k, v, lse=lse, variant="fa_tc", form="sm90", tiles=TILES)
    assert not report.passed


def test_blocks_that_take_one_tile_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next Q arrives during this tile, and O leaves through the place of its Q."""
    monkeypatch.setattr(assemble, "HOPPER_BLOCKS", 1)
    attention.plan_attention.cache_clear()
    try:
        q, k, v = rising(0.05, len_q=200, len_kv=100)
        for options in ({}, {"causal": True}):
            o, lse = run(q, k, v, **options)
            verdict.assert_within_bound(
                o, q, k, v, lse=lse, variant="fa_tc", form="sm90", tiles=TILES, **options
            )
    finally:
        attention.plan_attention.cache_clear()


#: Hazards between one tile and the next, and what the interpreter says of each.
HAZARDS = {
    "turns that order nothing: O overwrites Q before all warps' products have read it": (
        "named_barrier_sync(1 + warpgroup, THREADS);", "", "arrive at barrier 1 a second time"),
    "O is not shown to the copy engine": (
        "  fence_proxy_async();\n  __syncwarp();", "  __syncwarp();", "race"),
    "the warp's rows are stored before they are complete": (
        "  __syncwarp();  // the warp's rows are complete\n", "", "race"),
    "the next Q is let in before O has left": (
        "    if (leaving && lane_id() == 0) {\n      cp_async_bulk_wait_group_read();\n",
        "    if (leaving && lane_id() == 0) {\n", "in flight"),
}  # fmt: skip


@pytest.mark.parametrize("what", HAZARDS)
def test_hazards_between_tiles_are_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, instead, kind = HAZARDS[what]
    monkeypatch.setattr(assemble, "HOPPER_BLOCKS", 1)
    attention.plan_attention.cache_clear()
    try:
        q, k, v = rising(0.0, len_q=270, len_kv=64)
        with pytest.raises(KernelFault, match=kind):
            run(q, k, v, changed(tmp_path, line, instead))
    finally:
        attention.plan_attention.cache_clear()
