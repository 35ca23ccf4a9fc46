// gemm_channel_mma.cuh -- how the portable products with a scale for each row and column store C.
#pragma once

#include "prims/codes/gemm_channel.cuh"
#include "prims/codes/gemm_mma.cuh"

// Tiles of 16 x 8 and threads of a block whose sums over its part of k the others of its cluster
// read: int32_t partial[PARTIAL_TILES][PARTIAL_THREADS][4] of shared memory.
constexpr int PARTIAL_TILES = SPLITS > 1 ? FRAGMENTS : 1;
constexpr int PARTIAL_THREADS = SPLITS > 1 ? NUM_THREADS : 1;

// G1 to G7: stores the part of C, from (row0, col0) on, of which this warp has the sums `dot` over
// all of k, or over part number `rank` of it. A_scale(row) is the scale of a row of C. All threads
// of all blocks that share a tile come here.
template <typename ScaleOfRow>
__device__ __forceinline__ void store_tile(
    const GemmParams& p, const int32_t (&dot)[MMA_ROWS][MMA_COLS][4],
    int32_t (&partial)[PARTIAL_TILES][PARTIAL_THREADS][4], int rank, int row0, int col0,
    ScaleOfRow A_scale) {
  const int g = lane_id() / 4;  // fragment coordinate, see mma.cuh
  if constexpr (SPLITS > 1) {
    constexpr int AT_ONCE = merged_at_once(MMA_COLS, FRAGMENTS);
    merge_parts<AT_ONCE>(
        partial, rank, thread_id(),
        [&](int f, int i) {
          return fragment_element(f, i, [&](int tile, int half, int e) {
            const int n = tile * HALVES + half;
            return dot[n / MMA_COLS][n % MMA_COLS][e];
          });
        },
        [&](int f, const Vec<int32_t, 4>(&sums)[AT_ONCE]) {
          const int row = row0 + f / MMA_COLS * 16 + g;
          const int col = col0 + f % MMA_COLS / HALVES * 8;
          constexpr int TILES = merged_tiles(AT_ONCE);
          ColumnScales<TILES> B_scale;
          load_column_scales<TILES>(p, col, B_scale);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (has_rows<AT_ONCE>(f, h))
              store_sums<TILES>(
                  p, row + h * 8, col, A_scale(row + h * 8), B_scale,
                  [&](int n, int j) { return merged_sum(sums, h, n, j); });
        });
  } else {
    constexpr int TILES = MMA_COLS / HALVES;
    ColumnScales<TILES> B_scale;
    load_column_scales<TILES>(p, col0, B_scale);
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row0 + r * 16 + g + h * 8;
        store_sums<TILES>(p, row, col0, A_scale(row), B_scale, [&](int n, int j) {
          return of_column(dot[r], n, 2 * h + j);
        });
      }
  }
}
