// finite.cuh -- R7's store of O. A row of O is a mean of values, but rounded weights or codes may
// carry it past all of them. Past the largest float16, rounding would give infinity. There the
// largest float16 is stored. Infinities and NaN, which only V can bring, stay unchanged.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"

constexpr float LARGEST_FLOAT16 = 65504.0f;
template <typename T>
constexpr bool IS_FLOAT16 = false;
template <>
constexpr bool IS_FLOAT16<__half> = true;

// x, or the largest float16 of its sign if x is finite and past it.
__device__ __forceinline__ float within_float16(float x) {
  const bool past = fabsf(x) > LARGEST_FLOAT16 && fabsf(x) < -NEG_INF;
  return past ? copysignf(LARGEST_FLOAT16, x) : x;
}

// A sum, rounded to nearest even.
template <typename T>
__device__ __forceinline__ T from_sum(float x) {
  return from_float<T>(IS_FLOAT16<T> ? within_float16(x) : x);
}

// The larger magnitude of two pairs of float16, half by half; a NaN is ignored.
__device__ __forceinline__ uint32_t max_abs_f16x2(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.f16x2 %0, x, y;\n}\n"
      : "=r"(r)
      : "r"(x), "r"(y));
  return r;
}

// Pairs of sums, rounded to nearest even, to the first of a fragment. NOTE: one test for infinities
// serves all sums, at half an instruction for each; from_sum takes four.
template <typename T, int COL_TILES, int COUNT>
__device__ __forceinline__ void pack_sums(
    uint32_t (&O_frag)[COL_TILES][2], const float (&x)[COUNT]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    const uint32_t pair = O_frag[i / 2][i % 2] = pack_rn<T>(x[2 * i], x[2 * i + 1]);
    if constexpr (IS_FLOAT16<T>) largest = max_abs_f16x2(largest, pair);
  }
  if (!IS_FLOAT16<T> || packed_below<__half>(largest, 16)) return;
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i)
    O_frag[i / 2][i % 2] = pack_rn<T>(within_float16(x[2 * i]), within_float16(x[2 * i + 1]));
}
