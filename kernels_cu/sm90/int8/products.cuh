// products.cuh -- S3 of the Hopper forms of fa_int8.
#pragma once

#include "prims/codes/quantize_q.cuh"
#include "prims/config.cuh"
#include "prims/instructions/wgmma_8bit.cuh"

// S3 scores: dot [64, BLOCK_KV] = Q K^T of codes, exact, in the background. ZERO_POINTS: added to
// the initial values of SharedZeros.
__device__ __forceinline__ void start_scores(
    int32_t (&dot)[BLOCK_KV / 2], Descriptor Q_rows, Descriptor K_rows) {
  wgmma_use(dot);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < ceil_div(HEAD_DIM, 32); ++k) {  // 32 bytes of a row, then the next box
    const int box = k / 4, byte = k % 4 * 32;
    WgmmaS8<BLOCK_KV>::ss(
        dot, Q_rows + (box * BLOCK_Q * BOX_BYTES + byte),
        K_rows + (box * BLOCK_KV * BOX_BYTES + byte), ZERO_POINTS || k > 0);
  }
  wgmma_commit_group();
}
