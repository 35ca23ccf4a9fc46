// named_barrier.cuh -- barriers 1 to 15 of a block, for some of its warps; 0 is __syncthreads.
// `threads` counts waiting threads and threads that only arrive.
#pragma once

#include "prims/base.cuh"

// Waits until `threads` threads have reached the barrier, including this warp's.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts this warp's threads without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// COUNT warpgroups take turns at work that only one may do at a time. The first turn must be passed
// to the first warpgroup, and the last one passed must be taken, too.
template <int COUNT>
struct Turn {
  int warpgroup;  // of COUNT
  __device__ __forceinline__ void take() const { named_barrier_sync(1 + warpgroup, THREADS); }
  __device__ __forceinline__ void pass() const {
    named_barrier_arrive(1 + (warpgroup + 1) % COUNT, THREADS);
  }

 private:
  static constexpr int THREADS = 2 * 128;  // of the waiting and of the passing warpgroup
};
