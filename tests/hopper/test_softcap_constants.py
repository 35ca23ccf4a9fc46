"""A softcap so large that its last constant shows: R3 of the Hopper forms in lse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyattn as ca
from cupyattn.testing import Report, judge
from tests.faults.fault_patches import put_a_line_in_place

#: Scores of about 1.2 times this, where tanh is no polynomial and has not saturated.
SOFTCAP = 512.0


def judged() -> Report:
    rng = np.random.default_rng(0)
    q = np.full((1, 1, 8, 64), 3.0, np.float16)
    k = (26 + rng.uniform(-0.1, 0.1, (1, 1, 64, 64))).astype(np.float16)
    v = rng.standard_normal((1, 1, 64, 64)).astype(np.float16)
    options: dict[str, Any] = {"variant": "fa_tc", "softcap": SOFTCAP}
    where = {"arch": "sm_90a", "backend": "interpret"}
    o, lse = ca.attention(q, k, v, return_lse=True, **options, **where)
    form = ca.kernel_form(q, k, v, **options, **where)
    assert form["form"] == "sm90"
    return judge(o, q, k, v, lse=lse, **options, **form)


def test_a_thousandth_of_the_last_constant_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In P such an error is nearly the same for all keys, and is lost in the bound of O."""
    right = judged()
    assert right.passed and right.lse_ratio is not None and right.lse_ratio > 1e-3
    put_a_line_in_place(
        "prims/score/softcap.cuh", "fmaf(-2.0f * p.softcap", "fmaf(-1.999f * p.softcap",
        tmp_path, monkeypatch,
    )  # fmt: skip
    report = judged()
    assert report.lse_ratio is not None and report.lse_ratio > 1, str(report)
