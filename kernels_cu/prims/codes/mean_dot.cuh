// mean_dot.cuh -- what the scores of a row lost where the mean of the keys was taken off them, the
// same for every key: softmax does not see it, lse gets it back.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/warp.cuh"

// The product of a row of Q, codes less their zero point, with that mean, in units of the row's
// scale. Aligned groups of LANES lanes share the columns; every lane gets the result.
template <int LANES>
__device__ __forceinline__ float mean_dot(
    const int8_t* Q_row,  // [HEAD_DIM]
    const float* K_mean,  // [HEAD_DIM]
    int zero = 0) {
  float dot = 0.0f;
  for (int d = lane_id() % LANES; d < HEAD_DIM; d += LANES)
    dot = fmaf(Q_row[d] - zero, K_mean[d], dot);
  return shfl_sum<LANES>(dot);
}
