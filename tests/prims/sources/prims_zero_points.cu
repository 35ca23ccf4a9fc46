// prims_zero_points -- products of codes less their zero points, of the second of two heads.
#include "prims/codes/zero_points.cuh"

extern "C" __global__ void zero_points(
    const __grid_constant__ QuantParams given,
    const int32_t* Q_zero,      // [2, 8]
    const int32_t* K_zero,      // [2, 5]
    const int32_t* Q_code_sum,  // [2, 16]
    const int32_t* K_code_sum,  // [2, 20]
    int32_t* dots,              // [16, 32], of rows from 0 and keys from 4
    int32_t* of_rows) {         // [2, 16]
  __shared__ ZeroTiles tiles;
  QuantParams quant = given;
  quant.Q_zero = Q_zero, quant.K_zero = K_zero;
  quant.Q_code_sum = Q_code_sum, quant.K_code_sum = K_code_sum;
  const AttnParams call = {};
  const ZeroPoints zeros(&tiles, call, quant, quant.Q_scale + 8, quant.K_scale + 5, 0, 1, 1);
  zeros.load_rows(0, 13);
  zeros.load_keys(1, 4, 19);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  for (int row = 0; row < BLOCK_Q; ++row)
    dots[row * 32 + lane_id()] = zeros.tiles->without(1000, row, 1, lane_id());
  if (lane_id() >= BLOCK_Q) return;
  of_rows[lane_id()] = zeros.of_row(lane_id(), true);
  of_rows[16 + lane_id()] = zeros.of_row(lane_id(), false);
}
