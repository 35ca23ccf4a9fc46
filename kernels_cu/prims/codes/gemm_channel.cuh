// gemm_channel.cuh -- INT8 matrix products with a scale for each row of A and of B. A single
// multiplication converts an int32 sum over all of k to a number.
#pragma once

#include "prims/codes/gemm.cuh"

// G1, G2: an element of C before bias and activation. Each operation is rounded once: the product
// of both scales, the sum to float32 (exact below 2^24), their product, not fused with a bias.
__device__ __forceinline__ float scaled(int32_t sum, float A_scale, float B_scale) {
  return __fmul_rn(__int2float_rn(sum), __fmul_rn(A_scale, B_scale));
}

// The scale of a row of A. Past the last row it is the last row's, and multiplies zeros.
// NOTE: not by __ldg, whose loads a compiler may move before the wait for the launch before.
__device__ __forceinline__ float row_scale(const GemmParams& p, int row) {
  return p.A_scale[min(row, p.m - 1) * p.A_scale_stride];
}

// G1, G2: the same for a gated linear unit.
__device__ __forceinline__ Halves<float> scaled(
    Halves<int32_t> sums, float A_scale, Halves<float> B_scale) {
  return {scaled(sums.first, A_scale, B_scale.first), scaled(sums.second, A_scale, B_scale.second)};
}

// Scales of this lane's columns of TILES tiles, from tile `first` on; tile 0 begins at column n0.
// NOTE: NEIGHBOURS guarantees that scales are adjacent.
template <int TILES>
__device__ __forceinline__ void load_column_scales(
    const GemmParams& p, int n0, int first, ColumnPairs<TILES>& B_scale) {
  const float* rows[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) rows[half] = p.B_scale + half * p.n * p.B_scale_stride;
  load_column_pairs<TILES>(p, rows, n0, first, B_scale, [&](int half, int col) {
    return __ldg(rows[half] + col * p.B_scale_stride);
  });
}

// G1 to G7: stores TILES tiles of a row of C, from tile `first` on; tile 0 begins at column n0.
// This lane of a quad has the sums sum(i, j), column pair_col(first + i) + j. All lanes of a warp
// come here.
template <int TILES, typename Sum>
__device__ __forceinline__ void store_sums(
    const GemmParams& p, int row, int n0, int first, float A_scale,
    const ColumnPairs<TILES>& B_scale, const ColumnPairs<TILES>& bias, Sum sum) {
  store_row<TILES>(p, row, n0, first, bias, [&](int i, int j) {
    if constexpr (GLU) {
      const Halves<float> of_columns = {B_scale[0][i].v[j], B_scale[1][i].v[j]};
      return scaled(sum(i, j), A_scale, of_columns);
    } else {
      return scaled(sum(i, j), A_scale, B_scale[0][i].v[j]);
    }
  });
}
