// gemm_channel.cuh -- INT8 matrix products with a scale for each row of A and each row of B: the
// one multiplication that turns an int32 sum over all of k into a number, and its scales.
#pragma once

#include "prims/codes/gemm.cuh"

// G1, G2: an element of C before bias and activation. Each operation is rounded once: the product
// of both scales, the sum to float32 (exact below 2^24), their product, not fused with a bias.
__device__ __forceinline__ float scaled(int32_t sum, float A_scale, float B_scale) {
  return __fmul_rn(__int2float_rn(sum), __fmul_rn(A_scale, B_scale));
}

// The scale of a row of A; past the last row that of the last, which multiplies zeros.
__device__ __forceinline__ float row_scale(const GemmParams& p, int row) {
  return __ldg(p.A_scale + min(row, p.m - 1) * p.A_scale_stride);
}

// G1, G2: the same of a gated linear unit.
__device__ __forceinline__ Halves<float> scaled(
    Halves<int32_t> sums, float A_scale, Halves<float> B_scale) {
  return {scaled(sums.first, A_scale, B_scale.first), scaled(sums.second, A_scale, B_scale.second)};
}

// Scales of columns col, which is even, and col + 1, whose rows of B begin at row0; past the last
// column those of others.
// NOTE: VEC >= 2 promises an even n, and on the host scales that lie side by side in pairs.
__device__ __forceinline__ Vec<float, 2> column_scales(const GemmParams& p, int row0, int col) {
  if constexpr (VEC >= 2) {
    const float2 x = __ldg(reinterpret_cast<const float2*>(p.B_scale + row0 + min(col, p.n - 2)));
    return {{x.x, x.y}};
  } else {
    return {
        {__ldg(p.B_scale + (row0 + min(col, p.n - 1)) * p.B_scale_stride),
         __ldg(p.B_scale + (row0 + min(col + 1, p.n - 1)) * p.B_scale_stride)}};
  }
}

// The scales of the columns that a lane has of TILES * 8; of a gated linear unit of both halves.
template <int TILES>
using ColumnScales = Vec<float, 2>[HALVES][TILES];

// G1 to G7: stores TILES * 8 columns of a row of C from col0 on, of which this lane of a quad has
// the sums sum(i, j), column 8 i + 2 (lane % 4) + j. All lanes of a warp come here.
template <int TILES, typename Sum>
__device__ __forceinline__ void store_sums(
    const GemmParams& p, int row, int col0, float A_scale, const ColumnScales<TILES>& B_scale,
    Sum sum) {
  store_row<TILES>(p, row, col0, [&](int i, int j) {
    if constexpr (GLU) {
      const Halves<float> of_columns = {B_scale[0][i].v[j], B_scale[1][i].v[j]};
      return scaled(sum(i, j), A_scale, of_columns);
    } else {
      return scaled(sum(i, j), A_scale, B_scale[0][i].v[j]);
    }
  });
}

// The scales of the columns that this lane has of TILES * 8 from col0 on.
template <int TILES>
__device__ __forceinline__ void load_column_scales(
    const GemmParams& p, int col0, ColumnScales<TILES>& B_scale) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      B_scale[half][i] = column_scales(p, half * p.n, col0 + i * 8 + lane_id() % 4 * 2);
}
