"""M that rises only where weights get large: both forms of fa_tc, their mirror and their bound."""

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
from cupyattn.kernels.numerics import HEADROOM, Numerics, numerics
from cupyattn.kernels.tiles import Tiles
from cupyattn.plans import assemble, attention
from cupyattn.problem.settings import check_attention
from cupyattn.reference.attention import attention_mirror
from cupyattn.testing import verdict
from tests.support.planned import plan_attention

SOURCES = {"sm90": kc.KERNELS / "sm90" / "attn_fa_tc.cu", "portable": kc.KERNELS / "attn_fa_tc.cu"}
#: Two computing warpgroups, the fewest keys a step; the portable form's own.
TILES = {"sm90": Tiles(128, 64, 12, 2), "portable": Tiles(128, 32, 4, 2)}
ARCHS = {"sm90": "sm_90a", "portable": "sm_90"}
FORMS = pytest.mark.parametrize("form", TILES)


def rising(slope: float, len_q: int = 70, len_kv: int = 400, head_dim: int = 64) -> Any:
    """Scores that rise by `slope` in log2 units from key to key, differently in every row."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, head_dim)) / 8 for n in (len_q, len_kv, len_kv))
    q[..., 0] = np.linspace(0.5, 1.0, len_q)
    k[..., 0] = slope * np.log(2.0) * head_dim**0.5 * np.arange(len_kv)
    return tuple(x.astype(np.float16) for x in (q, k, v))


# ---- the mirror ----------------------------------------------------------------------------------


def eager(n: Numerics) -> Numerics:
    """The same, but M is the largest score so far."""
    return replace(n, headroom=0)


@FORMS
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5, -0.1])
def test_weights_keep_to_the_headroom_and_m_lags_behind(form: str, slope: float) -> None:
    q, k, v = rising(slope)
    options = {"variant": "fa_tc", "form": form, "tiles": TILES[form], "trace": True}
    _, steps = attention_mirror(q, k, v, **options)
    follows = eager(numerics("tensor_core", form, "float16"))
    _, following = attention_mirror(q, k, v, numerics=follows, **options)
    largest = max(float(step.P.max()) for step in steps)
    assert largest <= 2.0**HEADROOM
    assert all((lazy.m <= now.m).all() for lazy, now in zip(steps, following, strict=True))
    lagged = any((lazy.m < now.m).any() for lazy, now in zip(steps, following, strict=True))
    assert lagged == (slope > 0) == (largest > 1.5)
    rose = sum(int((step.alpha != 1).any()) for step in steps[1:])
    assert (rose > 0) == (slope >= 0.1)  # 0.02 a key: not 8 over all of them


@FORMS
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5])
def test_the_mirror_keeps_its_bound(form: str, slope: float) -> None:
    q, k, v = rising(slope)
    options = {"variant": "fa_tc", "form": form, "tiles": TILES[form]}
    o, lse = attention_mirror(q, k, v, return_lse=True, **options)
    report = verdict.judge(o, q, k, v, lse=lse, **options)
    assert report.passed and report.tightness < 0.05


@FORMS
def test_the_first_keys_of_a_row_may_come_late(form: str) -> None:
    """Until then M is -inf, and no weight may be taken for small."""
    q, k, v = rising(0.0)
    k = k - np.float16(20)  # weights of M = 0 would be nothing
    options = {
        "variant": "fa_tc", "form": form, "tiles": TILES[form], "causal": True, "window": (10, 0)
    }  # fmt: skip
    o, lse = attention_mirror(q, k, v, return_lse=True, **options)
    assert verdict.judge(o, q, k, v, lse=lse, **options).passed


@pytest.mark.parametrize("option", [{"softcap": True}, {"bias": True}])
def test_m_does_not_lag_with_softcap_or_bias(option: dict[str, bool]) -> None:
    assert not numerics("tensor_core", "portable", "float16", **option).headroom


# ---- the bound -----------------------------------------------------------------------------------


@FORMS
def test_headroom_costs_a_bound_and_never_tightens_it(form: str) -> None:
    q, k, v = rising(0.1)
    lags = numerics("tensor_core", form, "float16")
    assert lags.headroom == HEADROOM
    follows, lazy = (
        kernel.attention(q, k, v, numerics=n, tiles=TILES[form]) for n in (eager(lags), lags)
    )
    for tag in ("R5", "R6"):  # R2 to R4 share what perturbed scores do
        assert (lazy.terms[tag] >= follows.terms[tag]).all(), tag
    assert (lazy.total >= follows.total).all() and (lazy.lse >= follows.lse).all()
    assert (lazy.total <= 2.5 * follows.total).all()


# ---- the kernel ----------------------------------------------------------------------------------


def run(
    form: str, q: Any, k: Any, v: Any, folder: Path | None = None, **options: Any
) -> tuple[Any, Any]:
    """Run a form, or the changed one in a folder, in the interpreter."""
    call = check_attention(q, k, v, return_lse=True, **options)
    o, lse = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
    given = {"q": q, "k": k, "v": v, "o": o}
    added = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    plan = plan_attention(
        ladder.lookup("fa_tc"), call, *map(Operand.of, given.values()), tiles=TILES[form],
        arch=ARCHS[form], added={name: Operand.of(x) for name, x in added.items()},
    )  # fmt: skip
    assert plan.form == form
    if folder is not None:
        (one,) = plan.launches
        module = replace(one.module, source=folder / SOURCES[form].name)
        plan = replace(plan, launches=(replace(one, module=module),))
    interpreter.run(plan, {**given, **added, "lse": lse}, ARCHS[form])
    return o, lse


def judged(form: str, arrays: Any, found: tuple[Any, Any], **options: Any) -> verdict.Report:
    """Hold O and lse to the bound of a form."""
    o, lse = found
    return verdict.judge(
        o, *arrays, lse=lse, variant="fa_tc", form=form, tiles=TILES[form], **options
    )


def changed(folder: Path, form: str, line: str, instead: str) -> Path:
    """Lay the kernel's sources into a folder, one line of it or of its headers changed."""
    shutil.copytree(kc.KERNELS / "prims", folder / "prims")
    shutil.copy(SOURCES[form], folder)
    (file,) = (f for f in folder.rglob("*.cu*") if line in f.read_text())
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, instead))
    return folder


@FORMS
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5])
def test_the_kernel_keeps_the_bound(form: str, slope: float) -> None:
    arrays = rising(slope, len_q=64, len_kv=200)
    assert judged(form, arrays, run(form, *arrays)).passed


#: Rows without keys, with only the last key, and with keys that come late.
SPARSE = np.random.default_rng(1).random((1, 1, 70, 140)) < 0.3
SPARSE[..., 5, :] = SPARSE[..., 7, :-1] = SPARSE[..., 16:32, :100] = False
#: Behaviours of scores in the portable form, each with an option that causes it.
ADVERSARIES = {
    "rise by half an octave a key": (0.5, {"causal": True}),
    "rise in every second eight rows": (0.3, {"causal": True, "window": (60, 0)}),
    "rise behind masked keys": (0.2, {"mask": SPARSE}),
    "are far below zero": (0.0, {"mask": SPARSE}),
    "fall": (-0.1, {}),
}


@pytest.mark.parametrize("what", ADVERSARIES)
def test_the_portable_kernel_keeps_the_bound_when_scores(what: str) -> None:
    slope, options = ADVERSARIES[what]
    q, k, v = rising(slope, len_q=70, len_kv=140)
    if "second" in what:
        q[:, :, np.arange(70) // 8 % 2 == 0] = 0.0
    if "below" in what:  # where weights relative to M = 0 are nothing
        q[..., 0], k[..., 0] = 8.0, -60.0
    found = run("portable", q, k, v, **options)
    assert judged("portable", (q, k, v), found, **options).passed


def rows_beside(slope: float, folder: Path | None = None) -> Any:
    """Return the bits of rows whose scores hardly differ, the other rows' rising by `slope`."""
    q, k, v = rising(slope, len_q=64, len_kv=200)
    k[..., 0] = 0.5 * np.log(2.0) * 8 * np.arange(200)
    own = np.arange(64) // 8 % 2 == 0
    q[:, :, own] = np.random.default_rng(0).standard_normal(q[:, :, own].shape) / 64
    if not slope:
        q[:, :, ~own] = 0.0
    o, _ = run("portable", q, k, v, folder)
    return o[:, :, own].view(np.uint16)


def test_a_row_has_the_same_bits_whatever_stands_beside_it(tmp_path: Path) -> None:
    """Two rows of a lane, and all of a warp, look for their maxima together."""
    assert (rows_beside(0.5) == rows_beside(0.0)).all()
    wrong = changed(
        tmp_path, "portable", "          if (small[h]) m[h] = NEG_INF;", "         "
    )  # fmt: skip
    assert (rows_beside(0.5, wrong) != rows_beside(0.0, wrong)).any()


#: Faults of the lazy M, as (form, line of the kernel, its replacement).
WRONG = {
    "M never rises": ("sm90", "LARGEST_SUM = 256.0f", "LARGEST_SUM = 3e38f"),
    "only the first of the two rows is asked": (
        "sm90", "sum[0] <= LARGEST_SUM && sum[1] <= LARGEST_SUM", "sum[0] <= LARGEST_SUM"
    ),
    "O is not rescaled": ("sm90", "))\n        rescale(O_acc, alpha);", ")) {}"),
    "the sum of a step taken twice counts twice": (
        "sm90", "    rises = true;\n", "    rises = true;\n    state[0].l += sum[0];\n"
    ),
    "M never rises, portable": ("portable", "LARGEST_SUM = 256.0f", "LARGEST_SUM = 3e38f"),
    "only the first of the two rows is asked, portable": (
        "portable", "small[0] && small[1]", "small[0]"
    ),
    "the sum of a step taken twice counts twice, portable": (
        "portable", "        weigh(M, true);\n",
        "        state[r][0].l += sum[0];\n        weigh(M, true);\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_seen(what: str, tmp_path: Path) -> None:
    form, line, instead = WRONG[what]
    q, k, v = rising(0.3, len_q=64, len_kv=200)
    if what.startswith("only"):
        q[:, :, :8] = 0.0  # the first rows of every pair do not rise
        q[:, :, 16:24] = q[:, :, 32:40] = q[:, :, 48:56] = q[:, :, 64:] = 0.0
    found = run(form, q, k, v, changed(tmp_path, form, line, instead))
    assert not judged(form, (q, k, v), found).passed


def test_blocks_that_take_one_tile_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next Q arrives during this tile, and O leaves through the place of its Q."""
    monkeypatch.setattr(assemble, "HOPPER_BLOCKS", 1)
    attention.plan_attention.cache_clear()
    try:
        q, k, v = rising(0.05, len_q=200, len_kv=100)
        for options in ({}, {"causal": True}):
            assert judged("sm90", (q, k, v), run("sm90", q, k, v, **options), **options).passed
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
            run("sm90", q, k, v, changed(tmp_path, "sm90", line, instead))
    finally:
        attention.plan_attention.cache_clear()
