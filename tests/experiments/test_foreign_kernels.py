"""experiments/accuracy/foreign_kernels.py: its bounds, its table, and the kernels that are here."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from experiments._harness import foreign_cuda, foreign_cute, foreign_wheels, recording
from experiments._harness.foreign import Case, Launcher, Missing, Sources, equal, share
from experiments._harness.foreign_attention import Gradients, attention
from experiments._harness.foreign_cuda import device_code
from experiments.accuracy import foreign_kernels

OURS = """// compiled today
.version 8.0
.target sm_80
.address_size 64
.visible .entry ours(.param .u64 x, .param .u64 scratch) {
  .reg .b32 %r<3>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd2, %r1, 4, %rd1;
  st.global.u32 [%rd2], %r1;
  ret;
}
"""


def ours(run: Launcher, rng: np.random.Generator) -> float:
    x = rng.integers(0, 9, 32).astype(np.int32)
    run(OURS, "ours", 1, 32, {"x": x})
    return equal(x, np.arange(32))


def outside(run: Launcher, rng: np.random.Generator) -> float:
    run.mends = [("outside x", r"%r1, 8,", "%r1, 4,")]
    run(OURS.replace("%r1, 4,", "%r1, 8,"), "ours", 1, 32, {"x": np.zeros(32, np.int32)})
    return share(np.array([1.5]), np.array([1.0]), 0.25)


def unknown(run: Launcher, rng: np.random.Generator) -> float:
    run(OURS.replace("ret;", "nothing.b32 %r1;"), "ours", 1, 32, {"x": np.zeros(32, np.int32)})
    return 0.0


def test_rows_of_the_record(tmp_path: Path) -> None:
    sources = Sources({"here": tmp_path})
    rows = [
        foreign_kernels.outcome(Case(f.__name__, "here", f), sources, 0, tmp_path)
        for f in (ours, outside, unknown)
    ]
    assert [row["became"] for row in rows] == ["within its bound", "outside", "not modelled"]
    assert rows[0]["share"] == 0 and rows[0]["instructions"] == 5 and rows[0]["launches"] == 1
    assert len({row["ptx_sha256"] for row in rows}) == 3
    assert rows[1]["share"] == 2 and "outside x" in rows[1]["findings"][0]
    assert "nothing.b32" in rows[2]["why"]
    assert (tmp_path / "here_ours.0.ptx").read_text() == OURS
    with pytest.raises(Missing, match="no checkout of there"):
        foreign_kernels.outcome(Case("a", "there", ours), Sources({"there": None}), 0)
    with pytest.raises(Missing, match="no-such-package is not installed"):
        foreign_kernels.outcome(Case("a", "no-such-package", ours), Sources({}), 0)


def test_the_page_has_the_table_of_the_record() -> None:
    record = recording.stored("foreign_kernels")
    lines = foreign_kernels.table(record)
    page = foreign_kernels.PAGE.read_text(encoding="utf-8")
    assert "\n".join(lines) in page
    within = [x for x in record["kernels"] if x["became"] == "within its bound"]
    assert len(within) >= 15 and len(record["kernels"]) >= 20
    assert any(x["package"] == "flash-attn-4" and x["kernel"].startswith("forward") for x in within)
    assert all(0 <= x["share"] <= 1 for x in within)


def test_device_code_leaves_the_host_out() -> None:
    text = """
#include <stdio.h>
#include <cooperative_groups.h>
#define WIDE \\
  32
namespace cg = cooperative_groups;
int count = 3;  // of the host
template <class T> struct Shared { __device__ T* get() { return 0; } };
template <int N> __global__ void kernel(float* x) { if (x) { x[0] = N; } }
template <class T> void start(T* x) { kernel<1><<<1, 1>>>(x); }
__device__ unsigned counter = 0;
"""
    found = device_code(text)
    assert "kernel(float* x)" in found and "counter" in found and "struct Shared" in found
    assert "WIDE" in found and "cooperative_groups.h" in found
    assert "stdio" not in found and "start" not in found and "int count" not in found


def test_gradients_are_those_of_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 2, 9, 8)).astype(np.float16) for _ in range(4))
    o, lse = attention(q, k, v, 0.5)
    exact = Gradients.of(q, k, v, o, lse, do, 0.5)
    assert exact.share(exact.dq, exact.dk, exact.dv) == 0
    step = 2.0**-6
    for name, of in (("dq", q), ("dk", k), ("dv", v)):
        moved = [x.astype(np.float64) for x in (q, k, v)]
        index = "qkv".index(name[1])
        loss = []
        for sign in (1, -1):
            at = [x.copy() for x in moved]
            at[index][0, 1, 3, 2] += sign * step
            loss.append((attention(*at, 0.5)[0] * do).sum())
        slope = (loss[0] - loss[1]) / (2 * step)
        assert abs(slope - getattr(exact, name)[0, 1, 3, 2]) < 5e-3, (name, of.shape)


CASES = [*foreign_cute.CASES, *foreign_wheels.CASES]
#: A folder with the checkouts, if there is one.
CHECKOUTS = os.environ.get("FOREIGN_CHECKOUTS", "")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *foreign_cuda.CASES], ids=lambda case: case.name)
def test_kernels_of_others_that_are_here(case: Case) -> None:
    folder = Path(CHECKOUTS) / foreign_cuda.REPOSITORY if CHECKOUTS else None
    try:
        row = foreign_kernels.outcome(case, Sources({foreign_cuda.REPOSITORY: folder}), 0)
    except Missing as missing:
        pytest.skip(str(missing))
    record = recording.stored("foreign_kernels")
    (kept,) = (x for x in record["kernels"]
               if (x["kernel"], x["package"]) == (case.name, case.package))  # fmt: skip
    assert row["became"] == kept["became"]
