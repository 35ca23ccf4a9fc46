"""Habits of other people's kernels, in small ones of ours: barriers, locks, the copy engine."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyattn import interpret
from cupyattn.errors import UnsupportedError
from cupyattn.interpret import machine

FIRST_TURN = """
extern "C" __global__ void first_turn(int* y) {
  __shared__ int tickets;
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    tickets = 0;
    asm volatile("bar.arrive 1, 64;" ::: "memory");  // its own first turn
  }
  for (int turn = 0; turn < 2; turn++) {
    asm volatile("bar.sync %0, 64;" :: "r"(1 + warp) : "memory");
    if (threadIdx.x % 32 == 0) y[2 * turn + warp] = tickets++;
    __syncwarp();
    asm volatile("bar.arrive %0, 64;" :: "r"(2 - warp) : "memory");
  }
}
"""


def test_a_warp_hands_itself_the_first_turn() -> None:
    y = np.full(4, -1, np.int32)
    interpret.launch(FIRST_TURN, "first_turn", 1, 64, {"y": y})
    assert y.tolist() == [0, 1, 2, 3]


def test_without_its_first_turn_no_warp_has_one() -> None:
    source = FIRST_TURN.replace('asm volatile("bar.arrive 1, 64;" ::: "memory");', "")
    with pytest.raises(interpret.KernelFault, match="deadlock"):
        interpret.launch(source, "first_turn", 1, 64, {"y": np.zeros(4, np.int32)})


SPIN = """
extern "C" __global__ void spin(int* lock, int* y) {
  if (threadIdx.x == 0) {
    int taken;
    do
      asm volatile("atom.acquire.gpu.cas.b32 %0, [%1], 0, 1;"
          : "=r"(taken) : "l"(lock) : "memory");
    while (taken);
  }
  __syncthreads();
  y[threadIdx.x] = 2 * y[threadIdx.x] + blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    int old;
    asm volatile("atom.release.gpu.exch.b32 %0, [%1], 0;" : "=r"(old) : "l"(lock) : "memory");
  }
}
"""


def test_blocks_that_spin_for_a_lock_let_its_holder_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_SEGMENTS", 20_000)
    y, lock = np.ones(32, np.int32), np.zeros(1, np.int32)
    interpret.launch(SPIN, "spin", 3, 32, {"lock": lock, "y": y})
    assert lock[0] == 0 and (y == y[0]).all() and y[0] != 1


LAST = """
extern "C" __global__ void last(unsigned* ticket, int* parts, int* y) {
  if (threadIdx.x) return;
  parts[blockIdx.x] = blockIdx.x + 1;
  unsigned mine;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], 99;" : "=r"(mine) : "l"(ticket) : "memory");
  if (mine == gridDim.x - 1)
    for (int i = 0; i < gridDim.x; i++) *y += parts[i];
}
"""


@pytest.mark.parametrize("ordered", [True, False])
def test_the_last_block_sees_what_blocks_before_it_released(ordered: bool) -> None:
    source = LAST if ordered else LAST.replace("acq_rel", "relaxed")
    args = {"ticket": np.zeros(1, np.uint32), "parts": np.zeros(4, np.int32),
            "y": np.zeros(1, np.int32)}  # fmt: skip
    if not ordered:
        with pytest.raises(interpret.KernelFault, match="parts is read, and nothing orders"):
            interpret.launch(source, "last", 4, 32, args)
        return
    interpret.launch(source, "last", 4, 32, args)
    assert args["y"][0] == 1 + 2 + 3 + 4


STORE_BOX = """
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void store_box(const __grid_constant__ Map map) {
  alignas(128) __shared__ float tile[4 * 32];
  unsigned t = __cvta_generic_to_shared(tile);
  for (int i = threadIdx.x; i < 128; i += 32) tile[i] = i;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  int column = COLUMN;
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, 0}], [%2];"
      :: "l"(&map), "r"(column), "r"(t) : "memory");
  asm volatile("cp.async.bulk.commit_group;");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
"""


@pytest.mark.parametrize("column", ["0", "threadIdx.x / 16 * 4"])
def test_lanes_of_a_warp_that_store_one_box_store_it_once(column: str) -> None:
    y = np.zeros((4, 64), np.float32)
    args = [interpret.TensorMap(y, (4, 32), 128)]
    source = STORE_BOX.replace("COLUMN", column)
    if column != "0":  # boxes that overlap
        with pytest.raises(interpret.KernelFault, match="race"):
            interpret.launch(source, "store_box", 1, 32, args, arch="sm_90a")
        return
    interpret.launch(source, "store_box", 1, 32, args, arch="sm_90a")
    assert np.unique(y[:, :32]).size == 128 and not y[:, 32:].any()


#: Bytes from shared memory to x, which may be added to its contents.
TAKE = """
extern "C" __global__ void take(float* x, int shift) {
  alignas(16) __shared__ float s[32];
  s[threadIdx.x] = threadIdx.x;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x == 0) {
    unsigned source = __cvta_generic_to_shared(s);
    asm volatile("COPY [%0], [%1], 64;" :: "l"(x + 4 + shift), "r"(source) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""
BYTES = "cp.async.bulk.global.shared::cta.bulk_group"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"


@pytest.mark.parametrize(("copy", "kept"), [(BYTES, 0), (ADD, 1)])
def test_bytes_leave_shared_memory(copy: str, kept: int) -> None:
    x = np.full(24, 10, np.float32)
    args = {"x": x, "shift": np.int32(0)}
    source = TAKE.replace("COPY", copy)
    interpret.launch(source, "take", 1 + kept, 32, args, arch="sm_90a")  # blocks may add at once
    added = 2 * np.arange(16) + 10 if kept else np.arange(16)
    np.testing.assert_array_equal(x[4:20], added)
    assert (x[:4] == 10).all() and (x[20:] == 10).all()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fence.proxy.async.shared::cta;", "", "race"),
        ("cp.async.bulk.wait_group 0;", "", "in flight"),
        ("x + 4 + shift", "x + 1 + shift", "misaligned"),
        ("x + 4 + shift", "x + 12 + shift", "out of bounds"),
    ],
)
def test_faults_of_such_copies_are_found(old: str, new: str, says: str) -> None:
    source = TAKE.replace("COPY", ADD).replace(old, new)
    args = {"x": np.zeros(24, np.float32), "shift": np.int32(0)}
    with pytest.raises(interpret.KernelFault, match=says):
        interpret.launch(source, "take", 1, 32, args, arch="sm_90a")


#: A block of a cluster that names its own shared memory, or another block's.
MAPPED = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) mapped(const int* x, int* y, int other) {
  alignas(128) __shared__ int s[32];
  __shared__ unsigned long long bar;
  unsigned t = __cvta_generic_to_shared(s), b = __cvta_generic_to_shared(&bar), rank, target;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(target) : "r"(t), "r"(rank ^ other));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], 128, [%2];" :: "r"(target), "l"(x), "r"(b) : "memory");
  }
  __syncthreads();
  int done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        " selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(b) : "memory");
  y[32 * blockIdx.x + threadIdx.x] = s[threadIdx.x];
}
"""


def test_a_copy_to_the_own_block_by_its_address_in_the_cluster() -> None:
    x, y = np.arange(32, dtype=np.int32), np.zeros(64, np.int32)
    args = {"x": x, "y": y, "other": np.int32(0)}
    interpret.launch(MAPPED, "mapped", 2, 32, args, arch="sm_90a")
    assert y.tolist() == [*x, *x]
    args["other"] = np.int32(1)
    with pytest.raises(UnsupportedError, match=r"cp\.async\.bulk\.shared::cluster"):
        interpret.launch(MAPPED, "mapped", 2, 32, args, arch="sm_90a")


STRUCTS = """
struct Tensor { float* data; int rows, columns; long long stride; };
extern "C" __global__ void structs(char first, Tensor x, double scale) {
  int row = threadIdx.x / x.columns, column = threadIdx.x % x.columns;
  if (row < x.rows) x.data[row * x.stride + column] *= scale * first;
}
"""


def test_a_tuple_is_a_struct_with_pointers() -> None:
    x = np.ones((3, 4), np.float32)
    tensor = (x, np.int32(3), np.int32(2), np.int64(4))
    args = {"first": np.int8(3), "x": tensor, "scale": np.float64(2)}
    interpret.launch(STRUCTS, "structs", 1, 32, args)
    assert x.tolist() == [[6, 6, 1, 1]] * 3
    args["x"] = tensor[:3]
    with pytest.raises(TypeError, match="parameter x of structs has 24 bytes, got 16"):
        interpret.launch(STRUCTS, "structs", 1, 32, args)


def test_a_thread_has_248_registers_at_launch_where_an_sm_has_more() -> None:
    source = """
extern "C" __global__ void __launch_bounds__(256, 1) grow(int* y) {
  if (threadIdx.x < 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 248;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
  y[threadIdx.x] = 1;
}"""
    y = np.zeros(256, np.int32)
    interpret.launch(source, "grow", 1, 256, [y], arch="sm_90a")
    assert y.all()


@pytest.mark.parametrize("order", ["m8n8.x2", "x2.m8n8"])
def test_stmatrix_names_tiles_and_their_number_in_any_order(order: str) -> None:
    source = """
extern "C" __global__ void store(int* y) {
  alignas(16) __shared__ int s[64];
  unsigned row = __cvta_generic_to_shared(s + threadIdx.x % 16 * 4);
  asm volatile("stmatrix.sync.aligned.ORDER.shared.b16 [%0], {%1, %2};"
      :: "r"(row), "r"(threadIdx.x), "r"(threadIdx.x + 32) : "memory");
  __syncwarp();
  y[threadIdx.x] = s[threadIdx.x];
  y[threadIdx.x + 32] = s[threadIdx.x + 32];
}""".replace("ORDER", order)
    y = np.zeros(64, np.int32)
    interpret.launch(source, "store", 1, 32, [y], arch="sm_90a")
    assert y.tolist() == list(range(64))


FENCED = """
extern "C" __global__ void fenced(unsigned* ticket, int* parts, int* y) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) parts[blockIdx.x] = blockIdx.x + 1;
  __threadfence();  // before
  if (threadIdx.x == 0) is_last = atomicInc(ticket, 99) == gridDim.x - 1;
  __syncthreads();
  if (!is_last || threadIdx.x) return;
  __threadfence();  // behind
  for (int i = 0; i < gridDim.x; i++) *y += parts[i];
}
"""


@pytest.mark.parametrize("gone", ["", "__threadfence();  // before", "__threadfence();  // behind"])
def test_fences_order_blocks_with_a_relaxed_operation_between_them(gone: str) -> None:
    source = FENCED.replace(gone, "") if gone else FENCED
    args = {"ticket": np.zeros(1, np.uint32), "parts": np.zeros(4, np.int32),
            "y": np.zeros(1, np.int32)}  # fmt: skip
    if gone:
        with pytest.raises(interpret.KernelFault, match="parts is read, and nothing orders"):
            interpret.launch(source, "fenced", 4, 64, args)
        return
    interpret.launch(source, "fenced", 4, 64, args)
    assert args["y"][0] == 1 + 2 + 3 + 4


def test_a_ticket_in_shared_memory_orders_no_blocks() -> None:
    """It has one address in all blocks; each block takes the last ticket of its own."""
    source = FENCED.replace("ticket, 99", "&own, 99").replace("gridDim.x - 1;", "0;")
    first = "bool is_last; __shared__ unsigned own; if (!threadIdx.x) own = 0;"
    source = source.replace("bool is_last;", first)
    args = {"ticket": np.zeros(1, np.uint32), "parts": np.zeros(4, np.int32),
            "y": np.zeros(1, np.int32)}  # fmt: skip
    with pytest.raises(interpret.KernelFault, match="parts is read, and nothing orders"):
        interpret.launch(source, "fenced", 4, 32, args)


def test_a_flag_that_a_block_polls_with_relaxed_loads_and_a_fence() -> None:
    source = """
extern "C" __global__ void poll(volatile int* flag, int* x, int* y) {
  if (threadIdx.x) return;
  if (blockIdx.x == 1) {
    *x = 7;
    __threadfence();
    *flag = 1;
  } else {
    while (!*flag) __nanosleep(20);
    __threadfence();
    *y = *x;
  }
}
"""
    args = {"flag": np.zeros(1, np.int32), "x": np.zeros(1, np.int32), "y": np.zeros(1, np.int32)}
    interpret.launch(source, "poll", 2, 32, args)
    assert args["y"][0] == 7
    with pytest.raises(interpret.KernelFault, match="x is read, and nothing orders"):
        interpret.launch(source.replace("__threadfence();\n    *y", "*y"), "poll", 2, 32,
                         {**args, "flag": np.zeros(1, np.int32)})  # fmt: skip


FP8_OF_ADA = """
#include <cuda_fp8.h>
extern "C" __global__ void pairs(const float2* x, __nv_fp8x2_storage_t* y, float* back) {
  const int i = threadIdx.x;
  y[i] = __nv_cvt_float2_to_fp8x2(x[i], __NV_SATFINITE, __NV_E4M3);
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(y[i], __NV_E4M3);
  back[2 * i] = __half2float(__half(__half_raw{wide.x}));
  back[2 * i + 1] = __half2float(__half(__half_raw{wide.y}));
}
"""


def test_8_bit_floats_of_sm_89() -> None:
    """NVRTC's own instructions for them, which sm_80 lacks."""
    x = np.float32(200) * np.random.default_rng(0).standard_normal(64).astype(np.float32)
    y, back = np.zeros(32, np.uint16), np.zeros(64, np.float32)
    interpret.launch(FP8_OF_ADA, "pairs", 1, 32, {"x": x, "y": y, "back": back}, arch="sm_89")
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (y.view(ml_dtypes.float8_e4m3fn) == expected).all()
    assert (back == expected.astype(np.float32)).all() and (np.abs(back) == 448).any()
