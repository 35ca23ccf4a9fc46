// key_parts.cuh -- the keys of a step by the scale that they share, in fa_int8 with V in 16 bits.
#pragma once

#include "prims/config.cuh"

// The exponent's fma has one factor for a row and a part of the keys: whole key tiles of 8 that
// share a scale. With finer scales, S3 applies the scale of each key, and there is one part.
constexpr int SCALE_KEYS = greatest_common_divisor(GROUP_KV, BLOCK_KV);
constexpr bool BY_KEY = SCALE_KEYS % 8 != 0;
constexpr int PARTS = BY_KEY ? 1 : BLOCK_KV / SCALE_KEYS;
constexpr int SCALES = BY_KEY ? BLOCK_KV : PARTS;  // of K, per step
__device__ __forceinline__ constexpr int part_of(int key) { return BY_KEY ? 0 : key / SCALE_KEYS; }

// A NaN scale has reached the scores of its part, except masked keys, whose score stays -inf.
__device__ __forceinline__ void spare_masked(float (&part_scale)[PARTS]) {
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (part_scale[i] != part_scale[i]) part_scale[i] = 1.0f;
}
