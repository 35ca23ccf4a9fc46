// swizzle.cuh -- address of a 16-byte chunk of a row in shared memory.
//
// ldmatrix reads the same chunk of 8 consecutive rows at once. Rows of CHUNKS chunks start CHUNKS
// mod 8 bank groups apart (a bank group is 4 of the 32 banks, 16 bytes). With G = gcd(CHUNKS, 8), G
// of the 8 rows share a group. Xor-ing the chunk with the number of rows that have already taken
// the group spreads the 8 reads over all 8 groups. CHUNKS must be even; with G = 1 the rows would
// already be spread.
#pragma once

#include "prims/base.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/instructions/warp.cuh"

template <int CHUNKS>
__device__ __forceinline__ int swizzle(int row, int chunk) {  // -> index in 16-byte chunks
  constexpr int G = greatest_common_divisor(CHUNKS, 8);
  static_assert(G >= 2, "a swizzled row must hold an even number of 16-byte chunks");
  return row * CHUNKS + (chunk ^ ((row / (8 / G)) % G));
}

// The chunk itself, in a tile of rows of CHUNKS chunks.
template <int CHUNKS, typename T>
__device__ __forceinline__ T* swizzled(T* tile, int row, int chunk) {
  return tile + swizzle<CHUNKS>(row, chunk) * (16 / int(sizeof(T)));
}

// From the shared address of a chunk in column 0 or 1 to the chunk `rows` and `chunks` further on.
// The tile begins at a multiple of 128 bytes. `rows` is a multiple of 8, the period of the swizzle,
// and `chunks` is even. Both are known at compile time, so one xor, or an immediate of the load,
// moves a lane from one ldmatrix to the next.
template <int CHUNKS>
__device__ __forceinline__ uint32_t swizzled_from(uint32_t address, int rows, int chunks) {
  constexpr int G = greatest_common_divisor(CHUNKS, 8);
  return (address ^ (chunks % G * 16)) + (rows * CHUNKS + chunks / G * G) * 16;
}

// Its shared address. A kernel computes once, not in each step, a lane's address for the first
// ldmatrix_x4 of an operand. swizzled_from() continues from there. For fragment A, or with
// ldmatrix_x4_trans two fragments B, these are 16 rows of two chunks.
template <int CHUNKS, typename T>
__device__ __forceinline__ uint32_t chunk_address(T* tile, int row, int chunk) {
  return shared_address(swizzled<CHUNKS>(tile, row, chunk));
}
// For two fragments B of an operand stored by columns, like K: both chunks of 8 keys come before
// both chunks of the next 8.
template <int CHUNKS, typename T>
__device__ __forceinline__ uint32_t key_address(T* tile) {
  return chunk_address<CHUNKS>(tile, lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}
