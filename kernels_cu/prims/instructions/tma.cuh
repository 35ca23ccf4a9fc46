// tma.cuh -- the bulk tensor copy engine (sm_90a): boxes of an array, described by a tensor map.
#pragma once

#include "prims/instructions/mbarrier.cuh"

// Filled by cuTensorMapEncodeTiled on the host (cupyattn/runtime/tensor_map.py).
struct alignas(64) TensorMap {
  uint8_t bytes[128];
};

// Copies the box at (column, row, head, batch) to shared memory and counts its bytes off the
// barrier. Elements outside the array arrive as zeros and count too.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(
    void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head,
    int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// The same for every block of the cluster whose bit is set in `blocks`. In each, the box arrives at
// this place in shared memory. Its bytes count off the barrier at this place there.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(
    void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head, int batch,
    int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch),
      "h"(uint16_t(blocks))
      : "memory");
}
// The same for an array with five axes, at (x0, ..., x4), the contiguous axis first.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(
    void* shared, const TensorMap& map, Mbarrier& barrier, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
// The same for a box that is read once: it leaves the L2 cache first, so that reused data stays.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_evict_first(
    void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head,
    int batch) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch),
      "l"(policy)
      : "memory");
}
// Copies `bytes` contiguous bytes to shared memory, and counts them off the barrier. Addresses and
// bytes are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(
    void* shared, const void* global, int bytes, Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
// Copies a box in shared memory to (column, row, head, batch), in the background. Elements outside
// the array are not stored.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(
    const TensorMap& map, const void* shared, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read their sources.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Makes this thread's writes to shared memory visible to the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Stores zeros to rows [from, to) of the first boxes of a tile, each [rows, 128 bytes], by THREADS
// threads. Their next barrier makes them visible to all, wgmma included. The rows are needed
// because a box also brings rows of the next sequence.
template <int THREADS, typename T, int BOXES, int BOX_ELEMENTS>
__device__ __forceinline__ void zero_rows(
    T (&tile)[BOXES][BOX_ELEMENTS], int from, int to, int boxes = BOXES) {
  constexpr int CHUNKS = 128 / 16;  // of 16 bytes in a row of a box
#pragma unroll 1
  for (int b = 0; b < boxes; ++b)
#pragma unroll 1
    for (int i = from * CHUNKS + threadIdx.x % THREADS; i < to * CHUNKS; i += THREADS)
      reinterpret_cast<Vec<uint32_t, 4>*>(tile[b])[i] = {};
  fence_proxy_async();
}
// One lane of a warp whose lanes are all here.
__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected;
}
