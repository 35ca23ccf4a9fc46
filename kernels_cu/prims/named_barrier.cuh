// named_barrier.cuh -- barriers 1 to 15 of a block, for some of its warps; 0 is __syncthreads.
// `threads` counts both those that wait and those that only arrive.
#pragma once

#include "prims/base.cuh"

// Waits until `threads` threads have come to the barrier, this warp's among them.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts this warp's threads without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
