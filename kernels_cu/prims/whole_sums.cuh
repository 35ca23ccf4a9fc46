// whole_sums.cuh -- sums of products of codes, whole numbers, become floats by an addition.
// Conversions have half its rate, and that of ex2 in compute capability 8.0. A sum that starts at
// the bits of WHOLE is, read as a float, WHOLE plus the sum: the addition that takes WHOLE off
// again is exact, so that its result is that of a conversion, bit by bit. Of codes less zero points
// sums are larger: those start at 0 and are converted.
#pragma once

#include "prims/config.cuh"
#include "prims/exp2.cuh"

static_assert(
    HEAD_DIM * 128 * 128 <= 1 << 22,
    "HEAD_DIM must be 256 or less: WHOLE plus a product of two rows of codes is exact up to 2^22");

constexpr int32_t SUM_START = ZERO_POINTS ? 0 : 0x4b400000;  // the bits of WHOLE

// S3: the accumulators before the first product.
template <int ROWS, int COLS>
__device__ __forceinline__ void start_sums(int32_t (&sum)[ROWS][COLS][4]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][n][i] = SUM_START;
}

// And one of them after the last. Until then they compare as the sums do.
__device__ __forceinline__ float sum_to_float(int32_t sum) {
  return ZERO_POINTS ? float(sum) : __int_as_float(sum) - WHOLE;
}
