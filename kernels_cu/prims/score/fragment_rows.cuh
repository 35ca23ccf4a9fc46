// fragment_rows.cuh -- a lane's rows of S, P and O in the layout of mma (mma.cuh). In a tile of 8
// columns a lane has two neighbours of row g (elements 0, 1) and of row g + 8 (2, 3). The functions
// take h = 0 for row g and h = 1 for row g + 8.
#pragma once

#include "prims/config.cuh"
#include "prims/score/score.cuh"

// m becomes this lane's largest score of a row, in the units of M and of any size. The scores of
// tile n times factor(h, n) are in log2 units. NaN is ignored, as fmaxf ignores it.
template <int N, typename Factor>
__device__ __forceinline__ void find_largest(
    float& m, const float (&S)[N][4], int h, Factor factor) {
  m = NEG_INF;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float largest = fmaxf(S[n][2 * h], S[n][2 * h + 1]);
    m = fmaxf(m, row_maximum_of_any_size(largest, factor(h, n)));
  }
}

// Rescales a row of O to another M.
template <int N>
__device__ __forceinline__ void scale_row(float (&O)[N][4], int h, float alpha) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    O[c][2 * h] *= alpha;      // R6
    O[c][2 * h + 1] *= alpha;  // R6
  }
}
