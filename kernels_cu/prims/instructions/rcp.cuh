// rcp.cuh -- the approximate reciprocal, named as its instruction.
#pragma once

#include "prims/base.cuh"

// 1 / x, with an error of at most 1 ulp; subnormal numbers are flushed to zero, 1 / inf = +0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
