// prims_exp2 -- one exponential, and one whole number, per thread.
#include "prims/instructions/exp2.cuh"

extern "C" __global__ void exponential(const float* x, float* y) {  // [blockDim.x], [blockDim.x]
  y[threadIdx.x] = ex2_approx_ftz(x[threadIdx.x]);
}

extern "C" __global__ void whole_numbers(
    const float* x, float* floor, int* integer) {  // [blockDim.x], each
  const float whole = floor_to_whole(x[threadIdx.x]);
  floor[threadIdx.x] = whole;
  integer[threadIdx.x] = whole_to_int(isfinite(whole) ? whole : 0.0f);
}
