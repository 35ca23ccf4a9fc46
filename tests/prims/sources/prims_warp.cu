// prims_warp -- who a thread is, and reductions over groups of lanes.
#include "prims/instructions/warp.cuh"

extern "C" __global__ void warp(
    const float* x,    // [64]
    int* who,          // [4, 64]: thread, warp, lane, first of the warp
    float* max4,       // [64]
    float* max32,      // [64]
    float* sum4,       // [64]
    float* sum32,      // [64]
    uint32_t* four) {  // [4, 64]
  const int i = threadIdx.x;
  who[i] = thread_id();
  who[64 + i] = warp_id();
  who[128 + i] = lane_id();
  who[192 + i] = uniform(i);
  max4[i] = shfl_max<4>(x[i]);
  max32[i] = shfl_max<WARP_SIZE>(x[i]);
  sum4[i] = shfl_sum<4>(x[i]);
  sum32[i] = shfl_sum<WARP_SIZE>(x[i]);
  uint32_t y[4];
  for (int j = 0; j < 4; ++j) y[j] = 4 * i + j;
  shfl_transpose(y);
  for (int j = 0; j < 4; ++j) four[64 * j + i] = y[j];
}
