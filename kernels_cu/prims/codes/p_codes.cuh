// p_codes.cuh -- P as 8-bit codes, and their product with codes of V.
// A weight is an exponential in units of code 1. The largest weight of a tile is the largest code,
// and no weight exceeds it. Integer codes multiply INT8 codes of V, e4m3 multiplies e4m3.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"
#include "prims/score/online_softmax.cuh"
#include "prims/instructions/warp.cuh"

static_assert(P_TYPE != PType::NONE && P_TYPE != PType::BITS_16, "codes of P need P_TYPE");

// The largest code, and its logarithm.
constexpr float P_CODE_ONE = P_TYPE == PType::U8 ? 255.0f : P_TYPE == PType::S8 ? 127.0f : E4M3_MAX;
constexpr float P_CODE_LOG2 = P_TYPE == PType::U8   ? 7.99435343686f
                              : P_TYPE == PType::S8 ? 6.98868468677f
                                                    : 8.80735492206f;

// M of a tile, and the exponent of 2 of a weight. M is in the unit of code 1, rounded up, so that
// no weight exceeds the largest code. With NATURAL_SCORES M is the largest score, as elsewhere. If
// scores are so large that M has no digits below 16, the largest one would weigh too little. With
// saturated codes it weighs at least 1, and so does every score that M cannot distinguish from it.
#if __CUDA_ARCH__ == 800  // has no instruction that packs codes
constexpr bool SATURATES = false;
#else
constexpr bool SATURATES = P_TYPE != PType::E4M3;  // whose l is of weights, which do not
#endif
__device__ __forceinline__ float M_of_codes(float m, float to_log2) {
  if (NATURAL_SCORES) return m;
  const float M = __fmaf_ru(m, to_log2, -P_CODE_LOG2);  // R4
  return SATURATES ? fminf(M, __fmul_rd(m, to_log2)) : M;
}
__device__ __forceinline__ float code_exponent(float S, float to_log2, float minus_M) {
  return NATURAL_SCORES ? fmaf(S + minus_M, LOG2E, P_CODE_LOG2) : fmaf(S, to_log2, minus_M);
}

// Converts l from code units to weights relative to 2^M.
constexpr float CODE_UNIT = NATURAL_SCORES ? 1.0f / P_CODE_ONE : 1.0f;

// The divisor of O, l, is the exact sum of codes, four at a time, if they are integers. For 8-bit
// floats it is the sum of weights. The lse always uses the sum of weights, unless it is infinite
// because weights saturate as codes.
constexpr bool SUMS_CODES = P_TYPE != PType::E4M3;
constexpr bool SUMS_WEIGHTS = LSE || !SUMS_CODES;

static_assert(
    P_TYPE == PType::E4M3 || P_CODE_ONE * 256 * BLOCK_KV <= 0x1p24f,
    "BLOCK_KV must leave the sum of a tile below 2^24: it converts to float exactly");

template <PType TYPE>
struct PSum {  // of products of codes
  using type = int32_t;
};
template <>
struct PSum<PType::E4M3> {
  using type = float;
};
using p_sum_t = PSum<P_TYPE>::type;

// R5: the codes of four weights, ties to even; the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_p_codes(float x, float y, float z, float w) {
  if constexpr (P_TYPE == PType::E4M3) return pack_e4m3(x, y, z, w);
#if __CUDA_ARCH__ == 800  // has no instruction for a pair, and integers only at the rate of exp2
  // Adding 2^23 rounds a number to an integer, which the low bits then hold.
  auto code = [](float x) { return __float_as_uint(x + 0x1p23f); };
  return __byte_perm(
      __byte_perm(code(x), code(y), 0x0040), __byte_perm(code(z), code(w), 0x0040), 0x5410);
#else
  return P_TYPE == PType::U8 ? pack_u8(x, y, z, w) : pack_s8(x, y, z, w);
#endif
}

// A lane's largest number of row g, or of row g + 8 if h = 1. It is taken among scores, with NaN
// above all numbers, or among the integers from which scores are computed.
template <int N>
__device__ __forceinline__ float largest_of_row(const float (&S)[N][4], int h) {
  float largest = NEG_INF;
#pragma unroll
  for (int n = 0; n < N; ++n) largest = max_nan(largest, max_nan(S[n][2 * h], S[n][2 * h + 1]));
  return largest;
}
template <int N>
__device__ __forceinline__ int32_t largest_of_row(const int32_t (&dot)[N][4], int h) {
  int32_t largest = dot[0][2 * h];
#pragma unroll
  for (int n = 0; n < N; ++n) largest = max(max(dot[n][2 * h], dot[n][2 * h + 1]), largest);
  return largest;
}

// Register i of P's fragments: the codes of a lane's scores of one row and two key tiles, in the
// unit of M. Their weights are added to l. Unless CAPPED, weights may exceed the largest code by
// less than 1, and saturate.
template <bool CAPPED = true, int N>
__device__ __forceinline__ uint32_t
weigh_codes(const float (&S)[N][4], int i, float to_log2, float M, float& l) {
  float x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float score = S[i / 2 * 2 + j / 2][i % 2 * 2 + j % 2];
    x[j] = ex2_approx_ftz(code_exponent(score, to_log2, -M));  // R4
    if (SUMS_WEIGHTS) l += x[j];                               // R6
#if __CUDA_ARCH__ == 800  // elsewhere the instruction sees to it
    if (!CAPPED) x[j] = fminf(x[j], P_CODE_ONE);
#endif
  }
  return pack_p_codes(x[0], x[1], x[2], x[3]);  // R5
}

// C [16, 8] += P [16, 32] V [32, 8].
__device__ __forceinline__ void mma_p_codes(
    int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (P_TYPE == PType::U8)
    mma_m16n8k32_u8(c, a, b0, b1);
  else
    mma_m16n8k32_s8(c, a, b0, b1);
}
__device__ __forceinline__ void mma_p_codes(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k32_e4m3(c, a, b0, b1);
}
