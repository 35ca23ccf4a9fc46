// gemm_mma.cuh -- shared by the portable INT8 matrix products: a warp's part of a tile, loads and
// products of slices of rows. A slice has 128 bytes of each row.
#pragma once

#include "prims/config.cuh"
#include "prims/codes/gemm.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"
#include "prims/io/tile_io.cuh"

constexpr int CHUNKS = SLICE / 16;                   // 16-byte chunks per row
constexpr int WARP_M = BLOCK_M < 64 ? BLOCK_M : 64;  // rows of C per warp
constexpr int WARPS_M = BLOCK_M / WARP_M;
constexpr int WARPS_N = NUM_WARPS / WARPS_M;
constexpr int WARP_N = BLOCK_N / (WARPS_N > 0 ? WARPS_N : 1);  // columns of C per warp
constexpr int MMA_ROWS = WARP_M / 16;                          // row tiles of 16 per warp
constexpr int MMA_COLS = WARP_N / 8;                           // column tiles of 8 per warp
constexpr int FRAGMENTS = MMA_ROWS * MMA_COLS;                 // tiles of 16 x 8 per warp

static_assert(
    WARP_M % 16 == 0 && WARPS_M * WARP_M == BLOCK_M,
    "BLOCK_M must be a multiple of 16, past 64 of 64: the rows of a warp");
static_assert(
    WARPS_N >= 1 && WARPS_N * WARPS_M == NUM_WARPS && WARPS_N * WARP_N == BLOCK_N,
    "NUM_WARPS must be one for every 64 rows of BLOCK_M, or a multiple that divides BLOCK_N");
static_assert(WARP_N % 16 == 0, "a warp must have a multiple of 16 columns, those of an ldmatrix");
static_assert(
    NUM_STAGES >= 2, "NUM_STAGES must be at least 2: the next slice arrives during this one");

// rows [ROWS, SLICE] of bytes -> swizzled shared, asynchronously if the access is wide enough for
// cp.async; elements past the end become zero. OF_HALVES: 8 rows of the first half of B alternate
// with 8 rows of the second, half_stride bytes further. So a lane gets both sums of a column of C
// in adjacent tiles.
template <int ROWS, bool OF_HALVES = false>
__device__ __forceinline__ void load_slice(
    int8_t* shared, const int8_t* global, int64_t stride, int rows_valid, int bytes_valid,
    int64_t half_stride = 0) {
  constexpr int VECS = SLICE / ACCESS_BYTES;  // accesses per row
#pragma unroll(ACCESS_BYTES == 16 ? ceil_div(ROWS * VECS, NUM_THREADS) : 1)
  for (int pass = 0; pass < ROWS * VECS; pass += NUM_THREADS) {
    const int i = pass + thread_id(), row = i / VECS, byte = i % VECS * ACCESS_BYTES;
    if (ROWS * VECS % NUM_THREADS != 0 && i >= ROWS * VECS) break;
    const int from = OF_HALVES ? row / 16 * 8 + row % 8 : row;
    const bool valid = from < rows_valid && byte < bytes_valid;
    const int8_t* source = global + from * stride + byte;  // [ACCESS_BYTES]
    if (OF_HALVES && row / 8 % 2 == 1) source += half_stride;
    int8_t* target = swizzled<CHUNKS>(shared, row, byte / 16) + byte % 16;  // [ACCESS_BYTES]
    if constexpr (ACCESS_BYTES >= 4) {
      cp_async<ACCESS_BYTES>(target, source, valid);
    } else {  // too narrow for cp.async: an ordinary copy, ordered by the barrier that follows
      Vec<int8_t, ACCESS_BYTES> x = {};
      if (valid) x = *reinterpret_cast<const Vec<int8_t, ACCESS_BYTES>*>(source);
      *reinterpret_cast<Vec<int8_t, ACCESS_BYTES>*>(target) = x;
    }
  }
}

// Element i of a lane's part of tile n of C: its sum, or the sums of both halves.
template <typename Sum>
__device__ __forceinline__ auto of_column(const Sum (&sums)[MMA_COLS][4], int n, int i) {
  if constexpr (GLU) {
    return Halves<Sum>{sums[2 * n][i], sums[2 * n + 1][i]};
  } else {
    return sums[n][i];
  }
}

// A slice of A times a slice of B. Every 32 bytes of a row are one step of an mma. A tile of 16 x 8
// is added by multiply(row tile, column tile, A_frag, b0, b1).
template <typename Multiply>
__device__ __forceinline__ void multiply_slice(
    uint32_t A_slice, uint32_t B_slice, Multiply multiply) {
#pragma unroll
  for (int k = 0; k < SLICE / 32; ++k) {
    uint32_t A_frag[MMA_ROWS][4];
#pragma unroll
    for (int r = 0; r < MMA_ROWS; ++r)
      ldmatrix_x4(A_frag[r], swizzled_from<CHUNKS>(A_slice, r * 16, 2 * k));
#pragma unroll
    for (int n = 0; n < MMA_COLS; n += 2) {
      uint32_t B_frag[4];  // two column tiles, two halves of k
      ldmatrix_x4(B_frag, swizzled_from<CHUNKS>(B_slice, n * 8, 2 * k));
#pragma unroll
      for (int r = 0; r < MMA_ROWS; ++r) {
        multiply(r, n, A_frag[r], B_frag[0], B_frag[1]);
        multiply(r, n + 1, A_frag[r], B_frag[2], B_frag[3]);
      }
    }
  }
}
