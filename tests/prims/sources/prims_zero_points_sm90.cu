// prims_zero_points_sm90 -- what accumulators begin with, of two tiles of the second of two heads:
// warp 1 loads what goes with the keys, warp 0 says which tile and does what consumers do.
#include "prims/codes/zero_points_sm90.cuh"

struct SharedStorage {
  WorkTile tile[Q_STAGES];
  Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES], full[NUM_STAGES], empty[NUM_STAGES];
};
constexpr int STEPS = 2, V_STEPS = 1;

extern "C" __global__ void zero_points_sm90(
    const __grid_constant__ AttnParams call, const __grid_constant__ QuantParams given,
    const int32_t* Q_zero,      // [2, ceil(len_q / GROUP_Q)]
    const int32_t* K_zero,      // [2, ceil(len_kv / GROUP_KV)]
    const int32_t* Q_code_sum,  // [2, len_q]
    const int32_t* K_code_sum,  // [2, len_kv]
    int32_t* dots,              // [2, BLOCK_Q, STEPS * BLOCK_KV], of both tiles
    int32_t* of_rows) {         // [2, BLOCK_Q], zero points
  __shared__ SharedStorage smem;
  __shared__ SharedZeros zeros;
  QuantParams quant = given;
  quant.Q_zero = Q_zero, quant.K_zero = K_zero;
  quant.Q_code_sum = Q_code_sum, quant.K_code_sum = K_code_sum;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Q_STAGES; ++s)
      mbarrier_init(smem.Q_full[s], 1), mbarrier_init(smem.Q_empty[s], PRODUCERS - 1);
    for (int s = 0; s < NUM_STAGES; ++s)
      mbarrier_init(smem.full[s], PRODUCERS - 1), mbarrier_init(smem.empty[s], 1);
  }
  __syncthreads();  // the barriers are initialised before anyone waits or arrives
  if (warp_id() == 1)
    return zeros.load_keys<V_STEPS>(smem, smem.full, smem.empty, call, quant, Scoring<SCORED>());
  RingPosition<Q_STAGES> Q_at;
  RingPosition<NUM_STAGES> at;
  const int row = lane_id() / 4, col = lane_id() % 4 * 2;
  for (int i = 0; i <= 2; ++i, Q_at.advance()) {
    WorkTile tile = {};
    tile.q0 = i < 2 ? i * BLOCK_Q : -1, tile.steps = STEPS, tile.head = tile.head_kv = 1;
    mbarrier_wait_parity(smem.Q_empty[Q_at.stage], Q_at.parity ^ 1);  // the last was read
    if (lane_id() == 0) smem.tile[Q_at.stage] = tile, mbarrier_arrive(smem.Q_full[Q_at.stage]);
    if (i == 2) return;
    const float* Q_scale = quant.Q_scale + quant.Q_scale_stride_head;  // never read
    zeros.load_rows(call, quant, Q_scale, tile, row, call.len_q);
    for (int step = 0; step < STEPS + V_STEPS; ++step, at.advance()) {
      mbarrier_wait_parity(smem.full[at.stage], at.parity);  // what goes with the keys is there
      int32_t dot[BLOCK_KV / 2];
      zeros.begin(dot, at.stage);
#pragma unroll
      for (int j = 0; j < BLOCK_KV / 2 && step < STEPS; ++j)
        dots
            [(tile.q0 + row + j / 2 % 2 * 8) * STEPS * BLOCK_KV + step * BLOCK_KV + j / 4 * 8 +
             col + j % 2] = dot[j];
      __syncwarp();  // all lanes have read
      if (lane_id() == 0) mbarrier_arrive(smem.empty[at.stage]);
    }
    for (int h = 0; h < 2; ++h)
      if (col == 0) of_rows[tile.q0 + row + h * 8] = zeros.of_row(h);
  }
}
