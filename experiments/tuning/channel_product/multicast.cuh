// multicast.cuh -- single instructions that the pair of blocks of a cluster needs (sm_90a): copies
// to both blocks at once, and arrivals at a barrier of the other one. With them, the wait for all
// but the last few stores of a thread.
#pragma once

#include "prims/instructions/tma.cuh"

// Copies the box at (column, row, head, batch) to the same place in the shared memory of every
// block of the cluster whose bit is set in `blocks`, and counts its bytes off the barrier at the
// same place in each of them.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(
    void* shared, const TensorMap& map, Mbarrier& barrier, int column, int row, int head, int batch,
    uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch),
      "h"(blocks)
      : "memory");
}
// Arrives at the barrier that block `rank` of the cluster has at the same place.
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(&barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address)
               : "memory");
}
// Waits until at most the last PENDING groups of this thread's stores still read their sources.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
