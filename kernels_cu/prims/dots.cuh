// dots.cuh -- products of codes of Q and K as mma.sync leaves them, and what they stand for.
//
// They start at the bits of 1.5 * 2^23 and not at 0. A float of that size counts in ones, and
// |Q K^T| <= 2^14 * 256 = 2^22: so the bits of the sum are those of 1.5 * 2^23 plus the product,
// and no instruction converts it. exp2's argument takes the 1.5 * 2^23 off, with M.
#pragma once

#include "prims/config.cuh"
#include "prims/exp2.cuh"
#include "prims/score.cuh"

// Keys that share a scale, within a step. The exponent's fma has one factor for the keys of a part,
// whole key tiles of 8. Of finer scales each key takes its own, in S3.
constexpr int SCALE_KEYS = greatest_common_divisor(GROUP_KV, BLOCK_KV);
constexpr bool BY_KEY = SCALE_KEYS % 8 != 0;
constexpr int PARTS = BY_KEY ? 1 : BLOCK_KV / SCALE_KEYS;
constexpr int SCALES = BY_KEY ? BLOCK_KV : PARTS;  // of K, per step
__device__ __forceinline__ constexpr int part_of(int key) { return BY_KEY ? 0 : key / SCALE_KEYS; }

// NOTE: less its zero points a product may be larger, and they are integers.
constexpr bool AS_FLOAT = !BY_KEY && !ZERO_POINTS;
constexpr int32_t DOT_START = AS_FLOAT ? 0x4b400000 : 0;
constexpr float DOT_ZERO = AS_FLOAT ? WHOLE : 0.0f;  // what a product of 0 is

__device__ __forceinline__ float dot_to_float(int32_t dot) {
  return AS_FLOAT ? __int_as_float(dot) : float(dot);
}

// The factor of a row and of a part, from both scales. DOT_ZERO times it is exact, and so is that
// plus a whole M: the factor has 22 bits. Never 0, so that -inf stays what it is: masked.
__device__ __forceinline__ float dot_factor(float row, float part) {
  if constexpr (!AS_FLOAT) return row_factor(row, part);
  return __int_as_float((__float_as_int(row * part) & ~3) | 4);  // R3
}
