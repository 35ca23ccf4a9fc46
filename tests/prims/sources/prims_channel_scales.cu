// prims_channel_scales -- the scales and means of the second head of two, and what sums of codes
// stand for, of a tile and of a piece.
#include "prims/codes/channel_scales.cuh"

constexpr int COLS = round_up(HEAD_DIM, 32), COUNT = COLS / 2;

extern "C" __global__ void channel_scales(
    const __grid_constant__ AttnParams p, const __grid_constant__ ValueParams given,
    const float* V_scale,  // [2, HEAD_DIM]
    const float* V_mean,   // [2, HEAD_DIM]
    const int32_t* sums,   // [32, COUNT]
    const float* weights,  // [32, 2]
    float* loaded,         // [2, COLS]
    float* tile,           // [32, COUNT]
    float* piece) {        // [32, COUNT]
  __shared__ ChannelScales<COLS> scales;
  ValueParams values = given;
  values.V_scale = V_scale, values.V_mean = V_mean;
  scales.load<NUM_THREADS>(p, values, 1, 0);
  cp_async_wait_group<0>();
  __syncthreads();  // the numbers of all threads are there
  for (int col = thread_id(); col < COLS; col += NUM_THREADS)
    loaded[col] = scales.scale[col], loaded[COLS + col] = scales.mean[col];
  if (warp_id() > 0) return;
  int32_t O_acc[COUNT];
  float O[COUNT];
  const float l[2] = {weights[2 * lane_id()], weights[2 * lane_id() + 1]};
  for (int i = 0; i < COUNT; ++i) O_acc[i] = sums[lane_id() * COUNT + i];
  scales.apply<false>(O, O_acc, l);
  for (int i = 0; i < COUNT; ++i) tile[lane_id() * COUNT + i] = O[i];
  scales.apply<true>(O, O_acc, l);
  for (int i = 0; i < COUNT; ++i) piece[lane_id() * COUNT + i] = O[i];
}
