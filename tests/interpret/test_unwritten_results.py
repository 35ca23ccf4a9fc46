"""Results are NaN before a kernel runs, so that a missing store is visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.compiler import modules as compiler
from cupyattn.interpret import executor
from tests.faults.fault_patches import put_a_line_in_place


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
        executor, "run_launch", lambda one, binary, arrays, written: seen.update(arrays)
    )
    monkeypatch.setattr(compiler, "translate", lambda *args: None)
    x = np.ones((1, 1, 8, 16), np.float16)
    plan = ca.plan(x, x, x, variant="unfused").plans[-1]
    executor.run(plan, {"q": x, "k": x, "v": x})
    (work,) = plan.workspace
    assert not work.zeros and np.isnan(seen[work.name]).all()
