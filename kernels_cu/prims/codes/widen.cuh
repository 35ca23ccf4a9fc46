// widen.cuh -- INT8 codes as 16-bit numbers, which hold every code exactly: float16 has 11 bits,
// bfloat16 has 8.
#pragma once

#include "prims/config.cuh"
#include "prims/instructions/mma.cuh"

// Four codes, the first lowest, as two pairs of `T`. With conversions of integers, fa_int8 spilled
// registers.
template <typename T>
__device__ __forceinline__ void widen_codes(uint32_t (&pairs)[2], uint32_t codes) {
  constexpr uint32_t HIGH_BYTES = 0x4B000000u;  // of the floats 2^23 + 128 + c
  float x[4];
  codes ^= 0x80808080u;  // bytes c + 128, their low ones
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = __uint_as_float(__byte_perm(codes, HIGH_BYTES, 0x7650 + i)) - 0x1.0001p23f;  // exact
#pragma unroll
  for (int i = 0; i < 2; ++i) pairs[i] = pack_rn<T>(x[2 * i], x[2 * i + 1]);  // exact
}
