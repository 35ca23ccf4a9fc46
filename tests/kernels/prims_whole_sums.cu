// prims_whole_sums -- four accumulators per thread, as floats.
#include "prims/whole_sums.cuh"

extern "C" __global__ void whole_sums(const int* x, float* y) {  // [blockDim.x, 4], each
  int32_t sum[1][1][4];
  start_sums(sum);
  for (int i = 0; i < 4; ++i)
    y[4 * threadIdx.x + i] = sum_to_float(sum[0][0][i] + x[4 * threadIdx.x + i]);
}
