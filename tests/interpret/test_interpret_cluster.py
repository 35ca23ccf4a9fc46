"""Clusters of blocks in the interpreter: findings, and correct kernels without findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupyattn.errors import KernelLaunchError, UnsupportedError
from cupyattn.interpret import KernelFault, executor, schedule
from cupyattn.interpret.executor import run_kernel
from tests.interpret.raw_kernels import spec

#: Each thread writes a row, and reads the row of its place in the next block.
KERNEL = """#include "prims/instructions/cluster.cuh"
extern "C" __global__ CLUSTER_OF_SPLITS void kernel(const float* x, float* y) {
  __shared__ alignas(16) float row[64][4];
  const int rank = blockIdx.x %% SPLITS, next = (rank + 1) %% SPLITS, i = threadIdx.x;
  const int at = blockIdx.x * 64 + i;
  %s
}
"""
WRITE = "for (int j = 0; j < 4; ++j) row[i][j] = x[at];"
READ = "y[at] = load_from_block(row[i], next).v[3];"
SYNC = "cluster_sync();"
ARRIVE = 'asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");'
RELAXED = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");'
WAIT = 'asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");'
#: One warp hands on what both did.
ONE_RELEASES = f"if (i < 32) {{ {ARRIVE} }} else {{ {RELAXED} }}"
MEET = "__syncthreads();"
STORE = """{
  uint32_t to;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(row[i])), "r"(next));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(1.0f) : "memory");
}"""


def run(folder: Path, *body: str, grid: int = 8, splits: int = 4) -> tuple[np.ndarray, ...]:
    x = np.arange(grid * 64, dtype=np.float32)
    x.flags.writeable = False
    y = np.zeros_like(x)
    module = spec(folder, KERNEL % "\n  ".join(body), CFG_SPLITS=splits)
    run_kernel(module, "kernel", [x, y], block=64, grid=grid)
    return x, y


@pytest.mark.parametrize(
    "body",
    [
        (WRITE, SYNC, READ, SYNC),
        (WRITE, ARRIVE, WAIT, READ, ARRIVE, WAIT),
        # threads that have exited are not waited for
        ("if (i >= 32) return;", WRITE, SYNC, READ, SYNC),
        # read, and written anew after everybody has read
        (WRITE, SYNC, READ, SYNC, "row[i][3] += 1000;", SYNC, READ, SYNC),
        (WRITE, MEET, ONE_RELEASES, WAIT, READ, SYNC),
        # what was read, too
        (WRITE, SYNC, READ, MEET, ONE_RELEASES, WAIT, "row[i][3] += 1000;", SYNC, READ, SYNC),
    ],
    ids=["as one", "in two", "with threads that have exited", "twice", "by a warp", "reads by one"],
)
def test_what_is_ordered_is_no_finding(body: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(executor, "MEMORY_BUDGET", 1)  # a cluster at a time
    x, y = run(tmp_path, *body)
    expected = x.reshape(2, 4, 64)[:, [1, 2, 3, 0]].copy()
    if "row[i][3] += 1000;" in body:
        expected += 1000
    if body[0].startswith("if"):
        expected[..., 32:] = 0
    np.testing.assert_array_equal(y, expected.ravel())
    with schedule(seed=1):
        np.testing.assert_array_equal(run(tmp_path, *body)[1], y)


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ((READ, SYNC), "never written"),
        ((WRITE, READ, SYNC), "nothing orders that after the write by block"),
        # an arrival that hands nothing on
        ((WRITE, RELAXED, WAIT, READ, SYNC), "nothing orders that after the write by block"),
        # by a warp, which came after nothing that the other did
        ((WRITE, ONE_RELEASES, WAIT, READ, SYNC), "nothing orders that after the write by block"),
        (
            (WRITE, SYNC, READ, ONE_RELEASES, WAIT, WRITE, SYNC),
            "is written, and nothing orders that after the read",
        ),
        # or before they met
        (
            (WRITE, MEET, WRITE, ONE_RELEASES, WAIT, READ, SYNC),
            "nothing orders that after the write by block",
        ),
        # written after the arrival, read after the wait
        ((WRITE, ARRIVE, WRITE, WAIT, READ, SYNC), "nothing orders that after the write by block"),
        # read before the wait
        ((WRITE, ARRIVE, READ, WAIT, SYNC), "nothing orders that after the write by block"),
        ((WRITE, SYNC, READ), "ends, and nothing orders that after the read|has ended"),
        ((WRITE, SYNC, READ, WRITE, SYNC), "is written, and nothing orders that after the read"),
        ((WRITE, ARRIVE, ARRIVE), "arrives again"),
        ((WRITE, WAIT), "has not arrived"),
        ((WRITE, "if (rank == 1) __trap();", SYNC), "stopped itself"),
        (
            (WRITE, 'if (i < 32) asm volatile("bar.sync 1, 64;");', SYNC),
            "256 at the barrier of their cluster",
        ),
        ((WRITE, SYNC, READ.replace("next", "rank + 1"), SYNC), "rank outside the cluster"),
        ((WRITE, SYNC, READ.replace("row[i]", "row[i + 1]"), SYNC), "outside shared memory"),
    ],
)
def test_what_is_not_ordered_is_found(body: tuple[str, ...], finding: str, tmp_path: Path) -> None:
    with pytest.raises(KernelFault, match=finding):
        run(tmp_path, *body)


def test_addresses_have_the_rank_of_their_block(tmp_path: Path) -> None:
    """As on a device, where nothing but the lower bits may get into a descriptor."""
    own = "y[at] = row[i][0] + float(shared_address(row) >> 24);"
    x, y = run(tmp_path, WRITE, own)
    np.testing.assert_array_equal(y - x, np.tile(np.repeat([1, 2, 3, 4], 64), 2))
    _, y = run(tmp_path, WRITE, own, splits=1)
    np.testing.assert_array_equal(y, x)


def test_what_it_does_not_know_it_says(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not know st.shared::cluster.f32"):
        run(tmp_path, WRITE, SYNC, STORE, SYNC)
    with pytest.raises(KernelLaunchError, match="clusters of 4 blocks, got a grid of 6"):
        run(tmp_path, WRITE, SYNC, READ, SYNC, grid=6)


#: Each block passes rows on to the next one by the copy engine, all through one place.
RING = """#include "prims/instructions/cluster.cuh"
#include "prims/instructions/tma.cuh"
extern "C" __global__ CLUSTER_OF_SPLITS void kernel(const float* x, float* y) {
  __shared__ alignas(16) float row[SPLITS][64];
  __shared__ Mbarrier full, empty;
  const int rank = blockIdx.x %% SPLITS, next = (rank + 1) %% SPLITS, before = next ^ 2;
  const int i = threadIdx.x;
  if (i == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int r = 0; r < 3; ++r) {
    %s
  }
  %s
}
"""
READ_BY_NEXT = "mbarrier_wait_parity(empty, r % 2 ^ 1);"
STORE_ROW = "row[rank][i] = x[blockIdx.x * 64 + i] + r;"
FENCE = "fence_proxy_async();"
COPY = """if (i == 0) {
      mbarrier_arrive_expect_tx(full, sizeof(row[0]));
      cp_async_bulk_to_block(row[rank], sizeof(row[0]), full, next);
    }"""
ARRIVED = "mbarrier_wait_parity(full, r % 2);"
TAKE = "y[blockIdx.x * 64 + i] = row[before][i];"
GIVE_BACK = "if (i == 0) mbarrier_arrive_in_block(empty, before);"
PASSED_ON = (READ_BY_NEXT, STORE_ROW, FENCE, MEET, COPY, ARRIVED, TAKE, MEET, GIVE_BACK)


def pass_on(folder: Path, *body: str, end: str = SYNC) -> tuple[np.ndarray, ...]:
    x = np.arange(8 * 64, dtype=np.float32)
    y = np.zeros_like(x)
    module = spec(folder, RING % ("\n    ".join(body), end), CFG_SPLITS=4)
    run_kernel(module, "kernel", [x, y], block=64, grid=8)
    return x, y


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_the_engine_passes_on(seed: int, tmp_path: Path) -> None:
    with schedule(seed=seed):
        x, y = pass_on(tmp_path, *PASSED_ON)
    np.testing.assert_array_equal(y, np.roll(x.reshape(2, 4, 64), 1, axis=1).ravel() + 2)


@pytest.mark.parametrize(
    ("left_out", "finding"),
    [
        (READ_BY_NEXT, "is written while an asynchronous|copy engine read it|read by block"),
        (FENCE, "no fence.proxy.async stands"),
        (ARRIVED, "asynchronous copy to it is not waited for|before anything was written"),
    ],
)
def test_what_the_engine_passes_on_too_early(left_out: str, finding: str, tmp_path: Path) -> None:
    with pytest.raises(KernelFault, match=finding):
        pass_on(tmp_path, *(line for line in PASSED_ON if line != left_out))


def test_a_row_given_back_before_all_have_read_it(tmp_path: Path) -> None:
    with pytest.raises(KernelFault, match="nothing orders that after the read by block"):
        pass_on(tmp_path, *PASSED_ON[:-2], GIVE_BACK)


def test_a_block_that_ended_takes_no_arrivals(tmp_path: Path) -> None:
    end = f'if (rank != 1) asm volatile("exit;"); {GIVE_BACK}'
    with pytest.raises(KernelFault, match="is accessed, and that block has ended"):
        pass_on(tmp_path, *PASSED_ON, end=end)
