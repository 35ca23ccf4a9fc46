// p_codes.cuh -- P as 8-bit codes, and their product with codes of V.
// A code stands for so many P_STEP of the largest exponential of its tile, which is 1: none is ever
// past the code of 1. Integers go with INT8 codes of V, e4m3 with e4m3.
#pragma once

#include "prims/config.cuh"
#include "prims/mma.cuh"

static_assert(P_TYPE != PType::NONE, "codes of P need P_TYPE");

// The code of p = 1, and the p of code 1.
constexpr float P_CODE_ONE = P_TYPE == PType::U8 ? 255.0f : P_TYPE == PType::S8 ? 127.0f : E4M3_MAX;
constexpr float P_STEP = 1.0f / P_CODE_ONE;

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

// R5: the codes of two numbers from 0 to 1, ties to even, x in the low byte and y in the next.
__device__ __forceinline__ uint32_t pack_p_codes(float x, float y) {
  if constexpr (P_TYPE == PType::E4M3) return pack_e4m3(x * P_CODE_ONE, y * P_CODE_ONE);
  // Added to 2^23 a number is rounded to an integer, which the low bits then are.
  const uint32_t low = __float_as_uint(fmaf(x, P_CODE_ONE, 0x1p23f));
  const uint32_t high = __float_as_uint(fmaf(y, P_CODE_ONE, 0x1p23f));
  return __byte_perm(low, high, 0x0040);
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
