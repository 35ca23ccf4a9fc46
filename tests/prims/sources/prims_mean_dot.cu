// prims_mean_dot -- rows of codes times a mean: a row to four lanes, and one to a warp.
#include "prims/codes/mean_dot.cuh"

extern "C" __global__ void mean_dots(
    const int8_t* Q,       // [9, HEAD_DIM]
    const float* K_mean,   // [HEAD_DIM]
    const int32_t* zeros,  // [8]
    float* of_quads,       // [WARP_SIZE], of rows lane / 4
    float* of_warp) {      // [WARP_SIZE], of row 8, whose zero point is 0
  const int row = lane_id() / 4;
  of_quads[lane_id()] = mean_dot<4>(Q + row * HEAD_DIM, K_mean, zeros[row]);
  of_warp[lane_id()] = mean_dot<WARP_SIZE>(Q + 8 * HEAD_DIM, K_mean);
}
