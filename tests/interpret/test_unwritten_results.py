"""Results are NaN before a kernel runs, so that a missing store is visible.

A launch that reads scratch memory that none has written is a finding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler import modules as compiler
from cupyattn.interpret import executor
from cupyattn.interpret.findings import KernelFault
from tests.faults.fault_patches import put_a_line_in_place
from tests.support.interpreted import run_ptx


def call() -> dict[str, Any]:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1, 20, 16)).astype(np.float16)
    return {"q": q, "k": k, "v": v, "lengths_q": np.array([20, 3]), "variant": "fa",
            "backend": "interpret", "return_lse": True}  # fmt: skip


def test_padding_is_cleared_to_the_last_channel() -> None:
    o, lse = ca.attention(**call())
    assert not o[1, :, 3:].any() and (lse[1, :, 3:] == -np.inf).all()


@pytest.mark.parametrize(
    ("line", "less"),
    [
        ("ACCESSES = HEAD_DIM / VEC;", "ACCESSES = HEAD_DIM / VEC - 1;"),
        ("    lse_of(p, batch_head, head)[first + i] = NEG_INF;", "    ;"),
    ],
    ids=["channels", "lse"],
)  # fmt: skip
def test_a_store_less_is_seen(
    line: str, less: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_a_line_in_place("prepare/clear_padding.cu", line, less, tmp_path, monkeypatch)
    o, lse = ca.attention(**call())
    assert np.isnan(o).any() or np.isnan(lse).any()
    report = ca.testing.judge(
        o, *(call()[n] for n in "qkv"), variant="fa", lse=lse, lengths_q=call()["lengths_q"]
    )
    assert not report.passed


def test_scratch_memory_holds_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for `executor.run` and for calls, except for memory that the plan sets to zero."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        executor, "run_launch", lambda one, binary, arrays, undefined: seen.update(arrays)
    )
    monkeypatch.setattr(compiler, "translate", lambda *args: None)
    x = np.ones((1, 1, 8, 16), np.float16)
    plan = ca.plan(x, x, x, variant="unfused").plans[-1]
    executor.run(plan, {"q": x, "k": x, "v": x})
    (work,) = plan.workspace
    assert not work.zeros and np.isnan(seen[work.name]).all()


#: Lane i stores 7 at y[i] of 4 bytes, or loads from there.
STORES = """
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], 7;
"""
LOADS = STORES.replace("st.global.u32 [%rd3], 7", "ld.global.u32 %r2, [%rd3]")


def test_a_launch_reads_what_the_one_before_it_did_not_write() -> None:
    y = np.zeros(96, np.int32)
    undefined = {"y": np.ones(y.nbytes, np.bool_)}
    run_ptx(STORES, block=64, undefined=undefined, y=y)
    assert undefined["y"].tolist() == [False] * 256 + [True] * 128
    run_ptx(LOADS, block=64, undefined=undefined, y=y)
    with pytest.raises(KernelFault, match="y is read before anything was written there") as found:
        run_ptx(LOADS, block=96, undefined=undefined, y=y)
    assert found.value.finding.address == 256
    run_ptx(STORES, block=96, undefined=undefined, y=y)
    run_ptx(LOADS, block=96, undefined=undefined, y=y)
    assert not undefined


def test_a_wide_read_of_words_of_which_some_were_written() -> None:
    y = np.zeros(96, np.int32)
    undefined = {"y": np.ones(y.nbytes, np.bool_)}
    run_ptx(STORES, block=3, undefined=undefined, y=y)
    wide = LOADS.replace("ld.global.u32 %r2", "ld.global.v2.u32 {%r2, %r3}").replace(", 4;", ", 8;")
    run_ptx(wide, block=1, undefined=undefined, y=y)
    with pytest.raises(KernelFault, match="y is read before anything was written there"):
        run_ptx(wide, block=2, undefined=undefined, y=y)
