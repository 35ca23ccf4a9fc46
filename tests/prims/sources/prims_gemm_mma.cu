// prims_gemm_mma -- a slice of A times one of B, by all warps of a block, and edges as zeros.
#include "prims/codes/gemm_mma.cuh"

extern "C" __global__ void slice(
    const int8_t* A,  // [rows, SLICE]
    const int8_t* B,  // [columns, SLICE]
    const int32_t* valid,  // rows, columns and bytes that there are
    int32_t* C) {          // [BLOCK_M, BLOCK_N]
  __shared__ alignas(128) int8_t A_slice[BLOCK_M * SLICE], B_slice[BLOCK_N * SLICE];
  load_slice<BLOCK_M>(A_slice, A, SLICE, valid[0], valid[2]);
  load_slice<BLOCK_N>(B_slice, B, SLICE, valid[1], valid[2]);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // both slices are visible
  const int row0 = warp_id() % WARPS_M * WARP_M, col0 = warp_id() / WARPS_M * WARP_N;
  int32_t dot[MMA_ROWS][MMA_COLS][4] = {};
  multiply_slice(
      shared_address(swizzled<CHUNKS>(A_slice, row0 + lane_id() % 16, lane_id() / 16)),
      shared_address(swizzled<CHUNKS>(
          B_slice, col0 + lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2)),
      [&](int r, int n, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k32_s8(dot[r][n], a, b0, b1);
      });
  for (int f = 0; f < FRAGMENTS; ++f)
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + f / MMA_COLS * 16 + lane_id() / 4 + i / 2 * 8;
      const int col = col0 + f % MMA_COLS * 8 + lane_id() % 4 * 2 + i % 2;
      C[row * BLOCK_N + col] = dot[f / MMA_COLS][f % MMA_COLS][i];
    }
}
