// counter.cuh -- counters in global memory, by which blocks of one launch wait for each other.
//
// A block may wait only for blocks that have begun: the device keeps these running, and promises
// nothing about others.
#pragma once

#include "prims/base.cuh"

// What a counter holds. What others did before they counted has been done.
__device__ __forceinline__ int32_t ld_acquire(const int32_t* global) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// Counts on. What this thread knows to have been done, has been done for who reads it.
__device__ __forceinline__ void red_release_add(int32_t* global, int32_t count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(count) : "memory");
}

// Waits until a counter, which never falls, has come to `count`.
__device__ __forceinline__ void await_count(const int32_t* global, int32_t count) {
  while (ld_acquire(global) < count) asm volatile("nanosleep.u32 64;");
}
