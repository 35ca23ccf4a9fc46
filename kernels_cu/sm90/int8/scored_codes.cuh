// scored_codes.cuh -- P as codes of scores that are numbers, in the Hopper forms of fa_int8 with
// softcap or bias (scored_step.cuh).
#pragma once

#include "prims/codes/p_codes.cuh"
#include "prims/config.cuh"
#include "prims/instructions/exp2.cuh"
#include "prims/instructions/warp.cuh"
#include "sm90/int8/scored_step.cuh"

// The largest scores of a lane's two rows; NaN if any is NaN.
__device__ __forceinline__ void largest_of_rows(
    float (&largest)[2], const float (&S_acc)[BLOCK_KV / 2]) {
  largest[0] = largest[1] = NEG_INF;
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; ++i) {
    float& m = largest[i / 2 % 2];
    m = max_nan(m, S_acc[i]);
  }
}

// Codes P of the weights of scores, four keys in a register, the left operand of P V. Also sums
// this lane's codes (if they are integers) and weights (if SUMS_WEIGHTS), by row.
__device__ __forceinline__ void weigh_scores(
    const float (&S_acc)[BLOCK_KV / 2], const float (&M)[2], uint32_t (&P_frag)[BLOCK_KV / 32][4],
    uint32_t (&codes)[2], float (&weights)[2]) {
  codes[0] = codes[1] = 0;
  weights[0] = weights[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 8; ++i) {  // two key tiles, one row: four neighbours in V
    const int h = i % 2, n = i / 2 * 8 + h * 2;
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = ex2_approx_ftz(S_acc[n + j / 2 * 4 + j % 2] - M[h]);  // R4
      if (SUMS_WEIGHTS) weights[h] += x[j];                        // R6
    }
    const uint32_t packed = pack_p_codes(x[0], x[1], x[2], x[3]);  // R5
    P_frag[i / 4][i % 4] = packed;
    if (SUMS_CODES) codes[h] = __dp4a(packed, 0x01010101u, codes[h]);  // exact
  }
}
