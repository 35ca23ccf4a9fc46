// fragment_rows.cuh -- rows of S, P and O as mma leaves them in a lane (mma.cuh). Of each tile of 8
// columns a lane holds two neighbours in row g, elements 0 and 1, and two in row g + 8, elements 2
// and 3. The functions take h = 0 for row g and h = 1 for row g + 8.
#pragma once

#include "prims/config.cuh"
#include "prims/score/score.cuh"

// m becomes the largest score that this lane holds of a row, in the units of M and of any size.
// factor(h, n) brings the scores of tile n to log2 units. NaN is ignored, as fmaxf ignores it.
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

// Brings a row of O to another M.
template <int N>
__device__ __forceinline__ void scale_row(float (&O)[N][4], int h, float alpha) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    O[c][2 * h] *= alpha;      // R6
    O[c][2 * h + 1] *= alpha;  // R6
  }
}
