// mean_dot.cuh -- the part of a row's scores that was lost when the mean of the keys was
// subtracted. It is the same for every key, so softmax does not change; lse gets it back.
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
