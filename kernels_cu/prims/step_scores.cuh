// step_scores.cuh -- scores of a step as wgmma leaves them in a lane: integers of Q K^T, of which i
// belongs to the first row of the lane, or 8 further, and to key i / 4 * 8 + lane % 4 * 2 + i % 2
// of the step; and one factor for the keys that share a scale.
#pragma once

#include "prims/config.cuh"
#include "prims/params.cuh"
#include "prims/score.cuh"

// Keys that share a scale, within a step.
constexpr int SCALE_KEYS = greatest_common_divisor(GROUP_KV, BLOCK_KV);
constexpr int SCALES = BLOCK_KV / SCALE_KEYS;  // per step

static_assert(
    GROUP_Q >= 1 && GROUP_KV >= 1 && GROUP_KV % 16 == 0,
    "fa_int8 needs GROUP_Q and GROUP_KV, the rows per scale, the latter a multiple of 16");

// The scales of a step whose first key is kv0. One that may be without keys gets any scale then.
__device__ __forceinline__ void load_scales(
    float (&scale)[SCALES], const float* K_scale, int kv0, int len_kv) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
    scale[j] = K_scale[uint32_t(min(kv0 + j * SCALE_KEYS, max(len_kv - 1, 0))) / GROUP_KV];
}
// The producer loads them, a step or more ahead, and leaves them beside K; in a consumer every
// product of the step would wait for them.
__device__ __forceinline__ void copy_scales(float (&to)[SCALES], const float (&from)[SCALES]) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j) to[j] = from[j];
}

// What one integer of Q K^T stands for, by the keys that share a scale and by row.
using Factors = float[SCALES][2];
constexpr int PART = SCALE_KEYS / 2;  // scores that share a factor, of two rows

// The factors of a step, from those of this lane's two rows and the scales of its keys.
__device__ __forceinline__ void make_factors(
    Factors& factor, const float (&Q_factor)[2], const float (&K_scale)[SCALES]) {
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[j][h] = Q_factor[h] * K_scale[j];  // R3
}

// The largest integers of each row, NO_KEY where all are masked: among integers, two comparisons
// are one instruction, and products with a factor keep their order.
constexpr int NO_KEY = -0x7fffffff - 1;  // less than any integer of Q K^T
template <bool MASKED>
__device__ __forceinline__ void largest_dots(
    const AttnParams& p, const int32_t (&dot)[BLOCK_KV / 2], int (&largest)[SCALES][2], int q,
    int kv0) {
  const ScoreMask mask(p, q, kv0);
  auto admitted_dot = [&](int i) { return !MASKED || mask.admits(i) ? dot[i] : NO_KEY; };
#pragma unroll
  for (int i = 0; i < BLOCK_KV / 2; i += 2) {
    int& x = largest[i / PART][i / 2 % 2];
    const int pair = max(admitted_dot(i), admitted_dot(i + 1));
    x = i % PART < 4 ? pair : max(pair, x);
  }
}

// The largest scores of a lane's two rows, rounded down for an M that is a whole number below them,
// -inf where all are masked. Keys that share a scale and are all masked get 0 for a factor: a scale
// that is NaN is nothing to rows that do not attend.
template <bool MASKED>
__device__ __forceinline__ void largest_scores(
    const AttnParams& p, const int32_t (&dot)[BLOCK_KV / 2], Factors& factor, float (&m)[2], int q,
    int kv0) {
  int largest[SCALES][2];
  largest_dots<MASKED>(p, dot, largest, q, kv0);
  m[0] = m[1] = NEG_INF;
#pragma unroll
  for (int j = 0; j < SCALES; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (MASKED && largest[j][h] == NO_KEY)
        factor[j][h] = 0.0f;
      else
        m[h] = fmaxf(m[h], __fmul_rd(float(largest[j][h]), factor[j][h]));  // R3
    }
}
