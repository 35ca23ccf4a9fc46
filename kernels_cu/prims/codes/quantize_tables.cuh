// quantize_tables.cuh -- rotation tables by column, copied to shared memory while rows arrive.
#pragma once

#include "prims/codes/quantize_rows.cuh"
#include "prims/io/tile_io.cuh"

// Dynamic shared memory of a block, for one piece of work after the other.
__device__ __forceinline__ unsigned char* dynamic_space() {
  extern __shared__ __align__(16) unsigned char space[];
  return space;
}

// Whether tables go through it: if heads share blocks, and if a multiprocessor has space for two
// blocks. Compute capabilities 8.6, 8.9 and 12 have 100 KB.
constexpr bool TABLES_IN_SHARED = false && SUMS_FIRST && HEADS_K > 1 && __CUDA_ARCH__ != 860 &&
                                  __CUDA_ARCH__ != 890 && __CUDA_ARCH__ < 1200;

// Rows of both tables for PASSES passes. A warp copies the rows that its lanes need, 16 bytes a
// lane and side by side, and waits for no other warp.
template <int PASSES>
struct SharedTables {
  static constexpr int FOURS = ceil_div(HEAD_DIM, 4);   // of a row of a table
  static constexpr int WARP_ROWS = WARP_SIZE / LANES;   // of a warp in a pass
  Vec<float, 4> x[PASSES * ROWS_PER_PASS * 2 * FOURS];  // [rows, 2, FOURS]: cosines, sines

  // NOTE: lanes read 16 bytes that lie 64 bytes apart. The swizzle spreads them over the banks.
  __device__ __forceinline__ Vec<float, 4>& four(int table, int row, int col) {
    const int nth = uint32_t(col) / 4;
    return x[(row * 2 + table) * FOURS + (nth ^ nth / 8 % 4)];
  }
  // Requests what the rows of this warp in a pass need: row row_at(i) of the tables for row i.
  template <typename RowAt>
  __device__ __forceinline__ void request(const Preparation& how, int pass, RowAt row_at) {
    const int row0 = pass * ROWS_PER_PASS + warp_id() * WARP_ROWS;
#pragma unroll
    for (int i0 = 0; i0 < WARP_ROWS * 2 * FOURS; i0 += WARP_SIZE) {
      const int i = i0 + lane_id();
      const int row = row0 + i / (2 * FOURS), table = i / FOURS % 2, col = i % FOURS * 4;
      const float* source = how.cos;
      if (table == 1) source = how.sin;
      cp_async<16>(&four(table, row, col), source + int64_t(row_at(row)) * ROPE_TABLE + col, true);
    }
  }
  // Waits for all that this warp has requested.
  __device__ __forceinline__ void await() const {
    cp_async_wait_group<0>();
    __syncwarp();  // the copies of all lanes have arrived
  }
  // Rotates a lane's part of the row of a pass.
  __device__ __forceinline__ void turn(PreparedRow& x, int pass) {
    constexpr int PAIRS = 4;  // of a step
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; ++i)
#pragma unroll
      for (int pair = 0; pair < ROPE_PAIRS; pair += PAIRS) {
        RopeNumbers<PAIRS> cos, sin;
#pragma unroll
        for (int a = 0; a < 2; ++a) {
          const int col = RopePairs<float, PAIRS>::column(a, PreparedRow::pair0(i) + pair);
          cos.x[a] = four(0, row_of(pass), col), sin.x[a] = four(1, row_of(pass), col);
        }
        x.of[i].template turn<PAIRS>(pair, cos, sin);
      }
  }
};
