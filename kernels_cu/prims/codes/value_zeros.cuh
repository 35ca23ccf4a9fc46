// value_zeros.cuh -- zero points of V as INT8 codes. Let v = s (c - z), and p the codes of P of a
// tile. Then sum p (c - z) = sum p c - z sum p. These are whole numbers below 2^24, and sum p is
// the product with a column of ones. A kernel whose V has no zero points compiles all of this to
// nothing.
#pragma once

#include "prims/config.cuh"
#include "prims/codes/p_codes.cuh"
#include "prims/io/tile_io.cuh"
#include "prims/codes/zero_points.cuh"

constexpr bool VALUE_ZERO_POINTS = ZERO_POINTS && P_TYPE != PType::E4M3;
constexpr int VALUE_COLS = round_up(HEAD_DIM, 16);
constexpr int VALUE_ZEROS_BYTES =
    VALUE_ZERO_POINTS ? NUM_STAGES * VALUE_COLS * sizeof(int32_t) : 0;  // behind ZeroTiles

struct ValueZeros {
  int32_t* tiles;         // [NUM_STAGES, VALUE_COLS], shared
  const int32_t* V_zero;  // [ceil(len_kv / GROUP_V), HEAD_DIM]

  __device__ __forceinline__ ValueZeros(void* behind, const int32_t* V_zero)
      : tiles(static_cast<int32_t*>(behind)), V_zero(V_zero) {}

  // S2, with the copies of the stage: zero points of the tile of keys from kv0 on.
  __device__ __forceinline__ void load(int stage, int kv0) const {
    if constexpr (VALUE_ZERO_POINTS)
      for (int col = thread_id(); col < VALUE_COLS; col += NUM_THREADS)
        cp_async<4>(
            tiles + stage * VALUE_COLS + col,
            V_zero + kv0 / GROUP_V * HEAD_DIM + min(col, HEAD_DIM - 1), true);
  }

  // S5: zero points of columns col and col + 1, with col even.
  __device__ __forceinline__ int2 pair(int stage, int col) const {
    if constexpr (VALUE_ZERO_POINTS)
      return *reinterpret_cast<const int2*>(tiles + stage * VALUE_COLS + col);
    return {};
  }
};

// S4: adds up codes of P, except 8-bit floats. This lane's sums are sum[1] for row g and sum[3] for
// row g + 8. Sums of whole rows, which multiply zero points, are sum[0] and sum[2].
template <int N>
__device__ __forceinline__ void sum_p_codes(p_sum_t (&sum)[4], const uint32_t (&P_frag)[N][4]) {
  constexpr uint32_t FOUR_ONES = 0x01010101u;
  uint32_t own[2] = {uint32_t(sum[1]), uint32_t(sum[3])};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if constexpr (VALUE_ZERO_POINTS) mma_p_codes(sum, P_frag[k], FOUR_ONES, FOUR_ONES);
    if constexpr (SUMS_CODES)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i % 2] = __dp4a(P_frag[k][i], FOUR_ONES, own[i % 2]);
  }
  sum[1] = own[0], sum[3] = own[1];
}
