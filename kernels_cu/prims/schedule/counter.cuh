// counter.cuh -- counters and numbers in global memory, by which blocks of one launch wait for each
// other.
//
// A block may wait only for blocks that have begun. The device keeps these running, and guarantees
// nothing for others.
#pragma once

#include "prims/base.cuh"

// The value of a counter. Work of other threads before they counted is complete and visible.
__device__ __forceinline__ int32_t ld_acquire(const int32_t* global) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// Adds to a counter. Work that is visible to this thread becomes visible to threads that read the
// counter.
__device__ __forceinline__ void red_release_add(int32_t* global, int32_t count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(count) : "memory");
}

// Waits until a counter, which never falls, has reached `count`.
__device__ __forceinline__ void await_count(const int32_t* global, int32_t count) {
  while (ld_acquire(global) < count) asm volatile("nanosleep.u32 64;");
}

// Stores a number for threads that wait for it. Its word is zero at first and never zero again, and
// is written as a whole. A thread that sees the word has the number, so no fence is needed.
__device__ __forceinline__ void publish(uint64_t* global, float x) {
  const uint64_t word = uint64_t(1) << 32 | __float_as_uint(x);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(word) : "memory");
}

// Waits for a number that another thread publishes.
__device__ __forceinline__ float await_published(const uint64_t* global) {
  uint64_t word;
  while (true) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(global) : "memory");
    if (word != 0) return __uint_as_float(uint32_t(word));
    asm volatile("nanosleep.u32 64;");
  }
}
