// step_scores.cuh -- scores of a step in the layout of wgmma: integers of Q K^T, and one factor for
// the keys that share a scale. Integer i belongs to the lane's first row, or the row 8 further. Its
// key in the step is i / 4 * 8 + lane % 4 * 2 + i % 2.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/score/score.cuh"

// Keys that share a scale, within a step.
constexpr int SCALE_KEYS = greatest_common_divisor(GROUP_KV, BLOCK_KV);
constexpr int SCALES = BLOCK_KV / SCALE_KEYS;  // per step

static_assert(
    GROUP_Q >= 1 && GROUP_KV >= 1 && GROUP_KV % 16 == 0,
    "fa_int8 needs GROUP_Q and GROUP_KV, the rows per scale, the latter a multiple of 16");

// The scales of a step whose first key is kv0. A step that may be without keys takes an arbitrary
// scale.
__device__ __forceinline__ void load_scales(
    float (&scale)[SCALES], const float* K_scale, int kv0, int len_kv) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
    scale[j] = K_scale[uint32_t(min(kv0 + j * SCALE_KEYS, max(len_kv - 1, 0))) / GROUP_KV];
}
// The producer loads the scales a step or more ahead, and stores them beside K. Loaded by a
// consumer, they would delay every product of the step.
__device__ __forceinline__ void copy_scales(float (&to)[SCALES], const float (&from)[SCALES]) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j) to[j] = from[j];
}

// The number that integer 1 of Q K^T stands for, by the keys that share a scale and by row.
using Factors = float[SCALES][2];
constexpr int PART = SCALE_KEYS / 2;  // scores that share a factor, of two rows

// The factors of a step, from the factors of this lane's two rows and the scales of its keys.
__device__ __forceinline__ void make_factors(
    Factors& factor, const float (&Q_factor)[2], const float (&K_scale)[SCALES]) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[j][h] = Q_factor[h] * K_scale[j];  // R3
}

// The largest integer of each row among the keys that share a scale, number `part` of the step's;
// NO_KEY if all are masked. Two comparisons of integers are one instruction, and a product with a
// factor keeps their order.
constexpr int NO_KEY = -0x7fffffff - 1;  // less than any integer of Q K^T
template <bool MASKED, typename Mask>
__device__ __forceinline__ void largest_dots(
    int (&largest)[2], const int32_t (&dot)[BLOCK_KV / 2], const Mask& mask, int part) {
  auto admitted_dot = [&](int i) { return !MASKED || mask.admits(i) ? dot[i] : NO_KEY; };
#pragma unroll
  for (int i = 0; i < PART; i += 2) {
    const int at = part * PART + i, pair = max(admitted_dot(at), admitted_dot(at + 1));
    int& x = largest[i / 2 % 2];
    x = i < 4 ? pair : max(pair, x);
  }
}
