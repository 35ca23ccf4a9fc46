// cluster.cuh -- blocks of a cluster: their barrier, and the shared memory of one another (sm_90).
//
// CLUSTER_OF_SPLITS (config.cuh) launches a kernel in clusters. A block's shared memory can be read
// from its first arrival at the barrier until it ends. A block must not end before all have read
// it.
#pragma once

#include "prims/instructions/mbarrier.cuh"

// Arrives at the barrier of the cluster, with all lanes of a warp. A release publishes the previous
// work of a thread, and all work ordered before it, such as its block's work before a barrier. It
// waits until the thread's stores have reached memory (MEMBAR), also stores to global memory. A
// warp whose work another warp publishes arrives without release.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Waits until every thread of the cluster that has not exited has arrived. Then all published work
// is visible.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Waits until every thread of the cluster that has not exited is here. Previous work of each is
// then visible to all.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Address, in block `rank` of the cluster, of the object that is at `own` in this block's shared
// memory.
__device__ __forceinline__ uint32_t address_in_block(const void* own, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

// Two or four floats, or four integers, of shared memory of block `rank` of the cluster. They begin
// at a multiple of their size.
template <int N>
__device__ __forceinline__ Vec<float, N> load_from_block(const float (&own)[N], int rank) {
  const uint32_t address = address_in_block(&own, rank);
  Vec<float, N> x;
  if constexpr (N == 2)
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.v[0]), "=f"(x.v[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "r"(address)
                 : "memory");
  return x;
}
__device__ __forceinline__ int32_t load_from_block(const int32_t& own, int rank) {
  int32_t x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];"
               : "=r"(x)
               : "r"(address_in_block(&own, rank))
               : "memory");
  return x;
}
__device__ __forceinline__ Vec<int32_t, 4> load_from_block(const int32_t (&own)[4], int rank) {
  const uint32_t address = address_in_block(&own, rank);
  Vec<int32_t, 4> x;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3])
               : "r"(address)
               : "memory");
  return x;
}

// Arrives at the barrier at this place in block `rank` of the cluster. It says that this thread has
// read what the other block may now overwrite; it publishes no stores to that block.
__device__ __forceinline__ void mbarrier_arrive_in_block(Mbarrier& own, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(&own, rank))
               : "memory");
}

// Copies `bytes` of shared memory to the same place in block `rank` of the cluster, in the
// background. They count off the barrier at this place there. Address and bytes are multiples of
// 16.
__device__ __forceinline__ void cp_async_bulk_to_block(
    const void* own, int bytes, Mbarrier& barrier, int rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(address_in_block(own, rank)),
      "r"(shared_address(own)), "r"(bytes), "r"(address_in_block(&barrier, rank))
      : "memory");
}
