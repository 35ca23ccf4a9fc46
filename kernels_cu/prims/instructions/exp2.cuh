// exp2.cuh -- base-2 exponential and logarithm, named as their instructions.
#pragma once

#include "prims/base.cuh"

// 2^x; relative error at most 2^-22, subnormal results are flushed to zero, 2^-inf = +0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^n, n from -126 to 127.
__device__ __forceinline__ float power_of_two(int n) { return __int_as_float((n + 127) << 23); }

// floor(log2(x)) of a normal x > 0; -127 of 0 and of subnormal numbers, 128 of infinity and NaN.
__device__ __forceinline__ int exponent_of(float x) {
  return (__float_as_int(x) >> 23 & 0xff) - 127;
}

// Rounding to whole numbers by additions, because conversions use the unit of ex2 and wait behind
// it. Here are floor(x) for |x| up to 2^22 and infinities, and the int of a whole x in that range.
constexpr float WHOLE = 0x1.8p23f;  // numbers of this size have no fraction
__device__ __forceinline__ float floor_to_whole(float x) { return __fadd_rd(x, WHOLE) - WHOLE; }
__device__ __forceinline__ int whole_to_int(float x) {
  return __float_as_int(x + WHOLE) - __float_as_int(WHOLE);
}
