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
