// prims_quantize_tile -- 40 rows of 48 as codes, 16 rows to a scale.
#include "prims/codes/quantize_tile.cuh"

extern "C" __global__ void quantize_tile_48(
    const elem_t* X,  // [40, 24]
    int8_t* codes,    // [48, 32]
    float* scale,     // [48]
    int2* zeros) {    // [48]
  __shared__ alignas(128) int8_t tile[48 * 32];
  __shared__ float of_rows[48];
  __shared__ int2 zeros_of_rows[48];
  __shared__ TileGroups<48, 16> groups;
  quantize_tile<32>(tile, of_rows, zeros_of_rows, groups, X, 24, 40);
  __syncthreads();
  for (int row = thread_id(); row < 48; row += NUM_THREADS) {
    scale[row] = of_rows[row];
    if constexpr (ZERO_POINTS) zeros[row] = zeros_of_rows[row];
    for (int col = 0; col < 32; ++col)
      codes[row * 32 + col] = swizzled<2>(tile, row, col / 16)[col % 16];
  }
}
