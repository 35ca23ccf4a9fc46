// prims_step_scores -- one warp's scores of a step: factors, masks, largest integers.
#include "prims/score/step_scores.cuh"

constexpr int ROWS = 16;

extern "C" __global__ void step_scores(
    const __grid_constant__ AttnParams p,
    const int32_t* place,  // [2]: first row of the warp, first key of the step
    const int32_t* X,      // [ROWS, BLOCK_KV], integers of Q K^T
    const float* Q_scale,  // [ROWS]
    const float* K_scale,  // [ceil(len_kv / GROUP_KV)]
    float* S,              // [ROWS, BLOCK_KV]
    int32_t* largest,      // [SCALES, 2, 32], of what a lane has
    int32_t* admitted) {   // [SCALES, 2, 32], of what is not masked
  const int row = lane_id() / 4, col = lane_id() % 4 * 2, q = place[0] + row, kv0 = place[1];
  int32_t dot[BLOCK_KV / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    dot[i] = X[(row + i / 2 % 2 * 8) * BLOCK_KV + i / 4 * 8 + col + i % 2];
  const float Q_factor[2] = {Q_scale[row], Q_scale[row + 8]};
  Factors factor;
  float loaded[SCALES], scale[SCALES];
  load_scales(loaded, K_scale, kv0, p.len_kv);
  copy_scales(scale, loaded);
  make_factors(factor, Q_factor, scale);
  const ScoreMask mask(p, q, kv0);
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i)
    S[(row + i / 2 % 2 * 8) * BLOCK_KV + i / 4 * 8 + col + i % 2] =
        mask.admits(i) ? float(dot[i]) * factor[i / PART][i / 2 % 2] : NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j) {
    int most[2], most_admitted[2];
    largest_dots<false>(most, dot, mask, j);
    largest_dots<true>(most_admitted, dot, mask, j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = (j * 2 + h) * WARP_SIZE + lane_id();
      largest[at] = most[h], admitted[at] = most_admitted[h];
    }
  }
}
