// prims_gemm -- a tile of C as lanes hold it, with bias and activation, and the order of tiles.
#include "prims/codes/gemm.cuh"

extern "C" __global__ void gemm(
    const __grid_constant__ GemmParams given,
    const float* x,        // [8, 32]
    const bias_t* bias,    // [n]
    elem_t* C,             // [8, 32]
    int32_t* tiles,        // [num_tiles, 2]
    int32_t* constants) {  // [8]
  GemmParams p = given;
  p.C = C, p.bias = bias;
  const int row = lane_id() / 4, t = lane_id() % 4;
  ColumnPairs<4> biases;
  load_bias<4>(p, 0, 0, biases);
  store_row<4>(p, row, 0, 0, biases, [&](int i, int j) { return x[row * 32 + i * 8 + t * 2 + j]; });
  p.m = 27 * BLOCK_M + 1, p.n = 4 * BLOCK_N - 3;
  for (int i = lane_id(); i < num_tiles(p); i += WARP_SIZE) {
    const GemmTile tile = gemm_tile(p, i);
    tiles[2 * i] = tile.m0, tiles[2 * i + 1] = tile.n0;
  }
  if (lane_id() > 0) return;
  int i = 0;
  for (const int value :
       {BLOCK_M, BLOCK_N, ACCESS_BYTES, NUM_STAGES, NUM_THREADS, int(OUTLIERS), code_slices(p),
        outlier_slices(p)})
    constants[i++] = value;
}
