"""Instructions that a warp executes together, but which order no accesses of its lanes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.interpret.test_interpret_findings import Case

CASES = [
    Case(
        "ldmatrix orders no lanes", "race", """
  __shared__ alignas(16) int s[256];
  uint32_t own[4], pair[4];
  for (int j = 0; j < 4; ++j) s[4 * i + j] = x[i];
  ldmatrix_x4(own, shared_address(&s[4 * i]));
#ifdef MENDED
  __syncwarp();
#endif
  ldmatrix_x4(pair, shared_address(&s[4 * (i ^ 1)]));  // here
  y[i] = x[i] + (own[0] + pair[0] > 1000);
""",
        address=16, says="after the write by warp 0 lane 1",
    ),
    Case(
        "a write after another lane's ldmatrix", "race", """
  __shared__ alignas(16) int s[256];
  uint32_t r[4];
  for (int j = 0; j < 4; ++j) s[4 * i + j] = x[i];
  __syncwarp();
  ldmatrix_x4(r, shared_address(&s[4 * (i ^ 1)]));
#ifdef MENDED
  __syncwarp();
#endif
  s[4 * i] = r[0];  // here
  y[i] = x[i];
""",
        address=0, says="after the read by warp 0 lane 1",
    ),
    Case(
        "stmatrix orders no lanes", "race", """
  __shared__ alignas(16) int s[256];
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
               ::"r"(shared_address(&s[4 * (i / 32 * 8 + i % 8)])), "r"(x[i]) : "memory");
#ifdef MENDED
  __syncwarp();
#endif
  y[i] = x[i] + (s[4 * (i / 32 * 8 + i % 8)] < 0);  // here
""",
        who=(0, 0, 8), address=0, says="after the write by warp 0 lane 0", arch="sm_90a",
    ),
    Case(
        "mma and shuffles order no lanes", "race", """
  __shared__ int s[64];
  const uint32_t r[4] = {};
  float sum[4] = {};
  s[i] = x[i];
  mma_m16n8k16<__half>(sum, r, r[0], r[1]);
  const int first = __shfl_sync(FULL_WARP, i, 0) + __any_sync(FULL_WARP, sum[0] > 1);
#ifdef MENDED
  __syncwarp();
#endif
  y[i] = s[i ^ 1] + (first < 0);  // here
""",
        address=4, says="after the write by warp 0 lane 1",
        result=lambda x: x.reshape(-1, 2)[:, ::-1].ravel(),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lanes_are_not_ordered(case: Case, tmp_path: Path) -> None:
    """By the programming guide and the PTX ISA, only ``bar.warp.sync`` orders them."""
    finding = case.fault(tmp_path)
    assert finding.kind == "race" and case.says in finding.message
    assert finding.location is not None
    assert finding.location.chain()[-1].line == case.line, finding
    assert ((finding.block, finding.warp, finding.lane), finding.address) == (
        case.who, case.address,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_syncwarp_orders_them(case: Case, tmp_path: Path) -> None:
    x = case.arguments()[0]
    np.testing.assert_array_equal(case.run(tmp_path, MENDED=1), case.result(x))
