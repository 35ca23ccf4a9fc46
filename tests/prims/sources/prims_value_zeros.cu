// prims_value_zeros -- zero points of a tile of V, and the sums of codes of P.
#include "prims/codes/value_zeros.cuh"

extern "C" __global__ void value_zeros(
    const int32_t* V_zero,  // [3, 24]
    const uint8_t* A,       // [16, 32] codes of P
    int32_t* pairs,         // [32], of the last group
    int32_t* sums) {        // [32, 4]
  __shared__ alignas(8) int32_t tiles[NUM_STAGES * VALUE_COLS];
  const ValueZeros zeros(tiles, V_zero);
  zeros.load(1, 64);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  if (lane_id() < VALUE_COLS / 2)
    *reinterpret_cast<int2*>(pairs + 2 * lane_id()) = zeros.pair(1, 2 * lane_id());
  const int g = lane_id() / 4, t = lane_id() % 4;
  uint32_t a[1][4];
  for (int i = 0; i < 4; ++i)
    a[0][i] = *reinterpret_cast<const uint32_t*>(A + (g + i % 2 * 8) * 32 + i / 2 * 16 + 4 * t);
  p_sum_t sum[4] = {1, 1, 1, 1};
  sum_p_codes(sum, a);
  for (int i = 0; i < 4; ++i) sums[4 * lane_id() + i] = sum[i];
}
