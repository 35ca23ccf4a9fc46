// prims_gemm_channel -- rows of int32 sums, with scales of rows and columns, as lanes hold them.
#include "prims/codes/gemm_channel.cuh"

extern "C" __global__ void channel(
    const __grid_constant__ GemmParams given,
    const int32_t* sums,   // [8, 32]
    const float* A_scale,  // [m, A_scale_stride]
    const float* B_scale,  // [n, B_scale_stride]
    elem_t* C) {           // [8, 32]
  GemmParams p = given;
  p.C = C, p.A_scale = A_scale, p.B_scale = B_scale;
  const int row = lane_id() / 4, t = lane_id() % 4;
  ColumnPairs<4> scales, biases;
  load_column_scales<4>(p, 0, 0, scales), load_bias<4>(p, 0, 0, biases);
  store_sums<4>(p, row, 0, 0, row_scale(p, row), scales, biases, [&](int i, int j) {
    return sums[row * 32 + i * 8 + t * 2 + j];
  });
}
