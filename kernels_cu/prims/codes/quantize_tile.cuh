// quantize_tile.cuh -- rows of 16/32-bit numbers to INT8 codes in shared memory, in whole groups.
// Scales and codes equal the results of quantize.cu to the bit.
#pragma once

#include "prims/config.cuh"
#include "prims/codes/quant.cuh"
#include "prims/io/swizzle.cuh"
#include "prims/instructions/warp.cuh"

// Parameters for quantising a tile of ROWS rows, GROUP of them to a scale.
template <int ROWS, int GROUP>
struct TileGroups {
  uint32_t reach[ROWS / GROUP * SIDES];
  Coding coding[ROWS / GROUP];
};

// The whole block takes part. A row is read twice, the second time from a cache. Keeping it would
// take the registers of O. Rows from rows_valid on and columns from HEAD_DIM on get code 0. NOTE:
// `groups` must be free before; codes and scales are visible after the next barrier.
template <int COLS_PAD, int ROWS, int GROUP>
__device__ __forceinline__ void quantize_tile(
    int8_t* codes,  // [ROWS, COLS_PAD], swizzled
    float* scale,   // [ROWS]
    int2* zeros,    // [ROWS], zero point and sum of the codes; not written unless ZERO_POINTS
    TileGroups<ROWS, GROUP>& groups, const elem_t* X, int64_t stride, int rows_valid) {
  constexpr int ACCESSES = HEAD_DIM / VEC;                                               // per row
  constexpr int LANES = power_of_two_from(ACCESSES < WARP_SIZE ? ACCESSES : WARP_SIZE);  // per row
  constexpr int PASS_ROWS = NUM_THREADS / LANES;
  const int lane = thread_id() % LANES;
  const elem_t* X_lane = X + lane * VEC;
  for (int i = thread_id(); i < ROWS / GROUP * SIDES; i += NUM_THREADS) groups.reach[i] = 0;
  __syncthreads();  // the zeros are there before a row adds its maximum
#pragma unroll 1
  for (int row = thread_id() / LANES; row < round_up(ROWS, PASS_ROWS); row += PASS_ROWS) {
    const bool valid = row < min(ROWS, rows_valid);
    Reach reach = {};
#pragma unroll
    for (int a = 0; a < ACCESSES; a += LANES) {
      if (!valid || a + lane >= ACCESSES) continue;
      const auto x = *reinterpret_cast<const Words<elem_t, VEC>*>(X_lane + row * stride + a * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) reach.admit(x.element(j));
    }
    reach = shfl_max<LANES>(reach);
    if (lane == 0 && valid)
#pragma unroll
      for (int i = 0; i < SIDES; ++i)
        atomicMax(&groups.reach[row / GROUP * SIDES + i], reach.bits[i]);
  }
  __syncthreads();  // every row of a group has added its maximum before the scale is made of it
  for (int group = thread_id(); group < ROWS / GROUP; group += NUM_THREADS) {
    const float of_group = groups.coding[group].make(&groups.reach[group * SIDES]);  // R1
    for (int i = 0; i < GROUP; ++i) scale[group * GROUP + i] = of_group;
  }
  __syncthreads();  // the inverses are there before a row is coded with them
#pragma unroll 1
  for (int row = thread_id() / LANES; row < round_up(ROWS, PASS_ROWS); row += PASS_ROWS) {
    const bool valid = row < min(ROWS, rows_valid);
    const Coding coding = groups.coding[min(row, ROWS - 1) / GROUP];
    int sum = 0;
#pragma unroll
    for (int a = 0; a < COLS_PAD / VEC; a += LANES) {
      const int col = (a + lane) * VEC;
      if (row >= ROWS || col >= COLS_PAD) continue;
      int c[VEC] = {};
      if (valid && col < HEAD_DIM) {
        const auto x =
            *reinterpret_cast<const Words<elem_t, VEC>*>(X_lane + row * stride + a * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum += c[j] = coding.code(x.element(j));  // R1
      }
      store_s8(swizzled<COLS_PAD / 16>(codes, row, col / 16) + col % 16, c);
    }
    if constexpr (ZERO_POINTS) {
      sum = shfl_sum<LANES>(sum);
      if (lane == 0 && row < ROWS) zeros[row] = make_int2(coding.zero, sum);
    }
  }
}
