// warp.cuh -- indices of thread, warp and lane, and reductions over lanes.
#pragma once

#include "prims/base.cuh"

__device__ __forceinline__ int thread_id() { return threadIdx.x; }
// The same, read again: values that depend on it are recomputed and take no registers meanwhile.
__device__ __forceinline__ int thread_id_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP_SIZE; }
__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP_SIZE; }

// Tells the compiler that x is the same in all lanes of a warp. Results then may use uniform
// registers, where wgmma needs its descriptors and the copy engine its addresses. The compiler
// cannot infer it for values from shared memory or from a thread's number.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_WARP, x, 0); }

// Combines the numbers of aligned groups of LANES lanes (a power of two); every lane gets the
// result.
template <int LANES, typename T, typename Combine>
__device__ __forceinline__ T shfl_reduce(T x, Combine combine) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x = combine(x, __shfl_xor_sync(FULL_WARP, x, offset));
  return x;
}
template <int LANES>
__device__ __forceinline__ float shfl_max(float x) {
  return shfl_reduce<LANES>(x, [](float a, float b) { return fmaxf(a, b); });
}
template <int LANES>
__device__ __forceinline__ uint32_t shfl_max(uint32_t x) {
  return shfl_reduce<LANES>(x, [](uint32_t a, uint32_t b) { return max(a, b); });
}
template <int LANES>
__device__ __forceinline__ float shfl_sum(float x) {
  return shfl_reduce<LANES>(x, [](float a, float b) { return a + b; });
}
template <int LANES>
__device__ __forceinline__ int shfl_sum(int x) {
  return shfl_reduce<LANES>(x, [](int a, int b) { return a + b; });
}
// The maximum, NaN if either is NaN.
__device__ __forceinline__ float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
__device__ __forceinline__ float min_nan(float x, float y) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
}
// Four of the eight bytes {b, a}, one for each digit of the selector. A digit with bit 3 set
// replicates the sign of its byte eight times.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}
template <int LANES>
__device__ __forceinline__ float shfl_max_nan(float x) {
  return shfl_reduce<LANES>(x, [](float a, float b) { return max_nan(a, b); });
}
// Transposes 4 x 4 registers within each aligned group of four lanes: lane i's x[j] becomes lane
// j's old x[i].
__device__ __forceinline__ void shfl_transpose(uint32_t (&x)[4]) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t &low = x[i], &high = x[i + bit];
      const uint32_t other = __shfl_xor_sync(FULL_WARP, t & bit ? low : high, bit);
      (t & bit ? low : high) = other;
    }
}
// Transposes 4 x 4 bytes within each aligned group of four lanes: byte j of lane i becomes the old
// byte i of lane j.
__device__ __forceinline__ uint32_t shfl_transpose_bytes(uint32_t x) {
  x = prmt(x, __shfl_xor_sync(FULL_WARP, x, 1), lane_id() & 1 ? 0x3715 : 0x6240);
  return prmt(x, __shfl_xor_sync(FULL_WARP, x, 2), lane_id() & 2 ? 0x3276 : 0x5410);
}
